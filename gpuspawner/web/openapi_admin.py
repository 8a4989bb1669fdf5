"""What admins change over the REST API, as schemas and paths: stops, refunds, rates, refills,
grants from a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .fields import EXACT, INSTANT
from .openapi_schemas import (
    AMOUNT,
    COUNT,
    FLAG,
    NEEDED,
    REASON,
    REFILL,
    TEXT,
    Schema,
    full,
    listed,
    maybe,
    sent,
)

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
WRITTEN: Schema = {"type": "string", "pattern": r"^[^\u0000]*$"}

RULES = {
    "rule": {**WRITTEN, "maxLength": 400, "examples": ["FREQ=WEEKLY;BYDAY=MO;BYHOUR=6"]},
    "zone": {**WRITTEN, "maxLength": 60, "examples": ["Europe/Vienna"]},
    "from": maybe(MOMENT),
    "mode": {"enum": ["add", "top_up"]},
    "amount": PART,
    "cap": maybe(PART),
    "keep_days": maybe({"type": "integer", "minimum": 1, "maximum": 3660}),
    "audience": {
        "type": "array",
        "items": {**WRITTEN, "minLength": 1, "maxLength": 100},
        "minItems": 1,
        "examples": [["members:ml101"], ["member:ada"]],
    },
    "reason": NEEDED,
    "key": KEY,
    "dry_run": FLAG,
}

SCHEMAS: dict[str, Schema] = {
    "Refund": sent(("reason",), amount=maybe(PART), reason=NEEDED, key=KEY),
    "NewRate": sent(
        ("rate",),
        **{
            "rate": {**WRITTEN, "maxLength": 40, "examples": ["2.5"]},
            "model": {**WRITTEN, "maxLength": 100, "examples": ["A100"]},
            "environment": {**WRITTEN, "maxLength": 100, "examples": ["course"]},
            "slots": maybe({"type": "integer", "minimum": 1, "maximum": 1024}),
            "hours": {**WRITTEN, "maxLength": 100, "examples": ["Mon-Fri 20-8, Sat, Sun"]},
            "zone": {**WRITTEN, "maxLength": 60, "examples": ["Europe/Vienna"]},
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
            **WRITTEN,
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


def paths(
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
