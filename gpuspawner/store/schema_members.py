"""The tables of who is a member, and of the roster that says until when."""

from __future__ import annotations

from sqlalchemy import Boolean, Column, Index, Table, Text, false, text

from .schema import UTCDateTime, metadata

roster = Table(
    "roster",
    metadata,
    # Names as the Hub has them, in small letters; one entry for each course of a member.
    Column("user", Text, primary_key=True),
    Column("course", Text, primary_key=True),
    Column("groups", Text, nullable=False, server_default=text("''")),
    Column("mail", Text, nullable=False, server_default=text("''")),
    Column("starts_at", UTCDateTime),
    Column("ends_at", UTCDateTime),
    Column("listed_at", UTCDateTime, nullable=False),
)

memberships = Table(
    "memberships",
    metadata,
    # One row for everybody who ever signed in as a member.
    Column("user", Text, primary_key=True),
    # Whether the roster is what lets them in: then its end is the end.
    Column("by_roster", Boolean, nullable=False, server_default=false()),
    Column("since", UTCDateTime, nullable=False),
    Column("ended_at", UTCDateTime),
    Column("reason", Text, nullable=False, server_default=text("''")),
    Column("actor", Text, nullable=False, server_default=text("''")),
    # When they were shown the welcome page.
    Column("welcomed_at", UTCDateTime),
)
ENDED = memberships.c.ended_at.isnot(None)
Index("former_members", memberships.c.user, sqlite_where=ENDED, postgresql_where=ENDED)
