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
from tests.support.leases import lease_of

NOW = datetime(2025, 3, 1, 12, tzinfo=timezone.utc)
GRACE = timedelta(seconds=60)
OLD = NOW - timedelta(minutes=5)
YOUNG = NOW - timedelta(seconds=59)
ANNA = ServerRef("anna", "lab")

LEASE = lease_of(
    "anna",
    server=ANNA,
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


ENDED = "the server exited (exit code 137)"
YOUNG_GRANT = replace(GRANTED, granted_at=YOUNG)
JUST_SEEN = replace(LEASE, seen_at=YOUNG)
"""A local process tells nobody else when it ended."""
ANYHOW = [READY, PENDING, NOBODY, None]
OTHER_SERVER = {ServerRef("anna"): HubState.READY}
LATER = replace(EXITED, ref="container-2", ended_at=NOW - timedelta(seconds=2), detail="")
GONE = Release(LEASE, None, "the server was gone")
RUN = replace(LEASE, server=ServerRef.of_run("anna", "train-1"))
RUN_GRANTED = replace(RUN, state=LeaseState.GRANTED, started_at=None, engine_ref="")
RUNS = replace(LIVES, server=RUN.server, started_at=OLD)
NEVER_STARTED = replace(RUNS, started_at=None)
RUN_EXITED = replace(EXITED, server=RUN.server, exit_code=137)
UNKNOWN_TO_HUB = Remove("docker", LIVES, "the Hub no longer knows its server")


@pytest.mark.parametrize(
    ("lease", "sightings", "hub", "action"),
    [
        # A server that lives.
        (LEASE, [LIVES], [READY, PENDING, None], Seen(LEASE)),
        (GRANTED, [LIVES], [READY], Confirm(GRANTED, "container-1")),
        (GRANTED, [LIVES], [PENDING, None], Seen(GRANTED)),
        (LEASE, [LIVES], [NOBODY, OTHER_SERVER], UNKNOWN_TO_HUB),
        (YOUNG_GRANT, [LIVES], [NOBODY], Unknown),
        # A run: the Hub knows no server of it.
        (RUN, [RUNS], [NOBODY, READY, None], Seen(RUN)),
        (RUN_GRANTED, [RUNS], [NOBODY], Confirm(RUN_GRANTED, "container-1", OLD)),
        (RUN_GRANTED, [RUNS], [{RUN.server: HubState.PENDING}, None], Seen(RUN_GRANTED)),
        (RUN, [RUN_EXITED], [NOBODY, READY, None], Unknown),  # who records its exit settles it
        (RUN, [], [NOBODY, READY, None], replace(GONE, lease=RUN)),
        (RUN_GRANTED, [NEVER_STARTED], [NOBODY], Remove),
        # One that is gone.
        (LEASE, [EXITED], ANYHOW, Release(LEASE, EXITED.ended_at, ENDED)),
        (LEASE, [], ANYHOW, GONE),
        (JUST_SEEN, [], [READY, PENDING], Unknown),
        (JUST_SEEN, [], [NOBODY, None], Release),
        (GRANTED, [], [PENDING, None], Unknown),  # an image may be pulled for an hour
        (GRANTED, [], [NOBODY], replace(GONE, lease=GRANTED, lost=True)),
        (YOUNG_GRANT, [], [NOBODY], Unknown),
        (GRANTED, [EXITED], [PENDING], Release),
        # The newest of several ends counts, and one that lives outweighs them.
        (LEASE, [EXITED, LATER], [READY], Release(LEASE, LATER.ended_at, ENDED)),
        (LEASE, [EXITED, replace(LIVES, ref="container-3")], [READY], Seen(LEASE)),
        # Nobody can say.
        (LEASE, None, ANYHOW, Unknown(LEASE, "the engine 'docker' did not respond")),
        (GRANTED, None, ANYHOW, Unknown(GRANTED, "the engine 'docker' did not respond")),
        # Servers without an open lease; one that was just created may have one.
        (None, [LIVES], [READY], Remove("docker", LIVES, "its lease has ended")),
        (None, [replace(LIVES, created_at=None)], [NOBODY], Remove),
        (None, [EXITED], [NOBODY], None),
        (None, [RUN_EXITED], [NOBODY, None], Remove("docker", RUN_EXITED, "its lease has ended")),
        (None, [replace(LIVES, created_at=YOUNG)], [NOBODY], None),
    ],
    ids=[
        *("confirmed", "adopted when ready", "not charged yet", "no hub", "young, no hub"),
        *("run", "run adopted", "run on its way", "run exited", "run gone"),
        "run never started",
        *("exited", "gone", "gone a moment ago", "gone a moment ago, no hub", "still to come"),
        *("spawn forgotten", "young, forgotten", "pending and exited", "newest end", "one lives"),
        *("engine silent", "engine silent, granted", "lease ended", "no one knows since when"),
        *("exited without a lease", "exited run without a lease", "just created"),
    ],
)
def test_reconciliation_plans_the_expected_action(
    lease: Lease | None,
    sightings: list[Sighting] | None,
    hub: list[dict[ServerRef, HubState] | None],
    action: Action | type[Action] | None,
) -> None:
    for servers in hub:
        found = plan([lease] if lease else [], {"docker": sightings}, servers, NOW, GRACE)
        if isinstance(action, type):
            assert [type(each) for each in found] == [action]
        else:
            assert found == ([] if action is None else [action])


def test_unasked_engine_leaves_its_leases_unknown() -> None:
    local = replace(LEASE, id="lease-2", server=ServerRef("bert"), engine="local")
    actions = plan([local, LEASE], {"docker": [EXITED]}, READY, NOW, GRACE)
    assert [type(action) for action in actions] == [Unknown, Release]


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
def test_live_or_unknown_servers_are_never_released(
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
