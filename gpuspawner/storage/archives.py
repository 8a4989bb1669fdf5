"""Archives of workspaces: made and put back by commands, and by admins from a page.

Those from the page are made one after the other in the background.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import docker

from ..core.errors import (
    ArchiveCancelled,
    ArchiveRefused,
    ClockWasSet,
    GPUSpawnerError,
    QuotaUnavailable,
    Refused,
    StoreUnavailable,
    UnknownAccount,
    UnknownArchive,
    UnknownWorkspace,
    WorkspaceBusy,
)
from ..core.jobs import CANCELLED, DONE, Job, JobTable
from ..core.units import format_bytes
from ..db.engine import sqlite_file
from ..ledger import repository as ledger_repository
from ..ledger.models import member_account
from . import repository
from .directories import (
    ENDINGS,
    ArchiveContents,
    DirectoryTree,
    Tree,
    VolumeTree,
    check_archive,
    ending,
    must_be_unused,
    read_archive,
    write_archive,
)
from .repository import ARCHIVED, RESTORED, Workspace
from .service import ARCHIVING, GPUFolders, StorageService

NOTICED_AFTER = 1.0
"""Seconds between two looks at whether the archive was cancelled."""


def archive_name(source: str, at: datetime, form: str = "%Y-%m-%d") -> str:
    """Return the usual name of an archive of a workspace."""
    name = os.path.basename(source).lstrip(".") or "workspace"
    return f"{name}-{at.astimezone():{form}}.tar.gz"


Progress = Callable[[int], None]


def _nothing(size: int) -> None:
    """Ignore the progress."""


@dataclass(frozen=True)
class WorkspaceArchiver:
    """Makes archives of workspaces and puts them back, while no server can get the workspace.

    Whatever ends it in the middle, a kill too, leaves no archive and no half-filled directory, and
    the workspace locked only if this process was killed.
    """

    storage: StorageService
    connect: Callable[[], docker.APIClient]
    """Returns a client of the engine. Raises EngineUnavailable."""
    uses_docker: bool
    """True if servers are containers of that engine."""

    def archive(
        self,
        known: Workspace,
        file: Path,
        *,
        actor: str,
        progress: Progress = _nothing,
    ) -> ArchiveContents:
        """Write a workspace to a new file.

        ``progress`` gets the bytes that were read, chunk by chunk; what it raises ends the archive.
        Raises ArchiveRefused, ArchiveCancelled, WorkspaceBusy, UnknownWorkspace and
        EngineUnavailable.
        """
        ending(file)
        watch = _CancelWatch(self.storage, known.source)
        with self.claimed(known, ARCHIVING) as tree:
            if not tree.exists():
                raise UnknownWorkspace(name=known.source)
            with closing(tree.read()) as tar:
                contents = write_archive(
                    watch.over(_counted(tar, progress)),
                    file,
                    check=watch.over,
                    finish=lambda: _written(partial(self.storage.finish_archive, known.source)),
                )
        self._note(known, ARCHIVED, actor, file)
        return contents

    def restore(
        self,
        known: Workspace,
        file: Path,
        *,
        actor: str,
        progress: Progress = _nothing,
    ) -> tuple[ArchiveContents, str]:
        """Fill an empty workspace from an archive.

        Returns what was in it, and why the quota could not be set, if it could not. Raises as
        :meth:`archive` does.
        """
        contents = check_archive(file)
        with self.claimed(known, "an admin puts them back") as tree:
            if not tree.is_empty():
                raise ArchiveRefused(
                    what=f"{known.source} is not empty; archive and delete it first, or name "
                    "another one"
                )
            tree.write(_counted(read_archive(file), progress), contents.top)
        why = ""
        if known.quota:
            try:
                self.storage.keep_quota(known.source, known.quota)
            except QuotaUnavailable as error:
                why = error.message
        self._note(known, RESTORED, actor, file)
        return contents, why

    @contextmanager
    def claimed(self, known: Workspace, what: str) -> Iterator[Tree]:
        """Yield a workspace's files while no server can get it."""
        storage = self.storage
        _written(partial(storage.claim_workspace, known.source, what, user=known.user))
        try:
            if self.uses_docker:
                must_be_unused(self.connect(), known.source)
            yield self._tree(known)
        finally:
            _written(partial(storage.free_workspace, known.source))

    def _note(self, known: Workspace, action: str, actor: str, file: Path) -> None:
        note = self.storage.note_workspace
        _written(partial(note, known.source, action, actor=actor, detail=str(file)))

    def _tree(self, workspace: Workspace) -> Tree:
        if not workspace.is_volume:
            return DirectoryTree(workspace.source)
        client = self.connect()
        images = client.images()
        if not images:
            raise ArchiveRefused(what="the engine has no image to make a container of")
        return VolumeTree(client, workspace.source, str(images[0]["Id"]))


class _CancelWatch:
    """Asks the database about every second whether an archive was cancelled.

    Another process may have cancelled it: the page and the command do not know of each other.
    """

    def __init__(self, storage: StorageService, source: str) -> None:
        self._storage = storage
        self._source = source
        self._asked_at = -NOTICED_AFTER

    def over(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the chunks. Raises ArchiveCancelled."""
        for chunk in chunks:
            self._look()
            yield chunk

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._asked_at < NOTICED_AFTER:
            return
        self._asked_at = now
        with suppress(StoreUnavailable):  # asked again before the archive gets its name
            if self._storage.is_archive_cancelled(self._source):
                raise ArchiveCancelled(source=self._source)


def _written(change: Callable[[], object]) -> None:
    """Make a change, once more if the clock was set in the minutes before: nothing was written."""
    try:
        change()
    except ClockWasSet:
        change()


def _counted(chunks: Iterable[bytes], progress: Progress) -> Iterator[bytes]:
    for chunk in chunks:
        progress(len(chunk))
        yield chunk


KEPT_FREE = 2**30
"""Bytes that an archive leaves on its file system, which may be the database's."""

MOST_WAITING = 200
"""How many archives may wait for their turn."""

ENDED_KEPT = 20
"""Of how many that have ended the result is shown."""

WAITING, RUNNING, CANCELLING = "waiting", "running", "cancelling"
ARCHIVE, RESTORE = "archive", "restore"

_FAILURE = (
    "The container engine or the file system may be at fault. See that both work, then try again: "
    "the service's log says what went wrong."
)

_PART = re.compile(r"\.([0-9]+)\..+")


class ArchiveFile(NamedTuple):
    """An archive in the folder of archives."""

    name: str
    size: int
    """Bytes."""
    made_at: datetime
    workspace: str
    """The workspace it was made from; empty if the audit log does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceJob(Job):
    """An archive or a restore; its bytes are those read or put back, at the end the files'."""

    kind: str
    """``archive`` or ``restore``."""
    workspace: str
    user: str
    archive: str
    """The archive's name."""
    asked_at: datetime
    state: str = WAITING


def archives_folder(settings: GPUFolders, database_url: str) -> Path:
    """Return where archives are kept."""
    if settings.archives:
        return Path(settings.archives).absolute()
    file = sqlite_file(database_url)
    return (file.parent if file else Path()).absolute() / "gpuspawner_archives"


class WorkspaceJobs:
    """Archives and restores workspaces in one thread of this process.

    What waits or runs ends with the process, as a command does: the workspace that was in hand
    stays locked until an admin unlocks it, and there is no half-written archive. The claim
    on the workspace, in the database, decides whether an archive was finished or cancelled.
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
        self._table = JobTable[WorkspaceJob](clock, ENDED_KEPT)
        self._thread: threading.Thread | None = None

    def jobs(self) -> list[WorkspaceJob]:
        """Return what waits, runs or ended lately, newest first."""
        return self._table.jobs()

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
        with self._table.lock:
            self._must_be_idle(workspace)
            if not self._table.open_jobs():  # no unfinished file belongs to this process
                with suppress(OSError):
                    self._remove_unfinished()
            return self._storage.free_workspace(workspace, actor=actor)

    def cancel(self, workspace: str, *, actor: str) -> bool:
        """Cancel a workspace's waiting job, or the archive that is being made of it.

        The archive may be another process's, such as a command's. The workspace is unchanged.
        Returns False if it was already being cancelled. Raises UnknownWorkspace, and WorkspaceBusy
        if there is nothing that can be cancelled.
        """
        with self._table.lock:
            job = self.open_job(workspace)
            if job is not None and job.state == WAITING:
                self._storage.note_workspace(workspace, f"cancel {job.kind}", actor=actor)
                self._table.end(job.id, CANCELLED)
                return True
            if job is not None and job.kind == RESTORE:
                raise WorkspaceBusy(
                    f"{workspace} is being restored, which cannot be cancelled. "
                    "Nothing was changed."
                )
            changed = self._storage.cancel_archive(workspace, actor=actor)
            if job is not None:
                self._table.change(job.id, state=CANCELLING)
            return changed

    def open_job(self, workspace: str) -> WorkspaceJob | None:
        """Return the waiting or running job of a workspace in this process."""
        return next((job for job in self._table.open_jobs() if job.workspace == workspace), None)

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
        if job := self.open_job(workspace):
            doing = "archived" if job.kind == ARCHIVE else "restored"
            raise WorkspaceBusy(
                f"{workspace} is being {doing}, or waits for it. Wait until that has ended: "
                "nothing was changed."
            )

    def _start(self, kind: str, known: Workspace, name: str, actor: str) -> WorkspaceJob:
        job = WorkspaceJob(
            kind=kind,
            workspace=known.source,
            user=known.user,
            archive=name,
            actor=actor,
            asked_at=self._clock(),
        )
        with self._table.lock:
            self._must_be_idle(known.source)
            self._storage.require_claimable(known)
            if len(self._table.open_jobs()) >= MOST_WAITING:
                raise Refused(f"{MOST_WAITING} archives wait already. Try again later.")
            job = self._table.add(job)
            if self._thread is None:
                # The process does not wait for it at its end: an archive may take hours.
                self._thread = threading.Thread(
                    target=self._work, name="gpuspawner-archives", daemon=True
                )
                self._thread.start()
            return job

    def _work(self) -> None:
        while job := self._next():
            self._table.run(job, self._do, self._log, _FAILURE)

    def _next(self) -> WorkspaceJob | None:
        """Return the job whose turn it is; None, and the thread ends, if nothing waits."""
        with self._table.lock:
            for job in self._table.open_jobs():
                return self._table.change(job.id, state=RUNNING, started_at=self._clock())
            self._thread = None
            return None

    def _do(self, job: WorkspaceJob) -> None:
        known = self.known(job.workspace) or Workspace(job.workspace, job.user, self._clock())
        file, why, done = self.folder / job.archive, "", 0

        def proceed(size: int) -> None:
            nonlocal done
            done += size
            self._table.change(job.id, done_bytes=done)
            if job.kind == ARCHIVE:
                self._must_have_room()

        try:
            if job.kind == ARCHIVE:
                self._make_folder()
                self._must_have_room()
                contents = self._archiver.archive(known, file, actor=job.actor, progress=proceed)
            else:
                contents, why = self._archiver.restore(
                    known, file, actor=job.actor, progress=proceed
                )
        except ArchiveCancelled:
            self._table.end(job.id, CANCELLED)
            return
        except ArchiveRefused as error:
            if error.said:
                self._log.error("%s It says: %s", error.message, error.said)
            # Without that it was not done, which the state says.
            raise GPUSpawnerError(f"{error.what}.") from error
        self._table.end(job.id, DONE, error=why, done_bytes=contents.size)

    def _make_folder(self) -> None:
        """Make the folder, and remove what a killed process left unfinished in it."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_unfinished()
        except OSError as error:
            what = f"{self.folder} cannot be used as the folder of archives. Check who may write it"
            raise ArchiveRefused(what, error) from error

    def _remove_unfinished(self) -> None:
        for name in os.listdir(self.folder):
            found = _PART.fullmatch(name)
            if found and name.endswith(ENDINGS) and not _lives(int(found[1])):
                (self.folder / name).unlink(missing_ok=True)

    def _must_have_room(self) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < KEPT_FREE:
            raise ArchiveRefused(
                what=f"only {format_bytes(free)} are free in {self.folder}, and "
                f"{format_bytes(KEPT_FREE)} have to stay free"
            )


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
