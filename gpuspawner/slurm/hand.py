"""An admin's hand on what Slurm orders: places, points, pauses, and machines that are closed.

What admins decided is in the store. Slurm is brought in line with it again and again, so that
nothing is lost whoever dies in between, and whoever made the change.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from ..errors import SlurmRefused, SlurmUnavailable
from ..model import Ticket
from . import holder
from .controller import Controller
from .jobs import Job

FIRST = 4_000_000_000
"""The priority of the first place of an admin's own. Slurm keeps to a priority that it is told,
whatever becomes of the fair share, until the job is released to the order again."""

PLACES = 2_000_000
"""Priorities below :data:`FIRST` that are places. No job comes near them by itself."""


class Hand:
    """Keeps the jobs of one process's waiting tickets as admins want them."""

    def __init__(self, slurm: Controller, log: logging.Logger | Any) -> None:
        self._slurm = slurm
        self._log = log
        self._nice: dict[str, int] = {}
        """What was last told of each ticket."""
        self._held: set[int] | None = None
        """The jobs that we held; None when nobody remembers."""
        self._refused: set[str] = set()

    def submitted(self, ticket: Ticket) -> None:
        """A job was handed in with its ticket's points."""
        self._nice[ticket.id] = holder.niceness(ticket.boost)

    def pause(self, jobs: Iterable[Job]) -> None:
        """Hold each job that waits. Raises SlurmUnavailable."""
        waiting = {job.id for job in jobs if job.waits}
        found = {job.id for job in jobs if job.waits and job.priority}
        if found and self._tell(partial(self._slurm.hold, found), f"hold {_listed(found)}"):
            self._log.info("Held %d jobs: no GPUs are given out just now", len(found))
        self._held = waiting

    def go_on(self, jobs: Iterable[Job], places: Mapping[int, int]) -> None:
        """Release what was held for a pause: first the jobs with places of an admin's, so that
        nobody goes before them. Raises SlurmUnavailable."""
        held = {job.id for job in jobs if job.waits and job.reason.startswith("JobHeld")}
        if self._held is not None:
            held &= self._held
        for job in sorted(held & places.keys(), key=lambda each: places[each]):
            # Slurm gives no priority to a job that is held; the others are held until it has it.
            self._release([job])
            self._change(job, priority=FIRST - places[job])
            held.remove(job)
        if held and self._release(held):
            self._log.info("Released %d jobs", len(held))
        self._held = set()

    def order(self, waiting: Collection[tuple[Ticket, Job]]) -> None:
        """Each job at its admin's place, or in the order with its points. Raises
        SlurmUnavailable."""
        for ticket, job in waiting:
            if job.priority == 0:
                continue  # somebody holds it back
            if ticket.position is not None:
                place = FIRST - ticket.position
                if job.priority != place:
                    self._change(job.id, priority=place)
                continue
            if job.priority > FIRST - PLACES:
                self._release([job.id])
                self._nice.pop(ticket.id, None)
            nice = holder.niceness(ticket.boost)
            if self._nice.get(ticket.id) != nice:
                self._change(job.id, nice=nice)
                self._nice[ticket.id] = nice
        for gone in self._nice.keys() - {ticket.id for ticket, _ in waiting}:
            del self._nice[gone]

    def exclude(self, job: Job, nodes: Collection[str]) -> None:
        """Let a job that waits run on all nodes but these. Raises SlurmUnavailable."""
        self._change(job.id, excluded=nodes)

    # Machines.

    def close(self, node: str, reason: str) -> None:
        """No job starts on a node any more; what runs goes on. Raises SlurmRefused or
        SlurmUnavailable."""
        self._slurm.close(node, reason)

    def reopen(self, node: str) -> None:
        """Give a closed node to jobs again; one that is not closed stays as it is. Raises
        SlurmRefused or SlurmUnavailable."""
        if node in _closed(self._slurm.nodes()):
            self._slurm.reopen(node)

    def _release(self, jobs: Collection[int]) -> bool:
        return self._tell(partial(self._slurm.release, jobs), f"release {_listed(jobs)}")

    def _change(self, job: int, **what: Any) -> bool:
        said = ", ".join(f"{name} {value}" for name, value in what.items())
        return self._tell(partial(self._slurm.change, job, **what), f"job {job}: {said}")

    def _tell(self, tell: Callable[[], None], what: str) -> bool:
        """Whether Slurm did it; a no is said once."""
        try:
            tell()
        except SlurmRefused as error:
            if error.message not in self._refused:
                self._refused.add(error.message)
                self._log.warning("%s: %s", what, error.message)
            return False
        return True


def _closed(text: str) -> frozenset[str]:
    """The nodes that are drained. Raises SlurmUnavailable."""
    try:
        nodes: list[Mapping[str, Any]] = json.loads(text)["nodes"]
        return frozenset(
            str(node["name"]) for node in nodes if "DRAIN" in (node.get("state_flags") or ())
        )
    except (ValueError, KeyError, TypeError) as error:
        why = f"sinfo --json did not answer as Slurm 22.05 does ({error!r:.80})"
        raise SlurmUnavailable(why=why) from None


def _listed(ids: Iterable[int]) -> str:
    return ",".join(map(str, sorted(ids)))
