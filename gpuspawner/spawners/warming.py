"""Servers that were started before their member asks, and the settings for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docker.errors import APIError, NotFound
from traitlets import Bool, Unicode

from ..engines.warm import LABEL_ABLE, Gift
from ..model import Lease
from .container import labels
from .hardening import GPUDockerHardening
from .recipes import NoRecipe, Recipe, recipe_of
from .warm import WarmPool


class GPUDockerWarm(GPUDockerHardening):
    """The part of :class:`~gpuspawner.spawners.docker.GPUDockerSpawner` that starts ahead."""

    if TYPE_CHECKING:
        connect: Any
        image: str
        remove: bool
        use_internal_hostname: bool
        escaped_name: str

    warm = Bool(
        False,
        config=True,
        help="""
        Whether a container of the environment that members start most often waits on each free
        GPU, with its server loaded: who asks for it next is there sooner.

        It takes about 150 MB of memory for each free GPU, holds nothing of any member's, charges
        nobody, and is ended when its GPU goes to anybody else. Only for images that can wait (all
        in ``images/`` that stand on ``base``), one GPU, a ``workspace`` and ``remove = True``;
        else, and when anything about a member's container is particular, theirs starts as ever.
        The hub's own container with root's rights on the engine's machine makes the mounts.
        Example::

            c.GPUDockerSpawner.warm = True
        """,
    )

    warm_folder = Unicode(
        "/var/lib/gpuspawner/warm",
        config=True,
        help="""
        A folder of the hub's own, for the mounts of warm containers. A hub that runs in a
        container itself needs it mounted under the same name. Example::

            c.GPUDockerSpawner.warm_folder = "/srv/gpuspawner/warm"
        """,
    )

    _taken = ""
    """The id of the warm container that is this server's."""

    @property
    def warm_pool(self) -> WarmPool:
        """The warm containers of this hub."""
        found: WarmPool = self.shared(
            "gpuspawner_warm",
            lambda: WarmPool(self.connect, self.broker, Path(self.warm_folder), self.log),
        )
        return found

    @property
    def _may_be_warm(self) -> bool:
        return self.warm and self.engine_name == "docker"

    @property
    def _ever_warm(self) -> bool:
        """Also where it was turned off: what is left of it is to go."""
        return self._may_be_warm or os.path.isdir(self.warm_folder)

    @contextlib.contextmanager
    def starting_now(self) -> Iterator[None]:
        """Around a start: nothing is made ahead meanwhile."""
        self._taken = ""
        with self.warm_pool.starting() if self._ever_warm else contextlib.nullcontext():
            yield

    async def take_warm(self, create: Mapping[str, Any]) -> str:
        """The id of a warm container that became this server's; empty where none did.

        ``create``: how the server's own container would be made. What waits on its devices and
        is not given is ended when this returns.
        """
        lease, image = self.lease, create["image"]
        if self._ever_warm:
            self.warm_pool.begin(image)
        if not (self._may_be_warm and lease and lease.devices):
            return ""
        try:
            image_id, source = await self._found(image), await self._workspace_folder()
            recipe = self._recipe(create, lease)
        except NoRecipe as reason:
            self.log.info("%s starts as ever, and nothing ahead: %s", self._log_name, reason)
            await self.warm_pool.clear(lease.uuids, "", "")
            return ""
        self.warm_pool.learn(lease.environment, recipe, image)
        warm = await self.warm_pool.clear(lease.uuids, recipe.key, image_id)
        gift = Gift(create["name"], labels(lease), source, recipe.environment, recipe.arguments)
        if warm is None or not await self.warm_pool.take(warm, gift):
            return ""
        self.log.info("%s got a container that waited on %s", self._log_name, lease.uuids[0])
        self._taken = warm.ref
        return warm.ref

    def _recipe(self, create: Mapping[str, Any], lease: Lease) -> Recipe:
        """Raises NoRecipe where a warm container would not be what the settings say."""
        if len(lease.devices) != 1:
            raise NoRecipe("it has several GPUs")
        if not self.remove:
            raise NoRecipe("containers are kept (remove = False)")
        if self.use_internal_hostname:
            raise NoRecipe("servers are found by their container's name (use_internal_hostname)")
        if self.own_image:
            raise NoRecipe("it is of the member's own image")
        storage = self.storage()
        return recipe_of(
            create,
            uuid=lease.uuids[0],
            source=storage.source,
            target=storage.target,
            members=tuple({self.user.name, self.escaped_name, self.user.escaped_name}),
        )

    async def _found(self, image: str) -> str:
        """The image's id. Raises NoRecipe when it cannot wait."""
        try:
            found = await self._call("inspect_image", image)
        except NotFound:
            raise NoRecipe("its image is not here") from None
        if LABEL_ABLE not in (found["Config"].get("Labels") or {}):
            raise NoRecipe(f"its image cannot wait (no label {LABEL_ABLE})")
        image_id: str = found["Id"]
        return image_id

    async def _workspace_folder(self) -> str:
        """Where the workspace is on the engine's machine. Raises NoRecipe where that is nowhere."""
        source = self.storage().source
        if not source:
            raise NoRecipe("it has no workspace")
        if source.startswith("/"):
            return source
        try:
            volume = await self._call("inspect_volume", source)
        except APIError as error:
            raise NoRecipe(f"its workspace cannot be seen: {error.explanation}") from error
        if volume["Driver"] != "local" or volume.get("Options"):
            raise NoRecipe("its workspace is a volume that Docker mounts itself")
        folder: str = volume["Mountpoint"]
        return folder
