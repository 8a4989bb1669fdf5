"""What charging 10,000 running leases takes, and whether the hub notices.

``a tick`` is the production :meth:`~gpuspawner.broker.Broker.charge_all`, a minute after the last
one, so that every lease owes something. The baseline writes the same rows (a transfer and two
postings a lease, its new sum, the balances) through the plain driver, many at a time, in one
transaction of another database of the same schema: it reads nothing and works nothing out.

``a grant`` is what a member who starts a server waits for in the broker while another process
ticks every second (the accounting service does so every minute), beside the same without ticks.
"""

from __future__ import annotations

import multiprocessing
import sqlite3
import tempfile
import time
from contextlib import closing
from datetime import datetime, timedelta
from multiprocessing.synchronize import Event
from typing import Any

import psycopg2
import sqlalchemy as sa
from psycopg2.extras import execute_values
from support.report import Report, Series, argument_parser, in_turns, pair, quantile

from gpuspawner.broker import Broker
from gpuspawner.ledger.rules import transfer_id
from gpuspawner.model import MICRO, Request, ServerRef, member_account
from gpuspawner.store import Store
from gpuspawner.store.schema import accounts, lease_places, leases
from tests.support.brokers import T0, Clock, open_broker
from tests.support.postgres import PrivatePostgres

LEASES = 10_000
MEMBERS = 4_000
MOST_MS = 100.0
MOST_GRANT_MS = 100.0
RATE = 4 * MICRO
DUE = RATE // 60


def main() -> None:
    parser = argument_parser(__doc__, 15)
    parser.add_argument("--leases", type=int, default=LEASES, help="that run")
    options = parser.parse_args()
    report = Report("tick", ("database", "what", "runs", "ours, ms", "baseline, ms", "ratio"))
    report.figure("runs", options.runs)
    with tempfile.TemporaryDirectory() as folder, PrivatePostgres(durable=True) as server:
        for name, ours, bare in (
            ("sqlite", f"sqlite:///{folder}/ours.sqlite", f"sqlite:///{folder}/bare.sqlite"),
            ("postgresql", server.fresh_database(), server.fresh_database()),
        ):
            ticks(report, name, ours, bare, options.runs, options.leases)
            grants(report, name, ours)
    report.notes.append("The grant's baseline is the same grant while nobody charges anything.")
    report.print(options.json)


def ticks(report: Report, name: str, ours_url: str, bare_url: str, runs: int, count: int) -> None:
    """The row of one database's ticks."""
    clock = Clock(T0)
    broker = open_broker(ours_url, clock)
    bare_store = Store(bare_url)
    for store in (broker.store, bare_store):
        fill(store, count)
    bare_store.close()
    ours: list[float] = []
    bare: list[float] = []
    minute = [0]

    def charge(_: int) -> None:
        clock.forward(minutes=1)
        began = time.perf_counter()
        assert broker.charge_all() == count
        ours.append(1000 * (time.perf_counter() - began))

    def write(_: int) -> None:
        minute[0] += 1
        rows = baseline_rows(minute[0], count)
        began = time.perf_counter()
        write_plainly(bare_url, *rows)
        bare.append(1000 * (time.perf_counter() - began))

    in_turns(runs + 1, charge, write)
    broker.store.close()
    both = pair(ours[1:], bare[1:])  # the first is warm-up
    texts = (both.ours.text(0), both.baseline.text(0), both.ratios.text(2))
    report.row(name, f"a tick over {count} leases", str(runs), *texts)
    report.figure(f"{name}_tick_ms_p50", both.ours.median, MOST_MS)
    report.figure(f"{name}_tick_ratio", both.ratios.median)


def fill(store: Store, count: int) -> None:
    """So many running leases of so many members, on a device each."""
    names = [member_account(f"member{number}") for number in range(MEMBERS)]
    rows, places = [], []
    for number in range(count):
        lease_id = transfer_id(str(number))[:16]
        owner = number % MEMBERS
        rows.append(
            {"id": lease_id, "user": f"member{owner}", "server_name": str(number)}
            | {"account": names[owner], "environment": "pytorch", "rate": RATE, "hold": 0}
            | {"charged": 0, "state": "running", "granted_at": T0, "started_at": T0}
        )
        places.append(
            {"lease_id": lease_id, "uuid": f"GPU-{number}", "slot": 0, "index": number}
            | {"model": "A100-80GB", "memory_bytes": 80_000_000_000, "open": True}
        )
    with store.write() as connection:
        opened = [{"name": n, "balance": 0, "opened_at": T0} for n in [*names, "system:usage"]]
        connection.execute(sa.insert(accounts), opened)
        connection.execute(sa.insert(leases), rows)
        connection.execute(sa.insert(lease_places), places)
        connection.exec_driver_sql("ANALYZE")


Rows = tuple[list[Any], list[Any], list[Any], list[Any]]


def baseline_rows(minute: int, count: int) -> Rows:
    """Transfers, postings, sums of leases and moves of balances, as the driver wants them."""
    at = T0 + timedelta(minutes=minute)
    transfers, postings, sums, moves = [], [], [], []
    for number in range(count):
        lease_id = transfer_id(str(number))[:16]
        owner = f"member{number % MEMBERS}"
        key = f"charge:{lease_id}:{(minute - 1) * DUE}"
        name = transfer_id(key)
        text = f"1 x A100-80GB of {owner}/{number}"
        transfers.append((name, key, "charge", at, "accounting", text, lease_id))
        postings.append((name, "system:usage", DUE))
        postings.append((name, f"member:{owner}", -DUE))
        sums.append((minute * DUE, lease_id))
        moves.append((-DUE, f"member:{owner}"))
    moves.append((count * DUE, "system:usage"))
    return transfers, postings, sums, moves


def write_plainly(url: str, transfers: Any, postings: Any, sums: Any, moves: Any) -> None:
    """One transaction through the plain driver."""
    parsed = sa.make_url(url)
    columns = "INSERT INTO transfers (id, key, kind, at, actor, reason, lease_id) VALUES "
    lines = "INSERT INTO postings (transfer_id, account, amount) VALUES "
    if parsed.get_backend_name() == "sqlite":
        with closing(sqlite3.connect(parsed.database or "", isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute("BEGIN IMMEDIATE")
            plain = [(*row[:3], str(row[3].replace(tzinfo=None)), *row[4:]) for row in transfers]
            connection.executemany(f"{columns} (?, ?, ?, ?, ?, ?, ?)", plain)
            connection.executemany(f"{lines} (?, ?, ?)", postings)
            connection.executemany("UPDATE leases SET charged = ? WHERE id = ?", sums)
            move = "UPDATE accounts SET balance = balance + ? WHERE name = ?"
            connection.executemany(move, moves)
            connection.execute("COMMIT")
        return
    with closing(
        psycopg2.connect(
            host=parsed.host, port=parsed.port, user=parsed.username, dbname=parsed.database
        )
    ) as connection:
        cursor = connection.cursor()
        execute_values(cursor, f"{columns} %s", transfers, page_size=1000)
        execute_values(cursor, f"{lines} %s", postings, page_size=1000)
        update = "UPDATE leases SET charged = v.s FROM (VALUES %s) AS v (s, i) WHERE id = v.i"
        execute_values(cursor, update, sums, page_size=1000)
        together: dict[str, int] = {}
        for amount, account in moves:
            together[account] = together.get(account, 0) + amount
        update = (
            "UPDATE accounts SET balance = balance + v.a FROM (VALUES %s) AS v (n, a) "
            "WHERE name = v.n"
        )
        execute_values(cursor, update, list(together.items()), page_size=1000)
        connection.commit()


# Whether the hub notices.


class Minutes:
    """A clock on which a minute goes by at every look."""

    def __init__(self, now: datetime) -> None:
        self.now = now

    def __call__(self) -> datetime:
        self.now += timedelta(minutes=1)
        return self.now


def charge_for_ever(url: str, ready: Event, stop: Event) -> None:
    """A tick a second, in a process of its own, as the accounting service is."""
    broker = open_broker(url, Minutes(T0 + timedelta(days=1)))
    broker.charge_all()
    ready.set()
    while not stop.wait(1):
        broker.charge_all()
    broker.store.close()


def grants(report: Report, name: str, url: str) -> None:
    """The row of grants beside a tick a second."""
    broker = open_broker(url)
    alone = [grant(broker) for _ in range(40)]
    spawn = multiprocessing.get_context("spawn")
    ready, stop = spawn.Event(), spawn.Event()
    process = spawn.Process(target=charge_for_ever, args=(url, ready, stop), daemon=True)
    process.start()
    ready.wait(120)
    beside = []
    end = time.perf_counter() + 15
    while time.perf_counter() < end:
        beside.append(grant(broker))
        time.sleep(0.05)
    stop.set()
    process.join(60)
    broker.store.close()
    ours, base = Series(tuple(beside)), Series(tuple(alone))
    report.row(name, "a grant beside ticks", str(len(beside)), ours.text(1), base.text(1), "")
    report.figure(f"{name}_grant_beside_ticks_ms_p50", ours.median, MOST_GRANT_MS)
    report.figure(f"{name}_grant_beside_ticks_ms_p99", quantile(beside, 0.99))


def grant(broker: Broker) -> float:
    """Milliseconds of a grant; the lease is given back at once."""
    server = ServerRef("new")
    began = time.perf_counter()
    lease = broker.acquire(server, Request(devices=1), engine="docker")
    took = 1000 * (time.perf_counter() - began)
    broker.release(lease.id, reason="stopped")
    return took


if __name__ == "__main__":
    main()
