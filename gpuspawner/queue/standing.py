"""What a member is told about a waiting ticket, and why another ticket goes first."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone

from ..devices.placement import format_memory
from ..devices.snapshots import clock
from ..leases.models import Request
from .models import Estimate, Ranked, ScorePart


@dataclass(frozen=True, slots=True)
class ScoreDifference:
    """One part of two scores; ``None`` where a score has no such part."""

    name: str
    first: ScorePart | None
    second: ScorePart | None

    @property
    def points(self) -> float:
        """What the part puts the first ticket ahead by; negative when behind."""
        return _points(self.first) - _points(self.second)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two tickets at their places, and what makes the difference."""

    first: Ranked
    """The one that goes first."""
    second: Ranked
    differences: tuple[ScoreDifference, ...]
    """Of all parts that either has; the greatest difference first."""

    @property
    def points(self) -> float:
        """How much more the first has, the sum of the differences; never negative."""
        return self.first.score - self.second.score


def compare(one: Ranked, other: Ranked) -> Comparison:
    """Compare two tickets, given in any order."""
    first, second = sorted((one, other), key=lambda ranked: ranked.place)
    mine = {part.name: part for part in first.parts}
    theirs = {part.name: part for part in second.parts}
    differences = [
        ScoreDifference(name, mine.get(name), theirs.get(name)) for name in {**mine, **theirs}
    ]
    differences.sort(key=lambda difference: -abs(difference.points))
    return Comparison(first, second, tuple(differences))


def _points(part: ScorePart | None) -> float:
    return part.points if part else 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a ticket stands at one moment."""

    place: int
    """1 is next."""
    of: int
    """How many wait, this one included."""
    why: str
    """What it waits for: ``2 GPUs with 40 GB; 1 is free``."""
    estimate: Estimate | None
    """When it will probably start, as far as anybody can say."""
    planned: datetime | None
    """When it is planned to start, by the ends of sessions, known or guessed."""
    certain: bool = False
    """Whether all those ends are known: then it starts by then, unless somebody goes first."""

    def sentence(self, now: datetime) -> str:
        """The line on the pending page."""
        return f"{self.where()} {self.when(now)}".rstrip()

    def where(self) -> str:
        """The place in line and what it waits for."""
        if self.of == 1:
            return f"You are the only one in line. Waiting for {self.why}."
        if self.place == 1:
            return f"You are next in line, of {self.of}. Waiting for {self.why}."
        return f"You are number {self.place} of {self.of} in line. Waiting for {self.why}."

    def when(self, now: datetime) -> str:
        """The estimate as a sentence; nothing when nobody can say."""
        start = self.start(now)
        return f"Most likely start: {start}." if start else ""

    def start(self, now: datetime) -> str:
        """``14:20 to 14:50``, or what is known before enough others have waited to learn from."""
        if self.estimate is not None:
            low, high = (_at(self.estimate.low, now), _at(self.estimate.high, now))
            return low if low == high else f"{low} to {high}"
        if self.planned is None:
            return ""
        planned = _at(self.planned.timestamp(), now)
        return f"by {planned}" if self.certain else f"around {planned} (a first guess)"


def waits_for(request: Request, free: int) -> str:
    """``2 GPUs with 40 GB; 1 is free``."""
    count = request.devices
    text = f"{count} GPUs" if count > 1 else "a GPU"
    if request.model:
        text += f" of model {request.model}"
    if request.memory_bytes:
        text += f" with {format_memory(request.memory_bytes)}"
    if not free:
        return f"{text}; none is free"
    return f"{text}; {free} {'is' if free == 1 else 'are'} free"


def _at(seconds: float, now: datetime) -> str:
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return clock(max(moment, now), now)
