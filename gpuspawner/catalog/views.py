"""Updates of images as JSON, for admins. The Hub runs them: it knows the catalog and the engine."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field
from tornado import web

from ..core.errors import InvalidRequest, Unavailable
from ..web.api import ChangingAPI, operation, refusals
from ..web.base import HubCalls, ServiceHandler
from ..web.fields import of_type
from ..web.schemas import (
    Answer,
    Body,
    Count,
    DatedAnswer,
    Instant,
    Written,
    checked,
    described,
    written,
)
from .value_kinds import LONGEST_SLUG

SLUG = "([^/]{1,100})"
DIGEST = "sha256:[0-9a-f]{64}"


def _digest(value: Any, field: str) -> str:
    text = str(of_type(value, str, field))
    if not re.fullmatch(DIGEST, text):
        raise InvalidRequest(
            f"The field {field!r} must be the digest of the offered image.", field=field
        )
    return text


Digest = Annotated[
    str,
    checked(_digest),
    described(
        "Of the offered image. The update starts only if the registry still offers it.",
        pattern=f"^{DIGEST}$",
    ),
]


class ImageUpdateBody(Body):
    """The image to update to, and the name of an environment that keeps the current one."""

    digest: Digest
    keep_as: Written = written(LONGEST_SLUG, "pytorch-older", "")


class ImageOfferAnswer(Answer):
    """What an environment's registry offers."""

    environment: str
    image: str = Field(description="The current one, with its digest if that is known.")
    offered: str = Field(description="The offered one, with its digest.")
    digest: str
    newer: bool = Field(description="False: the environment has it already.")


class ImageUpdateAnswer(Answer):
    """The update of an environment's image, in the background."""

    id: Count
    state: Literal["pulling", "testing", "done", "failed"]
    environment: str
    image: str = Field(description="The image before the update.")
    offered: str
    keep_as: str = Field(description="The environment that keeps the old image; empty for none.")
    actor: str
    started_at: Instant
    ended_at: Instant | None
    bytes: Count = Field(description="Downloaded so far.")
    all_bytes: Count = Field(description="Of all layers whose download has begun.")
    error: str = Field(description="Why it failed, or what else went wrong; else empty.")


class ImageUpdatesAnswer(DatedAnswer):
    updates: tuple[ImageUpdateAnswer, ...]


class UpdatesAPI(ChangingAPI):
    """The base of the operations on images."""

    @property
    def hub(self) -> HubCalls:
        """The Hub. Raises Unavailable without one."""
        if self.context.hub is None:
            raise Unavailable()
        return self.context.hub


class RecentImageUpdatesAPI(UpdatesAPI):
    """The updates of images that run or ended lately."""

    @operation("catalog/updates", ImageUpdatesAnswer, name="imageUpdates")
    @web.authenticated
    async def get(self) -> None:
        """List the updates of images that run or ended lately, newest first, for admins."""
        self.need_admin()
        with refusals():
            found = await self.hub.image_updates()
        updates = [ImageUpdateAnswer.model_validate(each) for each in found]
        self.answer(ImageUpdatesAnswer, as_of=self.services.clock(), updates=updates)


class ImageUpdateAPI(UpdatesAPI):
    """What the registry offers for an environment, and the update to it."""

    @operation("catalog/{environment}/update", ImageOfferAnswer, name="imageOffer")
    @web.authenticated
    async def get(self, slug: str) -> None:
        """Ask the registry of an environment for its newest image, for admins."""
        self.need_admin()
        with refusals():
            found = await self.hub.image_offer(slug, actor=self.user)
        self.finish(ImageOfferAnswer.model_validate(found).as_json())

    @operation(
        "catalog/{environment}/update",
        ImageUpdateAnswer,
        name="updateImage",
        body=ImageUpdateBody,
    )
    @web.authenticated
    async def post(self, slug: str) -> None:
        """Download and test the offered image in the background, and let the environment have it.

        One is updated at a time. If it fails its test, nothing is changed.
        """
        self.need_admin()
        sent = self.sent(ImageUpdateBody)
        with refusals():
            found = await self.hub.update_image(
                slug, digest=sent.digest, keep_as=sent.keep_as, actor=self.user
            )
        self.finish(ImageUpdateAnswer.model_validate(found).as_json())


CATALOG_API_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("api/catalog/updates", RecentImageUpdatesAPI),
    (f"api/catalog/{SLUG}/update", ImageUpdateAPI),
]
