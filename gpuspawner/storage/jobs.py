"""Archives that admins make and put back from a page, one after the other in the background."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import docker

from ..core.errors import (
    ArchiveRefused,
    GPUSpawnerError,
    Refused,
    UnknownAccount,
    UnknownArchive,
    UnknownWorkspace,
    WorkspaceBusy,
)
from ..core.units import format_bytes
from ..db.engine import sqlite_file
from ..ledger import repository as ledger_repository
from ..ledger.models import member_account
from . import repository
from .archives import WorkspaceArchiver, archive_name
from .directories import ENDINGS, ArchiveContents
from .repository import Workspace
from .service import GPUFolders

KEPT_FREE = 2**30
"""Bytes that an archive leaves on its file system, which may be the database's."""

MOST_WAITING = 200
"""How many archives may wait for their turn."""

ENDED_KEPT = 20
"""Of how many that have ended the result is shown."""

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
ARCHIVE, RESTORE = "archive", "restore"

_PART = re.compile(r"\.([0-9]+)\..+")


class ArchiveFile(NamedTuple):
    """An archive in the folder of archives."""

    name: str
    size: int
    """Bytes."""
    made_at: datetime
    workspace: str
    """The workspace it was made from; empty if the audit log does not say."""


@dataclass(frozen=True, slots=True)
class WorkspaceJob:
    """Something that is to be done with a workspace, and what became of it."""

    id: int
    kind: str
    """``archive`` or ``restore``."""
    workspace: str
    user: str
    archive: str
    """The archive's name."""
    actor: str
    asked_at: datetime
    state: str = WAITING
    started_at: datetime | None = None
    ended_at: datetime | None = None
    done_bytes: int = 0
    """Bytes that were read or put back so far; once it is done, those of the files."""
    error: str = ""
    """Why it failed, or why the quota was not set."""

    @property
    def is_open(self) -> bool:
        """True if it has not ended."""
        return self.state in (WAITING, RUNNING)


def archives_folder(settings: GPUFolders, database_url: str) -> Path:
    """Return where archives are kept."""
    if settings.archives:
        return Path(settings.archives).absolute()
    file = sqlite_file(database_url)
    return (file.parent if file else Path()).absolute() / "gpuspawner_archives"


class WorkspaceJobs:
    """Archives and restores workspaces in one thread of this process.

    What waits or runs ends with the process, as a command does: the workspace that was in hand
    stays locked until an admin unlocks it, and there is no half-written archive.
    """

    def __init__(
        self,
        archiver: WorkspaceArchiver,
        folder: Path,
        clock: Callable[[], datetime],
        log: logging.Logger,
    ) -> None:
        self.folder = folder
        self._archiver = archiver
        self._storage = archiver.storage
        self._clock = clock
        self._log = log
        self._lock = threading.Lock()
        self._jobs: dict[int, WorkspaceJob] = {}
        self._last = 0
        self._thread: threading.Thread | None = None

    def jobs(self) -> list[WorkspaceJob]:
        """Return what waits, runs or ended lately, newest first."""
        with self._lock:
            return sorted(self._jobs.values(), key=lambda job: -job.id)

    def archives(self) -> list[ArchiveFile]:
        """Return the archives in the folder, newest first."""
        made_of = self._storage.store.run(repository.archived_from)
        found = []
        for name, seen in self._files():
            source = made_of.get(str(self.folder / name), "")
            at = datetime.fromtimestamp(seen.st_mtime).astimezone()
            found.append(ArchiveFile(name, seen.st_size, at, source))
        return sorted(found, key=lambda some: some.made_at, reverse=True)

    def start_archive(self, workspace: str, *, actor: str) -> WorkspaceJob:
        """Archive a workspace as soon as it is its turn.

        Raises UnknownWorkspace, and WorkspaceBusy if a server of its member runs or somebody else
        has it in hand.
        """
        known = self.known(workspace)
        if known is None:
            raise UnknownWorkspace(name=workspace[:300])
        name = archive_name(workspace, self._clock(), "%Y-%m-%d-%H%M%S")
        return self._start(ARCHIVE, known, name, actor)

    def start_restore(
        self, archive: str, workspace: str, *, member: str = "", actor: str
    ) -> WorkspaceJob:
        """Put an archive into an empty workspace as soon as it is its turn.

        ``member`` is the owner of the archive's workspace if that was deleted. Raises
        UnknownArchive, UnknownWorkspace, UnknownAccount, Refused and WorkspaceBusy.
        """
        found = self.find_archive(archive)
        known = self.known(workspace)
        if known is None:
            # Only where a workspace was before: a page names no other directory of the machine.
            if workspace != found.workspace:
                raise UnknownWorkspace(name=workspace[:300])
            if not member:
                raise Refused(
                    f"The workspace {workspace} was deleted: say which member it will belong to."
                )
            self._require_member(member)
            known = Workspace(workspace, member, seen_at=self._clock())
        elif member not in ("", known.user):
            raise Refused(f"{workspace} belongs to {known.user}: leave the member out.")
        return self._start(RESTORE, known, found.name, actor)

    def unlock(self, workspace: str, *, actor: str) -> bool:
        """Let servers have a workspace again that an interrupted archive left locked.

        Returns False if it was not locked. Raises WorkspaceBusy while it is being archived here.
        """
        with self._lock:
            self._must_be_idle(workspace)
            return self._storage.free_workspace(workspace, actor=actor)

    def known(self, workspace: str) -> Workspace | None:
        """Return a workspace; None if no server ever got it, or it was deleted."""
        return self._storage.store.run(lambda c: repository.find_workspace(c, workspace))

    def find_archive(self, name: str) -> ArchiveFile:
        """Return the archive of this name. Raises UnknownArchive."""
        for some in self.archives():
            if some.name == name:
                return some
        raise UnknownArchive(name=name[:300])

    def _files(self) -> list[tuple[str, os.stat_result]]:
        """Return the archives' names; nothing that is still being written, and no symlink."""
        found = []
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not entry.name.endswith(ENDINGS):
                    continue
                with suppress(OSError):  # it was removed meanwhile
                    if entry.is_file(follow_symlinks=False):
                        found.append((entry.name, entry.stat(follow_symlinks=False)))
        return found

    def _require_member(self, user: str) -> None:
        account = member_account(user)
        find = ledger_repository.find_account
        if self._storage.store.run(lambda connection: find(connection, account)) is None:
            raise UnknownAccount(account=account)

    def _must_be_idle(self, workspace: str) -> None:
        for job in self._jobs.values():
            if job.is_open and job.workspace == workspace:
                doing = "archived" if job.kind == ARCHIVE else "restored"
                raise WorkspaceBusy(
                    f"{workspace} is being {doing}, or waits for it. Wait until that has ended: "
                    "nothing was changed."
                )

    def _start(self, kind: str, known: Workspace, name: str, actor: str) -> WorkspaceJob:
        with self._lock:
            self._must_be_idle(known.source)
            self._storage.require_claimable(known)
            if sum(job.is_open for job in self._jobs.values()) >= MOST_WAITING:
                raise Refused(f"{MOST_WAITING} archives wait already. Try again later.")
            self._last += 1
            job = WorkspaceJob(
                id=self._last,
                kind=kind,
                workspace=known.source,
                user=known.user,
                archive=name,
                actor=actor,
                asked_at=self._clock(),
            )
            self._jobs[job.id] = job
            if self._thread is None:
                # The process does not wait for it at its end: an archive may take hours.
                self._thread = threading.Thread(
                    target=self._work, name="gpuspawner-archives", daemon=True
                )
                self._thread.start()
            return job

    def _work(self) -> None:
        while job := self._next():
            try:
                self._do(job)
            except ArchiveRefused as error:  # without that it was not done, which the state says
                self._end(job, FAILED, error=f"{error.fields['what']}.")
            except GPUSpawnerError as error:
                self._end(job, FAILED, error=error.message)
            except (docker.errors.DockerException, OSError) as error:
                self._end(job, FAILED, error=f"{error}.")
            except Exception:
                self._log.exception("%s of %s failed", job.kind, job.workspace)
                self._end(job, FAILED, error="Something went wrong: the service's log says more.")

    def _next(self) -> WorkspaceJob | None:
        """Return the job whose turn it is; None, and the thread ends, if nothing waits."""
        with self._lock:
            waiting = [job for job in self._jobs.values() if job.state == WAITING]
            if not waiting:
                self._thread = None
                return None
            job = replace(waiting[0], state=RUNNING, started_at=self._clock())
            self._jobs[job.id] = job
            return job

    def _do(self, job: WorkspaceJob) -> None:
        known = self.known(job.workspace) or Workspace(job.workspace, job.user, self._clock())
        file, why = self.folder / job.archive, ""
        contents: ArchiveContents
        if job.kind == ARCHIVE:
            self._make_folder()

            def read(size: int) -> None:
                self._proceed(job.id, size)
                self._must_have_room()

            self._must_have_room()
            contents = self._archiver.archive(known, file, actor=job.actor, progress=read)
        else:

            def put_back(size: int) -> None:
                self._proceed(job.id, size)

            contents, why = self._archiver.restore(known, file, actor=job.actor, progress=put_back)
        self._end(job, DONE, error=why, size=contents.size)

    def _make_folder(self) -> None:
        """Make the folder, and remove what a killed process left unfinished in it."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in os.listdir(self.folder):
                found = _PART.fullmatch(name)
                if found and name.endswith(ENDINGS) and not _lives(int(found[1])):
                    (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise ArchiveRefused(what=f"{self.folder}: {error.strerror or error}") from error

    def _must_have_room(self) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < KEPT_FREE:
            raise ArchiveRefused(
                what=f"only {format_bytes(free)} are free in {self.folder}, and "
                f"{format_bytes(KEPT_FREE)} have to stay free"
            )

    def _proceed(self, job_id: int, size: int) -> None:
        with self._lock:
            job = self._jobs[job_id]
            self._jobs[job_id] = replace(job, done_bytes=job.done_bytes + size)

    def _end(self, job: WorkspaceJob, state: str, *, error: str = "", size: int = 0) -> None:
        ended_at = self._clock()
        with self._lock:
            done = size or self._jobs[job.id].done_bytes
            self._jobs[job.id] = replace(
                self._jobs[job.id], state=state, ended_at=ended_at, error=error, done_bytes=done
            )
            ended = [each.id for each in self._jobs.values() if not each.is_open]
            for old in ended[:-ENDED_KEPT]:
                del self._jobs[old]


def _lives(pid: int) -> bool:
    """Return True if another process of this id lives; ours writes nothing while this is asked."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
