"""Whose turn it is, kept up to date event by event."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from .lengths import Lengths
from .limits import Held
from .plan import Plan
from .policy import HOUR, Policy
from .use import Use
from .values import Decision, Ended, Limits, Part, Ranked, Running, Waiting

_AHEAD = 1e9
"""Points that put a ticket before or behind every score."""


class Scheduler:
    """Tickets that wait, leases that run, and the rules that choose between them.

    Incremental and in memory: whoever owns it tells it what happens and asks it to decide. It
    does not start anything itself; a ticket leaves the line with :meth:`started`.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        member_weights: Mapping[str, float] | None = None,
        group_weights: Mapping[str, float] | None = None,
        member_limits: Limits | None = None,
        group_limits: Mapping[str, Limits] | None = None,
    ) -> None:
        self.policy = policy or Policy()
        self._weights = {"member": dict(member_weights or {}), "group": dict(group_weights or {})}
        self._member_limits = member_limits or Limits()
        self._group_limits = dict(group_limits or {})
        self._capacity: dict[str, int] = {}
        self._waiting: dict[str, Waiting] = {}
        self._running: dict[str, Running] = {}
        self.waiting: Mapping[str, Waiting] = MappingProxyType(self._waiting)
        self.running: Mapping[str, Running] = MappingProxyType(self._running)
        self._members = Use(self.policy.half_life_seconds)
        self._groups = Use(self.policy.half_life_seconds)
        self._lengths = Lengths(self.policy.history, self.policy.default_seconds)

    def set_capacity(self, devices: Mapping[str, int]) -> None:
        """All devices that can be leased at all, by kind: shares are parts of them."""
        self._capacity = dict(devices)

    def submit(self, ticket: Waiting) -> None:
        """A ticket waits; one of the same id is replaced."""
        self._waiting[ticket.id] = ticket

    def withdraw(self, ticket_id: str) -> None:
        """A ticket waits no longer; an unknown one is no error."""
        self._waiting.pop(ticket_id, None)

    def started(self, lease: Running) -> None:
        """A lease began; its ticket, if it had one, leaves the line."""
        self._waiting.pop(lease.ticket_id or lease.id, None)
        if lease.id in self._running:
            self.ended(lease.id, lease.started_at)
        self._running[lease.id] = lease
        self._members.start(lease.member, lease.devices, lease.started_at)
        if lease.group:
            self._groups.start(lease.group, lease.devices, lease.started_at)

    def extended(self, lease_id: str, ends_at: float | None) -> None:
        """The session's end was moved; an unknown lease is no error."""
        lease = self._running.get(lease_id)
        if lease is not None:
            self._running[lease_id] = Running(
                id=lease.id,
                member=lease.member,
                group=lease.group,
                held=lease.held,
                started_at=lease.started_at,
                ends_at=ends_at,
                ticket_id=lease.ticket_id,
            )

    def ended(self, lease_id: str, at: float) -> None:
        """A lease ended: its use counts, its length is learned. Unknown is no error."""
        lease = self._running.pop(lease_id, None)
        if lease is None:
            return
        at = max(at, lease.started_at)
        self._members.end(lease.member, lease.devices, at)
        if lease.group:
            self._groups.end(lease.group, lease.devices, at)
        self._lengths.learn(
            Ended(
                member=lease.member,
                group=lease.group,
                devices=lease.devices,
                started_at=lease.started_at,
                ended_at=at,
            )
        )

    def learn(self, history: Iterable[Ended]) -> None:
        """What ended before this scheduler began, the oldest first."""
        for ended in history:
            at = max(ended.started_at, ended.ended_at)
            for use, party in ((self._members, ended.member), (self._groups, ended.group)):
                if party:
                    use.start(party, ended.devices, ended.started_at)
                    use.end(party, ended.devices, at)
            self._lengths.learn(ended)

    def order(self, now: float) -> list[Ranked]:
        """All that wait, first next, each with the arithmetic of its score."""
        scored = []
        for ticket in self._waiting.values():
            parts = self._parts(ticket, now)
            scored.append((-sum(part.points for part in parts), ticket.asked_at, ticket.id, parts))
        scored.sort(key=lambda entry: entry[:3])
        return [
            Ranked(ticket_id, place, -score, parts)
            for place, (score, _, ticket_id, parts) in enumerate(scored, start=1)
        ]

    def place(self, ticket_id: str, now: float) -> int:
        """A ticket's place in line, 1 is next; 0 when it does not wait."""
        return next((r.place for r in self.order(now) if r.id == ticket_id), 0)

    def decide(self, now: float, free: Mapping[str, int]) -> Decision:
        """Who starts now on the ``free`` devices (by kind). Changes nothing."""
        starts: list[str] = []
        planned: dict[str, float] = {}
        held_back: dict[str, str] = {}
        plans = self._plans(now, free)
        left = dict(free)
        kept: dict[str, int] = {}
        held = self._held(now)
        on: dict[str, str] = {}
        for ranked in self.order(now):
            ticket = self._waiting[ranked.id]
            seconds = self._expected(ticket)
            why = self._refusal(held, ticket, seconds)
            if why:
                held_back[ticket.id] = why
                continue
            options = [
                (plans[k].earliest(ticket.devices, seconds), k) for k in ticket.kinds if k in plans
            ]
            if not options:
                continue
            at, kind = min(options)
            if at <= now and left.get(kind, 0) >= ticket.devices:
                starts.append(ticket.id)
                on[ticket.id] = kind
                left[kind] -= ticket.devices
                plans[kind].take(ticket.devices, now, seconds)
                for party in (f"m:{ticket.member}", f"g:{ticket.group}"):
                    held.add(party, ticket.devices, seconds)
            elif math.isfinite(at) and kept.get(kind, 0) < self.policy.planned_starts:
                kept[kind] = kept.get(kind, 0) + 1
                planned[ticket.id] = at
                plans[kind].take(ticket.devices, at, seconds)
        return Decision(tuple(starts), planned, held_back, on)

    def _parts(self, ticket: Waiting, now: float) -> tuple[Part, ...]:
        waited = max(0.0, now - ticket.asked_at)
        seconds = self._expected(ticket)
        area = ticket.devices * seconds / HOUR
        points = -self.policy.length_points * math.log2(1 + area)
        parts = [
            Part("waiting", waited / HOUR, f"{waited / HOUR:.1f} hours"),
            self._share("member", self._members, ticket.member, now),
            Part("expected use", points, f"about {area:.1f} GPU-hours"),
        ]
        if ticket.group:
            parts.append(self._share("group", self._groups, ticket.group, now))
        if ticket.priority:
            of_class = self.policy.priority_points[ticket.priority]
            parts.append(Part("priority", of_class, ticket.priority.name.lower()))
        if ticket.boost:
            parts.append(Part("boost", ticket.boost, "an admin's"))
        if ticket.position is not None:
            parts.append(Part("position", _AHEAD - ticket.position, "an admin's own place for it"))
        elif waited >= self.policy.overdue_seconds:
            parts.append(Part("overdue", _AHEAD / 10 + waited, "waited longer than anybody should"))
        elif ticket.last:
            parts.append(Part("last", -_AHEAD, "nobody connected to it, twice"))
        return tuple(parts)

    def _share(self, which: str, use: Use, party: str, now: float) -> Part:
        used = use.of(party, now)
        weight = self._weights[which].get(party, 1.0)
        capacity = max(1, sum(self._capacity.values())) * use.full
        points = -self.policy.share_points * used / capacity / weight
        return Part(
            f"share of the {which}",
            points,
            f"used {used / HOUR:.1f} GPU-hours of late, weight {weight:g}",
        )

    def _expected(self, ticket: Waiting) -> float:
        return self._lengths.expected(ticket.member, ticket.group, ticket.devices, ticket.seconds)

    def _rest(self, lease: Running, now: float) -> float:
        """Seconds until the lease ends: known, or expected of its like."""
        if lease.ends_at is not None:
            return max(1.0, lease.ends_at - now)
        age = max(0.0, now - lease.started_at)
        length = self._lengths.expected(lease.member, lease.group, lease.devices, None, age)
        return max(1.0, length - age)

    def _plans(self, now: float, free: Mapping[str, int]) -> dict[str, Plan]:
        ends: dict[str, list[tuple[float, int]]] = {kind: [] for kind in {*free, *self._capacity}}
        for lease in self._running.values():
            at = now + self._rest(lease, now)
            for kind, devices in lease.held.items():
                ends.setdefault(kind, []).append((at, devices))
        return {kind: Plan(now, max(0, free.get(kind, 0)), when) for kind, when in ends.items()}

    def _held(self, now: float) -> Held:
        held = Held()
        for lease in self._running.values():
            for party in (f"m:{lease.member}", f"g:{lease.group}"):
                held.add(party, lease.devices, self._rest(lease, now))
        return held

    def _refusal(self, held: Held, ticket: Waiting, seconds: float) -> str:
        by_member = held.refusal(
            "The member", f"m:{ticket.member}", self._member_limits, ticket.devices, seconds
        )
        if by_member or not ticket.group or ticket.group not in self._group_limits:
            return by_member
        limits = self._group_limits[ticket.group]
        return held.refusal("The group", f"g:{ticket.group}", limits, ticket.devices, seconds)
