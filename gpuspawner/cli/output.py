"""How values look: aligned tables and local times for people, plain values for scripts."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

from ..model import format_credits

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
