"""What a ticket's member is told while it waits: place, reason and estimate, in words."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone

from ..model import Request
from ..pool import format_memory
from ..scheduler import Estimate
from .view import clock


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
