"""Shared folders as JSON."""

from __future__ import annotations

from functools import partial
from typing import Any

from tornado import web

from ..errors import GPUSpawnerError, InvalidRequest, UnknownFolder
from ..store.folders import Folder
from . import files
from .api import APIHandler, instant
from .api_queue import ChangingAPI
from .base import Handler
from .fields import one_of
from .folders import ACTIONS, ID, work_of

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
        had, offered = await self.read(files.folders_of, self.broker, self.user)
        called = {some.folder.id: some.called for some in had}
        found = [some.folder for some in (*had, *offered)]
        if everybody:
            found = list(await self.read(self.broker.all_folders))
        self.answer(
            {
                "as_of": instant(self.broker.clock()),
                "folders": [folder_json(f, self.user, called.get(f.id, "")) for f in found],
            }
        )

    @web.authenticated
    async def post(self) -> None:
        name = _text(self.sent("name"), "name", 1000)
        made = await self.read(partial(self.broker.make_folder, name, actor=self.user))
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
        folder = self.broker.folder(folder_id)
        if not self.admin and folder.owner != self.user and not folder.invited(self.user):
            raise UnknownFolder(folder=folder_id)
        return folder


async def answer_with(handler: APIHandler, folder_id: str) -> None:
    """Answer with a folder as it is now."""
    mounts = await handler.read(handler.broker.folder_mounts, handler.user)
    called = {mount.folder_id: mount.name for mount in mounts}
    folder = await handler.read(handler.broker.folder, folder_id)
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


HANDLERS: list[tuple[str, type[Handler]]] = [
    ("api/folders", FoldersAPI),
    (f"api/folders/{ID}/{ACTIONS}", FolderAPI),
]
