"""Rows of accounts, transfers and postings. Append-only; a balance moves with its postings."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, IntegrityError

from ..errors import LedgerError, UnknownAccount
from ..ledger.entries import Posting, Transfer, TransferKind, is_system
from ..model import Account
from . import leases as lease_rows
from .prepared import Prepared, write_plain
from .schema import accounts, leases, postings, transfers
from .times import as_text

_HELD = lease_rows.HELD.where(leases.c.account == accounts.c.name).scalar_subquery()
_ACCOUNT = Prepared(
    sa.select(accounts.c.balance, _HELD).where(accounts.c.name == sa.bindparam("account"))
)
_INSERT_ACCOUNT = Prepared(sa.insert(accounts), ("name", "balance", "opened_at"))
_COLUMNS = ("id", "key", "kind", "at", "actor", "reason", "lease_id")
# A key that is there already is found by its own index, and not by a question before.
_INSERT_TRANSFER = {
    "sqlite": Prepared(sqlite.insert(transfers).on_conflict_do_nothing(), _COLUMNS),
    "postgresql": Prepared(postgresql.insert(transfers).on_conflict_do_nothing(), _COLUMNS),
}
_INSERT_POSTING = Prepared(sa.insert(postings), ("transfer_id", "account", "amount", "apart"))
_MOVE = Prepared(
    sa.update(accounts)
    .where(accounts.c.name == sa.bindparam("account"))
    .values(balance=accounts.c.balance + sa.bindparam("amount", type_=accounts.c.balance.type))
)
# All that a plain transfer writes, where each statement is a way to a server and back.
_POST_TWO = Prepared(
    sa.text(
        """
        WITH posted AS (
            INSERT INTO transfers (id, key, kind, at, actor, reason, lease_id)
            SELECT :id, :key, :kind, CAST(:at AS TIMESTAMPTZ), :actor, :reason, :lease_id
            WHERE (SELECT count(*) FROM accounts WHERE name IN (:one, :two)) = 2
            ON CONFLICT DO NOTHING RETURNING id
        ), written AS (
            INSERT INTO postings (transfer_id, account, amount, apart)
            SELECT id, unnest(ARRAY[:one, :two]), unnest(ARRAY[:a, :b]::BIGINT[]), :apart
            FROM posted
        )
        UPDATE accounts SET balance = balance
            + CASE name WHEN :one THEN CAST(:a AS BIGINT) ELSE CAST(:b AS BIGINT) END
        WHERE name IN (:one, :two) AND EXISTS (SELECT FROM posted)
        """
    ).bindparams(sa.bindparam("at", type_=transfers.c.at.type))
)
# The same on SQLite, where a statement takes less time than what is usually put around it.
_POST_ROW = (
    "INSERT INTO transfers (id, key, kind, at, actor, reason, lease_id)"
    " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
)
_POST_MOVE = "UPDATE accounts SET balance = balance + ? WHERE name = ?"
_POST_LINES = (
    "INSERT INTO postings (transfer_id, account, amount, apart) VALUES (?, ?, ?, ?), (?, ?, ?, ?)"
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
    if _is_plain(transfer):
        sqlite_ = connection.dialect.name == "sqlite"
        if (_post_in_calls if sqlite_ else _post_at_once)(connection, transfer):
            return True
    if not _insert(connection, transfer):
        known = _postings_of_key(connection, transfer.key)
        if sorted(known) != sorted((p.account, p.amount) for p in transfer.postings):
            what = f"the key {transfer.key!r} was used for another amount or account"
            raise LedgerError(what=what)
        return False
    for posting in transfer.postings:
        move(connection, posting, transfer.at)
    rows = [
        {"transfer_id": transfer.id, "account": p.account, "amount": p.amount}
        | {"apart": transfer.apart}
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


def _is_plain(transfer: Transfer) -> bool:
    """Whether it goes from one account to another one."""
    lines = transfer.postings
    return len(lines) == 2 and lines[0].account != lines[1].account


def _both(transfer: Transfer) -> dict[str, str | int]:
    one, two = transfer.postings
    return {
        "one": one.account,
        "two": two.account,
        "a": one.amount,
        "b": two.amount,
        "apart": transfer.apart,
    }


def _too_much(transfer: Transfer) -> LedgerError:
    one, two = transfer.postings
    name = two.account if is_system(one.account) else one.account
    return LedgerError(what=_TOO_MUCH.format(name=name))


def _post_at_once(connection: sa.Connection, transfer: Transfer) -> bool:
    """Write all of it, unless its key or one of the accounts says no."""
    try:
        return bool(_POST_TWO.run(connection, **_row(transfer), **_both(transfer)))
    except (IntegrityError, DataError) as error:
        if isinstance(error, IntegrityError) and "accounts_balance" not in str(error):
            raise  # a lease that is not there, say
        raise _too_much(transfer) from None


def _post_in_calls(connection: sa.Connection, transfer: Transfer) -> bool:
    """Write all of it, unless its key says no."""
    one, two = transfer.postings
    name, apart = transfer.id, int(transfer.apart)
    row = (
        name,
        transfer.key,
        transfer.kind.value,
        as_text(transfer.at),
        transfer.actor,
        transfer.reason,
        transfer.lease_id,
    )
    if not write_plain(connection, _POST_ROW, row):
        return False
    try:
        for posting in (one, two):
            change = (posting.amount, posting.account)
            if not write_plain(connection, _POST_MOVE, change):
                move(connection, posting, transfer.at)  # opens it, or says that it is not there
    except IntegrityError:
        raise _too_much(transfer) from None
    lines = (name, one.account, one.amount, apart, name, two.account, two.amount, apart)
    write_plain(connection, _POST_LINES, lines)
    return True


def _insert(connection: sa.Connection, transfer: Transfer) -> bool:
    """Write its own row; False when its key is there already."""
    statement = _INSERT_TRANSFER[connection.dialect.name]
    return bool(statement.run(connection, **_row(transfer)))


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
