"""Rows of payers: who pays for a member who does not say it each time."""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa

from .schema import payers

_OF = sa.select(payers.c.account).where(payers.c.user == sa.bindparam("member"))


def get(connection: sa.Connection, user: str) -> str:
    """The account that the member keeps as the usual one; nothing when they keep none."""
    return connection.execute(_OF, {"member": user}).scalar_one_or_none() or ""


def every(connection: sa.Connection) -> dict[str, str]:
    """The usual account of everybody who keeps one."""
    return {
        row[0]: row[1] for row in connection.execute(sa.select(payers.c.user, payers.c.account))
    }


def put(connection: sa.Connection, user: str, account: str, at: datetime) -> None:
    """Keep an account as the usual one; nothing: none any more."""
    connection.execute(sa.delete(payers).where(payers.c.user == user))
    if account:
        connection.execute(sa.insert(payers).values(user=user, account=account, at=at))
