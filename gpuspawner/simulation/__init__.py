"""What a policy would have done: jobs of the past, a virtual clock, figures. Pure."""

from __future__ import annotations

from .figures import Figures, figures
from .replay import ANY, Job, Player, Replayed, replay
from .traces import TraceError, parse_trace, read_trace

__all__ = [
    "ANY",
    "Figures",
    "Job",
    "Player",
    "Replayed",
    "TraceError",
    "figures",
    "parse_trace",
    "read_trace",
    "replay",
]
