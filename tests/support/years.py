"""A year of a busy site, written into a store as the services would have written it, but quickly.

Every amount follows the laws of :mod:`gpuspawner.ledger.rules`, so that the audit holds. The
rows of a table come in the order of time, as far as a batch of leases goes: that is what
indexes and statements live with.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from gpuspawner.core.units import MICRO
from gpuspawner.db import hash_chain
from gpuspawner.db.engine import Store
from gpuspawner.db.schema import accounts, lease_places, leases, postings, tickets, transfers
from gpuspawner.leases.models import Request
from gpuspawner.ledger.models import SYSTEM_GRANTS, SYSTEM_USAGE, member_account
from gpuspawner.ledger.rules import owed, transfer_id
from tests.support.brokers import T0

BATCH = 2000
"""Leases that are written at once."""

MODELS = (("A100-80GB", 80_000_000_000, 4 * MICRO), ("L4", 24_000_000_000, MICRO))
GRANT = 500 * MICRO
"""What every member gets at the beginning of each month."""

REQUEST = json.dumps(asdict(Request(devices=1, environment="pytorch")))

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Year:
    """How busy the site is."""

    members: int = 1000
    devices: int = 64
    leases: int = 500_000
    charge_seconds: float = 3600.0
    """Time between two charges of a lease. A minute would make 24 million of them."""
    days: int = 365
    used: float = 0.7
    """The part of the time in which a device is leased."""
    queued: float = 0.2
    """The part of the leases that came out of the queue."""
    begins: datetime = T0
    seed: int = 1

    @property
    def ends(self) -> datetime:
        """The moment at which the year is over; what runs then is open."""
        return self.begins + timedelta(days=self.days)


@dataclass(slots=True)
class _Batch:
    """Rows to write, by table."""

    leases: list[Row] = field(default_factory=list)
    places: list[Row] = field(default_factory=list)
    tickets: list[Row] = field(default_factory=list)
    transfers: list[Row] = field(default_factory=list)


def member(number: int) -> str:
    """The name of a member: ``member0007``."""
    return f"member{number:04d}"


def write_year(store: Store, year: Year) -> dict[str, int]:
    """Write the year into an empty store; every account's balance at its end."""
    chance = random.Random(year.seed)
    balances = {member_account(member(number)): 0 for number in range(year.members)}
    balances |= {SYSTEM_GRANTS: 0, SYSTEM_USAGE: 0}
    with store.write() as connection:
        rows = [{"name": n, "balance": 0, "opened_at": year.begins} for n in balances]
        connection.execute(sa.insert(accounts), rows)
    batch = _Batch()
    for month in range(12):
        at = year.begins + timedelta(days=month * year.days / 12)
        for number in range(year.members):
            name = member_account(member(number))
            text = f"Refill of month {month + 1}"
            batch.transfers.append(
                _transfer(f"grant:{month}:{name}", "grant", at, name, GRANT, text)
            )
    _write(store, batch, balances)
    batch = _Batch()
    for number, (slot, began, ended) in enumerate(_sessions(year, chance)):
        _add_lease(batch, year, chance, number, slot, began, ended)
        if len(batch.leases) == BATCH:
            _write(store, batch, balances)
            batch = _Batch()
    _write(store, batch, balances)
    with store.write() as connection:
        for name, balance in balances.items():
            connection.execute(
                sa.update(accounts).where(accounts.c.name == name).values(balance=balance)
            )
        _chain(connection)
    return balances


def _sessions(year: Year, chance: random.Random) -> Iterator[tuple[int, datetime, datetime | None]]:
    """Device, start and end of every lease, in the order of their starts."""
    cycle = year.days * 86400 * year.devices / year.leases
    ready = [(year.begins + _seconds(chance, cycle), n) for n in range(year.devices)]
    heapq.heapify(ready)
    for _ in range(year.leases):
        began, device = heapq.heappop(ready)
        lasts = _seconds(chance, cycle * year.used)
        idle = _seconds(chance, cycle * (1 - year.used))
        ended = began + lasts
        yield device, began, ended
        heapq.heappush(ready, (ended + idle, device))
    for began, device in ready:  # one session more on each, which is still open
        yield device, max(began, year.ends), None


def _seconds(chance: random.Random, mean: float) -> timedelta:
    return timedelta(seconds=round(chance.expovariate(1 / mean), 6) + 1)


def _add_lease(
    batch: _Batch,
    year: Year,
    chance: random.Random,
    number: int,
    device: int,
    began: datetime,
    ended: datetime | None,
) -> None:
    who = int(year.members * chance.random() ** 2)  # the busiest of 1,000 has 3% of all
    model, memory, rate = MODELS[device % len(MODELS)]
    name = f"{chance.getrandbits(64):016x}"
    user, account = member(who), member_account(member(who))
    queued = chance.random() < year.queued
    ticket = f"{chance.getrandbits(64):016x}" if queued else None
    charged = 0
    at = began
    over = ended is None  # what has just begun was not charged yet
    while ended and not over:
        at += timedelta(seconds=year.charge_seconds)
        until = min(at, ended)
        due = owed(rate, began, until) - charged
        over = until >= ended
        if due:
            key = f"settle:{name}" if over else f"charge:{name}:{charged}"
            text = f"1 x {model} of {user}"
            charge = _transfer(key, "charge", until, account, -due, text)
            batch.transfers.append(charge | {"lease_id": name})
        charged += due
    batch.leases.append(
        {
            "id": name,
            "user": user,
            "server_name": "" if ended else f"open{device}",
            "account": account,
            "environment": "pytorch" if number % 3 else "base",
            "rate": rate,
            "hold": rate // 6,
            "charged": charged,
            "state": "ended" if ended else "running",
            "engine": "docker",
            "engine_ref": f"{chance.getrandbits(256):064x}",
            "granted_at": began,
            "started_at": began,
            "seen_at": ended or began,
            "ended_at": ended,
            "end_reason": "stopped" if ended else "",
            "group": f"group{who % 20:02d}",
            "ticket_id": ticket,
        }
    )
    batch.places.append(
        {
            "lease_id": name,
            "uuid": f"GPU-{device:08d}-simulated",
            "slot": 0,
            "index": device,
            "model": model,
            "memory_bytes": memory,
            "open": ended is None,
        }
    )
    if ticket:
        batch.tickets.append(
            {
                "id": ticket,
                "user": user,
                "account": account,
                "group": f"group{who % 20:02d}",
                "request": REQUEST,
                "engine": "docker",
                "state": "ended",
                "created_at": began - _seconds(chance, 600),
                "ended_at": began,
                "outcome": "granted",
                "end_reason": "its turn came",
                "lease_id": name,
            }
        )


def _transfer(key: str, kind: str, at: datetime, account: str, amount: int, reason: str) -> Row:
    """A transfer's row, with the account and the amount of its two postings."""
    return {
        "id": transfer_id(key),
        "key": key,
        "kind": kind,
        "at": at,
        "actor": "accounting",
        "reason": reason,
        "lease_id": None,
        "account": account,
        "amount": amount,
    }


def _write(store: Store, batch: _Batch, balances: dict[str, int]) -> None:
    batch.transfers.sort(key=lambda row: row["at"])
    lines = []
    for row in batch.transfers:
        amount, own = row.pop("amount"), row.pop("account")
        other = SYSTEM_GRANTS if row["kind"] == "grant" else SYSTEM_USAGE
        for account, moved in ((own, amount), (other, -amount)):
            balances[account] += moved
            apart = row["kind"] == "grant"
            line = {"transfer_id": row["id"], "account": account, "amount": moved}
            lines.append(line | {"apart": apart})
    with store.write() as connection:
        for table, rows in (
            (leases, batch.leases),
            (lease_places, batch.places),
            (tickets, batch.tickets),
            (transfers, batch.transfers),
            (postings, lines),
        ):
            if rows:
                connection.execute(sa.insert(table), rows)


def _chain(connection: sa.Connection) -> None:
    """Link and seal all rows, as if each transfer had been posted by itself."""
    change = sa.update(postings).where(postings.c.id == sa.bindparam("last"))
    before, rows = hash_chain.FIRST, list[Row]()
    with hash_chain.not_append_only(connection):
        for written in hash_chain._written(connection):
            before = hash_chain._link(before, written.facts)
            rows.append({"last": written.last_posting, "link": before})
            if len(rows) == BATCH:
                connection.execute(change, rows)
                rows = []
        if rows:
            connection.execute(change, rows)
    ended = hash_chain._stream(connection, hash_chain._ENDED)
    for lease_id, row in hash_chain._leases(ended):
        hash_chain._seal(connection, hash_chain.LEASE, lease_id, hash_chain._facts(row))
