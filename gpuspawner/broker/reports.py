"""What pages and reports tell of the past: statements, receipts, who used what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
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
        return [self._use(start, end)[0] for start, end in pairwise(bounds)]

    def use_by(self, bounds: Sequence[datetime], name: str) -> list[dict[str, Use]]:
        """The same by one of the names of a kind, such as ``user``.

        A stretch that is over is remembered until what it cost is corrected.
        """
        self._must_be_correct()
        return [self._use_by(start, end, name) for start, end in pairwise(bounds)]

    def _use_by(self, start: datetime, end: datetime, name: str) -> dict[str, Use]:
        known = self._kept.get((start, end))
        if known is not None:
            return known[name]
        corrections = self._corrections
        found, over = self._use(start, end)
        sums = {each: _by(found, each) for each in Kind._fields}
        with _KEEPING:
            if over and corrections == self._corrections:
                if len(self._kept) >= MOST_KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[start, end] = sums
        return sums[name]

    def _use(self, start: datetime, end: datetime) -> tuple[dict[Kind, Use], bool]:
        """What was used, and whether that is over: nothing of it is open."""
        now = self.clock()
        window = self.store.run(lambda connection: usage.window(connection, start, end))
        parts = [(kind_of(x), use_of(x, start, end, now)) for x in window.crossing]
        found = together([*window.inside.items(), *(part for part in parts if any(part[1]))])
        return found, end <= now and not window.is_open

    def _must_be_correct(self) -> None:
        """Forget what is remembered if a session of the past was refunded since."""
        corrections = self.store.run(usage.corrections)
        with _KEEPING:
            if corrections != self._corrections:
                self._kept.clear()
                self._corrections = corrections

    _corrections = 0

    @cached_property
    def _kept(self) -> dict[tuple[datetime, datetime], dict[str, dict[str, Use]]]:
        return {}


_KEEPING = threading.Lock()


def _by(found: dict[Kind, Use], name: str) -> dict[str, Use]:
    sums: dict[str, Use] = {}
    for kind, use in found.items():
        key: str = getattr(kind, name)
        sums[key] = sums[key].plus(use) if key in sums else use
    return sums


def _sum(uses: Iterable[Use]) -> Use:
    total = Use()
    for use in uses:
        total = total.plus(use)
    return total
