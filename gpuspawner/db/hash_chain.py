"""Two hash chains that reveal rows changed, deleted or inserted by hand.

Transfers that are posted together have one link in the last of their postings: the SHA-256 of all
their facts and of the previous link, with the account names of that time (see
:mod:`gpuspawner.db.renames`). Entries of the audit log, ended leases and renames are sealed
likewise in the table ``chain``. A seal also covers the newest transfer's link, so deleting
transfers from the end of the ledger breaks it. Writers come one at a time, so the newest row is the
previous one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from itertools import groupby, islice
from typing import Any, NamedTuple

import sqlalchemy as sa

from ..leases.models import LeasedDevice
from ..ledger.models import Transfer, member_account
from .schema import (
    COUNTED_PLACE,
    as_text,
    audit,
    chain,
    lease_places,
    leases,
    postings,
    renames,
    transfers,
)

_EMPTY = sha256()
_ALL = sa.select(renames).order_by(renames.c.id.desc())


@dataclass(frozen=True, slots=True)
class Rename:
    """A rename of a member."""

    id: int
    at: datetime
    actor: str
    old: str
    new: str
    posting: int
    """The newest posting at that time; 0 if there was none."""
    kept: frozenset[int]
    """Postings up to that one that the account of the new name had before."""


def insert_rename(
    connection: sa.Connection,
    *,
    at: datetime,
    actor: str,
    old: str,
    new: str,
    posting: int,
    kept: Collection[int],
) -> Rename:
    """Record a rename; the caller seals it."""
    row = {"at": at, "actor": actor, "old": old, "new": new, "posting": posting}
    row["kept"] = " ".join(map(str, sorted(kept)))
    made = connection.execute(sa.insert(renames).values(row).returning(renames.c.id))
    return Rename(made.scalar_one(), at, actor, old, new, posting, frozenset(kept))


def every(connection: sa.Connection) -> list[Rename]:
    """Return all renames, newest first."""
    return [_rename(row) for row in connection.execute(_ALL).mappings()]


def last_of(connection: sa.Connection, old: str) -> Rename | None:
    """Return the newest rename of a member with this old name, or None."""
    row = connection.execute(_ALL.where(renames.c.old == old).limit(1)).mappings().first()
    return _rename(row) if row else None


def account_then(done: Sequence[Rename], account: str, posting: int) -> str:
    """Return an account's name when a posting (by its id) was written.

    ``account`` is its name now; ``done`` are all renames, newest first.
    """
    for each in done:
        if each.posting < posting:
            break  # this and all older ones were done when it was posted
        if account == member_account(each.new) and posting not in each.kept:
            account = member_account(each.old)
    return account


def _rename(row: sa.RowMapping) -> Rename:
    return Rename(**{**row, "kept": frozenset(map(int, row["kept"].split()))})


CHANGE = "change"
"""The kind of an entry of the audit log."""

LEASE = "lease"
"""The kind of an ended lease."""

RENAME = "rename"
"""The kind of a member's rename."""

FIRST = "0" * 64
"""What the first link of a chain follows."""

ROWS = 10_000
"""How many rows are read at once."""
AT_ONCE = 500
"""How many seals are queried at once."""

# As text: for a select SQLAlchemy makes a cache key each time, which takes longer than this.
NEWEST_LINK: sa.ColumnElement[str | None] = sa.literal_column(
    "(SELECT link FROM postings ORDER BY id DESC LIMIT 1)", sa.Text
)
"""The link of the newest transfers; NULL in an empty ledger."""

_SELECT_NEWEST_LINK = sa.select(NEWEST_LINK)
_NEWEST_POSTING = sa.select(sa.func.max(postings.c.id)).scalar_subquery()
_BEFORE = (
    sa.select(chain.c.link).order_by(chain.c.id.desc()).limit(1).scalar_subquery(),
    _NEWEST_POSTING,
    sa.select(postings.c.link).where(postings.c.id == _NEWEST_POSTING).scalar_subquery(),
)
"""The newest seal's link, the newest posting and its link; NULL if there is none."""
_BEFORE_SEAL = sa.select(*_BEFORE)

_SEAL = sa.insert(chain)
# Listed one by one: the migration chains what older versions have, and a column that is added later
# must change no hash.
_CHANGES = sa.select(
    *(audit.c[name] for name in ("id", "at", "actor", "action", "subject", "detail"))
).order_by(audit.c.id)
_TRANSFERS = tuple(
    transfers.c[name] for name in ("id", "key", "kind", "at", "actor", "reason", "lease_id")
)
_PLACES = tuple(
    lease_places.c[name]
    for name in ("uuid", "slot", "index", "model", "memory_bytes", "slots", "held_slots", "part")
)
_LEASE_FIELDS = (
    *("id", "user", "server_name", "account", "environment", "rate", "hold", "charged", "engine"),
    *("engine_ref", "granted_at", "started_at", "ended_at", "end_reason", "group", "seconds"),
    *("extended", "ticket_id", "outcome", "when_dry", "overdraft", "waived", "refunded"),
    "engine_id",
)
"""What no longer changes once a lease has ended, unless it is refunded."""
_LEASE_COLUMNS = tuple(leases.c[name] for name in _LEASE_FIELDS)
TO_SEAL = (*_LEASE_COLUMNS, *_BEFORE)
"""What :func:`seal_row` needs of a lease, for the statement that ends it."""
_LEASES = (
    sa.select(*_LEASE_COLUMNS, *_PLACES)
    .select_from(
        leases.outerjoin(lease_places, (lease_places.c.lease_id == leases.c.id) & COUNTED_PLACE)
    )
    .order_by(leases.c.id, lease_places.c.uuid, lease_places.c.slot)
)
_ENDED = _LEASES.where(leases.c.ended_at.isnot(None))
_ONE_LEASE = _LEASES.where(leases.c.id == sa.bindparam("lease"))


def newest_link(connection: sa.Connection) -> str | None:
    """Return the link of the newest transfers; None if the ledger is empty."""
    return connection.execute(_SELECT_NEWEST_LINK).scalar()


def transfer_facts(some: Iterable[Transfer]) -> list[str]:
    """Return what the link of each of these transfers covers, for :func:`link_transfers`."""
    at, text, facts = None, "", []
    for transfer in some:
        if transfer.at != at:  # those of one charge have the same time
            at, text = transfer.at, _iso(transfer.at)
        facts.append(_transfer_facts(transfer, text))
    return facts


def link_transfers(before: str | None, facts: Iterable[str]) -> str:
    """Return the link of transfers posted together; ``before`` is the newest in the ledger."""
    return _link(before or FIRST, *facts)


def seal_change(connection: sa.Connection, line: int, row: Sequence[Any]) -> None:
    """Seal an entry of the audit log: time, actor, action, subject and detail."""
    _seal(connection, CHANGE, str(line), _facts(row))


def seal_lease(connection: sa.Connection, lease_id: str) -> None:
    """Seal an ended lease as it is now in the store; again after a refund."""
    for _, row in _leases(connection.execute(_ONE_LEASE, {"lease": lease_id})):
        _seal(connection, LEASE, lease_id, _facts(row))


def seal_leases(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> None:
    """Seal the ended leases that match the condition, as they are now in the store."""
    for lease_id, row in _leases(connection.execute(_ENDED.where(condition)).all()):
        _seal(connection, LEASE, lease_id, _facts(row))


def seal_rename(connection: sa.Connection, rename: Rename) -> None:
    """Seal the rename of a member."""
    _seal(connection, RENAME, str(rename.id), _rename_facts(rename))


def seal_row(
    connection: sa.Connection, row: Sequence[Any], devices: Iterable[LeasedDevice]
) -> None:
    """Seal a lease that has just ended; ``row`` has the columns in :data:`TO_SEAL`."""
    width = len(_LEASE_FIELDS)
    places = sorted(
        _place_facts(
            (d.uuid, d.slot, d.index, d.model, d.memory_bytes, d.slots, d.held_slots, d.part)
        )
        for d in devices
    )
    facts = _facts((*row[:width], places))
    _write_seal(connection, LEASE, row[0], facts, row[width:])


def head(connection: sa.Connection) -> str:
    """Return one word for the present state of both chains, to be noted elsewhere.

    Such as ``4711.42.9f86d0…``: the newest posting, the newest seal, and the hash of both links.
    """
    newest = (sa.select(sa.func.max(table.c.id)) for table in (postings, chain))
    return head_at(connection, *(connection.execute(each).scalar() or 0 for each in newest))


def head_at(connection: sa.Connection, posting: int, seal: int) -> str:
    """Return the head as of these newest rows; empty if one is missing."""
    links = []
    for table, row in ((postings, posting), (chain, seal)):
        found = connection.execute(sa.select(table.c.link).where(table.c.id == row)).scalar()
        if found is None and row:
            return ""
        links.append(found or FIRST)
    return f"{posting}.{seal}.{_hash(''.join(links))}"


def knows(connection: sa.Connection, noted: str) -> bool:
    """Return True if this head, noted earlier, fits the chains as they are now."""
    posting, _, rest = noted.partition(".")
    seal = rest.partition(".")[0]
    if not (posting.isdecimal() and seal.isdecimal() and max(len(posting), len(seal)) < 19):
        return False
    return head_at(connection, int(posting), int(seal)) == noted


def check_transfers(connection: sa.Connection) -> Iterator[str]:
    """Each transfer follows the one before it, and none was changed, deleted or inserted since."""
    before, done = FIRST, every(connection)
    for together in _posted_together(_written(connection, done)):
        expected = _link(before, *(written.facts for written in together))
        link = together[-1].link
        if link != expected or together[-1].has_more_links:
            yield _broken(_transfers_named(together), link)
        before = expected
    missing = (
        sa.select(chain.c.kind, chain.c.ref)
        .join_from(chain, postings, postings.c.id == chain.c.posting, isouter=True)
        .where(chain.c.posting > 0, postings.c.id.is_(None))
        .order_by(chain.c.id)
        .limit(1)
    )
    for kind, ref in connection.execute(missing):
        said = "was written after a transfer that is missing: it was deleted by hand."
        yield f"{_named(kind, ref)} {said}"


def check_seals(connection: sa.Connection) -> Iterator[str]:
    """Lines of the audit log and ended leases are as they were written, and none is missing."""
    before = FIRST
    seals = (
        sa.select(chain, postings.c.link)
        .join_from(chain, postings, postings.c.id == chain.c.posting, isouter=True)
        .order_by(chain.c.id)
    )
    for _, kind, ref, facts, posting, link, newest in _stream(connection, seals):
        expected = _link(before, kind, ref, facts, newest or FIRST)
        # A missing posting is reported with the transfers, and leaves nothing to compare with.
        if link != expected and (newest or not posting):
            yield _broken(f"{_named(kind, ref)}: its seal", link)
        before = link
    changes = ((str(line), _facts(row)) for line, *row in _stream(connection, _CHANGES))
    yield from _compared(connection, CHANGE, changes)
    yield from check_leases(connection)
    done = every(connection)
    yield from _compared(connection, RENAME, ((str(x.id), _rename_facts(x)) for x in done))
    yield from _missing(connection, {str(each.id) for each in done})


def check_leases(
    connection: sa.Connection, condition: sa.ColumnElement[bool] | None = None
) -> Iterator[str]:
    """Yield a sentence for each ended lease that is not as it was sealed; None checks all."""
    query = _ENDED if condition is None else _ENDED.where(condition)
    found = _leases(_stream(connection, query))
    yield from _compared(connection, LEASE, ((lease_id, _facts(row)) for lease_id, row in found))


def _missing(connection: sa.Connection, done: Collection[str]) -> Iterator[str]:
    """Report the first entry, lease or rename that was sealed and is missing."""
    lines = sa.exists().where(audit.c.id == sa.cast(chain.c.ref, audit.c.id.type))
    ended = sa.exists().where(leases.c.id == chain.c.ref, leases.c.ended_at.isnot(None))
    known = chain.c.ref.in_(done)
    for kind, there in ((CHANGE, lines), (LEASE, ended), (RENAME, known)):
        missing = sa.select(chain.c.ref).where(chain.c.kind == kind, ~there)
        for (ref,) in connection.execute(missing.order_by(chain.c.id).limit(1)):
            yield f"{_named(kind, ref)} is missing: it was deleted by hand."


@contextmanager
def not_append_only(connection: sa.Connection) -> Iterator[None]:
    """Let only this transaction change postings, with their trigger disabled.

    A failure must roll the transaction back: both databases then have the trigger again.
    """
    off = "ALTER TABLE postings DISABLE TRIGGER postings_append_only"
    on = "ALTER TABLE postings ENABLE TRIGGER postings_append_only"
    if connection.dialect.name == "sqlite":
        off = "DROP TRIGGER postings_never_update"
        made = "SELECT sql FROM sqlite_master WHERE name = 'postings_never_update'"
        on = connection.exec_driver_sql(made).scalar_one()
    connection.exec_driver_sql(off)
    yield
    connection.exec_driver_sql(on)


# Helpers.


def _seal(connection: sa.Connection, kind: str, ref: str, facts: str) -> None:
    _write_seal(connection, kind, ref, facts, connection.execute(_BEFORE_SEAL).one())


def _write_seal(
    connection: sa.Connection, kind: str, ref: str, facts: str, newest_rows: Sequence[Any]
) -> None:
    """Write a seal; ``newest_rows`` is the result of :data:`_BEFORE`."""
    before, posting, newest = newest_rows
    facts = _hash(facts)
    link = _link(before or FIRST, kind, ref, facts, newest or FIRST)
    row = {"kind": kind, "ref": ref, "facts": facts, "posting": posting or 0, "link": link}
    connection.execute(_SEAL, row)


def _link(before: str, *parts: str) -> str:
    return _hash("\n".join((before, *parts)))  # ascii() writes no line break into a part


def _hash(text: str) -> str:
    made = _EMPTY.copy()  # for a new one, OpenSSL looks the algorithm up
    made.update(text.encode())
    return made.hexdigest()


def _facts(values: Iterable[Any]) -> str:
    """Return ascii() of the tuple, with times as ISO 8601 in UTC; JSON would take far longer."""
    return ascii(tuple(_iso(each) if isinstance(each, datetime) else each for each in values))


def _iso(at: datetime) -> str:
    """Return a time as ISO 8601 in UTC, from the text that SQLite has just got of it."""
    return str(as_text(at)).replace(" ", "T").removesuffix(".000000") + "+00:00"


def _transfer_facts(transfer: Transfer, at: str) -> str:
    """Return the same as :func:`_facts` of the row and its postings; ``at`` is its time as text.

    Formatted field by field, which takes half the time.
    """
    lines = ", ".join([f"({each.account!a}, {each.amount})" for each in transfer.postings])
    return (
        f"({transfer.id!a}, {transfer.key!a}, '{transfer.kind.value}', "
        f"'{at}', {transfer.actor!a}, {transfer.reason!a}, "
        f"{transfer.lease_id!a}, [{lines}])"
    )


def _leases(rows: Iterable[Sequence[Any]]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield each lease's id and what its seal covers, slots last. Its rows must be adjacent."""
    width = len(_LEASE_FIELDS)
    for lease_id, found in groupby(rows, key=lambda row: str(row[0])):
        some = list(found)
        places = sorted(_place_facts(row[width:]) for row in some if row[width] is not None)
        yield lease_id, (*some[0][:width], places)


def _place_facts(place: Sequence[Any]) -> list[Any]:
    """Return what a seal covers of a place; of whole devices not shared, as older seals do."""
    *known, slots, held_slots, part = place
    shared = [slots, held_slots] if slots > 1 else []
    return [*known, *shared, *([str(part)] if part != 1 else [])]


def _rename_facts(rename: Rename) -> str:
    values = (rename.at, rename.actor, rename.old, rename.new, rename.posting)
    return _facts((*values, sorted(rename.kept)))


class _Written(NamedTuple):
    """A transfer as it is in the store."""

    id: str
    at: datetime
    facts: str
    link: str | None
    """The link of its last posting; None if another transfer was posted with it and after it."""
    has_more_links: bool
    """True if another of its postings has a link too, which is never valid."""
    last_posting: int


def _written(connection: sa.Connection, done: Sequence[Rename] = ()) -> Iterator[_Written]:
    """Yield each transfer in the order of the ledger; ``done`` are all renames, newest first."""
    lines = (postings.c.account, postings.c.amount, postings.c.link, postings.c.id)
    query = (
        sa.select(*_TRANSFERS, *lines)
        .join_from(postings, transfers, transfers.c.id == postings.c.transfer_id)
        .order_by(postings.c.id)
    )
    width = len(_TRANSFERS)
    for _, found in groupby(_stream(connection, query), key=lambda row: str(row[0])):
        some = list(found)
        row = some[0][:width]
        moved = [(line[width], line[width + 1]) for line in some]
        if done:
            names = (account_then(done, line[width], line[width + 3]) for line in some)
            moved = [(name, amount) for name, (_, amount) in zip(names, moved, strict=True)]
        *others, link = [line[width + 2] for line in some]
        facts = _facts((*row, moved))
        yield _Written(row[0], row[3], facts, link, any(others), some[-1][width + 3])


def _posted_together(some: Iterable[_Written]) -> Iterator[list[_Written]]:
    """Group transfers by link: those without one belong to the next that has one, if any."""
    together = list[_Written]()
    for written in some:
        together.append(written)
        if written.link is not None or written.has_more_links:
            yield together
            together = []
    if together:
        yield together


def _transfers_named(some: Sequence[_Written]) -> str:
    first, last = (f"{each.id} of {each.at:%Y-%m-%d %H:%M} UTC" for each in (some[0], some[-1]))
    if len(some) == 1:
        return f"Transfer {last}"
    return f"One of the {len(some)} transfers from {first} to {last}"


def _compared(
    connection: sa.Connection, kind: str, some: Iterable[tuple[str, str]]
) -> Iterator[str]:
    """Compare the facts of each row with its newest seal of this kind."""
    rows = iter(some)
    while portion := dict(islice(rows, AT_ONCE)):
        these = (chain.c.kind == kind) & chain.c.ref.in_(portion)
        seals = sa.select(chain.c.ref, chain.c.facts).where(these).order_by(chain.c.id)
        known = {row[0]: row[1] for row in connection.execute(seals)}
        for ref, facts in portion.items():
            sealed = known.get(ref)
            if not sealed:
                yield f"{_named(kind, ref)} was inserted by hand: it has no seal."
            elif sealed != _hash(facts):
                yield f"{_named(kind, ref)} was changed by hand after it was written."


def _named(kind: str, ref: str) -> str:
    names = {CHANGE: f"Line {ref} of the audit log", RENAME: f"The rename {ref}"}
    return names.get(kind, f"The ended lease {ref}")


def _broken(what: str, link: str | None) -> str:
    if link is None:
        why = (
            "has no link to the one before it: it was inserted by hand, or what was written with it"
        )
    else:
        why = "does not follow the one before it: it was changed or inserted by hand, or what was "
        why += "before it"
    return f"{what} {why} was deleted."


def _stream(connection: sa.Connection, query: sa.Select[Any]) -> Iterator[Any]:
    yield from connection.execute(query, execution_options={"yield_per": ROWS})
