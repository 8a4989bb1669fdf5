"""What pages and reports tell of the past: statements, receipts, who used what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from itertools import pairwise

import sqlalchemy as sa

from ..ledger import rules
from ..ledger.entries import Transfer
from ..ledger.usage import Kind, Use, kind_of, together, use_of
from ..model import Lease
from ..store import Store, book, leases, search, statements, usage
from ..store.search import Accounts, Leases, Trail
from ..store.statements import Items, Page

KEPT_FOR = timedelta(hours=1)
"""How long what was used in a stretch of the past is remembered: an admin may still give back
what a session cost."""

MOST_KEPT = 200
"""Stretches of time that are remembered."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A session, and some of what it paid."""

    lease: Lease
    items: Items


class Reports:
    """Questions about the past; each one is answered from one consistent view."""

    store: Store
    clock: Callable[[], datetime]

    def statement_page(
        self, account: str, before: int | None = None, limit: int = 50, *, folded: bool = False
    ) -> Page:
        """Lines of an account, newest first; ``folded``: a session's charges as one.

        Raises UnknownAccount.
        """
        read = statements.folded if folded else statements.page
        return self.store.run(lambda connection: read(connection, account, before, limit))

    def statement_pages(self, account: str) -> Iterator[Page]:
        """The whole statement in large pages, newest first, from one consistent view."""
        with self.store.read() as connection:
            yield from statements.every_line(connection, account)

    def receipt(self, lease_id: str, after: int = 0, limit: int = 100) -> Receipt:
        """What a session cost, item by item, oldest first. Raises UnknownLease."""

        def read(connection: sa.Connection) -> Receipt:
            lease = leases.get(connection, lease_id)
            return Receipt(
                lease, statements.items(connection, lease_id, lease.account, after, limit)
            )

        return self.store.run(read)

    def reversal_of(self, transfer_id: str) -> Transfer | None:
        """The transfer by which another one was undone, if it was."""
        key = rules.reversal_key(transfer_id)
        return self.store.run(lambda connection: book.of_key(connection, key))

    def forget_use(self) -> None:
        """What a session of the past cost was changed: add use up anew."""
        with _KEEPING:
            self._kept.clear()

    def find_accounts(
        self,
        text: str = "",
        after: str = "",
        limit: int = 50,
        among: Collection[str] | None = None,
    ) -> Accounts:
        """Members' and groups' accounts with this text in their names, by name."""
        return self.store.run(
            lambda connection: search.find_accounts(connection, text, after, limit, among)
        )

    def find_leases(
        self,
        *,
        user: str | None = None,
        account: str | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> Leases:
        """The newest leases, of a member's servers or paid by an account. Raises UnknownLease."""
        return self.store.run(
            lambda connection: search.find_leases(
                connection, user=user, account=account, before=before, limit=limit
            )
        )

    def find_changes(self, text: str = "", before: int | None = None, limit: int = 50) -> Trail:
        """What admins changed, with this text in it, newest first."""
        return self.store.run(
            lambda connection: search.find_changes(connection, text, before, limit)
        )

    # Who used what.

    def use_of_account(self, account: str, bounds: Sequence[datetime]) -> list[Use]:
        """What an account paid for, between each two of the moments."""
        now = self.clock()
        found = self.store.run(lambda c: usage.of_account(c, account, bounds[0]))
        return [
            _sum(use_of(lease, start, end, now) for lease in found)
            for start, end in pairwise(bounds)
        ]

    def use(self, bounds: Sequence[datetime]) -> list[dict[Kind, Use]]:
        """What was used between each two of the moments, by kind."""
        return [self._use(start, end) for start, end in pairwise(bounds)]

    def _use(self, start: datetime, end: datetime) -> dict[Kind, Use]:
        now = self.clock()
        kept = self._kept
        known = kept.get((start, end))
        if known and now - KEPT_FOR < known[0] <= now:
            return known[1]
        window = self.store.run(lambda connection: usage.window(connection, start, end))
        parts = [(kind_of(x), use_of(x, start, end, now)) for x in window.crossing]
        found = together([*window.inside.items(), *(part for part in parts if any(part[1]))])
        if end <= now and not window.is_open:  # it is over, and nothing of it is open
            with _KEEPING:
                if len(kept) >= MOST_KEPT:
                    kept.pop(next(iter(kept)))
                kept[start, end] = (now, found)
        return found

    @cached_property
    def _kept(self) -> dict[tuple[datetime, datetime], tuple[datetime, dict[Kind, Use]]]:
        return {}


_KEEPING = threading.Lock()


def _sum(uses: Iterable[Use]) -> Use:
    total = Use()
    for use in uses:
        total = total.plus(use)
    return total
