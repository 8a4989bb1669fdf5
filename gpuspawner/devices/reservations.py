"""Rules for devices that are reserved for groups. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from ..core.errors import ConfigError
from ..core.text import listing
from ..leases.models import Request
from .models import Device, longest_match, model_words

SETTING = "c.GPUDevices.reserved"

NEVER, PREEMPTIBLE = "never", "preemptible"

EXAMPLE = '["vision-lab"], or {"groups": ["vision-lab"], "others": "preemptible"}'


@dataclass(frozen=True, slots=True)
class Reservation:
    """Which groups a device is reserved for; without groups, it is open to everybody."""

    groups: tuple[str, ...] = ()
    """In order."""
    lent: bool = False
    """True if preemptible runs of other members may use it while it is idle."""


OPEN = Reservation()


def check_reserved(value: Mapping[Any, Any]) -> dict[str, Reservation]:
    """Return a valid setting of reserved devices. Raises ConfigError with a sentence."""
    found = {}
    for name, wanted in value.items():
        if not isinstance(name, str) or not model_words(name):
            raise ConfigError(
                f"{name!r} in {SETTING} names no device. Write part of a model's name such as "
                "'A100', or a device's UUID."
            )
        found[name] = _reservation(name, wanted)
    return found


def _reservation(name: str, wanted: Any) -> Reservation:
    keys = wanted if isinstance(wanted, Mapping) else {"groups": wanted}
    if unknown := [key for key in keys if key not in ("groups", "others")]:
        raise ConfigError(
            f"{unknown[0]!r} in {SETTING}[{name!r}] is not known. The keys are 'groups' and "
            f"'others': {EXAMPLE}."
        )
    groups = keys.get("groups")
    if not _are_names(groups):
        raise ConfigError(f"{SETTING}[{name!r}] is not a list of groups. Write {EXAMPLE}.")
    if not groups:
        raise ConfigError(
            f"{SETTING}[{name!r}] names no group, so nobody could use the device. Write "
            f"{EXAMPLE}; to take a device out of service, drain it."
        )
    others = keys.get("others", NEVER)
    if others not in (NEVER, PREEMPTIBLE):
        raise ConfigError(
            f"{others!r} is not what others may do with devices reserved by {SETTING}[{name!r}]. "
            f"Write {NEVER!r}, or {PREEMPTIBLE!r} to let their preemptible runs use idle devices."
        )
    return Reservation(tuple(sorted(set(groups))), others == PREEMPTIBLE)


def _are_names(groups: Any) -> TypeGuard[Collection[str]]:
    return isinstance(groups, (list, tuple)) and all(
        isinstance(each, str) and each.strip() for each in groups
    )


def reservation_of(device: Device) -> Reservation:
    """Return the reservation of a device."""
    return Reservation(device.reserved_for, device.lent)


def with_reservations(
    devices: Iterable[Device],
    reserved: Mapping[str, Reservation],
    known: Mapping[str, Reservation],
) -> tuple[Device, ...]:
    """Return the devices with their reservations.

    Args:
        devices: The devices as the driver shows them.
        reserved: What an admin wants, by model or UUID. An instance is reserved as its GPU is.
        known: Reservations that take precedence over ``reserved``, by UUID.
    """
    if not reserved and not any(each.groups for each in known.values()):
        return tuple(devices)
    found = []
    for device in devices:
        wanted = known.get(device.uuid) or _wanted(device, reserved)
        if wanted != reservation_of(device):
            device = replace(device, reserved_for=wanted.groups, lent=wanted.lent)
        found.append(device)
    return tuple(found)


def _wanted(device: Device, reserved: Mapping[str, Reservation]) -> Reservation:
    for uuid in (device.uuid, device.parent_uuid or ""):
        if uuid in reserved:
            return reserved[uuid]
    return reserved.get(longest_match(reserved, device.model) or "", OPEN)


def may_use(request: Request, device: Device) -> bool:
    """Return True if a request's member may use a device now or later."""
    if not device.reserved_for or not set(request.groups).isdisjoint(device.reserved_for):
        return True
    return request.preemptible and device.lent


def preference(reserved_for: Collection[str], groups: Collection[str]) -> int:
    """Return a key that sorts devices for a member of these groups, best first.

    Devices of their own groups go first, because the fewest others can use them; then come open
    devices, then those that other groups lend.
    """
    if not reserved_for:
        return 1
    return 2 if set(groups).isdisjoint(reserved_for) else 0


def describe_reservation(device: Device) -> str:
    """Return ``reserved for vision-lab``; empty for an open device."""
    if not device.reserved_for:
        return ""
    lent = ", lent to preemptible runs" if device.lent else ""
    return f"reserved for {named_groups([device])}{lent}"


def count_reserved(devices: Collection[Device]) -> str:
    """Return ``2 reserved for vision-lab``, without the number if all are; empty if none is."""
    reserved = [device for device in devices if device.reserved_for]
    if not reserved:
        return ""
    number = "" if len(reserved) == len(devices) else f"{len(reserved)} "
    return f"{number}reserved for {named_groups(reserved)}"


def named_groups(devices: Iterable[Device]) -> str:
    """Return the groups that devices are reserved for, such as ``vision-lab and course-ml``."""
    return listing(sorted({group for device in devices for group in device.reserved_for}))
