"""What the benchmarks share.

A benchmark is run as a file, so this folder's parent is on the path, and the repository's root,
where ``tests.support`` is, is not: importing anything from here puts it there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
REPO = BENCHMARKS.parent

if str(REPO) not in sys.path:
    sys.path.insert(0, str(REPO))

HUB_PATH = {"PYTHONPATH": os.pathsep.join([str(REPO), str(BENCHMARKS)])}
"""The environment of a hub whose configuration imports from here."""


def say(sentence: str) -> None:
    """How far a long benchmark is, for who waits for it."""
    print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)
