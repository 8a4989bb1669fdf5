"""Workspaces, datasets and shared folders of one start."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from docker.errors import NotFound

from ..broker.folders import FolderMount
from ..catalog import Mount
from ..errors import QuotaUnavailable, StartFailed

if TYPE_CHECKING:
    from .docker import GPUDockerSpawner

LABEL_WORKSPACE = "gpuspawner.workspace"
LABEL_FOLDER = "gpuspawner.folder"
PREPARED = "gpuspawner_workspaces"
PREPARING = "gpuspawner_workspaces_in_work"
GB = 2**30
_PLACE = "/workspace"


class Storage:
    """What is mounted, and that the workspace is there with the right owner."""

    def __init__(
        self,
        spawner: GPUDockerSpawner,
        source: str,
        target: str,
        mounts: Sequence[Mount],
        *,
        quota: int = 0,
        folders: Sequence[FolderMount] = (),
        folders_target: str = "",
    ) -> None:
        """``quota``: bytes of the workspace, 0 for no limit."""
        self.spawner = spawner
        self.source = source
        self.target = target
        self.mounts = mounts
        self.quota = quota
        self.folders = folders
        self.folders_target = folders_target.rstrip("/")

    def binds(self) -> list[str]:
        """``source:target:mode`` of everything that this server gets."""
        own = [f"{self.source}:{self.target}:rw"] if self.source else []
        others = [f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}" for m in self.mounts]
        # A folder's name has no colon in it and no slash: see workspaces/names.py.
        shared = [
            f"{f.source}:{self.folders_target}/{f.name}:{'rw' if f.write else 'ro'}"
            for f in self.folders
        ]
        return own + others + shared

    async def prepare(self, image: str) -> None:
        """Make the workspace and give it to the image's user, before the server needs it.

        The same for shared folders. Raises WorkspaceBusy while an admin works on it.
        """
        broker, user = self.spawner.broker, self.spawner.user.name
        if self.source:
            quota = self.quota or None
            if await broker.run(broker.use_workspace, self.source, user, quota):
                self._prepared.discard((self.source, self.quota))
            await self._prepare(self.source, self.quota, image, {LABEL_WORKSPACE: user})
        for folder in self.folders:
            labels = {LABEL_FOLDER: folder.folder_id}
            await self._prepare(folder.source, broker.folder_quota * GB, image, labels)

    @property
    def _prepared(self) -> set[tuple[str, int]]:
        """What this hub has prepared already, with its quota."""
        found: set[tuple[str, int]] = self.spawner.shared(PREPARED, set)
        return found

    async def _prepare(self, source: str, quota: int, image: str, labels: dict[str, str]) -> None:
        locks: dict[str, asyncio.Lock] = self.spawner.shared(PREPARING, dict)
        # Who comes second waits until it is theirs, and does not take it half done.
        async with locks.setdefault(source, asyncio.Lock()):
            if (source, quota) not in self._prepared:
                await self._make(source, quota, image, labels)

    async def _make(self, source: str, quota: int, image: str, labels: dict[str, str]) -> None:
        directory = source.startswith("/")
        if directory or not await self._volume_exists(source, labels):
            await self._give_to_user(source, image, needed=directory and bool(quota))
        if directory:
            await self._keep_quota(source, quota)
        self._prepared.add((source, quota))

    async def _keep_quota(self, source: str, quota: int) -> None:
        broker = self.spawner.broker
        try:
            await broker.run_outside(broker.keep_quota, source, quota or None)
        except QuotaUnavailable as error:  # an admin's matter, and no reason to keep a member out
            self.spawner.log.error("%s Until then nothing limits %s.", error.message, source)

    async def _volume_exists(self, source: str, labels: dict[str, str]) -> bool:
        try:
            await self.spawner.docker("inspect_volume", source)
            return True
        except NotFound:
            pass
        await self.spawner.docker("create_volume", source, labels=labels)
        return False

    async def _give_to_user(self, source: str, image: str, *, needed: bool) -> None:
        """Hand a new workspace, which Docker makes as root's, to the image's own user.

        A directory that belongs to somebody already is left as it is. ``needed``: it has to be
        there now, for its quota, also when it stays root's.
        """
        config = (await self.spawner.docker("inspect_image", image))["Config"]
        user = (config.get("User") or "").strip()
        if not user or user.split(":")[0] in ("root", "0"):
            if not needed:
                return
            user = "0"
        owner = user if ":" in user or user.isdigit() else f"{user}:"
        script = f'[ "$(stat -c %u {_PLACE})" != 0 ] || chown "$0" {_PLACE}'
        command = ["sh", "-c", script, owner]
        binds = [f"{source}:{_PLACE}:rw"]
        code, words = await self.spawner.run_helper(command, image=image, Binds=binds)
        if code:
            self.spawner.log.error("The workspace %s: %s", source, words)
            raise StartFailed(cause="your workspace could not be made yours (tell your admin)")
