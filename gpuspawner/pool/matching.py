"""Which devices a request means: by the words of the model's name and by memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from ..model import Device, Request, model_matches, model_words


def suitable(request: Request, devices: Iterable[Device]) -> list[Device]:
    """The devices that the request allows, free or not.

    A model that is written exactly as a device's own name means that model alone: a member who
    picked ``NVIDIA A100-SXM4-40GB`` from a list does not get an instance of one.
    """
    enough = [d for d in devices if d.memory_bytes >= request.memory_bytes]
    return of_model(request.model, of_environment(request, enough))


def asks_for(request: Request, devices: Iterable[Device], uuids: AbstractSet[str]) -> bool:
    """Whether a request is met by all of just these devices."""
    fitting = {device.uuid for device in suitable(request, devices)}
    return 0 < request.devices == len(uuids) and uuids <= fitting


def of_environment(request: Request, devices: list[Device]) -> list[Device]:
    """Those that the environment of the request runs on."""
    if not request.models:
        return devices
    models = {d.model for d in devices}
    named = {m for m in models if any(model_matches(wanted, m) for wanted in request.models)}
    return [d for d in devices if d.model in named]


def by_model(devices: Iterable[Device]) -> dict[str, list[Device]]:
    """The devices in groups of one model, each in the order given."""
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.model, []).append(device)
    return groups


def most_of_one_model(devices: Iterable[Device]) -> int:
    """How many devices the largest group of one model has."""
    return max(Counter(d.model for d in devices).values(), default=0)


def of_model(wanted: str | None, devices: list[Device]) -> list[Device]:
    """Those of the wanted model: of exactly that name, or else whose name has its words."""
    words = model_words(wanted or "")
    if not words:
        return devices
    models = {d.model for d in devices}
    named = {m for m in models if model_words(m) == words} or {
        m for m in models if model_matches(wanted or "", m)
    }
    return [d for d in devices if d.model in named]
