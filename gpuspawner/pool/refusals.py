"""Refusals as sentences: what there is, what of it is busy, and what would fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..errors import NoDeviceFree, TooMuchAsked
from ..model import Device, DeviceStatus, Place, Request
from .matching import most_of_one_model, of_environment, of_model


def no_device_free(
    request: Request,
    matching: list[Device],
    candidates: list[Device],
    taken: Collection[Place],
) -> NoDeviceFree:
    """Waiting would help. ``matching`` are the devices that the request allows, ``candidates``
    those of them that are free; each matching device counts once, as the first that is true of
    free, in use, unknown, drained, occupied."""
    free = {d.uuid for d in candidates}
    busy = {place.uuid for place in taken}
    counts: Counter[str] = Counter()
    for device in matching:
        if device.uuid in free:
            counts["free"] += 1
        elif device.uuid in busy:
            counts["in_use"] += 1
        elif device.status is DeviceStatus.UNKNOWN:
            counts["unknown"] += 1
        elif device.status is DeviceStatus.DRAINED:
            counts["drained"] += 1
        else:
            counts["occupied"] += 1
    return NoDeviceFree(
        _who_has_them(request, len(matching), counts, most_of_one_model(candidates)),
        matching=len(matching),
        **{state: counts[state] for state in ("in_use", "occupied", "unknown", "drained", "free")},
    )


def too_much_asked(
    request: Request, existing: list[Device], matching: list[Device]
) -> TooMuchAsked:
    """Waiting would not help. ``existing`` are all devices that could ever be leased."""
    most = most_of_one_model(matching)
    return TooMuchAsked(
        _what_would_fit(request, existing, matching, most),
        asked=request.devices,
        most=most,
        existing=len(existing),
    )


def format_memory(memory_bytes: int) -> str:
    """Bytes as people name a GPU's memory: ``80 GB`` for 80 GiB and for 80 x 10^9 bytes."""
    gib, rest = divmod(memory_bytes, 2**30)
    return f"{memory_bytes // 10**9 if rest else gib} GB"


def _who_has_them(request: Request, total: int, counts: Mapping[str, int], most_free: int) -> str:
    if counts["in_use"] == total:
        kind = _kind(total, request)
        return f"The only {kind} is in use." if total == 1 else f"All {total} {kind} are in use."
    why = _listing(
        [
            _count(counts["in_use"], "is in use", "are in use"),
            _count(counts["occupied"], "is used", "are used", " by programs outside the hub"),
            _count(counts["unknown"], "does not answer", "do not answer"),
            _count(counts["drained"], "is drained", "are drained"),
        ]
    )
    if not counts["free"]:
        return f"No {_kind(1, request)} is free: of {total}, {why}."
    asked = f"You asked for {request.devices} {_kind(request.devices, request)}"
    if most_free < counts["free"]:
        only = _count(most_free, "of one model is", "of one model are")
    else:
        only = _count(counts["free"], "is", "are")
    return f"{asked}, and only {only} free: of {total}, {why}."


def _what_would_fit(
    request: Request, existing: list[Device], matching: list[Device], most: int
) -> str:
    if not existing:
        return "This hub has no GPU. Start without one."
    if not matching:
        return _why_none_suits(request, existing)
    has = f"You asked for {_count(request.devices, 'GPU', 'GPUs')}. "
    has += f"This hub has {_count(len(existing), 'GPU', 'GPUs')}"
    advice = f"Ask for {most} at most."
    if most < len(matching):
        return f"{has}, and those of one server are of one model: {_fleet(matching)}. {advice}"
    if len(matching) == len(existing):
        return f"{has}. {advice}"
    memory = f"{format_memory(request.memory_bytes)} or more"
    if model := _wanted_model(request):
        which = _count(most, "is", "are", f" {model}")
        which += f" with {memory}" if request.memory_bytes else ""
    else:
        which = _count(most, "has", "have", f" {memory}")
    return f"{has}, of which {which}. {advice}"


def _why_none_suits(request: Request, existing: list[Device]) -> str:
    runs = of_environment(request, existing)
    models = _choice(request.models)
    if not runs:
        return f"{_environment(request)} runs on {models}, and this hub has {_fleet(existing)}."
    named = of_model(request.model, runs)
    if named:
        largest = format_memory(max(d.memory_bytes for d in named))
        return f"This hub has no {_kind(1, request)}. The most is {largest}: ask for less."
    if of_model(request.model, existing):
        return f"{_environment(request)} runs on {models}, not on {request.model}."
    return f"This hub has no {request.model} GPU. It has {_fleet(runs)}."


def _environment(request: Request) -> str:
    name = request.environment
    return f"The environment {name!r}" if name else "This environment"


def _wanted_model(request: Request) -> str:
    """What was asked for, or else what the environment runs on; empty is any."""
    return request.model or _choice(request.models)


def _kind(count: int, request: Request) -> str:
    """``GPU`` or ``GPUs`` with the model and the memory that were asked for."""
    noun = "GPU" if count == 1 else "GPUs"
    if model := _wanted_model(request):
        noun = f"{model} {noun}"
    if request.memory_bytes:
        noun = f"{noun} with {format_memory(request.memory_bytes)}"
    return noun


def _fleet(devices: Iterable[Device]) -> str:
    return _listing([f"{n} {model}" for model, n in Counter(d.model for d in devices).items()])


def _count(number: int, one: str, several: str, rest: str = "") -> str:
    return f"{number} {one if number == 1 else several}{rest}" if number else ""


def _choice(models: Sequence[str]) -> str:
    return " or ".join(models)


def _listing(parts: list[str]) -> str:
    *first, last = [part for part in parts if part]
    return f"{', '.join(first)} and {last}" if first else last
