"""Which devices a request means: by the words of the model's name and by memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from ..model import Device, Request

_WORD = re.compile(r"[a-z]{2,}(?=\d)|[a-z0-9]+")


def model_matches(wanted: str | None, model: str) -> bool:
    """Whether each word of ``wanted`` is a word of the model's name, compared without case.

    ``a100`` and ``A100-80GB`` match ``NVIDIA A100-SXM4-80GB``; ``RTX4090`` matches
    ``NVIDIA GeForce RTX 4090``. Parts of words do not count: ``A10`` is no A100 and ``L40``
    no L40S.
    """
    return set(_words(wanted or "")) <= set(_words(model))


def suitable(request: Request, devices: Iterable[Device]) -> list[Device]:
    """The devices that the request allows, free or not.

    A model that is written exactly as a device's own name means that model alone: a member who
    picked ``NVIDIA A100-SXM4-40GB`` from a list does not get an instance of one.
    """
    enough = [d for d in devices if d.memory_bytes >= request.memory_bytes]
    if request.models:
        enough = [d for d in enough if any(model_matches(m, d.model) for m in request.models)]
    return of_model(request.model, enough)


def by_model(devices: Iterable[Device]) -> dict[str, list[Device]]:
    """The devices in groups of one model, each in the order given."""
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.model, []).append(device)
    return groups


def most_of_one_model(devices: Iterable[Device]) -> int:
    """How many devices the largest group of one model has."""
    return max(Counter(d.model for d in devices).values(), default=0)


@lru_cache(maxsize=1024)
def _words(model: str) -> tuple[str, ...]:
    """A name as words: split at anything but letters and digits, and before the number of a
    series (RTX4090 is RTX 4090), but not inside a model such as A100 or 80GB."""
    return tuple(_WORD.findall(model.lower()))


def of_model(wanted: str | None, devices: list[Device]) -> list[Device]:
    """Those of the wanted model: of exactly that name, or else whose name has its words."""
    words = _words(wanted or "")
    if not words:
        return devices
    models = {d.model for d in devices}
    named = {m for m in models if _words(m) == words} or {
        m for m in models if model_matches(wanted, m)
    }
    return [d for d in devices if d.model in named]
