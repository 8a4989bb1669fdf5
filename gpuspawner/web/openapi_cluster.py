"""The JSON of what GPUs do now, and of what was used of what was held, as schemas."""

from __future__ import annotations

from .openapi_schemas import (
    COUNT,
    DAY,
    FLAG,
    INSTANT,
    INTEGER,
    NUMBER,
    TEXT,
    Schema,
    full,
    listed,
    maybe,
)

WORKED: Schema = {
    "held_gpu_seconds": COUNT,
    "measured_gpu_seconds": COUNT,
    "used_gpu_seconds": COUNT,
    "rested_gpu_seconds": COUNT,
}

SCHEMAS: dict[str, Schema] = {
    "Cluster": full(
        as_of=INSTANT,
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
                since=maybe(INSTANT),
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
        first_day=DAY,
        last_day=DAY,
        as_of=INSTANT,
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
                started_at=INSTANT,
                ended_at=maybe(INSTANT),
                **WORKED,
            )
        ),
    ),
}
