"""Workspaces, datasets and shared folders of one start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from docker.errors import NotFound

from ..catalog import Mount
from ..errors import StartFailed

if TYPE_CHECKING:
    from .docker import GPUDockerSpawner

LABEL_WORKSPACE = "gpuspawner.workspace"
PREPARED = "gpuspawner_workspaces"
_PLACE = "/workspace"


class Storage:
    """What is mounted, and that the workspace is there with the right owner."""

    def __init__(
        self, spawner: GPUDockerSpawner, source: str, target: str, mounts: Sequence[Mount]
    ) -> None:
        self.spawner = spawner
        self.source = source
        self.target = target
        self.mounts = mounts

    def binds(self) -> list[str]:
        """``source:target:mode`` of everything that this server gets."""
        own = [f"{self.source}:{self.target}:rw"] if self.source else []
        others = [f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}" for m in self.mounts]
        return own + others

    async def prepare(self, image: str) -> None:
        """Make the workspace and give it to the image's user, before the server needs it."""
        prepared: set[str] = self.spawner.shared(PREPARED, set)
        if not self.source or self.source in prepared:
            return
        if self.source.startswith("/") or not await self._volume_exists():
            await self._give_to_user(image)
        prepared.add(self.source)

    async def _volume_exists(self) -> bool:
        try:
            await self.spawner.docker("inspect_volume", self.source)
            return True
        except NotFound:
            pass
        labels = {LABEL_WORKSPACE: self.spawner.user.name}
        await self.spawner.docker("create_volume", self.source, labels=labels)
        return False

    async def _give_to_user(self, image: str) -> None:
        """Hand a new workspace, which Docker makes as root's, to the image's own user.

        A directory that belongs to somebody already is left as it is.
        """
        config = (await self.spawner.docker("inspect_image", image))["Config"]
        user = (config.get("User") or "").strip()
        if not user or user.split(":")[0] in ("root", "0"):
            return
        owner = user if ":" in user or user.isdigit() else f"{user}:"
        script = f'[ "$(stat -c %u {_PLACE})" != 0 ] || chown "$0" {_PLACE}'
        command = ["sh", "-c", script, owner]
        code, words = await self.spawner.run_helper(command, Binds=[f"{self.source}:{_PLACE}:rw"])
        if code:
            self.spawner.log.error("The workspace %s: %s", self.source, words)
            raise StartFailed(cause="your workspace could not be made yours (tell your admin)")
