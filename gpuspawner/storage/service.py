"""Members' workspaces: who has which, quotas, sizes, and who holds one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import NamedTuple

import sqlalchemy as sa
from traitlets import Integer, List, Unicode
from traitlets.config import LoggingConfigurable

from ..core.errors import ArchiveCancelled, QuotaUnavailable, UnknownWorkspace, WorkspaceBusy
from ..db import audit_log
from ..db.audit_log import AuditEntry
from ..db.engine import Store
from ..leases import repository as leases_repository
from . import repository
from .quotas import Quotas, QuotaUse, measure
from .repository import Workspace

SEEN_EVERY = timedelta(hours=1)
"""How exactly the last use of a workspace is recorded."""

GLANCE = 0.1
"""Seconds that a page spends on measuring a directory."""


class GPUFolders(LoggingConfigurable):
    """Shared folders, archives of workspaces, and the command for quotas."""

    xfs_quota = List(
        Unicode(),
        ["xfs_quota"],
        config=True,
        help="""
        The command that sets and reads quotas, as a list. It must run as root.

        Example::

            c.GPUFolders.xfs_quota = ["sudo", "-n", "xfs_quota"]
        """,
    )

    source = Unicode(
        "",
        config=True,
        help="""
        Where the folders that members share are kept: a directory of the host, or a volume's name,
        with ``{id}`` in it. Empty: members cannot create any.

        Example::

            c.GPUFolders.source = "/srv/folders/{id}"
            c.GPUFolders.source = "gpuspawner-folder-{id}"
        """,
    )

    quota = Integer(
        0,
        config=True,
        help="""
        The most, in GB, that a folder shared by members may hold. 0: no limit. The file system
        enforces it, like ``c.GPUDockerSpawner.workspace_quota``.

        Example::

            c.GPUFolders.quota = 100
        """,
    )

    archives = Unicode(
        "",
        config=True,
        help="""
        The directory of the archives that admins make on the page of workspaces. Choose one with
        much room. Empty: ``gpuspawner_archives`` next to the database, or in the hub's working
        directory if that is no SQLite file.

        Example::

            c.GPUFolders.archives = "/srv/archives"
        """,
    )


ARCHIVING = "an admin archives them"
"""The claim while an archive can be cancelled. A member who starts a server meanwhile reads it."""
CANCELLING = "an admin cancels their archive"
FINISHING = "their archive is being finished"
"""The claim once an archive was read back and can no longer be cancelled."""

MEASURED_IN_USE = timedelta(hours=1)
"""After this time a workspace is measured again while a server of its member runs."""

MEASURED_IDLE = timedelta(days=1)
"""After this time any workspace is measured again."""


class MeasuredSize(NamedTuple):
    """The size of a workspace when it was last measured."""

    used: int | None
    """Bytes; None if it could not be measured."""
    at: datetime


class WorkspaceUse(NamedTuple):
    """A workspace and its use."""

    workspace: Workspace
    use: QuotaUse | None
    """None: unknown, or not measured in time."""


@dataclass(eq=False)
class StorageService:
    """Members' workspaces: owners, use, and claims by admins."""

    store: Store
    clock: Callable[[], datetime]
    settings: GPUFolders
    log: logging.Logger
    sizes: dict[str, MeasuredSize] = field(default_factory=dict)
    """The measured sizes by workspace, in the process that measures."""

    @property
    def quotas(self) -> Quotas:
        """The interface to the file system's quotas."""
        return Quotas(self.settings.xfs_quota)

    def use_workspace(self, source: str, user: str, quota: int | None) -> bool:
        """Record that a member's server is about to get a workspace. Returns True if it is new.

        The server already has its lease, which anybody who claims the workspace meanwhile sees.
        Raises WorkspaceBusy while an admin has it.
        """
        now = self.clock()
        with self.store.write() as connection:
            known = repository.find_workspace(connection, source, lock=True)
            if known and known.busy:
                raise WorkspaceBusy(what=known.busy)
            fresh = known is not None and abs(now - known.seen_at) < SEEN_EVERY
            if known and fresh and (known.user, known.quota) == (user, quota):
                return False
            made = Workspace(source=source, user=user, seen_at=now, quota=quota)
            repository.put_workspace(connection, made)
            return known is None

    def keep_quota(self, source: str, quota: int | None) -> None:
        """Set a directory's quota in bytes at the file system; None removes it.

        Raises QuotaUnavailable.
        """
        with self.store.read() as connection:
            project = repository.project_of(connection, source)
        if not quota:
            if project is not None:
                self.quotas.clear(source, project)
            return
        if project is None:
            with self.store.write() as connection:
                project = repository.give_project(connection, source)
        self.quotas.set(source, project, quota)

    def use_of(self, source: str, quota: int | None, patience: float = GLANCE) -> QuotaUse | None:
        """Return a directory's use from the file system's quota, else from a quick measurement."""
        project = self.store.run(lambda c: repository.project_of(c, source))
        return self._use_of(source, quota, project, patience)

    def workspaces_of(self, user: str) -> list[tuple[Workspace, int | None]]:
        """Return a member's workspaces, each with its project at the file system, if it has one."""
        with self.store.read() as connection:
            found = repository.workspaces_of_user(connection, user)
            return [(each, repository.project_of(connection, each.source)) for each in found]

    def held_in(self, some: Iterable[tuple[Workspace, int | None]]) -> list[WorkspaceUse]:
        """Return the use of workspaces. Queries the file system: call it outside transactions."""
        return [
            WorkspaceUse(each, self._use_of(each.source, each.quota, project, GLANCE))
            for each, project in some
        ]

    def _use_of(
        self, source: str, quota: int | None, project: int | None, patience: float
    ) -> QuotaUse | None:
        if not source.startswith("/"):
            return None
        if quota and project is not None:
            try:
                return replace(self.quotas.use(source, project), limit=quota)
            except QuotaUnavailable as error:
                self.log.debug("%s", error.message)
        used = measure(source, patience)
        return None if used is None else QuotaUse(used, quota or None)

    def workspaces(self) -> list[Workspace]:
        """Return every workspace that a server ever got."""
        return list(self.store.run(repository.all_workspaces))

    def last_archives(self) -> dict[str, AuditEntry]:
        """Return the audit log's newest archive of each workspace, by the workspace's name."""
        return self.store.run(repository.last_archives)

    def unmeasured(self) -> list[Workspace]:
        """Return the workspaces whose size is unknown or too old."""
        with self.store.read() as connection:
            found = repository.all_workspaces(connection)
            running = {lease.server.user for lease in leases_repository.open_leases(connection)}
        now = self.clock()

        def is_due(some: Workspace) -> bool:
            known = self.sizes.get(some.source)
            age = MEASURED_IN_USE if some.user in running else MEASURED_IDLE
            return known is None or now - known.at >= age

        return [some for some in found if is_due(some)]

    def keep_size(self, source: str, used: int | None) -> None:
        """Record a workspace's measured size in bytes; None if it could not be measured."""
        self.sizes[source] = MeasuredSize(used, self.clock())

    def claim_workspace(self, source: str, what: str, *, user: str = "") -> Workspace:
        """Keep servers away from a workspace while something is done with it.

        ``what`` is shown to a member who starts meanwhile; ``user`` is the owner of a new
        workspace. Raises WorkspaceBusy if a server of theirs runs or somebody else claimed it, and
        UnknownWorkspace.
        """
        with self.store.write() as connection:
            known = repository.find_workspace(connection, source, lock=True)
            if known is None and not user:
                raise UnknownWorkspace(name=source)
            known = known or Workspace(source=source, user=user, seen_at=self.clock())
            _must_be_claimable(connection, known)
            claimed = replace(known, busy=what)
            repository.put_workspace(connection, claimed)
            return claimed

    def require_claimable(self, known: Workspace) -> None:
        """Raise WorkspaceBusy if this workspace could not be claimed just now."""
        with self.store.read() as connection:
            now = repository.find_workspace(connection, known.source)
            _must_be_claimable(connection, now or known)

    def free_workspace(self, source: str, *, actor: str = "") -> bool:
        """Let servers have a workspace again. Returns False if nobody had claimed it.

        ``actor`` is the admin who unlocks it, for the audit log.
        """
        with self.store.write() as connection:
            known = repository.find_workspace(connection, source, lock=True)
            if known is None or not known.busy:
                return False
            repository.put_workspace(connection, replace(known, busy=""))
            if actor:
                self._note(connection, source, "unlock workspace", actor, known.busy)
            return True

    def cancel_archive(self, source: str, *, actor: str) -> bool:
        """Tell the process that archives a workspace to stop. It frees the workspace when it stops.

        Returns False if it was told before. Raises UnknownWorkspace, and WorkspaceBusy if no
        archive runs that could be cancelled.
        """
        with self.store.write() as connection:
            known = repository.find_workspace(connection, source, lock=True)
            if known is None:
                raise UnknownWorkspace(name=source[:300])
            if known.busy == CANCELLING:
                return False
            if known.busy == FINISHING:
                raise WorkspaceBusy(
                    f"The archive of {source} is almost finished and can no longer be cancelled."
                )
            if known.busy != ARCHIVING:
                raise WorkspaceBusy(
                    f"No archive of {source} is being made, so nothing was cancelled."
                )
            repository.put_workspace(connection, replace(known, busy=CANCELLING))
            self._note(connection, source, "cancel archive", actor, "")
            return True

    def is_archive_cancelled(self, source: str) -> bool:
        """Return True if the archive that is being made of a workspace was cancelled."""
        known = self.store.run(lambda connection: repository.find_workspace(connection, source))
        return known is not None and known.busy == CANCELLING

    def finish_archive(self, source: str) -> None:
        """Rule out cancelling from now on. Raises ArchiveCancelled if it was cancelled before."""
        with self.store.write() as connection:
            known = repository.find_workspace(connection, source, lock=True)
            if known is not None and known.busy == CANCELLING:
                raise ArchiveCancelled(source=source)
            if known is not None and known.busy == ARCHIVING:
                repository.put_workspace(connection, replace(known, busy=FINISHING))

    def note_workspace(self, source: str, action: str, *, actor: str, detail: str = "") -> None:
        """Record in the audit log what was done with a workspace, and forget a deleted one."""
        with self.store.write() as connection:
            if action == "delete workspace":
                repository.remove_workspace(connection, source)
            self._note(connection, source, action, actor, detail)

    def _note(
        self, connection: sa.Connection, source: str, action: str, actor: str, detail: str
    ) -> None:
        at = self.clock()
        audit_log.note(connection, at=at, actor=actor, action=action, subject=source, detail=detail)


def _must_be_claimable(connection: sa.Connection, known: Workspace) -> None:
    source = known.source
    if known.busy:
        raise WorkspaceBusy(
            f"{source} is already being processed: {known.busy}. If that was killed, unlock it "
            f"(`gpuspawner workspaces free {source}`) and try again."
        )
    for lease in leases_repository.open_leases(connection):
        if lease.server.user == known.user:
            raise WorkspaceBusy(
                f"{source} belongs to {known.user}, whose server runs (lease {lease.id}). Stop it "
                "first: nothing was changed."
            )
