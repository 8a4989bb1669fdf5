"""Why one ticket goes before another: the difference of their scores, part by part. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..scheduler import Part, Ranked


@dataclass(frozen=True, slots=True)
class Difference:
    """One part of two scores; ``None`` where a score has no such part."""

    name: str
    first: Part | None
    second: Part | None

    @property
    def points(self) -> float:
        """What the part puts the first ticket ahead by; negative when behind."""
        return _points(self.first) - _points(self.second)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two tickets at their places, and what makes the difference."""

    first: Ranked
    """The one that goes first."""
    second: Ranked
    differences: tuple[Difference, ...]
    """Of all parts that either has; the greatest difference first."""

    @property
    def points(self) -> float:
        """How much more the first has, the sum of the differences; never negative."""
        return self.first.score - self.second.score


def compare(one: Ranked, other: Ranked) -> Comparison:
    """Compare two tickets, given in any order."""
    first, second = sorted((one, other), key=lambda ranked: ranked.place)
    mine = {part.name: part for part in first.parts}
    theirs = {part.name: part for part in second.parts}
    differences = [
        Difference(name, mine.get(name), theirs.get(name)) for name in {**mine, **theirs}
    ]
    differences.sort(key=lambda difference: -abs(difference.points))
    return Comparison(first, second, tuple(differences))


def _points(part: Part | None) -> float:
    return part.points if part else 0.0
