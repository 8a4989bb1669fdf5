"""Rows of accounts, transfers, postings, payers and rates, and the charges of a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, IntegrityError

from ..core.errors import LedgerError, UnknownAccount
from ..db import hash_chain
from ..db.schema import (
    COUNTED_PLACE,
    OPEN_LEASE,
    OPEN_PLACE,
    accounts,
    lease_places,
    leases,
    payers,
    postings,
    rates,
    transfers,
)
from ..leases import repository as leases_repository
from ..leases.models import Lease, LeaseState, ServerRef
from . import rules
from .credit_policy import OVERDRAFT
from .models import MAX_AMOUNT, Account, Posting, Transfer, TransferKind, is_system
from .pricing import Rate, WeekHours

_HOLD_OF_ACCOUNT = leases_repository.HELD.where(
    leases.c.account == accounts.c.name
).scalar_subquery()
_ACCOUNT = sa.select(accounts.c.balance, _HOLD_OF_ACCOUNT).where(
    accounts.c.name == sa.bindparam("account")
)
_OPEN = sa.insert(accounts)
# An existing key is found by its own index, without a query beforehand.
_NEW = {
    "sqlite": sqlite.insert(transfers).on_conflict_do_nothing(),
    "postgresql": postgresql.insert(transfers).on_conflict_do_nothing(),
}
_INSERT_MANY = _NEW["postgresql"].returning(transfers.c.id)
# The newest link of the chain comes with the answer, which saves a single transfer a query. For
# many transfers it would be looked up for each.
_INSERT_ONE = {
    name: insert.returning(transfers.c.id, hash_chain.NEWEST_LINK) for name, insert in _NEW.items()
}
_INSERT_POSTINGS = sa.insert(postings)
_WITHOUT_POSTINGS = sa.select(transfers.c.id).where(
    transfers.c.id.in_(sa.bindparam("ids", expanding=True)),
    ~sa.exists().where(postings.c.transfer_id == transfers.c.id),
)
AT_ONCE = 500
"""SQLite limits the number of parameters."""
_MOVE = (
    sa.update(accounts)
    .where(accounts.c.name == sa.bindparam("account"))
    .values(balance=accounts.c.balance + sa.bindparam("amount", type_=accounts.c.balance.type))
)
_AMOUNT_TOO_LARGE = "{name} would have more than an account can hold; use a smaller amount"


def open_account(connection: sa.Connection, name: str, at: datetime) -> bool:
    """Open an account unless it exists. Returns True if it is new."""
    if find_account(connection, name):
        return False
    connection.execute(_OPEN, {"name": name, "balance": 0, "opened_at": at})
    return True


def find_account(connection: sa.Connection, name: str) -> Account | None:
    """Return the balance and holds of an account, if it exists."""
    row = connection.execute(_ACCOUNT, {"account": name}).one_or_none()
    return Account(name=name, balance=row[0], held=int(row[1])) if row else None


def get_account(connection: sa.Connection, name: str) -> Account:
    """Return the balance and holds of an account. Raises UnknownAccount."""
    if found := find_account(connection, name):
        return found
    raise UnknownAccount(account=name)


def all_accounts(connection: sa.Connection) -> list[Account]:
    """Return every account but the ledger's own, by name."""
    held: dict[str, int] = {}
    for lease in leases_repository.open_leases(connection):
        held[lease.account] = held.get(lease.account, 0) + lease.held
    rows = connection.execute(sa.select(accounts).order_by(accounts.c.name)).mappings()
    return [
        Account(name=row["name"], balance=row["balance"], held=held.get(row["name"], 0))
        for row in rows
        if not row["name"].startswith("system:")
    ]


def post(connection: sa.Connection, transfer: Transfer) -> bool:
    """Insert a transfer and move the balances. Returns False if its key was posted before.

    The same key with other postings raises LedgerError: it names another event.
    """
    (is_new,) = post_many(connection, [transfer])
    return is_new


def post_many(
    connection: sa.Connection, some: Sequence[Transfer], too_much: str = _AMOUNT_TOO_LARGE
) -> list[bool]:
    """Post transfers in their order with few statements. Returns which are new.

    Raises what :func:`post` does; ``too_much`` is the message if an account would overflow.
    """
    if not some:
        return []
    rows = [_row(transfer) for transfer in some]
    # Before the first wait for the database, after which the processor's caches are cold.
    facts = hash_chain.transfer_facts(some)
    dialect = connection.dialect.name
    if len(rows) == 1:
        # For a list SQLAlchemy compiles another statement each time, which takes longer than this
        # one.
        inserted = connection.execute(_INSERT_ONE[dialect], rows[0]).all()
        written, before = {row[0] for row in inserted}, inserted[0][1] if inserted else None
    else:
        written = _insert_many(connection, rows)
        before = hash_chain.newest_link(connection)
    are_new = []
    for transfer in some:
        are_new.append(transfer.id in written)
        written.discard(transfer.id)  # a repetition is not new
    new = list(compress(some, are_new))
    if new:
        _move(connection, new, too_much)
        link = hash_chain.link_transfers(before, compress(facts, are_new))
        connection.execute(_INSERT_POSTINGS, _lines(new, link))
    for transfer, is_new in zip(some, are_new, strict=True):
        if not is_new:
            _check_known(connection, transfer)
    return are_new


def of_key(connection: sa.Connection, key: str) -> Transfer | None:
    """Return the transfer with this idempotency key, if it was posted."""
    return next(iter(_transfers(connection, transfers.c.key == key)), None)


def transfers_like(connection: sa.Connection, beginning: str) -> list[Transfer]:
    """Return up to two transfers whose ids start with this text; none for an empty text."""
    if not beginning:
        return []
    return _transfers(connection, transfers.c.id.startswith(beginning, autoescape=True))


def reversed_of_lease(connection: sa.Connection, lease_id: str, account: str) -> int:
    """Return the microcredits that reversals of a lease's transfers moved into an account."""
    query = (
        sa.select(sa.func.coalesce(sa.func.sum(postings.c.amount), 0))
        .join(transfers, transfers.c.id == postings.c.transfer_id)
        .where(
            transfers.c.lease_id == lease_id,
            transfers.c.kind == TransferKind.REVERSAL.value,
            postings.c.account == account,
        )
    )
    return int(connection.execute(query).scalar_one())


def _transfers(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[Transfer]:
    query = sa.select(transfers).where(condition).order_by(transfers.c.id).limit(2)
    found = []
    for row in connection.execute(query).mappings().all():
        lines = sa.select(postings.c.account, postings.c.amount).order_by(postings.c.id)
        mine = connection.execute(lines.where(postings.c.transfer_id == row["id"])).all()
        values = {name: row[name] for name in row if name != "kind"}
        moved = tuple(Posting(account, amount) for account, amount in mine)
        found.append(Transfer(**values, kind=TransferKind(row["kind"]), postings=moved))
    return found


def _insert_many(connection: sa.Connection, rows: Sequence[dict[str, Any]]) -> set[str]:
    """Insert transfers with new keys, and return the ids of those that were inserted."""
    if connection.dialect.name != "sqlite":
        return set(connection.execute(_INSERT_MANY, rows).scalars())
    # A batch of rows without a result is one call of SQLite's driver.
    ids = [row["id"] for row in rows]
    if connection.execute(_NEW["sqlite"], rows).rowcount == len(rows):
        return set(ids)
    written = set[str]()  # existing ones have postings
    for start in range(0, len(ids), AT_ONCE):
        part = {"ids": ids[start : start + AT_ONCE]}
        written.update(connection.execute(_WITHOUT_POSTINGS, part).scalars())
    return written


def _row(transfer: Transfer) -> dict[str, Any]:
    return {
        "id": transfer.id,
        "key": transfer.key,
        "kind": transfer.kind.value,
        "at": transfer.at,
        "actor": transfer.actor,
        "reason": transfer.reason,
        "lease_id": transfer.lease_id,
    }


def _lines(new: Iterable[Transfer], link: str) -> list[dict[str, Any]]:
    """Return the rows of these transfers' postings; the last one carries the link."""
    rows: list[dict[str, Any]] = []
    for transfer in new:
        name, apart = transfer.id, transfer.apart
        for posting in transfer.postings:
            row = {"transfer_id": name, "account": posting.account, "amount": posting.amount}
            row["apart"], row["link"] = apart, None
            rows.append(row)
    rows[-1]["link"] = link
    return rows


def _move(connection: sa.Connection, new: Sequence[Transfer], too_much: str) -> None:
    """Add postings to the balances; the ledger's own accounts open automatically."""
    sums: dict[str, int] = {}
    for transfer in new:
        for posting in transfer.postings:
            sums[posting.account] = sums.get(posting.account, 0) + posting.amount
    if any(abs(amount) > MAX_AMOUNT for amount in sums.values()):
        raise _overflow(sums, too_much)
    if _add(connection, sums, too_much) == len(sums):
        return
    for name in [name for name in sums if not find_account(connection, name)]:
        if not is_system(name):
            raise UnknownAccount(account=name)
        connection.execute(_OPEN, {"name": name, "balance": 0, "opened_at": new[0].at})
        _add(connection, {name: sums[name]}, too_much)


def _add(connection: sa.Connection, sums: dict[str, int], too_much: str) -> int:
    """Add these sums to balances, and return how many of the accounts exist."""
    moves = [{"account": name, "amount": amount} for name, amount in sums.items()]
    try:
        return connection.execute(_MOVE, moves).rowcount
    except (IntegrityError, DataError):
        raise _overflow(sums, too_much) from None


def _overflow(sums: Iterable[str], too_much: str) -> LedgerError:
    """Return the error for an overflow, naming a member's or group's account if possible."""
    return LedgerError(what=too_much.format(name=min(sums, key=is_system)))


def _check_known(connection: sa.Connection, transfer: Transfer) -> None:
    """Raise LedgerError unless the transfer's key was posted with the same postings."""
    known = of_key(connection, transfer.key)
    if known is None or Counter(known.postings) != Counter(transfer.postings):
        what = f"the key {transfer.key!r} was used for another amount or account"
        raise LedgerError(what=what)


_SELECTED = (
    leases.c.id,
    leases.c.user,
    leases.c.server_name,
    leases.c.account,
    leases.c.rate,
    leases.c.charged,
    leases.c.started_at,
)
_bounded = leases.c.when_dry == OVERDRAFT
"""True for leases whose charges are limited one by one."""
_costs = sa.and_(OPEN_LEASE, leases.c.state == LeaseState.RUNNING.value, leases.c.rate > 0)
_RUNNING = sa.select(*_SELECTED).where(_costs, ~_bounded)
_MODELS = sa.select(lease_places.c.lease_id, lease_places.c.model).where(OPEN_PLACE, COUNTED_PLACE)
_CHARGED = sa.update(leases).where(leases.c.id == sa.bindparam("lease"))
_CHARGE_TOO_LARGE = "an account would have more than an account can hold; refund what was charged"

# A portion: leases in a new period that they were not charged in yet. Periods count from each
# lease's own start, so that charges of many leases are spread out. This only selects leases, with
# millisecond precision; what is owed is always calculated exactly.
_until = sa.bindparam("until", type_=leases.c.started_at.type)
_period = sa.bindparam("period", type_=sa.BigInteger)
_RAN: dict[str, sa.ColumnElement[Any]] = {
    "sqlite": (sa.func.julianday(_until) - sa.func.julianday(leases.c.started_at))
    * sa.literal_column("86400000")
    + sa.literal_column("0.5"),  # a cast truncates there
    "postgresql": sa.extract("epoch", _until - leases.c.started_at) * sa.literal_column("1000"),
}
"""Milliseconds since the start."""
_PAID: sa.ColumnElement[Any] = (
    (leases.c.charged + sa.literal_column("1.0"))
    * sa.literal_column("3600000.0")
    / sa.func.nullif(leases.c.rate, sa.literal_column("0"))
)
"""Milliseconds from the start up to which nothing more is owed than was charged."""
_PORTION = {}
_ACCOUNTS = {}
for _name, _ran in _RAN.items():
    _begun = sa.cast(_ran, sa.BigInteger) // _period > sa.cast(_PAID, sa.BigInteger) // _period
    _some = sa.select(leases.c.id).where(_costs, ~_bounded, _begun)
    _PORTION[_name] = (
        sa.select(*_SELECTED, lease_places.c.model)
        .select_from(
            leases.outerjoin(lease_places, (lease_places.c.lease_id == leases.c.id) & COUNTED_PLACE)
        )
        .where(leases.c.id.in_(_some.limit(sa.bindparam("most", type_=sa.Integer))))
    )
    _ACCOUNTS[_name] = sa.select(leases.c.account).where(_costs, _bounded, _begun).distinct()


class DueCharge(NamedTuple):
    """What one lease is to be charged."""

    lease_id: str
    account: str
    charged: int
    """Microcredits so far."""
    amount: int
    reason: str


def charges_due(connection: sa.Connection, until: datetime) -> list[DueCharge]:
    """Return what every running lease without an overdraft owes and was not charged yet."""
    models: dict[str, list[str]] = {}
    for lease_id, model in connection.execute(_MODELS):
        models.setdefault(lease_id, []).append(model)
    rows = connection.execute(_RUNNING).all()
    return _owing(((row, models.get(row[0], ())) for row in rows), until)


def portion_of_charges(
    connection: sa.Connection, until: datetime, every: timedelta, most: int
) -> tuple[list[DueCharge], list[Lease]]:
    """Return the charges due of at most ``most`` leases not charged in their current period.

    Also returns all leases with an overdraft of the accounts where one of those was not charged.
    """
    period = max(1, every // timedelta(milliseconds=1))
    asked = {"until": until, "period": period}
    name = connection.dialect.name
    found: dict[str, tuple[Sequence[Any], list[str]]] = {}
    for row in connection.execute(_PORTION[name], {**asked, "most": most}):
        _, models = found.setdefault(row[0], (row[:-1], []))
        if row[-1] is not None:
            models.append(row[-1])
    paying = connection.execute(_ACCOUNTS[name], asked).scalars().all()
    whole = bounded(connection, paying) if paying else []
    return _owing(found.values(), until), whole


def bounded(connection: sa.Connection, accounts: Sequence[str] | None = None) -> list[Lease]:
    """Return these accounts' open leases with an overdraft, oldest first; None: all accounts'."""
    some = OPEN_LEASE & _bounded
    if accounts is not None:
        some &= leases.c.account.in_(accounts)
    return leases_repository.where(connection, some)


def _owing(some: Iterable[tuple[Sequence[Any], Sequence[str]]], until: datetime) -> list[DueCharge]:
    """Return what leases owe, from rows with the models of their devices."""
    found = []
    for (lease_id, user, name, account, rate, charged, started), models in some:
        amount = rules.owed(rate, started, until) - charged
        if amount > 0:
            reason = rules.charge_reason(models, ServerRef(user, name))
            found.append(DueCharge(lease_id, account, charged, amount, reason))
    return found


def charge_leases(connection: sa.Connection, found: Sequence[DueCharge], until: datetime) -> None:
    """Post these charges, a transfer with two postings each, and update the sums.

    One that was posted before is skipped. Raises LedgerError if that had another amount, or if an
    account would overflow; the caller must then roll the transaction back.
    """
    if not found:
        return
    made = [
        rules.charge_transfer(one.lease_id, one.account, one.charged, one.amount, until, one.reason)
        for one in found
    ]
    post_many(connection, made, _CHARGE_TOO_LARGE)
    sums = [{"lease": one.lease_id, "charged": one.charged + one.amount} for one in found]
    connection.execute(_CHARGED, sums)


def get_payer(connection: sa.Connection, user: str) -> str:
    """Return the member's usual paying account; empty if they chose none."""
    query = sa.select(payers.c.account).where(payers.c.user == user)
    return connection.execute(query).scalar_one_or_none() or ""


def all_payers(connection: sa.Connection) -> dict[str, str]:
    """Return the usual paying accounts of all members who chose one."""
    return dict(connection.execute(sa.select(payers.c.user, payers.c.account)).tuples().all())


def put_payer(connection: sa.Connection, user: str, account: str, at: datetime) -> None:
    """Set the usual paying account; an empty one removes it."""
    connection.execute(sa.delete(payers).where(payers.c.user == user))
    if account:
        connection.execute(sa.insert(payers).values(user=user, account=account, at=at))


_SAME = ("amount", "model", "environment", "slots", "since", "set_at", "actor", "reason")
"""What a rate and its row have in common."""
HOLDS = rates.c.removed_at.is_(None)
"""Selects the rates that were not removed."""
_RATES_IN_FORCE = sa.select(rates).where(HOLDS).order_by(rates.c.id)


def load_rates(connection: sa.Connection) -> list[Rate]:
    """Return the rates that apply now or later, in the order in which they were set."""
    return [_rate(row) for row in connection.execute(_RATES_IN_FORCE)]


def insert_rate(connection: sa.Connection, rate: Rate, zone: str) -> Rate:
    """Insert a rate and return it with its id. ``zone`` is the admin's."""
    row = {name: getattr(rate, name) for name in _SAME}
    row |= {"hours": rate.hours.text if rate.hours else "", "zone": zone}
    connection.execute(sa.insert(rates).values(row))
    return load_rates(connection)[-1]


def remove_rate(connection: sa.Connection, rate_id: int, at: datetime) -> None:
    """Mark a rate as removed."""
    changed = sa.update(rates).where(rates.c.id == rate_id).values(removed_at=at)
    connection.execute(changed)


def _rate(row: Any) -> Rate:
    hours = _hours(row.hours, row.zone) if row.hours else None
    return Rate(id=row.id, hours=hours, **{name: getattr(row, name) for name in _SAME})


_hours = lru_cache(maxsize=256)(WeekHours.parse)
