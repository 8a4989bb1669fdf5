"""Every row that names a member, for when the member gets another name.

Each column of text that may have a name in it is in :data:`COLUMNS`, or in :data:`AS_WRITTEN` with
the reason why it stays as it is. A test holds both against the schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from ..db import hash_chain
from ..db import schema as db_schema
from ..db.schema import (
    accounts,
    audit,
    batch_jobs,
    folder_members,
    folders,
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
    tickets,
    transfers,
    workspaces,
)
from ..devices import closures
from ..leases.models import ServerRef
from ..ledger import totals
from ..ledger.models import member_account
from ..ledger.rules import opening_key
from . import repository

NAMES = (
    leases.c.user,
    tickets.c.user,
    notices.c.user,
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
"""Columns with the name of an account; ``accounts.name`` is what they refer to."""

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
"""Columns that are changed in a way of their own."""

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
    "notices.key": "tells two notices apart",
    "notices.title": "words that were shown",
    "notices.body": "words that were shown",
    "notice_choices.address": "the member's own address",
    "roster.mail": "the member's own address",
    "batch_jobs.user": "the name on the nodes, which the cluster's admin gives",
    "closures.reason": "words that were shown",
    "folders.name": "the member's own words",
    "workspaces.busy": "words; a workspace that is being worked on is refused",
}
"""Columns that may have the old name afterwards, and why."""


def is_known(connection: sa.Connection, user: str) -> bool:
    """Return True if there is anything of a member of this name."""
    account = accounts.c.name == member_account(user)
    asked = [sa.exists().where(account), sa.exists().where(roster.c.user == user.lower())]
    columns = (memberships.c.user, leases.c.user, tickets.c.user, folders.c.owner)
    asked += [sa.exists().where(column == user) for column in (*columns, workspaces.c.user)]
    return bool(connection.execute(sa.select(sa.or_(*asked))).scalar_one())


def own_history(connection: sa.Connection, old: str, new: str) -> dict[str, int]:
    """Count what the new name has of its own, so that it is somebody else's, by its kind.

    A membership, the credits that an account opens with, and servers of the old name that were
    found to be renamed at the Hub are nothing of its own.
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
    found = {}
    for kind, query in queries.items():
        number = connection.execute(sa.select(sa.func.count()).select_from(query.subquery()))
        if count := int(number.scalar_one()):
            found[kind] = count
    return found


def count(connection: sa.Connection, user: str) -> dict[str, int]:
    """Count the leases, tickets and shared folders of a member."""
    conditions = {
        "lease": (leases, leases_of(user)),
        "ticket": (tickets, tickets.c.user == user),
        "shared folder": (folders, folders.c.owner == user),
    }
    return {
        kind: int(
            connection.execute(
                sa.select(sa.func.count()).select_from(table).where(condition)
            ).scalar_one()
        )
        for kind, (table, condition) in conditions.items()
    }


def postings_of(connection: sa.Connection, account: str) -> tuple[int, ...]:
    """The ids of an account's postings."""
    query = sa.select(postings.c.id).where(postings.c.account == account).order_by(postings.c.id)
    return tuple(connection.execute(query).scalars())


def newest_posting(connection: sa.Connection) -> int:
    """The id of the newest posting; 0 in an empty ledger."""
    return connection.execute(sa.select(sa.func.max(postings.c.id))).scalar() or 0


def opening_of(connection: sa.Connection, account: str) -> str:
    """The key of the transfer that an account opened with; empty if it opened with nothing."""
    posted = postings.join(transfers, transfers.c.id == postings.c.transfer_id)
    query = sa.select(transfers.c.key).select_from(posted)
    query = query.where(postings.c.account == account, _is_opening(account))
    return connection.execute(query).scalar() or ""


def leases_of(user: str) -> sa.ColumnElement[bool]:
    """Return the condition for leases that name a member or their account."""
    return (leases.c.user == user) | (leases.c.account == member_account(user))


def give(connection: sa.Connection, old: str, new: str, sources: Mapping[str, str]) -> None:
    """Write another name into every row of a member; the caller seals what is sealed.

    Args:
        connection: of a write transaction.
        old: the member's name until now.
        new: the name from now on, which has no history of its own.
        sources: workspaces whose directory has another name now, old path to new path.
    """
    _give_account(connection, member_account(old), member_account(new))
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
    """Move all of an account: its row is made under the new name, and then taken away."""
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
    """Replace part of a key; where the new name has that row already, the old one's goes."""
    table = column.table.alias("other")
    others = [key for key in column.table.primary_key if key is not column]
    same = sa.exists().where(
        table.c[column.name] == new, *(table.c[key.name] == key for key in others)
    )
    connection.execute(sa.delete(column.table).where(column == old, same))
    _replace(connection, column, old, new)


def _join_memberships(connection: sa.Connection, old: str, new: str) -> None:
    before = repository.find_membership(connection, old, lock=True)
    after = repository.find_membership(connection, new, lock=True)
    if before and after:
        welcomed = after.welcomed_at or before.welcomed_at
        since = min(before.since, after.since)
        repository.update_membership(connection, new, since=since, welcomed_at=welcomed)
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
