"""Kinds of exclusive and shared devices, and how the scheduler gives out slots. Real: the scheduler
and placement, which must agree; sessions are simulated."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.errors import NoDeviceFree, TooMuchAsked
from gpuspawner.core.units import DeviceCount, format_devices, format_gpus
from gpuspawner.devices.models import Device
from gpuspawner.devices.placement import PlacementIndex, texts
from gpuspawner.devices.suitability import suitable
from gpuspawner.leases.models import Request, Sharing, Slot
from gpuspawner.queue.kinds import (
    KindParts,
    add,
    gathers_slots,
    kind_of,
    open_kind,
    parts_of,
    pool_kind,
    pool_of,
    subtract,
    taken_of,
)
from gpuspawner.queue.models import WaitingTicket
from tests.unit.queue.site import DAY, HOUR, T0, Site, kinds_of, lease, scheduler_of, ticket

GIB = 2**30
names = st.text(st.characters(exclude_characters="*@~", exclude_categories=("Cs",)), min_size=1)


PARTS = st.just(1) | st.integers(2, 8).flatmap(
    lambda whole: st.integers(1, whole - 1).map(lambda part: Fraction(part, whole))
)
groups = st.lists(st.text(min_size=1), max_size=3, unique=True).map(
    lambda some: tuple(sorted(some))
)


@given(names, st.integers(1, 2**40), st.integers(1, 16), names, PARTS, groups, st.booleans())
def test_kind_has_the_parts_of_its_device(
    model: str,
    memory: int,
    slots: int,
    uuid: str,
    part: DeviceCount,
    reserved_for: tuple[str, ...],
    lent: bool,
) -> None:
    device = Device(uuid=uuid, index=0, model=model, memory_bytes=memory, slots=slots, part=part)
    kind, lent = kind_of(device), lent and bool(reserved_for)
    assert parts_of(kind) == KindParts(model, memory, slots, part)
    assert pool_of(kind) == pool_of(pool_of(kind)) == pool_kind(model, memory, slots, part)
    assert (uuid in kind) >= (slots > 1)
    reserved = kind_of(replace(device, reserved_for=reserved_for, lent=lent))
    assert parts_of(reserved) == KindParts(model, memory, slots, part, reserved_for, lent)
    assert parts_of(pool_of(reserved)) == parts_of(reserved)
    assert open_kind(reserved) == kind and open_kind(kind) == kind
    assert (reserved == kind) == (not reserved_for)


def test_other_texts_are_kinds_of_unshared_devices() -> None:
    for kind in ("", "any", "a"):
        assert parts_of(kind).slots == 1 and pool_of(kind) == kind
        assert not gathers_slots(4, frozenset({kind}))


def test_counts_mix_whole_devices_and_parts() -> None:
    quarter = Fraction(1, 4)
    assert taken_of("T4/1*4@x", quarter) == quarter
    assert taken_of("T4/1*2@x", quarter) == Fraction(1, 2), "there is no smaller slot"
    assert taken_of("T4/1", 3) == 3
    assert add({"a": 1, "b": quarter}, {"b": 3 * quarter}) == {"a": 1, "b": 1}
    assert subtract({"a": 1, "b": quarter}, {"b": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("devices", "number", "words"),
    [
        (0, "0", "0 GPUs"),
        (1, "1", "1 GPU"),
        (3, "3", "3 GPUs"),
        (Fraction(1, 4), "1/4", "1/4 of a GPU"),
        (Fraction(9, 4), "2 1/4", "2 1/4 GPUs"),
        (Fraction(2), "2", "2 GPUs"),
    ],
)
def test_devices_are_written_as_people_do(devices: DeviceCount, number: str, words: str) -> None:
    assert (format_devices(devices), format_gpus(devices)) == (number, words)


@st.composite
def shared_fleets(draw: st.DrawFn) -> tuple[list[Device], frozenset[str]]:
    """Shared devices, and the slots that are taken."""
    devices = [
        Device(
            uuid=f"GPU-{draw(st.integers(0, 99))}-{index}",
            index=index,
            model=draw(st.sampled_from(["T4", "A100"])),
            memory_bytes=draw(st.sampled_from([16, 40])) * GIB,
            slots=draw(st.sampled_from([2, 3, 4])),
            reserved_for=draw(st.sampled_from([(), (), ("lab",)])),
        )
        for index in range(draw(st.integers(1, 5)))
    ]
    every = [Slot(device.uuid, slot) for device in devices for slot in range(device.slots)]
    return devices, texts(draw(st.lists(st.sampled_from(every), unique=True)))


SLOT = Request(devices=1, sharing=Sharing.SLOT, groups=("lab",))


@given(shared_fleets(), st.integers(0, 40), st.booleans())
def test_scheduler_and_placement_choose_the_same_share(
    found: tuple[list[Device], frozenset[str]], gib: int, smallest: bool
) -> None:
    devices, taken = found
    fleet = PlacementIndex(devices, {})
    request = replace(SLOT, memory_bytes=gib * GIB, smallest=smallest)
    left = fleet.free_slots(taken)
    needed = {d.uuid: d.slots_for(gib * GIB) for d in suitable(request, devices)}
    could = [uuid for uuid, slots in needed.items() if left.get(uuid, 0) >= slots]
    kinds = frozenset(kind_of(fleet.by_uuid[uuid]) for uuid in needed)
    sizes = [Fraction(slots, fleet.by_uuid[uuid].slots) for uuid, slots in needed.items()]
    scheduler = scheduler_of(
        replace(
            ticket("one"),
            devices=min(sizes, default=Fraction(1, 4)),
            kinds=kinds or frozenset({""}),
            share_bytes=gib * GIB,
            smallest=smallest,
        ),
        capacity={kind_of(device): 1 for device in devices},
    )
    free = {
        kind_of(fleet.by_uuid[uuid]): Fraction(count, fleet.by_uuid[uuid].slots)
        for uuid, count in left.items()
    }
    decision = scheduler.decide(T0, free)
    if not could:
        assert not decision.takes
        with pytest.raises((NoDeviceFree, TooMuchAsked)):
            fleet.choose(request, taken)
        return
    share = fleet.choose(request, taken)
    chosen = fleet.by_uuid[share[0].uuid]
    held = Fraction(len(share), chosen.slots)
    assert chosen.memory_bytes * held >= gib * GIB, "enough, and not a slot more"
    assert len(share) == 1 or chosen.memory_bytes * (held - Fraction(1, chosen.slots)) < gib * GIB
    assert decision.takes == {"one": {kind_of(chosen): held}}
    assert decision.left.get(kind_of(chosen), 0) * chosen.slots == left[chosen.uuid] - len(share)
    if smallest:
        alike = [
            device.memory_bytes * needed[device.uuid] // device.slots
            for device in map(fleet.by_uuid.__getitem__, could)
            if device.reserved_for == chosen.reserved_for
        ]
        assert chosen.memory_bytes * len(share) // chosen.slots == min(alike)


@st.composite
def mixed_fleets(draw: st.DrawFn) -> tuple[list[Device], frozenset[str]]:
    """Whole devices, MIG instances and shared devices, and the slots that are taken."""
    sizes = {"T4": 16, "A100-40GB": 40, "A100-80GB": 80, "A100 MIG 1g.10gb": 10}
    models = draw(st.lists(st.sampled_from(list(sizes)), min_size=1, max_size=9))
    devices = [
        Device(
            uuid=f"GPU-{index}",
            index=index,
            model=model,
            memory_bytes=sizes[model] * GIB,
            slots=draw(st.sampled_from([1, 1, 4])),
            parent_uuid="GPU-parent" if "MIG" in model else None,
        )
        for index, model in enumerate(models)
    ]
    every = [Slot(device.uuid, slot) for device in devices for slot in range(device.slots)]
    return devices, texts(draw(st.lists(st.sampled_from(every), unique=True)))


@given(mixed_fleets(), st.sampled_from([0, 8, 12, 40, 64]), st.integers(1, 3))
def test_request_by_memory_gets_the_smallest_free_devices_at_once_and_from_the_queue(
    found: tuple[list[Device], frozenset[str]], gigabytes: int, count: int
) -> None:
    devices, taken = found
    fleet = PlacementIndex(devices, {})
    request = Request(devices=count, memory_bytes=gigabytes * 10**9, smallest=True)
    free = Counter(kind_of(fleet.by_uuid[uuid]) for uuid in fleet.free(taken))
    fitting = Counter(kind_of(device) for device in suitable(request, devices))
    pools = Counter(pool_of(kind_of(device)) for device in suitable(request, devices))
    kinds = frozenset(kind for kind in fitting if pools[pool_of(kind)] >= count)
    scheduler = scheduler_of(
        replace(ticket("one", count), kinds=kinds or frozenset({""}), smallest=True),
        capacity=fitting,
    )
    decision = scheduler.decide(T0, free)
    free_of = Counter[str]()
    for kind in kinds:
        free_of[pool_of(kind)] += free[kind]
    could = [pool for pool, number in free_of.items() if number >= count]
    assert bool(decision.takes) == bool(could), "it does not wait for a small one if one is free"
    if not could:
        with pytest.raises((NoDeviceFree, TooMuchAsked)):
            fleet.choose(request, taken)
        return

    def size(kind: str) -> tuple[bool, int]:
        parts = parts_of(kind)
        return count > 1 and "MIG" in parts.model, parts.memory_bytes

    least = min(map(size, could))
    of_queue = decision.takes["one"]
    assert sum(of_queue.values()) == count and len({*map(pool_of, of_queue)}) == 1
    of_grant = {kind_of(fleet.by_uuid[place.uuid]) for place in fleet.choose(request, taken)}
    assert {size(kind) for kind in (*of_queue, *of_grant)} == {least}
    others = {Slot.closure(d.uuid).text for d in devices if kind_of(d) not in of_queue}
    assert len(fleet.choose(request, taken | others)) == count, "what the queue chose is there"


def test_other_requests_get_the_kind_with_most_free_devices() -> None:
    kinds = {"T4/16": 1, "A100/80": 2}
    one = replace(ticket("one"), kinds=frozenset(kinds))
    assert kinds_of(scheduler_of(one, capacity=kinds).decide(T0, kinds)) == {"one": "A100/80"}
    smallest = replace(one, smallest=True)
    assert kinds_of(scheduler_of(smallest, capacity=kinds).decide(T0, kinds)) == {"one": "T4/16"}
    both = scheduler_of(one, replace(smallest, id="two"), capacity=kinds)
    assert kinds_of(both.decide(T0, kinds)) == {"one": "A100/80", "two": "T4/16"}, (
        "shapes of their own"
    )
    left = {"A100/80": 1}
    assert kinds_of(scheduler_of(smallest, capacity=kinds).decide(T0, left)) == {"one": "A100/80"}


@given(shared_fleets(), st.integers(1, 20))
def test_one_decision_grants_each_slot_once(
    found: tuple[list[Device], frozenset[str]], tickets: int
) -> None:
    devices, taken = found
    fleet = PlacementIndex(devices, {})
    slots = fleet.free_slots(taken)
    kinds = [kind_of(device) for device in devices]
    asked = Fraction(1, max(device.slots for device in devices))
    scheduler = scheduler_of(
        *(slot_ticket(f"t{n}", kinds, devices=asked) for n in range(tickets)),
        capacity=dict.fromkeys(kinds, 1),
    )
    free = {kind_of(d): Fraction(slots[d.uuid], d.slots) for d in devices if d.uuid in slots}
    decision = scheduler.decide(T0, free)
    assert len(decision.starts) == min(tickets, sum(slots.values()))
    for held in decision.takes.values():
        (kind,) = held
        try:
            (place,) = fleet.choose(
                SLOT,
                taken | {Slot.closure(d.uuid).text for d in devices if kind_of(d) != kind},
            )
        except NoDeviceFree:
            pytest.fail(f"{kind} was granted more often than it has slots")
        taken |= {place.text}


def slot_ticket(
    name: str, kinds: list[str], devices: DeviceCount = Fraction(1, 4), at: float = T0
) -> WaitingTicket:
    return replace(ticket(name, 1, at=at), devices=devices, kinds=frozenset(kinds))


def test_yielded_slots_are_taken_last() -> None:
    kinds = [f"T4/16*4@{name}" for name in "ab"]
    scheduler = scheduler_of(slot_ticket("one", kinds), capacity=dict.fromkeys(kinds, 1))
    free = {kinds[0]: Fraction(2, 4), kinds[1]: Fraction(3, 4)}
    assert kinds_of(scheduler.decide(T0, free)) == {"one": kinds[0]}, "the fuller one"
    yielded = {kinds[0]: Fraction(2, 4)}
    assert kinds_of(scheduler.decide(T0, free, yielded=yielded)) == {"one": kinds[1]}


def test_whole_request_gets_an_unshared_device_before_a_shared_one() -> None:
    kinds = ["T4/16*4@a", "T4/16"]
    whole = replace(ticket("one", 1), kinds=frozenset(kinds))
    scheduler = scheduler_of(whole, capacity=dict.fromkeys(kinds, 1))
    assert kinds_of(scheduler.decide(T0, dict.fromkeys(kinds, 1))) == {"one": "T4/16"}
    assert kinds_of(scheduler.decide(T0, {kinds[0]: 1})) == {"one": kinds[0]}
    assert kinds_of(scheduler.decide(T0, {kinds[0]: Fraction(3, 4)})) == {}


def test_whole_request_gets_a_reserved_device_before_an_open_one() -> None:
    kinds = ["A100/80#lab", "A100/80", "T4/16"]
    whole = replace(ticket("one", 1), kinds=frozenset(kinds))
    scheduler = scheduler_of(whole, capacity=dict.fromkeys(kinds, 3))
    assert kinds_of(scheduler.decide(T0, {kinds[0]: 1, kinds[1]: 2})) == {"one": kinds[0]}
    assert kinds_of(scheduler.decide(T0, {kinds[1]: 2, kinds[2]: 1})) == {"one": kinds[1]}
    assert kinds_of(scheduler.decide(T0, {kinds[0]: 1, kinds[2]: 2})) == {"one": kinds[0]}
    yielded = {kinds[0]: 1}
    assert kinds_of(scheduler.decide(T0, {kinds[0]: 1, kinds[1]: 1}, yielded=yielded)) == {
        "one": kinds[1]
    }, "rather than wait until a run has yielded it"


@pytest.mark.parametrize("asked", [Fraction(3, 4), 1, 2], ids=["three slots", "whole", "two"])
@pytest.mark.parametrize("known", [True, False], ids=["known ends", "unknown ends"])
@pytest.mark.parametrize("seed", range(3))
def test_large_request_does_not_starve_among_slots(
    asked: DeviceCount, known: bool, seed: int
) -> None:
    """More members ask for slots than there are, for as long as the large request waits."""
    chance, kinds = random.Random(seed), [f"T4/16*4@GPU-{number}" for number in range(2)]
    capacity = dict.fromkeys(kinds, 1)
    scheduler = scheduler_of(capacity=capacity)
    site, lasts, comes, number = Site(scheduler, capacity), {"whole": HOUR}, T0, 0
    whole = ticket("whole", at=T0 + 12 * HOUR, position=1, seconds=HOUR if known else None)
    whole = replace(whole, devices=asked)
    while "whole" not in site.started_at:
        assert site.now < T0 + 2 * DAY, "it starves"
        site.go_to(min(comes, site.next_end or comes))
        if comes <= site.now:
            number += 1
            name = f"t{number}"
            lasts[name] = max(60.0, chance.expovariate(1 / HOUR))
            seconds = lasts[name] if known else None
            scheduler.submit(replace(slot_ticket(name, kinds, at=site.now), seconds=seconds))
            comes += chance.expovariate(10 / HOUR)
        if site.now >= whole.asked_at and "whole" not in scheduler.waiting:
            scheduler.submit(replace(whole, kinds=frozenset(kinds)))
        site.step(lasts, known)
    assert len(scheduler.waiting) > 8, "others waited all the time"


def test_slots_count_as_parts_for_shares_and_order() -> None:
    kind = "T4/16*4@a"
    scheduler = scheduler_of(capacity={kind: 1})
    scheduler.started(lease("past", {kind: Fraction(1, 4)}, T0 - 8 * HOUR, member="ada"))
    for member in ("ada", "bob"):
        scheduler.submit(replace(slot_ticket(member, [kind]), member=member))
    bob, ada = scheduler.order(T0)
    assert (bob.id, ada.id) == ("bob", "ada")
    words = {part.name: part.why for part in ada.parts}
    assert words["share of the member"] == "used 2.0 GPU-hours of late, weight 1"
    assert words["size"] == "about 0.2 GPU-hours expected, 4 give 0 points"
