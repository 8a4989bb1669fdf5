"""What the scheduler is told and what it answers. Plain values; times are seconds since 1970.

A *kind* names devices that are the same to a request: a model with its memory, as the pool
puts them together. A request fits one kind or several; all its devices come from one of those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum


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
class Ended:
    """A lease of the past: what shares and estimates are learned from."""

    member: str
    group: str = ""
    devices: int
    started_at: float
    ended_at: float
    seconds: float | None = None
    """The session length that was asked for, if there was one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one member or one group may have; None is no limit."""

    devices: int | None = None
    """GPUs at once."""
    tickets: int | None = None
    """Tickets that wait."""
    gpu_hours: float | None = None
    """GPU-hours held: devices times the rest of their sessions, over running leases."""


@dataclass(frozen=True, slots=True)
class Part:
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
    parts: tuple[Part, ...]


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
