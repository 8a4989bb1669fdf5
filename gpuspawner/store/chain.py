"""Two hash chains, so that a row that is changed, deleted or put in by hand is found.

Each transfer carries the SHA-256 of its facts and of the transfer before it: all its postings have
this link, and an account has the link of its newest posting. Lines of the audit trail and ended
leases are sealed in the table ``chain`` in the same way, in the transaction that writes them.

Writers come one at a time (see :meth:`Store.write`), so the newest row is the one before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from hashlib import sha256
from itertools import groupby, islice
from typing import Any

import sqlalchemy as sa

from ..ledger.entries import Transfer
from .schema import accounts, audit, chain, lease_places, leases, postings, transfers

CHANGE = "change"
"""The kind of a line of the audit trail."""

LEASE = "lease"
"""The kind of a lease that has ended."""

FIRST = "0" * 64
"""What the first link of a chain follows."""

ROWS = 10_000
"""Rows that are read at once."""
AT_ONCE = 500
"""Seals that are asked for at once."""

# As text: of a select SQLAlchemy makes a key for its cache each time, which takes longer than this.
HEAD: sa.ColumnElement[str | None] = sa.literal_column(
    "(SELECT link FROM postings ORDER BY id DESC LIMIT 1)", sa.Text
)
"""The link of the newest transfer; none in an empty ledger."""

_SEALED = sa.select(chain.c.link).order_by(chain.c.id.desc()).limit(1)
_SEAL = sa.insert(chain)
# Named one by one: the migration chains what older versions have, and a column that is added later
# must change no hash.
_CHANGES = sa.select(
    *(audit.c[name] for name in ("id", "at", "actor", "action", "subject", "detail"))
).order_by(audit.c.id)
_TRANSFERS = tuple(
    transfers.c[name] for name in ("id", "key", "kind", "at", "actor", "reason", "lease_id")
)
_PLACES = tuple(lease_places.c[n] for n in ("uuid", "slot", "index", "model", "memory_bytes"))
_LEASE_FIELDS = (
    "id",
    "user",
    "server_name",
    "account",
    "environment",
    "rate",
    "hold",
    "charged",
    "engine",
    "engine_ref",
    "granted_at",
    "started_at",
    "ended_at",
    "end_reason",
    "group",
    "seconds",
    "extended",
    "ticket_id",
    "outcome",
    "when_dry",
    "overdraft",
    "waived",
    "refunded",
)
"""What does not change any more once a lease has ended, unless it is refunded."""
_LEASES = (
    sa.select(*(leases.c[name] for name in _LEASE_FIELDS), *_PLACES)
    .select_from(leases.outerjoin(lease_places))
    .order_by(leases.c.id, lease_places.c.uuid, lease_places.c.slot)
)
_ENDED = _LEASES.where(leases.c.ended_at.isnot(None))
_ONE_LEASE = _LEASES.where(leases.c.id == sa.bindparam("lease"))


def link_transfers(before: str | None, some: Iterable[Transfer]) -> Iterator[str]:
    """Yield the link of each transfer; ``before`` is that of the newest one in the ledger."""
    link = before or FIRST
    for each in some:
        moved = [(posting.account, posting.amount) for posting in each.postings]
        link = _link(link, _transfer_facts(each, moved))
        yield link


def seal_change(connection: sa.Connection, line: int, row: Sequence[Any]) -> None:
    """Seal a line of the audit trail: time, actor, action, subject and detail."""
    _seal(connection, CHANGE, str(line), _facts(row))


def seal_lease(connection: sa.Connection, lease_id: str) -> None:
    """Seal a lease that has ended, as it is now in the store: anew after a refund."""
    for _, facts in _leases(connection.execute(_ONE_LEASE, {"lease": lease_id})):
        _seal(connection, LEASE, lease_id, facts)


def head(connection: sa.Connection) -> str:
    """Return one word for both chains as they are now, to be kept elsewhere.

    Such as ``4711.42.9f86d0…``: the newest posting, the newest seal, and the hash of both links.
    """
    newest = (sa.select(sa.func.max(table.c.id)) for table in (postings, chain))
    return head_at(connection, *(connection.execute(each).scalar() or 0 for each in newest))


def head_at(connection: sa.Connection, posting: int, seal: int) -> str:
    """Return the head that there was when these were the newest rows; empty if one is missing."""
    links = []
    for table, row in ((postings, posting), (chain, seal)):
        found = connection.execute(sa.select(table.c.link).where(table.c.id == row)).scalar()
        if found is None and row:
            return ""
        links.append(found or FIRST)
    return f"{posting}.{seal}.{_hash(''.join(links))}"


def knows(connection: sa.Connection, noted: str) -> bool:
    """Return True if this head, noted earlier, is one of the chains as they are now."""
    posting, _, rest = noted.partition(".")
    seal = rest.partition(".")[0]
    if not (posting.isdecimal() and seal.isdecimal() and max(len(posting), len(seal)) < 19):
        return False
    return head_at(connection, int(posting), int(seal)) == noted


def check_transfers(connection: sa.Connection) -> Iterator[str]:
    """Each transfer follows the one before it, and none was changed, deleted or put in since."""
    newest: dict[str, str] = {}
    before = FIRST
    for transfer, moved, links in _chained(connection):
        expected = _link(before, _facts((*transfer, moved)))
        if links != {expected}:
            yield _broken(f"Transfer {transfer[0]} of {transfer[3]:%Y-%m-%d %H:%M} UTC", links)
        before = expected
        newest |= dict.fromkeys((account for account, _ in moved), expected)
    rows = connection.execute(sa.select(accounts.c.name, accounts.c.link).order_by("name"))
    for name, link in rows:
        if link != newest.get(name):
            yield f"The newest transfer of {name} is missing: it was deleted by hand."


def check_seals(connection: sa.Connection) -> Iterator[str]:
    """Lines of the audit trail and ended leases are as they were written, and none is missing."""
    before = FIRST
    columns = (chain.c.kind, chain.c.ref, chain.c.facts, chain.c.link)
    for kind, ref, facts, link in _stream(connection, sa.select(*columns).order_by(chain.c.id)):
        before = _link(before, kind, ref, facts)
        if link != before:
            yield _broken(f"The seal of {_named(kind, ref)}", {link})
    changes = ((str(line), _facts(row)) for line, *row in _stream(connection, _CHANGES))
    yield from _compared(connection, CHANGE, changes)
    yield from _compared(connection, LEASE, _leases(_stream(connection, _ENDED)))
    lines = sa.exists().where(audit.c.id == sa.cast(chain.c.ref, audit.c.id.type))
    ended = sa.exists().where(leases.c.id == chain.c.ref, leases.c.ended_at.isnot(None))
    for kind, there in ((CHANGE, lines), (LEASE, ended)):
        missing = sa.select(chain.c.ref).where(chain.c.kind == kind, ~there)
        for (ref,) in connection.execute(missing.order_by(chain.c.id).limit(1)):
            yield f"{_named(kind, ref)} is missing: it was deleted by hand."


def chain_existing(connection: sa.Connection) -> None:
    """Chain what was written before there was a chain; for the migration that makes one."""
    with _not_append_only(connection):
        _chain_transfers(connection)
    for line, *row in _stream(connection, _CHANGES):
        seal_change(connection, line, row)
    for lease_id, facts in _leases(_stream(connection, _ENDED)):
        _seal(connection, LEASE, lease_id, facts)


# Steps of the above.


@contextmanager
def _not_append_only(connection: sa.Connection) -> Iterator[None]:
    """Let postings be changed meanwhile, by this transaction alone."""
    off = "ALTER TABLE postings DISABLE TRIGGER postings_append_only"
    on = "ALTER TABLE postings ENABLE TRIGGER postings_append_only"
    if connection.dialect.name == "sqlite":
        off = "DROP TRIGGER postings_never_update"
        made = "SELECT sql FROM sqlite_master WHERE name = 'postings_never_update'"
        on = connection.exec_driver_sql(made).scalar_one()
    connection.exec_driver_sql(off)
    yield
    connection.exec_driver_sql(on)


def _chain_transfers(connection: sa.Connection) -> None:
    change = sa.update(postings).where(postings.c.transfer_id == sa.bindparam("transfer"))
    before, newest, rows = FIRST, dict[str, str](), list[dict[str, Any]]()
    for transfer, moved, _ in _chained(connection):
        before = _link(before, _facts((*transfer, moved)))
        newest |= dict.fromkeys((account for account, _ in moved), before)
        rows.append({"transfer": transfer[0], "link": before})
        if len(rows) == ROWS:
            connection.execute(change, rows)
            rows = []
    if rows:
        connection.execute(change, rows)
    for name, link in newest.items():
        connection.execute(sa.update(accounts).where(accounts.c.name == name).values(link=link))


def _seal(connection: sa.Connection, kind: str, ref: str, facts: str) -> None:
    facts = _hash(facts)
    before = connection.execute(_SEALED).scalar() or FIRST
    link = _link(before, kind, ref, facts)
    connection.execute(_SEAL, {"kind": kind, "ref": ref, "facts": facts, "link": link})


def _link(before: str, *parts: str) -> str:
    # Only the last part can have a line break in it, and JSON has none.
    return _hash("\n".join((before, *parts)))


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _facts(values: Iterable[Any]) -> str:
    """The canonical form: JSON in ASCII, with times in UTC."""
    return json.dumps([*values], separators=(",", ":"), default=_plain)


def _plain(value: Any) -> str:
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat()
    raise TypeError(value)


def _transfer_facts(transfer: Transfer, moved: Sequence[tuple[str, int]]) -> str:
    return _facts(
        (
            transfer.id,
            transfer.key,
            transfer.kind.value,
            transfer.at,
            transfer.actor,
            transfer.reason,
            transfer.lease_id,
            moved,
        )
    )


def _leases(rows: Iterable[Sequence[Any]]) -> Iterator[tuple[str, str]]:
    """Yield the id and the facts of each lease; its places are in rows beside one another."""
    width = len(_LEASE_FIELDS)
    for lease_id, found in groupby(rows, key=lambda row: str(row[0])):
        some = list(found)
        places = sorted([*row[width:]] for row in some if row[width] is not None)
        yield lease_id, _facts((*some[0][:width], places))


def _chained(
    connection: sa.Connection,
) -> Iterator[tuple[Sequence[Any], list[tuple[str, int]], set[str | None]]]:
    """Yield each transfer in the order of the ledger: its row, what it moved, and its links."""
    query = (
        sa.select(*_TRANSFERS, postings.c.account, postings.c.amount, postings.c.link)
        .join_from(postings, transfers, transfers.c.id == postings.c.transfer_id)
        .order_by(postings.c.id)
    )
    width = len(_TRANSFERS)
    current: Sequence[Any] | None = None
    moved: list[tuple[str, int]] = []
    links: set[str | None] = set()
    for row in _stream(connection, query):
        if current is None or row[0] != current[0]:
            if current is not None:
                yield current, moved, links
            current, moved, links = row[:width], [], set()
        moved.append((row[width], row[width + 1]))
        links.add(row[width + 2])
    if current is not None:
        yield current, moved, links


def _compared(
    connection: sa.Connection, kind: str, some: Iterable[tuple[str, str]]
) -> Iterator[str]:
    """Hold the facts of each row against its newest seal."""
    rows = iter(some)
    while portion := dict(islice(rows, AT_ONCE)):
        these = (chain.c.kind == kind) & chain.c.ref.in_(portion)
        seals = sa.select(chain.c.ref, chain.c.facts).where(these).order_by(chain.c.id)
        known = {row[0]: row[1] for row in connection.execute(seals)}
        for ref, facts in portion.items():
            if ref not in known:
                yield f"{_named(kind, ref)} was put in by hand: it has no seal."
            elif known[ref] != _hash(facts):
                yield f"{_named(kind, ref)} was changed by hand after it was written."


def _named(kind: str, ref: str) -> str:
    return f"Line {ref} of the audit trail" if kind == CHANGE else f"The ended lease {ref}"


def _broken(what: str, links: set[str | None]) -> str:
    if None in links:
        return f"{what} was put in by hand: it has no link to the one before it."
    return (
        f"{what} does not follow the one before it: it was changed or put in by hand, or what "
        "was before it was deleted."
    )


def _stream(connection: sa.Connection, query: sa.Select[Any]) -> Iterator[Any]:
    yield from connection.execute(query, execution_options={"yield_per": ROWS})
