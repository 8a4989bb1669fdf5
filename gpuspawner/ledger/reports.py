"""Reports about the past for pages and exports: statements, receipts, usage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from ..db import search
from ..db.engine import Store
from ..db.search import Accounts, Leases, Trail
from ..leases import repository as leases_repository
from ..leases.models import Lease
from ..monitoring import repository as monitoring_repository
from . import repository, rules, statements, totals
from .models import Transfer
from .statements import EntryPage, ReceiptItems
from .totals import SystemTotals, TotalUse
from .usage import LeaseUse

MOST_LEFT = 1000
"""How many unsummed ended leases are read one by one before they are added up."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A session, and some of what it paid."""

    lease: Lease
    items: ReceiptItems


class ReportService:
    """Queries about the past; each one is answered from one consistent view."""

    def __init__(self, store: Store, clock: Callable[[], datetime]) -> None:
        self.store = store
        self.clock = clock

    def statement_page(
        self, account: str, before: int | None = None, limit: int = 50, *, folded: bool = False
    ) -> EntryPage:
        """Return lines of an account, newest first; ``folded``: a session's charges as one.

        Raises UnknownAccount.
        """
        read = statements.folded if folded else statements.page
        return self.store.run(lambda connection: read(connection, account, before, limit))

    def receipt(self, lease_id: str, after: int = 0, limit: int = 100) -> Receipt:
        """Return what a session cost, item by item, oldest first. Raises UnknownLease."""
        read = statements.items_of_account
        with self.store.read() as connection:
            lease = leases_repository.get(connection, lease_id)
            return Receipt(lease, read(connection, lease_id, lease.account, after, limit))

    def reversal_of(self, transfer_id: str) -> Transfer | None:
        """Return the transfer that reversed another one, if any."""
        key = rules.reversal_key(transfer_id)
        return self.store.run(lambda connection: repository.of_key(connection, key))

    def find_accounts(
        self,
        text: str = "",
        after: str = "",
        limit: int = 50,
        among: Collection[str] | None = None,
    ) -> Accounts:
        """Return members' and groups' accounts with this text in their names, by name."""
        with self.store.read() as connection:
            return search.find_accounts(connection, text, after, limit, among)

    def find_leases(
        self,
        *,
        user: str | None = None,
        account: str | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> Leases:
        """Return the newest leases of a member's servers or paid by an account.

        Raises UnknownLease.
        """
        with self.store.read() as connection:
            return search.find_leases(
                connection, user=user, account=account, before=before, limit=limit
            )

    def find_changes(self, text: str = "", before: int | None = None, limit: int = 50) -> Trail:
        """Return the admins' changes that contain this text, newest first."""
        with self.store.read() as connection:
            return search.find_changes(connection, text, before, limit)

    # Usage.

    def use_of_account(self, account: str, bounds: Sequence[datetime]) -> list[LeaseUse]:
        """Return what an account paid for between each two times: sessions and batch jobs."""
        found = [_sum(used.values()) for used in self.use_by(bounds, "account", account)]
        with self.store.read() as connection:
            jobs = monitoring_repository.job_use_between(connection, bounds, "account", account)
        beside = (_sum(each.values())._replace(sessions=0) for each in jobs)
        return [use.plus(more) for use, more in zip(found, beside, strict=True)]

    def use_of_jobs(self, bounds: Sequence[datetime], by: str) -> list[dict[str, LeaseUse]]:
        """Return what batch jobs used between each two of the times, by a field of Kind.

        A job counts as a session.
        """
        with self.store.read() as connection:
            return monitoring_repository.job_use_between(connection, bounds, by)

    def use_of_all_jobs(self) -> dict[str, monitoring_repository.JobUse]:
        """Return the use of all batch jobs ever, by model."""
        return self.store.run(monitoring_repository.all_job_use)

    def use_by(
        self, bounds: Sequence[datetime], by: str, name: str | None = None
    ) -> list[dict[str, LeaseUse]]:
        """Return what was used between each two of the times, by a field of Kind such as ``user``.

        With ``name``, only what has this value.
        """
        self._catch_up()
        now = self.clock()
        with self.store.read() as connection:
            return totals.use_between(connection, bounds, by, now, name)

    def until_now(self) -> tuple[SystemTotals, TotalUse, list[Lease]]:
        """Return all credits ever moved, all use of ended leases, and the open leases."""
        self._catch_up()
        now = self.clock()
        with self.store.read() as connection:
            used = totals.all_used(connection, now)
            return totals.all_moved(connection), used, leases_repository.open_leases(connection)

    def add_up(self) -> int:
        """Add some ended leases to the totals and return how many."""
        return self.store.run(totals.add_up, write=True)

    def _catch_up(self) -> None:
        """Add up leases if too many are pending, such as after an upgrade of an old site."""
        if self.store.run(lambda connection: totals.left(connection, MOST_LEFT)) < MOST_LEFT:
            return
        while self.add_up() == totals.LEASES_AT_ONCE:
            pass


def _sum(uses: Iterable[LeaseUse]) -> LeaseUse:
    total = LeaseUse()
    for use in uses:
        total = total.plus(use)
    return total
