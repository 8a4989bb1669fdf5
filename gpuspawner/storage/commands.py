"""The commands ``gpuspawner workspaces`` and ``gpuspawner folders``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker

from ..cli.command import group
from ..cli.config import Settings
from ..cli.output import actor, local, note, show, table, utc
from ..cli.parameters import PATH, argument, option
from ..core.errors import (
    EngineUnavailable,
    GPUSpawnerError,
    Refused,
    UnknownFolder,
    UnknownWorkspace,
)
from ..core.units import format_bytes
from ..services import Services
from .archives import WorkspaceArchiver, archive_name
from .directories import (
    ENDINGS,
    DirectoryTree,
    Tree,
    VolumeTree,
    must_be_unused,
    volume_sizes,
)
from .repository import Folder, FolderMember, Workspace

if TYPE_CHECKING:
    from ..cli.hub import HubSettings


LABEL = "gpuspawner.workspace"
"""On volumes that a spawner created; its value is the member."""

PATIENCE = 10.0
"""Seconds to measure one directory for the list."""

NOBODY = "-"
"""The owner of a workspace that no server ever got and no label names."""


@dataclass(frozen=True, slots=True)
class WorkspaceRecord:
    """A workspace in the list."""

    workspace: Workspace
    there: bool
    seen: datetime | None
    """When a server last got it; None if none ever did."""
    size: int | None


workspace_argument = argument(
    "workspace",
    "WORKSPACE",
    "a directory or volume as listed, or its owner if they have only one workspace",
)


@group()
def workspaces(settings: Settings) -> None:
    """List the workspaces."""
    site = WorkspaceSite(settings)
    found = site.records()
    running = {lease.server.user for lease in site.services.leases.open_leases()}
    headers = ("WORKSPACE", "OWNER", "SIZE", "QUOTA", "LAST USED", "NOW")
    rows = [
        (
            some.workspace.source,
            some.workspace.user,
            format_bytes(some.size) if some.size is not None else "?",
            format_bytes(some.workspace.quota) if some.workspace.quota else "-",
            local(some.seen),
            _workspace_now(some, running),
        )
        for some in found
    ]
    text = table(headers, rows, right=("SIZE", "QUOTA")) if rows else "No workspaces."
    show([_plain(some, running) for some in found], text)
    for trouble in site.troubles:
        note(trouble)


workspaces.add_same("list", "List workspaces with their size and owner.")


@workspaces.command("archive")
@workspace_argument
@option("--to", "FILE", f"the archive, ending in {', '.join(ENDINGS)} (default: NAME-DATE.tar.gz)")
def archive_workspace(settings: Settings, workspace: str, to: str | None) -> None:
    """Archive a workspace to a file, while no server uses it."""
    site = WorkspaceSite(settings)
    known = site.find(workspace)
    source = known.source
    # The wall clock names the file, as the shell of who runs this shows it.
    file = Path(to or archive_name(source, datetime.now().astimezone())).absolute()
    contents = site.archiver.archive(known, file, actor=actor())
    text = (
        f"{source} of {known.user}: {contents.entries} entries, "
        f"{format_bytes(contents.size)} in {file} ({format_bytes(file.stat().st_size)}). "
        "The workspace is as it was."
    )
    show({"file": str(file), "bytes": contents.size, "workspace": source}, text)


@workspaces.command("restore")
@argument("file", "FILE", "an archive made by `workspaces archive`", type=PATH)
@workspace_argument
@option("--member", "NAME", "the owner, if the workspace is not known yet", default="")
def restore_workspace(settings: Settings, file: Path, workspace: str, member: str) -> None:
    """Restore an archive into an empty workspace."""
    site = WorkspaceSite(settings)
    known = site.find_or_new(workspace, member)
    contents, no_quota = site.archiver.restore(known, file, actor=actor())
    if no_quota:
        note(no_quota)
    text = f"{known.source}: {contents.entries} entries, {format_bytes(contents.size)} are back."
    show({"workspace": known.source, "bytes": contents.size}, text)


@workspaces.command("delete")
@workspace_argument
@option("--yes-delete", "NAME", "repeat the workspace's name, as listed, to confirm", default="")
def delete_workspace(settings: Settings, workspace: str, yes_delete: str) -> None:
    """Delete a workspace and every file in it permanently."""
    site = WorkspaceSite(settings)
    known = site.find(workspace)
    source, owner = known.source, known.user
    size = site.size_of(known)
    what = f"{source} of {owner}, {format_bytes(size) if size is not None else 'of unknown size'}"
    if yes_delete != source:
        raise Refused(
            f"This would delete {what}, with every file in it, for good. Nothing was changed. If "
            f"that is what you want, say --yes-delete {source}"
        )
    with site.archiver.claimed(known, "an admin deletes them") as tree:
        if tree.exists():
            tree.delete()
        site.services.storage.note_workspace(source, "delete workspace", actor=actor(), detail=what)
    show({"deleted": source, "owner": owner}, f"Deleted: {what}.")


@workspaces.command("cancel")
@workspace_argument
def cancel_archive(settings: Settings, workspace: str) -> None:
    """Cancel an archive while it is being made, also one that another admin started."""
    site = WorkspaceSite(settings)
    source = site.find(workspace).source
    done = site.services.storage.cancel_archive(source, actor=actor())
    text = f"Cancelling the archive of {source}. No archive is made; the workspace is unchanged."
    if not done:
        text = f"The archive of {source} is already being cancelled."
    show({"workspace": source, "changed": done}, text)


@workspaces.command("free")
@workspace_argument
def free_workspace(settings: Settings, workspace: str) -> None:
    """Unlock a workspace that an interrupted command left locked."""
    site = WorkspaceSite(settings)
    source = site.find(workspace).source
    done = site.services.storage.free_workspace(source, actor=actor())
    text = f"{source} can be used again." if done else f"{source} was not being processed."
    show({"workspace": source, "changed": done}, text)


class WorkspaceSite:
    """The workspaces of a hub, and where they are stored."""

    def __init__(self, settings: Settings) -> None:
        from ..cli.hub import open_hub  # imports JupyterHub: slow, and needed here only

        settings.require_configuration("where workspaces are", file=True)
        self.services: Services = settings.open_services()
        self.hub: HubSettings = open_hub(settings.config)
        self.template = str(getattr(self.hub.spawner, "workspace", ""))
        self.archiver = WorkspaceArchiver(
            self.services.storage, lambda: self.client, self.hub.uses_docker
        )
        self.troubles: list[str] = []

    @cached_property
    def client(self) -> docker.APIClient:
        """The engine's client. Raises EngineUnavailable."""
        try:
            return self.hub.connect()
        except (docker.errors.DockerException, OSError) as error:
            raise EngineUnavailable() from error

    def all(self) -> list[Workspace]:
        """Return every known workspace, by name."""
        found = {some.source: some for some in self.services.storage.workspaces()}
        for source, user in (*self._directories(), *self._volumes()):
            found.setdefault(source, Workspace(source, user, seen_at=self.services.clock()))
        return [found[source] for source in sorted(found)]

    def records(self) -> list[WorkspaceRecord]:
        """Return every known workspace with its size, by name."""
        seen = {some.source: some.seen_at for some in self.services.storage.workspaces()}
        every = self.all()
        volumes = self._volume_sizes() if any(some.is_volume for some in every) else {}
        found = []
        for some in every:
            there = os.path.isdir(some.source)
            if some.is_volume:
                there = some.source in volumes or not volumes
            size = volumes.get(some.source) if some.is_volume else self.size_of(some)
            found.append(WorkspaceRecord(some, there, seen.get(some.source), size))
        return found

    def find(self, name: str) -> Workspace:
        """Return a workspace by its own name or its member's. Raises UnknownWorkspace."""
        every = self.all()
        path = os.path.abspath(name) if "/" in name else name
        exact = [some for some in every if some.source in (name, path)]
        named = exact or [some for some in every if some.user == name]
        if len(named) == 1:
            return named[0]
        if named:
            some = ", ".join(known.source for known in named)
            raise UnknownWorkspace(f"{name} has {len(named)} workspaces: {some}. Name one of them.")
        raise UnknownWorkspace(name=name[:300])

    def find_or_new(self, name: str, member: str) -> Workspace:
        """Return a workspace, maybe a future one. Raises UnknownWorkspace without a member."""
        try:
            return self.find(name)
        except UnknownWorkspace:
            if not member:
                raise UnknownWorkspace(
                    f"There is no workspace {name[:300]!r} yet: name its owner with --member."
                ) from None
        source = os.path.abspath(name) if "/" in name else name
        return Workspace(source, member, seen_at=self.services.clock())

    def size_of(self, workspace: Workspace) -> int | None:
        """Return the size of a workspace in bytes, if it is known quickly."""
        if workspace.is_volume:
            return self._volume_sizes().get(workspace.source)
        use = self.services.storage.use_of(workspace.source, workspace.quota, PATIENCE)
        return use.used if use else None

    def _directories(self) -> list[tuple[str, str]]:
        """Return directories where the hub creates workspaces, by name."""
        before, brace, after = self.template.partition("{username}")
        looks_simple = brace and before.endswith("/") and not after and "{" not in before
        root = os.path.abspath(before) if looks_simple else ""
        if not root or (self.hub.uses_docker and not self.template.startswith("/")):
            return []
        try:
            with os.scandir(root) as entries:
                names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
        except OSError:
            return []
        return [(f"{root}/{name}", NOBODY) for name in names if not name.startswith(".")]

    def _volumes(self) -> list[tuple[str, str]]:
        """Return the engine's volumes, with the members on their labels."""
        if not self.hub.uses_docker:
            return []
        try:
            told = self.client.volumes(filters={"label": LABEL})["Volumes"] or []
        except (GPUSpawnerError, docker.errors.DockerException, OSError):
            self.troubles.append("The container engine is not responding: volumes may be missing.")
            return []
        return [(v["Name"], (v.get("Labels") or {}).get(LABEL) or NOBODY) for v in told]

    def _volume_sizes(self) -> dict[str, int]:
        try:
            return volume_sizes(self.client)
        except GPUSpawnerError as error:
            self.troubles.append(error.message)
            return {}


def _workspace_now(some: WorkspaceRecord, running: set[str]) -> str:
    if some.workspace.busy:
        return some.workspace.busy
    if some.workspace.user in running:
        return "server runs"
    return "" if some.there else "gone"


def _plain(some: WorkspaceRecord, running: set[str]) -> dict[str, Any]:
    """Return a workspace as plain values, for scripts."""
    return {
        "workspace": some.workspace.source,
        "owner": some.workspace.user,
        "bytes": some.size,
        "quota_bytes": some.workspace.quota,
        "last_used": utc(some.seen),
        "server_runs": some.workspace.user in running,
        "busy": some.workspace.busy,
        "there": some.there,
    }


folder_argument = argument("folder_id", "FOLDER", "the folder's id, or a unique prefix of it")


@group()
def folders(settings: Settings) -> None:
    """List the shared folders."""
    found = settings.open_services().shared_folders.all_folders()
    headers = ("ID", "NAME", "OWNER", "MEMBERS", "MADE", "NOW")
    rows = [
        (
            some.id,
            some.name,
            some.owner,
            ", ".join(map(_told, some.members)) or "-",
            local(some.made_at),
            "deleted" if some.deleted_at else "owner left" if some.left_at else "",
        )
        for some in found
    ]
    text = table(headers, rows) if rows else "No shared folders."
    show([plain_folder(some) for some in found], text)


folders.add_same("list", "List the folders that members share.")


@folders.command("give")
@folder_argument
@argument("member", "MEMBER", "the new owner")
def give_folder(settings: Settings, folder_id: str, member: str) -> None:
    """Make a member the owner of a folder."""
    services = settings.open_services()
    folder = find_folder(services, folder_id)
    done = services.shared_folders.hand_on(folder.id, member, actor=actor(), admin=True)
    show(plain_folder(done), f"{done.name} ({done.id}) belongs to {done.owner}.")


@folders.command("delete")
@folder_argument
@option("--name", "NAME", "repeat the folder's name to confirm", default="")
def delete_folder(settings: Settings, folder_id: str, name: str) -> None:
    """Delete a folder for all members, but keep its files."""
    services = settings.open_services()
    folder = find_folder(services, folder_id)
    done = services.shared_folders.delete_folder(folder.id, name, actor=actor(), admin=True)
    text = (
        f"{done.name} ({done.id}) is deleted: members lose access at their next server start. "
        f"Its files are still at {services.shared_folders.folder_place(done.id)}; "
        f"`gpuspawner folders restore {done.id}` undoes it."
    )
    show(plain_folder(done), text)


@folders.command("restore")
@folder_argument
def restore_folder(settings: Settings, folder_id: str) -> None:
    """Restore a deleted folder."""
    services = settings.open_services()
    done = services.shared_folders.bring_back(find_folder(services, folder_id).id, actor=actor())
    show(plain_folder(done), f"{done.name} ({done.id}) is back.")


@folders.command("remove")
@folder_argument
@option("--yes-delete", "NAME", "repeat the folder's name to confirm", default="")
def remove_folder(settings: Settings, folder_id: str, yes_delete: str) -> None:
    """Remove a deleted folder and its files permanently."""
    services = settings.open_services()
    folder = find_folder(services, folder_id)
    place = services.shared_folders.folder_place(folder.id)
    if folder.deleted_at is None:
        raise Refused(
            f"{folder.name} is in use. Delete it first: gpuspawner folders delete {folder.id}"
        )
    if not place:
        raise Refused("The folders' location is not set: set c.GPUFolders.source.")
    if yes_delete != folder.name:
        use = services.storage.use_of(place, None, 10.0)
        size = format_bytes(use.used) if use else "of unknown size"
        raise Refused(
            f"This would remove {place}, {size}, with every file of the folder {folder.name}, for "
            f"good. Nothing was changed. To confirm, use --yes-delete "
            f"'{folder.name}'"
        )
    tree = _tree(place, settings)
    if tree.exists():
        tree.delete()
    services.shared_folders.forget_folder(folder.id, actor=actor())
    show({"removed": folder.id}, f"{folder.name} ({folder.id}) is removed.")


def find_folder(services: Services, text: str) -> Folder:
    """Return the folder whose id starts with this text. Raises UnknownFolder."""
    every = services.shared_folders.all_folders()
    found = [some for some in every if text and some.id.startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(folder.id for folder in found[:5])
        raise UnknownFolder(f"Several folders begin with {text!r}: {some}.")
    raise UnknownFolder(f"There is no folder {text!r}: `gpuspawner folders` lists them.")


def plain_folder(some: Folder) -> dict[str, Any]:
    """Return a folder as plain values, for scripts."""
    return {
        "id": some.id,
        "name": some.name,
        "owner": some.owner,
        "made_at": utc(some.made_at),
        "owner_left_at": utc(some.left_at),
        "deleted_at": utc(some.deleted_at),
        "members": [
            {
                "member": member.user,
                "write": member.write,
                "invited_at": utc(member.invited_at),
                "accepted_at": utc(member.accepted_at),
            }
            for member in some.members
        ],
    }


def _tree(place: str, settings: Settings) -> Tree:
    """Return the files of a folder that no container has."""
    from ..cli.hub import open_hub  # imports JupyterHub: slow, and needed here only

    settings.require_configuration("where folders are", file=True)
    hub = open_hub(settings.config)
    if not hub.uses_docker:
        return DirectoryTree(place)
    client = hub.connect()
    must_be_unused(client, place)
    return DirectoryTree(place) if place.startswith("/") else VolumeTree(client, place, "")


def _told(member: FolderMember) -> str:
    how = "rw" if member.write else "ro"
    return f"{member.user} ({how}{'' if member.accepted_at else ', invited'})"
