"""Members' own files: which workspace is whose, how much is in it, and who works on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

from traitlets import Integer, List, Unicode
from traitlets.config import LoggingConfigurable

from ..errors import QuotaUnavailable, UnknownWorkspace, WorkspaceBusy
from ..store import closures, leases, workspaces
from ..store.workspaces import Workspace
from ..workspaces import Quotas, Use, measure
from .core import Core

SEEN_EVERY = timedelta(hours=1)
"""How exactly it is known when a workspace was last used."""

GLANCE = 0.1
"""Seconds that a page gives to counting what a directory holds."""


class FileSettings(LoggingConfigurable):
    """What an admin can set of files, as ``c.Broker.NAME``."""

    xfs_quota = List(
        Unicode(),
        ["xfs_quota"],
        config=True,
        help="""
        The command that sets and reads quotas, as a list; it has to run as root.

        Example::

            c.Broker.xfs_quota = ["sudo", "-n", "xfs_quota"]
        """,
    )

    folder_source = Unicode(
        "",
        config=True,
        help="""
        Where the folders lie that members share: a directory of the host, or a volume's name,
        with ``{id}`` in it. Empty: members cannot make any.

        Example::

            c.Broker.folder_source = "/srv/folders/{id}"
            c.Broker.folder_source = "gpuspawner-folder-{id}"
        """,
    )

    folder_quota = Integer(
        0,
        config=True,
        help="""
        How many GB a folder that members share may hold; 0: no limit. The file system keeps it,
        as it keeps ``c.GPUDockerSpawner.workspace_quota``.

        Example::

            c.Broker.folder_quota = 100
        """,
    )

    most_folders = Integer(
        10,
        config=True,
        help="""
        How many shared folders a member may have made at once.

        Example::

            c.Broker.most_folders = 3
        """,
    )


class Held(NamedTuple):
    """A workspace and what it holds."""

    workspace: Workspace
    use: Use | None
    """None: nobody can say, or not soon enough."""


class Files(FileSettings, Core):
    """The part of the broker that knows of workspaces."""

    @property
    def quotas(self) -> Quotas:
        """What sets and reads quotas."""
        return Quotas(self.xfs_quota)

    def use_workspace(self, source: str, user: str, quota: int | None) -> bool:
        """A member's server is about to get it; whether it is new to us.

        Raises WorkspaceBusy while an admin has it.

        The server has its lease by now: whoever claims the workspace meanwhile sees that.
        """
        now = self.clock()
        with self.store.write() as connection:
            known = workspaces.find(connection, source, lock=True)
            if known and known.busy:
                raise WorkspaceBusy(what=known.busy)
            fresh = known is not None and abs(now - known.seen_at) < SEEN_EVERY
            if known and fresh and (known.user, known.quota) == (user, quota):
                return False
            made = Workspace(source=source, user=user, seen_at=now, quota=quota)
            workspaces.put(connection, made)
            return known is None

    def keep_quota(self, source: str, quota: int | None) -> None:
        """Have the file system keep a directory's quota in bytes; None takes it away.

        Raises QuotaUnavailable.
        """
        with self.store.read() as connection:
            project = workspaces.project_of(connection, source)
        if not quota:
            if project is not None:
                self.quotas.clear(source, project)
            return
        if project is None:
            with self.store.write() as connection:
                project = workspaces.give_project(connection, source)
        self.quotas.set(source, project, quota)

    def use_of(self, source: str, quota: int | None, patience: float = GLANCE) -> Use | None:
        """What a directory holds: as the file system counts, else as a quick look does."""
        if not source.startswith("/"):
            return None
        project = self.store.run(lambda c: workspaces.project_of(c, source))
        return self._use_of(source, quota, project, patience)

    def files_of(self, user: str) -> list[Held]:
        """A member's workspaces with what they hold."""
        return self.held_in(self.workspaces_of(user))

    def workspaces_of(self, user: str) -> list[tuple[Workspace, int | None]]:
        """Return a member's workspaces, each with its project at the file system, if it has one."""
        with self.store.read() as connection:
            found = workspaces.of_user(connection, user)
            return [(each, workspaces.project_of(connection, each.source)) for each in found]

    def held_in(self, some: Iterable[tuple[Workspace, int | None]]) -> list[Held]:
        """Return what workspaces hold. Asks the file system, so call it outside transactions."""
        return [
            Held(each, self._use_of(each.source, each.quota, project, GLANCE))
            for each, project in some
        ]

    def _use_of(
        self, source: str, quota: int | None, project: int | None, patience: float
    ) -> Use | None:
        if not source.startswith("/"):
            return None
        if quota and project is not None:
            try:
                found = self.quotas.use(source, project)
                return Use(found.used, quota)
            except QuotaUnavailable as error:
                self.log.debug("%s", error.message)
        used = measure(source, patience)
        return None if used is None else Use(used, quota or None)

    def workspaces(self) -> list[Workspace]:
        """Every workspace that a server ever got."""
        return list(self.store.run(workspaces.every))

    def claim_workspace(self, source: str, what: str, *, user: str = "") -> Workspace:
        """Keep servers away from a workspace while something is done with it.

        ``what`` is said to a member who starts meanwhile; ``user``: whose it will be when it is
        not known yet. Raises WorkspaceBusy when a server of theirs runs, or somebody else
        claimed it, and UnknownWorkspace.
        """
        with self.store.write() as connection:
            known = workspaces.find(connection, source, lock=True)
            if known is None and not user:
                raise UnknownWorkspace(name=source)
            known = known or Workspace(source=source, user=user, seen_at=self.clock())
            if known.busy:
                raise WorkspaceBusy(_in_hand(known))
            running = [x for x in leases.open_leases(connection) if x.server.user == known.user]
            if running:
                raise WorkspaceBusy(
                    f"{known.source} belongs to {known.user}, whose server runs (lease "
                    f"{running[0].id}). Stop it first: nothing was changed."
                )
            claimed = replace(known, busy=what)
            workspaces.put(connection, claimed)
            return claimed

    def free_workspace(self, source: str) -> bool:
        """Let servers have it again. False when nobody had claimed it."""
        with self.store.write() as connection:
            known = workspaces.find(connection, source, lock=True)
            if known is None or not known.busy:
                return False
            workspaces.put(connection, replace(known, busy=""))
            return True

    def note_workspace(self, source: str, action: str, *, actor: str, detail: str = "") -> None:
        """Write in the audit trail what was done with a workspace; one that is deleted is
        forgotten."""
        with self.store.write() as connection:
            if action == "delete workspace":
                workspaces.remove(connection, source)
            closures.note(
                connection,
                at=self.clock(),
                actor=actor,
                action=action,
                subject=source,
                detail=detail,
            )


def _in_hand(some: Workspace) -> str:
    return (
        f"{some.source} is in hand already: {some.busy}. If whoever did that was killed, say "
        f"`gpuspawner workspaces free {some.source}` and try again."
    )
