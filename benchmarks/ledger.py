"""What a debit costs: double entry and idempotency, against the bare inserts and updates.

Ours posts a charge as the broker does: the writers' lock, the look for the idempotency key, a
transfer, two postings, two balances, one commit. The baseline writes the same rows into another
database of the same schema through the plain driver, prepared and with the same durability
(SQLite: WAL and full sync; PostgreSQL: fsync on), and looks for nothing. Each debit is a
transaction of its own. Both run in turns, so many debits a turn; ours in a thread of the store's
own, as everything of the broker does. ``processor`` is what our own code takes of it, and the
driver for the baseline, with PostgreSQL's processes left out: other work disturbs that less.

``page`` is one statement page of an account with 100,000 entries, as its member sees it.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg2
import sqlalchemy as sa
from support.report import Report, Series, argument_parser, in_turns, pair

from gpuspawner.ledger import rules
from gpuspawner.ledger.entries import SYSTEM_USAGE, Posting, Transfer, TransferKind
from gpuspawner.model import MICRO, Lease, LeaseState, ServerRef
from gpuspawner.store import Store, book, leases
from gpuspawner.store.schema import accounts, postings, transfers
from tests.support.brokers import T0, open_broker
from tests.support.postgres import PrivatePostgres

DEBITS = 50
"""Debits a turn."""

WARM_UP = 2
"""Turns that are not counted."""

ENTRIES = 100_000
SESSIONS = 1000
PAGES = 50
MOST_RATIO = 1.25
"""At least 80% of the bare rate."""

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

Debit = Callable[[Transfer], None]
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
    """The row of one database."""
    stores = [Store(ours_url), Store(bare_url)]
    for store in stores:
        with store.write() as connection:
            for account in (ACCOUNT, SYSTEM_USAGE):
                book.open_account(connection, account, T0)
            leases.insert(connection, LEASE)
    stores[1].close()
    ours: list[Took] = []
    bare: list[Took] = []

    def post(transfer: Transfer) -> None:
        with stores[0].write() as connection:
            book.post(connection, transfer)

    with plain(bare_url) as insert:
        in_turns(
            runs + WARM_UP,
            lambda turn: ours.append(stores[0].executor.submit(timed, post, turn).result()),
            lambda turn: bare.append(timed(insert, turn)),
        )
    stores[0].close()
    for what, part in (("a debit", 0), ("a debit, processor", 1)):
        both = pair(*([1000 * took[part] for took in side[WARM_UP:]] for side in (ours, bare)))
        texts = (both.ours.text(3), both.baseline.text(3), both.ratios.text(3))
        report.row(name, what, f"{runs} x {DEBITS}", *texts)
        if part:
            report.figure(f"{name}_debit_processor_ms", both.ours.median)
            continue
        report.figure(f"{name}_debit_ms", both.ours.median)
        report.figure(f"{name}_debits_a_second", 1000 / both.ours.median)
        report.figure(f"{name}_debit_ratio", both.ratios.median, MOST_RATIO)


def timed(debit: Debit, turn: int) -> Took:
    """What one debit took, of so many in a row."""
    made = [charge(turn * DEBITS + number) for number in range(DEBITS)]
    began, worked = time.perf_counter(), time.thread_time()
    for transfer in made:
        debit(transfer)
    took, work = time.perf_counter() - began, time.thread_time() - worked
    return took / DEBITS, work / DEBITS


def charge(number: int) -> Transfer:
    """The charge of the minute of this number."""
    key = f"charge:{LEASE.id}:{number}"
    return Transfer(
        id=rules.transfer_id(key),
        key=key,
        kind=TransferKind.CHARGE,
        at=T0 + timedelta(minutes=number),
        actor="accounting",
        reason="1 x A100-80GB of anna",
        postings=(Posting(SYSTEM_USAGE, number + 1), Posting(ACCOUNT, -number - 1)),
        lease_id=LEASE.id,
    )


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
            psycopg2.connect(
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

    def debit(it: Transfer) -> None:
        if begin:
            cursor.execute(begin)
        row = (it.id, it.key, it.kind.value, time_of(it.at), it.actor, it.reason, it.lease_id)
        cursor.execute(insert_transfer, row)
        for posting in it.postings:
            cursor.execute(insert_posting, (it.id, posting.account, posting.amount))
            cursor.execute(move, (posting.amount, posting.account))
        commit()

    return debit


def page(report: Report, name: str, url: str, entries: int) -> None:
    """A statement page, the newest and one in the middle, of a long account."""
    broker = open_broker(url)
    fill(broker.store, entries)
    newest = broker.store.run(lambda c: c.execute(sa.select(sa.func.max(postings.c.id))).scalar())
    marks = (None, (newest or 0) - entries)  # an entry has two postings
    for before, what in zip(marks, ("newest page", "page in the middle"), strict=True):
        for folded in (False, True):
            times = []
            for _ in range(PAGES):
                began = time.perf_counter()
                found = broker.statement_page("member:long", before, folded=folded)
                times.append(1000 * (time.perf_counter() - began))
            assert found.entries
            series = Series(tuple(times))
            label = f"{what} of {entries} entries" + (", folded" if folded else "")
            report.row(name, label, str(PAGES), series.text(2), "", "")
            figure = f"{name}_{what.split()[-1]}_{'folded_' if folded else ''}page_ms"
            report.figure(figure, series.p90, MOST_PAGE_MS)
    broker.store.close()


def fill(store: Store, entries: int) -> None:
    """One account with so many entries, which a thousand sessions made."""
    lines, moved = [], []
    with store.write() as connection:
        book.open_account(connection, "member:long", T0)
        for number in range(SESSIONS):
            at = T0 + timedelta(minutes=number * entries // SESSIONS)
            ended = replace(LEASE, id=f"long{number}", account="member:long", granted_at=at)
            ended = replace(ended, state=LeaseState.ENDED, started_at=at, ended_at=at)
            leases.insert(connection, ended)
    for number in range(entries):
        key = f"long:{number}"
        name = rules.transfer_id(key)
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
