"""Archives of workspaces: made and put back by commands and by the admins' page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import docker

from ..core.errors import (
    ArchiveCancelled,
    ArchiveRefused,
    ClockWasSet,
    QuotaUnavailable,
    StoreUnavailable,
    UnknownWorkspace,
)
from .directories import (
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
from .service import ARCHIVING, StorageService

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
