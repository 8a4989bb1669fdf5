"""Which devices suit a request, free or not. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from ..core.errors import TooMuchAsked
from ..leases.models import Request, Sharing
from .models import Device, Inventory, model_matches, model_words
from .reservations import Reservation, may_use, reservation_of


def must_run(request: Request, inventory: Inventory) -> None:
    """Raise TooMuchAsked if the driver, or the CUDA version that it supports, is too old.

    An unknown version, as of simulated devices, is no reason to refuse.
    """
    if not request.devices:
        return
    name = named_environment(request)
    for what, needed, there in (
        ("NVIDIA driver", request.min_driver, inventory.driver_version),
        ("CUDA", request.min_cuda, inventory.cuda_version),
    ):
        if _is_older(there, needed):
            raise TooMuchAsked(
                f"{name} needs {what} {needed} or newer, and this machine has {there}. Start it "
                "without a GPU, choose another, or ask your admin for a newer driver."
            )


def _is_older(there: str, needed: str) -> bool:
    if not needed or not re.match(r"[0-9]", there):
        return False
    ours, theirs = _numbers(there), _numbers(needed)
    return ours + (0,) * (len(theirs) - len(ours)) < theirs


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"[0-9]+", version)[:4])


def suitable(request: Request, devices: Iterable[Device]) -> list[Device]:
    """Return the devices that the request allows and its member may use, free or not."""
    return [device for device in of_request(request, devices) if may_use(request, device)]


def of_request(request: Request, devices: Iterable[Device]) -> list[Device]:
    """Return the devices that the request allows, free or not, also those reserved for others.

    A model that is written exactly like a device's name means that model alone: a member who picked
    ``NVIDIA A100-SXM4-40GB`` from a list does not get an instance of one. A share has the memory of
    as many slots as it needs, and never all slots of its device.
    """
    if request.sharing is Sharing.SLOT:
        enough = [d for d in devices if d.slots_for(request.memory_bytes) < d.slots]
    else:
        enough = [d for d in devices if d.memory_bytes >= request.memory_bytes]
    return of_model(request.model, of_environment(request, enough))


def asks_for(request: Request, devices: Iterable[Device], uuids: AbstractSet[str]) -> bool:
    """Return True if the request is satisfied by all of exactly these devices."""
    fitting = {device.uuid for device in suitable(request, devices)}
    return 0 < request.devices == len(uuids) and uuids <= fitting


def of_environment(request: Request, devices: list[Device]) -> list[Device]:
    """Return the devices that the request's environment supports."""
    if not request.models:
        return devices
    models = {d.model for d in devices}
    named = {m for m in models if any(model_matches(wanted, m) for wanted in request.models)}
    return [d for d in devices if d.model in named]


Alike = tuple[str, Reservation, int]
"""What devices of one lease have in common: model, whom they are reserved for, number of slots."""


def alike(devices: Iterable[Device]) -> dict[Alike, list[Device]]:
    """Group devices that one lease may have together, keeping their order."""
    groups: dict[Alike, list[Device]] = {}
    for device in devices:
        key = (device.model, reservation_of(device), device.slots)
        groups.setdefault(key, []).append(device)
    return groups


def most_together(devices: Iterable[Device]) -> int:
    """Return the size of the largest group of devices that one lease may have."""
    return max(map(len, alike(devices).values()), default=0)


def of_model(wanted: str | None, devices: list[Device]) -> list[Device]:
    """Return the devices of a model: with exactly that name, or else with all its words."""
    words = model_words(wanted or "")
    if not words:
        return devices
    models = {d.model for d in devices}
    named = {m for m in models if model_words(m) == words} or {
        m for m in models if model_matches(wanted or "", m)
    }
    return [d for d in devices if d.model in named]


def named_environment(request: Request) -> str:
    """Return the environment of a request at the start of a sentence."""
    name = request.environment
    return f"The environment {name!r}" if name else "This environment"
