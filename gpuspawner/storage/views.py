"""Pages and JSON of shared folders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tornado import web

from ..core.errors import FolderRefused, GPUSpawnerError, InvalidRequest, UnknownFolder
from ..web import view_models
from ..web.api import APIHandler, ChangingAPI, instant
from ..web.base import ServiceHandler
from ..web.fields import one_of
from ..web.pages import FormPage
from .repository import Folder
from .rules import LONGEST

DONE = {
    "made": "The folder is made: your next server has it.",
    "invite": "They are invited.",
    "accept": "The folder is yours to use: your next server has it.",
    "leave": "You have left the folder.",
    "uninvite": "They have it no more, from their next server on.",
    "hand-on": "The folder has a new owner.",
    "delete": "The folder is deleted. An admin can bring it back.",
    "restore": "The folder is back.",
}


class FoldersPage(FormPage):
    """My folders and invitations, and the form that makes one."""

    @web.authenticated
    async def get(self) -> None:
        await self.show_folders()

    async def show_folders(self, refusal: GPUSpawnerError | None = None, typed: str = "") -> None:
        """Send the page; ``typed`` is the name that was refused."""
        if refusal:
            self.set_status(refusal.status_code)
        had, offered = await self.read(view_models.folders_of, self.broker, self.user)
        everybody = await self.read(self.broker.shared_folders.all_folders) if self.admin else ()
        self.show(
            "folders.html",
            user=self.user,
            admin=self.admin,
            now=self.broker.clock(),
            had=had,
            offered=offered,
            others=[f for f in everybody if f.owner != self.user or f.deleted_at or f.left_at],
            done=DONE.get(self.get_query_argument("done", ""), ""),
            error=refusal.message if refusal else "",
            typed=typed,
            longest=LONGEST,
            xsrf=self.xsrf,
        )

    @web.authenticated
    async def post(self) -> None:
        name = self.field("name")[:200]
        try:
            await self.broker.run(
                partial(self.broker.shared_folders.make_folder, name, actor=self.user)
            )
        except GPUSpawnerError as refusal:
            await self.show_folders(refusal, name)
            return
        self.go("folders?done=made")


class FolderPage(FoldersPage):
    """One change of one folder; what cannot be undone by oneself is asked once more."""

    async def get(self, folder_id: str, action: str) -> None:
        self.go("folders")

    @web.authenticated
    async def post(self, folder_id: str, action: str) -> None:
        try:
            folder = await self.broker.read(self._visible, folder_id)
            if action in ("leave", "hand-on", "delete", "uninvite") and not self.confirmed:
                self._ask(folder, action)
                return
            await self.broker.run(self._work(folder, action))
        except GPUSpawnerError as refusal:
            await self.show_folders(refusal)
            return
        self.go(f"folders?done={action}")

    def _visible(self, folder_id: str) -> Folder:
        """A folder that this member may know of. Raises UnknownFolder."""
        folder = self.broker.shared_folders.folder(folder_id)
        mine = folder.owner == self.user or folder.invited(self.user)
        if not self.admin and (not mine or folder.deleted_at):
            raise UnknownFolder(folder=folder_id)
        return folder

    def _work(self, folder: Folder, action: str) -> Callable[[], object]:
        return work_of(self, folder, action, self.field)

    def _ask(self, folder: Folder, action: str) -> None:
        member = self.field("member")[:255]
        facts = [("Folder", folder.name), ("Owner", folder.owner)]
        titles = {
            "leave": "Leave this folder?",
            "hand-on": f"Make {member or 'nobody'} its owner?",
            "delete": "Delete this folder?",
            "uninvite": f"Share it with {member or 'nobody'} no more?",
        }
        notes = {
            "leave": "The files stay with the others. Only its owner can invite you again.",
            "hand-on": "Only the owner invites members and deletes the folder.",
            "delete": f"Nobody has it any more from their next server on: {_count(folder)}. "
            "The files are kept until an admin removes them.",
            "uninvite": "A server of theirs that runs has it until it stops.",
        }
        fields = {"member": member}
        if action == "delete":
            fields["name"] = self.field("name")[:200]
            if fields["name"].strip() != folder.name:
                raise FolderRefused(why=f"to delete it, write its name, {folder.name}")
        self.ask(
            titles[action],
            facts,
            action=f"folders/{folder.id}/{action}",
            button={"leave": "Leave it", "delete": "Delete it"}.get(action, "Yes"),
            back="folders",
            fields=fields,
            note=notes[action],
            danger=action in ("delete", "leave"),
            here="folders",
        )


def work_of(
    handler: ServiceHandler, folder: Folder, action: str, field: Callable[[str], Any]
) -> Callable[[], object]:
    """What an action does, ready to be called; ``field`` has what was sent with it."""
    broker, actor = handler.broker, handler.user
    # Their own is theirs; of others' folders an admin does what an owner would.
    admin = handler.admin and (folder.owner != actor or folder.left_at is not None)
    match action:
        case "invite":
            write = field("write") in ("yes", True)
            return partial(
                broker.shared_folders.invite, folder.id, field("member"), write=write, actor=actor
            )
        case "accept":
            return partial(broker.shared_folders.accept, folder.id, actor=actor)
        case "leave":
            return partial(broker.shared_folders.leave, folder.id, actor=actor)
        case "uninvite":
            return partial(broker.shared_folders.uninvite, folder.id, field("member"), actor=actor)
        case "hand-on":
            return partial(
                broker.shared_folders.hand_on, folder.id, field("member"), actor=actor, admin=admin
            )
        case "delete":
            return partial(
                broker.shared_folders.delete_folder,
                folder.id,
                field("name"),
                actor=actor,
                admin=admin,
            )
        case _:
            handler.need_admin()
            return partial(broker.shared_folders.bring_back, folder.id, actor=actor)


def _count(folder: Folder) -> str:
    others = sum(some.accepted_at is not None for some in folder.members)
    return "nobody else has it" if not others else f"{others} other{'s' if others > 1 else ''}"


ID = "([0-9a-f]{16})"
ACTIONS = "(invite|accept|leave|uninvite|hand-on|delete|restore)"

FOLDER_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("folders", FoldersPage),
    (f"folders/{ID}/{ACTIONS}", FolderPage),
]


TAKES: dict[str, tuple[str, ...]] = {
    "invite": ("member", "write"),
    "uninvite": ("member",),
    "hand-on": ("member",),
    "delete": ("name",),
}
"""The fields that an action needs."""


class FoldersAPI(ChangingAPI):
    """My folders and invitations; with ``all=1`` everybody's, for admins."""

    @web.authenticated
    async def get(self) -> None:
        everybody = one_of(self.get_query_argument("all", "0"), "all", ("0", "1")) == "1"
        if everybody:
            self.need_admin()
        had, offered = await self.read(view_models.folders_of, self.broker, self.user)
        called = {some.folder.id: some.called for some in had}
        found = [some.folder for some in (*had, *offered)]
        if everybody:
            found = list(await self.read(self.broker.shared_folders.all_folders))
        self.answer(
            {
                "as_of": instant(self.broker.clock()),
                "folders": [folder_json(f, self.user, called.get(f.id, "")) for f in found],
            }
        )

    @web.authenticated
    async def post(self) -> None:
        name = _text(self.sent("name"), "name", 1000)
        made = await self.read(
            partial(self.broker.shared_folders.make_folder, name, actor=self.user)
        )
        await answer_with(self, made.id)


class FolderAPI(ChangingAPI):
    """One change of one folder."""

    @web.authenticated
    async def post(self, folder_id: str, action: str) -> None:
        if action == "restore":
            self.need_admin()
        wanted = TAKES.get(action, ())
        sent = self.sent(*wanted) if wanted else {}
        for name in wanted:
            if name == "write":
                if not isinstance(sent.get(name), bool):
                    raise _refused("The field 'write' is true or false.", name)
            else:
                _text(sent, name, 1000)
        try:
            folder = await self.broker.read(self._visible, folder_id)
            await self.broker.run(work_of(self, folder, action, sent.get))
        except GPUSpawnerError as error:
            raise web.HTTPError(error.status_code) from error
        await answer_with(self, folder_id)

    def _visible(self, folder_id: str) -> Folder:
        folder = self.broker.shared_folders.folder(folder_id)
        if not self.admin and folder.owner != self.user and not folder.invited(self.user):
            raise UnknownFolder(folder=folder_id)
        return folder


async def answer_with(handler: APIHandler, folder_id: str) -> None:
    """Answer with a folder as it is now."""
    mounts = await handler.read(handler.broker.shared_folders.folder_mounts, handler.user)
    called = {mount.folder_id: mount.name for mount in mounts}
    folder = await handler.read(handler.broker.shared_folders.folder, folder_id)
    handler.answer(folder_json(folder, handler.user, called.get(folder_id, "")))


def folder_json(folder: Folder, user: str, called: str) -> dict[str, Any]:
    """A folder as somebody sees it."""
    mine = folder.owner == user and folder.left_at is None
    knows = mine or folder.invited(user) is not None
    return {
        "id": folder.id,
        "name": folder.name,
        "owner": folder.owner,
        "owner_left_at": instant(folder.left_at),
        "made_at": instant(folder.made_at),
        "deleted_at": instant(folder.deleted_at),
        "mine": mine,
        "mounted_as": called or None,
        "write": knows and folder.writes(user),
        "members": [
            {
                "member": some.user,
                "write": some.write,
                "invited_by": some.invited_by,
                "invited_at": instant(some.invited_at),
                "accepted_at": instant(some.accepted_at),
            }
            for some in folder.members
        ],
    }


def _text(sent: dict[str, Any], name: str, most: int) -> str:
    """A text that has to be there. Raises HTTPError 400."""
    found = sent.get(name)
    if not isinstance(found, str) or not 0 < len(found) <= most:
        raise _refused(f"The field {name!r} is text, and is not empty.", name)
    return found


def _refused(sentence: str, field: str) -> web.HTTPError:
    error = web.HTTPError(400)
    error.__cause__ = InvalidRequest(sentence, field=field)
    return error


FOLDER_API_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("api/folders", FoldersAPI),
    (f"api/folders/{ID}/{ACTIONS}", FolderAPI),
]
