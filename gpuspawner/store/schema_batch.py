"""The tables of jobs that run beside servers, and of what their members may use there."""

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

batch_jobs = Table(
    "batch_jobs",
    metadata,
    # Cluster, number and start: a number can come again after a reset.
    Column("id", Text, primary_key=True),
    Column("cluster", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column("name", Text, nullable=False),
    # Whose it is on the nodes; the member and who pays only if that is a member of ours.
    Column("user", Text, nullable=False),
    Column("member", Text),
    Column("account", Text, ForeignKey("accounts.name")),
    # Microcredits an hour for all that it has, and what that is in words.
    Column("rate", BigInteger, nullable=False),
    Column("devices", Text, nullable=False),
    Column("started_at", UTCDateTime, nullable=False),
    Column("ended_at", UTCDateTime),
    Column("seconds", BigInteger, nullable=False, server_default=text("0")),
    Column("charged", BigInteger, nullable=False, server_default=text("0")),
    # How many transfers that took.
    Column("entries", Integer, nullable=False, server_default=text("0")),
    CheckConstraint("(member IS NULL) = (account IS NULL)", name="batch_jobs_member"),
    CheckConstraint("account IS NOT NULL OR charged = 0", name="batch_jobs_account"),
    CheckConstraint("rate >= 0 AND seconds >= 0 AND charged >= 0", name="batch_jobs_amounts"),
)
OPEN_JOB = batch_jobs.c.ended_at.is_(None)
_open: ColumnElement[bool] = literal_column("ended_at IS NULL")
Index(
    "batch_jobs_open",
    batch_jobs.c.cluster,
    batch_jobs.c.started_at,
    sqlite_where=_open,
    postgresql_where=_open,
)
Index("batch_jobs_by_end", batch_jobs.c.cluster, batch_jobs.c.ended_at)

batch_marks = Table(
    "batch_marks",
    metadata,
    # How far a cluster's jobs were read, and held against our sessions.
    Column("cluster", Text, primary_key=True),
    Column("since", UTCDateTime, nullable=False),
    Column("until", UTCDateTime, nullable=False),
    Column("audited_until", UTCDateTime, nullable=False),
    CheckConstraint("until >= since", name="batch_marks_until"),
)

member_groups = Table(
    "member_groups",
    metadata,
    # The groups of members as the hub said last, of those that have a say or an account.
    Column("user", Text, primary_key=True),
    Column("groups", Text, nullable=False),
    Column("at", UTCDateTime, nullable=False),
)
