"""Rules for the number of slots of each device, and a share in words. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..core.errors import ConfigError
from ..core.units import format_memory
from ..leases.models import LeasedDevice
from .models import Device, DeviceStatus, longest_match, model_words

MOST_SLOTS = 100
"""The most slots of one device."""


def check_shared_devices(value: Mapping[Any, Any]) -> dict[str, int]:
    """Return a valid setting of shared devices. Raises ConfigError with a sentence."""
    for name, slots in value.items():
        if not isinstance(name, str) or not model_words(name):
            raise ConfigError(
                f"{name!r} in c.GPUDevices.shared_devices names no device. Write part of a model's "
                "name such as 'T4', or a device's UUID."
            )
        if type(slots) is not int or not 1 <= slots <= MOST_SLOTS:
            raise ConfigError(
                f"{slots!r} in c.GPUDevices.shared_devices is not a number of slots. Write from 1 "
                f"(not shared) to {MOST_SLOTS}, such as {{{name!r}: 4}}."
            )
    return dict(value)


def slots_wanted(device: Device, shared: Mapping[str, int]) -> int:
    """Return how many slots a device is to have; 1 if it is not to be shared.

    A UUID goes before a model, and the longer of two model names before the shorter.
    """
    if device.status is DeviceStatus.PARENT:
        return 1
    if device.uuid in shared:
        return shared[device.uuid]
    best = longest_match(shared, device.model)
    return shared[best] if best is not None else 1


def with_slots(
    devices: Iterable[Device],
    shared: Mapping[str, int],
    known: Mapping[str, int],
    can_change: Collection[str],
) -> tuple[Device, ...]:
    """Return the devices with their numbers of slots.

    Args:
        devices: The devices as the driver shows them.
        shared: The numbers that an admin wants, by model or UUID.
        known: The numbers that the devices have so far, by UUID.
        can_change: UUIDs of the devices whose number may change now, since nobody uses them.
    """
    found = []
    for device in devices:
        slots = known.get(device.uuid)
        if slots is None or device.uuid in can_change:
            slots = slots_wanted(device, shared)
        found.append(device if device.slots == slots else replace(device, slots=slots))
    return tuple(found)


NOT_ISOLATED = "not isolated"
"""What a member must know of every share: its memory and time are not kept apart."""


def share_label(model: str, memory_bytes: int, slots: int, held_slots: int = 1) -> str:
    """Return a share of a device as ``1/4 of NVIDIA A100-SXM4-80GB, about 20 GB``.

    Args:
        model: The device's model.
        memory_bytes: Memory of the whole device.
        slots: How many slots the device has.
        held_slots: How many of them are in the share.
    """
    memory = format_memory(memory_bytes * held_slots // slots)
    return f"{held_slots}/{slots} of {model}, about {memory}"


def shared_with(others: int) -> str:
    """Return ``shared with up to 3 others, not isolated``, for a share beside so many slots."""
    return f"shared with up to {others} other{'s' if others > 1 else ''}, {NOT_ISOLATED}"


def describe_share(device: LeasedDevice) -> str:
    """Describe the leased share of a device; empty if the whole device is leased.

    It reads ``1/4 of NVIDIA A100-SXM4-80GB, about 20 GB, shared with up to 3 others, not
    isolated``.
    """
    if not device.is_shared:
        return ""
    slots, held = device.slots, device.held_slots
    label = share_label(device.model, device.memory_bytes, slots, held)
    return f"{label}, {shared_with(slots - held)}"
