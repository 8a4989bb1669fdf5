"""Rows of leases and slots, and of devices that are reserved for a server that restarts.

A reserved device is closed to new leases (see :mod:`gpuspawner.devices.closures`) by an actor that
names the server. Nobody else can get it, whichever process is killed meanwhile, and an admin can
see why and end it. The grant to the server itself reopens the devices, in its own transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ..core.errors import NoDeviceFree, ServerHasLease, UnknownLease
from ..db import hash_chain
from ..db.schema import (
    COUNTED_PLACE,
    OPEN_LEASE,
    OPEN_PLACE,
    OPEN_TICKET,
    accounts,
    lease_places,
    leases,
    lots,
    tickets,
)
from ..devices import closures as devices_closures
from ..devices.closures import SUBJECTS, Closure, keeper, kept_for
from ..monitoring import repository as monitoring_repository
from .host_resources import NOTHING, HostAmount
from .models import NO_SLOT, Lease, LeasedDevice, LeaseState, ServerRef, Slot

_LEASE_FIELDS = tuple(n for n in Lease.__dataclass_fields__ if n not in ("server", "devices"))
_PLACE_FIELDS = tuple(LeasedDevice.__dataclass_fields__)
# A row has the server's two columns, then the lease's, then those of one slot.
_AT_ID = 2 + _LEASE_FIELDS.index("id")
_AT_PLACE = 2 + len(_LEASE_FIELDS)

_left = leases.c.hold - leases.c.charged
# One text instead of rows: a grant reads this, and hundreds of new objects each time make Python
# collect garbage more often, while the hub stands still.
_place = lease_places.c.uuid + ":" + sa.cast(lease_places.c.slot, sa.Text)
PLACES = sa.select(sa.func.aggregate_strings(_place, " ")).where(OPEN_PLACE)
CLOSED = sa.select(sa.func.aggregate_strings(SUBJECTS.c.subject + f":{NO_SLOT}", " "))
"""The two parts that :func:`places_taken` reads."""
_PLACES = PLACES.add_columns(CLOSED.scalar_subquery())
RESERVED = tuple(
    sa.select(sa.func.coalesce(sa.func.sum(column), 0)).where(OPEN_LEASE)
    for column in (leases.c.host_memory_bytes, leases.c.host_milli_cpus)
)
"""Memory and CPU of the host that open leases have reserved."""
_RESERVED = sa.select(*(each.scalar_subquery() for each in RESERVED))
_TAKEN = sa.select(lease_places.c.uuid, lease_places.c.slot, lease_places.c.lease_id).where(
    OPEN_PLACE
)
_SELECTED = (
    leases.c.user,
    leases.c.server_name,
    *(leases.c[name] for name in _LEASE_FIELDS),
    *(lease_places.c[name] for name in _PLACE_FIELDS),
)
_LEASES = (
    sa.select(*_SELECTED)
    .select_from(
        leases.outerjoin(lease_places, (lease_places.c.lease_id == leases.c.id) & COUNTED_PLACE)
    )
    .order_by(leases.c.granted_at, leases.c.id, lease_places.c.index)
)
_ONE = _LEASES.where(leases.c.id == sa.bindparam("lease"))
_ONE_LOCKED = _ONE.with_for_update(of=leases)
PAYS = sa.and_(OPEN_LEASE, leases.c.started_at.isnot(None), leases.c.rate > 0)
"""Selects the leases that cost something while they run."""
_PAYING = (
    sa.select(*_SELECTED[:_AT_PLACE], accounts.c.balance)
    .join(accounts, accounts.c.name == leases.c.account)
    .where(PAYS)
    .order_by(leases.c.granted_at, leases.c.id)
)
_SUMS = (
    sa.select(
        *(leases.c.account, accounts.c.balance, leases.c.rate, leases.c.charged),
        leases.c.started_at,
        leases.c.warned_at.isnot(None) | leases.c.told_dry.isnot(None),
    )
    .join(accounts, accounts.c.name == leases.c.account)
    .where(PAYS)
)
_newest = sa.select(sa.func.max(lots.c.ends_at)).where(lots.c.account == leases.c.account)
_ONE_TO_END = _ONE_LOCKED.add_columns(_newest.scalar_subquery())
_PLACES_OF = (
    sa.select(*_SELECTED[_AT_PLACE:])
    .where(lease_places.c.lease_id == sa.bindparam("lease"), COUNTED_PLACE)
    .order_by(lease_places.c.index)
)
_this = leases.c.id == sa.bindparam("lease")
_CONFIRM = (
    sa.update(leases)
    .where(_this, leases.c.state == LeaseState.GRANTED.value)
    .values(
        state=LeaseState.RUNNING.value,
        started_at=sa.bindparam("at"),
        seen_at=sa.bindparam("at"),
        answered_at=sa.bindparam("at"),
        engine_ref=sa.case(
            (sa.bindparam("ref", type_=sa.Text) == "", leases.c.engine_ref),
            else_=sa.bindparam("ref", type_=sa.Text),
        ),
    )
    .returning(*_SELECTED[:_AT_PLACE])
)
_BEGAN = (
    sa.update(leases)
    .where(_this)
    .values(started_at=sa.bindparam("at"))
    .returning(*_SELECTED[:_AT_PLACE])
)
_END = (
    sa.update(leases)
    .where(_this)
    .values(
        state=LeaseState.ENDED.value,
        ended_at=sa.bindparam("at"),
        end_reason=sa.bindparam("reason"),
        charged=sa.bindparam("paid"),
        waived=sa.bindparam("left"),
    )
    .returning(*hash_chain.TO_SEAL)
)
_FREE_PLACES = (
    sa.update(lease_places)
    .where(lease_places.c.lease_id == sa.bindparam("lease"), OPEN_PLACE)
    .values(open=sa.false())
)

HELD = sa.select(sa.func.coalesce(sa.func.sum(sa.case((_left > 0, _left), else_=0)), 0)).where(
    OPEN_LEASE
)
"""Microcredits set aside by open leases; the caller adds whose."""


def taken(connection: sa.Connection) -> dict[Slot, str]:
    """Return every slot under an open lease, with the lease's id."""
    return {Slot(uuid, slot): lease for uuid, slot, lease in connection.execute(_TAKEN)}


def places_taken(connection: sa.Connection) -> frozenset[str]:
    """Return the slots of all open leases and the closure of each closed device, as texts.

    A pause of all grants counts as the closed device "granting".
    """
    found = connection.execute(_PLACES).one()
    return frozenset(" ".join(filter(None, found)).split())


def reserved(connection: sa.Connection) -> HostAmount:
    """Return how much of the host's memory and CPU is reserved for open leases and restarts."""
    memory, cpus = connection.execute(_RESERVED).one()
    return HostAmount(int(memory), int(cpus)) + kept_host(connection)


def had_one(connection: sa.Connection, ticket_id: str, server: ServerRef) -> bool:
    """Return True if a ticket of a server ever led to a lease."""
    of_ticket = sa.select(leases.c.id).where(_of(server), leases.c.ticket_id == ticket_id)
    return connection.execute(of_ticket.limit(1)).first() is not None


def no_shows_in_a_row(connection: sa.Connection, user: str) -> int:
    """Return how many of a member's newest leases from the queue in a row were no-shows."""
    count = 0
    outcomes = (
        sa.select(leases.c.outcome)
        .where(leases.c.user == user, leases.c.claim_seconds.isnot(None), ~OPEN_LEASE)
        .order_by(leases.c.granted_at.desc())
        .limit(10)
    )
    for outcome in connection.execute(outcomes).scalars():
        if outcome not in ("no_show", "lost"):
            break
        count += outcome == "no_show"
    return count


def reopen_ticket(connection: sa.Connection, ticket_id: str) -> bool:
    """Put a ticket whose grant came to nothing back at its position in the queue.

    Returns False if it was not granted, or if its server has another ticket by now.
    """
    this = tickets.c.id == ticket_id
    known = sa.select(tickets.c.user, tickets.c.server_name, tickets.c.outcome).where(this)
    ticket = connection.execute(known.with_for_update()).one_or_none()
    if ticket is None or ticket.outcome != "granted":
        return False
    others = sa.select(tickets.c.id).where(
        tickets.c.user == ticket.user, tickets.c.server_name == ticket.server_name, OPEN_TICKET
    )
    if connection.execute(others).first():
        return False
    back = {"state": "waiting", "ended_at": None, "outcome": "", "end_reason": "", "lease_id": None}
    connection.execute(sa.update(tickets).where(this).values(version=tickets.c.version + 1, **back))
    return True


def insert(
    connection: sa.Connection,
    lease: Lease,
    places: Collection[Slot] = (),
    *,
    one_share_a_device: bool = True,
) -> None:
    """Insert a lease with its slots.

    Args:
        connection: The caller's transaction, which must be rolled back after an error.
        lease: The new lease.
        places: All slots of its shares; of a device that is not here, it holds the first slots.
        one_share_a_device: The database refuses a second share of a member on one device.

    Raises ServerHasLease or NoDeviceFree if the database's constraints forbid it.
    """
    row = {name: getattr(lease, name) for name in _LEASE_FIELDS}
    row |= {"user": lease.server.user, "server_name": lease.server.name}
    row["state"] = lease.state.value
    sharer = lease.server.user if one_share_a_device else None
    rows = [row for each in lease.devices for row in _place_rows(lease.id, each, places, sharer)]
    try:
        connection.execute(sa.insert(leases), row)
        if rows:
            connection.execute(sa.insert(lease_places), rows)
    except IntegrityError as error:
        taken = ("one_open_lease_a_slot", "one_share_a_member", "lease_places.uuid")
        if any(name in str(error) for name in taken):
            raise NoDeviceFree("Another session just took the GPU. Try again.") from None
        if "one_open_lease_a_server" in str(error) or "leases.user" in str(error):
            raise ServerHasLease() from None
        raise


def _place_rows(
    lease_id: str, device: LeasedDevice, places: Collection[Slot], sharer: str | None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a leased device: one for each slot; only the first one counts."""
    row = {name: getattr(device, name) for name in _PLACE_FIELDS}
    row |= {"lease_id": lease_id, "open": True}
    yield row | {"sharer": sharer if device.is_shared else None}
    named = [each.slot for each in places if each.uuid == device.uuid]
    for slot in (named or range(device.held_slots))[1:]:
        yield row | {"slot": slot, "held_slots": 0, "sharer": None}


def shared_by(connection: sa.Connection, user: str) -> frozenset[str]:
    """Return the UUIDs of the devices on which a member has a share."""
    mine = sa.select(lease_places.c.uuid).where(OPEN_PLACE, lease_places.c.sharer == user)
    return frozenset(connection.execute(mine).scalars())


def get(connection: sa.Connection, lease_id: str, *, lock: bool = False) -> Lease:
    """Return a lease. ``lock`` locks the row until the transaction ends.

    Raises UnknownLease.
    """
    found = _leases(connection.execute(_ONE_LOCKED if lock else _ONE, {"lease": lease_id}))
    if not found:
        raise UnknownLease(lease=lease_id)
    return found[0]


def get_to_end(connection: sa.Connection, lease_id: str) -> tuple[Lease, datetime | None]:
    """Lock and return a lease that is about to end, and when its account's last lot expires.

    The time is None if the account never had a lot that expires. Raises UnknownLease.
    """
    rows = connection.execute(_ONE_TO_END, {"lease": lease_id}).all()
    if not rows:
        raise UnknownLease(lease=lease_id)
    return _leases(row[:-1] for row in rows)[0], rows[0][-1]


def open_of(connection: sa.Connection, server: ServerRef) -> Lease | None:
    """Return the open lease of a server, if there is one."""
    return next(iter(where(connection, _of(server) & OPEN_LEASE)), None)


def of_servers(connection: sa.Connection, servers: Collection[ServerRef]) -> list[Lease]:
    """Return the leases of some servers or runs, open or ended, oldest first."""
    if not servers:
        return []
    names = sa.tuple_(leases.c.user, leases.c.server_name)
    return where(connection, names.in_([(server.user, server.name) for server in servers]))


def open_leases(connection: sa.Connection) -> list[Lease]:
    """Return all open leases, oldest first."""
    return where(connection, OPEN_LEASE)


def with_an_end(connection: sa.Connection) -> list[Lease]:
    """Return open leases whose session has an end or whose stop was ordered, oldest first."""
    has_end = (leases.c.outcome != "") | leases.c.seconds.isnot(None)
    return where(connection, OPEN_LEASE & has_end)


def paying(connection: sa.Connection, account: str | None = None) -> list[tuple[Lease, int]]:
    """Return the running leases that cost something, oldest first, with their accounts' balances.

    Only leases paid by ``account``, or all if it is None. The devices are left out.
    """
    chosen = _PAYING if account is None else _PAYING.where(leases.c.account == account)
    return [(from_row(row[:-1], []), row[-1]) for row in connection.execute(chosen)]


def sums(connection: sa.Connection) -> list[tuple[str, int, int, int, datetime, bool]]:
    """Return figures of each running lease that costs something.

    Each row: account, its balance, rate, charged, start, and True if the member was warned about
    credits. Rows instead of leases, because there may be thousands.
    """
    return [(*row[:5], bool(row[5])) for row in connection.execute(_SUMS)]


def of_account(connection: sa.Connection, account: str | None, limit: int = 50) -> list[Lease]:
    """Return the newest leases of an account (None: of all accounts), newest first."""
    newest = sa.select(leases.c.id).order_by(leases.c.granted_at.desc(), leases.c.id).limit(limit)
    if account is not None:
        newest = newest.where(leases.c.account == account)
    found = where(connection, leases.c.id.in_(newest))
    return sorted(found, key=lambda lease: lease.granted_at, reverse=True)


def where(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[Lease]:
    """Return the leases that satisfy the condition, oldest first."""
    return _leases(connection.execute(_LEASES.where(condition)))


def ended_across(connection: sa.Connection, at: datetime) -> list[Lease]:
    """Return the ended leases whose servers started before this time and ended after it."""
    return where(connection, (leases.c.started_at <= at) & (leases.c.ended_at > at))


def update(connection: sa.Connection, lease_id: str, **values: Any) -> None:
    """Change fields of an open lease."""
    if isinstance(values.get("state"), LeaseState):
        values["state"] = values["state"].value
    connection.execute(sa.update(leases).where(leases.c.id == lease_id).values(values))


def confirm(
    connection: sa.Connection, lease_id: str, at: datetime, engine_ref: str
) -> Sequence[Any] | None:
    """Record that a lease's server responded and is charged from now.

    Returns the row for :func:`from_row`, or None if no lease with this id waits for that.
    """
    asked = {"lease": lease_id, "at": at, "ref": engine_ref}
    return connection.execute(_CONFIRM, asked).one_or_none()


def began(connection: sa.Connection, lease_id: str, at: datetime) -> Sequence[Any]:
    """Record when the charges of a lease begin; returns the row as :func:`confirm` does."""
    return connection.execute(_BEGAN, {"lease": lease_id, "at": at}).one()


def devices_of(connection: sa.Connection, lease_id: str) -> tuple[LeasedDevice, ...]:
    """Return the devices of a lease, open or ended; they never change."""
    return tuple(LeasedDevice(*row) for row in connection.execute(_PLACES_OF, {"lease": lease_id}))


def end(
    connection: sa.Connection,
    lease_id: str,
    at: datetime,
    reason: str,
    charged: int,
    waived: int = 0,
    devices: Iterable[LeasedDevice] | None = None,
) -> None:
    """Close a lease, free its slots and seal it.

    ``devices`` are the lease's devices, if the caller has them: they never change.
    """
    if devices is None:
        devices = devices_of(connection, lease_id)
    changes = {"at": at, "reason": reason, "paid": charged, "left": waived}
    row = connection.execute(_END, {"lease": lease_id, **changes}).one()
    connection.execute(_FREE_PLACES, {"lease": lease_id})
    hash_chain.seal_row(connection, row, devices)


def _leases(rows: Iterable[Sequence[Any]]) -> list[Lease]:
    """Build leases from rows, one per slot, in the order of the rows."""
    found: dict[str, tuple[Sequence[Any], list[LeasedDevice]]] = {}
    for row in rows:
        _, places = found.setdefault(row[_AT_ID], (row, []))
        if row[_AT_PLACE] is not None:
            places.append(LeasedDevice(*row[_AT_PLACE:]))
    return [from_row(row, places) for row, places in found.values()]


def _of(server: ServerRef) -> sa.ColumnElement[bool]:
    return (leases.c.user == server.user) & (leases.c.server_name == server.name)


def from_row(row: Sequence[Any], places: Sequence[LeasedDevice]) -> Lease:
    """Build a lease from a row and its slots."""
    user, server_name, *values = row[:_AT_PLACE]
    fields = dict(zip(_LEASE_FIELDS, values, strict=True))
    fields["state"] = LeaseState(fields["state"])
    return Lease(server=ServerRef(user, server_name), devices=tuple(places), **fields)


OUTCOME = "restart"
"""The outcome of a lease that ends for a restart."""

LEAST_SECONDS = 60
"""The minimum length of a session that continues after a restart."""


def kept_devices(connection: sa.Connection, server: ServerRef) -> list[Closure]:
    """Return the devices reserved for a server, as closures."""
    found = devices_closures.load(connection).values()
    return [closure for closure in found if closure.actor == keeper(server)]


def all_kept_devices(connection: sa.Connection) -> dict[ServerRef, list[Closure]]:
    """Return all reserved devices, by server."""
    found: dict[ServerRef, list[Closure]] = {}
    for closure in devices_closures.load(connection).values():
        if server := kept_for(closure):
            found.setdefault(server, []).append(closure)
    return found


def last_lease(connection: sa.Connection, server: ServerRef) -> Lease | None:
    """Return the newest lease of a server that ended, or is about to end, for a restart."""
    newest = (
        sa.select(leases.c.id)
        .where(_of(server), leases.c.outcome == OUTCOME)
        .order_by(leases.c.granted_at.desc(), leases.c.id)
        .limit(1)
    )
    return next(iter(where(connection, leases.c.id.in_(newest))), None)


def ending(connection: sa.Connection) -> list[Lease]:
    """Return the leases, ended or not, of all servers that are restarting."""
    found = (last_lease(connection, server) for server in all_kept_devices(connection))
    return [lease for lease in found if lease]


def kept_host(connection: sa.Connection, *, but: ServerRef | None = None) -> HostAmount:
    """Return the memory and CPU of the host that are kept for servers stopped for a restart.

    As much as their leases had, as long as their devices are kept. ``but``: without this server.
    """
    stopped = (
        lease
        for lease in ending(connection)
        if lease.state is LeaseState.ENDED and lease.server != but
    )
    return sum((lease.host for lease in stopped), NOTHING)


def go_on_resting(connection: sa.Connection, lease: Lease) -> None:
    """Carry over how long a server was idle before its restart, so that nobody gains time by it."""
    before = last_lease(connection, lease.server)
    watched = monitoring_repository.get_watched(connection, before.id) if before else None
    if watched:
        until = max(watched.judged_until, lease.granted_at)
        monitoring_repository.put_watched(
            connection, lease.id, replace(watched, judged_until=until)
        )


def left_of(connection: sa.Connection, server: ServerRef, now: datetime) -> int | None:
    """Return the seconds left of a session that continues; None if it has no end."""
    before = last_lease(connection, server)
    if before is None or before.ends_at is None:
        return None
    return max(LEAST_SECONDS, int((before.ends_at - now).total_seconds()))
