"""Members' files in a container: workspace, datasets and shared folders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from docker.errors import NotFound

from ..catalog.models import Mount
from ..core.errors import QuotaUnavailable, StartFailed, WorkspaceFull
from ..core.units import format_bytes
from ..services import Services
from ..storage.quotas import MEASURE_SECONDS
from ..storage.service import FolderMount
from .engine_calls import EngineCalls
from .form import templates

LABEL_WORKSPACE = "gpuspawner.workspace"
LABEL_FOLDER = "gpuspawner.folder"
GB = 2**30
_PLACE = "/workspace"


@dataclass
class PreparedWorkspaces:
    """The workspaces and folders that a hub has already prepared."""

    sources: set[tuple[str, int]] = field(default_factory=set)
    """Sources with their quotas in bytes."""
    locks: dict[str, asyncio.Lock] = field(default_factory=dict)
    """A lock per source, so that a second start waits until the preparation is complete."""


@dataclass(frozen=True, slots=True)
class MountedWorkspace:
    """A member's workspace, as mounted into a container."""

    source: str
    """A directory of the host, a volume's name, or empty."""
    target: str
    quota: int = 0
    """The maximum size in bytes; 0 for no limit."""

    @property
    def is_limited(self) -> bool:
        """True if the file system enforces the quota, as it can for directories."""
        return bool(self.quota) and self.source.startswith("/")

    async def require_room(self, services: Services) -> None:
        """Raise WorkspaceFull if the quota is used up."""
        if not self.is_limited:
            return
        use = await services.run_outside(
            services.storage.use_of, self.source, self.quota, MEASURE_SECONDS
        )
        if use is not None and use.full:
            raise WorkspaceFull(used=format_bytes(use.used), limit=format_bytes(self.quota))

    async def line(self, services: Services) -> str:
        """Return the form's line about the space used, for a workspace with a limit."""
        use = await services.run_outside(services.storage.use_of, self.source, self.quota)
        used, limit = format_bytes(use.used) if use else "", format_bytes(self.quota)
        return templates.get_template("files.html").render(use=use, used=used, limit=limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Everything that one server mounts; creates what is missing, with the right owner."""

    services: Services
    docker: Callable[..., Awaitable[Any]]
    """The spawner's ``docker``, which an admin's class may override."""
    calls: EngineCalls
    prepared: PreparedWorkspaces
    log: logging.Logger | Any
    user: str
    workspace: MountedWorkspace
    mounts: Sequence[Mount] = ()
    folders: Sequence[FolderMount] = ()
    folders_target: str
    """The folder in the container with the shared folders."""

    def binds(self) -> list[str]:
        """Return ``source:target:mode`` of everything that this server mounts."""
        own = self.workspace
        first = [f"{own.source}:{own.target}:rw"] if own.source else []
        others = [f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}" for m in self.mounts]
        # A folder's name contains no colon and no slash: see storage/rules.py.
        shared = [
            f"{f.source}:{self.folders_target}/{f.name}:{'rw' if f.write else 'ro'}"
            for f in self.folders
        ]
        return first + others + shared

    async def prepare(self, image: str) -> None:
        """Create the workspace and the shared folders, and give them to the image's user.

        Raises WorkspaceBusy while an admin works on the workspace.
        """
        source, quota = self.workspace.source, self.workspace.quota
        if source:
            use = self.services.storage.use_workspace
            if await self.services.run(use, source, self.user, quota or None):
                self.prepared.sources.discard((source, quota))
            await self._prepare(source, quota, image, {LABEL_WORKSPACE: self.user})
        for folder in self.folders:
            labels = {LABEL_FOLDER: folder.folder_id}
            folder_quota = self.services.settings.folders.quota * GB
            await self._prepare(folder.source, folder_quota, image, labels)

    async def _prepare(self, source: str, quota: int, image: str, labels: dict[str, str]) -> None:
        async with self.prepared.locks.setdefault(source, asyncio.Lock()):
            if (source, quota) in self.prepared.sources:
                return
            directory = source.startswith("/")
            if directory or not await self._volume_exists(source, labels):
                await self._give_to_user(source, image, needed=directory and bool(quota))
            if directory:
                await self._keep_quota(source, quota)
            self.prepared.sources.add((source, quota))

    async def _keep_quota(self, source: str, quota: int) -> None:
        try:
            await self.services.run_outside(self.services.storage.keep_quota, source, quota or None)
        except QuotaUnavailable as error:  # a problem for the admin, not a reason to refuse a start
            self.log.error("%s Until then nothing limits %s.", error.message, source)

    async def _volume_exists(self, source: str, labels: dict[str, str]) -> bool:
        """Return True if there is a volume of this name, else create it and return False."""
        try:
            await self.docker("inspect_volume", source)
        except NotFound:
            await self.docker("create_volume", source, labels=labels)
            return False
        return True

    async def _give_to_user(self, source: str, image: str, *, needed: bool) -> None:
        """Give a new workspace, which Docker creates as root's, to the image's own user.

        A directory with another owner is left as it is. ``needed`` means that it must exist now,
        for its quota, even if it stays root's.
        """
        config = (await self.docker("inspect_image", image))["Config"]
        user = (config.get("User") or "").strip()
        if not user or user.split(":")[0] in ("root", "0"):
            if not needed:
                return
            user = "0"
        owner = user if ":" in user or user.isdigit() else f"{user}:"
        script = f'[ "$(stat -c %u {_PLACE})" != 0 ] || chown "$0" {_PLACE}'
        command = ["sh", "-c", script, owner]
        binds = [f"{source}:{_PLACE}:rw"]
        code, words = await self.calls.run_helper(command, image=image, Binds=binds)
        if code:
            self.log.error("The workspace %s: %s", source, words)
            raise StartFailed(
                cause="you could not be made the owner of your workspace (tell your admin)"
            )
