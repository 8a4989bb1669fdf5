"""How often a long test repeats: a tenth in ``make test``, in full in ``make soak``."""

from __future__ import annotations

import os

SOAK = os.environ.get("GPUSPAWNER_SOAK") == "1"


def rounds(full: int) -> int:
    """The count to use for a test that ``make soak`` runs ``full`` times (at least one)."""
    return full if SOAK else max(1, full // 10)
