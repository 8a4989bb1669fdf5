"""The part of :class:`gpuspawner.slurm.delegate.SlurmDelegate` for images, and for what admins
decide about the line."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from ..errors import GPUSpawnerError, ImageAwaited, Refused, SlurmRefused
from ..model import Ticket
from . import holder
from .cluster import Cluster
from .controller import Controller
from .hand import Hand
from .images import NodeImages
from .jobs import Job
from .nodes import Nodes


class Tending(Nodes):
    """What the jobs that wait are told beside submits and cancels."""

    _jobs: Mapping[str, Job]
    _began: float

    def __init__(self, cluster: Cluster, slurm: Controller, log: logging.Logger | Any) -> None:
        super().__init__(cluster, slurm, log)
        self.images = NodeImages(cluster.nodes, log)
        self._hand = Hand(slurm, log)
        self._tended = float("-inf"), False
        """When jobs were told something last, and whether that was in a pause."""

    # Jobs that wait.

    def lacking(self, ticket: Ticket) -> Collection[str]:
        """The nodes that would do and lack the ticket's image. Raises TooMuchAsked, and what
        :meth:`gpuspawner.slurm.images.NodeImages.lacking` does."""
        return self.images.lacking(ticket, holder.able(ticket.request, self.cluster))

    def why_not_yet(self, ticket: Ticket) -> str:
        with suppress(GPUSpawnerError):  # what no node has is said at the next try
            return self.images.why_not_yet(ticket, holder.able(ticket.request, self.cluster))
        return ""

    def tend(self, waiting: Collection[Ticket], *, paused: bool) -> None:
        tended_at, was_paused = self._tended
        if self._began <= tended_at and paused == was_paused:
            return  # what came of that is not known yet
        self._tend(waiting, paused)
        self._tended = time.monotonic(), paused

    def _tend(self, waiting: Collection[Ticket], paused: bool) -> None:
        jobs = self._jobs
        # Jobs of no ticket that waits here may be another hub's.
        found = [(t, jobs[t.id]) for t in waiting if t.id in jobs and jobs[t.id].waits]
        if paused:
            self._hand.pause(job for _, job in found)
            return
        places = {job.id: ticket.position for ticket, job in found if ticket.position is not None}
        self._hand.go_on([job for _, job in found], places)
        self._hand.order(found)
        for ticket, job in found:
            if job.excluded and self.images.wanted(ticket) is not None:
                self._let_in(ticket, job)

    def _let_in(self, ticket: Ticket, job: Job) -> None:
        """Let a job that waits run also where its image has come meanwhile."""
        with suppress(ImageAwaited, Refused):
            lacking = {*self.lacking(ticket), *self._untold}
            nodes = holder.excluded(ticket.request, self.cluster, lacking)
            if set(nodes) < set(job.excluded.split(",")):
                self._hand.exclude(job, nodes)

    def must_allow(self, minutes: int) -> None:
        """Raises SlurmRefused for a job that is longer than the partition allows, which Slurm
        itself would let root have, and SlurmUnavailable."""
        partition = self.cluster.partition
        most = self.slurm.longest(partition)
        if minutes > most:
            hours = f"{most / 60:.1f}".removesuffix(".0")
            raise SlurmRefused(why=f"the partition {partition} lets nothing run for over {hours} h")
