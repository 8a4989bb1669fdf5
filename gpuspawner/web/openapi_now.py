"""The JSON about a running server as a schema."""

from __future__ import annotations

from .openapi_schemas import (
    COUNT,
    FLAG,
    FUNDS,
    INSTANT,
    INTEGER,
    NUMBER,
    TEXT,
    full,
    listed,
    maybe,
    ref,
)

_DEVICE = full(
    uuid=TEXT,
    index=INTEGER,
    model=TEXT,
    memory_bytes=COUNT,
    use_percent=maybe(NUMBER),
    busy=maybe(FLAG),
    used_bytes=maybe(COUNT),
    error=TEXT,
    minutes=listed(full(at=INSTANT, use_percent=maybe(NUMBER), used_bytes=maybe(COUNT))),
)
_WARNING = full(
    kind={"enum": ["lost", "sick", "idle", "session", "credits"]},
    key=TEXT,
    at=maybe(INSTANT),
    snooze_minutes=NUMBER,
)

SCHEMAS = {
    "Now": full(
        as_of=INSTANT,
        page=TEXT,
        lease=ref("Lease"),
        account=maybe(full(**FUNDS)),
        devices=listed(_DEVICE),
        warnings=listed(_WARNING),
    )
}
