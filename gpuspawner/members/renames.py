"""Renames of members, with everything that is theirs.

Everything in the database changes in one transaction. Directories are renamed last, just before it
is committed. So a kill in the middle leaves the database as it was, perhaps with some directories
already renamed; running the same command again finishes the work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from ..core.errors import LedgerError, Refused
from ..core.units import format_credits
from ..db import hash_chain
from ..db.engine import Store
from ..db.hash_chain import Rename
from ..leases import repository as leases_repository
from ..leases.models import Lease, LeaseKind
from ..ledger import repository as ledger_repository
from ..ledger import rules as ledger_rules
from ..ledger.models import check_account, member_account
from ..ledger.service import note
from ..queue import repository as queue_repository
from ..storage import repository as storage_repository
from ..storage.repository import Workspace
from . import repository

NOTHING = "Nothing was changed."


@dataclass(frozen=True, slots=True)
class Belongings:
    """What a rename covers."""

    balance: int
    """Microcredits of the old account; the new account's opening credits are taken back."""
    leases: int
    tickets: int
    folders: int
    workspaces: tuple[Workspace, ...]
    open_leases: tuple[Lease, ...]
    """They already have the new name: the Hub gave it to their servers."""


@dataclass(eq=False)
class RenameService:
    """Renames members."""

    store: Store
    clock: Callable[[], datetime]
    log: logging.Logger

    def belongings(self, old: str, new: str) -> Belongings:
        """Return what a rename would cover. Raises Refused if it is not possible."""
        return self.store.run(lambda connection: self._may_rename(connection, old, new))

    def last_rename(self, old: str, new: str) -> Rename | None:
        """Return a rename of one name to the other, if it is the latest of the old name.

        None if anybody has the old name now.
        """
        with self.store.read() as connection:
            done = hash_chain.last_of(connection, old)
            if done is None or done.new != new or repository.is_known(connection, old):
                return None
            return done

    def rename_member(
        self,
        old: str,
        new: str,
        *,
        actor: str,
        sources: Mapping[str, str] | None = None,
        move: Callable[[], None] = lambda: None,
    ) -> Belongings:
        """Rename a member in everything that is theirs, and return what had the old name.

        Args:
            old: The previous name.
            new: The name at the Hub, which has no history of its own.
            actor: Who does it.
            sources: The workspaces whose directory is renamed, old path to new path.
            move: Renames the directories; called last, before the transaction ends.

        Raises Refused if it is not possible, and what ``move`` raises: then nothing changes.
        """
        now = self.clock()
        with self.store.write() as connection:
            found = self._may_rename(connection, old, new)
            _take_back_opening(connection, new, actor, now)
            kept = repository.postings_of(connection, member_account(new))
            newest = repository.newest_posting(connection)
            repository.give(connection, old, new, sources or {})
            done = hash_chain.insert_rename(
                connection, at=now, actor=actor, old=old, new=new, posting=newest, kept=kept
            )
            hash_chain.seal_rename(connection, done)
            hash_chain.seal_leases(connection, repository.leases_of(new))
            detail = (
                f"{old} is called {new} from now on, with {format_credits(found.balance)} credits, "
                f"{found.leases} leases, {found.tickets} tickets, {found.folders} shared folders "
                f"and {len(found.workspaces)} workspaces"
            )
            note(connection, actor, "rename member", new, detail, now)
            move()
        self.log.info("The member %s is called %s from now on", old, new)
        return found

    # Helpers.

    def _may_rename(self, connection: sa.Connection, old: str, new: str) -> Belongings:
        _must_be_names(old, new)
        if not repository.is_known(connection, old):
            raise Refused(
                f"There is no member {old!r}: `gpuspawner accounts` lists the names. {NOTHING}"
            )
        if own := repository.own_history(connection, old, new):
            what = ", ".join(f"{n} {kind}{'' if n == 1 else 's'}" for kind, n in own.items())
            raise Refused(
                f"{new} has a history of their own ({what}), which would be mixed with that of "
                f"{old}. Choose another name, or move credits with `gpuspawner grant`. {NOTHING}"
            )
        opened = leases_repository.open_leases(connection)
        for lease in opened:
            # The Hub knows no server of a run, so nobody gives its lease the new name before this.
            if lease.server.user == old and lease.server.kind is LeaseKind.SERVER:
                raise Refused(
                    f"The server {lease.server} runs under the name {old} (lease {lease.id}). "
                    "Rename the member at the Hub first and wait for a minute until its lease has "
                    f"the new name, or stop it. {NOTHING}"
                )
        tickets = queue_repository.open_of_member(connection, old)
        if waiting := [each for each in tickets if each.server.kind is LeaseKind.SERVER]:
            raise Refused(
                f"{old} waits in the queue (ticket {waiting[0].id}): wait until it has started, "
                f"or run `gpuspawner queue cancel {waiting[0].id} --reason TEXT`. {NOTHING}"
            )
        # The rename seals them again, which must not hide a change made by hand.
        sealed = repository.leases_of(old) | repository.leases_of(new)
        if problem := next(hash_chain.check_leases(connection, sealed), ""):
            raise Refused(f"`gpuspawner audit` fails: {problem} {NOTHING}")
        theirs = storage_repository.workspaces_of_user(connection, old)
        if busy := next((some for some in theirs if some.busy), None):
            raise Refused(
                f"{busy.source} is being worked on: {busy.busy}. Try again later. {NOTHING}"
            )
        account = ledger_repository.find_account(connection, member_account(old))
        numbers = repository.count_belongings(connection, old)
        return Belongings(
            balance=account.balance if account else 0,
            leases=numbers["lease"],
            tickets=numbers["ticket"],
            folders=numbers["shared folder"],
            workspaces=tuple(theirs),
            open_leases=tuple(lease for lease in opened if lease.server.user == new),
        )


def _take_back_opening(connection: sa.Connection, new: str, actor: str, now: datetime) -> None:
    """Take back the opening grant of the new name's account: it is the same member."""
    opening_key = repository.opening_of(connection, member_account(new))
    if opening := ledger_repository.of_key(connection, opening_key):
        key = ledger_rules.reversal_key(opening.id)
        reason = "the same member had an account under another name"
        undone = ledger_rules.reversal(opening, key=key, at=now, actor=actor, reason=reason)
        ledger_repository.post(connection, undone)


def _must_be_names(old: str, new: str) -> None:
    """Raise Refused for a name that no account can have, and for twice the same name."""
    if old == new:
        raise Refused(f"{old} already has that name. {NOTHING}")
    try:
        check_account(member_account(new))
    except LedgerError:
        raise Refused(f"{new!r} is not a name of a member. {NOTHING}") from None
