"""Rows of leases and their places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ..errors import NoDeviceFree, ServerHasLease, UnknownLease
from ..model import Lease, LeasedDevice, LeaseState, Place, ServerRef
from .schema import OPEN_LEASE, OPEN_PLACE, lease_places, leases


def taken(connection: sa.Connection) -> dict[Place, str]:
    """Every place under an open lease, with the lease's id."""
    query = sa.select(lease_places.c.uuid, lease_places.c.slot, lease_places.c.lease_id)
    return {Place(u, s): lease for u, s, lease in connection.execute(query.where(OPEN_PLACE))}


def insert(connection: sa.Connection, lease: Lease) -> None:
    """Write a new lease with its places.

    Raises ServerHasLease or NoDeviceFree when the database's own constraints forbid it.
    """
    try:
        with connection.begin_nested():
            connection.execute(sa.insert(leases).values(_row(lease)))
            for device in lease.devices:
                row = {"lease_id": lease.id, "open": True, **asdict(device)}
                connection.execute(sa.insert(lease_places).values(row))
    except IntegrityError as error:
        if "one_open_lease_a_slot" in str(error) or "lease_places.uuid" in str(error):
            raise NoDeviceFree("The GPU was just taken by somebody else. Try again.") from None
        if "one_open_lease_a_server" in str(error) or "leases.user" in str(error):
            raise ServerHasLease() from None
        raise


def get(connection: sa.Connection, lease_id: str, *, lock: bool = False) -> Lease:
    """One lease. ``lock`` keeps others from changing it until the transaction ends.

    Raises UnknownLease.
    """
    found = _select(connection, leases.c.id == lease_id, lock=lock)
    if not found:
        raise UnknownLease(lease=lease_id)
    return found[0]


def open_of(connection: sa.Connection, server: ServerRef) -> Lease | None:
    """The open lease of a server, if there is one."""
    mine = (leases.c.user == server.user) & (leases.c.server_name == server.name)
    found = _select(connection, mine & OPEN_LEASE)
    return found[0] if found else None


def open_leases(connection: sa.Connection) -> list[Lease]:
    """All open leases, oldest first."""
    return _select(connection, OPEN_LEASE)


def of_account(connection: sa.Connection, account: str | None, limit: int = 50) -> list[Lease]:
    """The newest leases of an account (None: of everybody), newest first."""
    where = sa.true() if account is None else leases.c.account == account
    return _select(connection, where, newest=limit)


def held(connection: sa.Connection, account: str) -> int:
    """Microcredits set aside by the account's open leases."""
    left = leases.c.hold - leases.c.charged
    total = sa.func.coalesce(sa.func.sum(sa.case((left > 0, left), else_=0)), 0)
    query = sa.select(total).where(leases.c.account == account, OPEN_LEASE)
    return int(connection.execute(query).scalar_one())


def update(connection: sa.Connection, lease_id: str, **values: Any) -> None:
    """Change fields of an open lease."""
    if isinstance(values.get("state"), LeaseState):
        values["state"] = values["state"].value
    connection.execute(sa.update(leases).where(leases.c.id == lease_id).values(values))


def end(connection: sa.Connection, lease_id: str, at: datetime, reason: str, charged: int) -> None:
    """Close a lease and free its places."""
    ended = LeaseState.ENDED
    update(connection, lease_id, state=ended, ended_at=at, end_reason=reason, charged=charged)
    connection.execute(
        sa.update(lease_places).where(lease_places.c.lease_id == lease_id).values(open=False)
    )


def _select(
    connection: sa.Connection,
    where: sa.ColumnElement[bool],
    *,
    lock: bool = False,
    newest: int = 0,
) -> list[Lease]:
    query = sa.select(leases).where(where).order_by(leases.c.granted_at, leases.c.id)
    if newest:
        query = sa.select(leases).where(where)
        query = query.order_by(leases.c.granted_at.desc(), leases.c.id).limit(newest)
    if lock:
        query = query.with_for_update()
    rows = connection.execute(query).mappings().all()
    places = _places(connection, [row["id"] for row in rows])
    return [_lease(row, places.get(row["id"], [])) for row in rows]


def _places(connection: sa.Connection, ids: Iterable[str]) -> dict[str, list[LeasedDevice]]:
    found: dict[str, list[LeasedDevice]] = {}
    wanted = list(ids)
    for start in range(0, len(wanted), 500):  # SQLite limits the number of parameters
        some = wanted[start : start + 500]
        query = sa.select(lease_places).where(lease_places.c.lease_id.in_(some))
        for row in connection.execute(query.order_by(lease_places.c.index)).mappings():
            fields = {name: row[name] for name in LeasedDevice.__dataclass_fields__}
            found.setdefault(row["lease_id"], []).append(LeasedDevice(**fields))
    return found


def _row(lease: Lease) -> dict[str, Any]:
    row = {
        name: getattr(lease, name)
        for name in Lease.__dataclass_fields__
        if name not in ("server", "devices")
    }
    row |= {"user": lease.server.user, "server_name": lease.server.name}
    row["state"] = lease.state.value
    return row


def _lease(row: Any, places: list[LeasedDevice]) -> Lease:
    fields = {name: row[name] for name in row if name not in ("user", "server_name")}
    fields["state"] = LeaseState(fields["state"])
    server = ServerRef(row["user"], row["server_name"])
    return Lease(server=server, devices=tuple(places), **fields)
