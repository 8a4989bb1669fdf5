"""Which places a request gets. Pure: what exists, what is taken and what is linked go in,
places or a refusal come out."""

from __future__ import annotations

from .matching import asks_for, suitable
from .refusals import format_memory
from .rules import Fleet, choose, free_places, leasable, occupied, texts
from .software import must_run

__all__ = [
    "Fleet",
    "asks_for",
    "choose",
    "format_memory",
    "free_places",
    "leasable",
    "must_run",
    "occupied",
    "suitable",
    "texts",
]
