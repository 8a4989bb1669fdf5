"""Whose turn it is. Pure: no I/O, no clock but the time passed in, no randomness."""

from __future__ import annotations

from .estimates import Ahead, Estimator, Waited
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
    "Ahead",
    "Decision",
    "Ended",
    "Estimate",
    "Estimator",
    "Limits",
    "Part",
    "Policy",
    "Priority",
    "Ranked",
    "Running",
    "Scheduler",
    "Waited",
    "Waiting",
]
