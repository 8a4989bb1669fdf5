"""Pairs of runs, a table for people, and one JSON object for scripts."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


def argument_parser(description: str | None, runs: int) -> argparse.ArgumentParser:
    """``--json`` and ``--runs N`` (default ``runs``), as every benchmark has them."""
    first = (description or "").strip().splitlines()[0]
    parser = argparse.ArgumentParser(description=first)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--runs", type=int, default=runs, help=f"runs of each side ({runs})")
    return parser


def arguments(description: str | None, runs: int) -> argparse.Namespace:
    """The arguments of a benchmark that has no others."""
    return argument_parser(description, runs).parse_args()


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which ``part`` (0 to 1) of the values lie, the nearest one that occurred."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))]


@dataclass(frozen=True, slots=True)
class Series:
    """The same thing measured many times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def p10(self) -> float:
        return quantile(self.values, 0.1)

    @property
    def p90(self) -> float:
        return quantile(self.values, 0.9)

    def times(self, factor: float) -> Series:
        """The same in another unit."""
        return Series(tuple(factor * value for value in self.values))

    def text(self, digits: int = 1) -> str:
        """``median (p10-p90)``."""
        return f"{self.median:.{digits}f} ({self.p10:.{digits}f}-{self.p90:.{digits}f})"


@dataclass(frozen=True, slots=True)
class Pair:
    """One quantity of ours and of the baseline, measured in turns: the n-th values belong
    together, so that a machine that is slow for a while is slow for both."""

    ours: Series
    baseline: Series

    @property
    def ratios(self) -> Series:
        """Ours divided by the baseline, turn by turn."""
        both = zip(self.ours.values, self.baseline.values, strict=True)
        return Series(tuple(a / b for a, b in both))


def pair(ours: Sequence[float], baseline: Sequence[float]) -> Pair:
    """Two lists of values, taken in turns, as a :class:`Pair`."""
    return Pair(Series(tuple(ours)), Series(tuple(baseline)))


def in_turns(count: int, ours: Callable[[int], None], baseline: Callable[[int], None]) -> None:
    """Run both ``count`` times, A B B A A B B A: none is always the first of a turn."""
    for turn in range(count):
        for side in (ours, baseline) if turn % 2 == 0 else (baseline, ours):
            side(turn)


@dataclass
class Report:
    """What one benchmark found: rows for people, figures for scripts, bounds for both."""

    name: str
    columns: Sequence[str]
    notes: list[str] = field(default_factory=list)
    rows: list[Sequence[str]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)
    """The most that the figure of the same name may be."""

    @property
    def ok(self) -> bool:
        """Whether every target is met."""
        return all(self.figures[name] <= most for name, most in self.targets.items())

    def row(self, *cells: str) -> None:
        """Add a line to the table."""
        self.rows.append(cells)

    def figure(self, name: str, value: float, most: float | None = None) -> None:
        """Add a figure, and its target if it has one."""
        self.figures[name] = round(value, 4)
        if most is not None:
            self.targets[name] = most

    def print(self, as_json: bool) -> None:
        """The table, whether the targets are met, and the JSON object if it is wanted."""
        print(_table(self.columns, self.rows))
        for note in self.notes:
            print(note)
        for name, most in self.targets.items():
            met = "met" if self.figures[name] <= most else "MISSED"
            print(f"target {met}: {name} {self.figures[name]:g}, at most {most:g}")
        if as_json:
            said = {"name": self.name, "figures": self.figures, "targets": self.targets}
            print(json.dumps({**said, "ok": self.ok}))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[at]) for line in [columns, *rows]) for at in range(len(columns))]
    lines = [columns, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )
