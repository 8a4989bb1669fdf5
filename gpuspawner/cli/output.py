"""The output of commands: tables, progress, and plain values for scripts."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..core.errors import InvalidRequest
from ..core.units import format_credits, format_price
from ..engines.images import PullProgress
from .command import wants_json

BAR = 24
LINE_EVERY = 10.0
"""Seconds between two lines without a terminal."""


def follow(name: str, progress: Iterator[PullProgress]) -> None:
    """Show a pull's progress on stderr until it is done."""
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


def bar(name: str, now: PullProgress) -> str:
    """Format a progress bar: ``name [######------]  50%  40 of 80 MB, 3 of 6 layers``."""
    part = now.got / now.size if now.size else now.done / now.layers if now.layers else 0.0
    filled = int(part * BAR)
    amount = f"{now.got / 1e6:.0f} of {now.size / 1e6:.0f} MB, " if now.size else ""
    shown = "#" * filled + "-" * (BAR - filled)
    return f"{name} [{shown}] {part:4.0%}  {amount}{now.done} of {now.layers} layers"


GAP = "  "


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()
) -> str:
    """Format aligned columns; those in ``right`` are right-aligned.

    On a terminal they fit its width. Elsewhere each is as wide as its longest cell.
    """
    lines = [list(headers), *([printable(cell) for cell in row] for row in rows)]
    if sys.stdout.isatty():
        return _drawn(lines, right)
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    numbers = [header in right for header in headers]
    return "\n".join(GAP.join(map(_pad, line, widths, numbers)).rstrip() for line in lines)


def _drawn(lines: Sequence[Sequence[str]], right: Collection[str]) -> str:
    """Return the same table for a terminal: cells too wide for it are folded."""
    from rich.box import SIMPLE_HEAD  # rich is slow to import, and scripts do not need it
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    headers, *rows = lines
    columns = [
        Column(header, justify="right" if header in right else "left", overflow="fold")
        for header in headers
    ]
    drawn = Table(*columns, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for row in rows:
        drawn.add_row(*map(Text, row))
    console = Console()
    with console.capture() as captured:
        console.print(drawn)
    return captured.get().rstrip("\n")


def credits(micro: int) -> str:
    """Format microcredits for people: two decimals."""
    return format_credits(micro)


def price(micro: int) -> str:
    """Format microcredits an hour for people."""
    return format_price(micro)


def exact(micro: int) -> str:
    """Format microcredits for scripts: an exact decimal string."""
    return format_credits(micro, 6)


def local(moment: datetime | None) -> str:
    """Format a time for people, in this machine's zone and with its name."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z") if moment else "-"


def utc(moment: datetime | None) -> str | None:
    """Format a time for scripts: ISO 8601 in UTC."""
    return moment.astimezone(timezone.utc).isoformat() if moment else None


def count(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 lease``, ``2 leases``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Return the text without control characters, so that nothing in a table moves the cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)


def show(value: Any, text: str) -> None:
    """Print ``value`` as JSON if the command was given ``--json``, else ``text`` for people."""
    print(json.dumps(value, indent=2, ensure_ascii=False) if wants_json() else text)


def note(text: str) -> None:
    """Print something besides the result to stderr, so that scripts read only the result."""
    print(text, file=sys.stderr, flush=True)


def confirmed(question: str) -> bool:
    """Ask for a yes. No answer means no."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline() if sys.stdin else ""
    if not answer.endswith("\n"):
        note("")
    return answer.strip().lower() in ("y", "yes")


def _width(text: str) -> int:
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(bool(unicodedata.combining(c)) for c in text)


def _pad(text: str, width: int, right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if right else text + space


def default_actor() -> str:
    """Return who runs the command, even with sudo."""
    return os.environ.get("SUDO_USER") or user_name()


def user_name() -> str:
    """Return the name of the user who runs this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"uid {os.getuid()}"


def actor() -> str:
    """Return who runs the command, as named in the audit log; not a member of the hub."""
    return f"cli:{default_actor()}"


def read_input(name: str, most_bytes: int) -> bytes:
    """Return up to ``most_bytes`` + 1 of a file (``-``: stdin). Raises InvalidRequest."""
    try:
        if name == "-":
            return sys.stdin.buffer.read(most_bytes + 1)
        with Path(name).open("rb") as file:
            return file.read(most_bytes + 1)
    except OSError as error:
        raise InvalidRequest(f"{name} cannot be read: {error.strerror}.") from None
