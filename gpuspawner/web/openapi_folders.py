"""Shared folders in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from .openapi_schemas import FLAG, INSTANT, TEXT, Schema, full, listed, maybe, sent

NAME: Schema = {
    "type": "string",
    "minLength": 1,
    "maxLength": 60,
    "description": "Letters and digits of any script, and some signs between them.",
}
WRITTEN: Schema = {"type": "string", "minLength": 1, "maxLength": 1000}
WHO: Schema = {**WRITTEN, "description": "A member's name at the Hub."}

FOLDER = full(
    id=TEXT,
    name=TEXT,
    owner=TEXT,
    owner_left_at=maybe(INSTANT),
    made_at=INSTANT,
    deleted_at=maybe(INSTANT),
    mine=FLAG,
    mounted_as=maybe(TEXT),
    write=FLAG,
    members=listed(
        full(
            member=TEXT,
            write=FLAG,
            invited_by=TEXT,
            invited_at=INSTANT,
            accepted_at=maybe(INSTANT),
        )
    ),
)

SCHEMAS: dict[str, Schema] = {
    "Folder": FOLDER,
    "Folders": full(as_of=INSTANT, folders=listed(FOLDER)),
    "NewFolder": sent(("name",), name=NAME),
    "Invitation": sent(("member", "write"), member=WHO, write=FLAG),
    "Member": sent(("member",), member=WHO),
    "Name": sent(("name",), name={**WRITTEN, "description": "The folder's own, once more."}),
}

ID: dict[str, Any] = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
