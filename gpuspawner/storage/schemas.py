"""Shared folders as JSON."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ..core.errors import InvalidRequest
from ..web.fields import of_type
from ..web.schemas import Answer, Body, DatedAnswer, Instant, checked, described, told

LONGEST_SENT = 1000
"""Characters of a name that is sent; what makes and finds it says how long it may be."""


def _name(value: Any, field: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_SENT:
        raise InvalidRequest(f"The field {field!r} is text, and is not empty.", field=field)
    return value


Name = Annotated[
    str,
    checked(_name, lambda text, *_: text),
    described(minLength=1, maxLength=LONGEST_SENT),
]
MayWrite = Annotated[
    bool,
    checked(lambda value, field: of_type(value, bool, field), lambda text, *_: text == "yes"),
    described(kind="boolean"),
]


class NewFolderBody(Body):
    """A new folder."""

    name: Name = Field(
        description="Letters and digits of any script, and some signs between them.",
        json_schema_extra={"maxLength": 60},
    )


class FolderMemberBody(Body):
    member: Name = Field(description="A member's name at the Hub.")


class InvitationBody(FolderMemberBody):
    write: MayWrite


class FolderNameBody(Body):
    name: Name = Field(description="The folder's own, once more.")


class FolderMemberAnswer(Answer):
    member: str = told("user")
    write: bool
    invited_by: str
    invited_at: Instant
    accepted_at: Instant | None


class FolderAnswer(Answer):
    """A folder as somebody sees it."""

    id: str
    name: str
    owner: str
    owner_left_at: Instant | None = told("left_at")
    made_at: Instant
    deleted_at: Instant | None
    mine: bool
    mounted_as: str | None
    write: bool
    members: tuple[FolderMemberAnswer, ...]


class FoldersAnswer(DatedAnswer):
    folders: tuple[FolderAnswer, ...]
