"""The policies that benchmarks/packing.py compares with ours, on cases counted by hand."""

from __future__ import annotations

from itertools import repeat
from math import inf
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support import openb
from benchmarks.support.fragmentation import (
    ANY,
    Chooser,
    Fragments,
    Node,
    at_random,
    best_fit,
    fgd,
    fill,
    needed,
)
from benchmarks.support.openb import WHOLE, Machine, Pod
from benchmarks.support.our_slots import OurChoice, share_or_whole

HALF = Pod(1000, 1, 1, 500)
ALONE = Pod(1000, 1, 1, WHOLE)
PAIR = Pod(1000, 1, 2, WHOLE)
NO_GPU = Pod(1000, 1, 0, 0)


def node(*left: int, cpu: int = 8000, slots: tuple[int, ...] = ()) -> Node:
    """A node with so much left of its processors and of each GPU."""
    there = Node.empty(Machine(8000, 100, len(left), "A"), slots)
    there.cpu, there.left = cpu, list(left)
    return there


def test_fragment_is_what_the_next_task_cannot_use_on_average() -> None:
    kinds = {
        Pod(2000, 1, 1, 600): 0.5,  # cannot use the 500
        Pod(8000, 1, 1, WHOLE): 0.25,  # needs more processors: all 1500
        Pod(1000, 1, 0, 0): 0.25,  # uses no GPU: all 1500
    }
    assert Fragments(kinds).of(4000, [500, 1000], [ANY, ANY]) == 0.5 * 500 + 0.5 * 1500


@pytest.mark.parametrize(
    ("left", "fragment"), [((1000, 900), 1900), ((1000, 1000, 300), 300), ((0, 0), 0)]
)
def test_task_with_several_gpus_needs_them_entirely(left: tuple[int, ...], fragment: int) -> None:
    assert Fragments({PAIR: 1.0}).of(8000, left, [ANY] * len(left)) == fragment


def test_fragment_counts_slots_that_are_too_small() -> None:
    fragments = Fragments({HALF: 1.0})
    assert fragments.of(8000, [500, 500], [2, 3]) == 500, "it takes two of three slots"
    assert fragments.of(8000, [1000], [1]) == 1000


def test_fgd_takes_the_gpu_and_the_node_where_it_adds_least() -> None:
    score = fgd(Fragments({HALF: 0.5, ALONE: 0.5}))
    assert score(node(1000, 500), HALF)[1] == (1,)
    nodes = [node(1000), node(500), node(0)]
    assert Chooser(nodes, score).choose(HALF) == (1, (0,))
    assert Chooser(nodes, score).choose(ALONE) == (0, (0,))
    assert Chooser(nodes, score).choose(PAIR) is None


def test_fgd_keeps_processors_for_free_gpus() -> None:
    score = fgd(Fragments({ALONE: 1.0}))
    assert Chooser([node(1000, cpu=1000), node(0, cpu=1000)], score).choose(NO_GPU) == (1, ())


def test_best_fit_leaves_least_free() -> None:
    score = best_fit([Machine(8000, 100, 2, "A")])
    nodes = [node(1000, 1000), node(600, 1000), node(600, 1000, cpu=2000), node(1000, 400, cpu=0)]
    assert Chooser(nodes, score).choose(HALF) == (2, (0,))
    assert score(node(1000, 1000, cpu=500), HALF) == (inf, ())


def test_random_choice_takes_every_place_where_the_task_fits_and_no_other() -> None:
    random = Random(1)
    nodes = [node(400), node(500), node(1000, 400, 700), node(1000, cpu=0)]
    chosen = {Chooser(nodes, at_random(random), random).choose(HALF) for _ in range(200)}
    assert chosen == {(1, (0,)), (2, (0,)), (2, (2,))}


kinds_of_pods = st.builds(
    Pod,
    cpu=st.sampled_from((1000, 4000, 6000)),
    memory=st.just(1),
    gpus=st.just(1),
    part=st.sampled_from((110, 320, 470, 500, 810, WHOLE)),
) | st.sampled_from((PAIR, NO_GPU, Pod(6000, 60, 1, 320)))
machines = st.lists(
    st.builds(
        Machine,
        cpu=st.sampled_from((4000, 16000)),
        memory=st.just(100),
        gpus=st.integers(1, 3),
        model=st.sampled_from("AB"),
    ),
    min_size=1,
    max_size=4,
)


def plainly(kinds: dict[Pod, float], there: Node) -> float:
    """The fragment as the paper defines it, task by task."""
    total = 0.0
    for pod, weight in kinds.items():
        fits = [left for left in there.left if pod.gpus and left >= pod.part]
        usable = sum(fits) if there.cpu >= pod.cpu and fits and len(fits) >= pod.gpus else 0
        total += weight * (sum(there.left) - usable)
    return total


@given(
    pods=st.lists(kinds_of_pods, min_size=1, max_size=6, unique=True),
    left=st.lists(st.sampled_from((0, 190, 320, 500, 1000)), min_size=1, max_size=4),
    cpu=st.integers(0, 8000),
)
def test_fragment_equals_the_definition(pods: list[Pod], left: list[int], cpu: int) -> None:
    kinds = dict.fromkeys(pods, 1 / len(pods))
    there = node(*left, cpu=cpu)
    found = Fragments(kinds).of(cpu, left, [ANY] * len(left))
    assert found == pytest.approx(plainly(kinds, there))


@given(machines=machines, pods=st.lists(kinds_of_pods, max_size=20))
def test_remembered_scores_choose_as_fresh_ones(machines: list[Machine], pods: list[Pod]) -> None:
    nodes = [Node.empty(machine) for machine in machines]
    score = fgd(Fragments({HALF: 0.5, ALONE: 0.5}))
    remembering = Chooser(nodes, score)
    for pod in pods:
        found = remembering.choose(pod)
        assert found == Chooser(nodes, score).choose(pod)
        if found:
            nodes[found[0]].take(pod, found[1])
            remembering.changed(found[0])


@given(
    machines=machines,
    pods=st.lists(kinds_of_pods, max_size=30),
    slots=st.sampled_from((1, 2, 3, 4, 5, 20, 100)),
)
def test_our_choice_finds_a_place_wherever_one_is_free(
    machines: list[Machine], pods: list[Pod], slots: int
) -> None:
    nodes = [Node.empty(machine, (slots,) * machine.gpus) for machine in machines]
    ours, chooser = OurChoice(nodes), Chooser(nodes, best_fit(machines))
    for pod in pods:
        wanted = share_or_whole(slots, pod)
        if found := chooser.choose(wanted):
            number = found[0]
            gpus = ours(number, wanted)  # raises where production knows no place
            before = sum(nodes[number].left)
            held = nodes[number].take(wanted, gpus)  # raises where the place is taken
            assert before - sum(nodes[number].left) == held >= pod.asked - 1, "in thousandths"
            chooser.changed(number)


def test_filling_notes_what_was_asked_and_what_is_held() -> None:
    nodes = [Node.empty(Machine(8000, 100, 2, "A"), (2, 2))]
    third = Pod(1000, 1, 1, 300)
    half, full = fill(Chooser(nodes, best_fit([nodes[0].machine])), repeat(third), arrived=(0.4, 1))
    assert (half.asked, half.held) == pytest.approx((0.45, 0.75))
    assert (full.asked, full.held) == pytest.approx((0.6, 1.0)), "no fifth slot"


@pytest.mark.parametrize(
    ("slots", "part", "takes"),
    [
        (8, 810, 875),
        (20, 810, 850),
        (4, 500, 500),
        (4, 760, WHOLE),
        (100, 810, 810),
        (1, 50, WHOLE),
    ],
)
def test_share_has_as_many_slots_as_needed(slots: int, part: int, takes: int) -> None:
    assert needed(share_or_whole(slots, Pod(1, 1, 1, part)), slots) == takes
    assert share_or_whole(slots, PAIR) == PAIR and share_or_whole(slots, NO_GPU) == NO_GPU


def test_published_cluster_and_shares_add_up() -> None:
    machines = openb.published_machines()
    assert len(machines) == 1213
    assert sum(machine.gpus for machine in machines) == 6212
    kinds = openb.published_pods()
    assert sum(kinds.values()) == pytest.approx(1)
    shared = sum(weight for pod, weight in kinds.items() if 0 < pod.part < WHOLE)
    assert shared == pytest.approx(0.378)
    drawn = openb.arrivals(kinds, Random(1))
    assert {next(drawn) for _ in range(500)} <= kinds.keys()


def test_trace_is_read_from_its_columns(tmp_path: Path) -> None:
    pods, nodes = tmp_path / "pods.csv", tmp_path / "nodes.csv"
    pods.write_text(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\n"
        "p1,6000,12288,1,460,,LS\np2,88000,327680,8,1000,,LS\np3,8000,30517,0,0,,BE\n"
    )
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\nn1,64000,262144,2,P100\nn2,8000,1,0,\n")
    read = openb.read_pods(str(pods))
    assert [pod.asked for pod in read] == [460, 8000, 0]
    assert openb.frequencies(read)[read[0]] == pytest.approx(1 / 3)
    assert openb.read_machines(str(nodes)) == [Machine(64000, 262144, 2, "P100")]
