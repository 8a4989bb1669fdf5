"""What becomes of servers whose account runs dry: all real, pure values."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.ledger import credit_policy
from gpuspawner.ledger import rules as ledger_rules
from gpuspawner.ledger.credit_policy import (
    OVERDRAFT,
    SESSION,
    AccountRunway,
    PolicyStep,
)
from tests.support.leases import lease_of

T0 = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)
GRACE = 5 * MINUTE
RATE = 60 * MICRO
"""A credit a minute."""


def lease(**changes: Any) -> Lease:
    running = {"id": "1", "granted_at": T0, "started_at": T0, "state": LeaseState.RUNNING}
    return lease_of("ada", **{"rate": RATE, **running, **changes})


def step(balance: float, some: Lease | None = None, minutes: float = 0) -> PolicyStep | None:
    """What is due with so many credits left, up to now, ``minutes`` after T0."""
    purse = AccountRunway(round(balance * MICRO), RATE)
    now = T0 + timedelta(minutes=minutes)
    return credit_policy.next_step(some or lease(), purse, now, GRACE, (30, 10, 2))


WARNED = lease(warned_at=T0)
BOUND = {"when_dry": OVERDRAFT, "overdraft": 20 * MICRO}


@pytest.mark.parametrize(
    ("balance", "some", "minutes", "due"),
    [
        (30.5, lease(), 0, None),
        (30, lease(), 0, PolicyStep("low", 30)),
        (29, lease(told_dry=30), 0, None),
        (9, lease(told_dry=30), 0, PolicyStep("low", 10)),
        (1, lease(), 0, PolicyStep("low", 2)),
        (8, lease(told_dry=2), 0, PolicyStep("quiet", 10)),
        (99, lease(told_dry=2), 0, PolicyStep("quiet", None)),
        (0, lease(told_dry=2), 0, PolicyStep("dry")),
        (-9, WARNED, 4.99, None),
        (-9, WARNED, 5, PolicyStep("stop")),
        (0.000001, WARNED, 5, PolicyStep("back")),
        # The clock was set back a day, and by what clocks are set right.
        (-9, WARNED, -24 * 60, PolicyStep("dry")),
        (-9, WARNED, -0.5, None),
        (-9, lease(warned_at=T0, outcome="credits"), 9, None),
        (-9, lease(rate=0), 9, None),
        (-9, lease(state=LeaseState.GRANTED), 9, None),
        # A session that ends first, and one that has no end.
        (0, lease(when_dry=SESSION, seconds=3600), 0, PolicyStep("dry")),
        (-9, lease(when_dry=SESSION, seconds=3600, warned_at=T0), 59, None),
        (-9, lease(when_dry=SESSION, warned_at=T0), 5, PolicyStep("stop")),
        # An overdraft: warnings count to its bound.
        (11, lease(**BOUND), 0, None),
        (10, lease(**BOUND), 0, PolicyStep("low", 30)),
        (0, lease(told_dry=30, **BOUND), 0, PolicyStep("dry")),
        (-10, lease(told_dry=30, warned_at=T0, **BOUND), 9, PolicyStep("low", 10)),
        (-19.999999, lease(told_dry=2, warned_at=T0, **BOUND), 99, None),
        (-20, lease(told_dry=2, warned_at=T0, **BOUND), 99, PolicyStep("stop")),
        (-20, lease(**BOUND), 0, PolicyStep("stop")),
    ],
)  # fmt: skip
def test_credit_step_follows_balance_and_lease_state(
    balance: float, some: Lease, minutes: float, due: PolicyStep | None
) -> None:
    assert step(balance, some, minutes) == due


@pytest.mark.parametrize(
    ("some", "minutes"),
    [
        (WARNED, 5),
        (lease(when_dry=SESSION, seconds=3600, warned_at=T0), 60),
        (lease(warned_at=T0, **BOUND), 22),
        (lease(when_dry=SESSION, warned_at=T0), 5),
        (lease(), None),
        (replace(WARNED, state=LeaseState.ENDED), None),
    ],
)
def test_stop_time_follows_grace_session_and_overdraft(some: Lease, minutes: int | None) -> None:
    found = credit_policy.stops_at(some, AccountRunway(-5 * MICRO, RATE), T0 + 7 * MINUTE, GRACE)
    assert found == (None if minutes is None else T0 + minutes * MINUTE)


def test_purse_deducts_charges_due_and_sums_rates() -> None:
    waiting = lease(state=LeaseState.GRANTED, started_at=None)
    some = [lease(charged=MICRO), lease(), waiting]
    assert AccountRunway.of(9 * MICRO, some, T0 + timedelta(minutes=2)) == AccountRunway(
        6 * MICRO, 2 * RATE
    )
    assert credit_policy.policy_of({}, "member:ada", {"lab"}) == credit_policy.CreditPolicy()


# Warnings.


@given(
    st.lists(st.tuples(st.integers(1, 400), st.booleans()), min_size=1, max_size=40),
    st.sampled_from([{}, {"when_dry": SESSION, "seconds": 10**6}, BOUND]),
)
def test_low_credit_warnings_are_given_once_in_order(
    rounds: list[tuple[int, bool]], policy: dict[str, Any]
) -> None:
    """Rounds come at any time, twice, or not at all; each warning is given once and in order."""
    some, now, told = lease(**policy), T0, []
    for seconds, twice in rounds:
        now += timedelta(seconds=seconds)
        for _ in range(1 + twice):
            purse = AccountRunway.of(40 * MICRO, [some], now)
            due = credit_policy.next_step(some, purse, now, GRACE, (30, 10, 2))
            if due is None:
                continue
            told.append((due.event, due.minutes))
            changes: dict[str, dict[str, Any]] = {
                "low": {"told_dry": due.minutes},
                "dry": {"warned_at": now},
                "stop": {"outcome": "credits"},
            }
            some = replace(some, **changes[due.event])
    assert len(set(told)) == len(told)
    minutes = [minutes for event, minutes in told if event == "low"]
    assert minutes == sorted(minutes, key=lambda m: -(m or 0))
    assert "stop" not in [event for event, _ in told[:-1]]


# Servers with an overdraft on one account, whatever the ticks do and whenever credits come.

SERVERS = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(1, 3000), st.integers(0, 500), st.integers(1, 400)),
    min_size=1,
    max_size=4,
)
"""When each starts, how long it lives, how much later that is known (seconds), and its rate."""


def play(
    servers: list[tuple[int, int, int, int]],
    grants: list[tuple[int, int]],
    ticks: list[int],
    bounds: tuple[int, ...],
) -> tuple[list[int], int]:
    """What each was charged in the end, and the least that the balance ever was."""
    steps: list[tuple[int, int, str, int]] = [(at, 0, "tick", 0) for at in ticks]
    steps += [(at, 1, "grant", amount) for at, amount in grants]
    steps += [(start, 2, "start", n) for n, (start, _, _, _) in enumerate(servers)]
    steps += [(s + length + late, 3, "end", n) for n, (s, length, late, _) in enumerate(servers)]
    balance = least = 10 * MICRO
    running: dict[str, Lease] = {}
    charged = [0] * len(servers)
    for at, _, what, value in sorted(steps):
        now, name = T0 + timedelta(seconds=at), str(value)
        if what == "grant":
            balance += value
        elif what == "start":
            bound = bounds[value % len(bounds)]
            more = {"when_dry": OVERDRAFT, "overdraft": bound, "rate": servers[value][3] * MICRO}
            running[name] = lease(id=name, started_at=now, **more)
        elif what == "tick":
            balance -= charge(running, balance, now)
        else:
            end = now - timedelta(seconds=servers[value][2])
            if ledger_rules.settlement(running[name], end, failed=False) > 0:
                balance -= charge(running, balance, end)
            some = running.pop(name)
            back = min(0, ledger_rules.settlement(some, end, failed=False))
            balance, charged[value] = balance - back, some.charged + back
        least = min(least, balance)
    return charged, least


def charge(running: dict[str, Lease], balance: int, until: datetime) -> int:
    """What all of them are charged."""
    shares = credit_policy.shares(running.values(), balance, until)
    for name, paid in shares.items():
        running[name] = replace(running[name], charged=running[name].charged + paid)
    return sum(shares.values())


TIMES = st.lists(st.integers(0, 7000), max_size=8)
BOUNDS = st.integers(1, 60 * MICRO)
GIVEN = st.lists(st.tuples(st.integers(0, 6500), st.integers(1, 50 * MICRO)), max_size=3)


@given(SERVERS, GIVEN, TIMES, TIMES, st.lists(BOUNDS, min_size=1, max_size=2))
def test_overdraft_charges_stay_within_the_bound_whenever_ticks_come(
    servers: list[tuple[int, int, int, int]],
    grants: list[tuple[int, int]],
    some: list[int],
    others: list[int],
    bounds: list[int],
) -> None:
    first, least = play(servers, grants, some, tuple(bounds))
    assert least >= -max(bounds)
    assert sum(first) <= 10 * MICRO + sum(amount for _, amount in grants) + max(bounds)
    if len(bounds) > 1:
        return
    assert play(servers, grants, others, tuple(bounds))[0] == first
    assert play(servers, grants, [], tuple(bounds))[0] == first
    if len(servers) == 1:
        [(start, length, late, rate)] = servers
        given_by_then = sum(amount for at, amount in grants if at <= start + length + late)
        owed = rate * MICRO * length // 3600
        assert first == [min(owed, 10 * MICRO + given_by_then + bounds[0])]
