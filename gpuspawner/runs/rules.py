"""How a run ends, and whether it begins again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..leases.models import Lease, LeaseState
from .models import Run

MOST_RESTARTS = 3
"""How often a run begins again after ends that were not its own."""

INTERRUPTIONS = frozenset({"lost"})
"""Outcomes of leases that are our doing, and not the run's or its member's."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended."""

    outcome: str
    """``done``, ``failed`` or ``stopped``."""
    reason: str
    """Why, as a sentence; empty if it is done."""
    exit_code: int | None = None


def end_of(lease: Lease, exit_code: int | None) -> RunEnd | None:
    """Return how a run ended whose lease has ended; None if it was interrupted by us.

    ``exit_code`` is its program's exit status; None if it never ended by itself.
    """
    if lease.state is not LeaseState.ENDED:
        raise ValueError(f"lease {lease.id} is open")
    if lease.outcome in INTERRUPTIONS:
        return None
    if lease.outcome == "failed":
        return RunEnd("failed", sentence(lease.end_reason or "it could not start"))
    if lease.outcome:
        return RunEnd("stopped", sentence(lease.end_reason), exit_code)
    if exit_code is None:
        return None  # its machine went down with it
    if exit_code == 0:
        return RunEnd("done", "", 0)
    return RunEnd("failed", f"Its program ended with exit status {exit_code}.", exit_code)


def may_restart(run: Run, lease: Lease) -> bool:
    """Return True if a run begins again that was interrupted with this lease.

    One whose program never began does so in any case: nothing was computed twice.
    """
    return run.restarts < MOST_RESTARTS and (run.requeue or lease.started_at is None)


def sentence(reason: str) -> str:
    """Return a reason as a sentence."""
    text = reason[:1].upper() + reason[1:]
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."
