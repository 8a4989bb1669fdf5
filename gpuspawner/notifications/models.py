"""Notices as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any


class NoticeKind(str, Enum):
    """What a member can be notified of."""

    TURN = "turn"
    """Your server starts: it was your turn."""
    TICKET_ENDED = "ticket_ended"
    """You lost your place in the queue, and why."""
    SESSION_ENDS = "session_ends"
    """Your session ends soon."""
    STOPPED = "stopped"
    """Your server was stopped, and why."""
    CREDITS_LOW = "credits_low"
    """Your credits run low."""
    GPU_SICK = "gpu_sick"
    """A GPU of your server is sick."""
    DISK_LOW = "disk_low"
    """Your server has little room left in its own container."""
    GPU_MEMORY = "gpu_memory"
    """Your programs use more than your share of a GPU's memory."""
    OUT_OF_MEMORY = "out_of_memory"
    """The system ended a program in your server or run, because its memory was used up."""
    RUN_ENDED = "run_ended"
    """Your run is done, failed or was stopped."""
    TEST = "test"
    """A message that the member requested, to try the channels; not a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that a member is told, once for each ``key``."""

    key: str
    user: str
    kind: NoticeKind
    title: str
    body: str
    at: datetime
    id: int = 0
    sent_at: datetime | None = None
    tries: int = 0
    error: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the admin's command reads besides the words, as values of JSON."""
