"""Shared folders as pages and JSON, and all workspaces as a page for admins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

from tornado import web

from ..core.errors import (
    FolderRefused,
    GPUSpawnerError,
    UnknownArchive,
    UnknownFolder,
    UnknownWorkspace,
)
from ..db.audit_log import AuditEntry
from ..leases.models import Lease
from ..services import Services
from ..web import view_models
from ..web.api import ALL, Action, APIHandler, ChangingAPI, each_action, operation, refusals
from ..web.base import ServiceHandler
from ..web.fields import one_of, text_of
from ..web.pages import FormPage
from ..web.schemas import Body
from . import schemas
from .quotas import QuotaUse
from .repository import Folder, Workspace
from .schemas import LONGEST_SOURCE
from .service import ARCHIVING, MeasuredSize
from .shared_folders import LONGEST


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


class WorkspacesPage(FormPage):
    """Every member's workspace with its size, last use and archives, for admins."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        self.need_admin()
        await self.show_workspaces()

    async def show_workspaces(self, refusal: GPUSpawnerError | None = None) -> None:
        """Send the page; ``refusal`` is why nothing was changed."""
        search = text_of(self.get_query_argument("search", ""), "search", LONGEST_SOURCE).lower()
        jobs = self.services.workspace_jobs
        everything = await self.read(list_workspaces, self.services)
        archives = await self.read(jobs.archives)
        found = [
            some
            for some in everything
            if search in some.workspace.user.lower() or search in some.workspace.source.lower()
        ]
        shown = await self.read(jobs.jobs)
        self.show(
            "workspaces.html",
            now=self.services.clock(),
            search=search,
            found=found[:WORKSPACES],
            count=len(found),
            used=sum(some.used or 0 for some in found),
            jobs=shown,
            in_hand={job.workspace for job in shown if job.is_open},
            archives=archives[:WORKSPACES],
            archive_count=len(archives),
            archive_size=sum(some.size for some in archives),
            folder=str(jobs.folder),
            done=self.get_query_argument("done", ""),
            refusal=refusal,
            xsrf=self.xsrf,
        )


class WorkspaceChangePage(WorkspacesPage):
    """The forms that archive, restore or unlock a workspace or cancel a job, each confirmed."""

    async def get(self, action: str) -> None:
        """Redirect to the workspaces."""
        self.go("workspaces")

    @web.authenticated
    async def post(self, action: str) -> None:
        """Ask for a confirmation, or make the change."""
        self.need_admin()
        try:
            if action == "restore" and not self.confirmed:
                await self._ask_what_to_restore()
                return
            sent: Any = self.typed(cast(type[Body], WORKSPACE_ACTIONS[action].body))
            if action != "restore" and await self._asks(action, sent.workspace):
                return
            changed = await self.services.run(workspace_change(self, action, sent))
        except GPUSpawnerError as refusal:
            if action == "restore" and self.confirmed:
                await self._ask_what_to_restore(refusal)
            else:
                await self.show_workspaces(refusal)
            return
        # Cancelling twice is no mistake.
        self.go(f"workspaces?done={action if changed or action == 'cancel' else 'nothing'}")

    async def _asks(self, action: str, source: str) -> bool:
        """Ask for a confirmation if one is needed. Raises UnknownWorkspace."""
        jobs = self.services.workspace_jobs
        some = await self.services.read(jobs.known, source)
        if some is None:
            raise UnknownWorkspace(name=source[:300])
        job = await self.services.read(jobs.open_job, source)
        # No question before what would be refused or change nothing.
        pointless = {"unlock": not some.busy, "cancel": job is None and some.busy != ARCHIVING}
        if self.confirmed or pointless.get(action):
            return False
        size = self.services.storage.sizes.get(source)
        self.confirm(
            action,
            action=f"workspaces/{action}",
            back="workspaces",
            fields={"workspace": source},
            workspace=some,
            job=job,
            used=size.used if size else None,
            folder=str(jobs.folder),
        )
        return True

    async def _ask_what_to_restore(self, refusal: GPUSpawnerError | None = None) -> None:
        """Ask into which workspace an archive is put. Raises UnknownArchive."""
        jobs = self.services.workspace_jobs
        name = self.field("archive")
        try:
            archive = await self.services.read(jobs.find_archive, name)
        except UnknownArchive as error:
            await self.show_workspaces(refusal or error)
            return
        workspace = self.field("workspace")[:LONGEST_SOURCE] or archive.workspace
        known = await self.services.read(jobs.known, workspace)
        self.confirm(
            "restore",
            action="workspaces/restore",
            back="workspaces",
            fields={"archive": name},
            archive=archive,
            workspace=workspace,
            known=known,
            member=self.field("member")[:255],
            now=self.services.clock(),
            refusal=refusal,
        )


WORKSPACE_ACTIONS: dict[str, Action] = {
    "archive": Action("Archive a workspace in the background.", schemas.WorkspaceBody),
    "restore": Action(
        "Put an archive into an empty workspace, in the background.", schemas.RestoreBody
    ),
    "cancel": Action(
        "Cancel a workspace's waiting job or running archive.",
        schemas.WorkspaceBody,
    ),
    "unlock": Action(
        "Unlock a workspace that an interrupted command left locked.", schemas.WorkspaceBody
    ),
}


_AT_ONCE = {name: WORKSPACE_ACTIONS[name] for name in ("cancel", "unlock")}
_IN_BACKGROUND = {name: WORKSPACE_ACTIONS[name] for name in ("archive", "restore")}


def workspace_change(handler: ServiceHandler, action: str, sent: Any) -> Callable[[], Any]:
    """Return a function that performs an action; ``sent`` is the body that the action needs."""
    jobs, actor = handler.services.workspace_jobs, handler.actor
    match action:
        case "archive":
            return partial(jobs.start_archive, sent.workspace, actor=actor)
        case "restore":
            return partial(
                jobs.start_restore, sent.archive, sent.workspace, member=sent.member, actor=actor
            )
        case "cancel":
            return partial(jobs.cancel, sent.workspace, actor=actor)
        case _:
            return partial(jobs.unlock, sent.workspace, actor=actor)


class WorkspacesAPI(APIHandler):
    """All workspaces as JSON, for admins."""

    @operation("workspaces", schemas.WorkspacesAnswer)
    @web.authenticated
    async def get(self) -> None:
        """List every workspace, every archive, and what is done with them, for admins."""
        self.need_admin()
        jobs = self.services.workspace_jobs
        self.answer(
            schemas.WorkspacesAnswer,
            as_of=self.services.clock(),
            workspaces=await self.read(list_workspaces, self.services),
            archives=await self.read(jobs.archives),
            jobs=await self.read(jobs.jobs),
        )


class WorkspaceJobsAPI(APIHandler):
    """What is done with workspaces in the background."""

    @operation("workspaces/jobs", schemas.WorkspaceJobsAnswer, name="workspaceJobs")
    @web.authenticated
    async def get(self) -> None:
        """List what waits, runs or ended lately, newest first, for admins."""
        self.need_admin()
        jobs = await self.read(self.services.workspace_jobs.jobs)
        self.answer(schemas.WorkspaceJobsAnswer, as_of=self.services.clock(), jobs=jobs)


class WorkspaceAPI(ChangingAPI):
    """The API operations that begin something in the background."""

    @each_action("workspaces", _IN_BACKGROUND, schemas.WorkspaceJobAnswer, "{}Workspace")
    @web.authenticated
    async def post(self, action: str) -> None:
        """Begin it, and answer with what is done in the background."""
        self.need_admin()
        sent: Any = self.sent(cast(type[Body], WORKSPACE_ACTIONS[action].body))
        with refusals():
            job = await self.services.run(workspace_change(self, action, sent))
        self.answer(schemas.WorkspaceJobAnswer, job)


class WorkspaceStateAPI(ChangingAPI):
    """The API operations that cancel a workspace's job or unlock it."""

    @each_action("workspaces", _AT_ONCE, schemas.WorkspaceChangeAnswer, "{}Workspace")
    @web.authenticated
    async def post(self, action: str) -> None:
        """Do it, and say whether anything changed."""
        self.need_admin()
        sent = self.sent(schemas.WorkspaceBody)
        with refusals():
            if await self.services.read(self.services.workspace_jobs.known, sent.workspace) is None:
                raise UnknownWorkspace(name=sent.workspace[:300])
            changed = await self.services.run(workspace_change(self, action, sent))
        self.answer(schemas.WorkspaceChangeAnswer, workspace=sent.workspace, changed=changed)


WORKSPACE_API_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("api/workspaces", WorkspacesAPI),
    ("api/workspaces/jobs", WorkspaceJobsAPI),
    ("api/workspaces/(archive|restore)", WorkspaceAPI),
    ("api/workspaces/(cancel|unlock)", WorkspaceStateAPI),
]

WORKSPACE_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("workspaces", WorkspacesPage),
    ("workspaces/(archive|restore|cancel|unlock)", WorkspaceChangePage),
]

FOLDER_API_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("api/folders", FoldersAPI),
    (f"api/folders/{ID}/{ACTIONS}", FolderAPI),
]
