"""Tickets, the scheduler's values and policy, and the interface of an external scheduler.

A *kind* names devices that are interchangeable for a request: model and memory, or one shared
device (see :mod:`gpuspawner.queue.kinds`). A request fits one or several kinds; all its devices
come from one of them, or are shared devices of one pool.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import IntEnum
from types import MappingProxyType
from typing import Protocol

from ..core.units import DeviceCount
from ..devices.models import Inventory, MachineScheduler
from ..leases.host_resources import NOTHING, HostAmount
from ..leases.models import Request, ServerRef
from .kinds import equivalents_of, gathers_slots, taken_of


class Priority(IntEnum):
    """Priority classes, served one after the other; a long enough wait outweighs a class."""

    LOW = -1
    NORMAL = 0
    COURSE = 1
    """A course or event to which the admin gives precedence."""
    ADMIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingTicket:
    """What the order depends on in a ticket."""

    id: str
    member: str
    group: str = ""
    """The group whose share and limits it counts against besides the member's; "" is none."""
    devices: DeviceCount
    """How many devices at once, or the least part of one that a share may be.

    0 if it only waits for memory or CPU of the host; its kind is :data:`kinds.CPU_ONLY`.
    """
    kinds: frozenset[str]
    """Kinds that fit; never empty."""
    share_bytes: int = 0
    """The memory that a share must have, which says how many slots it takes; 0 is any amount, and
    for whole devices."""
    smallest: bool = False
    """True to get the kind with the least memory of those that it could start on."""
    asked_at: float
    """When the member asked: the wait counts from here, across restarts."""
    seconds: float | None = None
    """The requested session length; None if it has no end."""
    priority: Priority = Priority.NORMAL
    boost: float = 0.0
    """Points that an admin added to its score (or subtracted)."""
    position: int | None = None
    """A position set by an admin: such tickets go first, the smallest number first."""
    last: bool = False
    """Behind everybody else, after a second no-show."""
    host: HostAmount = NOTHING
    """What it is guaranteed of the host's memory and CPU, if these have a budget."""

    def taken_of(self, kind: str) -> DeviceCount:
        """Return how many devices of a kind it takes."""
        return taken_of(kind, self.devices, self.share_bytes)

    @property
    def gathers_slots(self) -> bool:
        """True if it may need several slots of one device, free at the same time."""
        return gathers_slots(self.devices, self.kinds, self.share_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLease:
    """What the order depends on in a lease."""

    id: str
    member: str
    group: str = ""
    held: Mapping[str, DeviceCount]
    """Devices by kind."""
    started_at: float
    ends_at: float | None = None
    """The latest end of its session; None if it has no end."""
    ticket_id: str = ""
    """The ticket that it was granted for; "" if it has the lease's own id, or if none."""

    @property
    def devices(self) -> DeviceCount:
        """The number of devices."""
        return sum(self.held.values())

    @property
    def equivalents(self) -> DeviceCount:
        """How many GPUs its devices are; a MIG instance counts as its part."""
        return equivalents_of(self.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSession:
    """A past lease: shares and estimates are learned from these."""

    member: str
    group: str = ""
    devices: DeviceCount
    part: DeviceCount = 1
    """How much of a GPU each of them is: 1, or such as 1/7 for MIG instances."""
    started_at: float
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """The most that one member or one group may have; None means no limit."""

    devices: int | None = None
    """GPUs at once; one slot of four counts as 1/4, and a MIG instance as one."""
    tickets: int | None = None
    """Waiting tickets."""
    gpu_hours: float | None = None
    """GPU-hours held: devices times the rest of their sessions, over running leases.

    A MIG instance counts as its part of a GPU.
    """

    @property
    def can_hold_back(self) -> bool:
        """True if a limit can keep a ticket waiting; ``tickets`` refuses the request instead."""
        return self.devices is not None or self.gpu_hours is not None


@dataclass(frozen=True, slots=True)
class ScorePart:
    """One item of a score."""

    name: str
    """``priority``, ``share of the member``, ``waiting``, ..."""
    points: float
    why: str
    """The figures behind it, in words: ``used 12.5 GPU-hours of late, weight 2``."""


@dataclass(frozen=True, slots=True)
class RankedTicket:
    """A ticket at its position in the queue."""

    id: str
    place: int
    """1 is next."""
    score: float
    """The sum of the parts; higher goes first."""
    parts: tuple[ScorePart, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of one scheduling round."""

    starts: tuple[str, ...] = ()
    """Tickets that get their devices now, in this order."""
    planned: Mapping[str, float] = field(default_factory=dict)
    """The planned starts of the tickets considered, by session ends, known or guessed.

    Tickets whose start cannot be predicted are absent.
    """
    latest: Mapping[str, float] = field(default_factory=dict)
    """By when tickets start at the latest, by the ends of sessions that have one.

    Only a ticket that goes first can delay such a start.
    """
    held_back: Mapping[str, str] = field(default_factory=dict)
    """Tickets that a limit keeps waiting, with that limit in words."""
    waits_for_host: Mapping[str, str] = field(default_factory=dict)
    """Tickets for which the host lacks memory or CPU, with how much: ``8 CPU cores (2 free)``."""
    takes: Mapping[str, Mapping[str, DeviceCount]] = field(default_factory=dict)
    """The devices that each start gets, by kind: several kinds for several shared devices."""
    left: Mapping[str, DeviceCount] = field(default_factory=dict)
    """Devices that no start of now gets, by kind."""
    host_left: HostAmount | None = None
    """What no start of now gets of the host's memory and CPU; None if these have no budget."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """When a ticket will probably start, in seconds since 1970."""

    low: float
    likely: float
    high: float
    """Eight of ten tickets start between ``low`` and ``high``."""


@dataclass(frozen=True, slots=True)
class StoredEstimate:
    """A ticket's estimate in the store, which every process shows."""

    at: float
    """When it was calculated, in seconds since 1970."""
    estimate: Estimate | None
    """None if too few similar tickets had started to give one."""


HOUR = 3600.0
DAY = 24 * HOUR

PRIORITY_POINTS: Mapping[Priority, float] = MappingProxyType(
    {Priority.LOW: -40.0, Priority.NORMAL: 0.0, Priority.COURSE: 40.0, Priority.ADMIN: 80.0}
)
"""Far apart: no size and no share outweighs a class, but waiting does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """All parameters of the order.

    One point is a request half as large: 1 GPU for an hour is one point ahead of 2 GPUs for an
    hour. The defaults were chosen on the first half of a real trace, for several cluster sizes at
    once (``benchmarks/queue_replay.py``).
    """

    half_life_seconds: float = 7 * DAY
    """After this time, past use counts half."""
    member_share_points: float = 8.0
    """Points lost by a member who recently used all devices; with a tenth of them, a tenth."""
    group_share_points: float = 2.0
    """The same for a group."""
    waiting_point_seconds: float = 18 * HOUR
    """How long a wait is worth one point."""
    level_gpu_hours: float = 4.0
    """GPU-hours at which the size gives 0 points; smaller requests have points, larger ones lack.

    Waiting only makes up for the points that are lacking: requests that have waited enough are
    ordered by age, behind the small ones. So an overload of long sessions does not make short ones
    wait for days.
    """
    small_share: float = 0.01
    """The share of each kind's devices, rounded down, that is reserved for small requests.

    Small means expected to use less than ``level_gpu_hours``; long sessions would occupy these
    devices for days. Nothing is reserved with fewer than 100 devices of a kind, and none of shared
    devices.
    """
    overdue_seconds: float = 6 * DAY
    """Tickets that waited longer go first of all, oldest first, limited by ``overdue_share``."""
    overdue_share: float = 0.1
    """The share of the devices, at least one ticket, that overdue tickets may occupy.

    It bounds every wait, and keeps an overload from turning into first come, first served.
    """
    priority_points: Mapping[Priority, float] = field(default_factory=lambda: PRIORITY_POINTS)
    """Points of each class."""
    default_seconds: float = 1800.0
    """The expected length of a session while nothing is known about similar ones."""
    samples: int = 9
    """How many sessions of the same member, group and size are used to predict a length.

    Those requested at about the same time count.
    """
    batch_seconds: float = 300.0
    """Similar requests of one member, at most this far apart, are estimated together."""
    batch_tickets: int = 20
    """The most tickets that are estimated together."""
    host_patience_seconds: float = 600.0
    """For how long others go first while a ticket waits for memory or CPU of the host alone.

    Then what becomes free of them is kept for it, and so are its devices.
    """

    def __post_init__(self) -> None:
        whole = {"samples", "batch_tickets"}
        above_zero = whole | {"half_life_seconds", "waiting_point_seconds", "level_gpu_hours"}
        above_zero |= {"overdue_seconds", "default_seconds"}
        for name in (each.name for each in fields(self) if each.name != "priority_points"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            finite = number and math.isfinite(value)
            if not finite or value < 0 or (value == 0 and name in above_zero):
                least = "above 0" if name in above_zero else "from 0"
                raise ValueError(f"{name} is {value!r}; it is a number {least}")
            if name in whole and value != int(value):
                raise ValueError(f"{name} is {value!r}; it is a whole number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A waiting request. It keeps its position across restarts of everything."""

    id: str
    server: ServerRef
    request: Request
    options: Mapping[str, object] = field(default_factory=dict)
    """The member's choices, used to start the server after a restart of the hub."""
    engine: str = ""
    account: str = ""
    group: str = ""
    seconds: int | None = None
    """Requested session length; None if it has no end."""
    priority: int = 0
    boost: float = 0.0
    position: int | None = None
    last: bool = False
    """Behind everybody else, after a second no-show."""
    version: int = 1
    """Increases with every change, so that a process sees what another one changed."""
    created_at: datetime
    since: datetime | None = None
    """The wait counts from here, for a run that begins again; None: from ``created_at``."""
    ended_at: datetime | None = None
    outcome: str = ""
    """Empty while it waits; later the outcome.

    ``granted``, ``cancelled``, ``expired``, ``refused``, ``replaced`` or ``member_gone``.
    """
    end_reason: str = ""
    lease_id: str | None = None
    when_dry: str = "stop"
    """As in :class:`Lease`, like the next."""
    overdraft: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A ticket's state at the external scheduler that it was submitted to."""

    ticket_id: str
    uuids: tuple[str, ...] = ()
    """The devices that it got; none while it waits."""
    since: datetime | None = None
    """When it got them."""
    got_none: bool = False
    """True if its turn came and it got no device by mistake."""
    over: str = ""
    """Why it will never get devices, or lost them, as a sentence; else empty."""
    again: bool = False
    """True if it may be submitted once more, because its end had nothing to do with it."""
    ended_at: datetime | None = None
    """When it last had devices."""
    place: int = 0
    """1 is next; 0 if it does not wait."""
    of: int = 0
    """How many tickets wait."""
    score: float = 0.0
    """The score that it is ordered by; higher goes first."""
    why: str = ""
    """What it waits for besides devices, in words; empty if nothing else."""
    start: datetime | None = None
    """When it is expected to start."""


class Delegate(MachineScheduler, Protocol):
    """An external scheduler to which requests for devices are submitted. Its methods block."""

    @property
    def engine(self) -> str:
        """The engine whose servers get the devices that it allocates."""

    @property
    def name(self) -> str:
        """The name of its devices in the store."""

    def observe(self, now: datetime) -> Inventory:
        """Return its devices, as :class:`gpuspawner.devices.source.DeviceSource` does."""

    def submit(self, ticket: Ticket) -> None:
        """Submit a ticket; a second time changes nothing.

        Raises Refused if it can never be served, and Unavailable if nobody answers: then it may or
        may not have been submitted.
        """

    def turns(self, age: float = 1.0) -> Mapping[str, Turn]:
        """Return every submitted ticket that is not forgotten yet, by id.

        At most ``age`` seconds old; in the long run it is queried less than once a second. Raises
        Unavailable.
        """

    def soon(self) -> float:
        """Return the seconds until :meth:`turns` may report something new.

        Less than a second if something was recently changed.
        """

    def is_missing(self, ticket: Ticket) -> bool:
        """Return True if a ticket missing from :meth:`turns` was lost, not just submitted since."""

    def cancel(self, ticket_id: str) -> None:
        """Cancel a ticket and release its allocation; its server is gone.

        From then on :meth:`turns` lists no devices for it. Doing it twice changes nothing. Raises
        Unavailable.
        """

    def decline(self, ticket_id: str) -> None:
        """Give back a ticket's allocation, so that it can be submitted once more.

        From then on :meth:`turns` lists no devices for it until it gets others. Raises Unavailable.
        """

    def extend(self, ticket_id: str, seconds: int) -> None:
        """Let it keep its devices for ``seconds`` in total. Raises Refused or Unavailable."""

    def why_not_yet(self, ticket: Ticket) -> str:
        """Return why :meth:`submit` cannot submit a ticket at the moment, or "" if unknown."""

    def tend(self, waiting: Collection[Ticket], *, paused: bool) -> None:
        """Apply the admins' decisions about these tickets, and start nothing while paused.

        Based on the last :meth:`turns`. Raises Unavailable.
        """

    def drained(self) -> frozenset[str]:
        """Return the devices of all machines that are closed there, as last reported."""
