"""The table of clock offsets."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Integer, Table, Text, text

from .schema import metadata

clock_offsets = Table(
    "clock_offsets",
    metadata,
    # One row for each boot of the machine; columns as in gpuspawner.clock.Offset.
    Column("boot_id", Text, primary_key=True),
    Column("offset", BigInteger, nullable=False),
    Column("kept_at", BigInteger, nullable=False),
    Column("version", Integer, nullable=False),
    Column("step", BigInteger, nullable=False, server_default=text("0")),
    Column("stepped_at", BigInteger, nullable=False, server_default=text("0")),
    Column("stepped_after", BigInteger, nullable=False, server_default=text("0")),
    Column("before", BigInteger),
    Column("measured_at", BigInteger, nullable=False),
    Column("moved", BigInteger, nullable=False, server_default=text("0")),
    Column("moved_at", BigInteger, nullable=False, server_default=text("0")),
    Column("moved_after", BigInteger, nullable=False, server_default=text("0")),
    Column("raised", BigInteger, nullable=False, server_default=text("0")),
)
