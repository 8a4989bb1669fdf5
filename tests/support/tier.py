"""How thorough this run of the tests is, and the seed it starts from.

``make quick``, ``make test`` and ``make soak`` set ``GPUSPAWNER_TEST_TIER``. The seed comes from
the commit's files, so the same commit repeats the same run and the next one explores anew; a soak
takes a random one. ``GPUSPAWNER_TEST_SEED`` replays a run: its log names the seed.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

TIER = os.environ.setdefault("GPUSPAWNER_TEST_TIER", "test")
"""``quick``, ``test`` or ``soak``."""

SOAK = TIER == "soak"

Rounds = Callable[[int], int]
"""The fixture ``rounds``."""

_EXAMPLES = {"quick": 15, "test": 50}


def rounds(full: int) -> int:
    """Return how often a kill loop or race repeats: ``full`` in a soak, else a tenth of it."""
    return full if SOAK else max(1, full // 10)


def examples(full: int = 100) -> int:
    """Return how many examples a property gets: ``full`` in a soak, else at most 50 or 15."""
    return min(full, _EXAMPLES.get(TIER, full))


def chance(name: str) -> random.Random:
    """Return a random generator for the test of this name, from the run's seed."""
    return random.Random(f"{SEED} {name}")


def _new_seed() -> int:
    if SOAK:
        return random.SystemRandom().randrange(2**32)
    command = ["git", "rev-parse", "HEAD^{tree}"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0  # an unpacked archive has no commit
    return int(done.stdout[:8], 16)


# In the environment, so that the processes that share a run also share its seed.
SEED = int(os.environ.setdefault("GPUSPAWNER_TEST_SEED", "") or _new_seed())
os.environ["GPUSPAWNER_TEST_SEED"] = str(SEED)
