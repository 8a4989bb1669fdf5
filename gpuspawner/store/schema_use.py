"""The table of what devices did, minute by minute and hour by hour."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    false,
    literal_column,
    text,
)

from .schema import UTCDateTime, metadata


def _sum(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default=text("0"))


device_use = Table(
    "device_use",
    metadata,
    Column("uuid", Text, primary_key=True),
    # 60 or 3600.
    Column("seconds", Integer, primary_key=True),
    Column("since", UTCDateTime, primary_key=True),
    _sum("samples"),
    _sum("known"),
    _sum("busy"),
    _sum("measured"),
    _sum("use_sum"),
    _sum("use_max"),
    _sum("memory_max"),
    _sum("powered"),
    _sum("milliwatts_sum"),
    Column("celsius_max", Integer),
    Column("sm_mhz_max", Integer),
    _sum("throttle"),
    _sum("ecc_errors"),
    # Numbers with commas between them.
    Column("xids", Text, nullable=False, server_default=text("''")),
    _sum("processes"),
    _sum("strangers"),
    Column("error", Text, nullable=False, server_default=text("''")),
    # Whether a minute is in its hour.
    Column("summed", Boolean, nullable=False, server_default=false()),
    CheckConstraint("seconds IN (60, 3600)", name="device_use_seconds"),
    CheckConstraint("busy <= known AND known <= samples", name="device_use_samples"),
)
TO_SUM = (device_use.c.seconds == literal_column("60")) & (literal_column("NOT summed"))
Index("device_use_by_time", device_use.c.seconds, device_use.c.since)
Index("device_use_to_sum", device_use.c.since, sqlite_where=TO_SUM, postgresql_where=TO_SUM)

idle = Table(
    "idle",
    metadata,
    # How long the GPUs of an open lease have rested, as credit that is left.
    Column("lease_id", Text, ForeignKey("leases.id"), primary_key=True),
    Column("credit", Float, nullable=False),
    # What began before this is judged.
    Column("judged_until", UTCDateTime, nullable=False),
    Column("warned_at", UTCDateTime),
    Column("stops_at", UTCDateTime),
    Column("snoozes", Integer, nullable=False, server_default=text("0")),
)
