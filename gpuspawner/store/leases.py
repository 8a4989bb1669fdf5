"""Rows of leases and their places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ..errors import NoDeviceFree, ServerHasLease, UnknownLease
from ..model import Lease, LeasedDevice, LeaseState, Place, ServerRef, Ticket
from . import open_places
from .prepared import Prepared
from .schema import OPEN_LEASE, OPEN_PLACE, accounts, closures, lease_places, leases, lots

_LEASE_FIELDS = tuple(n for n in Lease.__dataclass_fields__ if n not in ("server", "devices"))
_PLACE_FIELDS = tuple(LeasedDevice.__dataclass_fields__)
# A row has the server's two columns, then the lease's, then those of one place.
_AT_ID = 2 + _LEASE_FIELDS.index("id")
_AT_PLACE = 2 + len(_LEASE_FIELDS)

_left = leases.c.hold - leases.c.charged
# As one text and not as rows: a grant reads it, and hundreds of new objects each time make
# Python collect garbage more often, with the hub standing still meanwhile.
_place = lease_places.c.uuid + ":" + sa.cast(lease_places.c.slot, sa.Text)
_space: Any = sa.literal_column("' '")  # not a parameter: those it cannot be compiled with
PLACES = sa.select(sa.func.aggregate_strings(_place, _space)).where(OPEN_PLACE)
CLOSED = sa.select(sa.func.aggregate_strings(closures.c.subject + ":0", _space))
"""Together they are what :func:`places_taken` reads."""
_PLACES = Prepared(PLACES.add_columns(CLOSED.scalar_subquery()))
_TAKEN = Prepared(
    sa.select(lease_places.c.uuid, lease_places.c.slot, lease_places.c.lease_id).where(OPEN_PLACE)
)
_SELECTED = (
    leases.c.user,
    leases.c.server_name,
    *(leases.c[name] for name in _LEASE_FIELDS),
    *(lease_places.c[name] for name in _PLACE_FIELDS),
)
_LEASES = (
    sa.select(*_SELECTED)
    .select_from(leases.outerjoin(lease_places))
    .order_by(leases.c.granted_at, leases.c.id, lease_places.c.index)
)
_one = _LEASES.where(leases.c.id == sa.bindparam("lease"))
_ONE, _ONE_LOCKED = Prepared(_one), Prepared(_one.with_for_update(of=leases))
_OPEN_OF_SERVER = Prepared(
    _LEASES.where(
        leases.c.user == sa.bindparam("member"),
        leases.c.server_name == sa.bindparam("server"),
        OPEN_LEASE,
    )
)
_OPEN = Prepared(_LEASES.where(OPEN_LEASE))
_WITH_AN_END = Prepared(
    _LEASES.where(
        OPEN_LEASE, (leases.c.outcome != sa.literal_column("''")) | leases.c.seconds.isnot(None)
    )
)
PAYS = sa.and_(OPEN_LEASE, leases.c.started_at.isnot(None), leases.c.rate > sa.literal_column("0"))
"""True of the leases that cost something while they run."""
_paying = (
    sa.select(*_SELECTED[:_AT_PLACE], accounts.c.balance)
    .join(accounts, accounts.c.name == leases.c.account)
    .where(PAYS)
    .order_by(leases.c.granted_at, leases.c.id)
)
_PAYING = Prepared(_paying)
_SUMS = Prepared(
    sa.select(
        *(leases.c.account, accounts.c.balance, leases.c.rate, leases.c.charged),
        leases.c.started_at,
        leases.c.warned_at.isnot(None) | leases.c.told_dry.isnot(None),
    )
    .join(accounts, accounts.c.name == leases.c.account)
    .where(PAYS)
)
_PAID_BY = Prepared(_paying.where(leases.c.account == sa.bindparam("name")))
_newest = sa.select(sa.func.max(lots.c.ends_at)).where(lots.c.account == leases.c.account)
_ONE_TO_END = Prepared(_one.add_columns(_newest.scalar_subquery()).with_for_update(of=leases))
_INSERT = Prepared(sa.insert(leases), ("user", "server_name", *_LEASE_FIELDS))
_INSERT_PLACE = Prepared(sa.insert(lease_places), ("lease_id", "open", *_PLACE_FIELDS))
_PLACES_OF = Prepared(
    sa.select(*_SELECTED[_AT_PLACE:])
    .where(lease_places.c.lease_id == sa.bindparam("lease"))
    .order_by(lease_places.c.index)
)
_FREE_PLACES = Prepared(
    sa.update(lease_places)
    .where(lease_places.c.lease_id == sa.bindparam("lease"), OPEN_PLACE)
    .values(open=sa.false())
    .returning(lease_places.c.uuid, lease_places.c.slot)
)
_HAD_ONE = Prepared(
    sa.select(leases.c.id)
    .where(
        leases.c.user == sa.bindparam("member"),
        leases.c.server_name == sa.bindparam("server"),
        leases.c.ticket_id == sa.bindparam("ticket"),
    )
    .limit(1)
)

HELD = sa.select(sa.func.coalesce(sa.func.sum(sa.case((_left > 0, _left), else_=0)), 0)).where(
    OPEN_LEASE
)
"""Microcredits set aside by open leases; whose, the caller adds."""
_HELD_BY = Prepared(HELD.where(leases.c.account == sa.bindparam("account")))


def taken(connection: sa.Connection) -> dict[Place, str]:
    """Every place under an open lease, with the lease's id."""
    return {Place(uuid, slot): lease for uuid, slot, lease in _TAKEN.rows(connection)}


def places_taken(connection: sa.Connection) -> frozenset[str]:
    """The places of all open leases as texts, and the first place of all that is closed (the one
    on "granting" for all)."""
    (found,) = _PLACES.rows(connection)
    return frozenset(" ".join(filter(None, found)).split())


def had_one(connection: sa.Connection, ticket: Ticket) -> bool:
    """Whether a ticket ever led to a lease."""
    server = {"member": ticket.server.user, "server": ticket.server.name}
    return bool(_HAD_ONE.rows(connection, ticket=ticket.id, **server))


def insert(connection: sa.Connection, lease: Lease) -> None:
    """Write a new lease with its places.

    Raises ServerHasLease or NoDeviceFree when the database's own constraints forbid it; the
    transaction is then to be given up.
    """
    places = [
        {name: getattr(device, name) for name in _PLACE_FIELDS}
        | {"lease_id": lease.id, "open": True}
        for device in lease.devices
    ]
    try:
        _INSERT.run(connection, **_row(lease))
        _INSERT_PLACE.run_each(connection, places)
    except IntegrityError as error:
        if "one_open_lease_a_slot" in str(error) or "lease_places.uuid" in str(error):
            raise NoDeviceFree("The GPU was just taken by somebody else. Try again.") from None
        if "one_open_lease_a_server" in str(error) or "leases.user" in str(error):
            raise ServerHasLease() from None
        raise
    open_places.change(connection, more=(Place(d.uuid, d.slot).text for d in lease.devices))


def get(connection: sa.Connection, lease_id: str, *, lock: bool = False) -> Lease:
    """One lease. ``lock`` keeps others from changing it until the transaction ends.

    Raises UnknownLease.
    """
    found = _leases((_ONE_LOCKED if lock else _ONE).rows(connection, lease=lease_id))
    if not found:
        raise UnknownLease(lease=lease_id)
    return found[0]


def get_to_end(connection: sa.Connection, lease_id: str) -> tuple[Lease, datetime | None]:
    """One lease that is about to end, kept from others, and when the last lot of its account ends
    (None when that never had one). Raises UnknownLease."""
    rows = _ONE_TO_END.rows(connection, lease=lease_id)
    if not rows:
        raise UnknownLease(lease=lease_id)
    return _leases(row[:-1] for row in rows)[0], rows[0][-1]


def open_of(connection: sa.Connection, server: ServerRef) -> Lease | None:
    """The open lease of a server, if there is one."""
    found = _leases(_OPEN_OF_SERVER.rows(connection, member=server.user, server=server.name))
    return found[0] if found else None


def open_leases(connection: sa.Connection) -> list[Lease]:
    """All open leases, oldest first."""
    return _leases(_OPEN.rows(connection))


def with_an_end(connection: sa.Connection) -> list[Lease]:
    """Open leases whose session ends some time, or whose stop was ordered; oldest first."""
    return _leases(_WITH_AN_END.rows(connection))


def paying(connection: sa.Connection, account: str | None = None) -> list[tuple[Lease, int]]:
    """The running leases that cost something, oldest first, each with the balance of the account
    (None: of any) that pays for it. Their devices are left out."""
    found = _PAYING.rows(connection) if account is None else _PAID_BY.rows(connection, name=account)
    return [(from_row(row[:-1], []), row[-1]) for row in found]


def sums(connection: sa.Connection) -> list[tuple[str, int, int, int, datetime, bool]]:
    """Of each running lease that costs something: account, its balance, rate, charged, start, and
    whether anything was told about its credits. Rows and no leases: there may be thousands."""
    return [(*row[:5], bool(row[5])) for row in _SUMS.rows(connection)]


def of_account(connection: sa.Connection, account: str | None, limit: int = 50) -> list[Lease]:
    """The newest leases of an account (None: of everybody), newest first."""
    newest = sa.select(leases.c.id).order_by(leases.c.granted_at.desc(), leases.c.id).limit(limit)
    if account is not None:
        newest = newest.where(leases.c.account == account)
    found = where(connection, leases.c.id.in_(newest))
    return sorted(found, key=lambda lease: lease.granted_at, reverse=True)


def where(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[Lease]:
    """The leases of which the condition is true, oldest first."""
    return _leases(connection.execute(_LEASES.where(condition)))


def held(connection: sa.Connection, account: str) -> int:
    """Microcredits set aside by the account's open leases."""
    ((amount,),) = _HELD_BY.rows(connection, account=account)
    return int(amount)


def update(connection: sa.Connection, lease_id: str, **values: Any) -> None:
    """Change fields of an open lease."""
    if isinstance(values.get("state"), LeaseState):
        values["state"] = values["state"].value
    _update(tuple(values)).run(connection, lease=lease_id, **values)


@lru_cache(maxsize=64)
def _update(columns: tuple[str, ...]) -> Prepared:
    return Prepared(sa.update(leases).where(leases.c.id == sa.bindparam("lease")), columns)


def confirmation(lease_id: str, at: datetime, engine_ref: str) -> tuple[Prepared, dict[str, Any]]:
    """What writes that the server of a lease answered, and from when it is charged, and with
    which values. It returns a row for :func:`from_row`, and none when no lease of this id waits
    for that."""
    values = {"state": LeaseState.RUNNING.value, "started_at": at, "seen_at": at}
    if engine_ref:
        values["engine_ref"] = engine_ref
    return _confirm(tuple(values)), {"lease": lease_id, **values}


def devices_of(connection: sa.Connection, lease_id: str) -> tuple[LeasedDevice, ...]:
    """The devices of a lease, open or ended; they never change."""
    return tuple(LeasedDevice(*row) for row in _PLACES_OF.rows(connection, lease=lease_id))


@lru_cache(maxsize=2)
def _confirm(columns: tuple[str, ...]) -> Prepared:
    waits = leases.c.state == sa.literal_column(f"'{LeaseState.GRANTED.value}'")
    one = sa.update(leases).where(leases.c.id == sa.bindparam("lease"), waits)
    return Prepared(one.returning(*_SELECTED[:_AT_PLACE]), columns)


def end(
    connection: sa.Connection,
    lease_id: str,
    at: datetime,
    reason: str,
    charged: int,
    waived: int = 0,
) -> None:
    """Close a lease and free its places."""
    changes: dict[str, Any] = {"ended_at": at, "end_reason": reason, "charged": charged}
    update(connection, lease_id, state=LeaseState.ENDED, waived=waived, **changes)
    freed = _FREE_PLACES.rows(connection, lease=lease_id)
    open_places.change(connection, fewer=(Place(uuid, slot).text for uuid, slot in freed))


def _leases(rows: Iterable[Sequence[Any]]) -> list[Lease]:
    """Rows of leases, one for each place, put together again in the order in which they came."""
    found: dict[str, tuple[Sequence[Any], list[LeasedDevice]]] = {}
    for row in rows:
        _, places = found.setdefault(row[_AT_ID], (row, []))
        if row[_AT_PLACE] is not None:
            places.append(LeasedDevice(*row[_AT_PLACE:]))
    return [from_row(row, places) for row, places in found.values()]


def _row(lease: Lease) -> dict[str, Any]:
    row = {name: getattr(lease, name) for name in _LEASE_FIELDS}
    row |= {"user": lease.server.user, "server_name": lease.server.name}
    row["state"] = lease.state.value
    return row


def from_row(row: Sequence[Any], places: Sequence[LeasedDevice]) -> Lease:
    """A lease of one row and its places."""
    user, server_name, *values = row[:_AT_PLACE]
    fields = dict(zip(_LEASE_FIELDS, values, strict=True))
    fields["state"] = LeaseState(fields["state"])
    return Lease(server=ServerRef(user, server_name), devices=tuple(places), **fields)
