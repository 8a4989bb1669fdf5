"""Rows of memberships and of the roster, and every row that a member's rename changes.

Each text column that may contain a name is in :data:`COLUMNS`, or in :data:`AS_WRITTEN` with the
reason why it stays. A test compares both with the schema.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ..db import hash_chain
from ..db import schema as db_schema
from ..db.schema import (
    ENDED,
    OPEN_LEASE,
    OPEN_TICKET,
    accounts,
    audit,
    batch_jobs,
    folder_members,
    folders,
    lease_places,
    leases,
    lots,
    member_groups,
    memberships,
    notice_choices,
    notices,
    payers,
    postings,
    quota_projects,
    refills,
    roster,
    runs,
    schedules,
    tickets,
    transfers,
    workspaces,
)
from ..devices import closures
from ..leases.models import ServerRef
from ..ledger import totals
from ..ledger.models import member_account
from ..ledger.rules import opening_key

_INSERT = {
    "sqlite": sqlite.insert(memberships).on_conflict_do_nothing(),
    "postgresql": postgresql.insert(memberships).on_conflict_do_nothing(),
}


@dataclass(frozen=True, slots=True)
class Membership:
    """What is known of somebody who signed in as a member."""

    user: str
    by_roster: bool
    """True if they are a member because of the roster."""
    since: datetime
    """When they first signed in."""
    ended_at: datetime | None
    """When their membership ended; None while they are a member."""
    reason: str
    """Why their membership ended."""
    actor: str
    """Who ended it."""
    welcomed_at: datetime | None
    """When they saw the welcome page."""


def find_membership(
    connection: sa.Connection, user: str, *, lock: bool = False
) -> Membership | None:
    """Return the membership of a user who was ever a member."""
    query = sa.select(memberships).where(memberships.c.user == user)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    return Membership(*row) if row else None


def memberships_of(connection: sa.Connection, users: Collection[str]) -> list[Membership]:
    """Return the memberships of these users, of those who ever had one."""
    query = sa.select(memberships).where(memberships.c.user.in_(users))
    return [Membership(*row) for row in connection.execute(query)]


def begin_membership(connection: sa.Connection, user: str, now: datetime) -> bool:
    """Record that somebody is a member, if unknown. Returns True if it is new."""
    insert = _INSERT[connection.dialect.name].values(user=user, since=now)
    # Of an insert, SQLAlchemy keeps the count for who asks for it only.
    return connection.execute(insert.execution_options(preserve_rowcount=True)).rowcount > 0


def update_membership(connection: sa.Connection, user: str, **values: Any) -> None:
    """Change some columns of a membership."""
    where = memberships.c.user == user
    connection.execute(sa.update(memberships).where(where).values(values))


def count_members(connection: sa.Connection) -> int:
    """Return how many are members now, by the roster or without it."""
    query = sa.select(sa.func.count()).select_from(memberships).where(sa.not_(ENDED))
    return int(connection.execute(query).scalar_one())


def former_members(connection: sa.Connection) -> list[Membership]:
    """Return all former members, by name."""
    query = sa.select(memberships).where(ENDED).order_by(memberships.c.user)
    return [Membership(*row) for row in connection.execute(query)]


def to_compare(connection: sa.Connection, now: datetime) -> list[Membership]:
    """Return memberships that the roster changes.

    Members without a valid roster entry and former ones with one, of those who came by the roster.
    """
    holds = sa.exists().where(
        roster.c.user == sa.func.lower(memberships.c.user),
        sa.or_(roster.c.starts_at.is_(None), roster.c.starts_at <= now),
        sa.or_(roster.c.ends_at.is_(None), roster.c.ends_at > now),
    )
    query = sa.select(memberships).where(
        memberships.c.by_roster, sa.or_(sa.and_(~ENDED, ~holds), sa.and_(ENDED, holds))
    )
    return [Membership(*row) for row in connection.execute(query.order_by(memberships.c.user))]


def members_with_leases(connection: sa.Connection) -> list[str]:
    """Return former members who have a lease or a waiting ticket, by name."""
    held = sa.select(leases.c.user).where(OPEN_LEASE)
    waiting = sa.select(tickets.c.user).where(OPEN_TICKET)
    some = memberships.c.user.in_(sa.union_all(held, waiting))
    query = sa.select(memberships.c.user).where(ENDED, some).order_by(memberships.c.user)
    return list(connection.execute(query).scalars())


_SEPARATOR = "\n"


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """An entry of the roster."""

    user: str
    """In lower case, as JupyterHub's authenticators write names."""
    course: str = ""
    """The course of the membership; empty on a site with a single roster."""
    groups: tuple[str, ...] = ()
    mail: str = ""
    starts_at: datetime | None = None
    """None: without a start."""
    ends_at: datetime | None = None
    """The first moment at which it no longer applies; None: without an end."""

    def holds(self, now: datetime) -> bool:
        """Return True if somebody is a member by this entry."""
        began = self.starts_at is None or self.starts_at <= now
        return began and (self.ends_at is None or now < self.ends_at)


def roster_of_user(connection: sa.Connection, user: str) -> list[RosterEntry]:
    """Return every entry of a name, in any case."""
    query = sa.select(roster).where(roster.c.user == user.lower()).order_by(roster.c.course)
    return [_entry(row) for row in connection.execute(query).mappings()]


def whole_roster(connection: sa.Connection) -> list[RosterEntry]:
    """Return the whole roster, by name and course."""
    query = sa.select(roster).order_by(roster.c.user, roster.c.course)
    return [_entry(row) for row in connection.execute(query).mappings()]


def put_roster(connection: sa.Connection, entries: Iterable[RosterEntry], now: datetime) -> None:
    """Write entries, each replacing the previous one of its name and course."""
    rows = [
        asdict(entry) | {"groups": _SEPARATOR.join(entry.groups), "listed_at": now}
        for entry in entries
    ]
    if rows:
        theirs = (roster.c.user == sa.bindparam("name"), roster.c.course == sa.bindparam("of"))
        names = [{"name": row["user"], "of": row["course"]} for row in rows]
        connection.execute(sa.delete(roster).where(*theirs), names)
        connection.execute(sa.insert(roster), rows)


def _entry(row: sa.RowMapping) -> RosterEntry:
    values = {name: row[name] for name in RosterEntry.__dataclass_fields__}
    groups = tuple(row["groups"].split(_SEPARATOR)) if row["groups"] else ()
    return RosterEntry(**values | {"groups": groups})


NAMES = (
    leases.c.user,
    lease_places.c.sharer,
    tickets.c.user,
    notices.c.user,
    runs.c.user,
    schedules.c.user,
    folders.c.owner,
    folder_members.c.invited_by,
    workspaces.c.user,
    batch_jobs.c.member,
)
"""Columns with a member's name that many rows may have."""

ACCOUNTS = (
    leases.c.account,
    tickets.c.account,
    postings.c.account,
    lots.c.account,
    payers.c.account,
    batch_jobs.c.account,
)
"""Columns with the name of an account; they refer to ``accounts.name``."""

ONE_EACH = (
    payers.c.user,
    notice_choices.c.user,
    member_groups.c.user,
    folder_members.c.user,
    roster.c.user,
)
"""Columns with a member's name that are part of a key: the row of the new name stays."""

FOUND_IN = {
    "accounts.name": "moved with its balance",
    "memberships.user": "joined with the membership of the new name",
    "totals.name": "added to those of the new name",
    "refills.audience": "a list of accounts",
    "closures.actor": "names the server that devices are kept for",
    "workspaces.source": "a directory may be called after its member",
    "quota_projects.source": "the same directory",
}
"""Columns that are changed in a special way."""

COLUMNS = frozenset(
    {*(f"{c.table.name}.{c.name}" for c in (*NAMES, *ACCOUNTS, *ONE_EACH)), *FOUND_IN}
)
"""All columns that have the new name afterwards."""

AS_WRITTEN = {
    "transfers.actor": "who did it, by the name of that time, and sealed",
    "transfers.reason": "words that were shown, and sealed",
    "transfers.key": "tells two transfers apart, and is sealed",
    "audit.actor": "who did it, by the name of that time, and sealed",
    "audit.subject": "what it was done to, by the name of that time, and sealed",
    "audit.detail": "words, and sealed",
    "renames.old": "what it says",
    "renames.new": "what it says",
    "renames.actor": "who did it, by the name of that time, and sealed",
    "rates.actor": "who did it, by the name of that time",
    "refills.made_by": "who did it, by the name of that time",
    "memberships.actor": "who did it, by the name of that time",
    "memberships.reason": "words that were shown",
    "leases.end_reason": "words that were shown",
    "tickets.end_reason": "words that were shown",
    "tickets.options": "what the member sent with the request",
    "schedules.refusal": "words that were shown",
    "schedule_times.reason": "words that were shown",
    "notices.key": "tells two notices apart",
    "notices.title": "words that were shown",
    "notices.body": "words that were shown",
    "notices.facts": "what the admin's command was told",
    "notice_choices.address": "the member's own address",
    "roster.mail": "the member's own address",
    "batch_jobs.user": "the name on the nodes, which the cluster's admin gives",
    "closures.reason": "words that were shown",
    "folders.name": "the member's own words",
    "workspaces.busy": "words; a workspace that is being worked on is refused",
}
"""Columns that may still have the old name afterwards, and why."""


def is_known(connection: sa.Connection, user: str) -> bool:
    """Return True if anything is known of a member with this name."""
    account = accounts.c.name == member_account(user)
    asked = [sa.exists().where(account), sa.exists().where(roster.c.user == user.lower())]
    columns = (memberships.c.user, leases.c.user, tickets.c.user, folders.c.owner)
    asked += [sa.exists().where(column == user) for column in (*columns, workspaces.c.user)]
    return bool(connection.execute(sa.select(sa.or_(*asked))).scalar_one())


def own_history(connection: sa.Connection, old: str, new: str) -> dict[str, int]:
    """Count by kind what belongs to the new name itself, and so to another person.

    A membership, opening credits, and servers of the old name that were found renamed at the Hub do
    not count.
    """
    account = member_account(new)
    followed = sa.exists().where(
        audit.c.action == "renamed",
        audit.c.subject == old,
        audit.c.detail.startswith(sa.literal("lease ") + leases.c.id + ":"),
    )
    mine = (leases.c.user == new) & (leases.c.account != member_account(old)) & ~followed
    posted = postings.join(transfers, transfers.c.id == postings.c.transfer_id)
    queries = {
        "lease": sa.select(leases.c.id).where(mine | (leases.c.account == account)),
        "ticket": sa.select(tickets.c.id).where(tickets.c.user == new),
        "job": sa.select(batch_jobs.c.id).where(batch_jobs.c.member == new),
        "shared folder": sa.select(folders.c.id).where(folders.c.owner == new),
        "entry in the ledger": sa.select(postings.c.id)
        .select_from(posted)
        .where(postings.c.account == account, ~_is_opening(account)),
    }
    return {kind: count for kind, count in _count(connection, queries).items() if count}


def count_belongings(connection: sa.Connection, user: str) -> dict[str, int]:
    """Count the leases, tickets and shared folders of a member."""
    queries = {
        "lease": sa.select(leases.c.id).where(leases_of(user)),
        "ticket": sa.select(tickets.c.id).where(tickets.c.user == user),
        "shared folder": sa.select(folders.c.id).where(folders.c.owner == user),
    }
    return _count(connection, queries)


def _count(connection: sa.Connection, queries: Mapping[str, sa.Select[Any]]) -> dict[str, int]:
    numbers = {
        kind: sa.select(sa.func.count()).select_from(query.subquery())
        for kind, query in queries.items()
    }
    return {kind: connection.execute(number).scalar_one() for kind, number in numbers.items()}


def postings_of(connection: sa.Connection, account: str) -> tuple[int, ...]:
    """Return the ids of an account's postings."""
    query = sa.select(postings.c.id).where(postings.c.account == account).order_by(postings.c.id)
    return tuple(connection.execute(query).scalars())


def newest_posting(connection: sa.Connection) -> int:
    """Return the id of the newest posting; 0 in an empty ledger."""
    return connection.execute(sa.select(sa.func.max(postings.c.id))).scalar() or 0


def opening_of(connection: sa.Connection, account: str) -> str:
    """Return the key of an account's opening grant; empty if it had none."""
    posted = postings.join(transfers, transfers.c.id == postings.c.transfer_id)
    query = sa.select(transfers.c.key).select_from(posted)
    query = query.where(postings.c.account == account, _is_opening(account))
    return connection.execute(query).scalar() or ""


def leases_of(user: str) -> sa.ColumnElement[bool]:
    """Return the condition for leases that name a member or their account."""
    return (leases.c.user == user) | (leases.c.account == member_account(user))


def give(connection: sa.Connection, old: str, new: str, sources: Mapping[str, str]) -> None:
    """Write the new name into every row of a member; the caller seals what is sealed.

    ``sources``: workspaces whose directory is renamed, old path to new path.
    """
    _give_account(connection, member_account(old), member_account(new))
    # Both names may have used the same key; it matters in the minute of its submission.
    for table in (runs, schedules):
        connection.execute(sa.update(table).where(table.c.user == old).values(key=""))
    # The hub's queue reads a waiting run's ticket again if its version is another.
    waiting = OPEN_TICKET & (tickets.c.user == old)
    again = sa.update(tickets).where(waiting).values(version=tickets.c.version + 1)
    connection.execute(again)
    for column in NAMES:
        _replace(connection, column, old, new)
    _join_memberships(connection, old, new)
    for column in ONE_EACH:
        in_small = column is roster.c.user
        _replace_keys(connection, column, *((old.lower(), new.lower()) if in_small else (old, new)))
    totals.rename(connection, "user", old, new)
    totals.rename(connection, "account", member_account(old), member_account(new))
    _rename_in_audiences(connection, member_account(old), member_account(new))
    _rename_kept_devices(connection, old, new)
    for before, after in sources.items():
        for table in (workspaces, quota_projects):
            connection.execute(sa.delete(table).where(table.c.source == after))
            _replace(connection, table.c.source, before, after)


def _is_opening(account: str) -> sa.ColumnElement[bool]:
    return transfers.c.key.startswith(opening_key(account), autoescape=True)


def _replace(connection: sa.Connection, column: sa.Column[Any], old: str, new: str) -> None:
    change = sa.update(column.table).where(column == old).values({column.name: new})
    connection.execute(change)


def _give_account(connection: sa.Connection, old: str, new: str) -> None:
    """Move everything of an account: its row is created with the new name, then deleted."""
    row = connection.execute(sa.select(accounts).where(accounts.c.name == old)).mappings().first()
    if row is None:
        return
    there = sa.select(accounts.c.opened_at).where(accounts.c.name == new)
    opened_at = connection.execute(there).scalar()
    if opened_at is None:
        connection.execute(sa.insert(accounts), {**row, "name": new})
    else:
        changes = {"balance": accounts.c.balance + row["balance"]}
        changes["opened_at"] = min(opened_at, row["opened_at"])
        connection.execute(sa.update(accounts).where(accounts.c.name == new).values(changes))
    with hash_chain.not_append_only(connection):
        for column in ACCOUNTS:
            _replace(connection, column, old, new)
    connection.execute(sa.delete(accounts).where(accounts.c.name == old))


def _replace_keys(connection: sa.Connection, column: sa.Column[Any], old: str, new: str) -> None:
    """Replace part of a key; if the new name has that row already, the old row is deleted."""
    table = column.table.alias("other")
    others = [key for key in column.table.primary_key if key is not column]
    same = sa.exists().where(
        table.c[column.name] == new, *(table.c[key.name] == key for key in others)
    )
    connection.execute(sa.delete(column.table).where(column == old, same))
    _replace(connection, column, old, new)


def _join_memberships(connection: sa.Connection, old: str, new: str) -> None:
    before = find_membership(connection, old, lock=True)
    after = find_membership(connection, new, lock=True)
    if before and after:
        welcomed = after.welcomed_at or before.welcomed_at
        since = min(before.since, after.since)
        update_membership(connection, new, since=since, welcomed_at=welcomed)
        connection.execute(sa.delete(memberships).where(memberships.c.user == old))
    else:
        _replace(connection, memberships.c.user, old, new)


def _rename_in_audiences(connection: sa.Connection, old: str, new: str) -> None:
    for name, text in connection.execute(sa.select(refills.c.id, refills.c.audience)).all():
        audience: Sequence[str] = json.loads(text)
        if old in audience:
            changed = json.dumps(list(dict.fromkeys(new if x == old else x for x in audience)))
            change = sa.update(refills).where(refills.c.id == name).values(audience=changed)
            connection.execute(change)


def _rename_kept_devices(connection: sa.Connection, old: str, new: str) -> None:
    for closure in closures.load(connection).values():
        server = closures.kept_for(closure)
        if server is not None and server.user == old:
            actor = closures.keeper(ServerRef(new, server.name))
            change = sa.update(db_schema.closures).where(
                db_schema.closures.c.subject == closure.subject
            )
            connection.execute(change.values(actor=actor))
