"""Whether a session may go on: who would have to wait for it longer. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from ..model import Lease
from ..scheduler import Decision, Limits, Running, Scheduler, Waiting
from ..store.closures import Closure

EXACT = 1.0
"""Seconds by which two planned starts may differ and still be the same."""

PLANNED = 100
"""Starts that are planned for the question; who is behind them counts as delayed."""

NO_KIND = ""
"""The kind of a request that no device seen by this process suits."""


def delayed(
    scheduler: Scheduler, lease_id: str, ends_at: float, now: float, free: Mapping[str, int]
) -> list[Waiting]:
    """Whoever waits and would start later if the lease went on until ``ends_at``.

    Times in seconds since 1970; ``free`` counts devices by kind. Who has no planned start, and
    could use these devices, may well start later, and is among them. The lease's own member is
    not: it is theirs to choose. Leaves the scheduler as it was.
    """
    lease = scheduler.running.get(lease_id)
    member = lease.member if lease else ""
    others = [ticket for ticket in scheduler.waiting.values() if ticket.member != member]
    if not others or lease is None:
        return others  # nobody can say what devices this process does not know
    before = scheduler.decide(now, free, planned=PLANNED, reasons=True)
    scheduler.extended(lease_id, ends_at)
    try:
        after = scheduler.decide(now, free, planned=PLANNED, reasons=True)
    finally:
        scheduler.extended(lease_id, lease.ends_at)
    left = Counter(free)
    for ticket_id, kind in after.on.items():
        left[kind] -= scheduler.waiting[ticket_id].devices
    return [ticket for ticket in others if _starts_later(ticket, lease, before, after, left)]


def too_many_hours(
    running: Collection[Running], lease: Lease, ends_at: float, now: float, limits: Limits
) -> str:
    """Why ``limits`` forbid it that the lease, one of ``running``, goes on until ``ends_at``;
    empty when they do not. ``running`` are those that these limits hold for together."""
    if limits.gpu_hours is None:
        return ""
    held = len(lease.devices) * (ends_at - now)
    for other in running:
        if other.id != lease.id and other.ends_at is not None:
            held += other.devices * max(0.0, other.ends_at - now)
    if held <= 3600 * limits.gpu_hours:
        return ""
    return (
        f"{limits.gpu_hours:g} GPU-hours may be held at once, and with it they would be "
        f"{held / 3600:.1f}"
    )


def drained(lease: Lease, closed: Mapping[str, Closure]) -> str:
    """Why an admin's work on a device of the lease forbids it; empty when none does."""
    for device in lease.devices:
        if found := closed.get(device.uuid):
            why = f" ({found.reason})" if found.reason else ""
            return f"GPU {device.index} is needed for maintenance after this session{why}"
    return ""


def who_waits(tickets: Collection[Waiting], lease: Lease) -> str:
    """``2 members wait for this GPU and would start later``."""
    members = len({ticket.member for ticket in tickets})
    what = "this GPU" if len(lease.devices) == 1 else "these GPUs"
    who = "1 member waits" if members == 1 else f"{members} members wait"
    return f"{who} for {what} and would start later"


def _starts_later(
    ticket: Waiting, lease: Running, before: Decision, after: Decision, left: Mapping[str, int]
) -> bool:
    """``left`` are the devices that nobody needs now."""
    if ticket.id in after.starts:
        return False
    if ticket.id in before.starts:
        return True
    start, then = before.planned.get(ticket.id), after.planned.get(ticket.id)
    if start is not None:
        return then is None or then > start + EXACT
    if ticket.id in before.held_back:
        if ticket.group and ticket.group == lease.group:
            return True  # by a limit that the lease itself may use up
        if any(left.get(kind, 0) >= ticket.devices for kind in ticket.kinds):
            return False  # by a limit alone
    return NO_KIND in ticket.kinds or bool(ticket.kinds & lease.held.keys())
