"""Shared folders as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ..core.errors import InvalidRequest
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
    told,
    written,
)

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

LONGEST_SOURCE = 4096
"""Characters of a directory's path."""


def _longer(value: Any, field: str) -> str:
    text = str(of_type(value, str, field))
    if not 0 < len(text) <= LONGEST_SOURCE:
        raise InvalidRequest(f"The field {field!r} is text, and is not empty.", field=field)
    return text


Source = Annotated[
    str,
    checked(_longer, lambda text, field, _: _longer(text.strip(), field)),
    described(
        "A directory or volume, as listed.",
        minLength=1,
        maxLength=LONGEST_SOURCE,
        pattern=r"^[^\u0000]*$",
    ),
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


class WorkspaceBody(Body):
    workspace: Source


class RestoreBody(Body):
    """An archive, and the empty workspace that it is put into."""

    archive: Name = Field(description="The archive's name, as listed.")
    workspace: Source
    member: Written = written(255, "ada", "")


class ListedWorkspaceAnswer(Answer):
    """A workspace, as admins see it."""

    workspace: str = told("workspace.source")
    member: str = told("workspace.user")
    bytes: Count | None = told("used", description="As last measured; null if it is not known.")
    quota_bytes: Count | None = told("workspace.quota")
    last_used_at: Instant = told("workspace.seen_at")
    locked: str = told("workspace.busy", description="What an admin does with it; else empty.")
    lease: str | None = told("lease.id", None, description="Of a running server of the member.")
    former_member: bool = told("is_former")


class ArchiveAnswer(Answer):
    """A file in the hub's folder of archives."""

    name: str
    bytes: Count = told("size")
    made_at: Instant
    workspace: str = Field(description="The workspace it was made from; empty if not known.")


class WorkspaceJobAnswer(Answer):
    """Something that is done with a workspace in the background."""

    id: Count
    kind: Literal["archive", "restore"]
    state: Literal["waiting", "running", "cancelling", "done", "failed", "cancelled"]
    workspace: str
    member: str = told("user")
    archive: str
    actor: str
    asked_at: Instant
    started_at: Instant | None
    ended_at: Instant | None
    bytes: Count = told("done_bytes", description="Read or put back so far.")
    error: str = Field(description="Why it failed, or why the quota was not set; else empty.")


class WorkspacesAnswer(DatedAnswer):
    workspaces: tuple[ListedWorkspaceAnswer, ...]
    archives: tuple[ArchiveAnswer, ...]
    jobs: tuple[WorkspaceJobAnswer, ...]


class WorkspaceJobsAnswer(DatedAnswer):
    jobs: tuple[WorkspaceJobAnswer, ...]


class WorkspaceChangeAnswer(Answer):
    workspace: str
    changed: bool = Field(description="False if that had been done before.")
