"""Whose turn it is. Pure: no I/O, no clock but the time passed in, no randomness."""

from __future__ import annotations

from .policy import Policy
from .scheduler import Scheduler
from .values import (
    Decision,
    Ended,
    Estimate,
    Limits,
    Part,
    Priority,
    Ranked,
    Running,
    Waiting,
)

__all__ = [
    "Decision",
    "Ended",
    "Estimate",
    "Limits",
    "Part",
    "Policy",
    "Priority",
    "Ranked",
    "Running",
    "Scheduler",
    "Waiting",
]
