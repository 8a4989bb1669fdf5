"""Other archivers for a test, such as one that waits for it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from gpuspawner.services import Services
from gpuspawner.storage.archives import Progress, WorkspaceArchiver, WorkspaceJobs
from gpuspawner.storage.directories import ArchiveContents
from gpuspawner.storage.repository import Workspace

A = TypeVar("A", bound=WorkspaceArchiver)


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


def archive_with(services: Services, kind: type[A]) -> A:
    """Let these services archive with another archiver, and return it."""
    known = services.workspace_jobs
    old = known._archiver
    made = kind(old.storage, old.connect, old.uses_docker)
    services.workspace_jobs = WorkspaceJobs(made, known.folder, services.time, services.log)
    return made
