"""The proof that a server is gone, or that it is not."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Proof:
    """What an engine proved. Not being able to say is EngineUnavailable, not a Proof."""

    gone: bool
    ended_at: datetime | None = None
    """When it ended, if the engine knows."""
    detail: str = ""
    """How it ended, in words."""
    forgotten: bool = False
    """Who knew of it has forgotten it, which alone proves nothing."""
