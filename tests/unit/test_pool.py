"""Real: everything; the pool is pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gpuspawner.core.errors import NoDeviceFree, TooMuchAsked
from gpuspawner.devices import placement
from gpuspawner.devices.models import Device, DeviceProcess, DeviceStatus, model_matches
from gpuspawner.leases.models import Request, Slot

GIB = 2**30
Links = Mapping[tuple[str, str], int]


def device(index: int, model: str = "A100-80GB", gib: int = 80, **fields: Any) -> Device:
    return Device(
        uuid=f"GPU-{index:04d}", index=index, model=model, memory_bytes=gib * GIB, **fields
    )


def fleet(*counts: tuple[int, str, int]) -> list[Device]:
    kinds = [(model, gib) for count, model, gib in counts for _ in range(count)]
    return [device(index, model, gib) for index, (model, gib) in enumerate(kinds)]


def indices(places: Sequence[Slot]) -> list[int]:
    return [int(place.uuid.removeprefix("GPU-")) for place in places]


def links_of(scores: Mapping[tuple[int, int], int]) -> dict[tuple[str, str], int]:
    return {(f"GPU-{a:04d}", f"GPU-{b:04d}"): score for (a, b), score in scores.items()}


def in_use(*numbers: int) -> list[Slot]:
    return [Slot(f"GPU-{number:04d}") for number in numbers]


# Which devices a request means.


@pytest.mark.parametrize(
    ("wanted", "model", "matches"),
    [
        (None, "Tesla T4", True),
        ("", "Tesla T4", True),
        ("a100", "NVIDIA A100-SXM4-80GB", True),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("A100_80gb", "NVIDIA A100-SXM4-80GB", True),
        ("A100-40GB", "NVIDIA A100-SXM4-80GB", False),
        ("nvidia a100", "A100-80GB", False),
        ("A10", "NVIDIA A100-SXM4-80GB", False),
        ("A10", "NVIDIA A10", True),
        ("L4", "NVIDIA L40S", False),
        ("L40", "NVIDIA L40S", False),
        ("RTX4090", "NVIDIA GeForce RTX 4090", True),
        ("rtx 4090", "RTX4090", True),
        ("4090", "NVIDIA GeForce RTX 4090", True),
        ("1080Ti", "NVIDIA GeForce GTX 1080 Ti", False),
        ("gtx 1080 ti", "NVIDIA GeForce GTX 1080 Ti", True),
        ("1g.5gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", True),
        ("2g.10gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", False),
    ],
)
def test_a_model_is_matched_by_whole_words(wanted: str | None, model: str, matches: bool) -> None:
    assert model_matches(wanted or "", model) is matches


def test_an_exact_name_means_that_model_alone() -> None:
    whole, part = "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    devices = [device(0, part, 5), device(1, whole, 40)]
    assert indices(placement.choose(Request(devices=1, model=whole), devices, (), {})) == [1]
    assert indices(placement.choose(Request(devices=1, model="A100"), devices, (), {})) == [0]
    with pytest.raises(NoDeviceFree, match=f"The only {whole} GPU is in use"):
        placement.choose(Request(devices=1, model=whole), devices, in_use(1), {})


def test_an_exact_name_with_too_little_memory_falls_back_to_its_words() -> None:
    devices = [device(0, "A100", 40), device(1, "A100-80GB", 80)]
    request = Request(devices=1, model="A100", memory_bytes=80 * 10**9)
    assert indices(placement.choose(request, devices, (), {})) == [1]


# Which devices can be given at all.


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"status": DeviceStatus.UNKNOWN, "reason": "GPU is lost"}, "GPU is lost"),
        ({"status": DeviceStatus.UNKNOWN}, "does not answer"),
        ({"status": DeviceStatus.DRAINED, "reason": "drained by root"}, "drained by root"),
        ({"status": DeviceStatus.DRAINED}, "machine is drained"),
        ({"status": DeviceStatus.PARENT}, "its instances are leased"),
        ({"compute_mode": "prohibited"}, "nvidia-smi --compute-mode=0"),
    ],
)
def test_what_cannot_be_leased_says_why(fields: dict[str, Any], says: str) -> None:
    reason = placement.leasable(device(0, **fields))
    assert reason is not None and says in reason
    assert placement.free_places([device(0, **fields)], ()) == []


@pytest.mark.parametrize("mode", ["default", "exclusive_process"])
def test_a_healthy_device_can_be_leased(mode: str) -> None:
    assert placement.leasable(device(0, compute_mode=mode)) is None


def test_a_compute_process_occupies_a_device_only_when_no_lease_explains_it() -> None:
    used = device(0, slots=2, processes=(DeviceProcess(7),))
    drawn = device(1, processes=(DeviceProcess(8, kind="graphics"),))
    assert placement.occupied(used, ()) and not placement.occupied(used, in_use(0))
    assert not placement.occupied(drawn, ())
    assert placement.free_places([used, drawn], ()) == [Slot("GPU-0001")]
    assert placement.free_places([used, drawn], in_use(0)) == [
        Slot("GPU-0000", 1),
        Slot("GPU-0001"),
    ]


def test_a_shared_device_gives_its_lowest_free_slot() -> None:
    shared = [device(0, slots=3)]
    taken = [Slot("GPU-0000", 0), Slot("GPU-0000", 2)]
    assert placement.choose(Request(devices=1), shared, taken, {}) == (Slot("GPU-0000", 1),)


def test_an_environment_that_runs_on_some_models_gets_only_those() -> None:
    devices = fleet((1, "T4", 16), (1, "L4", 24), (1, "A100-80GB", 80))
    assert indices(
        placement.choose(Request(devices=1, models=("A100", "L4")), devices, (), {})
    ) == [1]
    both = Request(devices=1, models=("A100", "L4"), model="A100")
    assert indices(placement.choose(both, devices, (), {})) == [2]


# Which one of several.


def test_no_device_is_asked_for() -> None:
    assert placement.choose(Request(devices=0), [], (), {}) == ()


def test_the_tightest_fit_keeps_large_devices_free() -> None:
    devices = fleet((2, "A100-80GB", 80), (1, "A100-40GB", 40), (1, "T4", 16))
    assert indices(placement.choose(Request(devices=1), devices, (), {})) == [3]
    assert indices(placement.choose(Request(devices=1), devices, in_use(3), {})) == [2]
    big = Request(devices=1, memory_bytes=41 * GIB)
    assert indices(placement.choose(big, devices, (), {})) == [0]


def test_a_single_device_is_the_one_the_others_miss_least() -> None:
    devices = fleet((4, "A100-80GB", 80))
    links = links_of({(0, 1): 400, (2, 3): 50})
    one = Request(devices=1)
    assert indices(placement.choose(one, devices, (), links)) == [2]
    # GPU 3 is gone: nothing is left that would miss GPU 2, so the linked pair stays whole.
    assert indices(placement.choose(one, devices, in_use(3), links)) == [2]
    assert indices(placement.choose(one, devices, in_use(1, 2), links)) == [0]


def test_several_are_the_best_connected_of_those_free() -> None:
    devices = fleet((6, "A100-80GB", 80))
    links = links_of({(0, 1): 100, (2, 3): 400, (4, 5): 400, (1, 2): 50})
    two = Request(devices=2)
    assert indices(placement.choose(two, devices, (), links)) == [2, 3]
    assert indices(placement.choose(two, devices, in_use(3), links)) == [4, 5]
    assert indices(placement.choose(two, devices, in_use(3, 4), links)) == [0, 1]
    assert indices(placement.choose(two, devices, in_use(0, 3, 4), links)) == [1, 2]


def test_of_equal_sums_the_better_worst_pair_wins() -> None:
    devices = fleet((6, "A100-80GB", 80))
    uneven = {(0, 1): 200, (0, 2): 100, (1, 2): 0}
    even = {(3, 4): 100, (3, 5): 100, (4, 5): 100}
    chosen = placement.choose(Request(devices=3), devices, (), links_of(uneven | even))
    assert indices(chosen) == [3, 4, 5]


@pytest.mark.parametrize("models", [("A", "B"), ("B", "A"), ("A", "A")])
def test_models_of_equal_memory_compete_by_connection(models: tuple[str, str]) -> None:
    devices = fleet((3, models[0], 80), (3, models[1], 80))
    three = Request(devices=3)
    weak = {(0, 1): 100, (0, 2): 100}
    strong = {(3, 4): 100, (3, 5): 100, (4, 5): 50}
    assert indices(placement.choose(three, devices, (), links_of(weak | strong))) == [3, 4, 5]
    uneven = {(0, 1): 200, (0, 2): 40, (1, 2): 10}
    assert indices(placement.choose(three, devices, (), links_of(uneven | strong))) == [3, 4, 5]
    assert indices(placement.choose(three, devices, (), links_of({(0, 1): 900} | strong))) == [
        0,
        1,
        2,
    ]
    assert indices(placement.choose(three, devices, (), {})) == [0, 1, 2]


def test_one_lease_never_mixes_models() -> None:
    devices = fleet((1, "T4", 16), (2, "L4", 24), (2, "A100-40GB", 40))
    assert indices(placement.choose(Request(devices=2), devices, (), {})) == [1, 2]
    with pytest.raises(NoDeviceFree, match="only 1 of one model is free"):
        placement.choose(Request(devices=2), devices, in_use(1, 3), {})


def test_several_whole_gpus_go_before_instances_that_cuda_cannot_combine() -> None:
    instances = [
        replace(device(n, "A100 MIG 1g.5gb", 5), uuid=f"MIG-{n}", parent_uuid="GPU-0000")
        for n in range(3)
    ]
    devices = [*instances, device(3, "A100", 40), device(4, "A100", 40)]
    assert placement.choose(Request(devices=1), devices, (), {}) == (Slot("MIG-0"),)
    assert placement.choose(Request(devices=2), devices, (), {}) == tuple(in_use(3, 4))
    assert len(placement.choose(Request(devices=3), devices, (), {})) == 3


# Refusals.


def refusal(
    request: Request, devices: Sequence[Device], taken: Sequence[Slot] = ()
) -> tuple[type, str, dict[str, Any]]:
    with pytest.raises((NoDeviceFree, TooMuchAsked)) as caught:
        placement.choose(request, devices, taken, {})
    return type(caught.value), caught.value.message, caught.value.fields


SIX = fleet((4, "A100-80GB", 80), (2, "T4", 16))


@pytest.mark.parametrize(
    ("request_", "devices", "message"),
    [
        (Request(devices=1), [], "This hub has no GPU. Start without one."),
        (
            Request(devices=1),
            [device(0, status=DeviceStatus.PARENT), device(1, compute_mode="prohibited")],
            "This hub has no GPU. Start without one.",
        ),
        (
            Request(devices=5),
            SIX[:4],
            "You asked for 5 GPUs. This hub has 4 GPUs. Ask for 4 at most.",
        ),
        (
            Request(devices=5),
            SIX,
            "You asked for 5 GPUs. This hub has 6 GPUs, and those of one server are of one "
            "model: 4 A100-80GB and 2 T4. Ask for 4 at most.",
        ),
        (
            Request(devices=5, memory_bytes=80 * 10**9),
            SIX,
            "You asked for 5 GPUs. This hub has 6 GPUs, of which 4 have 80 GB or more. "
            "Ask for 4 at most.",
        ),
        (
            Request(devices=3, model="T4"),
            SIX,
            "You asked for 3 GPUs. This hub has 6 GPUs, of which 2 are T4. Ask for 2 at most.",
        ),
        (
            Request(devices=3, model="T4", memory_bytes=16 * GIB),
            SIX,
            "You asked for 3 GPUs. This hub has 6 GPUs, of which 2 are T4 with 16 GB or more. "
            "Ask for 2 at most.",
        ),
        (
            Request(devices=1, model="H100"),
            SIX,
            "This hub has no H100 GPU. It has 4 A100-80GB and 2 T4.",
        ),
        (
            Request(devices=1, memory_bytes=96 * 10**9),
            SIX,
            "This hub has no GPU with 96 GB. The most is 80 GB: ask for less.",
        ),
        (
            Request(devices=2, model="t4", memory_bytes=40 * GIB),
            SIX,
            "This hub has no t4 GPU with 40 GB. The most is 16 GB: ask for less.",
        ),
        (
            Request(devices=1, environment="torch", models=("H100", "L40S")),
            SIX,
            "The environment 'torch' runs on H100 or L40S, and this hub has 4 A100-80GB and 2 T4.",
        ),
        (
            Request(devices=1, environment="torch", models=("A100",), model="T4"),
            SIX,
            "The environment 'torch' runs on A100, not on T4.",
        ),
        (
            Request(devices=3, models=("T4", "L4")),
            SIX,
            "You asked for 3 GPUs. This hub has 6 GPUs, of which 2 are T4 or L4. "
            "Ask for 2 at most.",
        ),
        (
            Request(devices=1, models=("T4",), memory_bytes=40 * GIB),
            SIX,
            "This hub has no T4 GPU with 40 GB. The most is 16 GB: ask for less.",
        ),
    ],
)
def test_too_much_says_what_would_fit(
    request_: Request, devices: list[Device], message: str
) -> None:
    kind, said, _ = refusal(request_, devices)
    assert (kind, said) == (TooMuchAsked, message)


def test_too_much_carries_the_numbers() -> None:
    _, _, fields = refusal(Request(devices=5), SIX)
    assert fields == {"asked": 5, "most": 4, "existing": 6}


def test_all_in_use() -> None:
    taken = in_use(0, 1, 2, 3)
    kind, said, fields = refusal(Request(devices=1), SIX[:4], taken)
    assert (kind, said) == (NoDeviceFree, "All 4 GPUs are in use.")
    others = dict.fromkeys(("occupied", "unknown", "drained", "free"), 0)
    assert fields == {"matching": 4, "in_use": 4, **others}
    _, said, _ = refusal(Request(devices=1, model="A100", memory_bytes=40 * GIB), SIX, taken)
    assert said == "All 4 A100 GPUs with 40 GB are in use."
    _, said, _ = refusal(Request(devices=1, models=("A100", "H100")), SIX, taken)
    assert said == "All 4 A100 or H100 GPUs are in use."
    assert refusal(Request(devices=1), SIX[:1], taken)[1] == "The only GPU is in use."


def test_each_reason_is_counted_once_and_said() -> None:
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
        "and 1 does not answer."
    )
    _, said, _ = refusal(Request(devices=2), devices, in_use(0))
    assert said == (
        "You asked for 2 GPUs, and only 1 is free: of 4, 1 is in use, "
        "1 is used by programs outside the hub and 1 does not answer."
    )


def test_a_device_that_does_not_answer_still_exists_so_waiting_may_help() -> None:
    lost = [replace(d, status=DeviceStatus.UNKNOWN) for d in SIX]
    kind, said, _ = refusal(Request(devices=4, model="A100"), lost)
    assert (kind, said) == (NoDeviceFree, "No A100 GPU is free: of 4, 4 do not answer.")


def test_a_drained_device_comes_back_so_waiting_may_help() -> None:
    closed = [replace(d, status=DeviceStatus.DRAINED) for d in SIX]
    kind, said, _ = refusal(Request(devices=4, model="A100"), closed)
    assert (kind, said) == (NoDeviceFree, "No A100 GPU is free: of 4, 4 are drained.")


@pytest.mark.parametrize(
    ("memory_bytes", "text"),
    [(80 * GIB, "80 GB"), (80 * 10**9, "80 GB"), (81559 * 2**20, "85 GB"), (0, "0 GB")],
)
def test_memory_is_named_as_people_name_it(memory_bytes: int, text: str) -> None:
    assert placement.format_memory(memory_bytes) == text


# Large fleets.


def eights(count: int) -> Links:
    """Devices linked as in servers of eight: pairs strongly, fours less, eights little."""
    links = {}
    for a in range(count):
        for b in range(a + 1, min(count, a - a % 8 + 8)):
            links[a, b] = 400 if a // 2 == b // 2 else 50 if a // 4 == b // 4 else 20
    return links_of(links)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_in_a_large_fleet_whole_groups_are_found(count: int) -> None:
    devices = fleet((400, "A100-80GB", 80))
    # One of each eight is in use, but for the eight at 320.
    taken = in_use(*(first + 5 for first in range(0, 400, 8) if first != 320))
    groups = defaultdict(list)
    for index in indices(placement.choose(Request(devices=count), devices, taken, eights(400))):
        groups[index // count].append(index)
    (group,) = groups.values()
    assert len(group) == count
