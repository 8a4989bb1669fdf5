"""The tables. What must never be is forbidden here, and not only avoided in Python.

* one open lease for each (device, slot) and one for each server: partial unique indexes;
* one waiting ticket for each server: the same;
* transfers, postings, the audit trail and its chain never change: triggers, in the migrations;
* a transfer's idempotency key is unique;
* an occurrence of a refill is given once: a primary key.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    false,
    literal_column,
    text,
)

from .times import UTCDateTime as UTCDateTime

metadata = MetaData()

MOST = 2**62
"""The greatest balance of an account, in microcredits, either way."""

# SQLite gives ids by itself only to INTEGER primary keys.
_Id = BigInteger().with_variant(Integer, "sqlite")

devices = Table(
    "devices",
    metadata,
    Column("uuid", Text, primary_key=True),
    Column("index", Integer, nullable=False),
    Column("model", Text, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("pci_bus_id", Text, nullable=False, default=""),
    Column("parent_uuid", Text),
    Column("compute_mode", Text, nullable=False, default="default"),
    Column("slots", Integer, nullable=False, default=1),
    Column("status", Text, nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("processes", Text, nullable=False, default="[]"),
    Column("held_bytes", BigInteger, nullable=False, default=0, server_default=text("0")),
    Column("source", Text, nullable=False, default=""),
    Column("observed_at", UTCDateTime, nullable=False),
    CheckConstraint("slots >= 1", name="devices_have_slots"),
)

accounts = Table(
    "accounts",
    metadata,
    Column("name", Text, primary_key=True),
    Column("balance", BigInteger, nullable=False, default=0),
    Column("opened_at", UTCDateTime, nullable=False),
    # Beyond 64 bits SQLite would go on with a float, and lose microcredits without a word.
    CheckConstraint(f"balance BETWEEN {-MOST} AND {MOST}", name="accounts_balance"),
)

leases = Table(
    "leases",
    metadata,
    Column("id", Text, primary_key=True),
    Column("user", Text, nullable=False),
    Column("server_name", Text, nullable=False, default=""),
    Column("account", Text, ForeignKey("accounts.name"), nullable=False),
    Column("environment", Text, nullable=False, default=""),
    Column("rate", BigInteger, nullable=False),
    Column("hold", BigInteger, nullable=False),
    Column("charged", BigInteger, nullable=False, default=0),
    Column("state", Text, nullable=False),
    Column("engine", Text, nullable=False, default=""),
    Column("engine_ref", Text, nullable=False, default=""),
    Column("engine_id", Text, nullable=False, default="", server_default=text("''")),
    Column("granted_at", UTCDateTime, nullable=False),
    Column("started_at", UTCDateTime),
    # When the server answered, or was adopted; none where that is when it was started.
    Column("answered_at", UTCDateTime),
    Column("seen_at", UTCDateTime),
    Column("ended_at", UTCDateTime),
    Column("end_reason", Text, nullable=False, default=""),
    Column("warned_at", UTCDateTime),
    Column("group", Text, nullable=False, default="", server_default=text("''")),
    Column("seconds", BigInteger),
    Column("extended", BigInteger, nullable=False, default=0, server_default=text("0")),
    Column("told_minutes", Float),
    Column("ticket_id", Text),
    Column("claim_seconds", BigInteger),
    Column("claimed_at", UTCDateTime),
    Column("outcome", Text, nullable=False, default="", server_default=text("''")),
    Column("when_dry", Text, nullable=False, default="stop", server_default=text("'stop'")),
    Column("overdraft", BigInteger, nullable=False, default=0, server_default=text("0")),
    Column("waived", BigInteger, nullable=False, default=0, server_default=text("0")),
    Column("refunded", BigInteger, nullable=False, default=0, server_default=text("0")),
    Column("told_dry", Float),
    # Over how many days of UTC its totals are spread; none until it has ended and was added up.
    Column("days", Integer),
    CheckConstraint("state IN ('granted', 'running', 'ended')", name="leases_state"),
    CheckConstraint("(state = 'ended') = (ended_at IS NOT NULL)", name="leases_end"),
    CheckConstraint("rate >= 0 AND hold >= 0 AND charged >= 0", name="leases_amounts"),
)
# Literals, not parameters: so that a partial index fits whatever the values are.
OPEN_LEASE = leases.c.state != literal_column("'ended'")
Index(
    "one_open_lease_a_server",
    leases.c.user,
    leases.c.server_name,
    unique=True,
    sqlite_where=OPEN_LEASE,
    postgresql_where=OPEN_LEASE,
)
Index("leases_by_account", leases.c.account, leases.c.granted_at)
Index("leases_by_user", leases.c.user, leases.c.granted_at)
Index("leases_by_end", leases.c.ended_at, leases.c.started_at)
Index("leases_by_grant", leases.c.granted_at)
Index("open_leases", leases.c.account, sqlite_where=OPEN_LEASE, postgresql_where=OPEN_LEASE)
TO_ADD_UP = (leases.c.state == literal_column("'ended'")) & leases.c.days.is_(None)
Index("leases_to_add_up", leases.c.id, sqlite_where=TO_ADD_UP, postgresql_where=TO_ADD_UP)
LONG_LEASE = leases.c.days > literal_column("2")
Index(
    "long_leases",
    leases.c.ended_at,
    leases.c.started_at,
    sqlite_where=LONG_LEASE,
    postgresql_where=LONG_LEASE,
)

lease_places = Table(
    "lease_places",
    metadata,
    Column("lease_id", Text, ForeignKey("leases.id"), primary_key=True),
    Column("uuid", Text, primary_key=True),
    Column("slot", Integer, primary_key=True),
    Column("index", Integer, nullable=False),
    Column("model", Text, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("open", Boolean, nullable=False, default=True),
)
# Written out too: of the column itself SQLAlchemy makes "open = 1" for SQLite.
OPEN_PLACE: ColumnElement[bool] = literal_column("open")
Index(
    "one_open_lease_a_slot",
    lease_places.c.uuid,
    lease_places.c.slot,
    unique=True,
    sqlite_where=OPEN_PLACE,
    postgresql_where=OPEN_PLACE,
)

tickets = Table(
    "tickets",
    metadata,
    Column("id", Text, primary_key=True),
    Column("user", Text, nullable=False),
    Column("server_name", Text, nullable=False, default=""),
    Column("group", Text, nullable=False, default=""),
    Column("account", Text, nullable=False, default=""),
    Column("request", Text, nullable=False),
    Column("options", Text, nullable=False, default="{}"),
    Column("engine", Text, nullable=False, default=""),
    Column("seconds", BigInteger),
    Column("priority", Integer, nullable=False, default=0),
    Column("boost", Float, nullable=False, default=0.0),
    Column("position", Integer),
    Column("last", Boolean, nullable=False, default=False),
    Column("version", Integer, nullable=False, default=1),
    Column("state", Text, nullable=False),
    Column("created_at", UTCDateTime, nullable=False),
    Column("ended_at", UTCDateTime),
    Column("outcome", Text, nullable=False, default=""),
    Column("end_reason", Text, nullable=False, default=""),
    Column("lease_id", Text, ForeignKey("leases.id")),
    Column("when_dry", Text, nullable=False, default="stop", server_default=text("'stop'")),
    Column("overdraft", BigInteger, nullable=False, default=0, server_default=text("0")),
    CheckConstraint("state IN ('waiting', 'ended')", name="tickets_state"),
    CheckConstraint("(state = 'ended') = (ended_at IS NOT NULL)", name="tickets_end"),
    CheckConstraint("(state = 'ended') = (outcome != '')", name="tickets_outcome"),
)
OPEN_TICKET = tickets.c.state == literal_column("'waiting'")
Index(
    "one_open_ticket_a_server",
    tickets.c.user,
    tickets.c.server_name,
    unique=True,
    sqlite_where=OPEN_TICKET,
    postgresql_where=OPEN_TICKET,
)

transfers = Table(
    "transfers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("key", Text, nullable=False, unique=True),
    Column("kind", Text, nullable=False),
    Column("at", UTCDateTime, nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("lease_id", Text, ForeignKey("leases.id")),
)
Index("transfers_by_lease", transfers.c.lease_id)

postings = Table(
    "postings",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("transfer_id", Text, ForeignKey("transfers.id"), nullable=False),
    Column("account", Text, ForeignKey("accounts.name"), nullable=False),
    Column("amount", BigInteger, nullable=False),
    # Whether it is no charge of a lease and no settlement of one: what its times do not tell.
    Column("apart", Boolean, nullable=False, default=False, server_default=false()),
    # In the last posting of a transfer: the hash of it and of the transfer before it. See
    # store/chain.py.
    Column("link", Text),
)
APART: ColumnElement[bool] = literal_column("postings.apart")
_apart: ColumnElement[bool] = literal_column("apart")
Index(
    "postings_apart",
    postings.c.account,
    postings.c.id,
    sqlite_where=_apart,
    postgresql_where=_apart,
)
Index("postings_by_account", postings.c.account, postings.c.id)
Index("postings_by_transfer", postings.c.transfer_id)

closures = Table(
    "closures",
    metadata,
    # "granting" (maintenance), or a device's UUID: nobody new on it.
    Column("subject", Text, primary_key=True),
    Column("at", UTCDateTime, nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", Text, nullable=False, default=""),
)

audit = Table(
    "audit",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("at", UTCDateTime, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("detail", Text, nullable=False, default=""),
)

owner = Table(
    "owner",
    metadata,
    # The one hub that may change what is here, by its identity.
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("hub", Text, nullable=False),
    Column("machine", Text, nullable=False, default="", server_default=text("''")),
    Column("since", UTCDateTime, nullable=False),
    CheckConstraint("id = 1", name="owner_one"),
)

chain = Table(
    "chain",
    metadata,
    # Seals of lines of the audit trail and of ended leases, each with that before it.
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("kind", Text, nullable=False),
    Column("ref", Text, nullable=False),
    Column("facts", Text, nullable=False),
    # The newest posting at that time; 0 if there was none.
    Column("posting", BigInteger, nullable=False),
    Column("link", Text, nullable=False),
)
Index("chain_by_ref", chain.c.kind, chain.c.ref)

notices = Table(
    "notices",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("key", Text, nullable=False, unique=True),
    Column("user", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("title", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("at", UTCDateTime, nullable=False),
    Column("sent_at", UTCDateTime),
    Column("tries", Integer, nullable=False, default=0),
    Column("error", Text, nullable=False, default=""),
)
UNSENT = notices.c.sent_at.is_(None)
Index("notices_unsent", notices.c.id, sqlite_where=UNSENT, postgresql_where=UNSENT)
Index("notices_by_user", notices.c.user, notices.c.id)

notice_choices = Table(
    "notice_choices",
    metadata,
    Column("user", Text, primary_key=True),
    Column("channel", Text, primary_key=True),
    Column("address", Text, nullable=False, default=""),
    Column("kinds", Text, nullable=False),
)

payers = Table(
    "payers",
    metadata,
    # Who pays for a member who does not say it each time.
    Column("user", Text, primary_key=True),
    Column("account", Text, ForeignKey("accounts.name"), nullable=False),
    Column("at", UTCDateTime, nullable=False),
)

lots = Table(
    "lots",
    metadata,
    # Credits that end: the grant that gave them, and what was taken back at their end.
    Column("transfer_id", Text, ForeignKey("transfers.id"), primary_key=True),
    Column("account", Text, ForeignKey("accounts.name"), nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("starts_at", UTCDateTime, nullable=False),
    Column("ends_at", UTCDateTime, nullable=False),
    Column("cancelled_at", UTCDateTime),
    Column("closed_at", UTCDateTime),
    Column("taken", BigInteger, nullable=False, default=0),
    Column("takes", Integer, nullable=False, default=0),
    CheckConstraint("ends_at > starts_at", name="lots_end"),
    CheckConstraint("amount > 0 AND taken >= 0 AND taken <= amount", name="lots_amounts"),
)
OPEN_LOT = lots.c.closed_at.is_(None)
Index("lots_by_account", lots.c.account, lots.c.ends_at)
Index("open_lots", lots.c.ends_at, sqlite_where=OPEN_LOT, postgresql_where=OPEN_LOT)

refills = Table(
    "refills",
    metadata,
    Column("id", Text, primary_key=True),
    Column("rule", Text, nullable=False),
    Column("zone", Text, nullable=False),
    Column("starts_at", UTCDateTime, nullable=False),
    Column("mode", Text, nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("cap", BigInteger),
    Column("audience", Text, nullable=False),
    Column("keep_seconds", BigInteger),
    Column("reason", Text, nullable=False),
    Column("made_at", UTCDateTime, nullable=False),
    Column("made_by", Text, nullable=False),
    # The occurrence that is given next; none when there is no other.
    Column("next_at", UTCDateTime),
    Column("ended_at", UTCDateTime),
    CheckConstraint("mode IN ('add', 'top_up')", name="refills_mode"),
    CheckConstraint("amount > 0 AND cap > 0 AND keep_seconds > 0", name="refills_amounts"),
)

refill_runs = Table(
    "refill_runs",
    metadata,
    Column("refill_id", Text, ForeignKey("refills.id"), primary_key=True),
    Column("occurrence", UTCDateTime, primary_key=True),
    Column("at", UTCDateTime, nullable=False),
    Column("accounts", Integer, nullable=False),
    Column("total", BigInteger, nullable=False),
)

rates = Table(
    "rates",
    metadata,
    # An admin's own, before those of the configuration. One that was removed stays written.
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("amount", BigInteger, nullable=False),
    Column("model", Text, nullable=False),
    Column("environment", Text, nullable=False),
    Column("slots", Integer),
    Column("hours", Text, nullable=False, default=""),
    Column("zone", Text, nullable=False),
    Column("since", UTCDateTime, nullable=False),
    Column("set_at", UTCDateTime, nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("removed_at", UTCDateTime),
    CheckConstraint("amount >= 0 AND amount <= 1000000000000", name="rates_amount"),
    CheckConstraint("slots >= 1", name="rates_slots"),
    CheckConstraint("since >= set_at", name="rates_since"),
)
