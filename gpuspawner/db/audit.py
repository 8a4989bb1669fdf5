"""Checks of all invariants of a store: ``gpuspawner audit``.

The pure rules of :mod:`gpuspawner.ledger.checks` get the rows here, a few hundred leases at a time,
so that a year of a busy site needs no gigabytes. The first row that breaks a rule is enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import sqlalchemy as sa

from ..db.audit_log import AuditEntry
from ..leases import repository as leases_repository
from ..leases.models import LeaseState
from ..ledger import checks, totals
from ..ledger import repository as ledger_repository
from ..ledger.checks import Books, PostingRow
from ..ledger.models import Account, TransferKind, is_system
from ..slurm import repository as slurm_repository
from . import audit_log, hash_chain
from .engine import Store, revision
from .schema import (
    COUNTED_PLACE,
    OPEN_LEASE,
    OPEN_PLACE,
    accounts,
    lease_places,
    leases,
    lots,
    metadata,
    postings,
    refill_runs,
    transfers,
)
from .search import find_changes

AT_ONCE = 500
"""How many leases, and 20 times as many postings, are held in memory at a time."""

Check = Callable[[sa.Connection], Iterator[str]]
"""Yields one sentence per problem, lazily, starting with the first row."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """The result of one invariant's check."""

    name: str
    law: str
    """The invariant, as a sentence."""
    problem: str = ""
    """The first row that breaks it; empty if there is none."""


class AuditService:
    """Checks the store, and reads the audit log."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def check(self) -> tuple[list[AuditFinding], dict[str, int]]:
        """Check every invariant against every row, and return findings and row counts by table."""
        return self.store.run(lambda connection: (list(audit(connection)), sizes(connection)))

    def trail(self, limit: int = 100) -> list[AuditEntry]:
        """Return the newest entries of the audit log, newest first."""
        return self.store.run(lambda connection: find_changes(connection, limit=limit).changes)

    def note(self, at: datetime, actor: str, action: str, subject: str, detail: str) -> None:
        """Record what was done outside of the store."""
        with self.store.write() as connection:
            audit_log.note(
                connection, at=at, actor=actor, action=action, subject=subject, detail=detail
            )

    def chain_head(self) -> str:
        """Return the head of the audit chain, to be noted elsewhere."""
        return self.store.run(hash_chain.head)

    def knows_head(self, noted: str) -> bool:
        """Return True if a head of the audit chain that was noted earlier is still in it."""
        return self.store.run(lambda connection: hash_chain.knows(connection, noted))


def audit(connection: sa.Connection) -> Iterator[AuditFinding]:
    """Check every invariant against the store, one after the other, in one consistent view."""
    for name, check in CHECKS.items():
        law = " ".join((check.__doc__ or "").split())
        finding = AuditFinding(name, law, next(check(connection), ""))
        yield finding
        if finding.problem and name in FIRST:
            return


def sizes(connection: sa.Connection) -> dict[str, int]:
    """Return how many rows were checked, by table."""
    tables = (accounts, leases, transfers, postings)
    counts = (sa.select(sa.func.count()).select_from(table) for table in tables)
    return {
        table.name: int(connection.execute(count).scalar_one())
        for table, count in zip(tables, counts, strict=True)
    }


def _file(connection: sa.Connection) -> Iterator[str]:
    """The database file is whole: every page, index and constraint."""
    if connection.dialect.name != "sqlite":
        return  # PostgreSQL checks its own pages
    try:
        said = connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one()
    except sa.exc.DatabaseError as error:
        said = str(error.orig)
    if said != "ok":
        yield f"The database file is damaged: {' '.join(str(said).split())}."


def _references(connection: sa.Connection) -> Iterator[str]:
    """Every row that refers to another row refers to one that exists."""
    for table in metadata.sorted_tables:
        for key in table.foreign_keys:
            other = key.column.table.alias("other")
            missing = (
                sa.select(key.parent)
                .select_from(table.outerjoin(other, key.parent == other.c[key.column.name]))
                .where(key.parent.isnot(None), other.c[key.column.name].is_(None))
                .limit(1)
            )
            for (name,) in connection.execute(missing):
                column = f"{table.name}.{key.parent.name}"
                yield f"{column} is {name!r}, but {key.column.table.name} has no such row."


def _keys(connection: sa.Connection) -> Iterator[str]:
    """No idempotency key belongs to two transfers."""
    twice = (
        sa.select(transfers.c.key).group_by(transfers.c.key).having(sa.func.count() > 1).limit(1)
    )
    for (key,) in connection.execute(twice).all():
        both = connection.execute(sa.select(transfers.c.id).where(transfers.c.key == key))
        yield from checks.check_keys(
            Books(postings=tuple(_row(transfer_id=i, key=key) for (i,) in both))
        )


def _whole(connection: sa.Connection) -> Iterator[str]:
    """Every transfer has its postings."""
    bare = sa.select(transfers.c.id).where(
        ~sa.exists().where(postings.c.transfer_id == transfers.c.id)
    )
    for (name,) in connection.execute(bare.limit(1)):
        yield f"Transfer {name} has no postings: it moved nothing."


def _apart(connection: sa.Connection) -> Iterator[str]:
    """A posting is marked as apart if and only if it neither charges nor settles a lease."""
    kinds = [TransferKind.CHARGE.value, TransferKind.REFUND.value]
    told = transfers.c.kind.in_(kinds) & ~transfers.c.key.startswith("refund:")
    joined = postings.join(transfers, transfers.c.id == postings.c.transfer_id)
    query = sa.select(postings.c.transfer_id).select_from(joined).where(postings.c.apart == told)
    for (name,) in connection.execute(query.limit(1)):
        yield f"The postings of transfer {name} are marked wrongly."


def _zero_sum(connection: sa.Connection) -> Iterator[str]:
    """The postings of each transfer sum to zero."""
    query = sa.select(postings.c.transfer_id, postings.c.amount).order_by(postings.c.id)
    # A transfer's postings lie side by side, so few are incomplete at any moment.
    unfinished: dict[str, int] = {}
    for name, amount in _stream(connection, query):
        total = unfinished.pop(name, 0) + amount
        if total:
            unfinished[name] = total
    yield from checks.check_zero_sum(
        Books(postings=tuple(_row(transfer_id=n, amount=t) for n, t in unfinished.items()))
    )


def _balances(connection: sa.Connection) -> Iterator[str]:
    """The balance of each account is the sum of its postings."""
    query = sa.select(postings.c.account, postings.c.amount)
    sums: dict[str, int] = defaultdict(int)
    for name, amount in _stream(connection, query):
        sums[name] += amount
    rows = tuple(_row(transfer_id=n, account=n, amount=total) for n, total in sums.items())
    yield from checks.check_balances(Books(postings=rows, accounts=_accounts(connection)))


def _holds(connection: sa.Connection) -> Iterator[str]:
    """An account holds what its open leases hold: an ended lease holds nothing."""
    opened = tuple(leases_repository.open_leases(connection))
    yield from checks.check_holds(Books(accounts=_accounts(connection), leases=opened))


def _charges(connection: sa.Connection) -> Iterator[str]:
    """The amount charged to each lease is what its charges and refunds moved."""
    for books in _books_of_leases(connection, with_postings=True):
        yield from checks.check_lease_postings(books)


def _settled(connection: sa.Connection) -> Iterator[str]:
    """An ended lease was charged what it owed at its end, and a failed start nothing."""
    for books in _books_of_leases(connection, with_postings=False):
        yield from checks.check_settled(books)


def _lots(connection: sa.Connection) -> Iterator[str]:
    """The expired credits taken back from each account are the amounts in its lots."""
    said = sa.select(lots.c.account, sa.func.sum(lots.c.taken)).group_by(lots.c.account)
    moved = (
        sa.select(postings.c.account, -sa.func.sum(postings.c.amount))
        .join(transfers, transfers.c.id == postings.c.transfer_id)
        .where(transfers.c.kind == TransferKind.EXPIRY.value)
        .group_by(postings.c.account)
    )
    taken = {name: int(total) for name, total in connection.execute(moved) if not is_system(name)}
    for name, total in connection.execute(said.order_by(lots.c.account)):
        if int(total) != taken.pop(name, 0):
            yield f"{total} microcredits of {name} expired by its lots, but not by its postings."
    for name, total in taken.items():
        if total:
            yield f"{total} microcredits of {name} expired by its postings, but not by its lots."


def _refills(connection: sa.Connection) -> Iterator[str]:
    """Each occurrence of a refill gave the recorded amount to the recorded number of accounts."""
    given: dict[str, tuple[int, int]] = {}
    query = _keyed(TransferKind.GRANT).where(transfers.c.key.startswith("refill:"))
    for key, _, amount in _stream(connection, query):
        name = ":".join(key.split(":")[:3])
        count, total = given.get(name, (0, 0))
        given[name] = (count + 1, total + amount)
    runs = sa.select(*(refill_runs.c[n] for n in ("refill_id", "occurrence", "accounts", "total")))
    for refill, occurrence, count, total in _stream(connection, runs):
        found = given.pop(f"refill:{refill}:{occurrence:%Y%m%dT%H%M%S}", (0, 0))
        if found != (count, total):
            yield (
                f"The refill {refill} of {occurrence:%Y-%m-%d %H:%M} UTC gave {total} "
                f"microcredits to {count} accounts, but its postings gave {found[1]} to {found[0]}."
            )
    for name in given:
        yield f"Credits were given for {name}, but no such occurrence is recorded."


def _places(connection: sa.Connection) -> Iterator[str]:
    """A device is taken exactly as long as the lease on it is open."""
    joined = lease_places.join(leases, leases.c.id == lease_places.c.lease_id)
    places = sa.select(lease_places.c.lease_id, lease_places.c.uuid).select_from(joined).limit(1)
    kept = places.where(lease_places.c.open, ~OPEN_LEASE)
    for name, uuid in connection.execute(kept):
        yield f"Lease {name} has ended, but still takes device {uuid}."
    lost = places.where(~lease_places.c.open, OPEN_LEASE)
    for name, uuid in connection.execute(lost):
        yield f"Lease {name} is open, but its device {uuid} counts as free."


def _one_lease(connection: sa.Connection) -> Iterator[str]:
    """Each slot of a device has at most one open lease, and so has each server."""
    uuid, slot = lease_places.c.uuid, lease_places.c.slot
    taken = sa.select(uuid, slot).where(lease_places.c.open).group_by(uuid, slot)
    for place in connection.execute(taken.having(sa.func.count() > 1).limit(1)):
        yield f"Slot {place[1]} of device {place[0]} is leased twice."
    user, name = leases.c.user, leases.c.server_name
    running = sa.select(user, name).where(OPEN_LEASE).group_by(user, name)
    for server in connection.execute(running.having(sa.func.count() > 1).limit(1)):
        yield f"The server {server[0]}/{server[1]} has two open leases."


def _sharing(connection: sa.Connection) -> Iterator[str]:
    """A device is leased whole or in shares, never both, and no member has two shares of one."""
    # What Slurm shares is leased as Slurm says.
    here = OPEN_PLACE & COUNTED_PLACE & (leases.c.engine != "slurm")
    joined = lease_places.join(leases, leases.c.id == lease_places.c.lease_id)
    uuid, sharer, slots = lease_places.c.uuid, lease_places.c.sharer, lease_places.c.slots
    used = sa.select(uuid).select_from(joined).where(here).group_by(uuid).limit(1)
    is_several = sa.func.count(lease_places.c.lease_id.distinct()) > 1
    is_mixed = (sa.func.count(sharer) < sa.func.count()) | (sa.func.min(slots) < sa.func.max(slots))
    for (name,) in connection.execute(used.having(is_several & is_mixed)):
        yield f"Device {name} is leased whole, and other leases are on it."
    twice = used.add_columns(sharer).where(sharer.isnot(None)).group_by(sharer)
    for name, member in connection.execute(twice.having(sa.func.count() > 1)):
        yield f"The member {member} has two shares of device {name}."
    held = sa.func.sum(lease_places.c.held_slots)
    each = sa.select(uuid, lease_places.c.lease_id).where(OPEN_PLACE)
    each = each.group_by(uuid, lease_places.c.lease_id).limit(1)
    for name, lease_id in connection.execute(each.having(held != sa.func.count())):
        yield f"Lease {lease_id} has another number of slots of device {name} than it says."


def _times(connection: sa.Connection) -> Iterator[str]:
    """Every running lease has started, and no lease ended before it started."""
    wrong = (leases.c.ended_at < leases.c.started_at) | (
        (leases.c.state == LeaseState.RUNNING.value) & leases.c.started_at.is_(None)
    )
    for (name,) in connection.execute(sa.select(leases.c.id).where(wrong).limit(1)):
        yield f"Lease {name} runs or has ended, but its times contradict that."


def _schema(connection: sa.Connection) -> Iterator[str]:
    """The database has every table and column that this gpuspawner knows."""
    there = sa.inspect(connection)
    names = set(there.get_table_names())
    for table in metadata.sorted_tables:
        if table.name not in names:
            yield f"There is no table {table.name} (version {revision(connection)})."
            continue
        found = {column["name"] for column in there.get_columns(table.name)}
        for column in set(table.columns.keys()) - found:
            yield f"The table {table.name} has no column {column}."


CHECKS: dict[str, Check] = {
    "schema": _schema,
    "file": _file,
    "references": _references,
    "one lease per slot": _one_lease,
    "places": _places,
    "sharing": _sharing,
    "order of times": _times,
    "keys": _keys,
    "whole transfers": _whole,
    "marks of postings": _apart,
    "zero sum": _zero_sum,
    "balances": _balances,
    "holds": _holds,
    "charges of leases": _charges,
    "settlement of leases": _settled,
    "credits that ended": _lots,
    "refills": _refills,
    "chain of transfers": hash_chain.check_transfers,
    "chain of the audit log": hash_chain.check_seals,
    "batch jobs": slurm_repository.check,
    "totals of use": totals.check_use,
    "totals of credits": totals.check_credits,
}
"""The checks by name, fast ones first."""

FIRST = ("schema", "file")
"""If one of these fails, nothing else can be checked."""


# Rows as the pure rules take them.


def _keyed(kind: TransferKind) -> sa.Select[Any]:
    """Select key, account and amount of what transfers of a kind moved on people's accounts."""
    return (
        sa.select(transfers.c.key, postings.c.account, postings.c.amount)
        .join(postings, postings.c.transfer_id == transfers.c.id)
        .where(transfers.c.kind == kind.value, ~postings.c.account.startswith("system:"))
    )


def _stream(connection: sa.Connection, query: sa.Select[Any]) -> Iterator[Any]:
    """Yield the rows of a query without loading all of them at once."""
    yield from connection.execute(query, execution_options={"yield_per": 20 * AT_ONCE})


_row = partial(PostingRow, key="", kind=TransferKind.CHARGE, lease_id=None, account="", amount=0)


def _accounts(connection: sa.Connection) -> tuple[Account, ...]:
    names = connection.execute(sa.select(accounts.c.name).order_by(accounts.c.name)).scalars()
    return tuple(ledger_repository.get_account(connection, name) for name in names.all())


def _books_of_leases(connection: sa.Connection, *, with_postings: bool) -> Iterator[Books]:
    """Yield all leases in the order of their ids, some at a time, with what they moved."""
    last = ""
    while True:
        some = sa.select(leases.c.id).where(leases.c.id > last).order_by(leases.c.id)
        ids = connection.execute(some.limit(AT_ONCE)).scalars().all()
        if not ids:
            return
        between = leases.c.id.between(ids[0], ids[-1])
        found = tuple(leases_repository.where(connection, between))
        moved = _moved_by(connection, ids[0], ids[-1]) if with_postings else ()
        yield Books(leases=found, postings=moved)
        last = ids[-1]


def _moved_by(connection: sa.Connection, first: str, last: str) -> tuple[PostingRow, ...]:
    """Return what charges and refunds of these leases moved, a row per lease, account and kind."""
    columns = (transfers.c.lease_id, postings.c.account, transfers.c.kind)
    query = (
        sa.select(*columns, sa.func.sum(postings.c.amount))
        .join(postings, postings.c.transfer_id == transfers.c.id)
        .where(transfers.c.lease_id.between(first, last))
        .group_by(*columns)
    )
    return tuple(
        _row(
            transfer_id=f"all of {lease_id}",
            account=account,
            amount=int(total),
            kind=TransferKind(kind),
            lease_id=lease_id,
        )
        for lease_id, account, kind, total in connection.execute(query)
    )
