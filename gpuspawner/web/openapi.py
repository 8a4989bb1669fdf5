"""The OpenAPI document of the REST API, and the JSON Schema of catalogs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from tornado import web

from .. import __version__
from ..catalog.json_schema import schema
from .api import APIHandler
from .base import POLICY, ServiceHandler
from .fields import EXACT, INSTANT
from .openapi_schemas import (
    AMOUNT,
    COUNT,
    DAY_SCHEMA,
    FLAG,
    FUNDS,
    INSTANT_SCHEMA,
    INTEGER,
    NEEDED,
    NUMBER,
    REASON,
    REFILL,
    SCHEMAS,
    TEXT,
    Schema,
    choices,
    full,
    listed,
    maybe,
    ref,
    sent,
)


class SchemaHandler(web.RequestHandler):
    """It says what a catalog may hold, and nothing of this hub's own."""

    def initialize(self, context: Any) -> None:
        self.set_header("Content-Security-Policy", POLICY)

    def get(self) -> None:
        self.set_header("Content-Type", "application/schema+json")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Access-Control-Allow-Origin", "*")  # editors in a browser read it too
        self.set_header("Cache-Control", "public, max-age=3600")
        self.finish(json.dumps(schema()))


CATALOG_SCHEMA_HANDLERS: list[tuple[str, type[web.RequestHandler]]] = [
    (r"catalog\.schema\.json", SchemaHandler)
]


KEY: Schema = {
    "type": "string",
    "pattern": "^[0-9A-Za-z_.:-]{1,100}$",
    "description": "What is sent again with the same key is done once.",
}
MOMENT: Schema = {
    "type": "string",
    "format": "date-time",
    "pattern": f"^{INSTANT}$",
    "examples": ["2027-07-01T00:00:00Z"],
}
PART: Schema = {
    "type": "string",
    "pattern": f"^{EXACT.removeprefix('-?')}$",
    "description": "Credits with six decimals at the most; above zero.",
    "examples": ["1.5"],
}
ADMIN_WRITTEN: Schema = {"type": "string", "pattern": r"^[^\u0000]*$"}

RULES = {
    "rule": {**ADMIN_WRITTEN, "maxLength": 400, "examples": ["FREQ=WEEKLY;BYDAY=MO;BYHOUR=6"]},
    "zone": {**ADMIN_WRITTEN, "maxLength": 60, "examples": ["Europe/Vienna"]},
    "from": maybe(MOMENT),
    "mode": {"enum": ["add", "top_up"]},
    "amount": PART,
    "cap": maybe(PART),
    "keep_days": maybe({"type": "integer", "minimum": 1, "maximum": 3660}),
    "audience": {
        "type": "array",
        "items": {**ADMIN_WRITTEN, "minLength": 1, "maxLength": 100},
        "minItems": 1,
        "examples": [["members:ml101"], ["member:ada"]],
    },
    "reason": NEEDED,
    "key": KEY,
    "dry_run": FLAG,
}

ADMIN_SCHEMAS: dict[str, Schema] = {
    "Refund": sent(("reason",), amount=maybe(PART), reason=NEEDED, key=KEY),
    "NewRate": sent(
        ("rate",),
        **{
            "rate": {**ADMIN_WRITTEN, "maxLength": 40, "examples": ["2.5"]},
            "model": {**ADMIN_WRITTEN, "maxLength": 100, "examples": ["A100"]},
            "environment": {**ADMIN_WRITTEN, "maxLength": 100, "examples": ["course"]},
            "slots": maybe({"type": "integer", "minimum": 1, "maximum": 1024}),
            "hours": {**ADMIN_WRITTEN, "maxLength": 100, "examples": ["Mon-Fri 20-8, Sat, Sun"]},
            "zone": {**ADMIN_WRITTEN, "maxLength": 60, "examples": ["Europe/Vienna"]},
            "from": maybe(MOMENT),
            "reason": REASON,
        },
    ),
    "NewRefill": sent(("rule", "amount", "audience", "reason"), **RULES),
    "Refill": full(
        **REFILL["properties"],
        made={**FLAG, "description": "Whether there is one now."},
        comes_at=listed({"type": "string", "format": "date-time"}),
        gifts=listed(full(account=TEXT, balance=AMOUNT, amount=AMOUNT)),
    ),
    "NewGrants": sent(
        ("csv",),
        csv={
            **ADMIN_WRITTEN,
            "description": "Lines of member, amount and, if you like, reason; as in a file.",
            "examples": ["ada,2.5,week 3\nbob,2.5,week 3"],
        },
        reason=REASON,
        dry_run={**FLAG, "description": "Only say what it would do."},
        open={**FLAG, "description": "Open accounts that are not there."},
        again={**FLAG, "description": "Although the same was given before."},
        until=maybe(MOMENT),
    ),
    "Grants": full(
        done=FLAG,
        total=AMOUNT,
        lines=listed(
            full(
                line=COUNT,
                account=TEXT,
                amount=AMOUNT,
                before=AMOUNT,
                after=AMOUNT,
                reason=TEXT,
                opened=FLAG,
            )
        ),
        problems=listed(full(line=maybe(COUNT), what=TEXT)),
    ),
}


def admin_paths(
    operation: Callable[..., dict[str, Any]],
    in_path: Callable[..., dict[str, Any]],
    lease: dict[str, Any],
) -> dict[str, dict[str, Any]]:
    """The paths, made by the functions of the document; ``lease`` is its parameter."""
    rate = in_path("rate", {"type": "integer", "minimum": 1, "maximum": 10**18 - 1}, "Its number.")
    refill = in_path("refill", {"type": "string", "pattern": "^[0-9a-f]{1,32}$"}, "Its id.")
    return {
        "/api/leases/{lease}/stop": {
            "post": operation(
                "stop",
                "Have a server stopped; its member is told why.",
                "Lease",
                lease,
                body="Needed",
            )
        },
        "/api/leases/{lease}/refund": {
            "post": operation(
                "refund",
                "Give back what a session cost: all that is left of it, or a part.",
                "Lease",
                lease,
                body="Refund",
            )
        },
        "/api/rates": {
            "get": operation("rates", "What GPU time costs.", "Rates"),
            "post": operation(
                "setRate", "Have new servers pay so much; for admins.", "RateTold", body="NewRate"
            ),
        },
        "/api/rates/{rate}/remove": {
            "post": operation(
                "removeRate", "Have an admin's rate hold no more.", "RateTold", rate, body="Why"
            )
        },
        "/api/refills": {
            "get": operation("refills", "Credits that come again.", "Refills"),
            "post": operation(
                "makeRefill",
                "Give credits again and again, or say what that would do.",
                "Refill",
                body="NewRefill",
            ),
        },
        "/api/refills/{refill}": {
            "get": operation("refill", "One of them, and what it gives next.", "Refill", refill)
        },
        "/api/refills/{refill}/end": {
            "post": operation(
                "endRefill", "Give it no more; what was given stays.", "Refill", refill, body="Why"
            )
        },
        "/api/grants": {
            "post": operation(
                "grantMany",
                "Give to many at once: all of it or nothing, and the same once; for admins.",
                "Grants",
                body="NewGrants",
            )
        },
    }


WORKED: Schema = {
    "held_gpu_seconds": COUNT,
    "measured_gpu_seconds": COUNT,
    "used_gpu_seconds": COUNT,
    "rested_gpu_seconds": COUNT,
}

CLUSTER_SCHEMAS: dict[str, Schema] = {
    "Cluster": full(
        as_of=INSTANT_SCHEMA,
        seen=FLAG,
        total=COUNT,
        free=COUNT,
        waiting=COUNT,
        devices=listed(
            full(
                uuid=TEXT,
                index=INTEGER,
                model=TEXT,
                memory_bytes=COUNT,
                state=TEXT,
                mine=FLAG,
                user=maybe(TEXT),
                server=maybe(TEXT),
                since=maybe(INSTANT_SCHEMA),
                use_percent=maybe(NUMBER),
                busy=maybe(FLAG),
                memory_used_bytes=maybe(COUNT),
                temperature_celsius=maybe(INTEGER),
                power_watts=maybe(NUMBER),
                health=TEXT,
                note=TEXT,
            )
        ),
    ),
    "Used": full(
        by=TEXT,
        first_day=DAY_SCHEMA,
        last_day=DAY_SCHEMA,
        as_of=INSTANT_SCHEMA,
        rows=listed(full(name=TEXT, sessions=COUNT, **WORKED)),
        total=full(sessions=COUNT, **WORKED),
        batch=full(held_gpu_seconds=COUNT),
        most_rested=listed(
            full(
                lease=TEXT,
                user=TEXT,
                server=TEXT,
                group=TEXT,
                model=TEXT,
                devices=COUNT,
                started_at=INSTANT_SCHEMA,
                ended_at=maybe(INSTANT_SCHEMA),
                **WORKED,
            )
        ),
    ),
}


NAME: Schema = {
    "type": "string",
    "minLength": 1,
    "maxLength": 60,
    "description": "Letters and digits of any script, and some signs between them.",
}
FOLDER_WRITTEN: Schema = {"type": "string", "minLength": 1, "maxLength": 1000}
WHO: Schema = {**FOLDER_WRITTEN, "description": "A member's name at the Hub."}

FOLDER = full(
    id=TEXT,
    name=TEXT,
    owner=TEXT,
    owner_left_at=maybe(INSTANT_SCHEMA),
    made_at=INSTANT_SCHEMA,
    deleted_at=maybe(INSTANT_SCHEMA),
    mine=FLAG,
    mounted_as=maybe(TEXT),
    write=FLAG,
    members=listed(
        full(
            member=TEXT,
            write=FLAG,
            invited_by=TEXT,
            invited_at=INSTANT_SCHEMA,
            accepted_at=maybe(INSTANT_SCHEMA),
        )
    ),
)

FOLDER_SCHEMAS: dict[str, Schema] = {
    "Folder": FOLDER,
    "Folders": full(as_of=INSTANT_SCHEMA, folders=listed(FOLDER)),
    "NewFolder": sent(("name",), name=NAME),
    "Invitation": sent(("member", "write"), member=WHO, write=FLAG),
    "Member": sent(("member",), member=WHO),
    "Name": sent(("name",), name={**FOLDER_WRITTEN, "description": "The folder's own, once more."}),
}

ID: dict[str, Any] = {"type": "string", "pattern": "^[0-9a-f]{16}$"}


_DEVICE = full(
    uuid=TEXT,
    index=INTEGER,
    model=TEXT,
    memory_bytes=COUNT,
    use_percent=maybe(NUMBER),
    busy=maybe(FLAG),
    used_bytes=maybe(COUNT),
    error=TEXT,
    minutes=listed(full(at=INSTANT_SCHEMA, use_percent=maybe(NUMBER), used_bytes=maybe(COUNT))),
)
_WARNING = full(
    kind={"enum": ["lost", "sick", "idle", "session", "credits"]},
    key=TEXT,
    at=maybe(INSTANT_SCHEMA),
    snooze_minutes=NUMBER,
)

LEASE_NOW_SCHEMAS = {
    "Now": full(
        as_of=INSTANT_SCHEMA,
        page=TEXT,
        lease=ref("Lease"),
        account=maybe(full(**FUNDS)),
        devices=listed(_DEVICE),
        warnings=listed(_WARNING),
    )
}


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


def all_paths() -> dict[str, dict[str, Operation]]:
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
        **admin_paths(operation, in_path, LEASE),
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
    folder = in_path("folder", ID, "The folder's id.")
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
        **ADMIN_SCHEMAS,
        **CLUSTER_SCHEMAS,
        **FOLDER_SCHEMAS,
        **LEASE_NOW_SCHEMAS,
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
        "paths": all_paths(),
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


OPENAPI_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [(r"api/openapi\.json", OpenAPIHandler)]
