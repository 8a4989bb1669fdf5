"""The page of the catalog for admins: its environments, and whether their images are here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any

import docker
from jupyterhub.scopes import needs_scope
from jupyterhub.user import User
from tornado import web

from ..catalog.models import Environment
from ..core.errors import EngineUnavailable
from ..engines.images import ImageState, image_state
from .handlers import HubPageHandler

ENGINE_SECONDS = 20.0
"""Seconds that the engine and a registry may take for one image."""


class CatalogState(HubPageHandler):
    """The page ``/hub/catalog``; with ``updates=1`` the registries are asked for newer images."""

    @web.authenticated
    @needs_scope("admin-ui")
    async def get(self) -> None:
        """Send the page."""
        environments = self.catalog().environments
        asked = self.get_argument("updates", "") == "1"
        states, problem = await self._images(environments, asked)
        await self.show(
            "catalog_state.html",
            environments=environments,
            states=states,
            asked=asked,
            problem=problem,
            file=self.site.configured("catalog"),
            refusal=self.site.catalog_problem(),
        )

    async def _images(
        self, environments: Sequence[Environment], asked: bool
    ) -> tuple[dict[str, ImageState], str]:
        """Return the images' states by reference, and why there are none."""
        user = self.current_user
        connect = getattr(user.spawner, "connect", None) if isinstance(user, User) else None
        if connect is None:
            return {}, ""  # servers are no containers
        images = dict.fromkeys(image for each in environments for image in each.images if image)
        try:
            return await asyncio.to_thread(_look, connect, images, asked), ""
        except (EngineUnavailable, docker.errors.DockerException, OSError) as error:
            self.log.warning("The images of the catalog cannot be seen: %s", error)
            return {}, "The Docker Engine does not answer, so the images cannot be seen."


def _look(connect: Callable[[float], Any], images: Iterable[str], ask: bool) -> dict[str, Any]:
    with closing(connect(ENGINE_SECONDS)) as client:
        return {image: image_state(client, image, ask_registry=ask) for image in images}
