"""How a run ends, and whether it begins again. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TypeGuard

from ..core.units import format_bytes
from ..leases.models import Lease, LeaseState
from ..monitoring.resource_totals import ResourceTotals
from ..queue.models import Ticket
from .models import Run, RunRecord

MOST_OPEN = 100
"""How many runs of one member may wait or run."""

LONGEST_SLUG = 40

LONGEST_PATH = 500
MOST_FILES = 1000

NO_RECORD = RunRecord()

_UNFIT = re.compile(r"[^a-z0-9]+")

MOST_RESTARTS = 3
"""How often a run begins again after it was interrupted."""

INTERRUPTIONS = frozenset({"lost"})
"""Outcomes of leases that the hub caused, not the run or its member."""

INTERRUPTED = frozenset({143, 255})
"""Exit statuses of a container that somebody stopped, or that went down with its machine."""

PREEMPTED = "preempted"
"""The outcome of a lease whose devices went to others."""

WENT_ON = frozenset({"granted", "replaced"})
"""Outcomes of tickets after which a run has a lease or another ticket."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended."""

    outcome: str
    """``done``, ``failed`` or ``stopped``."""
    reason: str
    """Why, as a sentence; empty if it is done."""
    exit_code: int | None = None


def end_of(
    lease: Lease,
    exit_code: int | None,
    last_line: str = "",
    resources: ResourceTotals | None = None,
) -> RunEnd | None:
    """Return how a run ended, from its ended lease; None if it was interrupted.

    ``exit_code`` is its program's exit status; None if it never ended by itself. ``last_line`` is
    the last line it printed, ``resources`` what it used; None if that is unknown.
    """
    if lease.state is not LeaseState.ENDED:
        raise ValueError(f"lease {lease.id} is open")
    if lease.outcome in INTERRUPTIONS or (was_preempted(lease) and exit_code != 0):
        return None
    if lease.outcome == "failed":
        return RunEnd("failed", sentence(lease.end_reason or "it could not start"))
    if lease.outcome not in ("", PREEMPTED):
        return RunEnd("stopped", sentence(lease.end_reason), exit_code)
    if exit_code is None or exit_code in INTERRUPTED:
        return None
    if exit_code == 0:
        return RunEnd("done", "", 0)
    said = f" Its last line: {last_line}" if last_line else ""
    why = f"Its program ended with exit status {exit_code}.{_memory_used_up(resources)}{said}"
    return RunEnd("failed", why, exit_code)


def _memory_used_up(resources: ResourceTotals | None) -> str:
    """Return the sentence about programs that the system ended in a run; empty if it ended none."""
    if resources is None or not resources.memory_kills:
        return ""
    limit, peak = resources.memory_limit_bytes, resources.memory_peak_bytes
    which = f"its {format_bytes(limit)} of memory were" if limit else "its memory was"
    measured = f"; {format_bytes(peak)} were measured before" if peak is not None else ""
    return f" The system ended a program in it because {which} used up{measured}."


def end_after_ticket(ticket: Ticket) -> RunEnd | None:
    """Return how a run ended because its ticket did; None if it goes on."""
    if ticket.outcome in WENT_ON or not ticket.outcome:
        return None
    outcome = "stopped" if ticket.outcome == "cancelled" else "failed"
    return RunEnd(outcome, sentence(ticket.end_reason))


def slug_of(title: str) -> str:
    """Return a title as lower-case letters, digits and hyphens; ``run`` if nothing is left."""
    return _UNFIT.sub("-", title.lower())[:LONGEST_SLUG].strip("-") or "run"


def new_folder(title: str, now: datetime) -> str:
    """Return the beginning of the folder name of a run that is submitted now."""
    return f"runs/{now:%Y-%m-%d-%H%M%S}-{slug_of(title)}"


def was_preempted(lease: Lease) -> bool:
    """Return True if the devices of a lease went to others, and nobody stopped it before.

    A program that saves and ends itself after the warning was preempted, too.
    """
    return lease.yields_at is not None and lease.outcome in ("", PREEMPTED)


def is_file_name(path: str) -> bool:
    """Return True if a path stays below its folder, and can be shown and sent."""
    is_short = 0 < len(path) <= LONGEST_PATH
    return is_short and path.isprintable() and not {"", ".", ".."} & set(path.split("/"))


def read_record(data: bytes) -> RunRecord:
    """Return the contents of a ``run.json``, without values that cannot be true."""
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        return NO_RECORD
    if not isinstance(told, dict):
        return NO_RECORD
    cell, cells = (told.get(name) for name in ("cell", "cells"))
    if not (_is_count(cell) and _is_count(cells) and 1 <= cell <= cells):
        cell = cells = None
    listed = told.get("files")
    files = {}
    for each in listed[:MOST_FILES] if isinstance(listed, list) else ():
        path, size = (each.get("path"), each.get("size")) if isinstance(each, dict) else ("", 0)
        if isinstance(path, str) and is_file_name(path) and _is_count(size):
            files[path] = size
    return RunRecord(cell, cells, files)


def _is_count(number: object) -> TypeGuard[int]:
    return type(number) is int and 0 <= number < 1 << 53


def may_restart(run: Run, lease: Lease) -> bool:
    """Return True if a run begins again after this lease was interrupted.

    A run whose program never began needs no ``requeue``: nothing is computed twice. A run that
    yielded its devices begins again every time.
    """
    if was_preempted(lease):
        return True
    return run.restarts < MOST_RESTARTS and (run.requeue or lease.started_at is None)


def sentence(reason: str) -> str:
    """Return a reason as a sentence."""
    text = reason[:1].upper() + reason[1:]
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."
