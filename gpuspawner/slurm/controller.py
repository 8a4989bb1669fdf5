"""What Slurm's controller is asked and told, by whichever way it is reached: its programs
(:class:`gpuspawner.slurm.commands.Slurm`) or slurmrestd (:class:`gpuspawner.slurm.rest.Rest`)."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A job to hand in that only holds what Slurm gives."""

    name: str
    comment: str
    """JSON."""
    partition: str
    cpus: int
    megabytes: int
    gres: str
    """Kind, type if it must be one, and number: ``gpu:a100:2``."""
    minutes: int | None = None
    """How long it may run; None leaves it to the partition."""
    excluded: tuple[str, ...] = ()
    """Nodes that it must not run on."""
    nice: int = 0
    user: str = ""
    """Whose job it is; empty for whoever hands it in."""
    account: str = ""
    """Which account of theirs it counts on; empty for their default."""


SCRIPT = "#!/bin/sh\nexec sleep infinity\n"
"""The whole job: the server runs beside it, in its cgroup, and the epilog removes that."""


class Controller(Protocol):
    """Every call blocks, and raises SlurmUnavailable when nobody answers, and SlurmRefused with
    Slurm's own words when the answer is no."""

    notes: ClassVar[str]
    """What the JSON of jobs calls the comments that :meth:`note` writes."""
    owner_writes_notes: ClassVar[bool]
    """Whether who owns a job can write them, and not an admin alone."""

    def jobs(self) -> str:
        """Everybody's jobs, and those that ended of late, in the JSON of ``squeue``."""

    def nodes(self) -> str:
        """All nodes, in the JSON of ``sinfo``."""

    def longest(self, partition: str) -> float:
        """Minutes that a job may run there; infinite where there is no limit."""

    def submit(self, holder: Holder) -> None:
        """Hand a job in. After SlurmUnavailable it may be there all the same: look for its
        name."""

    def cancel(self, *jobs: int) -> None:
        """End jobs, waiting or not. Those that are over already are refused after the others
        were ended."""

    def cancel_named(self, name: str) -> None:
        """End every job of this name, waiting or not."""

    def change(
        self,
        job: int,
        *,
        minutes: int | None = None,
        priority: int | None = None,
        nice: int | None = None,
        excluded: Collection[str] | None = None,
    ) -> None:
        """Change what is named of a job: its time limit, its priority, its nice value, or the
        nodes that it must not run on."""

    def hold(self, jobs: Collection[int], note: str | None = None) -> None:
        """Let none of these jobs begin until they are released; with an admin's comment, if there
        is one to write."""

    def note(self, jobs: Collection[int], note: str) -> None:
        """Write an admin's comment beside these jobs, in place of what was there."""

    def release(self, jobs: Collection[int]) -> None:
        """Let them begin, and give them back to the order."""

    def close(self, node: str, reason: str) -> None:
        """No job starts on a node any more; what runs goes on."""

    def reopen(self, node: str) -> None:
        """Give a closed node to jobs again."""


def minutes_of(limit: str) -> float:
    """A time limit as Slurm writes it, such as ``1-02:30:00``; infinite where there is none."""
    days, _, rest = limit.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in (*parts, days or "0")):
        return math.inf
    seconds = sum(int(part) * 60**power for power, part in enumerate(reversed(parts)))
    return int(days or 0) * 24 * 60 + seconds / 60
