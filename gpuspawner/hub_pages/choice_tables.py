"""Tables of what the form shows of each choice: a number of GPUs, a model, an amount of memory.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..catalog.models import Environment

T = TypeVar("T")

MOST_CHOICES = 4000
"""Maximum number of figures on a page. With more choices, it only has the price table."""


@dataclass(frozen=True, slots=True)
class Tables(Generic[T]):
    """What the form shows of each choice. Environments with equal terms share a table."""

    of: dict[str, int]
    """The index of an environment's table in ``tables``, by slug."""
    tables: tuple[dict[str, T], ...]
    """By the form's choice, as :func:`choice_key` writes it; ``model`` is empty for any."""

    @classmethod
    def shared(
        cls, alike: Sequence[Sequence[Environment]], tables: Iterable[dict[str, T]]
    ) -> Tables[T]:
        """Return the tables, one for each list of environments with equal terms."""
        of = {environment.slug: at for at, some in enumerate(alike) for environment in some}
        return cls(of, tuple(tables))

    def find(self, environment: Environment, choice: str) -> T | None:
        """Return the entry for one choice; None if there is none."""
        number = self.of.get(environment.slug)
        return None if number is None else self.tables[number].get(choice)


MemoryChoice = tuple[int | str, str, int]
"""A number of GPUs or a share, a model, and the least GB of memory; 0 is any amount."""


def choice_key(gpus: int | str, model: str, memory: int = 0) -> str:
    """Return the key of a choice in :class:`Tables`: ``gpus|model``, or ``gpus|model|memory``."""
    return f"{gpus}|{model}|{memory}" if memory else f"{gpus}|{model}"


def group_alike(
    environments: Iterable[Environment], terms: Callable[[Environment], Hashable]
) -> list[list[Environment]]:
    """Return the environments in lists of those with equal terms."""
    found: dict[Hashable, list[Environment]] = {}
    for environment in environments:
        found.setdefault(terms(environment), []).append(environment)
    return list(found.values())
