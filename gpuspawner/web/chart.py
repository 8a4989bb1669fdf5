"""A chart of the last weeks, drawn here: the browser needs no script for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..ledger.usage import Use
from ..model import MICRO, format_credits

WIDTH, HEIGHT = 360, 150
"""Of the drawing; it is stretched to the width of its place."""

_TOP, _BOTTOM, _GAP = 18, 20, 8


class Bar(NamedTuple):
    """One week, in the drawing's own units."""

    x: int
    y: int
    width: int
    height: int
    middle: int
    value: str
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """All bars, and the line that they stand on."""

    bars: tuple[Bar, ...]
    width: int = WIDTH
    height: int = HEIGHT
    ground: int = HEIGHT - _BOTTOM


def chart(uses: Sequence[Use], labels: Sequence[str]) -> Chart:
    """A bar a week, as high as its cost; the highest fills the height.

    A week that cost anything has a bar that can be seen.
    """
    step = WIDTH // max(1, len(uses))
    most = max((use.cost for use in uses), default=0)
    space = HEIGHT - _TOP - _BOTTOM
    bars = []
    for number, (use, label) in enumerate(zip(uses, labels, strict=True)):
        height = max(2, use.cost * space // most) if use.cost > 0 else 0
        x = number * step + _GAP // 2
        bars.append(
            Bar(
                x=x,
                y=HEIGHT - _BOTTOM - height,
                width=step - _GAP,
                height=height,
                middle=x + (step - _GAP) // 2,
                value=short(use.cost),
                label=label,
            )
        )
    return Chart(tuple(bars))


def short(micro: int) -> str:
    """Credits in five characters at the most: ``0``, ``0.25``, ``12.5``, ``3.4k``."""
    if micro <= 0:
        return "0"
    if micro < MICRO // 100:
        return "<0.01"
    for limit, places, unit in ((10, 2, 1), (1000, 1, 1), (10_000, 1, 1000), (10**6, 0, 1000)):
        if micro < limit * MICRO:
            return format_credits(micro // unit, places) + ("k" if unit > 1 else "")
    return format_credits(micro // 1_000_000, 1 if micro < 10**8 * MICRO else 0) + "M"
