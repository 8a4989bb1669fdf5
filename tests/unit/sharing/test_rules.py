"""MIG layouts on the placements of real GPUs' tables. Pure."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspawner.core.errors import InvalidRequest
from gpuspawner.devices.models import MIGInstance, MIGPlacement, MIGProfile, MIGState
from gpuspawner.sharing import rules
from gpuspawner.sharing.models import LayoutPlan, RecordedInstance, RecordState
from gpuspawner.sharing.rules import CannotDivide
from tests.support.nvml import nvml_library as nvml
from tests.support.tier import examples

BOOT = "this boot"


def profiles_of(table: tuple[nvml.Profile, ...]) -> tuple[MIGProfile, ...]:
    return tuple(
        MIGProfile(
            each.id,
            each.name,
            each.most,
            tuple(MIGPlacement(start, each.size) for start in each.starts),
        )
        for each in table
    )


A100 = profiles_of(nvml.A100_40GB)
H100 = profiles_of(nvml.H100_80GB)
BY_NAME = {profile.name: profile for profile in A100}


def gpu(*instances: MIGInstance, profiles: tuple[MIGProfile, ...] = A100) -> MIGState:
    return MIGState("GPU-1", 0, "NVIDIA A100", True, profiles=profiles, instances=instances)


def instance(number: int, name: str, start: int, *, finished: bool = True) -> MIGInstance:
    profile = BY_NAME[name]
    uuids = (f"MIG-{number}",) if finished else ()
    return MIGInstance(number, profile.id, MIGPlacement(start, profile.placements[0].size), uuids)


def plan(state: MIGState, layout: str, own: frozenset[int] = frozenset()) -> LayoutPlan:
    return rules.plan_layout(state, rules.parse_layout(layout), own)


def made(plan: LayoutPlan) -> set[str]:
    return {each.name for each in plan.create}


@pytest.mark.parametrize(
    ("text", "profiles", "written"),
    [
        ("1g.5gb", ["1g.5gb"], "1g.5gb"),
        ("1g.5gb, 3g.20gb ,1G.5GB", ["3g.20gb", "1g.5gb", "1g.5gb"], "3g.20gb,2x1g.5gb"),
        ("4x1g.10gb", ["1g.10gb"] * 4, "4x1g.10gb"),
        ("1g.5gb+me", ["1g.5gb+me"], "1g.5gb+me"),
        ("none", [], "none"),
    ],
)
def test_layout_is_read_and_written(text: str, profiles: list[str], written: str) -> None:
    found = rules.parse_layout(text)
    assert list(found) == profiles
    assert rules.format_layout(found) == written
    assert rules.parse_layout(written) == found


@pytest.mark.parametrize("text", ["", "3g.20gb,", "big", "1c.3g.20gb", "0x1g.5gb", "99x1g.5gb"])
def test_layout_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        rules.parse_layout(text)


def test_empty_gpu_gets_the_whole_layout() -> None:
    found = plan(gpu(), "3g.20gb,1g.5gb,1g.5gb,1g.5gb,1g.5gb")
    assert made(found) == {"3g.20gb at 4:4", *(f"1g.5gb at {n}:1" for n in range(4))}
    assert found.destroy == found.keep == found.beside == ()


def test_places_leave_room_for_more() -> None:
    assert made(plan(gpu(), "3g.20gb")) == {"3g.20gb at 4:4"}
    assert made(plan(gpu(), "1g.5gb")) == {"1g.5gb at 6:1"}


def test_own_instance_in_its_place_stays() -> None:
    there = instance(1, "3g.20gb", 4)
    found = plan(gpu(there, instance(2, "2g.10gb", 0)), "3g.20gb,4g.20gb", frozenset({1, 2}))
    assert found.keep == (there,)
    assert [each.id for each in found.destroy] == [2]
    assert made(found) == {"4g.20gb at 0:4"}


def test_instance_of_somebody_else_is_adopted_if_the_layout_has_it() -> None:
    there = instance(1, "3g.20gb", 0)
    found = plan(gpu(there), "3g.20gb,3g.20gb")
    assert found.keep == (there,)
    assert made(found) == {"3g.20gb at 4:4"}


def test_layout_fits_beside_what_somebody_else_made() -> None:
    there = instance(5, "1g.5gb", 6)
    found = plan(gpu(there), "3g.20gb")
    assert found.beside == (there,)
    assert made(found) == {"3g.20gb at 0:4"}  # 4:4 is taken in part


def test_instance_of_somebody_else_in_the_way_is_named() -> None:
    with pytest.raises(CannotDivide) as caught:
        plan(gpu(instance(5, "1g.5gb", 6)), "7g.40gb", frozenset({1}))
    assert str(caught.value) == (
        "7g.40gb does not fit on GPU 0 next to instances that gpuspawner did not make and does not "
        "touch: 1g.5gb at 6:1 (id 5). If nobody needs them any more, remove them: nvidia-smi mig "
        "-i 0 -dci -gi ID, then -dgi -gi ID."
    )


def test_layout_that_never_fits_is_refused_with_the_places() -> None:
    with pytest.raises(CannotDivide, match=r"4g\.20gb at 0:4"):
        plan(gpu(), "4g.20gb,4g.20gb")


def test_unknown_profile_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(CannotDivide, match=r"no profile 1g\.10gb\+me\. It has 7g\.40gb"):
        plan(gpu(), "1g.10gb+me")


def test_no_more_of_a_profile_than_the_gpu_allows() -> None:
    with pytest.raises(CannotDivide):
        plan(gpu(), "2x1g.5gb+me")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"is_enabled": False}, "nvidia-smi -i 0 -mig 1"),
        ({"is_enabled": False, "is_pending": True}, "enters MIG mode with its next reset"),
        ({"is_pending": True}, "leaves MIG mode with its next reset"),
    ],
)
def test_gpu_outside_mig_mode_is_refused_with_what_to_do(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(CannotDivide, match=words):
        plan(replace(gpu(), **fields), "1g.5gb")


def is_valid(state: MIGState, profiles: list[MIGProfile], others: list[MIGInstance]) -> bool:
    """Whether any choice of places fits, by trying every one; others' instances of a profile at
    the chosen place count as chosen."""
    for places in product(*(profile.placements for profile in profiles)):
        chosen = [(p.id, at) for p, at in zip(profiles, places, strict=True)]
        all_of_it = chosen + [
            (o.profile_id, o.placement) for o in others if (o.profile_id, o.placement) not in chosen
        ]
        places_used = [at for _, at in all_of_it]
        free = all(
            not a.overlaps(b) for n, a in enumerate(places_used) for b in places_used[n + 1 :]
        )
        kinds = [kind for kind, _ in all_of_it]
        if free and all(kinds.count(p.id) <= p.max_instances for p in profiles):
            return True
    return False


@st.composite
def divided(draw: st.DrawFn) -> tuple[MIGState, frozenset[int]]:
    """A GPU with some instances, of which some are ours."""
    table = draw(st.sampled_from([A100, H100]))
    found: list[MIGInstance] = []
    for number in range(draw(st.integers(0, 4))):
        profile = draw(st.sampled_from(table))
        at = draw(st.sampled_from(profile.placements))
        same = sum(each.profile_id == profile.id for each in found)
        if same < profile.max_instances and not any(at.overlaps(x.placement) for x in found):
            found.append(MIGInstance(number + 1, profile.id, at, (f"MIG-{number}",)))
    own = draw(st.sets(st.sampled_from([each.id for each in found]))) if found else set()
    return gpu(*found, profiles=table), frozenset(own)


@settings(max_examples=examples(500), deadline=None)
@given(divided(), st.data())
def test_plan_is_found_exactly_if_there_is_one(
    case: tuple[MIGState, frozenset[int]], data: st.DataObject
) -> None:
    """It overlaps nothing, keeps what it says, and destroys only what is ours."""
    state, own = case
    wanted = data.draw(st.lists(st.sampled_from(state.profiles), max_size=4))
    layout = rules.parse_layout(",".join(each.name for each in wanted) or "none")
    others = [each for each in state.instances if each.id not in own]
    try:
        found = rules.plan_layout(state, layout, own)
    except CannotDivide:
        assert not is_valid(state, wanted, others)
        return
    assert is_valid(state, wanted, others)
    assert {each.id for each in found.destroy} <= own
    gone = {each.id for each in found.destroy}
    left = [each for each in state.instances if each.id not in gone]
    places = [x.placement for x in left] + [x.placement for x in found.create]
    assert all(not a.overlaps(b) for n, a in enumerate(places) for b in places[n + 1 :])
    names = {profile.id: profile.name for profile in state.profiles}
    result = [names[x.profile_id] for x in found.keep] + [x.profile.name for x in found.create]
    assert sorted(result) == sorted(layout)
    assert {x.id for x in left} == {x.id for x in (*found.keep, *found.beside)}


@settings(max_examples=examples(300), deadline=None)
@given(divided(), st.data())
def test_nothing_changes_where_the_layout_is_there(
    case: tuple[MIGState, frozenset[int]], data: st.DataObject
) -> None:
    state, own = case
    names = {profile.id: profile.name for profile in state.profiles}
    mine = [names[each.profile_id] for each in state.instances if each.id in own]
    others = [names[each.profile_id] for each in state.instances if each.id not in own]
    # Others' instances of the same profile would be adopted in place of ours.
    if set(mine) & set(others):
        return
    found = rules.plan_layout(state, rules.parse_layout(",".join(mine) or "none"), own)
    assert not found.create
    assert not found.destroy


# Records.


def record(name: str, start: int, **fields: Any) -> RecordedInstance:
    profile = BY_NAME[name]
    at = MIGPlacement(start, profile.placements[0].size)
    return replace(RecordedInstance(name, profile.id, at, BOOT), **fields)


def own(state: MIGState, *records: RecordedInstance, boot: str = BOOT) -> set[int]:
    return set(rules.own_instances(records, state, boot))


def test_instance_is_ours_by_number_place_and_uuid() -> None:
    state = gpu(instance(1, "3g.20gb", 4))
    ours = record("3g.20gb", 4, state=RecordState.MADE, instance_id=1, uuid="MIG-1")
    assert own(state, ours) == {1}
    assert own(state, replace(ours, instance_id=2)) == set()
    assert own(state, replace(ours, uuid="MIG-2")) == set()
    assert own(state, replace(ours, placement=MIGPlacement(0, 4))) == set()


def test_instance_of_another_boot_is_not_ours() -> None:
    state = gpu(instance(1, "3g.20gb", 4))
    ours = record("3g.20gb", 4, state=RecordState.MADE, instance_id=1, uuid="MIG-1")
    assert own(state, ours, boot="the next boot") == set()


def test_instance_that_lost_its_compute_instance_is_still_ours() -> None:
    state = gpu(instance(1, "3g.20gb", 4, finished=False))
    assert own(state, record("3g.20gb", 4, instance_id=1, uuid="MIG-1")) == {1}


def test_only_an_instance_that_was_begun_may_be_ours_before_it_is_recorded() -> None:
    state = gpu(instance(3, "1g.5gb", 2))
    assert own(state, record("1g.5gb", 2, state=RecordState.BEGUN)) == {3}
    assert own(state, record("1g.5gb", 2)) == set()


def records_after(
    state: MIGState, layout: str, *before: RecordedInstance
) -> list[RecordedInstance]:
    mine = rules.own_instances(before, state, BOOT)
    found = rules.plan_layout(state, rules.parse_layout(layout), mine)
    return rules.records_of(found, before, mine, BOOT)


def test_what_a_killed_process_began_is_destroyed_if_it_appears_late() -> None:
    late = record("4g.20gb", 0, state=RecordState.BEGUN)
    assert records_after(gpu(), "1g.5gb", late) == [
        replace(late, state=RecordState.UNWANTED),
        record("1g.5gb", 6),
    ]
    assert records_after(gpu(), "4g.20gb", late) == [record("4g.20gb", 0)]
    assert records_after(gpu(), "none", record("4g.20gb", 0)) == []


def test_unfinished_instance_is_to_be_finished() -> None:
    state = gpu(instance(2, "4g.20gb", 0, finished=False))
    begun = record("4g.20gb", 0, state=RecordState.BEGUN)
    assert records_after(state, "4g.20gb", begun) == [record("4g.20gb", 0, instance_id=2)]


def test_restart_leaves_everything_to_be_made_again() -> None:
    made = record("4g.20gb", 0, state=RecordState.MADE, instance_id=1, uuid="MIG-1", id=7)
    unwanted = record("1g.5gb", 6, state=RecordState.UNWANTED, instance_id=2, uuid="MIG-2")
    again = rules.restored([made, unwanted], gpu(), "the next boot")
    assert again == [replace(record("4g.20gb", 0), boot_id="the next boot")]
    assert rules.is_gone([made], gpu(), BOOT)


def test_restore_without_a_restart_keeps_what_is_there() -> None:
    made = record("4g.20gb", 0, state=RecordState.MADE, instance_id=1, uuid="MIG-1")
    unwanted = record("1g.5gb", 6, state=RecordState.UNWANTED, instance_id=2, uuid="MIG-2")
    state = gpu(instance(1, "4g.20gb", 0), instance(2, "1g.5gb", 6))
    assert rules.restored([made, unwanted], state, BOOT) == [unwanted, made]
    assert not rules.is_gone([made, unwanted], state, BOOT)
    assert rules.strangers([made], state, BOOT) == (state.instances[1],)
