"""What an admin may choose about the order in line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from .values import Priority

HOUR = 3600.0
DAY = 24 * HOUR

PRIORITY_POINTS: Mapping[Priority, float] = MappingProxyType(
    {Priority.LOW: -40.0, Priority.NORMAL: 0.0, Priority.COURSE: 40.0, Priority.ADMIN: 80.0}
)
"""Far apart: no size and no share makes up for a class, waiting does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
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
