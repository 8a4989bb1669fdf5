"""What an admin may choose about the order in line."""

from __future__ import annotations

from dataclasses import dataclass, field

from .values import Priority

HOUR = 3600.0
DAY = 24 * HOUR


def _priority_points() -> dict[Priority, float]:
    return {Priority.LOW: -72.0, Priority.NORMAL: 0.0, Priority.COURSE: 72.0, Priority.ADMIN: 144.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Every parameter of the order. One point is one hour of waiting."""

    half_life_seconds: float = 7 * DAY
    """After this long, past use counts half."""
    share_points: float = 48.0
    """Points that a member (and a group) loses who had the whole capacity of late."""
    length_points: float = 2.0
    """Points lost each time the expected GPU-hours of a request double."""
    priority_points: dict[Priority, float] = field(default_factory=_priority_points)
    """Points of each class."""
    overdue_seconds: float = 5 * DAY
    """Who waited longer goes before every score, the oldest first."""
    planned_starts: int = 8
    """For how many tickets of each kind devices are kept together at their planned start."""
    default_seconds: float = 2 * HOUR
    """The length that is expected of a session while there is no history at all."""
    history: int = 31
    """How many of the latest sessions of a member, group or size are remembered."""

    def __post_init__(self) -> None:
        for name in ("half_life_seconds", "overdue_seconds", "default_seconds", "history"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} of the policy is {getattr(self, name)!r}: above 0, please."
                )
