"""Who spends credits until they are killed, and what must have come of it.

The worker writes down what the services acknowledged, after it did: what stands there must be in
the ledger, once. What the leases cost is worked out anew from their rows, read with the plain
driver and with nothing of gpuspawner's own.
"""

from __future__ import annotations

import os
import random
import sqlite3
from collections import defaultdict
from contextlib import closing
from datetime import datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa

from gpuspawner.core.units import MICRO
from gpuspawner.services import Services
from tests.support.brokers import acquire, make_services, open_services
from tests.support.racers import FastClock

OPENING = 10_000
"""Credits of a new account."""


def spender(url: str, began: float) -> Services:
    """Eight devices at 4 credits an hour, on the fast clock."""
    return open_services(
        url,
        clock=FastClock(began),
        gpu_rates={"*": 4},
        opening_grant=OPENING,
        device_source="simulated:8xA100-80GB",
    )


def spend_until_killed(
    ready: Connection, url: str, began: float, user: str, life: int, journal: str
) -> None:
    """Grant, hold, tick, settle and refund as fast as it goes, for ever."""
    services = spender(url, began)
    services.ledger.open_account(user)
    for leftover in services.leases.open_leases():
        if leftover.server.user == user:
            services.leases.release(leftover.id, reason="its hub was killed")
    chance = random.Random(f"{user} {life}")
    book = os.open(journal, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    ready.send("working")
    number = 0
    while True:
        number += 1
        key, amount = f"gift:{user}:{life}:{number}", chance.randrange(1, 5 * MICRO)
        services.ledger.grant(f"member:{user}", amount, actor="admin", reason="gift", key=key)
        os.write(book, f"gift {key} {amount}\n".encode())
        lease = acquire(services, user, 2)
        if chance.random() < 0.1:  # a start that fails before anything answers
            services.leases.release(lease.id, reason="no container", failed=True)
        else:
            services.leases.confirm(lease.id, f"container-{lease.id}")
            for _ in range(chance.randrange(3)):
                services.ledger.charge_portion(timedelta(seconds=chance.choice((0.5, 60))))
            over = services.clock()
            if chance.random() < 0.5:
                services.ledger.charge_all()  # too much is charged, and comes back
                over -= timedelta(seconds=chance.uniform(0, 60))
            failed = chance.random() < 0.2
            services.leases.release(lease.id, ended_at=over, reason="stopped", failed=failed)
        os.write(book, f"ended {lease.id} 0\n".encode())


def give_refills(ready: Connection, url: str, now: datetime) -> None:
    """Give every refill that is due and end every lot that has ended, as the service does."""
    services = make_services(database_url=url, device_source="simulated:1xT4", clock=lambda: now)
    ready.send("ready")
    while due := services.refills.due_refills():
        for refill in due:
            services.refills.give_refill(refill.id)
        services.ledger.end_lots()
    services.ledger.end_lots()


def acknowledged(journal: Path) -> dict[str, dict[str, int]]:
    """What was written down: ``gift`` and ``ended``, by key or lease. A last line that was cut
    short by a kill counts as not written."""
    found: dict[str, dict[str, int]] = {"gift": {}, "ended": {}}
    lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
    for line in lines:
        what, name, amount = line.decode().split()
        found[what][name] = int(amount)
    return found


def lost_or_doubled(url: str, gifts: dict[str, int], ended: dict[str, int]) -> list[str]:
    """What does not agree between the store, what was acknowledged, and what leases cost."""
    with closing(_connect(url)) as connection:
        found: list[str] = []
        posted = _all(
            connection,
            "SELECT t.key, p.account, p.amount FROM transfers t JOIN postings p "
            "ON p.transfer_id = t.id WHERE t.key LIKE 'gift:%' AND p.account LIKE 'member:%'",
        )
        leases = _all(
            connection,
            "SELECT id, account, rate, started_at, ended_at, outcome, state, charged FROM leases",
        )
        balances = dict(_all(connection, "SELECT name, balance FROM accounts"))
    amounts = defaultdict(list)
    expected: dict[str, int] = defaultdict(int)
    for key, account, amount in posted:
        amounts[key].append(int(amount))
        expected[account] += int(amount)
    for key, amount in gifts.items():
        if amounts[key] != [amount]:
            found.append(f"{key} of {amount} was acknowledged, and posted as {amounts[key]}.")
    used = 0
    for lease in leases:
        cost = _cost(lease)
        used += cost
        expected[lease[1]] -= cost
        if lease[0] in ended and lease[6] != "ended":
            found.append(f"The end of lease {lease[0]} was acknowledged, and it is {lease[6]}.")
    for name in ended.keys() - {lease[0] for lease in leases}:
        found.append(f"Lease {name} was acknowledged, and is not there.")
    for name in [name for name in balances if name.startswith("member:")]:
        expected[name] += OPENING * MICRO
    expected["system:usage"] = used
    given = sum(balances[name] for name in balances if name != "system:grants")
    expected["system:grants"] = -given
    for name, balance in balances.items():
        if balance != expected[name]:
            found.append(f"{name} has {balance} microcredits, and {expected[name]} are right.")
    return found


def _cost(lease: Any) -> int:
    """What a lease cost: rate x time, rounded down; nothing for a failed start."""
    _, _, rate, started, ended, outcome, state, charged = lease
    if state != "ended":
        return int(charged)
    if outcome or started is None:
        return 0
    micros = (_time(ended) - _time(started)) // timedelta(microseconds=1)
    return int(rate) * micros // 3_600_000_000


def _time(value: Any) -> datetime:
    return value if isinstance(value, datetime) else datetime.fromisoformat(str(value))


def _connect(url: str) -> Any:
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return sqlite3.connect(parsed.database or "")
    return psycopg.connect(
        host=parsed.host, port=parsed.port, user=parsed.username, dbname=parsed.database
    )


def _all(connection: Any, query: str) -> list[Any]:
    cursor = connection.cursor()
    cursor.execute(query)
    return list(cursor.fetchall())
