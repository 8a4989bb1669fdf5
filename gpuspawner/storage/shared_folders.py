"""Folders that members share, and the names that they give them."""

from __future__ import annotations

import secrets
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import sqlalchemy as sa

from ..core.errors import FolderRefused, InvalidRequest, NotAllowed, UnknownFolder
from ..db import audit_log
from ..db.engine import Store
from ..ledger import repository as ledger_repository
from ..ledger.models import member_account
from . import repository
from .repository import Folder, FolderMember
from .service import GPUFolders

FOLDERS_PER_MEMBER = 10
"""The most shared folders of a member's own at once: each is a mount in every server of theirs."""

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
        """Return any member's folder. Raises UnknownFolder."""
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
            raise FolderRefused("Members cannot make shared folders on this hub. Ask your admin.")
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


# Names: in any script, and never a path.

LONGEST = 60
"""Characters: encoded as UTF-8 with a suffix for equal names, it is still a valid file name."""

_SIGNS = " _-.,()+&'"
_JOINERS = "\u200c\u200d"
"""Joiners that Persian and the scripts of India need."""


def check_name(text: object, field: str = "name") -> str:
    """Return a valid folder name. Raises InvalidRequest saying what is wrong with it."""
    if not isinstance(text, str):
        raise InvalidRequest(f"The field {field!r} is text.", field=field)
    name = unicodedata.normalize("NFC", text).strip(" ")
    if not name:
        raise InvalidRequest(f"The field {field!r} is empty: give the folder a name.", field=field)
    longest = max(len(name), len(text))
    if longest > LONGEST:
        raise InvalidRequest(
            f"The field {field!r} has {longest} characters; the maximum is {LONGEST}.", field=field
        )
    wrong = next((character for character in name if not _may_stand(character)), "")
    if wrong or not _may_begin(name[0]) or name[-1] in _JOINERS:
        what = f"{wrong!r} may not be in it" if wrong else "it begins with a letter or a digit"
        raise InvalidRequest(
            f"The field {field!r} is not a name for a folder: {what}. Letters and digits of any "
            f"script are fine, and {' '.join(_SIGNS.strip())} between them.",
            field=field,
        )
    return name


def told_apart(folders: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return each folder's name inside a server, by id; the first of equal names keeps its name.

    The folders are pairs of id and name.
    """
    taken: set[str] = set()
    called = {}
    for folder_id, name in folders:
        labels = (name, f"{name} ({folder_id[:8]})", folder_id)
        label = next((some for some in labels if _same(some) not in taken), folder_id)
        taken.add(_same(label))
        called[folder_id] = label
    return called


def is_same(one: str, other: str) -> bool:
    """Return True if people would mistake two names for the same."""
    return _same(one) == _same(other)


def _same(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def _may_stand(character: str) -> bool:
    is_mark = unicodedata.category(character)[0] == "M"
    return _may_begin(character) or is_mark or character in _SIGNS + _JOINERS


def _may_begin(character: str) -> bool:
    return unicodedata.category(character)[0] in "LN" or unicodedata.category(character) == "So"
