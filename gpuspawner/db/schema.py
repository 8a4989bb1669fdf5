"""The database schema: tables, indexes, and constraints that forbid the impossible.

* one open lease for each (device, slot) and one for each server: partial unique indexes;
* one share of a device for each member: likewise;
* one waiting ticket for each server: likewise;
* transfers, postings, the audit log and its chain never change: triggers, in the migrations;
* a transfer's idempotency key is unique;
* an occurrence of a refill is granted once: a primary key.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from fractions import Fraction
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    false,
    literal_column,
    text,
)

from ..core.units import DeviceCount


class UTCDateTime(TypeDecorator[datetime]):
    """A timezone-aware time in UTC, to the microsecond, on databases with and without zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Callable[[datetime | None], Any] | None:
        """Write what SQLAlchemy writes into SQLite, four times as fast: a lease writes ten."""
        return as_text if dialect.name == "sqlite" else super().bind_processor(dialect)

    def result_processor(self, dialect: Dialect, coltype: Any) -> Callable[[Any], Any] | None:
        """Read it back the same way: a page reads thousands."""
        return from_text if dialect.name == "sqlite" else super().result_processor(dialect, coltype)

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert a time to UTC."""
        return None if value is None else _in_utc(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """Return a time as aware, in UTC."""
        if value is None:
            return None
        if value.tzinfo is None:
            return value.replace(tzinfo=timezone.utc)
        return value.astimezone(timezone.utc)


_newest: tuple[datetime | None, str] = (None, "")


def as_text(value: datetime | None) -> str | None:
    """Format as SQLAlchemy's own type for SQLite does: ``2026-11-01 12:00:00.000000``.

    The newest text is kept, because a transaction writes the same moment several times.
    """
    global _newest
    if value is None:
        return None
    at, text = _newest
    if value != at:
        utc = value if value.tzinfo is timezone.utc else _in_utc(value)
        text = utc.isoformat(" ", "microseconds")[:26]  # without its +00:00
        _newest = value, text
    return text


def from_text(value: str | None) -> datetime | None:
    """Parse what :func:`as_text` wrote."""
    return None if value is None else datetime.fromisoformat(value + "+00:00")


def _in_utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("times in the store carry a time zone")
    return value.astimezone(timezone.utc)


class ExactPart(TypeDecorator[DeviceCount]):
    """A number of devices as text, such as ``1`` or ``1/7``, which a float would not keep."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: DeviceCount | None, dialect: Dialect) -> str | None:
        """Write it as a fraction."""
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> DeviceCount | None:
        """Read it back."""
        return None if value is None else _exact_part(value)


@lru_cache(maxsize=256)
def _exact_part(value: str) -> DeviceCount:
    return Fraction(value) if "/" in value else int(value)


def _part() -> Column[DeviceCount]:
    """Return the column for how much of a GPU a device is."""
    return Column("part", ExactPart, nullable=False, default=1, server_default=text("'1'"))


metadata = MetaData()

MOST = 2**62
"""The largest balance of an account, in microcredits, in either direction."""

# SQLite generates ids only for INTEGER primary keys.
_Id = BigInteger().with_variant(Integer, "sqlite")


def _partial(
    name: str, condition: ColumnElement[bool], *columns: Column[Any], unique: bool = False
) -> Index:
    """Declare an index of the rows that match a condition, for both databases."""
    where = condition
    return Index(name, *columns, unique=unique, sqlite_where=where, postgresql_where=where)


def _words(name: str) -> Column[str]:
    return Column(name, Text, nullable=False, server_default=text("''"))


def _number(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default=text("0"))


def _figure(name: str) -> Column[int]:
    return Column(name, BigInteger)


devices = Table(
    "devices",
    metadata,
    Column("uuid", Text, primary_key=True),
    Column("index", Integer, nullable=False),
    Column("model", Text, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("pci_bus_id", Text, nullable=False, default=""),
    Column("parent_uuid", Text),
    _part(),
    Column("compute_mode", Text, nullable=False, default="default"),
    Column("slots", Integer, nullable=False, default=1),
    Column("reserved_for", Text, nullable=False, default="[]", server_default=text("'[]'")),
    Column("lent", Boolean, nullable=False, default=False, server_default=false()),
    Column("status", Text, nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("processes", Text, nullable=False, default="[]"),
    Column("held_bytes", BigInteger, nullable=False, default=0, server_default=text("0")),
    Column("source", Text, nullable=False, default=""),
    Column("observed_at", UTCDateTime, nullable=False),
    CheckConstraint("slots >= 1", name="devices_have_slots"),
)
Index("devices_by_parent", devices.c.parent_uuid)

accounts = Table(
    "accounts",
    metadata,
    Column("name", Text, primary_key=True),
    Column("balance", BigInteger, nullable=False, default=0),
    Column("opened_at", UTCDateTime, nullable=False),
    # Beyond 64 bits SQLite would silently use a float, and lose microcredits.
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
    # When the server responded or was adopted; NULL if that is when it was started.
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
    # Over how many days of UTC its totals are spread; NULL until it is ended and added up.
    Column("days", Integer),
    Column("preemptible", Boolean, nullable=False, default=False, server_default=false()),
    Column("yields_at", UTCDateTime),
    # What is reserved for it of the host's memory and CPU until it ends.
    Column("host_memory_bytes", BigInteger, nullable=False, default=0, server_default=text("0")),
    Column("host_milli_cpus", BigInteger, nullable=False, default=0, server_default=text("0")),
    CheckConstraint("state IN ('granted', 'running', 'ended')", name="leases_state"),
    CheckConstraint("(state = 'ended') = (ended_at IS NOT NULL)", name="leases_end"),
    CheckConstraint("rate >= 0 AND hold >= 0 AND charged >= 0", name="leases_amounts"),
)
# Literals instead of parameters, so that a partial index matches whatever the values are.
OPEN_LEASE = leases.c.state != literal_column("'ended'")
_partial("one_open_lease_a_server", OPEN_LEASE, leases.c.user, leases.c.server_name, unique=True)
Index("leases_by_account", leases.c.account, leases.c.granted_at)
Index("leases_by_user", leases.c.user, leases.c.granted_at)
Index("leases_by_end", leases.c.ended_at, leases.c.started_at)
Index("leases_by_grant", leases.c.granted_at)
_partial("open_leases", OPEN_LEASE, leases.c.account)
TO_ADD_UP = (leases.c.state == literal_column("'ended'")) & leases.c.days.is_(None)
_partial("leases_to_add_up", TO_ADD_UP, leases.c.id)
LONG_LEASE = leases.c.days > literal_column("2")
_partial("long_leases", LONG_LEASE, leases.c.ended_at, leases.c.started_at)

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
    # How many slots the device had at the grant, and how many of them this row counts for: all that
    # the lease has in the row of the first one, and none in the others.
    Column("slots", Integer, nullable=False, default=1, server_default=text("1")),
    Column("held_slots", Integer, nullable=False, default=1, server_default=text("1")),
    _part(),
    # The member who has a share, in the row of its first slot; NULL for whole devices.
    Column("sharer", Text),
)
# A literal too: from the column itself SQLAlchemy makes "open = 1" for SQLite.
OPEN_PLACE: ColumnElement[bool] = literal_column("open")
_partial("one_open_lease_a_slot", OPEN_PLACE, lease_places.c.uuid, lease_places.c.slot, unique=True)
_partial("one_share_a_member", OPEN_PLACE, lease_places.c.uuid, lease_places.c.sharer, unique=True)
COUNTED_PLACE: ColumnElement[bool] = lease_places.c.held_slots > literal_column("0")
"""Selects one row for each device of a lease."""

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
    Column("since", UTCDateTime),
    Column("ended_at", UTCDateTime),
    Column("outcome", Text, nullable=False, default=""),
    Column("end_reason", Text, nullable=False, default=""),
    Column("lease_id", Text, ForeignKey("leases.id")),
    Column("when_dry", Text, nullable=False, default="stop", server_default=text("'stop'")),
    Column("overdraft", BigInteger, nullable=False, default=0, server_default=text("0")),
    Column("estimated_at", UTCDateTime),
    Column("estimate_low", UTCDateTime),
    Column("estimate_likely", UTCDateTime),
    Column("estimate_high", UTCDateTime),
    CheckConstraint("state IN ('waiting', 'ended')", name="tickets_state"),
    CheckConstraint("(state = 'ended') = (ended_at IS NOT NULL)", name="tickets_end"),
    CheckConstraint("(state = 'ended') = (outcome != '')", name="tickets_outcome"),
)
OPEN_TICKET = tickets.c.state == literal_column("'waiting'")
_partial(
    "one_open_ticket_a_server", OPEN_TICKET, tickets.c.user, tickets.c.server_name, unique=True
)

runs = Table(
    "runs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("user", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("title", Text, nullable=False),
    Column("work", Text, nullable=False),
    Column("options", Text, nullable=False),
    Column("requeue", Boolean, nullable=False),
    Column("restarts", Integer, nullable=False),
    Column("after_lease", Text, nullable=False),
    Column("created_at", UTCDateTime, nullable=False),
    Column("ended_at", UTCDateTime),
    Column("outcome", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("exit_code", Integer),
    Column("preemptible", Boolean, nullable=False, default=False, server_default=false()),
    Column("preemptions", Integer, nullable=False, default=0, server_default=text("0")),
    Column("sweep", Text),
    Column("at_most", Integer),
    # When a run of a sweep was allowed to join the queue. Null for others, which need no leave.
    Column("admitted_at", UTCDateTime),
    CheckConstraint("outcome IN ('', 'done', 'failed', 'stopped')", name="runs_outcome"),
    CheckConstraint("(outcome != '') = (ended_at IS NOT NULL)", name="runs_end"),
)
OPEN_RUN = runs.c.ended_at.is_(None)
_partial("one_run_a_key", literal_column("key != ''"), runs.c.user, runs.c.key, unique=True)
_partial("open_runs", OPEN_RUN, runs.c.created_at)
Index("runs_by_user", runs.c.user, runs.c.created_at)
_partial("runs_by_sweep", runs.c.sweep.is_not(None), runs.c.sweep)

schedules = Table(
    "schedules",
    metadata,
    Column("id", Text, primary_key=True),
    Column("user", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("title", Text, nullable=False),
    Column("cron", Text, nullable=False),
    Column("zone", Text, nullable=False),
    Column("work", Text, nullable=False),
    Column("options", Text, nullable=False),
    Column("requeue", Boolean, nullable=False),
    Column("preemptible", Boolean, nullable=False),
    Column("created_at", UTCDateTime, nullable=False),
    Column("paused", Boolean, nullable=False),
    Column("next_at", UTCDateTime, nullable=False),
    Column("refusal", Text, nullable=False),
)
_partial(
    "one_schedule_a_key",
    literal_column("key != ''"),
    schedules.c.user,
    schedules.c.key,
    unique=True,
)
Index("schedules_by_user", schedules.c.user, schedules.c.created_at)
Index("schedules_by_time", schedules.c.next_at)

schedule_times = Table(
    "schedule_times",
    metadata,
    # One row per time, so that each is submitted once.
    Column("schedule_id", Text, ForeignKey("schedules.id"), primary_key=True),
    Column("due_at", UTCDateTime, primary_key=True),
    # Null until it is submitted; then a reason is empty.
    Column("run_id", Text),
    Column("reason", Text, nullable=False),
)
DUE_TIME = schedule_times.c.run_id.is_(None) & (schedule_times.c.reason == literal_column("''"))
_partial(
    "due_schedule_times",
    literal_column("run_id IS NULL AND reason = ''"),
    schedule_times.c.due_at,
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
    # True if it is neither a charge nor a settlement of a lease: its times do not tell it.
    Column("apart", Boolean, nullable=False, default=False, server_default=false()),
    # In the last posting of a transfer: its hash together with the previous link. See
    # db/hash_chain.py.
    Column("link", Text),
)
APART: ColumnElement[bool] = literal_column("postings.apart")
_partial("postings_apart", literal_column("apart"), postings.c.account, postings.c.id)
Index("postings_by_account", postings.c.account, postings.c.id)
Index("postings_by_transfer", postings.c.transfer_id)

closures = Table(
    "closures",
    metadata,
    # "granting" (maintenance), or a device's UUID: no new leases on it.
    Column("subject", Text, primary_key=True),
    Column("at", UTCDateTime, nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", Text, nullable=False, default=""),
)

mig_changes = Table(
    "mig_changes",
    metadata,
    # A GPU whose MIG layout is being changed, or whose change was interrupted or failed.
    Column("gpu_uuid", Text, primary_key=True),
    Column("layout", Text, nullable=False),
    Column("started_at", UTCDateTime, nullable=False),
    # Written again before each command; an old time means that nobody works on it.
    Column("stepped_at", UTCDateTime, nullable=False),
    # The process that makes the change; see gpuspawner.core.processes.
    Column("worker", Text, nullable=False),
    # Why it stopped; empty while it goes on.
    _words("failure"),
)

mig_instances = Table(
    "mig_instances",
    metadata,
    # The GPU instances that gpuspawner makes, has made, and is about to destroy: written before
    # each of that is done. An instance without a row here is never touched.
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("gpu_uuid", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("profile", Text, nullable=False),
    Column("profile_id", Integer, nullable=False),
    # In slices of the GPU's memory.
    Column("start", Integer, nullable=False),
    Column("size", Integer, nullable=False),
    # The driver's number of the instance, and the UUID of its MIG device, once known.
    Column("instance_id", Integer),
    _words("uuid"),
    # Instances do not outlive the boot in which they were made.
    Column("boot_id", Text, nullable=False),
    CheckConstraint("state IN ('wanted', 'begun', 'made', 'unwanted')", name="mig_instances_state"),
)
_partial(
    "one_mig_instance_a_place",
    mig_instances.c.state != literal_column("'unwanted'"),
    mig_instances.c.gpu_uuid,
    mig_instances.c.start,
    unique=True,
)

nvml_clients = Table(
    "nvml_clients",
    metadata,
    # A process of ours that has NVML open for long; see gpuspawner.core.processes.
    Column("process", Text, primary_key=True),
    Column("opened_at", UTCDateTime, nullable=False),
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
    # The one hub that may change this database, by its identity.
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("hub", Text, nullable=False),
    Column("machine", Text, nullable=False, default="", server_default=text("''")),
    Column("since", UTCDateTime, nullable=False),
    CheckConstraint("id = 1", name="owner_one"),
)

chain = Table(
    "chain",
    metadata,
    # Seals of audit log entries and of ended leases, each with the previous link.
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
    # JSON, for the admin's command.
    Column("facts", Text, nullable=False, default="{}"),
    Column("at", UTCDateTime, nullable=False),
    Column("sent_at", UTCDateTime),
    Column("tries", Integer, nullable=False, default=0),
    Column("error", Text, nullable=False, default=""),
)
UNSENT = notices.c.sent_at.is_(None)
_partial("notices_unsent", UNSENT, notices.c.id)
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
    # The account that pays for a member who does not choose one.
    Column("user", Text, primary_key=True),
    Column("account", Text, ForeignKey("accounts.name"), nullable=False),
    Column("at", UTCDateTime, nullable=False),
)

lots = Table(
    "lots",
    metadata,
    # Credits that expire: the grant that created them, and what was taken back at their end.
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
_partial("open_lots", OPEN_LOT, lots.c.ends_at)

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
    # The occurrence that is granted next; NULL if there is no other.
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
    # Rates set by admins, which go before the configuration's. Removed ones stay recorded.
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


batch_jobs = Table(
    "batch_jobs",
    metadata,
    # Cluster, number and start: numbers can repeat after a reset.
    Column("id", Text, primary_key=True),
    Column("cluster", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column("name", Text, nullable=False),
    # The user on the nodes; member and account only if that is a member of ours.
    Column("user", Text, nullable=False),
    Column("member", Text),
    Column("account", Text, ForeignKey("accounts.name")),
    # Microcredits per hour for all its devices, and the devices in words.
    Column("rate", BigInteger, nullable=False),
    Column("devices", Text, nullable=False),
    Column("started_at", UTCDateTime, nullable=False),
    Column("ended_at", UTCDateTime),
    _number("seconds"),
    _number("charged"),
    # How many transfers charged it.
    Column("entries", Integer, nullable=False, server_default=text("0")),
    CheckConstraint("(member IS NULL) = (account IS NULL)", name="batch_jobs_member"),
    CheckConstraint("account IS NOT NULL OR charged = 0", name="batch_jobs_account"),
    CheckConstraint("rate >= 0 AND seconds >= 0 AND charged >= 0", name="batch_jobs_amounts"),
)
OPEN_JOB = batch_jobs.c.ended_at.is_(None)
_open: ColumnElement[bool] = literal_column("ended_at IS NULL")
_partial("batch_jobs_open", _open, batch_jobs.c.cluster, batch_jobs.c.started_at)
Index("batch_jobs_by_end", batch_jobs.c.cluster, batch_jobs.c.ended_at)

batch_marks = Table(
    "batch_marks",
    metadata,
    # How far a cluster's jobs were read, and compared with our sessions.
    Column("cluster", Text, primary_key=True),
    Column("since", UTCDateTime, nullable=False),
    Column("until", UTCDateTime, nullable=False),
    Column("audited_until", UTCDateTime, nullable=False),
    CheckConstraint("until >= since", name="batch_marks_until"),
)

member_groups = Table(
    "member_groups",
    metadata,
    # Members' groups as the hub last reported them; only those with a setting or an account.
    Column("user", Text, primary_key=True),
    Column("groups", Text, nullable=False),
    Column("at", UTCDateTime, nullable=False),
)


clock_offsets = Table(
    "clock_offsets",
    metadata,
    # One row for each boot of the machine; columns as in gpuspawner.core.clock.Offset.
    Column("boot_id", Text, primary_key=True),
    Column("offset", BigInteger, nullable=False),
    Column("kept_at", BigInteger, nullable=False),
    Column("version", Integer, nullable=False),
    *map(_number, ("step", "stepped_at", "stepped_after")),
    Column("before", BigInteger),
    Column("measured_at", BigInteger, nullable=False),
    *map(_number, ("moved", "moved_at", "moved_after", "raised")),
)


quota_projects = Table(
    "quota_projects",
    metadata,
    # Never deleted: files on a disk under an id must not become somebody else's.
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("source", Text, nullable=False, unique=True),
)

workspaces = Table(
    "workspaces",
    metadata,
    # A directory of the engine's machine, or the name of a volume.
    Column("source", Text, primary_key=True),
    Column("user", Text, nullable=False),
    Column("seen_at", UTCDateTime, nullable=False),
    Column("quota", BigInteger),
    Column("busy", Text, nullable=False, default="", server_default=text("''")),
)
Index("workspaces_by_user", workspaces.c.user)

folders = Table(
    "folders",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("made_at", UTCDateTime, nullable=False),
    Column("left_at", UTCDateTime),
    Column("deleted_at", UTCDateTime),
)
Index("folders_by_owner", folders.c.owner)

folder_members = Table(
    "folder_members",
    metadata,
    Column("folder_id", Text, ForeignKey("folders.id"), primary_key=True),
    Column("user", Text, primary_key=True),
    Column("write", Boolean, nullable=False),
    Column("invited_by", Text, nullable=False),
    Column("invited_at", UTCDateTime, nullable=False),
    Column("accepted_at", UTCDateTime),
)
Index("folder_members_by_user", folder_members.c.user)


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
    # What the last failed probe reported.
    _words("probe"),
    # Causes, separated by commas.
    _words("accepted"),
    CheckConstraint("verdict IN ('fine', 'watch', 'sick')", name="device_health_verdict"),
    CheckConstraint("(verdict = 'sick') = (fault_at IS NOT NULL)", name="device_health_fault"),
)

sick_leases = Table(
    "sick_leases",
    metadata,
    # What was on a device when it became sick, the first time if there were several.
    Column("lease_id", Text, ForeignKey("leases.id"), primary_key=True),
    Column("uuid", Text, nullable=False),
    _words("cause"),
    _words("reason"),
    Column("fault_at", UTCDateTime, nullable=False),
    Column("told_at", UTCDateTime, nullable=False),
    # When its cost since then was refunded, after its end; and how much, in microcredits.
    Column("settled_at", UTCDateTime),
    _number("refunded"),
    CheckConstraint("refunded >= 0", name="sick_leases_refunded"),
)
UNSETTLED = sick_leases.c.settled_at.is_(None)
_partial("sick_leases_unsettled", literal_column("settled_at IS NULL"), sick_leases.c.lease_id)


roster = Table(
    "roster",
    metadata,
    # Names as in the Hub, in lower case; one entry for each course of a member.
    Column("user", Text, primary_key=True),
    Column("course", Text, primary_key=True),
    _words("groups"),
    _words("mail"),
    Column("starts_at", UTCDateTime),
    Column("ends_at", UTCDateTime),
    Column("listed_at", UTCDateTime, nullable=False),
)

memberships = Table(
    "memberships",
    metadata,
    # One row for everybody who ever signed in as a member.
    Column("user", Text, primary_key=True),
    # True if the roster admits them: then they leave when its entry ends.
    Column("by_roster", Boolean, nullable=False, server_default=false()),
    Column("since", UTCDateTime, nullable=False),
    Column("ended_at", UTCDateTime),
    _words("reason"),
    _words("actor"),
    # When they saw the welcome page.
    Column("welcomed_at", UTCDateTime),
)
ENDED = memberships.c.ended_at.isnot(None)
_partial("former_members", ENDED, memberships.c.user)

renames = Table(
    "renames",
    metadata,
    # Members who were renamed, here and in all their rows; see db/renames.py.
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("at", UTCDateTime, nullable=False),
    Column("actor", Text, nullable=False),
    Column("old", Text, nullable=False),
    Column("new", Text, nullable=False),
    # The newest posting at that time; and those up to it, separated by spaces, that the account of
    # the new name had before.
    Column("posting", BigInteger, nullable=False),
    _words("kept"),
)


totals = Table(
    "totals",
    metadata,
    # Use and cost of ended leases, by one of their names, in a day or a month of UTC.
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
    # Microcredits that came to and went from one of the ledger's own accounts, up to a posting.
    Column("account", Text, ForeignKey("accounts.name"), primary_key=True),
    Column("came", BigInteger, nullable=False),
    Column("went", BigInteger, nullable=False),
    Column("last", BigInteger, nullable=False),
)


device_use = Table(
    "device_use",
    metadata,
    Column("uuid", Text, primary_key=True),
    # 60 or 3600.
    Column("seconds", Integer, primary_key=True),
    Column("since", UTCDateTime, primary_key=True),
    # The lease whose own work it is, on a device that others share; empty for the whole device.
    Column("lease_id", Text, primary_key=True, server_default=text("''")),
    *map(_number, ("samples", "known", "busy", "measured")),
    *map(_number, ("use_sum", "use_max", "memory_max", "powered", "milliwatts_sum")),
    Column("celsius_max", Integer),
    Column("sm_mhz_max", Integer),
    _number("throttle"),
    _number("ecc_errors"),
    # Numbers, separated by commas.
    _words("xids"),
    _number("processes"),
    _number("strangers"),
    _words("error"),
    # True if a minute is included in its hour.
    Column("summed", Boolean, nullable=False, server_default=false()),
    CheckConstraint("seconds IN (60, 3600)", name="device_use_seconds"),
    CheckConstraint("busy <= known AND known <= samples", name="device_use_samples"),
)
TO_SUM = (device_use.c.seconds == literal_column("60")) & (literal_column("NOT summed"))
Index("device_use_by_time", device_use.c.seconds, device_use.c.since)
_partial("device_use_to_sum", TO_SUM, device_use.c.since)

idle = Table(
    "idle",
    metadata,
    # How long the GPUs of an open lease were idle, as remaining idle credit.
    Column("lease_id", Text, ForeignKey("leases.id"), primary_key=True),
    Column("credit", Float, nullable=False),
    # Everything before this time has been judged.
    Column("judged_until", UTCDateTime, nullable=False),
    Column("warned_at", UTCDateTime),
    Column("stops_at", UTCDateTime),
    Column("snoozes", Integer, nullable=False, server_default=text("0")),
)

resource_use = Table(
    "resource_use",
    metadata,
    # What a lease's container used, added up over its restarts. NULL if it was never reported.
    Column("lease_id", Text, ForeignKey("leases.id"), primary_key=True),
    Column("cpu_seconds", Float),
    *map(_figure, ("memory_bytes", "memory_peak_bytes", "memory_limit_bytes")),
    *map(_figure, ("disk_read_bytes", "disk_written_bytes")),
    *map(_figure, ("network_received_bytes", "network_sent_bytes")),
    Column("sampled_at", UTCDateTime),
    _number("memory_kills"),
    # The container of the last sample, and its counters then.
    _words("container_id"),
    Column("last_cpu_seconds", Float),
    *map(_figure, ("last_disk_read_bytes", "last_disk_written_bytes")),
    *map(_figure, ("last_network_received_bytes", "last_network_sent_bytes")),
    # The newest counted end of a program, by the engine's clock.
    _number("last_kill_nanoseconds"),
    Column("told_at", UTCDateTime),
)

environment_use = Table(
    "environment_use",
    metadata,
    # The sums of resource_use by environment, for the metrics.
    Column("environment", Text, primary_key=True),
    Column("cpu_seconds", Float, nullable=False),
    *map(_number, ("disk_read_bytes", "disk_written_bytes")),
    *map(_number, ("network_received_bytes", "network_sent_bytes")),
    _number("memory_kills"),
)
