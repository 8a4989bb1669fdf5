"""The places of open leases, as the connection that writes to SQLite knows them.

To read hundreds of them took most of the time of a grant, and between two grants few change. So
they are kept beside the connection on which leases are written, from its last reading on: what it
writes itself is noted here, and whether anybody else wrote, in whatever process, SQLite says. They
are given up with the connection, which a transaction that fails gives back to the pool; the
database's own constraint stays what forbids a second lease of a place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

_KEY = "gpuspawner_open_places"


def known(connection: sa.Connection) -> frozenset[str] | None:
    """The places as texts; None when they are to be read."""
    kept = connection.info.get(_KEY)
    return kept[1] if kept is not None and kept[0] == _version(connection) else None


def remember(connection: sa.Connection, places: frozenset[str]) -> None:
    """These were read just now, in a transaction that goes on."""
    if connection.dialect.name == "sqlite":
        connection.info[_KEY] = (_version(connection), places)


def change(connection: sa.Connection, more: Iterable[str] = (), fewer: Iterable[str] = ()) -> None:
    """These were written just now, on this connection."""
    if (kept := connection.info.get(_KEY)) is not None:
        connection.info[_KEY] = (kept[0], kept[1].difference(fewer).union(more))


def forget(info: Any) -> None:
    """Of a connection that comes from the pool nobody knows how its last transaction ended."""
    info.pop(_KEY, None)


def _version(connection: sa.Connection) -> int:
    """Another number whenever anybody wrote to the database beside this connection."""
    driver: Any = connection.connection.dbapi_connection
    (version,) = driver.execute("PRAGMA data_version").fetchone()
    return int(version)
