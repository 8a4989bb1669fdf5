"""The JSON of the REST API as schemas, each field of each answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from .fields import EXACT
from .fields import INSTANT as MOMENT

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
AMOUNT: Schema = {
    "type": "string",
    "pattern": r"^-?[0-9]+\.[0-9]{6}$",
    "description": "Credits, exactly.",
    "examples": ["12.500000"],
}
INSTANT_SCHEMA: Schema = {"type": "string", "format": "date-time", "pattern": "Z$"}
DAY_SCHEMA: Schema = {"type": "string", "format": "date"}

_UNREADABLE = r"\u0000-\u0008\u000e-\u001b\u007f-\u0084\u0086-\u009f"
"""Characters that no reason has; all white space in it becomes a space each."""

REASON: Schema = {
    "type": "string",
    "maxLength": 300,
    "pattern": f"^[^{_UNREADABLE}]*$",
    "description": "Why.",
}
NEEDED: Schema = {
    **REASON,
    "minLength": 1,
    "pattern": rf"^[^{_UNREADABLE}]*[^{_UNREADABLE}\s][^{_UNREADABLE}]*$",
}
GIVEN: Schema = {
    "type": "string",
    "pattern": f"^{EXACT}$",
    "description": "Credits with six decimals at the most; below zero takes back, for admins.",
    "examples": ["25", "-0.5"],
}


def ref(name: str) -> Schema:
    """The schema of this name."""
    return {"$ref": f"#/components/schemas/{name}"}


def listed(items: Schema) -> Schema:
    """A list of these."""
    return {"type": "array", "items": items}


def maybe(schema: Schema) -> Schema:
    """This or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def full(**fields: Schema) -> Schema:
    """An object with all of these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def sent(needed: tuple[str, ...] = (), /, **fields: Schema) -> Schema:
    """An object that is sent to us: no other fields, and not all of them are needed."""
    return {**full(**fields), "required": list(needed)}


def either(*schemas: Schema) -> Schema:
    """One of these."""
    return {"anyOf": list(schemas)}


ENTRY = {
    "id": INTEGER,
    "transfer": TEXT,
    "at": INSTANT_SCHEMA,
    "kind": TEXT,
    "actor": TEXT,
    "reason": TEXT,
    "amount": AMOUNT,
    "balance": AMOUNT,
    "lease": maybe(TEXT),
}
FUNDS = {
    "account": TEXT,
    "balance": AMOUNT,
    "held": AMOUNT,
    "available": AMOUNT,
    "rate_per_hour": AMOUNT,
    "lasts_seconds": maybe(COUNT),
    "runs_dry_at": maybe(INSTANT_SCHEMA),
}
USE = {"gpu_seconds": COUNT, "gpu_hours": AMOUNT, "credits": AMOUNT, "sessions": COUNT}
USE_BESIDE = {
    **USE,
    "batch": full(gpu_seconds=COUNT, gpu_hours=AMOUNT, credits=AMOUNT, jobs=COUNT),
}
CHANGE = {"at": INSTANT_SCHEMA, "actor": TEXT, "action": TEXT, "subject": TEXT, "detail": TEXT}
CLOSURE = full(since=INSTANT_SCHEMA, actor=TEXT, reason=TEXT)
TICKET = {
    "id": TEXT,
    "user": TEXT,
    "server": TEXT,
    "group": TEXT,
    "gpus": COUNT,
    "gpu_model": maybe(TEXT),
    "gpu_memory_bytes": COUNT,
    "environment": TEXT,
    "session_seconds": maybe(COUNT),
    "since": INSTANT_SCHEMA,
    "place": maybe(COUNT),
    "of": maybe(COUNT),
    "waits_for": maybe(TEXT),
    "estimate": maybe(
        full(low=maybe(INSTANT_SCHEMA), likely=maybe(INSTANT_SCHEMA), high=maybe(INSTANT_SCHEMA))
    ),
    "planned": maybe(INSTANT_SCHEMA),
}
ENDED = full(
    id=TEXT,
    user=TEXT,
    server=TEXT,
    since=INSTANT_SCHEMA,
    ended_at=maybe(INSTANT_SCHEMA),
    outcome=TEXT,
    end_reason=TEXT,
    lease=maybe(TEXT),
)
NOTICE = full(kind=TEXT, title=TEXT, body=TEXT, at=INSTANT_SCHEMA, state=TEXT, error=TEXT)
LEASED = full(uuid=TEXT, index=INTEGER, model=TEXT, memory_bytes=COUNT)

RATE = {
    "id": maybe(INTEGER),
    "rate_per_hour": AMOUNT,
    "model": TEXT,
    "environment": TEXT,
    "slots": maybe(COUNT),
    "hours": maybe(TEXT),
    "zone": maybe(TEXT),
    "from": maybe(INSTANT_SCHEMA),
}
RATE_TOLD = full(**RATE, actor=TEXT, reason=TEXT)
REFILL = full(
    id=TEXT,
    rule=TEXT,
    zone=TEXT,
    starts_at=INSTANT_SCHEMA,
    mode={"enum": ["add", "top_up"]},
    amount=AMOUNT,
    cap=maybe(AMOUNT),
    keep_seconds=maybe(COUNT),
    audience=listed(TEXT),
    reason=TEXT,
    made_at=INSTANT_SCHEMA,
    made_by=TEXT,
    next_at=maybe(INSTANT_SCHEMA),
)

SCHEMAS: dict[str, Schema] = {
    "Anything": {"type": "object"},
    "Error": full(
        status=INTEGER,
        error={**TEXT, "description": "A short, stable word."},
        message={**TEXT, "description": "What is wrong, and what to do."},
    ),
    "Account": full(as_of=INSTANT_SCHEMA, **FUNDS),
    "Accounts": full(as_of=INSTANT_SCHEMA, accounts=listed(full(**FUNDS)), next=maybe(TEXT)),
    "Entry": full(**ENTRY),
    "Statement": full(
        account=TEXT, as_of=INSTANT_SCHEMA, entries=listed(ref("Entry")), next=maybe(INTEGER)
    ),
    "Grant": sent(
        ("amount", "reason"),
        amount=GIVEN,
        reason=NEEDED,
        key={"type": "string", "pattern": "^[0-9A-Za-z_.:-]{1,100}$"},
        until=maybe(
            {
                "type": "string",
                "format": "date-time",
                "pattern": f"^{MOMENT}$",
                "description": "When they end: what is left then is taken back.",
            }
        ),
    ),
    "Granted": full(
        granted=FLAG,
        account=TEXT,
        amount=AMOUNT,
        key=TEXT,
        until=maybe(INSTANT_SCHEMA),
        balance=AMOUNT,
    ),
    "Lease": full(
        id=TEXT,
        user=TEXT,
        server=TEXT,
        account=TEXT,
        environment=TEXT,
        state={"enum": ["granted", "running", "ended"]},
        devices=listed(LEASED),
        rate_per_hour=AMOUNT,
        cost=AMOUNT,
        granted_at=INSTANT_SCHEMA,
        started_at=maybe(INSTANT_SCHEMA),
        ended_at=maybe(INSTANT_SCHEMA),
        end_reason=TEXT,
        warned_at=maybe(INSTANT_SCHEMA),
        stops_at=maybe(INSTANT_SCHEMA),
        ends_at=maybe(INSTANT_SCHEMA),
        claim_by=maybe(INSTANT_SCHEMA),
        group=TEXT,
        outcome=TEXT,
        charged=AMOUNT,
        refunded=AMOUNT,
        waived=AMOUNT,
    ),
    "Leases": full(as_of=INSTANT_SCHEMA, leases=listed(ref("Lease")), next=maybe(TEXT)),
    "Receipt": full(
        as_of=INSTANT_SCHEMA,
        lease=ref("Lease"),
        use=listed(
            full(
                uuid=TEXT,
                mean_percent=maybe({"type": "number"}),
                peak_percent=maybe(COUNT),
                memory_peak_bytes=COUNT,
            )
        ),
        total=AMOUNT,
        count=COUNT,
        items=listed(
            full(
                id=INTEGER,
                transfer=TEXT,
                at=INSTANT_SCHEMA,
                kind=TEXT,
                reason=TEXT,
                amount=AMOUNT,
                cost=AMOUNT,
            )
        ),
        next=maybe(INTEGER),
    ),
    "Me": full(
        name=TEXT,
        admin=FLAG,
        as_of=INSTANT_SCHEMA,
        account=full(**FUNDS),
        running=listed(ref("Lease")),
        statement=listed(ref("Entry")),
    ),
    "Device": {
        **full(
            uuid=TEXT,
            index=INTEGER,
            model=TEXT,
            memory_bytes=COUNT,
            machine=TEXT,
            state=TEXT,
            rate_per_hour=AMOUNT,
            mine=FLAG,
            detail=TEXT,
            lease=maybe(TEXT),
            user=maybe(TEXT),
        ),
        "required": ["uuid", "index", "model", "memory_bytes", "state", "rate_per_hour", "mine"],
    },
    "Devices": full(
        source=TEXT,
        seen=FLAG,
        error=TEXT,
        driver_version=TEXT,
        cuda_version=TEXT,
        total=COUNT,
        free=COUNT,
        devices=listed(ref("Device")),
    ),
    "Usage": full(
        by=TEXT,
        first_day=DAY_SCHEMA,
        last_day=DAY_SCHEMA,
        **{"from": INSTANT_SCHEMA, "to": INSTANT_SCHEMA},
        as_of=INSTANT_SCHEMA,
        rows=listed(full(name=TEXT, **USE_BESIDE)),
        total=full(**USE_BESIDE),
    ),
    "Trail": full(
        as_of=INSTANT_SCHEMA, changes=listed(full(id=INTEGER, **CHANGE)), next=maybe(INTEGER)
    ),
    "RateTold": RATE_TOLD,
    "Rates": full(
        as_of=INSTANT_SCHEMA,
        next_change=maybe(INSTANT_SCHEMA),
        rates=listed(either(full(**RATE), RATE_TOLD)),
    ),
    "Refills": full(as_of=INSTANT_SCHEMA, refills=listed(REFILL)),
    "Queue": either(
        full(
            as_of=INSTANT_SCHEMA,
            paused=maybe(CLOSURE),
            drained={"type": "object", "additionalProperties": CLOSURE},
            waiting=COUNT,
            tickets=listed(
                full(
                    **TICKET,
                    priority=TEXT,
                    boost=NUMBER,
                    position=maybe(INTEGER),
                    last=FLAG,
                    score=NUMBER,
                    parts=listed(full(name=TEXT, points=NUMBER, why=TEXT)),
                )
            ),
            trail=listed(full(**CHANGE)),
        ),
        full(
            as_of=INSTANT_SCHEMA,
            paused=maybe(full(reason=TEXT)),
            waiting=COUNT,
            tickets=listed(full(**TICKET)),
            ended=listed(ENDED),
        ),
    ),
    "Ticket": either(full(**TICKET), ENDED),
    "Why": sent(reason=REASON),
    "Needed": sent(("reason",), reason=NEEDED),
    "Transfer": full(
        id=TEXT,
        at=INSTANT_SCHEMA,
        kind=TEXT,
        actor=TEXT,
        reason=TEXT,
        lease=maybe(TEXT),
        postings=listed(full(account=TEXT, amount=AMOUNT)),
        reversed_by=maybe(TEXT),
    ),
    "Boost": sent(
        ("points",),
        points={"type": "number", "minimum": -1_000_000, "maximum": 1_000_000},
        reason=REASON,
    ),
    "Move": sent(
        ("position",),
        position=maybe({"type": "integer", "minimum": 1, "maximum": 1_000_000}),
        reason=REASON,
    ),
    "Pause": sent(("paused",), paused=FLAG, reason=REASON),
    "Paused": full(changed=FLAG, paused=maybe(CLOSURE)),
    "Drained": full(uuid=TEXT, changed=FLAG, drained=maybe(CLOSURE), whole_machine=TEXT),
    "Notice": NOTICE,
    "Notices": full(
        as_of=INSTANT_SCHEMA,
        channels=listed(
            full(
                name=TEXT,
                label=TEXT,
                needs_address=FLAG,
                example=TEXT,
                address=TEXT,
                kinds=listed(TEXT),
            )
        ),
        kinds=listed(TEXT),
        notices=listed(NOTICE),
    ),
}


def choices(channels: Collection[str]) -> Schema:
    """How a member wants to be told, by the names of this hub's channels."""
    return {
        **sent(**{name: sent(address=TEXT, kinds=listed(TEXT)) for name in channels}),
        "description": "Channels that are not named stay as they are.",
    }
