"""Databases of earlier versions of the schema, with rows in them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from alembic import command

from gpuspawner.core.units import MICRO
from gpuspawner.db import upgrades
from tests.support.brokers import T0

RELEASED = ("0001", "0002")
"""Every version that somebody may have: before the queue, before refills."""

RATE = 4 * MICRO
HOUR_AGO, TWO_HOURS_AGO = T0 - timedelta(hours=1), T0 - timedelta(hours=2)


def _first_rows() -> dict[str, list[dict[str, Any]]]:
    """Anna paid for an hour, and has a server that was charged for half of another one."""
    lease = {
        "user": "anna",
        "account": "member:anna",
        "environment": "pytorch",
        "rate": RATE,
        "hold": MICRO,
        "engine": "docker",
        "engine_ref": "container",
    }
    place = {"slot": 0, "index": 0, "model": "A100-80GB", "memory_bytes": 80 * 2**30}
    moved = {"actor": "gpuspawner", "reason": "before", "kind": "charge", "at": HOUR_AGO}
    opening = {"kind": "grant", "at": TWO_HOURS_AGO, "lease_id": None}
    return {
        "accounts": [
            {"name": name, "balance": balance, "opened_at": TWO_HOURS_AGO}
            for name, balance in (
                ("member:anna", 14 * MICRO),
                ("system:grants", -20 * MICRO),
                ("system:usage", 6 * MICRO),
            )
        ],
        "leases": [
            {
                **lease,
                "id": "past",
                "server_name": "old",
                "charged": 4 * MICRO,
                "state": "ended",
                "granted_at": TWO_HOURS_AGO,
                "started_at": TWO_HOURS_AGO,
                "seen_at": HOUR_AGO,
                "ended_at": HOUR_AGO,
                "end_reason": "the server was stopped",
                "warned_at": None,
            },
            {
                **lease,
                "id": "open",
                "server_name": "",
                "charged": 2 * MICRO,
                "state": "running",
                "granted_at": HOUR_AGO,
                "started_at": HOUR_AGO,
                "seen_at": HOUR_AGO + timedelta(minutes=30),
                "ended_at": None,
                "end_reason": "",
                "warned_at": HOUR_AGO + timedelta(minutes=20),
            },
        ],
        "lease_places": [
            {**place, "lease_id": "past", "uuid": "GPU-a", "open": False},
            {**place, "lease_id": "open", "uuid": "GPU-a", "open": True},
            {**place, "lease_id": "open", "uuid": "GPU-b", "open": True},
        ],
        "transfers": [
            {**moved, **opening, "id": "1", "key": "opening:member:anna"},
            {**moved, "id": "2", "key": "settle:past", "lease_id": "past"},
            {**moved, "id": "3", "key": "charge:open:0", "lease_id": "open"},
        ],
        "postings": [
            {"transfer_id": transfer, "account": account, "amount": amount}
            for transfer, source, target, moved_amount in (
                ("1", "system:grants", "member:anna", 20 * MICRO),
                ("2", "member:anna", "system:usage", 4 * MICRO),
                ("3", "member:anna", "system:usage", 2 * MICRO),
            )
            for account, amount in ((target, moved_amount), (source, -moved_amount))
        ],
        "tickets": [
            {
                "id": "t",
                "user": "bob",
                "server_name": "",
                "request": "{}",
                "state": "waiting",
                "created_at": T0,
                "ended_at": None,
                "end_reason": "",
            }
        ],
    }


def _second_rows() -> dict[str, list[dict[str, Any]]]:
    """The same after the queue came: a session that has an end, and bob, who waits in line."""
    rows = _first_rows()
    rows["leases"][0] |= {"seconds": 3600, "outcome": "session_end", "ticket_id": "served"}
    rows["leases"][1] |= {"seconds": 7200, "extended": 60, "told_minutes": 30.0, "group": "lab"}
    ticket = {
        "user": "bob",
        "group": "lab",
        "account": "member:bob",
        "request": '{"devices": 1, "models": []}',
        "options": "{}",
        "engine": "docker",
        "seconds": 3600,
        "priority": 0,
        "boost": 0.5,
        "position": None,
        "last": False,
        "version": 2,
    }
    waiting = {"state": "waiting", "created_at": HOUR_AGO, "ended_at": None, "lease_id": None}
    served = {"state": "ended", "created_at": TWO_HOURS_AGO, "ended_at": HOUR_AGO}
    rows["tickets"] = [
        {**ticket, **waiting, "id": "t", "server_name": "", "outcome": "", "end_reason": ""},
        {
            **ticket,
            **served,
            "id": "served",
            "server_name": "old",
            "outcome": "granted",
            "end_reason": "its turn came",
            "lease_id": "past",
        },
    ]
    drained = {"at": HOUR_AGO, "actor": "root", "reason": "a fan"}
    rows["closures"] = [{**drained, "subject": "GPU-b"}]
    rows["audit"] = [
        {"at": HOUR_AGO, "actor": "root", "action": "drain", "subject": "GPU-b", "detail": "a fan"}
    ]
    rows["notices"] = [
        {
            "key": "turn:past",
            "user": "anna",
            "kind": "turn",
            "title": "It is your turn",
            "body": "",
            "at": TWO_HOURS_AGO,
            "sent_at": None,
            "tries": 1,
            "error": "no route",
        }
    ]
    rows["notice_choices"] = [
        {"user": "anna", "channel": "mail", "address": "a@lab.example", "kinds": "turn"}
    ]
    return rows


_ROWS = {"0001": _first_rows, "0002": _second_rows}


def make_version(url: str, version: str) -> dict[str, tuple[list[str], list[Any]]]:
    """A database of an earlier version with rows; its tables as columns and rows."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        settings = upgrades.config()
        settings.attributes["connection"] = connection
        command.upgrade(settings, version)
        assert upgrades.revision(connection) == version
        tables = sa.MetaData()
        tables.reflect(connection)
        for name, rows in _ROWS[version]().items():
            for row in rows:  # not all have the same columns
                connection.execute(sa.insert(tables.tables[name]).values(stored(row, url)))
        columns = {name: list(tables.tables[name].c.keys()) for name in tables.tables}
        kept = {
            name: (columns[name], contents(connection, name, columns[name])) for name in columns
        }
    engine.dispose()
    return kept


def stored(row: dict[str, Any], url: str) -> dict[str, Any]:
    """A row as the store writes it: SQLite's times have no zone and are UTC."""
    if not url.startswith("sqlite"):
        return row
    return {k: v.replace(tzinfo=None) if isinstance(v, datetime) else v for k, v in row.items()}


def contents(connection: sa.Connection, table: str, columns: list[str]) -> list[Any]:
    """These columns of all rows of a table."""
    query: Any = sa.select(*(sa.column(name) for name in columns))
    return sorted(map(repr, connection.execute(query.select_from(sa.table(table)))))
