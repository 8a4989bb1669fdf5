"""Notices, and how members want to be told, as JSON."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model

from ..web.schemas import Answer, DatedAnswer, Instant, told


class NoticeAnswer(Answer):
    kind: str = told("kind.value")
    title: str
    body: str
    at: Instant
    state: str
    error: str


class ChannelAnswer(Answer):
    """A channel with what the member has there. Its URL is the admin's alone."""

    name: str
    label: str
    needs_address: bool
    example: str
    address: str
    kinds: tuple[str, ...]


class NoticesAnswer(DatedAnswer):
    channels: tuple[ChannelAnswer, ...]
    kinds: tuple[str, ...]
    notices: tuple[NoticeAnswer, ...]


class ChoiceBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    address: str = ""
    kinds: list[str] = []


def choices_body(channels: Collection[str]) -> type[BaseModel]:
    """Return how a member wants to be told, by the names of a hub's channels."""
    fields: dict[str, Any] = {name: (ChoiceBody, ChoiceBody()) for name in channels}
    return create_model(
        "ChoicesBody",
        __config__=ConfigDict(extra="forbid"),
        __doc__="Channels that are not named stay as they are.",
        **fields,
    )
