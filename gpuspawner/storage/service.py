"""Members' workspaces, and the folders that they share."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import NamedTuple

import sqlalchemy as sa
from traitlets import Integer, List, Unicode
from traitlets.config import LoggingConfigurable

from ..core.errors import (
    ArchiveCancelled,
    FolderRefused,
    NotAllowed,
    QuotaUnavailable,
    UnknownFolder,
    UnknownWorkspace,
    WorkspaceBusy,
)
from ..db import audit_log
from ..db.audit_log import AuditEntry
from ..db.engine import Store
from ..leases import repository as leases_repository
from ..ledger import repository as ledger_repository
from ..ledger.models import member_account
from . import repository
from .quotas import Quotas, QuotaUse, measure
from .repository import Folder, FolderMember, Workspace
from .rules import check_name, is_same, told_apart

SEEN_EVERY = timedelta(hours=1)
"""How exactly the last use of a workspace is recorded."""

FOLDERS_PER_MEMBER = 10
"""The most shared folders of a member's own at once: each is a mount in every server of theirs."""

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


LONGEST_USER = 255
"""Maximum characters of a member's name at the Hub."""

MOST_MEMBERS = 500
"""How many members one folder can be shared with."""


@dataclass(frozen=True, slots=True)
class FolderMount:
    """A shared folder as a member's server gets it."""

    source: str
    """A directory of the engine's machine, or a volume, made from the folder's id."""
    name: str
    """Its name below ``~/shared``."""
    write: bool
    folder_id: str


@dataclass(eq=False)
class SharedFolderService:
    """Folders that members share. ``actor`` is who asks."""

    store: Store
    clock: Callable[[], datetime]
    settings: GPUFolders

    def folders(self, user: str) -> Sequence[Folder]:
        """Return the folders that a member owns or was invited to, oldest first."""
        return self.store.run(lambda connection: repository.folders_of_user(connection, user))

    def all_folders(self) -> Sequence[Folder]:
        """Return everybody's folders, including deleted ones."""
        return self.store.run(repository.all_folders)

    def folder_people(self) -> list[str]:
        """Return everybody who owns a folder or was invited to one, except owners who left."""
        people = set[str]()
        for folder in self.all_folders():
            people.update(some.user for some in folder.members)
            if folder.left_at is None:
                people.add(folder.owner)
        return sorted(people)

    def folder(self, folder_id: str) -> Folder:
        """Return a folder, whoever owns it. Raises UnknownFolder."""
        return self.store.run(lambda connection: repository.get_folder(connection, folder_id))

    def folder_place(self, folder_id: str) -> str:
        """Return where the files of a folder are."""
        return self.settings.source.replace("{id}", folder_id)

    def folder_mounts(self, user: str) -> list[FolderMount]:
        """Return what a member's next server gets, longest held first."""
        if not self.settings.source:
            return []
        had = ((folder.since(user), folder) for folder in self.folders(user))
        held = [(since, folder.id, folder) for since, folder in had if since is not None]
        mine = [folder for _, _, folder in sorted(held, key=lambda each: each[:2])]
        called = told_apart((folder.id, folder.name) for folder in mine)
        return [
            FolderMount(self.folder_place(f.id), called[f.id], f.writes(user), f.id) for f in mine
        ]

    # What members do.

    def make_folder(self, name: str, *, actor: str) -> Folder:
        """Create an empty folder. Raises InvalidRequest, or FolderRefused if they have too many."""
        name = check_name(name)
        if not self.settings.source or "{id}" not in self.settings.source:
            raise FolderRefused(
                "Members cannot make shared folders on this hub. Ask your admin, who can set "
                "c.GPUFolders.source."
            )
        made = Folder(id=secrets.token_hex(8), name=name, owner=actor, made_at=self.clock())
        with self.store.write() as connection:
            self._must_be_new_folder(connection, name, actor)
            repository.insert_folder(connection, made)
            self._note_folder(connection, made, "make folder", actor)
        return made

    def invite(self, folder_id: str, user: str, *, write: bool, actor: str) -> Folder:
        """Offer one's own folder to another member, to read or also to write.

        A member who has accepted keeps it, with the new permission. Raises UnknownFolder,
        NotAllowed if the actor does not own it, and FolderRefused.
        """
        user, now = user.strip(), self.clock()
        with self.store.write() as connection:
            folder = self._own_folder(connection, folder_id, actor)
            if user == folder.owner:
                raise FolderRefused(why=f"{user} owns it, and has it already")
            _must_have_signed_in(connection, user)
            before = folder.invited(user)
            if before and before.write == write:
                return folder
            if not before and len(folder.members) >= MOST_MEMBERS:
                raise FolderRefused(
                    why=f"it is already shared with {MOST_MEMBERS} members, the maximum"
                )
            accepted = before.accepted_at if before else None
            repository.invite_to_folder(
                connection, folder_id, FolderMember(user, write, actor, now, accepted)
            )
            how = "read and write" if write else "read"
            self._note_folder(connection, folder, "invite", actor, f"{user}, to {how}")
            return repository.get_folder(connection, folder_id)

    def accept(self, folder_id: str, *, actor: str) -> Folder:
        """Accept an offer: the next server gets the folder. Raises UnknownFolder."""
        with self.store.write() as connection:
            folder = self._seen_folder(connection, folder_id, actor)
            mine = folder.invited(actor)
            if mine is None or mine.accepted_at is not None:
                return folder  # they already have it
            repository.invite_to_folder(
                connection, folder_id, replace(mine, accepted_at=self.clock())
            )
            self._note_folder(connection, folder, "accept folder", actor)
            return repository.get_folder(connection, folder_id)

    def leave(self, folder_id: str, *, actor: str) -> None:
        """Give up or decline a folder of somebody else.

        Raises UnknownFolder, and FolderRefused for the owner.
        """
        with self.store.write() as connection:
            folder = self._seen_folder(connection, folder_id, actor)
            if folder.owner == actor:
                raise FolderRefused(
                    why="you own it: hand it on to a member of it first, or delete it"
                )
            repository.uninvite_from_folder(connection, folder_id, actor)
            self._note_folder(connection, folder, "leave folder", actor)

    def uninvite(self, folder_id: str, user: str, *, actor: str) -> Folder:
        """Stop sharing one's own folder with somebody, from their next server on.

        Raises UnknownFolder, NotAllowed and FolderRefused.
        """
        with self.store.write() as connection:
            folder = self._own_folder(connection, folder_id, actor)
            if not repository.uninvite_from_folder(connection, folder_id, user):
                raise FolderRefused(why=f"it is not shared with {user[:60]!r}")
            self._note_folder(connection, folder, "uninvite", actor, user)
            return repository.get_folder(connection, folder_id)

    def hand_on(self, folder_id: str, user: str, *, actor: str, admin: bool = False) -> Folder:
        """Make somebody else the owner: a member who accepted it or, for an admin, anybody.

        The previous owner keeps it as a member, unless they left the hub. Raises UnknownFolder,
        NotAllowed and FolderRefused.
        """
        user = user.strip()
        with self.store.write() as connection:
            folder = self._own_folder(connection, folder_id, actor, admin=admin)
            has_it = user == folder.owner or folder.since(user) is not None
            if not admin and not has_it:
                raise FolderRefused(
                    why=f"{user[:60]!r} is not a member of it: invite them, and hand it on when "
                    "they have accepted"
                )
            _must_have_signed_in(connection, user)
            if user == folder.owner and folder.left_at is None:
                return folder
            repository.uninvite_from_folder(connection, folder_id, user)
            if folder.left_at is None:
                now = self.clock()
                before = FolderMember(folder.owner, True, actor, now, now)
                repository.invite_to_folder(connection, folder_id, before)
            repository.update_folder(connection, folder_id, owner=user, left_at=None)
            self._note_folder(
                connection, folder, "hand on folder", actor, f"{folder.owner} to {user}"
            )
            return repository.get_folder(connection, folder_id)

    def delete_folder(
        self, folder_id: str, name: str, *, actor: str, admin: bool = False
    ) -> Folder:
        """Take a folder away from everybody; ``name`` repeats its name as a confirmation.

        The files stay until an admin removes them for good, and an admin can restore it. Raises
        UnknownFolder, NotAllowed and FolderRefused.
        """
        with self.store.write() as connection:
            folder = self._own_folder(connection, folder_id, actor, admin=admin)
            if name.strip() != folder.name:
                raise FolderRefused(
                    why=f"to delete it, write its name, {folder.name}, and not {name[:60]!r}"
                )
            repository.update_folder(connection, folder_id, deleted_at=self.clock())
            self._note_folder(connection, folder, "delete folder", actor)
            return repository.get_folder(connection, folder_id)

    # What admins do, and what the Hub reports.

    def bring_back(self, folder_id: str, *, actor: str) -> Folder:
        """Undo a deletion. Raises UnknownFolder, and FolderRefused if it is not deleted."""
        with self.store.write() as connection:
            folder = repository.get_folder(connection, folder_id, lock=True)
            if folder.deleted_at is None:
                raise FolderRefused(why="it is not deleted")
            repository.update_folder(connection, folder_id, deleted_at=None)
            self._note_folder(connection, folder, "bring back folder", actor)
            return repository.get_folder(connection, folder_id)

    def forget_folder(self, folder_id: str, *, actor: str) -> None:
        """Forget a deleted folder whose files are gone for good. Raises FolderRefused."""
        with self.store.write() as connection:
            folder = repository.get_folder(connection, folder_id, lock=True)
            if folder.deleted_at is None:
                raise FolderRefused(why="it is not deleted: it may contain files")
            repository.remove_folder(connection, folder_id)
            self._note_folder(connection, folder, "remove folder", actor)

    def member_left(self, user: str, *, actor: str = "gpuspawner") -> int:
        """Record that a member was removed at the Hub, and end what was shared with them.

        Folders that they own wait for an admin to give them to somebody else; a later member with
        the same name gets none of it. Returns how many folders were affected.
        """
        now, touched = self.clock(), 0
        with self.store.write() as connection:
            for folder in repository.all_folders(connection):
                if folder.owner == user and folder.left_at is None:
                    repository.update_folder(connection, folder.id, left_at=now)
                    self._note_folder(connection, folder, "owner left", actor, user)
                    touched += 1
                elif repository.uninvite_from_folder(connection, folder.id, user):
                    self._note_folder(connection, folder, "member left", actor, user)
                    touched += 1
        return touched

    # Helpers.

    def _seen_folder(self, connection: sa.Connection, folder_id: str, user: str) -> Folder:
        """Return a folder that this member may know of. Raises UnknownFolder for any other."""
        folder = repository.get_folder(connection, folder_id, lock=True)
        mine = folder.owner == user and folder.left_at is None
        if folder.deleted_at is not None or not (mine or folder.invited(user)):
            raise UnknownFolder(folder=folder_id)
        return folder

    def _own_folder(
        self, connection: sa.Connection, folder_id: str, user: str, *, admin: bool = False
    ) -> Folder:
        """Return a folder that this member may change. Raises UnknownFolder or NotAllowed."""
        if admin:
            folder = repository.get_folder(connection, folder_id, lock=True)
            if folder.deleted_at is not None:
                raise FolderRefused(why="it is deleted: bring it back first")
            return folder
        folder = self._seen_folder(connection, folder_id, user)
        if folder.owner != user:
            raise NotAllowed(
                f"The folder {folder.name} belongs to {folder.owner}: only they can change it."
            )
        return folder

    def _must_be_new_folder(self, connection: sa.Connection, name: str, owner: str) -> None:
        mine = [f for f in repository.folders_of_user(connection, owner) if f.owner == owner]
        if any(is_same(folder.name, name) for folder in mine):
            raise FolderRefused(why=f"you have a folder named {name} already")
        if len(mine) >= FOLDERS_PER_MEMBER:
            raise FolderRefused(
                why=f"you have made {len(mine)}, and {FOLDERS_PER_MEMBER} is the most: delete one "
                "that you do not need"
            )

    def _note_folder(
        self, connection: sa.Connection, folder: Folder, action: str, actor: str, detail: str = ""
    ) -> None:
        at, subject = self.clock(), f"folder {folder.id} ({folder.name})"
        audit_log.note(
            connection, at=at, actor=actor, action=action, subject=subject, detail=detail
        )


def _must_have_signed_in(connection: sa.Connection, user: str) -> None:
    known = user.isprintable() and 0 < len(user) <= LONGEST_USER
    if not known or ledger_repository.find_account(connection, member_account(user)) is None:
        raise FolderRefused(
            why=f"nobody named {user[:60]!r} has signed in on this hub; write their name as they "
            "sign in"
        )
