"""What is done when store, engines and Hub do not say the same. Real: everything, it is pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.leases.models import Lease, LeaseState, ServerRef, Sighting
from gpuspawner.leases.reconciliation import (
    Action,
    Confirm,
    HubState,
    Release,
    Remove,
    Seen,
    Unknown,
    plan,
)

NOW = datetime(2025, 3, 1, 12, tzinfo=timezone.utc)
GRACE = timedelta(seconds=60)
OLD = NOW - timedelta(minutes=5)
YOUNG = NOW - timedelta(seconds=59)
ANNA = ServerRef("anna", "lab")

LEASE = Lease(
    id="lease-1",
    server=ANNA,
    account="member:anna",
    environment="pytorch",
    devices=(),
    rate=1,
    hold=1,
    engine="docker",
    engine_ref="container-1",
    granted_at=OLD,
    started_at=OLD,
    state=LeaseState.RUNNING,
)
GRANTED = replace(LEASE, state=LeaseState.GRANTED, started_at=None, engine_ref="")
LIVES = Sighting(lease_id="lease-1", ref="container-1", server=ANNA, alive=True, created_at=OLD)
EXITED = replace(LIVES, alive=False, ended_at=NOW - timedelta(seconds=7), detail="exit code 137")
READY = {ANNA: HubState.READY}
PENDING = {ANNA: HubState.PENDING}
NOBODY: dict[ServerRef, HubState] = {}


def the_plan(
    lease: Lease | None,
    *sightings: Sighting,
    servers: dict[ServerRef, HubState] | None,
    answers: bool = True,
) -> list[Action]:
    found = {"docker": list(sightings) if answers else None}
    return plan([lease] if lease else [], found, servers, NOW, GRACE)


# A server that lives.


@pytest.mark.parametrize("servers", [READY, PENDING, None])
def test_a_living_server_that_was_confirmed_is_seen(servers: Any) -> None:
    assert the_plan(LEASE, LIVES, servers=servers) == [Seen(LEASE)]


def test_a_living_server_that_nobody_confirmed_is_adopted_when_the_hub_has_it_ready() -> None:
    assert the_plan(GRANTED, LIVES, servers=READY) == [Confirm(GRANTED, "container-1")]


@pytest.mark.parametrize("servers", [PENDING, None])
def test_a_living_server_that_is_not_ready_is_not_charged_yet(servers: Any) -> None:
    assert the_plan(GRANTED, LIVES, servers=servers) == [Seen(GRANTED)]


def test_a_living_server_without_a_hub_is_ended_and_keeps_its_lease_until_it_is_gone() -> None:
    (action,) = the_plan(LEASE, LIVES, servers=NOBODY)
    assert action == Remove("docker", LIVES, "the Hub does not know its server any more")


def test_a_young_one_that_the_hub_does_not_name_yet_is_left_alone() -> None:
    (action,) = the_plan(replace(GRANTED, granted_at=YOUNG), LIVES, servers=NOBODY)
    assert isinstance(action, Unknown)


def test_another_server_of_the_same_member_says_nothing_of_this_one() -> None:
    others = {ServerRef("anna"): HubState.READY}
    (action,) = the_plan(LEASE, LIVES, servers=others)
    assert isinstance(action, Remove)


# A server that is gone.


@pytest.mark.parametrize("servers", [READY, PENDING, NOBODY, None])
def test_an_exited_server_is_released_at_its_proven_end(servers: Any) -> None:
    (action,) = the_plan(LEASE, EXITED, servers=servers)
    assert action == Release(LEASE, EXITED.ended_at, "the server exited (exit code 137)")


@pytest.mark.parametrize("servers", [READY, PENDING, NOBODY, None])
def test_a_running_server_that_is_not_there_any_more_is_released(servers: Any) -> None:
    (action,) = the_plan(LEASE, servers=servers)
    assert action == Release(LEASE, None, "the server was gone")


@pytest.mark.parametrize("servers", [READY, PENDING])
def test_a_server_that_went_a_moment_ago_is_left_to_the_hub_that_saw_its_end(servers: Any) -> None:
    """A local process tells nobody else when it ended."""
    seen = replace(LEASE, seen_at=YOUNG)
    [action] = the_plan(seen, servers=servers)
    assert isinstance(action, Unknown)
    for gone in (NOBODY, None):
        [action] = the_plan(seen, servers=gone)
        assert isinstance(action, Release)


@pytest.mark.parametrize("servers", [PENDING, None])
def test_a_grant_whose_container_is_still_to_come_is_kept(servers: Any) -> None:
    """An image may be pulled for an hour."""
    (action,) = the_plan(GRANTED, servers=servers)
    assert isinstance(action, Unknown)


def test_a_grant_whose_spawn_is_forgotten_is_released_after_the_grace() -> None:
    (action,) = the_plan(GRANTED, servers=NOBODY)
    assert action == Release(GRANTED, None, "the server was gone", lost=True)
    (action,) = the_plan(replace(GRANTED, granted_at=YOUNG), servers=NOBODY)
    assert isinstance(action, Unknown)


def test_a_grant_whose_container_exited_is_released_even_while_it_is_pending() -> None:
    (action,) = the_plan(GRANTED, EXITED, servers=PENDING)
    assert isinstance(action, Release)


def test_the_newest_of_several_ends_counts_and_one_that_lives_outweighs_them() -> None:
    later = replace(EXITED, ref="container-2", ended_at=NOW - timedelta(seconds=2), detail="")
    (action,) = the_plan(LEASE, EXITED, later, servers=READY)
    assert isinstance(action, Release) and action.ended_at == later.ended_at
    living = replace(LIVES, ref="container-3")
    assert the_plan(LEASE, EXITED, living, servers=READY) == [Seen(LEASE)]


# Nobody can say.


@pytest.mark.parametrize("servers", [READY, PENDING, NOBODY, None])
@pytest.mark.parametrize("lease", [LEASE, GRANTED])
def test_an_engine_that_does_not_answer_proves_nothing(lease: Lease, servers: Any) -> None:
    (action,) = the_plan(lease, servers=servers, answers=False)
    assert action == Unknown(lease, "the engine 'docker' did not answer")


def test_an_engine_that_was_not_asked_proves_nothing_and_hides_no_other() -> None:
    local = replace(LEASE, id="lease-2", server=ServerRef("bert"), engine="local")
    actions = plan([local, LEASE], {"docker": [EXITED]}, READY, NOW, GRACE)
    assert [type(action) for action in actions] == [Unknown, Release]


# Servers without an open lease.


def test_a_living_server_whose_lease_has_ended_is_ended() -> None:
    assert the_plan(None, LIVES, servers=READY) == [Remove("docker", LIVES, "its lease has ended")]


def test_one_that_exited_holds_no_device_and_is_left() -> None:
    assert the_plan(None, EXITED, servers=NOBODY) == []


def test_one_that_was_just_created_may_have_a_lease_that_was_not_read_yet() -> None:
    assert the_plan(None, replace(LIVES, created_at=YOUNG), servers=NOBODY) == []
    assert the_plan(None, replace(LIVES, created_at=None), servers=NOBODY) != []


# Whatever is seen.

moments = st.datetimes(
    NOW.replace(tzinfo=None) - timedelta(hours=1),
    NOW.replace(tzinfo=None),
    timezones=st.just(timezone.utc),
)
ids = st.sampled_from(["lease-1", "lease-2", "lease-3"])
hubs = st.none() | st.dictionaries(
    st.sampled_from([ServerRef("lease-1"), ServerRef("lease-2"), ServerRef("lease-3")]),
    st.sampled_from(HubState),
)


@st.composite
def open_leases(draw: st.DrawFn) -> list[Lease]:
    return [
        replace(
            LEASE,
            id=name,
            server=ServerRef(name),
            engine=draw(st.sampled_from(["docker", "local"])),
            state=draw(st.sampled_from([LeaseState.GRANTED, LeaseState.RUNNING])),
            granted_at=draw(moments),
        )
        for name in draw(st.lists(ids, unique=True))
    ]


@st.composite
def sightings(draw: st.DrawFn) -> list[Sighting]:
    return [
        Sighting(
            lease_id=name,
            ref=f"{name}-{number}",
            server=ServerRef(name),
            alive=draw(st.booleans()),
            created_at=draw(st.none() | moments),
            ended_at=draw(st.none() | moments),
        )
        for number, name in enumerate(draw(st.lists(ids, max_size=4)))
    ]


@given(open_leases(), sightings() | st.none(), sightings() | st.none(), hubs)
def test_unknown_is_never_free_and_who_lives_is_never_released(
    leases: list[Lease], docker: Any, local: Any, servers: Any
) -> None:
    found = {"docker": docker, "local": local}
    actions = plan(leases, found, servers, NOW, GRACE)

    per_lease = actions[: len(leases)]
    for lease, action in zip(leases, per_lease, strict=True):
        mine = [s for s in found[lease.engine] or () if s.lease_id == lease.id]
        lives = any(s.alive for s in mine)
        if isinstance(action, Release):
            assert found[lease.engine] is not None and not lives
        elif isinstance(action, (Seen, Confirm, Remove)):
            assert lives
        # A fresh end that no engine tells may still come from the Hub.
        may_be_told = (
            not mine and lease.server in (servers or {}) and NOW - lease.granted_at < GRACE
        )
        is_gone = found[lease.engine] is not None and not lives
        if is_gone and lease.state is LeaseState.RUNNING and not may_be_told:
            assert isinstance(action, Release), "no lease without an end once its server is gone"
    for action in actions[len(leases) :]:
        assert isinstance(action, Remove)
        assert action.sighting.alive
        assert action.sighting.lease_id not in {lease.id for lease in leases}
