"""Runs and their states as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from ..leases.models import Lease, LeaseState, ServerRef


class RunState(str, Enum):
    """A run's state, as its member sees it."""

    WAITING = "waiting"
    """In the queue."""
    STARTING = "starting"
    """It has its devices, and its container is on its way."""
    RUNNING = "running"
    DONE = "done"
    """It ended by itself, with exit status 0."""
    FAILED = "failed"
    """It ended by itself with another status, or it could not start."""
    STOPPED = "stopped"
    """It was stopped: by its member, an admin, its time limit or an empty account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a run executes: a command, or a notebook with parameters."""

    command: tuple[str, ...] = ()
    """The program and its arguments; empty for a notebook."""
    notebook: str = ""
    """The notebook's path, relative to the workspace; empty for a command."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The notebook's parameters, as JSON values by name."""
    directory: str = ""
    """The working directory, relative to the workspace; empty for the workspace itself."""
    folder: str = ""
    """Where its log and its output are, relative to the workspace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One notebook or command that runs by itself.

    Whether an open run waits, starts or runs follows from its ticket and its lease: a second
    record of that could differ from them after a crash.
    """

    id: str
    user: str
    key: str = ""
    """The client's idempotency key: submitting again with it returns this run. Empty: none."""
    title: str
    work: Work
    options: Mapping[str, Any] = field(default_factory=dict)
    """The member's choices, like a server's ``user_options``: environment, devices, hours."""
    requeue: bool = False
    """True if it starts again after an interruption."""
    restarts: int = 0
    """How often it was started again after an interruption."""
    preemptible: bool = False
    """True if it runs only on devices that nobody else can use, and yields them to others."""
    preemptions: int = 0
    """How often it has yielded them."""
    after_lease: str = ""
    """The lease whose interruption was handled last."""
    created_at: datetime
    ended_at: datetime | None = None
    outcome: str = ""
    """Empty while it is open, else ``done``, ``failed`` or ``stopped``."""
    reason: str = ""
    """Why it ended, as a sentence; empty if it is done. While it is open: its last line."""
    exit_code: int | None = None
    """The exit status of its program; None if it never ended by itself."""
    sweep: str | None = None
    """The id of its sweep, if any."""
    at_most: int | None = None
    """How many runs of its sweep may wait in the queue or run at once; None for all."""
    admitted_at: datetime | None = None
    """When its sweep let it join the queue."""

    @property
    def is_held_back(self) -> bool:
        """True if other runs of its sweep come first."""
        return self.sweep is not None and self.admitted_at is None

    @property
    def server(self) -> ServerRef:
        """The name under which it has its ticket and its lease."""
        return ServerRef.of_run(self.user, self.id)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run recorded in ``run.json``. Its member could have written anything there."""

    cell: int | None = None
    """The cell that a notebook executes, from 1."""
    cells: int | None = None
    """How many cells it has."""
    files: Mapping[str, int] = field(default_factory=dict)
    """The bytes of each file in its folder, by path."""


@dataclass(frozen=True, slots=True)
class FollowedRun:
    """A run with its newest lease, if it ever had one."""

    run: Run
    lease: Lease | None = None

    @property
    def is_to_be_started(self) -> bool:
        """True if it waits, or has a lease whose container was never seen."""
        if self.run.is_held_back or self.has_to_settle:
            return False
        return self.state in (RunState.WAITING, RunState.STARTING)

    @property
    def has_to_settle(self) -> bool:
        """True if its newest lease has ended, and what that means for the run is not recorded yet.

        The run may be done, although it has no outcome. A lease that was lost with its hub has put
        its ticket back into the queue: that run waits.
        """
        if self.run.outcome or self.lease is None or self.lease.state is not LeaseState.ENDED:
            return False
        return self.lease.id != self.run.after_lease and self.lease.outcome != "lost"

    @property
    def state(self) -> RunState:
        """The run's state when both were read."""
        if self.run.outcome:
            return RunState(self.run.outcome)
        if self.lease is None or self.lease.state is LeaseState.ENDED:
            return RunState.WAITING
        if self.lease.state is LeaseState.RUNNING:
            return RunState.RUNNING
        return RunState.STARTING
