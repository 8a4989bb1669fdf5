"""What the REST API takes and answers, as an OpenAPI 3.1 document. Tests hold the service to it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from .. import __version__
from . import openapi_admin, openapi_cluster, openapi_folders, openapi_now
from .api import APIHandler
from .base import Handler
from .openapi_schemas import SCHEMAS, choices, ref

Operation = dict[str, Any]

ERRORS = {
    400: "A field is not valid; the sentence names it.",
    401: "You did not say who you are.",
    403: "You may not: it is somebody else's, or your token's scopes do not allow it.",
    404: "There is nothing of this name.",
    405: "Nothing can be done here in this way.",
    409: "It cannot be done as things are now.",
    429: "It was done a moment ago: wait a little.",
    503: "The database or the Hub does not answer just now.",
}

_ID = {"type": "integer", "minimum": 1, "maximum": 2**62}
_NAME = {"type": "string", "minLength": 1, "maxLength": 100}
_HEX = {"type": "string", "pattern": "^[0-9a-f]{1,64}$"}

LIMIT = {
    "name": "limit",
    "in": "query",
    "description": "How many at the most.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 500, "default": 50},
}


def query(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    """A parameter after the question mark."""
    return {"name": name, "in": "query", "description": description, "schema": schema}


def in_path(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    """A part of the path."""
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": schema,
    }


BEFORE = query("before", _ID, "Of the next page: the last answer's `next`.")
AFTER = query("after", {**_ID, "minimum": 0}, "Of the next page: the last answer's `next`.")
SEARCH = query("search", {"type": "string", "maxLength": 200}, "Text in it, in any case.")
ACCOUNT = in_path(
    "account",
    {"type": "string", "pattern": "^(member|group):[A-Za-z0-9_.@-]{1,60}$"},
    "`member:NAME` or `group:NAME`.",
)
LEASE = in_path("lease", _HEX, "The lease's id.")
TRANSFER = in_path("transfer", {"type": "string", "pattern": "^[0-9a-f]{32}$"}, "Its id.")
TICKET = in_path("ticket", {"type": "string", "pattern": "^[0-9A-Za-z-]{1,64}$"}, "Its id.")
DEVICE = in_path(
    "device", {"type": "string", "pattern": "^[0-9A-Za-z-]{1,100}$"}, "Its UUID or index."
)
DAY = {"type": "string", "format": "date"}


def operation(
    name: str, summary: str, answer: str, *parameters: dict[str, Any], body: str = ""
) -> Operation:
    """One thing that can be done; ``answer`` and ``body`` are names of schemas."""
    told: Operation = {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": "Done.", "content": _json(answer)},
            **{
                str(status): {"description": why, "content": _json("Error")}
                for status, why in ERRORS.items()
            },
        },
    }
    if parameters:
        told["parameters"] = list(parameters)
    if body:
        told["requestBody"] = {"required": body != "Why", "content": _json(body)}
    return told


def paths() -> dict[str, dict[str, Operation]]:
    """Every path with what can be done there."""
    return {
        "/api/me": {"get": operation("me", "My balance, servers and newest lines.", "Me")},
        "/api/devices": {"get": operation("devices", "Every device with its state.", "Devices")},
        "/api/cluster": {
            "get": operation("cluster", "Every device, and what it does just now.", "Cluster")
        },
        "/api/leases": {
            "get": operation(
                "leases",
                "My servers' leases, newest first; everybody's, for admins.",
                "Leases",
                query("all", {"enum": ["0", "1"]}, "1: everybody's."),
                query("before", _HEX, "Of the next page: the last answer's `next`."),
                LIMIT,
            )
        },
        "/api/leases/{lease}/extend": {
            "post": operation("extend", "Begin a session's length anew.", "Lease", LEASE)
        },
        "/api/leases/{lease}/snooze": {
            "post": operation("snooze", "Put off a stop for GPUs that rest.", "Lease", LEASE)
        },
        "/api/leases/{lease}/end": {
            "post": operation("end", "Stop a server of mine.", "Lease", LEASE)
        },
        "/api/leases/{lease}/now": {
            "get": operation("now", "What a server's GPUs do, and what comes.", "Now", LEASE)
        },
        "/api/leases/{lease}/restart": {
            "post": operation("restart", "Restart a server that lost its GPUs.", "Lease", LEASE)
        },
        "/api/leases/{lease}/receipt": {
            "get": operation(
                "receipt", "What a session cost, item by item.", "Receipt", LEASE, AFTER, LIMIT
            )
        },
        **openapi_admin.paths(operation, in_path, LEASE),
        **_of_accounts(),
        **_of_the_line(),
        **_of_notices(),
        **_of_folders(),
        "/api/openapi.json": {"get": operation("openapi", "This document.", "Anything")},
    }


def _of_accounts() -> dict[str, dict[str, Operation]]:
    return {
        "/api/accounts": {
            "get": operation(
                "accounts",
                "The accounts that I may see, by name.",
                "Accounts",
                SEARCH,
                query("after", {"type": "string"}, "Of the next page: the last answer's `next`."),
                LIMIT,
            )
        },
        "/api/accounts/{account}": {
            "get": operation("account", "One account.", "Account", ACCOUNT)
        },
        "/api/accounts/{account}/statement": {
            "get": operation(
                "statement",
                "What came and went, newest first.",
                "Statement",
                ACCOUNT,
                BEFORE,
                LIMIT,
            )
        },
        "/api/accounts/{account}/grants": {
            "post": operation(
                "grant",
                "Give credits, until a moment if you like. Admins take some back with an amount "
                "below zero; for others that is 403. The same key with the same amount is done "
                "once, however often it is sent.",
                "Granted",
                ACCOUNT,
                body="Grant",
            )
        },
        "/api/transfers/{transfer}": {
            "get": operation("transfer", "One event of the ledger.", "Transfer", TRANSFER)
        },
        "/api/transfers/{transfer}/reversal": {
            "post": operation(
                "reverse", "Undo it by its opposite, once.", "Transfer", TRANSFER, body="Needed"
            )
        },
        "/api/usage": {
            "get": operation(
                "usage",
                "Who used what, added up.",
                "Usage",
                query(
                    "by",
                    {"enum": ["member", "group", "account", "model", "environment", "week"]},
                    "What it is added up by.",
                ),
                query("from", DAY, "The first day, of the hub's own zone."),
                query("to", DAY, "The last day, which is counted."),
            )
        },
        "/api/used": {
            "get": operation(
                "used",
                "How much of what was held was used, and the sessions that rested most.",
                "Used",
                query("by", {"enum": ["member", "group", "model"]}, "What it is added up by."),
                query("from", DAY, "The first day, of the hub's own zone."),
                query("to", DAY, "The last day, at most three months after it."),
            )
        },
        "/api/trail": {
            "get": operation(
                "trail", "Who changed what, newest first.", "Trail", SEARCH, BEFORE, LIMIT
            )
        },
    }


def _of_the_line() -> dict[str, dict[str, Operation]]:
    return {
        "/api/queue": {
            "get": operation("queue", "The line: all of it for admins, else my part.", "Queue")
        },
        "/api/queue/{ticket}/cancel": {
            "post": operation(
                "cancel", "Take a ticket out of the line.", "Ticket", TICKET, body="Why"
            )
        },
        "/api/queue/{ticket}/boost": {
            "post": operation("boost", "Add points to its score.", "Ticket", TICKET, body="Boost")
        },
        "/api/queue/{ticket}/move": {
            "post": operation(
                "move", "Give it a place; null ends that.", "Ticket", TICKET, body="Move"
            )
        },
        "/api/granting": {
            "post": operation("pause", "Give out no GPUs, or go on.", "Paused", body="Pause")
        },
        "/api/devices/{device}/drain": {
            "post": operation(
                "drain", "Give a device to nobody new.", "Drained", DEVICE, body="Why"
            )
        },
        "/api/devices/{device}/undrain": {
            "post": operation("undrain", "Give it out again.", "Drained", DEVICE, body="Why")
        },
    }


def _of_notices() -> dict[str, dict[str, Operation]]:
    return {
        "/api/notices": {
            "get": operation("notices", "What I was told, and what I chose.", "Notices")
        },
        "/api/notices/choices": {
            "put": operation("choose", "How I want to be told.", "Notices", body="Choices")
        },
        "/api/notices/test": {"post": operation("test", "Send me a test.", "Notice")},
    }


def _of_folders() -> dict[str, dict[str, Operation]]:
    folder = in_path("folder", openapi_folders.ID, "The folder's id.")
    changes = {
        "invite": ("Share it with a member, to read or to write too.", "Invitation"),
        "accept": ("Take what was offered: my next server has it.", ""),
        "leave": ("Give it back, or say no to it.", ""),
        "uninvite": ("Share it with a member no more.", "Member"),
        "hand-on": ("Make another member its owner.", "Member"),
        "delete": ("Take it from everybody; its name is written once more.", "Name"),
        "restore": ("Bring a deleted one back, for admins.", ""),
    }
    return {
        "/api/folders": {
            "get": operation(
                "folders",
                "Shared folders: mine, and those that I am invited to.",
                "Folders",
                query("all", {"enum": ["0", "1"]}, "1: everybody's, for admins."),
            ),
            "post": operation("makeFolder", "Make a shared folder.", "Folder", body="NewFolder"),
        },
        **{
            f"/api/folders/{{folder}}/{action}": {
                "post": operation(
                    f"{action.replace('-', '')}Folder", summary, "Folder", folder, body=body
                )
            }
            for action, (summary, body) in changes.items()
        },
    }


def document(prefix: str, channels: Collection[str] = ()) -> dict[str, Any]:
    """The whole document, for a service that lies below ``prefix`` and has these channels."""
    schemas = {
        **SCHEMAS,
        **openapi_admin.SCHEMAS,
        **openapi_cluster.SCHEMAS,
        **openapi_folders.SCHEMAS,
        **openapi_now.SCHEMAS,
        "Choices": choices(channels),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpuspawner",
            "version": __version__,
            "description": "GPUs shared fairly. Amounts are credits as decimal strings, times are "
            "ISO 8601 in UTC. Send a token of the Hub as `Authorization: token ...`.",
        },
        "servers": [{"url": prefix.rstrip("/") or "/"}],
        "security": [{"hub": []}],
        "paths": paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "hub": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token of the Hub, of a member or of a service.",
                }
            },
        },
    }


class OpenAPIHandler(APIHandler):
    """The document. It says nothing of anybody, so whoever finds the service may read it."""

    async def prepare(self) -> None:
        """Nobody is asked who they are."""

    def get(self) -> None:
        """Send it."""
        self.answer(document(self.context.prefix, self.context.channels))


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": ref(name)}}


HANDLERS: list[tuple[str, type[Handler]]] = [(r"api/openapi\.json", OpenAPIHandler)]
