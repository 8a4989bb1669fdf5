"""Archivers that wait for a test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpuspawner.services import Services
from gpuspawner.storage.archives import Progress, WorkspaceArchiver
from gpuspawner.storage.directories import ArchiveContents
from gpuspawner.storage.jobs import WorkspaceJobs
from gpuspawner.storage.repository import Workspace


@dataclass(frozen=True)
class Held(WorkspaceArchiver):
    """Stops in the middle of each archive, with the workspace in hand, until ``gate`` is set."""

    gate: threading.Event = field(default_factory=threading.Event)
    reading: threading.Event = field(default_factory=threading.Event)
    """Set when the first bytes were read."""

    def archive(
        self,
        known: Workspace,
        file: Path,
        *,
        actor: str,
        progress: Progress = lambda size: None,
    ) -> ArchiveContents:
        def hold(size: int) -> None:
            progress(size)
            self.reading.set()
            assert self.gate.wait(120)

        return super().archive(known, file, actor=actor, progress=hold)


def hold_archives(services: Services, make: Callable[..., Held] = Held) -> Held:
    """Let these services archive with one that waits, and return it."""
    known = services.workspace_jobs
    old = known._archiver
    made = make(old.storage, old.connect, old.uses_docker)
    services.workspace_jobs = WorkspaceJobs(made, known.folder, services.time, services.log)
    return made
