"""Rows of accounts, transfers and postings. Append-only; a balance moves with its postings."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.exc import DataError, IntegrityError

from ..errors import LedgerError, UnknownAccount
from ..ledger.entries import Posting, Transfer, TransferKind, is_system
from ..model import Account
from . import leases as lease_rows
from .prepared import Prepared
from .schema import accounts, leases, postings, transfers

_HELD = lease_rows.HELD.where(leases.c.account == accounts.c.name).scalar_subquery()
_ACCOUNT = Prepared(
    sa.select(accounts.c.balance, _HELD).where(accounts.c.name == sa.bindparam("account"))
)
_INSERT_ACCOUNT = Prepared(sa.insert(accounts), ("name", "balance", "opened_at"))
_INSERT_TRANSFER = Prepared(
    sa.insert(transfers), ("id", "key", "kind", "at", "actor", "reason", "lease_id")
)
_INSERT_POSTING = Prepared(sa.insert(postings), ("transfer_id", "account", "amount"))
_MOVE = Prepared(
    sa.update(accounts)
    .where(accounts.c.name == sa.bindparam("account"))
    .values(balance=accounts.c.balance + sa.bindparam("amount", type_=accounts.c.balance.type))
)
_amount = accounts.c.balance.type
_MOVE_TWO = Prepared(
    sa.update(accounts)
    .where(accounts.c.name.in_([sa.bindparam("one"), sa.bindparam("two")]))
    .values(
        balance=accounts.c.balance
        + sa.case(
            (accounts.c.name == sa.bindparam("one"), sa.bindparam("a", type_=_amount)),
            else_=sa.bindparam("b", type_=_amount),
        )
    )
)
_INSERT_TWO = Prepared(
    sa.insert(postings).from_select(
        ("transfer_id", "account", "amount"),
        sa.union_all(
            *(
                sa.select(
                    sa.bindparam("transfer", type_=sa.Text),
                    sa.bindparam(account, type_=sa.Text),
                    sa.bindparam(amount, type_=_amount),
                )
                for account, amount in (("one", "a"), ("two", "b"))
            )
        ),
    )
)
_TOO_MUCH = "{name} would have more than an account can hold; use a smaller amount"
_OF_KEY = Prepared(
    sa.select(postings.c.account, postings.c.amount)
    .join(transfers, transfers.c.id == postings.c.transfer_id)
    .where(transfers.c.key == sa.bindparam("key"))
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an account's statement."""

    at: datetime
    kind: str
    reason: str
    actor: str
    amount: int
    """Microcredits into (minus: out of) the account."""
    balance: int
    """The balance after it."""
    lease_id: str | None
    transfer_id: str = ""


def open_account(connection: sa.Connection, name: str, at: datetime) -> bool:
    """Open the account unless it is there. True when it is new."""
    if find(connection, name):
        return False
    _INSERT_ACCOUNT.run(connection, name=name, balance=0, opened_at=at)
    return True


def find(connection: sa.Connection, name: str) -> Account | None:
    """Balance and holds of one account, if there is one of that name."""
    rows = _ACCOUNT.rows(connection, account=name)
    return Account(name=name, balance=rows[0][0], held=int(rows[0][1])) if rows else None


def account(connection: sa.Connection, name: str) -> Account:
    """Balance and holds of one account. Raises UnknownAccount."""
    if found := find(connection, name):
        return found
    raise UnknownAccount(account=name)


def all_accounts(connection: sa.Connection) -> list[Account]:
    """Every account but the ledger's own, by name."""
    held: dict[str, int] = {}
    for lease in lease_rows.open_leases(connection):
        held[lease.account] = held.get(lease.account, 0) + lease.held
    rows = connection.execute(sa.select(accounts).order_by(accounts.c.name)).mappings()
    return [
        Account(name=row["name"], balance=row["balance"], held=held.get(row["name"], 0))
        for row in rows
        if not row["name"].startswith("system:")
    ]


def post(connection: sa.Connection, transfer: Transfer) -> bool:
    """Write a transfer and move the balances. False when its key was posted before.

    The same key with other postings raises LedgerError: it names another event.
    """
    if known := _postings_of_key(connection, transfer.key):
        if sorted(known) != sorted((p.account, p.amount) for p in transfer.postings):
            what = f"the key {transfer.key!r} was used for another amount or account"
            raise LedgerError(what=what)
        return False
    if len(transfer.postings) == 2:  # nearly all: each statement less is a way to a server less
        _post_two(connection, transfer)
        return True
    for posting in transfer.postings:
        move(connection, posting, transfer.at)
    _insert(connection, transfer)
    rows = [
        {"transfer_id": transfer.id, "account": p.account, "amount": p.amount}
        for p in transfer.postings
    ]
    _INSERT_POSTING.run_each(connection, rows)
    return True


def statement(connection: sa.Connection, name: str, limit: int = 100) -> list[Line]:
    """The newest lines of an account, newest first. Raises UnknownAccount."""
    balance = account(connection, name).balance
    query = (
        sa.select(transfers, postings.c.amount)
        .join(postings, postings.c.transfer_id == transfers.c.id)
        .where(postings.c.account == name)
        .order_by(postings.c.id.desc())
        .limit(limit)
    )
    lines = []
    for row in connection.execute(query).mappings():
        lines.append(
            Line(
                at=row["at"],
                kind=row["kind"],
                reason=row["reason"],
                actor=row["actor"],
                amount=row["amount"],
                balance=balance,
                lease_id=row["lease_id"],
                transfer_id=row["id"],
            )
        )
        balance -= row["amount"]
    return lines


def of_key(connection: sa.Connection, key: str) -> Transfer | None:
    """The transfer with this idempotency key, if it was posted."""
    return next(iter(_transfers(connection, transfers.c.key == key)), None)


def transfers_like(connection: sa.Connection, beginning: str, most: int = 2) -> list[Transfer]:
    """The transfers whose ids begin so; nothing begins with nothing."""
    if not beginning:
        return []
    like = transfers.c.id.startswith(beginning, autoescape=True)
    return _transfers(connection, like, most)


def reversed_of_lease(connection: sa.Connection, lease_id: str, account: str) -> int:
    """Microcredits that reversals of a lease's transfers moved into (minus: out of) an account."""
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


def _transfers(
    connection: sa.Connection, condition: sa.ColumnElement[bool], most: int = 2
) -> list[Transfer]:
    rows = connection.execute(
        sa.select(transfers).where(condition).order_by(transfers.c.id).limit(most)
    ).mappings()
    found = []
    for row in rows.all():
        lines = sa.select(postings.c.account, postings.c.amount).order_by(postings.c.id)
        mine = connection.execute(lines.where(postings.c.transfer_id == row["id"])).all()
        values = {name: row[name] for name in row if name != "kind"}
        moved = tuple(Posting(account, amount) for account, amount in mine)
        found.append(Transfer(**values, kind=TransferKind(row["kind"]), postings=moved))
    return found


def all_transfers(connection: sa.Connection) -> list[Transfer]:
    """The whole ledger, oldest first: for checks and exports."""
    lines: dict[str, list[Posting]] = {}
    for row in connection.execute(sa.select(postings).order_by(postings.c.id)).mappings():
        posting = Posting(row["account"], row["amount"])
        lines.setdefault(row["transfer_id"], []).append(posting)
    rows = connection.execute(sa.select(transfers).order_by(transfers.c.at)).mappings()
    return [
        Transfer(
            **{name: row[name] for name in row if name != "kind"},
            kind=TransferKind(row["kind"]),
            postings=tuple(lines[row["id"]]),
        )
        for row in rows
    ]


def _post_two(connection: sa.Connection, transfer: Transfer) -> None:
    one, two = transfer.postings
    both = {"one": one.account, "two": two.account, "a": one.amount, "b": two.amount}
    try:
        moved = _MOVE_TWO.run(connection, **both) if one.account != two.account else 0
    except (IntegrityError, DataError):
        name = two.account if is_system(one.account) else one.account
        raise LedgerError(what=_TOO_MUCH.format(name=name)) from None
    if moved != 2:
        for posting in transfer.postings:
            if not moved or not find(connection, posting.account):
                move(connection, posting, transfer.at)
    _insert(connection, transfer)
    _INSERT_TWO.run(connection, transfer=transfer.id, **both)


def _insert(connection: sa.Connection, transfer: Transfer) -> None:
    _INSERT_TRANSFER.run(
        connection,
        id=transfer.id,
        key=transfer.key,
        kind=transfer.kind.value,
        at=transfer.at,
        actor=transfer.actor,
        reason=transfer.reason,
        lease_id=transfer.lease_id,
    )


def _postings_of_key(connection: sa.Connection, key: str) -> list[tuple[str, int]]:
    return [(name, amount) for name, amount in _OF_KEY.rows(connection, key=key)]


def move(connection: sa.Connection, posting: Posting, at: datetime) -> None:
    """Add a posting to its account's balance; the ledger's own accounts open by themselves."""
    name, amount = posting.account, posting.amount
    try:
        if _MOVE.run(connection, account=name, amount=amount):
            return
        if not name.startswith("system:"):
            raise UnknownAccount(account=name)
        _INSERT_ACCOUNT.run(connection, name=name, balance=amount, opened_at=at)
    except (IntegrityError, DataError):
        raise LedgerError(what=_TOO_MUCH.format(name=name)) from None
