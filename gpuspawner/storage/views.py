"""Shared folders as pages and JSON, and all workspaces as a page for admins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from tornado import web

from ..core.errors import FolderRefused, GPUSpawnerError, UnknownFolder, UnknownWorkspace
from ..db.audit_log import AuditEntry
from ..leases.models import Lease
from ..services import Services
from ..web import view_models
from ..web.api import ALL, Action, APIHandler, ChangingAPI, each_action, operation, refusals
from ..web.base import ServiceHandler
from ..web.fields import one_of, text_of
from ..web.pages import FormPage
from . import schemas
from .quotas import QuotaUse
from .repository import Folder, Workspace
from .rules import LONGEST
from .service import MeasuredSize


class FoldersPage(FormPage):
    """The member's folders and invitations, and the form for a new folder."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        await self.show_folders()

    async def show_folders(self, refusal: GPUSpawnerError | None = None, typed: str = "") -> None:
        """Send the page; ``typed`` is a refused name."""
        files, had, offered = await self.read(view_models.files_of, self.services, self.user)
        everybody = await self.read(self.services.shared_folders.all_folders) if self.admin else ()
        self.show(
            "folders.html",
            now=self.services.clock(),
            files=files,
            had=had,
            offered=offered,
            others=[f for f in everybody if f.owner != self.user or f.deleted_at or f.left_at],
            done=self.get_query_argument("done", ""),
            refusal=refusal,
            typed=typed,
            longest=LONGEST,
            xsrf=self.xsrf,
        )

    @web.authenticated
    async def post(self) -> None:
        """Create a folder."""
        name = self.typed(schemas.NewFolderBody).name[:200]
        try:
            make_folder = self.services.shared_folders.make_folder
            await self.services.run(make_folder, name, actor=self.user)
        except GPUSpawnerError as refusal:
            await self.show_folders(refusal, name)
            return
        self.go("folders?done=made")


class FolderPage(FoldersPage):
    """The form for one change of a folder."""

    async def get(self, folder_id: str, action: str) -> None:
        """Redirect to the folders."""
        self.go("folders")

    @web.authenticated
    async def post(self, folder_id: str, action: str) -> None:
        """Make the change; some changes need a confirmation first."""
        try:
            folder = await self.services.read(visible, self, folder_id)
            body = FOLDER_ACTIONS[action].body
            sent = self.typed(body) if body else None
            if action in ("leave", "hand-on", "delete", "uninvite") and not self.confirmed:
                self._ask(folder, action, sent)
                return
            await self.services.run(change_of(self, folder, action, sent))
        except GPUSpawnerError as refusal:
            await self.show_folders(refusal)
            return
        self.go(f"folders?done={action}")

    def _ask(self, folder: Folder, action: str, sent: Any) -> None:
        fields = {"member": getattr(sent, "member", "")[:255]}
        if action == "delete":
            fields["name"] = sent.name
            if sent.name != folder.name:
                raise FolderRefused(why=f"to delete it, write its name, {folder.name}")
        self.confirm(
            "folder",
            action=f"folders/{folder.id}/{action}",
            back="folders",
            fields=fields,
            change=action,
            folder=folder,
            member=fields["member"],
        )


def visible(handler: ServiceHandler, folder_id: str) -> Folder:
    """Return a folder that the user may see. Raises UnknownFolder."""
    folder = handler.services.shared_folders.folder(folder_id)
    mine = folder.owner == handler.user or folder.invited(handler.user)
    if not handler.admin and (not mine or folder.deleted_at):
        raise UnknownFolder(folder=folder_id)
    return folder


def change_of(
    handler: ServiceHandler, folder: Folder, action: str, sent: Any
) -> Callable[[], object]:
    """Return a function that performs an action; ``sent`` is the body that the action needs."""
    shared, actor = handler.services.shared_folders, handler.user
    # Admins act as the owners of other members' folders.
    as_admin = handler.admin and (folder.owner != actor or folder.left_at is not None)
    owner: dict[str, Any] = {"actor": actor, "admin": as_admin}
    match action:
        case "invite":
            return partial(shared.invite, folder.id, sent.member, write=sent.write, actor=actor)
        case "accept":
            return partial(shared.accept, folder.id, actor=actor)
        case "leave":
            return partial(shared.leave, folder.id, actor=actor)
        case "uninvite":
            return partial(shared.uninvite, folder.id, sent.member, actor=actor)
        case "hand-on":
            return partial(shared.hand_on, folder.id, sent.member, **owner)
        case "delete":
            return partial(shared.delete_folder, folder.id, sent.name, **owner)
        case _:
            handler.need_admin()
            return partial(shared.bring_back, folder.id, actor=actor)


ID = "([0-9a-f]{16})"
ACTIONS = "(invite|accept|leave|uninvite|hand-on|delete|restore)"

FOLDER_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("folders", FoldersPage),
    (f"folders/{ID}/{ACTIONS}", FolderPage),
]


FOLDER_ACTIONS = {
    "invite": Action("Share a folder with a member.", schemas.InvitationBody),
    "accept": Action("Accept an invitation: my next server has the folder."),
    "leave": Action("Leave a folder, or decline an invitation."),
    "uninvite": Action("Stop sharing a folder with a member.", schemas.FolderMemberBody),
    "hand-on": Action("Make another member a folder's owner.", schemas.FolderMemberBody),
    "delete": Action(
        "Delete a folder for everybody; its name confirms it.", schemas.FolderNameBody
    ),
    "restore": Action("Restore a deleted folder, for admins."),
}


class FoldersAPI(ChangingAPI):
    """Shared folders as JSON, and a new one."""

    @operation("folders", schemas.FoldersAnswer, ALL)
    @web.authenticated
    async def get(self) -> None:
        """List my folders and invitations. Admins get everybody's with ``all=1``."""
        of_all = one_of(self.get_query_argument("all", "0"), "all", ("0", "1")) == "1"
        if of_all:
            self.need_admin()
        had, offered = await self.read(view_models.folders_of, self.services, self.user)
        called = {some.folder.id: some.called for some in had}
        found = [some.folder for some in (*had, *offered)]
        if of_all:
            found = list(await self.read(self.services.shared_folders.all_folders))
        told = [folder_answer(f, self.user, called.get(f.id, "")) for f in found]
        self.answer(schemas.FoldersAnswer, as_of=self.services.clock(), folders=told)

    @operation("folders", schemas.FolderAnswer, name="makeFolder", body=schemas.NewFolderBody)
    @web.authenticated
    async def post(self) -> None:
        """Create a shared folder."""
        name = self.sent(schemas.NewFolderBody).name
        made = await self.change(self.services.shared_folders.make_folder, name)
        await answer_with(self, made.id)


class FolderAPI(ChangingAPI):
    """The API operations that change a folder."""

    @each_action("folders/{folder}", FOLDER_ACTIONS, schemas.FolderAnswer, "{}Folder")
    @web.authenticated
    async def post(self, folder_id: str, action: str) -> None:
        """Make the change and answer with the folder."""
        if action == "restore":
            self.need_admin()
        body = FOLDER_ACTIONS[action].body
        sent = self.sent(body) if body else None
        with refusals():
            folder = await self.services.read(visible, self, folder_id)
            await self.services.run(change_of(self, folder, action, sent))
        await answer_with(self, folder_id)


async def answer_with(handler: APIHandler, folder_id: str) -> None:
    """Send a folder's current state."""
    mounts = await handler.read(handler.services.shared_folders.folder_mounts, handler.user)
    called = {mount.folder_id: mount.name for mount in mounts}
    folder = await handler.read(handler.services.shared_folders.folder, folder_id)
    handler.finish(folder_answer(folder, handler.user, called.get(folder_id, "")).as_json())


def folder_answer(folder: Folder, user: str, called: str) -> schemas.FolderAnswer:
    """Return a folder as this user sees it."""
    mine = folder.owner == user and folder.left_at is None
    knows = mine or folder.invited(user) is not None
    write = knows and folder.writes(user)
    return schemas.FolderAnswer.of(folder, mine=mine, mounted_as=called or None, write=write)


class ListedWorkspace(NamedTuple):
    """A workspace in the admins' list."""

    workspace: Workspace
    size: MeasuredSize | None
    """None: it has not been measured yet."""
    lease: Lease | None
    """Of a running server of its member."""
    is_former: bool
    """True if its owner is no member any more."""
    archive: AuditEntry | None
    """The newest one."""

    @property
    def used(self) -> int | None:
        """Bytes; None if unknown."""
        return self.size.used if self.size else None

    @property
    def is_full(self) -> bool:
        """True if almost nothing of its quota is left."""
        return self.used is not None and QuotaUse(self.used, self.workspace.quota).full


def list_workspaces(services: Services) -> list[ListedWorkspace]:
    """Return every workspace that a server ever got, largest first."""
    with services.store.view():
        found, archives = services.storage.workspaces(), services.storage.last_archives()
        running = {lease.server.user: lease for lease in services.leases.open_leases()}
        former = {each.user for each in services.members.former_members()}
    sizes = services.storage.sizes
    listed = [
        ListedWorkspace(
            workspace=some,
            size=sizes.get(some.source),
            lease=running.get(some.user),
            is_former=some.user in former,
            archive=archives.get(some.source),
        )
        for some in found
    ]
    return sorted(listed, key=lambda some: -(some.used or 0))


WORKSPACES = 200
"""Workspaces on the page; the search finds the others."""

LONGEST_SOURCE = 4096
"""Characters of a directory's path."""


class WorkspacesPage(FormPage):
    """Every member's workspace with its size, last use and last archive, for admins."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        self.need_admin()
        await self.show_workspaces()

    async def show_workspaces(self, refusal: GPUSpawnerError | None = None) -> None:
        """Send the page; ``refusal`` is why nothing was unlocked."""
        search = text_of(self.get_query_argument("search", ""), "search", LONGEST_SOURCE).lower()
        everything = await self.read(list_workspaces, self.services)
        found = [
            some
            for some in everything
            if search in some.workspace.user.lower() or search in some.workspace.source.lower()
        ]
        self.show(
            "workspaces.html",
            now=self.services.clock(),
            search=search,
            found=found[:WORKSPACES],
            count=len(found),
            used=sum(some.used or 0 for some in found),
            done=self.get_query_argument("done", ""),
            refusal=refusal,
            xsrf=self.xsrf,
        )


class UnlockWorkspacePage(WorkspacesPage):
    """The form that unlocks a workspace, after a confirmation."""

    async def get(self) -> None:
        """Redirect to the workspaces."""
        self.go("workspaces")

    @web.authenticated
    async def post(self) -> None:
        """Ask for a confirmation, or unlock the workspace."""
        self.need_admin()
        source, storage = self.field("workspace"), self.services.storage
        known = {some.source: some for some in await self.read(storage.workspaces)}
        if (some := known.get(source)) is None:
            await self.show_workspaces(UnknownWorkspace(name=source[:300]))
        elif some.busy and not self.confirmed:
            self.confirm(
                "unlock",
                action="workspaces/unlock",
                back="workspaces",
                fields={"workspace": source},
                workspace=some,
            )
        else:
            done = await self.services.run(storage.free_workspace, source, actor=self.actor)
            self.go(f"workspaces?done={'unlocked' if done else 'nothing'}")


WORKSPACE_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("workspaces", WorkspacesPage),
    ("workspaces/unlock", UnlockWorkspacePage),
]

FOLDER_API_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("api/folders", FoldersAPI),
    (f"api/folders/{ID}/{ACTIONS}", FolderAPI),
]
