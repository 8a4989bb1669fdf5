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
class Prepared:
    """What a hub has prepared already."""

    sources: set[tuple[str, int]] = field(default_factory=set)
    """With their quotas."""
    locks: dict[str, asyncio.Lock] = field(default_factory=dict)
    """Who comes second waits until it is theirs, and does not take it half done."""


@dataclass(frozen=True, slots=True)
class MountedWorkspace:
    """A member's own files."""

    source: str
    """A directory of the host, a volume, or nothing."""
    target: str
    """Where it is in the container."""
    quota: int = 0
    """Bytes that it may hold; 0 for no limit."""

    @property
    def is_limited(self) -> bool:
        """Return True if the file system keeps the quota, as it can with directories."""
        return bool(self.quota) and self.source.startswith("/")

    async def require_room(self, services: Services) -> None:
        """Raises WorkspaceFull."""
        if not self.is_limited:
            return
        use = await services.run_outside(
            services.storage.use_of, self.source, self.quota, MEASURE_SECONDS
        )
        if use is not None and use.full:
            raise WorkspaceFull(used=format_bytes(use.used), limit=format_bytes(self.quota))

    async def line(self, services: Services) -> str:
        """The form's line about how full it is, where there is a limit."""
        use = await services.run_outside(services.storage.use_of, self.source, self.quota)
        used, limit = format_bytes(use.used) if use else "", format_bytes(self.quota)
        return templates.get_template("files.html").render(use=use, used=used, limit=limit)


class Storage:
    """What one server mounts, and that it is there with the right owner."""

    def __init__(
        self,
        services: Services,
        docker: Callable[..., Awaitable[Any]],
        calls: EngineCalls,
        prepared: Prepared,
        log: logging.Logger | Any,
        *,
        user: str,
        workspace: MountedWorkspace,
        mounts: Sequence[Mount] = (),
        folders: Sequence[FolderMount] = (),
        folders_target: str = "",
    ) -> None:
        """``docker`` is the spawner's, which an admin's class may override."""
        self.services = services
        self._docker = docker
        self._calls = calls
        self._prepared = prepared
        self.log = log
        self._user = user
        self._workspace = workspace
        self._mounts = mounts
        self._folders = folders
        self._folders_target = folders_target.rstrip("/")

    def binds(self) -> list[str]:
        """``source:target:mode`` of everything that this server gets."""
        own = self._workspace
        first = [f"{own.source}:{own.target}:rw"] if own.source else []
        others = [f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}" for m in self._mounts]
        # A folder's name has no colon in it and no slash: see storage/rules.py.
        shared = [
            f"{f.source}:{self._folders_target}/{f.name}:{'rw' if f.write else 'ro'}"
            for f in self._folders
        ]
        return first + others + shared

    async def prepare(self, image: str) -> None:
        """Make the workspace and give it to the image's user, before the server needs it.

        The same for shared folders. Raises WorkspaceBusy while an admin works on it.
        """
        source, quota = self._workspace.source, self._workspace.quota
        if source:
            use = self.services.storage.use_workspace
            if await self.services.run(use, source, self._user, quota or None):
                self._prepared.sources.discard((source, quota))
            await self._prepare(source, quota, image, {LABEL_WORKSPACE: self._user})
        for folder in self._folders:
            labels = {LABEL_FOLDER: folder.folder_id}
            folder_quota = self.services.settings.folders.quota * GB
            await self._prepare(folder.source, folder_quota, image, labels)

    async def _prepare(self, source: str, quota: int, image: str, labels: dict[str, str]) -> None:
        async with self._prepared.locks.setdefault(source, asyncio.Lock()):
            if (source, quota) not in self._prepared.sources:
                await self._make(source, quota, image, labels)

    async def _make(self, source: str, quota: int, image: str, labels: dict[str, str]) -> None:
        directory = source.startswith("/")
        if directory or not await self._volume_exists(source, labels):
            await self._give_to_user(source, image, needed=directory and bool(quota))
        if directory:
            await self._keep_quota(source, quota)
        self._prepared.sources.add((source, quota))

    async def _keep_quota(self, source: str, quota: int) -> None:
        try:
            await self.services.run_outside(self.services.storage.keep_quota, source, quota or None)
        except QuotaUnavailable as error:  # an admin's matter, and no reason to keep a member out
            self.log.error("%s Until then nothing limits %s.", error.message, source)

    async def _volume_exists(self, source: str, labels: dict[str, str]) -> bool:
        try:
            await self._docker("inspect_volume", source)
            return True
        except NotFound:
            pass
        await self._docker("create_volume", source, labels=labels)
        return False

    async def _give_to_user(self, source: str, image: str, *, needed: bool) -> None:
        """Hand a new workspace, which Docker makes as root's, to the image's own user.

        A directory that belongs to somebody already is left as it is. ``needed``: it has to be
        there now, for its quota, also when it stays root's.
        """
        config = (await self._docker("inspect_image", image))["Config"]
        user = (config.get("User") or "").strip()
        if not user or user.split(":")[0] in ("root", "0"):
            if not needed:
                return
            user = "0"
        owner = user if ":" in user or user.isdigit() else f"{user}:"
        script = f'[ "$(stat -c %u {_PLACE})" != 0 ] || chown "$0" {_PLACE}'
        command = ["sh", "-c", script, owner]
        binds = [f"{source}:{_PLACE}:rw"]
        code, words = await self._calls.run_helper(command, image=image, Binds=binds)
        if code:
            self.log.error("The workspace %s: %s", source, words)
            raise StartFailed(cause="your workspace could not be made yours (tell your admin)")
