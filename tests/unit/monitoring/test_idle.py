"""When a server counts as idle: what keeps it, what does not, and what is said before it is
stopped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.monitoring.idle import (
    Activity,
    IdlePolicies,
    IdlePolicy,
    IdleState,
    activity_of,
    begin,
    credit_after,
    judge,
    own_use,
    snooze,
)
from gpuspawner.monitoring.models import DeviceUse

T0 = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
POLICY = IdlePolicy(mode="enforce")
RESTS = Activity(60.0, use=0.0, busy=0.0)
WORKS = Activity(60.0, use=60.0, busy=60.0)
UNKNOWN = Activity(60.0)


def day(
    minutes: Iterable[Activity], policy: IdlePolicy = POLICY, *, waiting: bool = False
) -> Iterator[tuple[int, str]]:
    """(minute, event) of everything that is due; it ends with a stop."""
    state = begin(policy)
    for number, it in enumerate(minutes, 1):
        now = T0 + timedelta(minutes=number)
        verdict = judge(policy, state, it, now, waiting=waiting)
        state = verdict.state
        if verdict.event:
            yield number, verdict.event
        if verdict.event == "stop":
            return


TRAINS = Activity(60.0, use=4.0, busy=20.0)  # it waits for its data most of the time
PRINTS = replace(RESTS, output=True)
HELD = Activity(60.0, busy=60.0)  # an instance whose process holds memory
FREE = Activity(60.0, busy=0.0)
SHORT = Activity(60.0, use=1.0, busy=1.0)
STOPS = [(30, "warn"), (40, "stop")]
STRICTER = replace(POLICY, mode="advise", mode_waiting="enforce", sooner_minutes=15)


@pytest.mark.parametrize(
    ("minutes", "policy", "waiting", "events"),
    [
        ([RESTS] * 600, POLICY, False, STOPS),
        ([TRAINS] * 60 * 24 * 3, POLICY, False, []),
        ([WORKS] * 1440 + [RESTS] * 600, POLICY, False, [(1700, "warn"), (1710, "stop")]),
        ([PRINTS] * 600, POLICY, False, [(60, "warn"), (70, "stop")]),
        ([UNKNOWN] * 6000, POLICY, False, []),
        (
            [RESTS] * 35 + [UNKNOWN] * 100 + [RESTS] * 100,
            POLICY,
            False,
            [(30, "warn"), (136, "stop")],
        ),
        ([RESTS] * 33 + [SHORT] + [RESTS] * 100, POLICY, False, STOPS),
        ([RESTS] * 600, replace(POLICY, mode="advise"), False, STOPS[:1]),
        ([RESTS] * 600, IdlePolicy(), False, []),
        ([RESTS] * 600, STRICTER, False, STOPS[:1]),
        ([RESTS] * 600, STRICTER, True, [(15, "warn"), (25, "stop")]),
        ([HELD] * 6000, POLICY, False, []),
        ([FREE] * 600, POLICY, False, STOPS),
    ],
    ids=[
        *("never works", "a long run with nobody there", "rests after a day of work"),
        *("output slows it down", "unknown is not idle", "unknown in the countdown"),
        *("a moment of work in the countdown", "advice stops nobody", "off says nothing"),
        *("stricter, nobody waits", "stricter, others wait", "memory held", "no process"),
    ],
)
def test_idle_servers_are_warned_and_stopped_on_schedule(
    minutes: list[Activity], policy: IdlePolicy, waiting: bool, events: list[tuple[int, str]]
) -> None:
    assert list(day(minutes, policy, waiting=waiting)) == events


def test_work_extends_idle_time_and_tiny_use_barely_does() -> None:
    # Two minutes at most of a GPU are worth more than those who never work have.
    assert next(day([WORKS] * 2 + [RESTS] * 600)) == (30 + 2 * 24 + 2, "warn")
    # A second in each minute: it would be use for whoever asks whether there is any.
    pretends = Activity(60.0, use=20.0 / 60, busy=1.0)
    (warned, event), (stopped, _) = day([pretends] * 600)
    assert event == "warn" and warned < 45 and stopped == warned + 10
    minutes = [RESTS] * 33 + [WORKS] + [RESTS] * 100
    assert list(day(minutes))[:2] == [(30, "warn"), (34, "back")]
    state = IdleState(credit=12 * 60, warned_at=T0, stops_at=T0)
    assert judge(STRICTER, state, RESTS, T0).event == "back", "nobody waits any more"


def test_snooze_extends_the_deadline_a_limited_number_of_times() -> None:
    warned = IdleState(credit=0, warned_at=T0, stops_at=T0 + timedelta(minutes=10))
    first = snooze(POLICY, warned, T0)
    assert first and first.stops_at == T0 + timedelta(minutes=40)
    second = snooze(POLICY, first, T0 + timedelta(minutes=30))
    assert second and second.stops_at == T0 + timedelta(minutes=70)
    assert snooze(POLICY, second, T0) is None
    assert snooze(POLICY, begin(POLICY), T0) is None


activities = st.builds(
    Activity,
    seconds=st.just(60.0),
    use=st.none() | st.floats(0, 100),
    busy=st.none() | st.floats(0, 60),
    output=st.booleans(),
)


@given(credit=st.floats(0, 260 * 60), it=activities, more=st.floats(0, 100))
def test_idle_credit_is_bounded_and_never_falls_with_work(
    credit: float, it: Activity, more: float
) -> None:
    after = credit_after(POLICY, credit, it)
    assert 0 <= after <= 60 * POLICY.most_minutes
    assert after >= credit - 60
    if it.use is not None:
        harder = replace(it, use=min(100.0, it.use + more))
        assert credit_after(POLICY, credit, harder) >= after
    assert credit_after(POLICY, credit, replace(it, output=True)) >= after


# From minutes of devices.


def minute(uuid: str, **fields: Any) -> DeviceUse:
    return DeviceUse(uuid=uuid, since=T0, seconds=60, samples=60, **fields)


def test_server_activity_is_that_of_its_busiest_device() -> None:
    rests = minute("a", known=60, measured=60)
    works = minute("b", known=30, measured=30, busy=15, use_sum=30 * 40)
    assert activity_of([rests, works], 60, output=False) == Activity(60, 40.0, 30.0)
    assert activity_of([minute("a"), works], 60, output=True) == Activity(60, 40.0, 30.0, True)
    assert activity_of([minute("a"), rests], 60, output=False).busy is None
    assert activity_of([], 60, output=False).busy is None
    held = minute("m", known=60, busy=60, processes=1)
    assert activity_of([rests, held], 60, output=False) == Activity(60, None, 60.0)
    free = minute("m", known=60)
    assert activity_of([free], 60, output=False) == Activity(60, None, 0.0)


# The configuration.


def test_idle_policy_entries_override_only_their_settings() -> None:
    policies = IdlePolicies(
        {
            "*": {"mode": "advise", "first_minutes": 20},
            "group:ml101": {"mode": "enforce"},
            "environment:render": {"mode": "off"},
        }
    )
    assert policies.of("", "").mode == "advise"
    assert policies.of("ml101", "").mode == "enforce"
    assert policies.of("ml101", "").first_minutes == 20
    assert policies.of("ml101", "render").mode == "off"
    assert IdlePolicies({}).of("ml101", "render") == IdlePolicy()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"ml101": {}}, "'ml101' names no servers"),
        ({"group:": {}}, "'group:' names no servers"),
        ({"*": {"mod": "off"}}, "there are countdown_minutes"),
        ({"*": {"mode": "kill"}}, "write off, advise or enforce"),
        ({"*": {"mode": ""}}, "write off, advise or enforce"),
        ({"*": {"first_minutes": -1}}, "write a number from 0 on"),
        ({"*": {"first_minutes": True}}, "write a number from 0 on"),
        ({"*": {"most_snoozes": "2"}}, "write a number from 0 on"),
        ({"*": {"gain": float("nan")}}, "write a number from 0 on"),
    ],
)
def test_invalid_idle_policy_is_rejected_with_an_explanation(
    config: dict[str, dict[str, object]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        IdlePolicies(config)


def period(samples: int, known: int, busy: int, use_sum: int, lease_id: str = "") -> DeviceUse:
    counts = {"samples": samples, "known": known, "measured": known, "busy": busy}
    return DeviceUse(uuid="a", since=T0, seconds=60, lease_id=lease_id, use_sum=use_sum, **counts)


def test_own_use_counts_where_it_is_known_and_the_device_s_elsewhere() -> None:
    whole = period(60, 60, 60, 60 * 90)
    own = period(60, 60, 6, 60, "ada")
    assert own_use(own, whole) == own
    assert own_use(None, whole) == own_use(period(60, 0, 0, 0, "ada"), whole) == whole
    half = own_use(period(60, 30, 0, 0, "ada"), whole)
    assert (half.known, half.busy, half.use) == (60, 30, 45)
    assert own_use(own, period(60, 0, 0, 0)) == own


@given(st.data())
def test_lost_figures_make_nobody_more_idle_than_the_device(data: st.DataObject) -> None:
    known = data.draw(st.integers(1, 60))
    busy = data.draw(st.integers(0, known))
    work = data.draw(st.integers(0, 60))
    whole = period(60, 60, work, 100 * work)
    own = period(60, known, busy, 100 * busy, "ada")
    found = own_use(own, whole)
    assert (found.samples, found.known) == (60, 60)
    assert found.busy >= min(busy + (60 - known) * work / 60, 60)
    assert found.busy <= min(60, busy + 60 - known)
