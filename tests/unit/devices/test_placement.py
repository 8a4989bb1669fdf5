"""Which devices a request gets. Pure; a slow placement checks the quick one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspawner.core.errors import NoDeviceFree, TooMuchAsked
from gpuspawner.core.units import format_memory
from gpuspawner.devices import placement, topology
from gpuspawner.devices.models import Device, DeviceProcess, DeviceStatus, model_matches
from gpuspawner.leases.models import Request, Sharing, Slot
from tests.support.placements import choose, free_slots
from tests.support.tier import examples

GIB = 2**30
Links = Mapping[tuple[str, str], int]


def device(index: int, model: str = "A100-80GB", gib: int = 80, **fields: Any) -> Device:
    return Device(
        uuid=f"GPU-{index:04d}", index=index, model=model, memory_bytes=gib * GIB, **fields
    )


def fleet(*counts: tuple[int, str, int]) -> list[Device]:
    kinds = [(model, gib) for count, model, gib in counts for _ in range(count)]
    return [device(index, model, gib) for index, (model, gib) in enumerate(kinds)]


def links_of(scores: Mapping[tuple[int, int], int]) -> dict[tuple[str, str], int]:
    return {(f"GPU-{a:04d}", f"GPU-{b:04d}"): score for (a, b), score in scores.items()}


def in_use(*numbers: int) -> list[Slot]:
    return [Slot(f"GPU-{number:04d}") for number in numbers]


def chosen(
    fleet: Sequence[Device], taken: Sequence[Slot] = (), links: Links | None = None, **asked: Any
) -> list[int]:
    """Return the indices of the devices that a request is given; it is for one unless it says."""
    request = Request(**{"devices": 1, **asked})
    return [int(place.uuid[-4:]) for place in choose(request, fleet, taken, links)]


# Which devices a request means.


@pytest.mark.parametrize(
    ("wanted", "model", "matches"),
    [
        ("", "Tesla T4", True),
        ("a100", "NVIDIA A100-SXM4-80GB", True),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("A100-40GB", "NVIDIA A100-SXM4-80GB", False),
        ("nvidia a100", "A100-80GB", False),
        ("A10", "NVIDIA A100-SXM4-80GB", False),
        ("L4", "NVIDIA L40S", False),
        ("RTX4090", "NVIDIA GeForce RTX 4090", True),
        ("rtx 4090", "RTX4090", True),
        ("1080Ti", "NVIDIA GeForce GTX 1080 Ti", False),
        ("gtx 1080 ti", "NVIDIA GeForce GTX 1080 Ti", True),
        ("80GB A100", "NVIDIA A100-SXM4-80GB", True),
        ("1g.5gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", True),
        ("MIG 1g.5gb", "NVIDIA A100-SXM4-80GB", False),
        ("nvidia", "NVIDIA H100 PCIe", True),
        ("2g.10gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", False),
    ],
)
def test_model_names_match_by_whole_words(wanted: str, model: str, matches: bool) -> None:
    assert model_matches(wanted, model) is matches


def test_exact_model_name_beats_a_partial_match() -> None:
    whole, part = "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    devices = [device(0, part, 5), device(1, whole, 40)]
    assert chosen(devices, model=whole) == [1]
    assert chosen(devices, model="A100") == [0]
    with pytest.raises(NoDeviceFree, match=f"The only {whole} GPU is in use"):
        chosen(devices, in_use(1), model=whole)

    devices = [device(0, "A100", 40), device(1, "A100-80GB", 80)]
    assert chosen(devices, model="A100", memory_bytes=80 * 10**9) == [1]

    devices = fleet((1, "T4", 16), (1, "L4", 24), (1, "A100-80GB", 80))
    assert chosen(devices, models=("A100", "L4")) == [1]
    assert chosen(devices, models=("A100", "L4"), model="A100") == [2]


# Which one of several.


def test_best_linked_model_wins_at_equal_memory() -> None:
    devices = fleet((3, "B", 80), (3, "A", 80))
    strong = {(3, 4): 100, (3, 5): 100, (4, 5): 50}
    for other, expected in (
        ({(0, 1): 200, (0, 2): 40, (1, 2): 10}, [3, 4, 5]),
        ({(0, 1): 900}, [0, 1, 2]),
    ):
        scores: dict[tuple[int, int], int] = {**other, **strong}
        assert chosen(devices, links=links_of(scores), devices=3) == expected
    assert chosen(devices, devices=3) == [0, 1, 2]


def test_multi_gpu_request_prefers_whole_gpus_over_mig() -> None:
    instances = [
        replace(device(n, "A100 MIG 1g.5gb", 5), uuid=f"MIG-{n}", parent_uuid="GPU-0000")
        for n in range(3)
    ]
    devices = [*instances, device(3, "A100", 40), device(4, "A100", 40)]
    assert choose(Request(devices=1), devices) == (Slot("MIG-0"),)
    assert choose(Request(devices=2), devices) == tuple(in_use(3, 4))
    assert len(choose(Request(devices=3), devices)) == 3
    assert choose(Request(devices=0), []) == ()


# Refusals.


def refusal(
    request: Request, devices: Sequence[Device], taken: Sequence[Slot] = ()
) -> tuple[type, str, dict[str, Any]]:
    with pytest.raises((NoDeviceFree, TooMuchAsked)) as caught:
        choose(request, devices, taken)
    return type(caught.value), caught.value.message, caught.value.fields


SIX = fleet((4, "A100-80GB", 80), (2, "T4", 16))


@pytest.mark.parametrize(
    ("asked", "of_them"),
    [
        ({"devices": 5}, "and those of one server are of one model: 4 A100-80GB and 2 T4"),
        ({"devices": 5, "memory_bytes": 80 * 10**9}, "but only 4 with 80 GB or more"),
        ({"devices": 3, "model": "T4"}, "but only 2 T4"),
        (
            {"devices": 3, "model": "T4", "memory_bytes": 16 * GIB},
            "but only 2 T4 with 16 GB or more",
        ),
    ],
)
def test_oversized_request_states_the_largest_possible_count(
    asked: dict[str, Any], of_them: str
) -> None:
    count = asked["devices"]
    kind, said, fields = refusal(Request(**asked), SIX)
    assert (kind, said) == (
        TooMuchAsked,
        f"You asked for {count} GPUs. This hub has 6 GPUs, {of_them}. Ask for {count - 1} at most.",
    )
    assert fields == {"asked": count, "most": count - 1, "existing": 6}


NEITHER = [device(0, status=DeviceStatus.PARENT), device(1, compute_mode="prohibited")]


@pytest.mark.parametrize(
    ("devices", "asked", "message"),
    [
        ([], {}, "This hub has no GPU. Start without one."),
        (NEITHER, {}, "This hub has no GPU. Start without one."),
        (SIX[:4], {"devices": 5}, "You asked for 5 GPUs. This hub has 4 GPUs. Ask for 4 at most."),
        (SIX, {"model": "H100"}, "This hub has no H100 GPU. It has 4 A100-80GB and 2 T4."),
        (
            SIX,
            {"devices": 2, "model": "t4", "memory_bytes": 40 * GIB},
            "This hub has no t4 GPU with 40 GB. The most is 16 GB: ask for less.",
        ),
        (
            SIX,
            {"environment": "torch", "models": ("H100", "L40S")},
            "The environment 'torch' runs on H100 or L40S, and this hub has 4 A100-80GB and 2 T4.",
        ),
        (
            SIX,
            {"environment": "torch", "models": ("A100",), "model": "T4"},
            "The environment 'torch' runs on A100, not on T4.",
        ),
    ],
)
def test_impossible_request_names_what_is_missing(
    devices: list[Device], asked: dict[str, Any], message: str
) -> None:
    assert refusal(Request(**{"devices": 1, **asked}), devices)[:2] == (TooMuchAsked, message)


@pytest.mark.parametrize(
    ("devices", "asked", "message"),
    [
        (SIX[:4], {}, "All 4 GPUs are in use."),
        (SIX[:1], {}, "The only GPU is in use."),
        (
            SIX,
            {"model": "A100", "memory_bytes": 40 * GIB},
            "All 4 A100 GPUs with 40 GB are in use.",
        ),
        (SIX, {"models": ("A100", "H100")}, "All 4 A100 or H100 GPUs are in use."),
    ],
)
def test_refusal_says_that_all_matching_gpus_are_in_use(
    devices: list[Device], asked: dict[str, Any], message: str
) -> None:
    found = refusal(Request(devices=1, **asked), devices, in_use(0, 1, 2, 3))
    assert found[:2] == (NoDeviceFree, message)


def test_refusal_counts_each_unavailable_device_once() -> None:
    sick = replace(SIX[1], status=DeviceStatus.UNKNOWN)
    sick_in_use = replace(SIX[0], status=DeviceStatus.UNKNOWN)
    used = replace(SIX[2], processes=(DeviceProcess(7),))
    devices = [sick_in_use, sick, used, SIX[3]]
    kind, said, fields = refusal(Request(devices=1), devices, in_use(0, 3))
    assert kind is NoDeviceFree
    assert fields == {
        "matching": 4, "in_use": 2, "occupied": 1, "unknown": 1, "drained": 0, "free": 0
    }  # fmt: skip
    assert said == (
        "No GPU is free: of 4, 2 are in use, 1 is used by programs outside the hub "
        "and 1 is not responding."
    )
    _, said, _ = refusal(Request(devices=2), devices, in_use(0))
    assert said == (
        "You asked for 2 GPUs, and only 1 is free: of 4, 1 is in use, "
        "1 is used by programs outside the hub and 1 is not responding."
    )
    drained = [replace(device, status=DeviceStatus.DRAINED) for device in SIX]
    kind, said, _ = refusal(Request(devices=4, model="A100"), drained)
    assert (kind, said) == (NoDeviceFree, "No A100 GPU is free: of 4, 4 are drained.")


def test_device_memory_is_formatted_in_gb() -> None:
    sizes = (80 * GIB, 80 * 10**9, 81559 * 2**20, 160 * 10**6, 0)
    assert [*map(format_memory, sizes)] == ["80 GB", "80 GB", "85 GB", "160 MB", "0 GB"]


# Large fleets.


def eights(count: int) -> Links:
    """Devices linked as in servers of eight: pairs strongly, fours less, eights little."""
    links = {}
    for a in range(count):
        for b in range(a + 1, min(count, a - a % 8 + 8)):
            links[a, b] = 400 if a // 2 == b // 2 else 50 if a // 4 == b // 4 else 20
    return links_of(links)


def test_large_fleet_request_gets_a_fully_linked_group() -> None:
    devices, links = fleet((400, "A100-80GB", 80)), eights(400)
    # One of each eight is in use, but for the eight at 320.
    taken = in_use(*(first + 5 for first in range(0, 400, 8) if first != 320))
    for count in (2, 4, 8):
        found = chosen(devices, taken, links, devices=count)
        assert len(found) == count and len({index // count for index in found}) == 1


# Against every set there is.


MODES = ["default", "default", "exclusive_process", "prohibited"]
MODELS = (("A100-80GB", 80), ("A100-40GB", 40), ("T4", 16))


LAB = ("vision-lab",)


@st.composite
def devices_and_taken(draw: st.DrawFn) -> tuple[list[Device], list[Slot]]:
    devices = []
    for index in range(draw(st.integers(0, 9))):
        model, gib = draw(st.sampled_from(MODELS))
        kinds = draw(st.lists(st.sampled_from(["compute", "graphics"]), max_size=1))
        reserved_for = draw(st.sampled_from([(), (), (), LAB]))
        devices.append(
            device(
                index,
                model,
                gib,
                slots=draw(st.sampled_from([1, 1, 1, 2])),
                reserved_for=reserved_for,
                lent=bool(reserved_for) and draw(st.booleans()),
                status=draw(st.sampled_from([DeviceStatus.OK] * 6 + list(DeviceStatus))),
                compute_mode=draw(st.sampled_from(MODES)),
                processes=tuple(DeviceProcess(9, kind=kind) for kind in kinds),
            )
        )
    every = [Slot(d.uuid, slot) for d in devices for slot in range(d.slots)]
    taken = draw(st.lists(st.sampled_from(every), unique=True)) if every else []
    return draw(st.permutations(devices)), taken


MEANT = {
    None: {model for model, _ in MODELS},
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
    smallest=st.booleans(),
    groups=st.sampled_from([(), LAB]),
    preemptible=st.booleans(),
)


def is_for(request: Request, d: Device) -> bool:
    """Whether a device is open to everybody, reserved for the request's groups, or lent to it."""
    return not d.reserved_for or request.groups == LAB or (d.lent and request.preemptible)


def whose(request: Request, d: Device) -> int:
    """Own reserved devices go first, then open ones, then those that are lent."""
    return 1 if not d.reserved_for else 0 if request.groups == LAB else 2


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
        if not is_for(request, d):
            return False
        if ignoring:
            return True
        if d.status is not DeviceStatus.OK or any(place.uuid == d.uuid for place in taken):
            return False
        return all(p.kind != "compute" for p in d.processes)

    possible = sorted((d for d in devices if allowed(d)), key=lambda d: d.index)
    return [
        some
        for some in itertools.combinations(possible, request.devices)
        if len({(d.model, d.slots, d.reserved_for, d.lent) for d in some}) == 1
    ]


def closeness(some: Sequence[Device], links: Links) -> tuple[int, int]:
    scores = [links.get((a.uuid, b.uuid), 0) for a, b in itertools.combinations(some, 2)]
    return sum(scores), min(scores, default=0)


@settings(max_examples=examples(400))
@given(devices_and_taken(), requests, links_between())
def test_placement_matches_exhaustive_search(
    fleet_and_taken: tuple[list[Device], list[Slot]], request: Request, links: Links
) -> None:
    devices, taken = fleet_and_taken
    sets = feasible_sets(request, devices, taken)
    if not sets:
        expected = (
            NoDeviceFree if feasible_sets(request, devices, taken, ignoring=True) else TooMuchAsked
        )
        with pytest.raises(expected) as caught:
            choose(request, devices, taken, links)
        fields = caught.value.fields
        if expected is NoDeviceFree:
            parts = ("in_use", "occupied", "unknown", "drained", "free")
            assert fields["matching"] == sum(fields[part] for part in parts)
            assert fields["free"] < fields["matching"]
        else:
            assert fields["most"] < fields["asked"] == request.devices
        return
    places = choose(request, devices, taken, links)
    by_uuid = {d.uuid: d for d in devices}
    given_devices = tuple(by_uuid[place.uuid] for place in places)
    assert given_devices in sets, "distinct, healthy, of one model, as many as asked"
    assert not set(places) & set(taken)
    assert all(place in free_slots(devices, taken) for place in places)
    assert choose(request, devices[::-1], taken[::-1], links) == places
    first_of = min(whose(request, some[0]) for some in sets)
    assert whose(request, given_devices[0]) == first_of
    sets = [some for some in sets if whose(request, some[0]) == first_of]
    least = min(min(d.memory_bytes for d in some) for some in sets)
    assert given_devices[0].memory_bytes == least
    if request.devices > 1:
        fitting = [some for some in sets if some[0].memory_bytes == least]
        least_shared = min(some[0].slots > 1 for some in fitting)
        fitting = [some for some in fitting if (some[0].slots > 1) == least_shared]
        best = max(closeness(some, links) for some in fitting)
        assert closeness(given_devices, links) == best
        first = next(some for some in fitting if closeness(some, links) == best)
        assert given_devices == first, "of equal sets the one with the lowest indices"


def feasible_shares(
    request: Request, devices: Sequence[Device], taken: Sequence[Slot], ignoring: bool = False
) -> list[tuple[Slot, ...]]:
    """Every share that a request for one may get, found by trying all sets of slots."""
    found: list[tuple[Slot, ...]] = []
    for d in devices:
        mine = [slot for slot in range(d.slots) if Slot(d.uuid, slot) in taken]
        if d.slots == 1 or d.status is DeviceStatus.PARENT or d.compute_mode == "prohibited":
            continue
        if not is_for(request, d) or d.model not in MEANT[request.model]:
            continue
        if request.models and not any(d.model in MEANT[model] for model in request.models):
            continue
        is_occupied = not mine and any(p.kind == "compute" for p in d.processes)
        if not ignoring and (d.status is not DeviceStatus.OK or is_occupied):
            continue
        slots = [Slot(d.uuid, slot) for slot in range(d.slots)]
        free = [slot for slot in slots if ignoring or slot not in taken]
        sizes = range(1, d.slots)
        large = [n for n in sizes if Fraction(d.memory_bytes, d.slots) * n >= request.memory_bytes]
        found += itertools.combinations(free, large[0]) if large else []
    return found


@settings(max_examples=examples(400))
@given(devices_and_taken(), requests, st.sets(st.integers(0, 8)))
def test_placement_of_shares_matches_exhaustive_search(
    fleet_and_taken: tuple[list[Device], list[Slot]], asked: Request, mine: set[int]
) -> None:
    devices, taken = fleet_and_taken
    request = replace(asked, sharing=Sharing.SLOT, devices=1)
    by_uuid = {d.uuid: d for d in devices}
    own = {d.uuid for d in devices if d.index in mine}
    fleet = placement.PlacementIndex(devices, {})
    allowed = [s for s in feasible_shares(request, devices, taken) if s[0].uuid not in own]
    if not allowed:
        possible = feasible_shares(request, devices, taken, ignoring=True)
        with pytest.raises(NoDeviceFree if possible else TooMuchAsked):
            fleet.choose(request, placement.texts(taken), shared=own)
        return
    chosen = fleet.choose(request, placement.texts(taken), shared=own)
    assert chosen in allowed, "free, suitable, and the only one of its member on the device"

    def rank(share: tuple[Slot, ...]) -> tuple[object, ...]:
        device = by_uuid[share[0].uuid]
        left = len({slot for some in allowed for slot in some if slot.uuid == device.uuid})
        size = device.memory_bytes * len(share) // device.slots if request.smallest else 0
        rest = left == device.slots, device.memory_bytes, left, device.index, share
        return whose(request, device), size, *rest

    assert chosen == min(allowed, key=rank), "own first, partly used, then the tightest fit"
    with pytest.raises(TooMuchAsked):
        fleet.choose(replace(request, devices=2), placement.texts(taken))


@settings(max_examples=examples(200))
@given(
    devices_and_taken(),
    st.lists(st.tuples(requests, st.lists(st.integers(0, 17), unique=True)), min_size=2),
    links_between(),
)
def test_earlier_requests_do_not_change_placement(
    fleet_and_taken: tuple[list[Device], list[Slot]],
    questions: list[tuple[Request, list[int]]],
    links: Links,
) -> None:
    devices, _ = fleet_and_taken
    every = [Slot(d.uuid, slot) for d in devices for slot in range(d.slots)]
    asked = placement.PlacementIndex(devices, links)
    for request, numbers in questions:
        taken = placement.texts([*(every[n] for n in numbers if n < len(every)), Slot("GPU-gone")])
        new = placement.PlacementIndex(devices, links)
        assert asked.free(taken) == new.free(taken)
        assert answer(asked, request, taken) == answer(new, request, taken)


def answer(fleet: placement.PlacementIndex, request: Request, taken: frozenset[str]) -> object:
    try:
        return fleet.choose(request, taken)
    except (NoDeviceFree, TooMuchAsked) as error:
        return type(error), error.fields


@settings(max_examples=examples(200))
@given(devices_and_taken(), links_between())
def test_single_device_choice_preserves_links_of_the_rest(
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
    (place,) = choose(request, devices, taken, links)
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
def test_best_connected_set_is_exact_up_to_sixteen_devices(
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
def test_connected_set_is_near_optimal_beyond_sixteen_devices(
    size: int, count: int, random: Any
) -> None:
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
