"""What a debit costs: double entry and idempotency, against the bare inserts and updates.

Ours posts charges as the services do: the writers' lock, the idempotency key, a transfer, two
postings, two balances, one commit; in a thread of the store's own, as everything of the services
does. The baselines write the same rows into another database of the same schema with the same
durability (SQLite: WAL and full sync; PostgreSQL: fsync on), and check nothing:

* ``a debit``: one debit a transaction, as a lease that ends is charged. The baseline is plain
  SQLAlchemy Core, the library that ours is written in: the ratio is what double entry and
  idempotency cost. Ours keeps at least 80 % of its rate;
* ``a debit, driver``: the same beside the database's driver without SQLAlchemy. It has no target:
  the distance between the two baselines is the price of the library;
* ``a debit of 200``: 200 debits a transaction, as the service charges running leases, beside plain
  SQLAlchemy Core with a list of rows for each statement. At least 80 % of its rate. Ours adds up
  what each account gets first; the baselines change a balance for each posting;
* ``a debit of 200, driver``: the same beside the driver's own way to do many; without a target;
* ``a debit, chain`` and ``a debit of 200, chain``: ours beside ours without the links of the audit
  chain. The chain costs at most 5 %.

Each pair runs in turns, so many debits a turn. ``processor`` is the posting thread's own time, with
PostgreSQL's processes left out: other work disturbs that less.

``page`` is one statement page of an account with 100,000 entries, as its member sees it.
"""

from __future__ import annotations

import itertools
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import psycopg
import sqlalchemy as sa
from support.report import Report, Series, argument_parser, in_turns, pair

from gpuspawner.core.units import MICRO
from gpuspawner.db import hash_chain
from gpuspawner.db.engine import Store
from gpuspawner.db.schema import accounts, postings, transfers
from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Lease, LeaseState, ServerRef
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.ledger import rules as ledger_rules
from gpuspawner.ledger.models import SYSTEM_USAGE, Posting, Transfer, TransferKind
from tests.support.brokers import T0, open_services
from tests.support.postgres import PrivatePostgres

DEBITS = 50
"""Debits a turn, where each is a transaction."""

PORTION = 200
"""Debits a transaction, as the accounting service charges."""

WARM_UP = 2
"""Turns that are not counted."""

ENTRIES = 100_000
SESSIONS = 1000
PAGES = 50
MOST_RATIO = 1.25
"""At least 80% of the bare rate."""

MOST_CHAIN_RATIO = 1.05
"""What the audit chain may cost."""

MOST_PAGE_MS = 100.0
ACCOUNT = "member:anna"
LEASE = Lease(
    id="benchmark",
    server=ServerRef("anna"),
    account=ACCOUNT,
    environment="",
    devices=(),
    rate=MICRO,
    hold=0,
    granted_at=T0,
)

Debit = Callable[[Sequence[Transfer]], None]
"""Posts these in one transaction."""
Took = tuple[float, float]
"""Seconds, and seconds of the thread's processor time."""


def main() -> None:
    parser = argument_parser(__doc__, 40)
    parser.add_argument("--entries", type=int, default=ENTRIES, help="of the long account")
    options = parser.parse_args()
    report = Report("ledger", ("database", "what", "runs", "ours, ms", "bare, ms", "ratio"))
    report.figure("runs", options.runs)
    with tempfile.TemporaryDirectory() as folder, PrivatePostgres(durable=True) as server:
        both = {
            "sqlite": (f"sqlite:///{folder}/ours.sqlite", f"sqlite:///{folder}/bare.sqlite"),
            "postgresql": (server.fresh_database(), server.fresh_database()),
        }
        for name, (ours, bare) in both.items():
            debits(report, name, ours, bare, options.runs)
        for name, (ours, _) in both.items():
            page(report, name, ours, options.entries)
    report.print(options.json)


def debits(report: Report, name: str, ours_url: str, bare_url: str, runs: int) -> None:
    """The rows of one database: one debit a transaction, and many."""
    stores = [Store(ours_url), Store(bare_url)]
    for store in stores:
        with store.write() as connection:
            for account in (ACCOUNT, SYSTEM_USAGE):
                ledger_repository.open_account(connection, account, T0)
            leases_repository.insert(connection, LEASE)
    stores[1].close()
    numbers = itertools.count()

    def post(some: Sequence[Transfer]) -> None:
        with stores[0].write() as connection:
            ledger_repository.post_many(connection, some)

    def in_its_thread(first: int, size: int) -> Took:
        return stores[0].executor.submit(timed, post, first, size).result()

    def without_chain(first: int, size: int) -> Took:
        with unchained():
            return in_its_thread(first, size)

    def compare(what: str, bare: Debit | None, size: int, most: float | None) -> None:
        """One pair of rows: ours beside a baseline, so many debits a transaction.

        Without ``bare`` it is ours without the chain.
        """
        took: list[list[Took]] = [[], []]

        def baseline(first: int) -> Took:
            return timed(bare, first, size) if bare else without_chain(first, size)

        in_turns(
            runs + WARM_UP,
            lambda turn: took[0].append(in_its_thread(next(numbers), size)),
            lambda turn: took[1].append(baseline(next(numbers))),
        )
        key = f"{name}_{what.replace(', ', '_').replace(' ', '_')}".replace("_a_debit", "_debit")
        for part, suffix in enumerate(("", ", processor")):
            both = pair(*([1000 * each[part] for each in side[WARM_UP:]] for side in took))
            texts = (both.ours.text(3), both.baseline.text(3), both.ratios.text(3))
            report.row(name, what + suffix, f"{runs} x {max(DEBITS, size)}", *texts)
            if not part:
                report.figure(f"{key}_ms", both.ours.median)
                report.figure(f"{key}_ratio", both.ratios.median, most)

    with plain_core(bare_url) as core:
        compare("a debit", core, 1, MOST_RATIO)
        compare(f"a debit of {PORTION}", core, PORTION, MOST_RATIO)
    with plain(bare_url) as driver:
        compare("a debit, driver", driver, 1, None)
        compare(f"a debit of {PORTION}, driver", driver, PORTION, None)
    compare("a debit, chain", None, 1, MOST_CHAIN_RATIO)
    compare(f"a debit of {PORTION}, chain", None, PORTION, MOST_CHAIN_RATIO)
    stores[0].close()


_INSERT_UNCHAINED = {
    name: insert.returning(transfers.c.id, sa.null().label("link"))
    for name, insert in ledger_repository._NEW.items()
}


@contextmanager
def unchained() -> Iterator[None]:
    """Post transfers without a link of the audit chain, and without asking for the newest one."""
    with (
        mock.patch.object(hash_chain, "transfer_facts", lambda some: [""] * len(some)),
        mock.patch.object(hash_chain, "link_transfers", lambda before, facts: None),
        mock.patch.object(hash_chain, "newest_link", lambda connection: None),
        mock.patch.object(ledger_repository, "_INSERT_ONE", _INSERT_UNCHAINED),
    ):
        yield


def timed(debit: Debit, turn: int, size: int) -> Took:
    """What one debit took, of so many in a row, in transactions of this size."""
    count = max(DEBITS, size)
    made = [charge(turn * PORTION + number, number // size) for number in range(count)]
    began, worked = time.perf_counter(), time.thread_time()
    for first in range(0, count, size):
        debit(made[first : first + size])
    took, work = time.perf_counter() - began, time.thread_time() - worked
    return took / count, work / count


def charge(number: int, minute: int) -> Transfer:
    """A charge; those of one transaction are of one moment, as the service's are."""
    key = f"charge:{LEASE.id}:{number}"
    return Transfer(
        id=ledger_rules.transfer_id(key),
        key=key,
        kind=TransferKind.CHARGE,
        at=T0 + timedelta(minutes=minute),
        actor="accounting",
        reason="1 x A100-80GB of anna",
        postings=(Posting(SYSTEM_USAGE, number + 1), Posting(ACCOUNT, -number - 1)),
        lease_id=LEASE.id,
    )


@contextmanager
def plain_core(url: str) -> Iterator[Debit]:
    """The bare inserts of debits, through SQLAlchemy Core, with a pool of connections."""
    engine = sa.create_engine(url)
    if engine.dialect.name == "sqlite":

        @sa.event.listens_for(engine, "connect")
        def set_up(connection: sqlite3.Connection, record: object) -> None:
            connection.isolation_level = None
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA foreign_keys=ON")

        @sa.event.listens_for(engine, "begin")
        def begin(connection: sa.Connection) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    account, amount = sa.bindparam("name_of"), sa.bindparam("amount", type_=sa.BigInteger)
    move = (
        sa.update(accounts)
        .where(accounts.c.name == account)
        .values(balance=accounts.c.balance + amount)
    )
    fields = ("id", "key", "at", "actor", "reason", "lease_id")

    def debit(some: Sequence[Transfer]) -> None:
        rows = [
            {name: getattr(it, name) for name in fields} | {"kind": it.kind.value} for it in some
        ]
        lines = [
            {"transfer_id": it.id, "account": posting.account, "amount": posting.amount}
            for it in some
            for posting in it.postings
        ]
        moves = [{"name_of": line["account"], "amount": line["amount"]} for line in lines]
        with engine.begin() as connection:
            if len(some) > 1:
                connection.execute(sa.insert(transfers), rows)
                connection.execute(sa.insert(postings), lines)
                connection.execute(move, moves)
                return
            connection.execute(sa.insert(transfers), rows[0])
            for line, moved in zip(lines, moves, strict=True):
                connection.execute(sa.insert(postings), line)
                connection.execute(move, moved)

    yield debit
    engine.dispose()


@contextmanager
def plain(url: str) -> Iterator[Debit]:
    """The bare inserts of one debit, through the plain driver."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite":
        with closing(sqlite3.connect(parsed.database or "", isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA foreign_keys=ON")
            yield bare_debit(connection.cursor(), "?", "BEGIN IMMEDIATE", connection.commit, naive)
    else:
        with closing(
            psycopg.connect(
                host=parsed.host, port=parsed.port, user=parsed.username, dbname=parsed.database
            )
        ) as connection:
            yield bare_debit(connection.cursor(), "%s", "", connection.commit, lambda at: at)


def naive(at: Any) -> str:
    """A time as SQLAlchemy writes it into SQLite."""
    return str(at.replace(tzinfo=None).isoformat(" ", "microseconds"))


def bare_debit(
    cursor: Any, mark: str, begin: str, commit: Callable[[], None], time_of: Callable[[Any], Any]
) -> Debit:
    """A transfer, two postings, two balances: one transaction, and nothing else."""
    insert_transfer = (
        "INSERT INTO transfers (id, key, kind, at, actor, reason, lease_id) "
        f"VALUES ({', '.join([mark] * 7)})"
    )
    insert_posting = (
        f"INSERT INTO postings (transfer_id, account, amount) VALUES ({mark}, {mark}, {mark})"
    )
    move = f"UPDATE accounts SET balance = balance + {mark} WHERE name = {mark}"

    def debit(some: Sequence[Transfer]) -> None:
        if begin:
            cursor.execute(begin)
        rows = [
            (it.id, it.key, it.kind.value, time_of(it.at), it.actor, it.reason, it.lease_id)
            for it in some
        ]
        lines = [(it.id, p.account, p.amount) for it in some for p in it.postings]
        cursor.executemany(insert_transfer, rows)
        cursor.executemany(insert_posting, lines)
        cursor.executemany(move, [(amount, account) for _, account, amount in lines])
        commit()

    return debit


def page(report: Report, name: str, url: str, entries: int) -> None:
    """A statement page, the newest and one in the middle, of a long account."""
    services = open_services(url)
    fill(services.store, entries)
    newest = services.store.run(lambda c: c.execute(sa.select(sa.func.max(postings.c.id))).scalar())
    marks = (None, (newest or 0) - entries)  # an entry has two postings
    for before, what in zip(marks, ("newest page", "page in the middle"), strict=True):
        for folded in (False, True):
            times = []
            for _ in range(PAGES):
                began = time.perf_counter()
                if folded:
                    found = services.reports.folded_page("member:long", services.clock(), before)
                else:
                    found = services.reports.statement_page("member:long", before)
                times.append(1000 * (time.perf_counter() - began))
            assert found.entries
            series = Series(tuple(times))
            label = f"{what} of {entries} entries" + (", folded" if folded else "")
            report.row(name, label, str(PAGES), series.text(2), "", "")
            figure = f"{name}_{what.split()[-1]}_{'folded_' if folded else ''}page_ms"
            report.figure(figure, series.p90, MOST_PAGE_MS)
    services.store.close()


def fill(store: Store, entries: int) -> None:
    """One account with so many entries, which a thousand sessions made."""
    lines, moved = [], []
    with store.write() as connection:
        ledger_repository.open_account(connection, "member:long", T0)
        for number in range(SESSIONS):
            at = T0 + timedelta(minutes=number * entries // SESSIONS)
            ended = replace(LEASE, id=f"long{number}", account="member:long", granted_at=at)
            ended = replace(ended, state=LeaseState.ENDED, started_at=at, ended_at=at)
            leases_repository.insert(connection, ended)
    for number in range(entries):
        key = f"long:{number}"
        name = ledger_rules.transfer_id(key)
        at = T0 + timedelta(minutes=number)
        lines.append(
            {"id": name, "key": key, "kind": "charge", "at": at, "actor": "accounting"}
            | {"reason": "1 x A100 of long", "lease_id": f"long{number * SESSIONS // entries}"}
        )
        for account, amount in (("member:long", -1), ("system:usage", 1)):
            moved.append({"transfer_id": name, "account": account, "amount": amount})
    with store.write() as connection:
        connection.execute(sa.insert(transfers), lines)
        connection.execute(sa.insert(postings), moved)
        connection.execute(
            sa.update(accounts)
            .where(accounts.c.name.in_(["member:long", "system:usage"]))
            .values(
                balance=accounts.c.balance
                + sa.case((accounts.c.name == "system:usage", entries), else_=-entries)
            )
        )
        connection.exec_driver_sql("ANALYZE")  # a site's database does that by itself


if __name__ == "__main__":
    main()
