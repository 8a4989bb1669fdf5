"""The tables of totals, which reports and metrics read instead of all leases and postings."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Table, Text

from .schema import UTCDateTime, metadata

totals = Table(
    "totals",
    metadata,
    # What ended leases used and cost, by one of their names, in a day or a month of UTC.
    Column("by", Text, primary_key=True),
    Column("span", Text, primary_key=True),
    Column("since", UTCDateTime, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("micros", BigInteger, nullable=False),
    Column("cost", BigInteger, nullable=False),
    Column("sessions", BigInteger, nullable=False),
    CheckConstraint("span IN ('day', 'month', 'ever')", name="totals_span"),
)

moved = Table(
    "moved",
    metadata,
    # Microcredits that came to and went from an account of the ledger's own, up to a posting.
    Column("account", Text, ForeignKey("accounts.name"), primary_key=True),
    Column("came", BigInteger, nullable=False),
    Column("went", BigInteger, nullable=False),
    Column("last", BigInteger, nullable=False),
)
