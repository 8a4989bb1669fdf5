"""The sentences of refusals: why a request gets no device. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..core.errors import NoDeviceFree, TooMuchAsked
from ..core.text import listing
from ..core.units import format_memory
from ..leases.models import Request, Sharing, Slot
from .models import Device, DeviceStatus
from .reservations import may_use, named_groups, reservation_of
from .suitability import (
    most_together,
    named_environment,
    of_environment,
    of_model,
    of_request,
)


def no_device_free(
    request: Request,
    matching: list[Device],
    candidates: list[Device],
    taken: Collection[Slot],
    reserved: Sequence[Device] = (),
) -> NoDeviceFree:
    """Return the refusal of a request that can be granted later.

    ``matching`` are the devices that the request allows, ``candidates`` the free ones among them,
    and ``reserved`` those that it would allow if they were not reserved for others. Each matching
    device counts once, as the first that applies of free, in use, unknown, drained, occupied.
    """
    free = {d.uuid for d in candidates}
    busy = {place.uuid for place in taken}
    counts = dict.fromkeys(("in_use", "occupied", "unknown", "drained", "free"), 0)
    for device in matching:
        if device.uuid in free:
            state = "free"
        elif device.uuid in busy:
            state = "in_use"
        elif device.status in (DeviceStatus.UNKNOWN, DeviceStatus.DRAINED):
            state = device.status.value
        else:
            state = "occupied"
        counts[state] += 1
    said = _who_has_them(request, len(matching), counts, most_together(candidates))
    if reserved:
        more = _count(len(reserved), "more is", "more are")
        said += f" {more} reserved for {named_groups(reserved)}."
    return NoDeviceFree(said, matching=len(matching), **counts)


def too_much_asked(
    request: Request, existing: list[Device], matching: list[Device]
) -> TooMuchAsked:
    """Return the refusal of a request that none of the ``existing`` devices can ever satisfy."""
    most = most_together(matching)
    if reserved := [] if matching else reserved_for_others(request, existing):
        return TooMuchAsked(_reserved(request, reserved), asked=request.devices, most=0)
    said = _what_would_fit(request, existing, matching, most)
    return TooMuchAsked(said, asked=request.devices, most=most, existing=len(existing))


def why_reserved(request: Request, existing: Iterable[Device]) -> str:
    """Return the sentence that only devices reserved for others suit a request; else empty."""
    fitting = of_request(request, existing)
    if not fitting or any(may_use(request, device) for device in fitting):
        return ""
    return _reserved(request, fitting)


def reserved_for_others(request: Request, devices: Iterable[Device]) -> list[Device]:
    """Return the devices that suit a request, but not its member."""
    return [d for d in of_request(request, devices) if not may_use(request, d)]


def no_share_free(
    request: Request,
    matching: list[Device],
    candidates: list[Device],
    left: Mapping[str, int],
    taken: Collection[Slot],
    reserved: Sequence[Device] = (),
) -> NoDeviceFree:
    """Return the refusal of a request for a share that can be granted later.

    ``candidates`` are the devices with enough free slots: there the member has a share already.
    ``left`` are the free slots of all devices, by UUID.
    """
    if candidates:
        return NoDeviceFree(
            "You already have a share of each GPU with a free share, and a second one would share "
            "it with yourself. Stop that server, or wait for another GPU.",
            matching=len(matching),
            free=0,
        )
    refusal = no_device_free(request, matching, [], taken, reserved)
    slots = sum(device.slots for device in matching)
    most = max(left.get(each.uuid, 0) * each.memory_bytes // each.slots for each in matching)
    if most:
        model = f"{_wanted_model(request)} GPU".strip()
        said = (
            f"No {model} has {format_memory(request.memory_bytes)} in free shares. The most on one "
            f"is {format_memory(most)}."
        )
        return NoDeviceFree(said, **refusal.fields)
    if refusal.fields["in_use"] == len(matching):
        said = f"All {slots} shares of {_kind(len(matching), request)} are in use."
        return NoDeviceFree(said, **refusal.fields)
    return refusal


def no_share_ever(request: Request, existing: list[Device], matching: list[Device]) -> TooMuchAsked:
    """Return the refusal of a request for a share that waiting does not help."""
    if matching:
        said = f"A share is of one GPU, and you asked for {request.devices}. Ask for 1."
    elif reserved := reserved_for_others(request, existing):
        said = _reserved(request, reserved)
    elif not any(device.slots > 1 for device in existing):
        said = "This hub has no shared GPU. Ask for a whole one, or start without a GPU."
    else:
        said = _why_no_slot_suits(request, existing)
    return TooMuchAsked(said, asked=request.devices, most=min(1, len(matching)))


def _why_no_slot_suits(request: Request, existing: list[Device]) -> str:
    shared = [device for device in existing if device.slots > 1]
    named = of_model(request.model, of_environment(request, shared))
    wanted = _wanted_model(request)
    if named:
        largest = format_memory(max(d.memory_bytes * (d.slots - 1) // d.slots for d in named))
        return f"The largest share of {wanted or 'a GPU'} has {largest}: ask for less."
    return f"No {wanted} GPU is shared on this hub. Shared are {_fleet(shared)}."


def _who_has_them(request: Request, total: int, counts: Mapping[str, int], most_free: int) -> str:
    if counts["in_use"] == total:
        kind = _kind(total, request)
        return f"The only {kind} is in use." if total == 1 else f"All {total} {kind} are in use."
    why = listing(
        [
            _count(counts["in_use"], "is in use", "are in use"),
            _count(counts["occupied"], "is used", "are used", " by programs outside the hub"),
            _count(counts["unknown"], "is not responding", "are not responding"),
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


def _reserved(request: Request, reserved: Sequence[Device]) -> str:
    """Return the refusal of a request that only devices ``reserved`` for others would suit."""
    shared = "shared " if request.sharing is Sharing.SLOT else ""
    kind = f"{shared}{_kind(len(reserved), request)}"
    every = f"All {kind} here are" if len(reserved) > 1 else f"The only {kind} here is"
    said = f"{every} reserved for {named_groups(reserved)}."
    if any(device.lent for device in reserved):
        said += " Preemptible runs of others may use what is idle."
    return said


def _what_would_fit(
    request: Request, existing: list[Device], matching: list[Device], most: int
) -> str:
    usable = [device for device in existing if may_use(request, device)]
    are = "are" if len(usable) > 1 else "is"
    open_to_all = "" if len(usable) == len(existing) else f" that {are} not reserved for others"
    existing = usable
    if not existing:
        return "This hub has no GPU. Start without one."
    if not matching:
        return _why_none_suits(request, existing)
    has = f"You asked for {_count(request.devices, 'GPU', 'GPUs')}. "
    has += f"This hub has {_count(len(existing), 'GPU', 'GPUs')}{open_to_all}"
    advice = f"Ask for {most} at most."
    if most < len(matching):
        same = "of one model"
        models = len({device.model for device in matching})
        if len({(device.model, reservation_of(device)) for device in matching}) > models:
            same += " and reserved alike"
        if len({(device.model, device.slots) for device in matching}) > models:
            same += " and divided into as many shares"
        return f"{has}, and those of one server are {same}: {_fleet(matching)}. {advice}"
    if len(matching) == len(existing):
        return f"{has}. {advice}"
    only = f"only {most}"
    if model := _wanted_model(request):
        only += f" {model}"
    if request.memory_bytes:
        only += f" with {format_memory(request.memory_bytes)} or more"
    return f"{has}, but {only}. {advice}"


def _why_none_suits(request: Request, existing: list[Device]) -> str:
    runs = of_environment(request, existing)
    models = " or ".join(request.models)
    if not runs:
        return (
            f"{named_environment(request)} runs on {models}, and this hub has {_fleet(existing)}."
        )
    named = of_model(request.model, runs)
    if named:
        largest = format_memory(max(d.memory_bytes for d in named))
        return f"This hub has no {_kind(1, request)}. The most is {largest}: ask for less."
    if of_model(request.model, existing):
        return f"{named_environment(request)} runs on {models}, not on {request.model}."
    return f"This hub has no {request.model} GPU. It has {_fleet(runs)}."


def _wanted_model(request: Request) -> str:
    """Return the requested model, or else the environment's; empty means any."""
    return request.model or " or ".join(request.models)


def _kind(count: int, request: Request) -> str:
    """Return ``GPU`` or ``GPUs`` with the requested model and memory."""
    noun = "GPU" if count == 1 else "GPUs"
    if model := _wanted_model(request):
        noun = f"{model} {noun}"
    if request.memory_bytes:
        noun = f"{noun} with {format_memory(request.memory_bytes)}"
    return noun


def _fleet(devices: Iterable[Device]) -> str:
    counts = Counter((device.model, reservation_of(device)) for device in devices)
    return listing(
        f"{count} {model}" + (f" reserved for {listing(its.groups)}" if its.groups else "")
        for (model, its), count in counts.items()
    )


def _count(number: int, one: str, several: str, rest: str = "") -> str:
    return f"{number} {one if number == 1 else several}{rest}" if number else ""
