"""What a member sees about a waiting ticket, and why another ticket goes first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone

from ..core.times import zoned
from ..core.units import DeviceCount, format_devices, format_memory
from ..devices.closures import Closure
from ..leases.models import Request, Sharing
from .models import Estimate, RankedTicket, ScorePart


@dataclass(frozen=True, slots=True)
class ScoreDifference:
    """One part of two scores; ``None`` if a score has no such part."""

    name: str
    first: ScorePart | None
    second: ScorePart | None

    @property
    def points(self) -> float:
        """How many points the part puts the first ticket ahead; negative if behind."""
        return _points(self.first) - _points(self.second)


@dataclass(frozen=True, slots=True)
class TicketComparison:
    """Two tickets at their positions, and the differences between their scores."""

    first: RankedTicket
    """The ticket that goes first."""
    second: RankedTicket
    differences: tuple[ScoreDifference, ...]
    """All parts that either has, the largest difference first."""

    @property
    def points(self) -> float:
        """How many more points the first has, the sum of the differences; never negative."""
        return self.first.score - self.second.score


def compare(one: RankedTicket, other: RankedTicket) -> TicketComparison:
    """Compare two tickets, given in any order."""
    first, second = sorted((one, other), key=lambda ranked: ranked.place)
    mine = {part.name: part for part in first.parts}
    theirs = {part.name: part for part in second.parts}
    differences = [
        ScoreDifference(name, mine.get(name), theirs.get(name)) for name in {**mine, **theirs}
    ]
    differences.sort(key=lambda difference: -abs(difference.points))
    return TicketComparison(first, second, tuple(differences))


def _points(part: ScorePart | None) -> float:
    return part.points if part else 0.0


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A ticket's position and estimate at one moment."""

    place: int
    """1 is next."""
    of: int
    """How many tickets wait, including this one."""
    why: str
    """What it waits for: ``2 GPUs with 40 GB; 1 is free``."""
    estimate: Estimate | None = None
    """When it will probably start, if known."""
    planned: datetime | None = None
    """When its start is planned, by the ends of sessions, known or guessed."""
    latest: datetime | None = None
    """When it starts at the latest, by the ends that are known, unless another ticket goes first.

    No extension moves it.
    """
    cpu_only: bool = False
    """True if it asks for no device."""

    def sentence(self, now: datetime) -> str:
        """Return the sentence for the pending page."""
        where = f"number {self.place} of {self.of} in the queue"
        if self.place == 1:
            where = f"next in the queue, of {self.of}"
        if self.of == 1:
            where = "the only one in the queue"
        return f"You are {where}. Waiting for {self.why}. {self.when(now)}".rstrip()

    def when(self, now: datetime) -> str:
        """Return the estimate as a sentence, or "" if there is none."""
        start = self.start(now)
        return f"Expected start: {start}." if start else ""

    def start(self, now: datetime, show: Show = zoned) -> str:
        """Format the expected start; see :func:`expected_start`."""
        return expected_start(self.estimate, self.planned, self.latest, now, show)


Show = Callable[[datetime, datetime], str]
"""Formats a time, given the current one: as text, or as Markup for a page."""


def expected_start(
    estimate: Estimate | None,
    planned: datetime | None,
    latest: datetime | None,
    now: datetime,
    show: Show = zoned,
) -> str:
    """Format when a request will start, and what kind of figure that is; empty if unknown.

    ``about 14:20 to 14:50 (8 of 10 starts), by 15:17 at the latest``. Without an estimate, a
    planned start that is earlier than the latest is ``around 14:24 (a first guess)``.
    """
    text = ""
    if estimate is not None:
        low, high = (show(_later(at, now), now) for at in (estimate.low, estimate.high))
        text = ("about " + low + ("" if low == high else " to " + high)) + " (8 of 10 starts)"
    elif planned is not None and (latest is None or planned < latest):
        text = "around " + show(max(planned, now), now) + " (a first guess)"
    if latest is None:
        return text
    return (text + ", by " if text else "by ") + show(max(latest, now), now) + " at the latest"


def waits_for(
    request: Request,
    free: DeviceCount,
    asked: DeviceCount,
    paused: Closure | None,
    host: str = "",
) -> str:
    """Describe what a request waits for: ``2 GPUs with 40 GB; 1 is free``.

    Args:
        request: What was asked for.
        free: How many suitable devices could be granted now.
        asked: How many of them the request counts as.
        paused: Why no device is granted at the moment, if that is so.
        host: What the host lacks: ``32.0 GB of memory (8.0 GB free)``; alone if devices are free.
    """
    if not request.devices:
        return host or "its turn"
    if paused:
        return f"new GPU sessions to resume ({paused.reason or 'maintenance'})"
    count = request.devices
    text = f"{count} GPUs" if count > 1 else "a GPU"
    if request.sharing is Sharing.SLOT:
        text = f"a share of {text}"
    if request.model:
        text += f" of model {request.model}"
    if request.memory_bytes:
        text += f" with {format_memory(request.memory_bytes)}"
    if host:
        return host if free >= asked else f"{text}, and for {host}"
    if not free:
        return f"{text}; none is free"
    return f"{text}; {format_devices(free)} {'is' if free <= 1 else 'are'} free"


def _later(seconds: float, now: datetime) -> datetime:
    return max(datetime.fromtimestamp(seconds, timezone.utc), now)
