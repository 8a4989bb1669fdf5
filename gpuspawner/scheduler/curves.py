"""How long tickets that are alike have waited, those that still wait among them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from typing import NamedTuple

from .calibration import Class
from .values import Estimate

_REMEMBERED = 300
"""Looks of a likeness that are kept."""

_APART = 60.0
"""Seconds between two that are kept: tickets that are asked for together share their fate, and
must not make all others forgotten."""

_FRESH = 60.0
"""Seconds for which a curve serves."""


class Look:
    """A ticket at one moment of its wait, what it was told, and what came of it."""

    __slots__ = ("at", "classes", "compared", "over_at", "pace", "started", "told")

    def __init__(
        self, at: float, pace: float, classes: tuple[Class, ...], told: Estimate | None
    ) -> None:
        self.at = at
        self.pace = pace
        """Seconds that it was to wait by the work ahead of it."""
        self.classes = classes
        self.told = told
        self.compared = told is None
        """Whether what it was told was compared with what came."""
        self.over_at: float | None = None
        """When it started or was withdrawn; None while it waits."""
        self.started = False

    def over(self, at: float, started: bool) -> None:
        """The ticket waits no longer."""
        self.over_at = at
        self.started = started

    def multiple(self, now: float) -> float:
        """How many times its pace the ticket has waited since."""
        until = now if self.over_at is None else self.over_at
        return max(0.0, until - self.at) / self.pace


class Curve(NamedTuple):
    """Which part of the tickets has started within which multiple of their pace."""

    multiples: list[float]
    parts: list[float]

    def at(self, part: float) -> float:
        """The multiple within which this part has started; 0 for no part at all."""
        if part <= 0.0:
            return 0.0
        return self.multiples[min(len(self.parts) - 1, bisect_left(self.parts, part - 1e-9))]


class Looks:
    """The latest looks at tickets that are alike."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque(maxlen=_REMEMBERED)
        self._curve = Curve([], [])
        self._made_at = -math.inf

    def add(self, look: Look) -> None:
        """Keep one more, unless it comes too soon after the last."""
        if not self._looks or not 0 <= look.at - self._looks[-1].at < _APART:
            self._looks.append(look)

    def curve(self, now: float) -> Curve:
        """Their waits as of a minute ago at most."""
        if not 0 <= now - self._made_at < _FRESH:
            self._curve = _curve(self._looks, now)
            self._made_at = now
        return self._curve


def _curve(looks: deque[Look], now: float) -> Curve:
    """The product-limit estimate: who still waits, or gave up, counts for as long as that."""
    waits = sorted((look.multiple(now), look.started) for look in looks)
    multiples: list[float] = []
    parts: list[float] = []
    left = 1.0
    for at_risk, (multiple, started) in zip(range(len(waits), 0, -1), waits, strict=True):
        if started:
            left -= left / at_risk
            multiples.append(multiple)
            parts.append(1.0 - left)
    if multiples and left > 1e-9:
        multiples.append(waits[-1][0])
        parts.append(1.0)
    return Curve(multiples, parts)
