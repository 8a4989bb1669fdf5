"""Rules that choose the places of MIG instances, and tell own instances from others. Pure.

A GPU's memory has slices, and NVML says at which slices each profile may start. A layout is chosen
so that it destroys as little as possible, and never an instance that gpuspawner did not make.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ..core.errors import InvalidRequest, Refused
from ..core.text import short_text
from ..devices.models import MIGInstance, MIGPlacement, MIGProfile, MIGState
from .models import (
    LayoutPlan,
    PlannedInstance,
    RecordedInstance,
    RecordState,
    place_name,
)

NONE = "none"
"""The layout without instances."""

MOST_INSTANCES = 16
"""More than any GPU has."""

_PART = re.compile(r"(?:([1-9]\d?)x)?([0-9]+g[0-9a-z.+-]*)")


class CannotDivide(Refused):
    """The GPU cannot be divided like that."""

    reason = "cannot_divide"
    status_code = 409


def parse_layout(text: str) -> tuple[str, ...]:
    """Return the profiles of a layout such as ``3g.20gb,2x1g.5gb``, largest first.

    Raises InvalidRequest. ``none`` has no profiles.
    """
    found: list[str] = []
    for part in text.replace(" ", "").lower().split(",") if text.strip().lower() != NONE else ():
        match = _PART.fullmatch(part)
        if match is None:
            raise InvalidRequest(
                f"{part[:40]!r} is no MIG profile. Write a layout like 3g.20gb,1g.5gb,1g.5gb or "
                "3g.20gb,2x1g.5gb, or none for a GPU without instances.",
                field="layout",
            )
        found += [match[2]] * int(match[1] or 1)
    if len(found) > MOST_INSTANCES:
        raise InvalidRequest(
            f"The layout has {len(found)} instances, and no GPU has so many.", field="layout"
        )
    return tuple(sorted(found, key=_size_then_name))


def _size_then_name(profile: str) -> tuple[int, str]:
    digits = re.match(r"[0-9]*", profile)
    return -int(digits[0] if digits and digits[0] else 0), profile


def format_layout(profiles: Collection[str]) -> str:
    """Format a layout as :func:`parse_layout` reads it, with counts."""
    counts = Counter(profiles)
    parts = [name if n == 1 else f"{n}x{name}" for name, n in counts.items()]
    return ",".join(parts) or NONE


def require_mig_mode(gpu: MIGState) -> None:
    """Raise CannotDivide, with what to do, if the GPU is not in MIG mode or about to leave it."""
    if gpu.is_enabled and not gpu.is_pending:
        return
    reset = f"nvidia-smi --gpu-reset -i {gpu.index}, or restart the machine"
    if gpu.is_pending:
        change = "leaves" if gpu.is_enabled else "enters"
        raise CannotDivide(f"GPU {gpu.index} {change} MIG mode with its next reset: {reset}.")
    raise CannotDivide(
        f"GPU {gpu.index} ({gpu.model}) is not in MIG mode. Turn it on while nobody uses the GPU: "
        f"nvidia-smi -i {gpu.index} -mig 1. An Ampere GPU such as the A100 then needs a reset: "
        f"{reset}. GPUs without MIG cannot be divided."
    )


def require_known(record: RecordedInstance, gpu: MIGState) -> None:
    """Raise CannotDivide if the GPU has no such profile, or not at that place.

    The record may be of another driver or edited, and a command that root runs is made of it.
    """
    known = {(each.name, each.id, at) for each in gpu.profiles for at in each.placements}
    if (record.profile, record.profile_id, record.placement) not in known:
        raise CannotDivide(
            f"GPU {gpu.index} can have no instance {short_text(record.name)} of the profile with "
            f"the id {short_text(record.profile_id)}, as the database records it. Give it a "
            "layout again: gpuspawner mig apply."
        )


def is_same(record: RecordedInstance, instance: MIGInstance, boot_id: str) -> bool:
    """Return True if an instance that exists is the recorded one.

    If the record says that the instance was begun, and there is one at its place, a process made it
    and was killed before it could record that: the place was empty just before.
    """
    if record.state is RecordState.WANTED and record.instance_id is None:
        return False
    at_place = (record.profile_id, record.placement) == (instance.profile_id, instance.placement)
    if not at_place or record.boot_id != boot_id:
        return False
    if record.instance_id is not None and record.instance_id != instance.id:
        return False
    return not record.uuid or not instance.uuids or record.uuid in instance.uuids


def find_instance(record: RecordedInstance, gpu: MIGState, boot_id: str) -> MIGInstance | None:
    """Return the instance of a record, if it exists."""
    found = (each for each in gpu.instances if is_same(record, each, boot_id))
    return next(found, None)


def own_instances(
    records: Collection[RecordedInstance], gpu: MIGState, boot_id: str
) -> dict[int, RecordedInstance]:
    """Return the records of gpuspawner's own instances that exist, by the driver's number."""
    found = ((find_instance(each, gpu, boot_id), each) for each in records)
    return {instance.id: record for instance, record in found if instance is not None}


def plan_layout(gpu: MIGState, profiles: Sequence[str], own: Collection[int]) -> LayoutPlan:
    """Choose places for a layout.

    Args:
        gpu: What NVML says of the GPU.
        profiles: The profiles wanted; see :func:`parse_layout`.
        own: The driver's numbers of the instances that gpuspawner made.

    Raises:
        CannotDivide: With what is in the way.
    """
    require_mig_mode(gpu)
    by_name = {profile.name: profile for profile in gpu.profiles}
    for name in profiles:
        if name not in by_name:
            known = ", ".join(sorted(by_name, key=_size_then_name))
            raise CannotDivide(
                f"GPU {gpu.index} ({gpu.model}) has no profile {name}. It has {known}."
            )
    wanted = [by_name[name] for name in profiles]
    others = [each for each in gpu.instances if each.id not in own]
    best = _best_places(wanted, gpu, others)
    if best is None:
        raise CannotDivide(_why_not(wanted, gpu, others))
    return _plan_of(gpu, profiles, best, others)


def _plan_of(
    gpu: MIGState,
    profiles: Sequence[str],
    places: Sequence[tuple[MIGProfile, MIGPlacement]],
    others: Sequence[MIGInstance],
) -> LayoutPlan:
    there = {(each.profile_id, each.placement): each for each in gpu.instances}
    keep = [there[profile.id, at] for profile, at in places if (profile.id, at) in there]
    kept = {each.id for each in keep}
    foreign = {each.id for each in others}
    return LayoutPlan(
        gpu=gpu,
        layout=format_layout(profiles),
        keep=tuple(sorted(keep, key=lambda each: each.placement)),
        destroy=tuple(x for x in gpu.instances if x.id not in kept and x.id not in foreign),
        create=tuple(
            PlannedInstance(profile, at) for profile, at in places if (profile.id, at) not in there
        ),
        beside=tuple(each for each in others if each.id not in kept),
    )


def _best_places(
    wanted: Sequence[MIGProfile], gpu: MIGState, others: Sequence[MIGInstance]
) -> Sequence[tuple[MIGProfile, MIGPlacement]] | None:
    """Return the places that keep the most instances, then leave the most room for others.

    Returns None if the layout does not fit.
    """
    there = {(each.profile_id, each.placement) for each in gpu.instances}
    every = [at for profile in gpu.profiles for at in profile.placements]
    best: tuple[tuple[int, int], Sequence[tuple[MIGProfile, MIGPlacement]]] | None = None
    for places in _all_places(wanted, others, (), ()):
        kept = sum((profile.id, at) in there for profile, at in places)
        taken = [at for _, at in places] + [each.placement for each in others]
        room = sum(not any(at.overlaps(each) for each in taken) for at in every)
        if best is None or (kept, room) > best[0]:
            best = (kept, room), places
    return None if best is None else best[1]


def _all_places(
    wanted: Sequence[MIGProfile],
    others: Sequence[MIGInstance],
    chosen: tuple[tuple[MIGProfile, MIGPlacement], ...],
    adopted: tuple[int, ...],
) -> Iterator[tuple[tuple[MIGProfile, MIGPlacement], ...]]:
    """Yield every way to place the profiles: in free places, or on identical existing instances.

    Equal profiles are interchangeable: each next one is placed after the one before.
    """
    if not wanted:
        if _within_limits(chosen, [each for each in others if each.id not in adopted]):
            yield chosen
        return
    profile, *rest = wanted
    after = chosen[-1][1] if chosen and chosen[-1][0] == profile else None
    for at in profile.placements:
        if after is not None and at <= after:
            continue
        if any(at.overlaps(taken) for _, taken in chosen):
            continue
        hit = [each for each in others if at.overlaps(each.placement)]
        if any((each.profile_id, each.placement) != (profile.id, at) for each in hit):
            continue
        ids = tuple(each.id for each in hit)
        yield from _all_places(rest, others, (*chosen, (profile, at)), (*adopted, *ids))


def _within_limits(
    chosen: Sequence[tuple[MIGProfile, MIGPlacement]], beside: Sequence[MIGInstance]
) -> bool:
    """Return True if no profile has more instances than the GPU allows."""
    counts = Counter(profile.id for profile, _ in chosen)
    counts.update(each.profile_id for each in beside if each.profile_id in counts)
    most = {profile.id: profile.max_instances for profile, _ in chosen}
    return all(counts[profile_id] <= limit for profile_id, limit in most.items())


def _why_not(wanted: Sequence[MIGProfile], gpu: MIGState, others: Sequence[MIGInstance]) -> str:
    layout = format_layout([profile.name for profile in wanted])
    if others and _best_places(wanted, replace(gpu, instances=()), ()) is not None:
        names = {profile.id: profile.name for profile in gpu.profiles}
        made = ", ".join(
            f"{place_name(names.get(x.profile_id, 'an instance'), x.placement)} (id {x.id})"
            for x in others
        )
        return (
            f"{layout} does not fit on GPU {gpu.index} next to instances that gpuspawner did "
            f"not make and does not touch: {made}. If nobody needs them any more, remove them: "
            f"nvidia-smi mig -i {gpu.index} -dci -gi ID, then -dgi -gi ID."
        )
    return (
        f"{layout} does not fit on GPU {gpu.index} ({gpu.model}). The places of each profile, as "
        f"start:size: {_places_of(wanted)}."
    )


def _places_of(wanted: Sequence[MIGProfile]) -> str:
    found = {
        profile.name: " ".join(f"{at.start}:{at.size}" for at in profile.placements)
        for profile in wanted
    }
    return "; ".join(f"{name} at {places}" for name, places in found.items())


def records_of(
    plan: LayoutPlan,
    records: Collection[RecordedInstance],
    own: Mapping[int, RecordedInstance],
    boot_id: str,
) -> list[RecordedInstance]:
    """Return what the store is to record of the GPU before the first step of a plan.

    Args:
        plan: The plan.
        records: The present records of the GPU.
        own: The records whose instances exist; see :func:`own_instances`.
        boot_id: This boot.
    """
    kept = {each.id: each for each in plan.keep if each.id in own}
    gone = {each.id: each for each in plan.destroy}
    made = [_found(own[number], each, RecordState.MADE) for number, each in kept.items()]
    going = [_found(own[number], each, RecordState.UNWANTED) for number, each in gone.items()]
    wanted = [
        RecordedInstance(each.profile.name, each.profile.id, each.placement, boot_id)
        for each in plan.create
    ]
    # An instance that a killed process had begun may exist after all.
    places = {(each.profile_id, each.placement) for each in [*made, *going, *wanted]}
    late = [
        replace(each, state=RecordState.UNWANTED, id=0)
        for each in records
        if each.boot_id == boot_id
        and each.instance_id is None
        and each.state is not RecordState.WANTED
        and (each.profile_id, each.placement) not in places
    ]
    return [*going, *late, *made, *wanted]


def _found(record: RecordedInstance, instance: MIGInstance, state: RecordState) -> RecordedInstance:
    uuid = next(iter(instance.uuids), record.uuid)
    # An instance without a compute instance is not finished.
    if state is RecordState.MADE and not instance.uuids:
        state, uuid = RecordState.WANTED, ""
    return replace(record, state=state, instance_id=instance.id, uuid=uuid, id=0)


def restored(
    records: Collection[RecordedInstance], gpu: MIGState, boot_id: str
) -> list[RecordedInstance]:
    """Return the records of a GPU so that missing and unfinished instances are made again.

    Instances that an interrupted change was to destroy still are, unless a restart destroyed them.
    """
    found = []
    for record in records:
        instance = find_instance(record, gpu, boot_id)
        if record.state is RecordState.UNWANTED:
            if record.boot_id == boot_id:
                found.append(replace(record, id=0))
        elif instance is not None:
            found.append(_found(record, instance, RecordState.MADE))
        else:
            again = RecordedInstance(record.profile, record.profile_id, record.placement, boot_id)
            found.append(again)
    return sorted(found, key=lambda each: each.state is not RecordState.UNWANTED)


def is_gone(records: Collection[RecordedInstance], gpu: MIGState, boot_id: str) -> bool:
    """Return True if an instance of the layout does not exist or is not finished."""
    for record in records:
        if record.state is RecordState.UNWANTED:
            continue
        found = find_instance(record, gpu, boot_id)
        if found is None or not found.uuids:
            return True
    return False


def strangers(
    records: Collection[RecordedInstance], gpu: MIGState, boot_id: str
) -> tuple[MIGInstance, ...]:
    """Return the instances of a GPU that gpuspawner did not make."""
    own = own_instances(records, gpu, boot_id)
    return tuple(each for each in gpu.instances if each.id not in own)


def wanted_profiles(records: Collection[RecordedInstance]) -> tuple[str, ...]:
    """Return the profiles of the recorded layout, largest first."""
    kept = [each.profile for each in records if each.state is not RecordState.UNWANTED]
    return tuple(sorted(kept, key=_size_then_name))
