"""Sweeps: runs of one program or notebook, each with different parameters. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..core.errors import InvalidRequest
from ..leases.models import LeaseState
from .models import FollowedRun, Run, Work
from .rules import slug_of

FIRST = "-001"
"""The end of the id of a sweep's first run, which follows the id of the sweep."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs of one program or notebook with different parameters, submitted together."""

    id: str
    runs: tuple[FollowedRun, ...]
    """In the order in which they start."""
    charged: int
    """Microcredits charged for all leases of its runs."""

    @property
    def first(self) -> Run:
        """The first run, which has everything that the runs share."""
        return self.runs[0].run

    @property
    def title(self) -> str:
        """The short form of its title, with which its id begins."""
        return self.id.rpartition("-")[0]

    @property
    def is_open(self) -> bool:
        """True if any of its runs has not ended."""
        return any(not each.run.outcome for each in self.runs)

    @property
    def states(self) -> dict[str, int]:
        """How many runs are in each state."""
        return {state.value: n for state, n in Counter(run.state for run in self.runs).items()}

    def most(self, rate: int | None, seconds: int | None) -> int | None:
        """Return the most that it can cost, in microcredits: past charges and those to come.

        Args:
            rate: Microcredits per hour of a run that has not started; None if unknown.
            seconds: Its time limit; None if it has none.

        Returns:
            None if an open run costs something and has no known time limit.
        """
        found = self.charged
        for each in self.runs:
            lease = each.lease
            if each.run.outcome:
                continue
            per_hour, limit, paid = rate, seconds, 0
            if lease is not None and lease.state is not LeaseState.ENDED:
                limit = None if lease.seconds is None else lease.seconds + lease.extended
                per_hour, paid = lease.rate, lease.charged
            if per_hour == 0:
                continue
            if per_hour is None or limit is None:
                return None
            found += max(0, per_hour * limit // 3600 - paid)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """A sweep before its submission."""

    title: str
    works: Sequence[tuple[str, Work]]
    """The title of each run, and what it does."""
    options: Mapping[str, Any]
    key: str = ""
    requeue: bool = False
    preemptible: bool = False
    at_most: int | None = None

    def runs(self, user: str, token: str, now: datetime) -> list[Run]:
        """Return the runs; their ids sort in their order."""
        sweep = f"{slug_of(self.title)}-{token}"
        return [
            Run(
                id=f"{sweep}-{number:03}",
                user=user,
                key=self.key if number == 1 else "",
                title=title,
                work=work,
                options=dict(self.options),
                requeue=self.requeue,
                preemptible=self.preemptible,
                created_at=now,
                sweep=sweep,
                at_most=self.at_most,
            )
            for number, (title, work) in enumerate(self.works, 1)
        ]

    def price(self, seconds: int | None, rate: int, hold: int) -> SweepPrice:
        """Return the most that it can cost, from the hourly rate and the hold of one run."""
        count = len(self.works)
        return SweepPrice(
            runs=count,
            seconds=seconds,
            rate=rate,
            most=None if seconds is None else count * (rate * seconds // 3600),
            hold=hold * min(count, self.at_most or count),
        )


@dataclass(frozen=True, slots=True)
class SweepPrice:
    """The most that a sweep can cost."""

    runs: int
    seconds: int | None
    """The time limit of each run."""
    rate: int
    """Microcredits per hour of one run, on the most expensive GPUs that fit."""
    most: int | None
    """Microcredits of all runs, if each lasts until its time limit; None without a limit."""
    hold: int
    """Microcredits that the account needs for the runs that start at once."""


def filled_in(command: Sequence[str], values: Mapping[str, object]) -> tuple[str, ...]:
    """Return a command in which values replace their names in braces, such as ``{lr}``.

    Raises InvalidRequest for a name that does not occur in the command.
    """
    for name in values:
        if not any(f"{{{name}}}" in word for word in command):
            sentence = f"No argument of the command is or has {{{name}}}."
            raise InvalidRequest(sentence, field="command")
    if not values:
        return tuple(command)
    # In one pass, so that braces in a value are left as they are.
    named = re.compile("|".join(re.escape(f"{{{name}}}") for name in values))
    return tuple(named.sub(lambda m: as_text(values[m[0][1:-1]]), word) for word in command)


def as_text(value: object) -> str:
    """Return a parameter as text: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
