"""The output of commands: tables, progress, and plain values for scripts."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

from ..core.units import format_credits
from ..engines.images import PullProgress

Work = Callable[..., int]
Add = Callable[[str, Work, str], argparse.ArgumentParser]


def changes_of(command: argparse.ArgumentParser, common: Callable[..., Any]) -> Add:
    """How to add a change to a command: its word, what does it, and its help.

    ``common`` makes the options of every command. What was said before the word holds: only
    what is said after it replaces that.
    """
    actions = command.add_subparsers(title="changes", metavar="CHANGE")

    def add(name: str, work: Work, what: str) -> argparse.ArgumentParser:
        after = common(argument_default=argparse.SUPPRESS)
        sub: argparse.ArgumentParser = actions.add_parser(
            name, help=what, description=what, parents=[after]
        )
        sub.set_defaults(command=work)
        return sub

    return add


BAR = 24
LINE_EVERY = 10.0
"""Seconds between two lines where there is no terminal."""


def follow(name: str, progress: Iterator[PullProgress]) -> None:
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


def bar(name: str, now: PullProgress) -> str:
    """``name [######------]  50%  40 of 80 MB, 3 of 6 layers``."""
    part = now.got / now.size if now.size else now.done / now.layers if now.layers else 0.0
    filled = int(part * BAR)
    amount = f"{now.got / 1e6:.0f} of {now.size / 1e6:.0f} MB, " if now.size else ""
    shown = "#" * filled + "-" * (BAR - filled)
    return f"{name} [{shown}] {part:4.0%}  {amount}{now.done} of {now.layers} layers"


GAP = "  "


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()
) -> str:
    """Aligned columns, as wide as their longest cell; those in ``right`` to the right."""
    lines = [list(headers), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    numbers = [header in right for header in headers]
    return "\n".join(GAP.join(map(_pad, line, widths, numbers)).rstrip() for line in lines)


def credits(micro: int) -> str:
    """Microcredits for people: two decimals."""
    return format_credits(micro)


def exact(micro: int) -> str:
    """Microcredits for scripts: a decimal string that loses nothing."""
    return format_credits(micro, 6)


def local(moment: datetime | None) -> str:
    """A time for people, in this machine's zone and with its name."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z") if moment else "-"


def utc(moment: datetime | None) -> str | None:
    """A time for scripts: ISO 8601 in UTC."""
    return moment.astimezone(timezone.utc).isoformat() if moment else None


def count(number: int, noun: str) -> str:
    """``1 lease``, ``2 leases``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """The text without control characters: nothing in a table moves the cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)


def show(as_json: bool, value: Any, text: str) -> None:
    """Print ``value`` as JSON or ``text`` for people."""
    print(json.dumps(value, indent=2, ensure_ascii=False) if as_json else text)


def note(text: str) -> None:
    """Say something beside the result, so that scripts can read the result alone."""
    print(text, file=sys.stderr, flush=True)


def confirmed(question: str) -> bool:
    """Ask for a yes. No answer is a no."""
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
    """Who types this, also below sudo."""
    if user := os.environ.get("SUDO_USER"):
        return user
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"uid {os.getuid()}"
