"""``gpuspawner workspaces``: members' own files, listed, archived, put back and deleted."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker

from ..broker import Broker
from ..errors import (
    ArchiveRefused,
    EngineUnavailable,
    GPUSpawnerError,
    QuotaUnavailable,
    Refused,
    UnknownWorkspace,
)
from ..store.workspaces import Workspace
from ..workspaces.archives import ENDINGS, check_archive, ending, read_archive, write_archive
from ..workspaces.sizes import format_bytes
from ..workspaces.trees import DirectoryTree, Tree, VolumeTree, must_be_unused, volume_sizes
from .config import Settings
from .grammar import changes_of
from .output import local, note, show, table, utc
from .queue import actor

if TYPE_CHECKING:
    from .hub import Hub

LABEL = "gpuspawner.workspace"
"""On volumes that a spawner made; its value is the member."""

PATIENCE = 10.0
"""Seconds to count what one directory holds, for the list."""

NOBODY = "-"
"""The owner of what no server ever got, and no label names."""


@dataclass(frozen=True, slots=True)
class Known:
    """A workspace, whoever knows of it: the database, the disk, the engine."""

    workspace: Workspace
    there: bool
    seen: datetime | None
    size: int | None = None


def grammar(command: argparse.ArgumentParser, common: Callable[..., Any]) -> None:
    """``gpuspawner workspaces`` alone lists, as ``list`` does."""
    add = changes_of(command, common)
    add("list", workspaces, "List workspaces with their size and owner.")
    archiving = add("archive", archive, "Pack a workspace into a file, while no server has it.")
    archiving.add_argument("workspace", metavar="WORKSPACE", help=_WHICH)
    archiving.add_argument(
        "--to", metavar="FILE", help=f"the archive, ending in {', '.join(ENDINGS)}"
    )
    restoring = add("restore", restore, "Put an archive in place of an empty workspace.")
    restoring.add_argument("file", metavar="FILE", help="what `workspaces archive` made")
    restoring.add_argument("workspace", metavar="WORKSPACE", help=_WHICH)
    restoring.add_argument(
        "--member", default="", metavar="NAME", help="whose it is, if that is not known yet"
    )
    deleting = add("delete", delete, "Delete a workspace and every file in it, for good.")
    deleting.add_argument("workspace", metavar="WORKSPACE", help=_WHICH)
    deleting.add_argument(
        "--yes-delete", default="", metavar="NAME", help="the workspace's name once more"
    )
    freeing = add("free", free, "Let servers have a workspace again after a killed archive.")
    freeing.add_argument("workspace", metavar="WORKSPACE", help=_WHICH)


_WHICH = "a directory or a volume as the list names it, or its member if they have one"


def workspaces(arguments: argparse.Namespace, settings: Settings) -> int:
    """List them."""
    site = Site(settings)
    found = site.all(sizes=True)
    running = {lease.server.user for lease in site.broker.open_leases()}
    headers = ("WORKSPACE", "OWNER", "SIZE", "QUOTA", "LAST USED", "NOW")
    rows = [
        (
            some.workspace.source,
            some.workspace.user,
            format_bytes(some.size) if some.size is not None else "?",
            format_bytes(some.workspace.quota) if some.workspace.quota else "-",
            local(some.seen),
            _now(some, running),
        )
        for some in found
    ]
    text = table(headers, rows, right=("SIZE", "QUOTA")) if rows else "No workspaces."
    show(arguments.json, [_plain(some, running) for some in found], text)
    for trouble in site.troubles:
        note(trouble)
    return 0


def archive(arguments: argparse.Namespace, settings: Settings) -> int:
    """Pack one."""
    site = Site(settings)
    known = site.find(arguments.workspace)
    source = known.workspace.source
    file = Path(arguments.to or _file_name(source)).absolute()
    ending(file)
    with site.claimed(known, "an admin archives them") as tree:
        if not tree.exists():
            raise UnknownWorkspace(name=source)
        contents = write_archive(tree.read(), file)
    site.broker.note_workspace(source, "archive workspace", actor=actor(), detail=str(file))
    text = (
        f"{source} of {known.workspace.user}: {contents.entries} entries, "
        f"{format_bytes(contents.size)} in {file} ({format_bytes(file.stat().st_size)}). "
        "The workspace is as it was."
    )
    show(arguments.json, {"file": str(file), "bytes": contents.size, "workspace": source}, text)
    return 0


def restore(arguments: argparse.Namespace, settings: Settings) -> int:
    """Put one back."""
    site = Site(settings)
    file = Path(arguments.file)
    contents = check_archive(file)
    known = site.find_or_new(arguments.workspace, arguments.member)
    source = known.workspace.source
    with site.claimed(known, "an admin puts them back") as tree:
        if not tree.is_empty():
            raise ArchiveRefused(
                what=f"{source} is not empty; archive and delete it first, or name another one"
            )
        tree.write(read_archive(file), contents.top)
    if known.workspace.quota:
        try:
            site.broker.keep_quota(source, known.workspace.quota)
        except QuotaUnavailable as error:
            note(error.message)
    site.broker.note_workspace(source, "restore workspace", actor=actor(), detail=str(file))
    text = f"{source}: {contents.entries} entries, {format_bytes(contents.size)} are back."
    show(arguments.json, {"workspace": source, "bytes": contents.size}, text)
    return 0


def delete(arguments: argparse.Namespace, settings: Settings) -> int:
    """Delete one, by its name and once more its name."""
    site = Site(settings)
    known = site.find(arguments.workspace)
    source, owner = known.workspace.source, known.workspace.user
    size = site.size_of(known.workspace)
    what = f"{source} of {owner}, {format_bytes(size) if size is not None else 'of unknown size'}"
    if arguments.yes_delete != source:
        raise Refused(
            f"This would delete {what}, with every file in it, for good. Nothing was changed. If "
            f"that is what you want, say --yes-delete {source}"
        )
    with site.claimed(known, "an admin deletes them") as tree:
        if tree.exists():
            tree.delete()
        site.broker.note_workspace(source, "delete workspace", actor=actor(), detail=what)
    show(arguments.json, {"deleted": source, "owner": owner}, f"Deleted: {what}.")
    return 0


def free(arguments: argparse.Namespace, settings: Settings) -> int:
    """Take back a claim whose command was killed."""
    site = Site(settings)
    source = site.find(arguments.workspace).workspace.source
    done = site.broker.free_workspace(source)
    text = f"{source} can be used again." if done else f"Nobody had {source} in hand."
    show(arguments.json, {"workspace": source, "changed": done}, text)
    return 0


class Site:
    """The workspaces of a hub, and what they lie on."""

    def __init__(self, settings: Settings) -> None:
        from .hub import open_hub  # imports JupyterHub: slow, and needed here only

        self.broker: Broker = settings.open_broker()
        self.hub: Hub = open_hub(settings.config)
        self.template = str(getattr(self.hub.spawner, "workspace", ""))
        self.troubles: list[str] = []
        self._client: docker.APIClient | None = None

    @property
    def client(self) -> docker.APIClient:
        """The engine's. Raises EngineUnavailable."""
        if self._client is None:
            try:
                self._client = self.hub.connect()
            except (docker.errors.DockerException, OSError) as error:
                raise EngineUnavailable() from error
        return self._client

    def all(self, *, sizes: bool = False) -> list[Known]:
        """Every workspace that anybody knows of, by its name."""
        found = {some.source: Known(some, True, some.seen_at) for some in self.broker.workspaces()}
        for source, user in (*self._directories(), *self._volumes()):
            new = Workspace(source=source, user=user, seen_at=self.broker.clock())
            found.setdefault(source, Known(new, True, None))
        if not sizes:
            return sorted(found.values(), key=lambda some: some.workspace.source)
        volumes = self._volume_sizes() if any(f.workspace.is_volume for f in found.values()) else {}
        return [
            replace(
                some,
                size=volumes.get(source)
                if some.workspace.is_volume
                else self.size_of(some.workspace),
                there=source in volumes
                if some.workspace.is_volume and volumes
                else some.workspace.is_volume or os.path.isdir(source),
            )
            for source, some in sorted(found.items())
        ]

    def find(self, name: str) -> Known:
        """One of them, by its own name or its member's. Raises UnknownWorkspace."""
        every = self.all()
        path = os.path.abspath(name) if "/" in name else name
        exact = [some for some in every if some.workspace.source in (name, path)]
        named = exact or [some for some in every if some.workspace.user == name]
        if len(named) == 1:
            return named[0]
        if named:
            some = ", ".join(known.workspace.source for known in named)
            raise UnknownWorkspace(f"{name} has {len(named)} workspaces: {some}. Name one of them.")
        raise UnknownWorkspace(name=name[:300])

    def find_or_new(self, name: str, member: str) -> Known:
        """The same, or one that will be. Raises UnknownWorkspace without a member."""
        try:
            return self.find(name)
        except UnknownWorkspace:
            if not member:
                raise UnknownWorkspace(
                    f"There is no workspace {name[:300]!r} yet: say whose it will be with --member."
                ) from None
        source = os.path.abspath(name) if "/" in name else name
        new = Workspace(source=source, user=member, seen_at=self.broker.clock())
        return Known(new, False, None)

    def size_of(self, workspace: Workspace) -> int | None:
        """What one holds, in bytes, if anybody can say soon."""
        if workspace.is_volume:
            return self._volume_sizes().get(workspace.source)
        use = self.broker.use_of(workspace.source, workspace.quota, PATIENCE)
        return use.used if use else None

    @contextmanager
    def claimed(self, known: Known, what: str) -> Iterator[Tree]:
        """Its files, while no server can get it."""
        source = known.workspace.source
        self.broker.claim_workspace(source, what, user=known.workspace.user)
        try:
            if self.hub.uses_docker:
                must_be_unused(self.client, source)
            yield self._tree(known.workspace)
        finally:
            self.broker.free_workspace(source)

    def _tree(self, workspace: Workspace) -> Tree:
        if not workspace.is_volume:
            return DirectoryTree(workspace.source)
        images = self.client.images()
        if not images:
            raise ArchiveRefused(what="the engine has no image to make a container of")
        return VolumeTree(self.client, workspace.source, str(images[0]["Id"]))

    def _directories(self) -> list[tuple[str, str]]:
        """Those that lie where the hub makes them, by their names."""
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
        """The engine's, with the members on their labels."""
        if not self.hub.uses_docker:
            return []
        try:
            told = self.client.volumes(filters={"label": LABEL})["Volumes"] or []
        except (GPUSpawnerError, docker.errors.DockerException, OSError):
            self.troubles.append("The container engine does not answer: volumes may be missing.")
            return []
        return [(v["Name"], (v.get("Labels") or {}).get(LABEL) or NOBODY) for v in told]

    def _volume_sizes(self) -> dict[str, int]:
        try:
            return volume_sizes(self.client)
        except GPUSpawnerError as error:
            self.troubles.append(error.message)
            return {}


def _now(some: Known, running: set[str]) -> str:
    if some.workspace.busy:
        return some.workspace.busy
    if some.workspace.user in running:
        return "server runs"
    return "" if some.there else "gone"


def _plain(some: Known, running: set[str]) -> dict[str, Any]:
    """A workspace, for scripts."""
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


def _file_name(source: str) -> str:
    name = os.path.basename(source) or "workspace"
    return f"{name}-{datetime.now().astimezone():%Y-%m-%d}.tar.gz"
