"""How far a pull is: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator

from ..engines.pulls import Progress

BAR = 24
LINE_EVERY = 10.0
"""Seconds between two lines where there is no terminal."""


def follow(name: str, progress: Iterator[Progress]) -> None:
    """Show a pull on stderr until it is done."""
    terminal = sys.stderr.isatty()
    said_at = time.monotonic()
    last = ""
    try:
        for now in progress:
            line = bar(name, now)
            if terminal and line != last:
                width = shutil.get_terminal_size().columns - 1
                print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)
            elif not terminal and time.monotonic() - said_at >= LINE_EVERY:
                said_at = time.monotonic()
                print(line, file=sys.stderr, flush=True)
            last = line
    finally:
        if terminal and last:
            print(file=sys.stderr, flush=True)


def bar(name: str, now: Progress) -> str:
    """``name [######------]  50%  40 of 80 MB, 3 of 6 layers``."""
    part = now.got / now.size if now.size else now.done / now.layers if now.layers else 0.0
    filled = int(part * BAR)
    amount = f"{now.got / 1e6:.0f} of {now.size / 1e6:.0f} MB, " if now.size else ""
    shown = "#" * filled + "-" * (BAR - filled)
    return f"{name} [{shown}] {part:4.0%}  {amount}{now.done} of {now.layers} layers"
