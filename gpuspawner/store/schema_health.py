"""The tables of how devices are, and of the leases that were on sick ones."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ColumnElement,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    literal_column,
    text,
)

from .schema import UTCDateTime, metadata


def _words(name: str) -> Column[str]:
    return Column(name, Text, nullable=False, server_default=text("''"))


device_health = Table(
    "device_health",
    metadata,
    Column("uuid", Text, primary_key=True),
    Column("verdict", Text, nullable=False),
    _words("cause"),
    _words("reason"),
    Column("since", UTCDateTime, nullable=False),
    Column("fault_at", UTCDateTime),
    Column("last_at", UTCDateTime),
    Column("falls", Integer, nullable=False, server_default=text("0")),
    Column("fell_at", UTCDateTime),
    Column("probed_at", UTCDateTime),
    # What the last probe that failed said.
    _words("probe"),
    # Causes with commas between them.
    _words("accepted"),
    CheckConstraint("verdict IN ('fine', 'watch', 'sick')", name="device_health_verdict"),
    CheckConstraint("(verdict = 'sick') = (fault_at IS NOT NULL)", name="device_health_fault"),
)

sick_leases = Table(
    "sick_leases",
    metadata,
    # What was on a device when it fell sick, the first time if there were several.
    Column("lease_id", Text, ForeignKey("leases.id"), primary_key=True),
    Column("uuid", Text, nullable=False),
    _words("cause"),
    _words("reason"),
    Column("fault_at", UTCDateTime, nullable=False),
    Column("told_at", UTCDateTime, nullable=False),
    # When what it cost since was given back, after its end; and how much, in microcredits.
    Column("settled_at", UTCDateTime),
    Column("refunded", BigInteger, nullable=False, server_default=text("0")),
    CheckConstraint("refunded >= 0", name="sick_leases_refunded"),
)
UNSETTLED = sick_leases.c.settled_at.is_(None)
_unsettled: ColumnElement[bool] = literal_column("settled_at IS NULL")
Index(
    "sick_leases_unsettled",
    sick_leases.c.lease_id,
    sqlite_where=_unsettled,
    postgresql_where=_unsettled,
)
