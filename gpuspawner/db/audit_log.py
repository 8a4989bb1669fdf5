"""The audit log: who changed what, one entry per change, each sealed in the chain."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from . import hash_chain
from .schema import audit

_NOTE = sa.insert(audit).returning(audit.c.id)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An entry of the audit log."""

    at: datetime
    actor: str
    action: str
    subject: str
    detail: str
    id: int = 0


def note(
    connection: sa.Connection,
    *,
    at: datetime,
    actor: str,
    action: str,
    subject: str,
    detail: str = "",
) -> None:
    """Add an entry to the audit log, in the transaction of the change itself."""
    row = {"at": at, "actor": actor, "action": action, "subject": subject, "detail": detail}
    line = connection.execute(_NOTE, row).scalar_one()
    hash_chain.seal_change(connection, line, [*row.values()])
