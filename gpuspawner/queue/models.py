"""Tickets, the scheduler's values and policy, and the interface of an external scheduler.

A *kind* names devices that are the same to a request: a model with its memory, as the pool
puts them together. A request fits one kind or several; all its devices come from one of those.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import IntEnum
from types import MappingProxyType
from typing import Protocol

from ..devices.models import Inventory, MachineScheduler
from ..leases.models import Request, ServerRef


class Priority(IntEnum):
    """Classes that are served one after the other; waiting wins over a class in the end."""

    LOW = -1
    NORMAL = 0
    COURSE = 1
    """A course or event for which the admin gives way."""
    ADMIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A ticket, as far as the order depends on it."""

    id: str
    member: str
    group: str = ""
    """Whose share and limits it counts on beside the member's own; "" is none."""
    devices: int
    """How many devices at once, at least 1."""
    kinds: frozenset[str]
    """Kinds that fit; never empty."""
    asked_at: float
    """When the member asked: waiting counts from here, across restarts."""
    seconds: float | None = None
    """The session length that was asked for; None when there is no end."""
    priority: Priority = Priority.NORMAL
    boost: float = 0.0
    """Points that an admin added to (or took from) its score."""
    position: int | None = None
    """An admin's own place for it: such tickets go first, the least number first."""
    last: bool = False
    """Behind everybody else, after a second no-show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A lease, as far as the order depends on it."""

    id: str
    member: str
    group: str = ""
    held: Mapping[str, int]
    """Devices by kind."""
    started_at: float
    ends_at: float | None = None
    """When its session ends at the latest; None when there is no end."""
    ticket_id: str = ""
    """The ticket that it came of; "" is one with the lease's own id, or none."""

    @property
    def devices(self) -> int:
        return sum(self.held.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSession:
    """A lease of the past: what shares and estimates are learned from."""

    member: str
    group: str = ""
    devices: int
    started_at: float
    ended_at: float
    seconds: float | None = None
    """The session length that was asked for, if there was one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """The most that one member or one group may have; None is no limit."""

    devices: int | None = None
    """GPUs at once."""
    tickets: int | None = None
    """Tickets that wait."""
    gpu_hours: float | None = None
    """GPU-hours held: devices times the rest of their sessions, over running leases."""


@dataclass(frozen=True, slots=True)
class ScorePart:
    """One line of the arithmetic of a score."""

    name: str
    """``priority``, ``share of the member``, ``waiting``, ..."""
    points: float
    why: str
    """The figures behind it, in words: ``used 12.5 GPU-hours of late, weight 2``."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A ticket at its place in line."""

    id: str
    place: int
    """1 is next."""
    score: float
    """The sum of the parts; greater goes first."""
    parts: tuple[ScorePart, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """What one look at the queue came to."""

    starts: tuple[str, ...] = ()
    """Tickets that get their devices now, in this order."""
    planned: Mapping[str, float] = field(default_factory=dict)
    """When tickets that the decision looked at start at the latest, as far as session ends
    tell; those of which nothing can be said are absent."""
    held_back: Mapping[str, str] = field(default_factory=dict)
    """Tickets that a limit keeps waiting, and which one, in words."""
    on: Mapping[str, str] = field(default_factory=dict)
    """For each start, the kind of devices that it is to get."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """When a ticket will probably start, in seconds since 1970."""

    low: float
    likely: float
    high: float
    """Eight of ten tickets start between ``low`` and ``high``."""


HOUR = 3600.0
DAY = 24 * HOUR

PRIORITY_POINTS: Mapping[Priority, float] = MappingProxyType(
    {Priority.LOW: -40.0, Priority.NORMAL: 0.0, Priority.COURSE: 40.0, Priority.ADMIN: 80.0}
)
"""Far apart: no size and no share makes up for a class, waiting does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """Every parameter of the order.

    One point is a request half as large: 1 GPU for an hour is one point before 2 GPUs for an
    hour. The defaults were chosen on the first half of a real trace, for several sizes of the
    cluster at once (``benchmarks/queue_replay.py``).
    """

    half_life_seconds: float = 7 * DAY
    """After this long, past use counts half."""
    member_share_points: float = 8.0
    """Points that a member loses who had all devices of late; who had a tenth, a tenth of it."""
    group_share_points: float = 2.0
    """The same for a group."""
    waiting_point_seconds: float = 18 * HOUR
    """Waiting so long is worth one point."""
    level_gpu_hours: float = 4.0
    """Requests that are expected to use less have points, larger ones lack some. Waiting makes up
    for what is lacking, and no more: those that have waited enough go by age, behind the small
    ones. So an overload of long sessions does not make short ones wait for days."""
    small_share: float = 0.01
    """The part of the devices of each kind, in whole devices, that is kept free for requests
    expected to use less than that: long sessions would take them for days. None where there are
    fewer than 100 devices of a kind."""
    overdue_seconds: float = 6 * DAY
    """Who waited longer goes first of all, the oldest first, as far as the next one allows."""
    overdue_share: float = 0.1
    """The part of the devices that may be in use by those who went first because of their age;
    one ticket at least. It bounds every wait, and keeps an overload from becoming first come,
    first served."""
    priority_points: Mapping[Priority, float] = field(default_factory=lambda: PRIORITY_POINTS)
    """Points of each class."""
    default_seconds: float = 1800.0
    """How long a session is expected to last while nothing is known about its like."""
    samples: int = 9
    """How many sessions of the same member, group and size, those asked for at about the same
    time, tell how long one will last."""
    batch_seconds: float = 300.0
    """Requests of one member, alike and no further apart, are estimated together."""
    batch_tickets: int = 20
    """The most that are."""

    def __post_init__(self) -> None:
        above_zero = {"half_life_seconds", "waiting_point_seconds", "level_gpu_hours"}
        above_zero |= {
            "small_half_life_seconds",
            "overdue_seconds",
            "default_seconds",
            "samples",
            "batch_tickets",
        }
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "priority_points":
                continue
            if not _is_number(value) or value < 0 or (value == 0 and each.name in above_zero):
                least = "above 0" if each.name in above_zero else "from 0"
                raise ValueError(f"{each.name} is {value!r}; it is a number {least}")
            if each.name in {"samples", "batch_tickets"} and value != int(value):
                raise ValueError(f"{each.name} is {value!r}; it is a whole number")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A request that waits. It keeps its place across restarts of everything."""

    id: str
    server: ServerRef
    request: Request
    options: Mapping[str, object] = field(default_factory=dict)
    """The member's choices, to start the server with after a restart of the hub."""
    engine: str = ""
    account: str = ""
    group: str = ""
    seconds: int | None = None
    """Session length that was asked for; None when there is no end."""
    priority: int = 0
    boost: float = 0.0
    position: int | None = None
    last: bool = False
    """Behind everybody else, after a second no-show."""
    version: int = 1
    """Grows with every change by whomever; so that a process sees what another one changed."""
    created_at: datetime
    ended_at: datetime | None = None
    outcome: str = ""
    """Empty while it waits; then ``granted``, ``cancelled``, ``expired``, ``refused``,
    ``replaced`` or ``member_gone``."""
    end_reason: str = ""
    lease_id: str | None = None
    when_dry: str = "stop"
    """As in :class:`Lease`, and so the next."""
    overdraft: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Where a ticket stands with the scheduler that it was handed to."""

    ticket_id: str
    uuids: tuple[str, ...] = ()
    """The devices that it got; none while it waits."""
    since: datetime | None = None
    """Since when it has them."""
    over: str = ""
    """Why it will never have any, or has none any more, as a sentence; empty while it waits or
    has them."""
    again: bool = False
    """Whether it may be handed over once more: its end had nothing to do with it."""
    ended_at: datetime | None = None
    """When it had them last."""
    place: int = 0
    """1 is next; 0 for one that does not wait."""
    of: int = 0
    """How many wait."""
    score: float = 0.0
    """What the order goes by; greater goes first."""
    why: str = ""
    """What it waits for beside devices, in words; empty when that is all."""
    start: datetime | None = None
    """When it is expected to start."""


class Delegate(MachineScheduler, Protocol):
    """A scheduler beside ours, to which requests for devices are handed. Its methods block."""

    @property
    def engine(self) -> str:
        """The engine whose servers get what it gives out."""

    @property
    def name(self) -> str:
        """Of the devices that it gives out, in the store."""

    def observe(self, now: datetime) -> Inventory:
        """The devices that it gives out, as :class:`gpuspawner.devices.source.DeviceSource`."""

    def submit(self, ticket: Ticket) -> None:
        """Hand a ticket over; a second time changes nothing. Raises Refused for what it will
        never have, and Unavailable when nobody answers: then it may have been handed over."""

    def turns(self, age: float = 1.0) -> Mapping[str, Turn]:
        """Every ticket that was handed over and not forgotten yet, by id; at most so many seconds
        old, and in the long run asked for less than once a second. Raises Unavailable."""

    def soon(self) -> float:
        """Seconds until :meth:`turns` may say something new: less than a second when it was told
        something of late."""

    def is_missing(self, ticket: Ticket) -> bool:
        """Whether a ticket that :meth:`turns` did not name was lost, and not only handed over
        since."""

    def cancel(self, ticket_id: str) -> None:
        """Take a ticket back, and what it got with it; the server on it is gone. From then on
        :meth:`turns` names no devices of it. Doing it twice changes nothing. Raises
        Unavailable."""

    def decline(self, ticket_id: str) -> None:
        """Give back what a ticket got, and let it be handed over once more. From then on
        :meth:`turns` names no devices of it until it got others. Raises Unavailable."""

    def extend(self, ticket_id: str, seconds: int) -> None:
        """Let it have its devices for so many seconds in all. Raises Refused or Unavailable."""

    def why_not_yet(self, ticket: Ticket) -> str:
        """Why :meth:`submit` cannot hand a ticket over just now, in words; empty when nobody
        knows of a reason."""

    def tend(self, waiting: Collection[Ticket], *, paused: bool) -> None:
        """Bring the order in line with what admins decided of these tickets, and give out nothing
        while granting is paused. Goes by the last :meth:`turns`. Raises Unavailable."""

    def drained(self) -> frozenset[str]:
        """The devices of all machines that are closed there, by whomever, as it said last."""
