"""Real: everything; a second, slower pool that tries every set checks the choices of the first."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspawner.core.errors import NoDeviceFree, TooMuchAsked
from gpuspawner.devices import placement, topology
from gpuspawner.devices.models import Device, DeviceProcess, DeviceStatus
from gpuspawner.leases.models import Request, Slot
from tests.support.tier import examples

GIB = 2**30
Links = Mapping[tuple[str, str], int]


def device(index: int, model: str = "A100-80GB", gib: int = 80, **fields: Any) -> Device:
    return Device(
        uuid=f"GPU-{index:04d}", index=index, model=model, memory_bytes=gib * GIB, **fields
    )


def links_of(scores: Mapping[tuple[int, int], int]) -> dict[tuple[str, str], int]:
    return {(f"GPU-{a:04d}", f"GPU-{b:04d}"): score for (a, b), score in scores.items()}


MODELS = (("A100-80GB", 80), ("A100-40GB", 40), ("T4", 16))


@st.composite
def devices_and_taken(draw: st.DrawFn) -> tuple[list[Device], list[Slot]]:
    devices = []
    for index in range(draw(st.integers(0, 9))):
        model, gib = draw(st.sampled_from(MODELS))
        kinds = draw(st.lists(st.sampled_from(["compute", "graphics"]), max_size=1))
        devices.append(
            device(
                index,
                model,
                gib,
                slots=draw(st.sampled_from([1, 1, 1, 2])),
                status=draw(st.sampled_from([DeviceStatus.OK] * 6 + list(DeviceStatus))),
                compute_mode=draw(
                    st.sampled_from(["default", "default", "exclusive_process", "prohibited"])
                ),
                processes=tuple(DeviceProcess(9, kind=kind) for kind in kinds),
            )
        )
    every = [Slot(d.uuid, slot) for d in devices for slot in range(d.slots)]
    taken = draw(st.lists(st.sampled_from(every), unique=True)) if every else []
    return draw(st.permutations(devices)), taken


MEANT = {
    None: {"A100-80GB", "A100-40GB", "T4"},
    "A100": {"A100-80GB", "A100-40GB"},
    "a100-40gb": {"A100-40GB"},
    "T4": {"T4"},
    "H100": set(),
}

requests = st.builds(
    Request,
    devices=st.integers(1, 5),
    model=st.sampled_from(list(MEANT)),
    models=st.sampled_from([(), ("A100",), ("a100-40gb", "T4"), ("H100",)]),
    memory_bytes=st.sampled_from([0, 10 * GIB, 40 * GIB, 64 * GIB]),
)


@st.composite
def links_between(draw: st.DrawFn) -> Links:
    scores = st.sampled_from([0, 10, 20, 50, 100, 400])
    return links_of(
        draw(st.dictionaries(st.sampled_from(list(itertools.combinations(range(9), 2))), scores))
    )


def feasible_sets(
    request: Request, devices: Sequence[Device], taken: Sequence[Slot], ignoring: bool = False
) -> list[tuple[Device, ...]]:
    """Every set that the words of the brief allow, found by trying them all."""

    def allowed(d: Device) -> bool:
        if d.status is DeviceStatus.PARENT or d.compute_mode == "prohibited":
            return False
        if d.model not in MEANT[request.model]:
            return False
        if request.models and not any(d.model in MEANT[model] for model in request.models):
            return False
        if d.memory_bytes < request.memory_bytes:
            return False
        if ignoring:
            return True
        mine = {place.slot for place in taken if place.uuid == d.uuid}
        if d.status is not DeviceStatus.OK or len(mine) == d.slots:
            return False
        return bool(mine) or all(p.kind != "compute" for p in d.processes)

    possible = sorted((d for d in devices if allowed(d)), key=lambda d: d.index)
    return [
        some
        for some in itertools.combinations(possible, request.devices)
        if len({d.model for d in some}) == 1
    ]


def closeness(some: Sequence[Device], links: Links) -> tuple[int, int]:
    scores = [links.get((a.uuid, b.uuid), 0) for a, b in itertools.combinations(some, 2)]
    return sum(scores), min(scores, default=0)


@settings(max_examples=examples(400))
@given(devices_and_taken(), requests, links_between())
def test_what_is_given_could_be_given_and_what_could_be_is(
    fleet_and_taken: tuple[list[Device], list[Slot]], request: Request, links: Links
) -> None:
    devices, taken = fleet_and_taken
    sets = feasible_sets(request, devices, taken)
    if not sets:
        expected = (
            NoDeviceFree if feasible_sets(request, devices, taken, ignoring=True) else TooMuchAsked
        )
        with pytest.raises(expected) as caught:
            placement.choose(request, devices, taken, links)
        fields = caught.value.fields
        if expected is NoDeviceFree:
            parts = ("in_use", "occupied", "unknown", "drained", "free")
            assert fields["matching"] == sum(fields[part] for part in parts)
            assert fields["free"] < fields["matching"]
        else:
            assert fields["most"] < fields["asked"] == request.devices
        return
    places = placement.choose(request, devices, taken, links)
    by_uuid = {d.uuid: d for d in devices}
    given_devices = tuple(by_uuid[place.uuid] for place in places)
    assert given_devices in sets, "distinct, healthy, of one model, as many as asked"
    assert not set(places) & set(taken)
    assert all(place in placement.free_places(devices, taken) for place in places)
    assert placement.choose(request, devices[::-1], taken[::-1], links) == places
    least = min(min(d.memory_bytes for d in some) for some in sets)
    assert given_devices[0].memory_bytes == least
    if request.devices > 1:
        fitting = [some for some in sets if some[0].memory_bytes == least]
        best = max(closeness(some, links) for some in fitting)
        assert closeness(given_devices, links) == best
        first = next(some for some in fitting if closeness(some, links) == best)
        assert given_devices == first, "of equal sets the one with the lowest indices"


@settings(max_examples=examples(200))
@given(
    devices_and_taken(),
    st.lists(st.tuples(requests, st.lists(st.integers(0, 17), unique=True)), min_size=2),
    links_between(),
)
def test_what_was_asked_before_changes_no_answer(
    fleet_and_taken: tuple[list[Device], list[Slot]],
    questions: list[tuple[Request, list[int]]],
    links: Links,
) -> None:
    devices, _ = fleet_and_taken
    every = [Slot(d.uuid, slot) for d in devices for slot in range(d.slots)]
    asked = placement.Fleet(devices, links)
    for request, numbers in questions:
        taken = placement.texts([*(every[n] for n in numbers if n < len(every)), Slot("GPU-gone")])
        new = placement.Fleet(devices, links)
        assert asked.free(taken) == new.free(taken)
        assert answer(asked, request, taken) == answer(new, request, taken)


def answer(fleet: placement.Fleet, request: Request, taken: frozenset[str]) -> object:
    try:
        return fleet.choose(request, taken)
    except (NoDeviceFree, TooMuchAsked) as error:
        return type(error), error.fields


@settings(max_examples=examples(200))
@given(devices_and_taken(), links_between())
def test_a_single_device_costs_the_others_as_little_closeness_as_can_be(
    fleet_and_taken: tuple[list[Device], list[Slot]], links: Links
) -> None:
    devices, taken = fleet_and_taken
    request = Request(devices=1)
    sets = feasible_sets(request, devices, taken)
    if not sets:
        return
    free = [some[0] for some in sets]
    least = min(d.memory_bytes for d in free)

    def left_after(gone: Device) -> int:
        return closeness([d for d in free if d is not gone], links)[0]

    best = max(left_after(d) for d in free if d.memory_bytes == least)
    (place,) = placement.choose(request, devices, taken, links)
    chosen = next(d for d in free if d.uuid == place.uuid)
    assert left_after(chosen) == best
    assert chosen.index == min(
        d.index for d in free if d.memory_bytes == least and left_after(d) == best
    )


@settings(max_examples=examples(60))
@given(
    st.integers(2, 16).flatmap(lambda size: st.tuples(st.just(size), st.integers(2, min(size, 6)))),
    st.randoms(use_true_random=False),
    st.sampled_from([(0, 1000), (0, 2), (10, 10), (0, 0)]),
)
def test_up_to_sixteen_the_best_connected_set_is_found(
    shape: tuple[int, int], random: Any, span: tuple[int, int]
) -> None:
    size, count = shape
    names = [f"{n:02d}" for n in range(size)]
    links = {key: random.randint(*span) for key in itertools.combinations(names, 2)}
    best = max(
        (
            sum(links[key] for key in itertools.combinations(some, 2)),
            min(links[key] for key in itertools.combinations(some, 2)),
            tuple(-names.index(name) for name in some),
        )
        for some in itertools.combinations(names, count)
    )
    found = topology.best_connected(names, count, links)
    assert (found.total, found.least, tuple(-n for n in found.members)) == best


@settings(max_examples=examples(40))
@given(st.integers(17, 24), st.integers(2, 3), st.randoms(use_true_random=False))
def test_beyond_sixteen_the_set_comes_close_to_the_best(size: int, count: int, random: Any) -> None:
    names = [f"{n:02d}" for n in range(size)]
    links = {key: random.randint(0, 1000) for key in itertools.combinations(names, 2)}
    best = max(
        sum(links[key] for key in itertools.combinations(some, 2))
        for some in itertools.combinations(names, count)
    )
    found = topology.best_connected(names, count, links)
    assert len(set(found.members)) == count
    assert found.total == sum(
        links[names[a], names[b]] for a, b in itertools.combinations(found.members, 2)
    )
    assert found.total >= 0.9 * best
