"""The line and what closes it, as JSON."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from ..core.errors import InvalidRequest
from ..web.schemas import (
    Answer,
    Body,
    ChangeAnswer,
    Count,
    DatedAnswer,
    Flag,
    Instant,
    Number,
    Reason,
    WhyBody,
    checked,
    described,
    told,
)
from .models import Priority

Timestamp = Annotated[
    Instant, BeforeValidator(lambda seconds: datetime.fromtimestamp(seconds, timezone.utc))
]
"""Of seconds since 1970."""


def _typed_points(text: str, field: str, _zone: str) -> float:
    try:
        return float(text[:60])
    except ValueError:
        sentence = f"The field {field!r} is {text[:60]!r}: write a number, such as 12.5."
        raise InvalidRequest(sentence, field=field) from None


def _typed_position(text: str, field: str, _zone: str) -> int | None:
    try:
        return int(text[:20]) if text else None
    except ValueError:
        sentence = f"The field {field!r} is {text[:60]!r}: write a whole number."
        raise InvalidRequest(sentence, field=field) from None


# The queue itself refuses what these cannot be.
Points = Annotated[
    Any,
    checked(lambda value, _: value, _typed_points),
    described(kind="number", minimum=-1_000_000, maximum=1_000_000),
]
Position = Annotated[
    Any,
    checked(lambda value, _: value, _typed_position),
    described(kind="integer", minimum=1, maximum=1_000_000),
]


class BoostBody(Body):
    says_missing: ClassVar[frozenset[str]] = frozenset({"points"})

    points: Points
    reason: Reason = ""


class MoveBody(Body):
    """A place for a ticket, or None to give it none of its own."""

    says_missing: ClassVar[frozenset[str]] = frozenset({"position"})

    position: Position | None
    reason: Reason = ""


class PauseBody(Body):
    paused: Flag
    reason: Reason = ""


class DrainBody(WhyBody):
    """Why; with ``anyway`` also if waiting members could then start later than they were told."""

    anyway: Flag = False


class ClosureAnswer(Answer):
    since: Instant = told("at")
    actor: str
    reason: str


class PausedAnswer(Answer):
    """Whether granting is paused now."""

    changed: bool
    paused: ClosureAnswer | None


class DrainedAnswer(Answer):
    """Whether a device is drained now."""

    uuid: str
    changed: bool
    drained: ClosureAnswer | None
    whole_machine: str


class EstimateAnswer(Answer):
    low: Timestamp
    likely: Timestamp
    high: Timestamp


class TicketAnswer(Answer):
    """A ticket that waits, as its member may see it: with its standing, if it has one."""

    id: str = told("ticket.id")
    user: str = told("ticket.server.user")
    server: str = told("ticket.server.name")
    group: str = told("ticket.group")
    gpus: Count = told("ticket.request.devices")
    sharing: str = told(
        "ticket.request.sharing.value",
        description="'slot' if it waits for a share of a GPU, else 'whole'.",
    )
    gpu_model: str | None = told("ticket.request.model")
    gpu_memory_bytes: Count = told("ticket.request.memory_bytes")
    environment: str = told("ticket.request.environment")
    session_seconds: Count | None = told("ticket.seconds")
    since: Instant = told("ticket.created_at")
    place: Count | None = told("standing.place", None)
    of_all: Count | None = told("standing.of", None, name="of")
    waits_for: str | None = told("standing.why", None)
    estimate: EstimateAnswer | None = told("standing.estimate", None)
    planned: Instant | None = told("standing.planned", None)
    latest: Instant | None = told(
        "standing.latest",
        None,
        description="When it starts at the latest; null if unknown, and where Slurm decides.",
    )


class ScorePartAnswer(Answer):
    name: str
    points: Number
    why: str


class RankedTicketAnswer(TicketAnswer):
    """A ticket that waits, with the arithmetic of its score."""

    priority: Annotated[str, BeforeValidator(lambda number: Priority(number).name.lower())] = told(
        "ticket.priority"
    )
    boost: Number = told("ticket.boost")
    position: int | None = told("ticket.position")
    last: bool = told("ticket.last")
    score: Number = told("ranked.score")
    parts: tuple[ScorePartAnswer, ...] = told("ranked.parts")


class EndedTicketAnswer(Answer):
    """A ticket that waits no more, and why."""

    id: str
    user: str = told("server.user")
    server: str = told("server.name")
    since: Instant = told("created_at")
    ended_at: Instant | None
    outcome: str
    end_reason: str
    lease: str | None = told("lease_id")


class QueueAnswer(DatedAnswer):
    """The whole line, for admins."""

    paused: ClosureAnswer | None
    drained: dict[str, ClosureAnswer]
    waiting: Count
    tickets: tuple[RankedTicketAnswer, ...]
    trail: tuple[ChangeAnswer, ...]


class PauseAnswer(Answer):
    """Why no GPUs are given out, for members."""

    reason: str


class OwnQueueAnswer(DatedAnswer):
    """A member's part of the queue."""

    paused: PauseAnswer | None
    waiting: Count
    tickets: tuple[TicketAnswer, ...]
    ended: tuple[EndedTicketAnswer, ...]
