"""What charging 10,000 running leases takes, and whether the hub notices.

``a tick`` is one look of the accounting service, a second after the last one: the production
:meth:`~gpuspawner.ledger.service.LedgerService.charge_portion` over so many running leases, which
charges those whose minute is over, about one in sixty. ``a minute of ticks`` is the time of sixty
of them, in which every lease is charged once. ``a portion of a pause`` is one transaction of the
service that was down for an hour, when all of them are due. ``all at once`` charges them in one
transaction, which nothing does by itself; its baseline writes the same rows (a transfer and two
postings a lease, its new sum, the balances) through the plain driver, many at a time, in one
transaction of another database of the same schema: it reads nothing and works nothing out.

``a grant`` is what a member who starts a server waits for in the services while another process
ticks every second, as the accounting service does, beside the same without ticks.
"""

from __future__ import annotations

import multiprocessing
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from datetime import datetime, timedelta, timezone
from functools import partial
from multiprocessing.synchronize import Event
from typing import Any

import psycopg
import sqlalchemy as sa
from support.report import Report, Series, argument_parser, in_turns, pair, quantile

from gpuspawner.core.units import MICRO
from gpuspawner.db.engine import Store
from gpuspawner.db.schema import accounts, lease_places, leases
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.ledger.models import member_account
from gpuspawner.ledger.rules import transfer_id
from gpuspawner.service.worker import BETWEEN_PORTIONS, PORTION
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, open_services
from tests.support.postgres import PrivatePostgres

LEASES = 10_000
MEMBERS = 4_000
MOST_MS = 100.0
MOST_GRANT_MS = 100.0
RATE = 4 * MICRO
DUE = RATE // 60
MINUTE = timedelta(minutes=1)


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
    """The rows of one database's ticks."""
    clock = Clock(T0)
    services = open_services(ours_url, clock)
    bare_store = Store(bare_url)
    for store in (services.store, bare_store):
        fill(store, count)
    bare_store.close()
    whole: list[float] = []
    bare: list[float] = []
    minute = [0]

    def charge(_: int) -> None:
        clock.forward(minutes=1)
        whole.append(timed(services.ledger.charge_all, count))

    def write(_: int) -> None:
        minute[0] += 1
        rows = baseline_rows(minute[0], count)
        bare.append(timed(lambda: write_plainly(bare_url, *rows)))

    in_turns(runs + 1, charge, write)
    clock.forward(hours=1)
    portions = []
    for _ in range(-(-count // PORTION)):
        portions.append(timed(partial(services.ledger.charge_portion, MINUTE, PORTION)))
    assert services.ledger.charge_portion(MINUTE, PORTION) == 0
    seconds, charged = [], 0
    for _ in range(60 * max(1, runs // 5)):
        clock.forward(seconds=1)
        began = time.perf_counter()
        charged += services.ledger.charge_portion(MINUTE, PORTION)
        seconds.append(1000 * (time.perf_counter() - began))
    services.store.close()
    assert charged == count * len(seconds) // 60
    told = f"over {count} leases"
    each, down = Series(tuple(seconds)), Series(tuple(portions))
    minutes = Series(tuple(sum(seconds[at : at + 60]) for at in range(0, len(seconds), 60)))
    report.row(name, f"a tick {told}", str(len(seconds)), each.text(1), "", "")
    report.row(name, f"a minute of ticks {told}", str(len(seconds) // 60), minutes.text(0), "", "")
    report.row(name, f"a portion of a pause {told}", str(len(portions)), down.text(0), "", "")
    both = pair(whole[1:], bare[1:])  # the first is warm-up
    texts = (both.ours.text(0), both.baseline.text(0), both.ratios.text(2))
    report.row(name, f"all {count} leases at once", str(runs), *texts)
    report.figure(f"{name}_tick_ms_p50", each.median, MOST_MS)
    report.figure(f"{name}_tick_ms_p99", quantile(seconds, 0.99))
    report.figure(f"{name}_portion_ms_p50", down.median)
    report.figure(f"{name}_all_at_once_ms_p50", both.ours.median)
    report.figure(f"{name}_all_at_once_ratio", both.ratios.median)


def timed(work: Callable[[], object], expected: int | None = None) -> float:
    """Milliseconds that it takes."""
    began = time.perf_counter()
    done = work()
    took = 1000 * (time.perf_counter() - began)
    assert expected in (None, done)
    return took


def fill(store: Store, count: int) -> None:
    """So many running leases of so many members, on a device each."""
    names = [member_account(f"member{number}") for number in range(MEMBERS)]
    rows, places = [], []
    for number in range(count):
        lease_id = transfer_id(str(number))[:16]
        owner = number % MEMBERS
        began = T0 - MINUTE * number / count  # not all at one moment
        rows.append(
            {"id": lease_id, "user": f"member{owner}", "server_name": str(number)}
            | {"account": names[owner], "environment": "pytorch", "rate": RATE, "hold": 0}
            | {"charged": 0, "state": "running", "granted_at": T0, "started_at": began}
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
        psycopg.connect(
            host=parsed.host, port=parsed.port, user=parsed.username, dbname=parsed.database
        )
    ) as connection:
        cursor = connection.cursor()
        write_rows(cursor, "transfers (id, key, kind, at, actor, reason, lease_id)", transfers)
        write_rows(cursor, "postings (transfer_id, account, amount)", postings)
        update = (
            "UPDATE leases SET charged = v.s FROM unnest(%s::bigint[], %s::text[]) AS v (s, i) "
            "WHERE id = v.i"
        )
        cursor.execute(update, columns_of(sums))
        together: dict[str, int] = {}
        for amount, account in moves:
            together[account] = together.get(account, 0) + amount
        update = (
            "UPDATE accounts SET balance = balance + v.a "
            "FROM unnest(%s::text[], %s::bigint[]) AS v (n, a) WHERE name = v.n"
        )
        cursor.execute(update, columns_of(together.items()))
        connection.commit()


def write_rows(cursor: Any, table: str, rows: Iterable[Sequence[Any]]) -> None:
    """Insert them the quickest way that PostgreSQL has."""
    with cursor.copy(f"COPY {table} FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


def columns_of(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """The same values, a list for each column."""
    return [list(column) for column in zip(*rows, strict=True)]


# Whether the hub notices.


class Later:
    """A clock that goes with time, from a moment on."""

    def __init__(self, began: datetime) -> None:
        self.behind = datetime.now(timezone.utc) - began

    def __call__(self) -> datetime:
        return datetime.now(timezone.utc) - self.behind


def catch_up(services: Services) -> None:
    """What the service does at each look."""
    while services.ledger.charge_portion(MINUTE, PORTION) >= PORTION:
        time.sleep(BETWEEN_PORTIONS)


def charge_for_ever(url: str, ready: Event, stop: Event) -> None:
    """A tick a second, in a process of its own, as the accounting service is."""
    services = open_services(url, Later(T0 + timedelta(days=1)))
    catch_up(services)
    ready.set()
    while not stop.wait(1):
        catch_up(services)
    services.store.close()


def grants(report: Report, name: str, url: str) -> None:
    """The row of grants beside a tick a second."""
    services = open_services(url)
    alone = [grant(services) for _ in range(40)]
    spawn = multiprocessing.get_context("spawn")
    ready, stop = spawn.Event(), spawn.Event()
    process = spawn.Process(target=charge_for_ever, args=(url, ready, stop), daemon=True)
    process.start()
    ready.wait(120)
    beside = []
    end = time.perf_counter() + 15
    while time.perf_counter() < end:
        beside.append(grant(services))
        time.sleep(0.05)
    stop.set()
    process.join(60)
    services.store.close()
    ours, base = Series(tuple(beside)), Series(tuple(alone))
    report.row(name, "a grant beside ticks", str(len(beside)), ours.text(1), base.text(1), "")
    report.figure(f"{name}_grant_beside_ticks_ms_p50", ours.median, MOST_GRANT_MS)
    report.figure(f"{name}_grant_beside_ticks_ms_p99", quantile(beside, 0.99))


def grant(services: Services) -> float:
    """Milliseconds of a grant; the lease is given back at once."""
    server = ServerRef("new")
    began = time.perf_counter()
    lease = services.leases.grant(server, Request(devices=1), engine="docker")
    took = 1000 * (time.perf_counter() - began)
    services.leases.release(lease.id, reason="stopped")
    return took


if __name__ == "__main__":
    main()
