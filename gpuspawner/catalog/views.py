"""Environments and updates of images as JSON. The Hub knows the catalog and the engine."""

from __future__ import annotations

from tornado import web

from ..core.errors import Unavailable
from ..core.scopes import SESSION
from ..web.api import ChangingAPI, operation, refusals
from ..web.base import HubCalls, ServiceHandler
from . import schemas

SLUG = "([^/]{1,100})"


class UpdatesAPI(ChangingAPI):
    """The base of the operations on images."""

    @property
    def hub(self) -> HubCalls:
        """The Hub. Raises Unavailable without one."""
        if self.context.hub is None:
            raise Unavailable()
        return self.context.hub


class EnvironmentsAPI(UpdatesAPI):
    """The environments that the member may choose."""

    for_servers = True

    @operation("environments", schemas.EnvironmentsAnswer, scope=SESSION)
    @web.authenticated
    async def get(self) -> None:
        """List the environments that I may choose, in the order of the catalog."""
        with refusals():
            found = await self.hub.environments(self.user)
        told = [schemas.EnvironmentAnswer.model_validate(each) for each in found]
        self.answer(schemas.EnvironmentsAnswer, as_of=self.services.clock(), environments=told)


class RecentImageUpdatesAPI(UpdatesAPI):
    """The updates of images that run or ended lately."""

    @operation("catalog/updates", schemas.ImageUpdatesAnswer, name="imageUpdates")
    @web.authenticated
    async def get(self) -> None:
        """List the updates of images that run or ended lately, newest first, for admins."""
        self.need_admin()
        with refusals():
            found = await self.hub.image_updates()
        updates = [schemas.ImageUpdateAnswer.model_validate(each) for each in found]
        self.answer(schemas.ImageUpdatesAnswer, as_of=self.services.clock(), updates=updates)


class ImageUpdateAPI(UpdatesAPI):
    """What the registry offers for an environment, and the update to it."""

    @operation("catalog/{environment}/update", schemas.ImageOfferAnswer, name="imageOffer")
    @web.authenticated
    async def get(self, slug: str) -> None:
        """Ask the registry of an environment for its newest image, for admins."""
        self.need_admin()
        with refusals():
            found = await self.hub.image_offer(slug, actor=self.user)
        self.finish(schemas.ImageOfferAnswer.model_validate(found).as_json())

    @operation(
        "catalog/{environment}/update",
        schemas.ImageUpdateAnswer,
        name="updateImage",
        body=schemas.ImageUpdateBody,
    )
    @web.authenticated
    async def post(self, slug: str) -> None:
        """Download and test the offered image in the background, and let the environment have it.

        One is updated at a time. If it fails its test, nothing is changed.
        """
        self.need_admin()
        sent = self.sent(schemas.ImageUpdateBody)
        with refusals():
            found = await self.hub.update_image(
                slug, digest=sent.digest, keep_as=sent.keep_as, actor=self.user
            )
        self.finish(schemas.ImageUpdateAnswer.model_validate(found).as_json())


CATALOG_API_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("api/environments", EnvironmentsAPI),
    ("api/catalog/updates", RecentImageUpdatesAPI),
    (f"api/catalog/{SLUG}/update", ImageUpdateAPI),
]
