"""Whether a session may go on. Real: the production scheduler; everything is pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.devices.closures import Closure
from gpuspawner.leases.models import Lease, LeasedDevice
from gpuspawner.queue.extensions import EXACT, PLANNED, delayed, drained, too_many_hours, who_waits
from gpuspawner.queue.models import QueueLimits, RunningLease, WaitingTicket
from gpuspawner.queue.scheduler import Scheduler
from tests.support.leases import lease_of

NOW = 1_800_000_000.0
AT = datetime.fromtimestamp(NOW, timezone.utc)
HOUR = 3600.0
A100, T4 = "A100/80", "T4/16"


def lease(devices: int = 1) -> Lease:
    held = tuple(LeasedDevice(f"GPU-{n}", 0, n, "A100", 80 * 2**30) for n in range(devices))
    times: dict[str, Any] = {"granted_at": AT, "started_at": AT, "seconds": 3600}
    return lease_of("ada", id="mine", devices=held, **times)


def running(name: str, devices: int = 1, hours: float | None = 1.0, **kwargs: Any) -> RunningLease:
    ends_at = None if hours is None else NOW + hours * HOUR
    values = {"member": name, "held": {A100: devices}, "started_at": NOW - HOUR, **kwargs}
    return RunningLease(id=name, ends_at=ends_at, **values)


def waiting(name: str, devices: int = 1, **kwargs: Any) -> WaitingTicket:
    values = {"member": name, "kinds": frozenset({A100}), "asked_at": NOW - 60, "seconds": HOUR}
    return WaitingTicket(id=name, devices=devices, **{**values, **kwargs})


def scheduler(
    leases: list[RunningLease], tickets: list[WaitingTicket], **settings: Any
) -> Scheduler:
    found = Scheduler(**settings)
    capacity: Counter[str] = Counter({A100: 0, T4: 2})
    for each in leases:
        capacity.update(each.held)
    found.set_capacity(capacity)
    for each in leases:
        found.started(each)
    for ticket in tickets:
        found.submit(ticket)
    return found


def late(found: Scheduler, hours: float, free: dict[str, int] | None = None) -> set[str]:
    """Who starts later if the lease ``mine`` goes on for so long."""
    tickets = delayed(found, "mine", NOW + hours * HOUR, NOW, free or {})
    return {ticket.id for ticket in tickets}


MINE = running("mine", member="ada")


SOONER = running("other", hours=0.5)
T4S = running("other", held={T4: 2})
ON_T4 = frozenset({T4})
GUESTS = {"group_limits": {"guests": QueueLimits(devices=1)}}


@pytest.mark.parametrize(
    ("leases", "tickets", "settings", "free", "named"),
    [
        ([MINE], [], {}, {}, set()),
        ([MINE], [waiting("bob")], {}, {}, {"bob"}),
        ([MINE, SOONER], [waiting("bob")], {}, {}, set()),
        ([MINE, SOONER], [waiting("bob"), waiting("cleo")], {}, {}, {"cleo"}),
        ([MINE, T4S], [waiting("bob", kinds=ON_T4)], {}, {}, set()),
        ([MINE], [waiting("second", member="ada")], {}, {}, set()),
        # Who has no planned start: nobody can promise that one is not delayed.
        ([MINE], [waiting("b", 5), waiting("c", 5, kinds=ON_T4)], {}, {}, {"b"}),
        (
            [replace(MINE, group="guests")],
            [waiting("bob", group="guests", kinds=ON_T4)],
            GUESTS,
            {T4: 2},
            {"bob"},
        ),
        # A device that cannot be told of delays everybody.
        ([running("other")], [waiting("bob"), waiting("cleo")], {}, {}, {"bob", "cleo"}),
        ([MINE], [waiting("dan", kinds=frozenset({""}))], {}, {}, {"dan"}),
    ],
    ids=[
        *("nobody waits", "for the very device", "another device is sooner", "for one of two"),
        *("another kind", "one's own ticket", "no planned start", "the group's limit"),
        *("an unknown lease", "an unknown kind"),
    ],
)
def test_extension_names_the_tickets_it_delays(
    leases: list[RunningLease],
    tickets: list[WaitingTicket],
    settings: dict[str, Any],
    free: dict[str, int],
    named: set[str],
) -> None:
    assert late(scheduler(leases, tickets, **settings), 2, free) == named


def test_ticket_blocked_only_by_its_limit_is_not_delayed() -> None:
    """Bob may have one device and has one: his second ticket does not wait for mine."""
    bobs = running("bobs", member="bob")
    line = scheduler(
        [MINE, bobs], [waiting("second", member="bob")], member_limits=QueueLimits(devices=1)
    )
    assert late(line, 2, {A100: 1}) == set()
    assert late(line, 2) == {"second"}, "nobody can say that it would not"
    line.submit(waiting("cleo"))
    assert late(line, 2, {A100: 1}) == {"second"}, "the free one is Cleo's"


def test_ticket_far_back_in_long_queue_counts_as_delayed() -> None:
    tickets = [waiting(f"t{n:04}", asked_at=NOW - 10_000 + n) for n in range(2000)]
    leases = [MINE, *(running(f"r{n}", hours=0.5) for n in range(40))]
    line = scheduler(leases, tickets)
    found = late(line, 2)
    assert "t0000" not in found, "somebody else's device comes back for that one"
    assert "t1999" in found


kinds = st.sampled_from([A100, T4])
some_running = st.builds(
    lambda n, kind, devices, hours, group: running(
        f"r{n}", held={kind: devices}, hours=hours, group=group
    ),
    st.integers(0, 99),
    kinds,
    st.integers(1, 3),
    st.none() | st.floats(0, 24),
    st.sampled_from(["", "x", "y"]),
)
some_waiting = st.builds(
    lambda n, of, devices, hours, age, group, last, position: waiting(
        f"t{n}",
        devices,
        kinds=of,
        seconds=None if hours is None else hours * HOUR,
        asked_at=NOW - age,
        group=group,
        last=last,
        position=position,
    ),
    st.integers(0, 99),
    st.frozensets(kinds, min_size=1),
    st.integers(1, 3),
    st.none() | st.floats(0.1, 24),
    st.floats(-HOUR, 90 * 24 * HOUR),
    st.sampled_from(["", "x", "y"]),
    st.booleans(),
    st.none() | st.integers(1, 3),
)


@given(
    st.lists(some_running, max_size=6, unique_by=lambda some: some.id),
    st.lists(some_waiting, max_size=8, unique_by=lambda some: some.id),
    st.dictionaries(kinds, st.integers(0, 2)),
    st.floats(0, 12),
    st.floats(0, 48),
)
def test_named_delays_match_the_schedule_after_extension(
    leases: list[RunningLease],
    tickets: list[WaitingTicket],
    free: dict[str, int],
    hours: float,
    longer: float,
) -> None:
    line = scheduler([*leases, running("mine", 2, hours, member="ada", group="x")], tickets)
    state = dict(line.running), dict(line.waiting)
    until = NOW + (hours + longer) * HOUR
    named = {ticket.id for ticket in delayed(line, "mine", until, NOW, free)}
    assert (dict(line.running), dict(line.waiting)) == state, "asking changes nothing"

    before = line.decide(NOW, free, planned=PLANNED)
    line.extended("mine", until)
    after = line.decide(NOW, free, planned=PLANNED)
    starts = dict.fromkeys(after.starts, NOW) | dict(after.planned)
    for ticket in before.starts:
        assert ticket in after.starts or ticket in named
    latest = dict.fromkeys(after.starts, NOW) | dict(after.latest)
    for ticket, start in before.planned.items():
        in_time = ticket in starts and starts[ticket] <= start + EXACT
        if ticket in before.latest:  # and the bound that was shown holds
            in_time &= ticket in latest and latest[ticket] <= before.latest[ticket] + EXACT
        assert in_time != (ticket in named)
    for ticket in named:
        assert ticket not in after.starts


# Limits, drains, words.


def test_gpu_hour_limit_counts_hours_to_the_new_end() -> None:
    others = [running("mine", 1, 0.1), running("b", 2, 3.0), running("endless", 1, None)]
    until = NOW + 4 * HOUR
    assert too_many_hours(others, lease(2), until, NOW, QueueLimits()) == ""
    assert too_many_hours(others, lease(2), until, NOW, QueueLimits(gpu_hours=14)) == ""
    assert too_many_hours(others, lease(2), until, NOW, QueueLimits(gpu_hours=13.5)) == (
        "13.5 GPU-hours may be held at once, and with it they would be 14.0"
    )
    over = [running("long-over", 4, -10.0)]
    assert too_many_hours(over, lease(1), until, NOW, QueueLimits(gpu_hours=4)) == ""


def test_extension_refusal_names_drains_and_waiting_members() -> None:
    closed = {"GPU-1": Closure("GPU-1", AT + timedelta(hours=1), "kim", "a new fan")}
    assert drained(lease(1), closed) == ""
    assert drained(lease(2), closed) == (
        "GPU 1 is needed for maintenance after this session (a new fan)"
    )

    tickets = [waiting("t1", member="bob"), waiting("t2", member="bob")]
    assert who_waits(tickets, lease(1)) == "1 member waits for this GPU and would start later"
    tickets.append(waiting("t3", member="cleo"))
    assert who_waits(tickets, lease(2)) == "2 members wait for these GPUs and would start later"
