"""Environments and updates of images as JSON."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ..core.errors import InvalidRequest
from ..web.fields import of_type
from ..web.schemas import (
    Answer,
    Body,
    Count,
    DatedAnswer,
    Instant,
    Number,
    Written,
    checked,
    described,
    told,
    written,
)
from .value_kinds import LONGEST_SLUG

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


class EnvironmentAnswer(Answer):
    """An environment, and what may be asked for with it."""

    model_config = ConfigDict(extra="ignore")

    environment: str = told("slug", description="Its name in requests.")
    name: str = told("display_name")
    summary: str
    default: bool = Field(description="True if it is the one that requests get which name none.")
    frameworks: dict[str, str] = Field(description="What comes with it, in which version.")
    default_gpus: Count = told("devices.default")
    max_gpus: Count = told("devices.max")
    cpu_variant: bool = Field(description="Whether it can be started without a GPU.")
    sharing: Literal["whole", "slot", "any"] = Field(
        description="Whether its servers get whole GPUs, a share of one, or what is asked for."
    )
    models: tuple[str, ...] = Field(description="Only these GPU models; empty for any.")
    default_hours: Number | None = told("hours.default")
    max_hours: Number | None = told("hours.max", description="Null: as for any environment.")


class EnvironmentsAnswer(DatedAnswer):
    environments: tuple[EnvironmentAnswer, ...]


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
