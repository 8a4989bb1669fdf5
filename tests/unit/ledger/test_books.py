"""The ledger as a whole: real rules and checks; the book that they keep is a dict in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.ledger import checks
from gpuspawner.ledger import rules as ledger_rules
from gpuspawner.ledger.models import SYSTEM_GRANTS, SYSTEM_USAGE, Account, Transfer, member_account
from tests.unit.ledger.books import ANNA, HOUR, T0, lease

rates = st.integers(0, 1000 * MICRO)


def rows_of(transfers: Iterable[Transfer]) -> tuple[checks.PostingRow, ...]:
    return tuple(
        checks.PostingRow(
            **{name: getattr(transfer, name) for name in ("key", "kind", "lease_id")},
            transfer_id=transfer.id,
            account=posting.account,
            amount=posting.amount,
        )
        for transfer in transfers
        for posting in transfer.postings
    )


@dataclass
class Book:
    """Posts each key once, as the store does."""

    transfers: dict[str, Transfer] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    balances: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def post(self, entry: Transfer | None) -> bool:
        """Whether the entry was taken: an empty one or a key seen before is not."""
        if entry is None or entry.key in self.transfers:
            return False
        self.transfers[entry.key] = entry
        for line in entry.postings:
            self.balances[line.account] += line.amount
        return True

    def tick(self, seen: Lease, until: datetime) -> None:
        """A tick that read ``seen``, which may be stale by the time that it posts."""
        due = ledger_rules.charge_due(seen, until)
        if self.leases[seen.id].state is not LeaseState.ENDED and self.post(
            ledger_rules.charge(seen, due, until)
        ):
            self.leases[seen.id] = replace(self.leases[seen.id], charged=seen.charged + due)

    def end(self, lease_id: str, ended_at: datetime, failed: bool = False) -> None:
        seen = self.leases[lease_id]
        due = ledger_rules.settlement(seen, ended_at, failed)
        self.post(ledger_rules.settle(seen, due, ended_at))
        self.leases[lease_id] = replace(
            seen, state=LeaseState.ENDED, ended_at=ended_at, charged=seen.charged + due
        )
        if failed:
            self.failed.add(lease_id)

    def books(self) -> checks.Books:
        held: dict[str, int] = defaultdict(int)
        for item in self.leases.values():
            held[item.account] += item.held
        return checks.Books(
            postings=rows_of(self.transfers.values()),
            accounts=tuple(
                Account(name=name, balance=self.balances[name], held=held[name])
                for name in {*self.balances, *held}
            ),
            leases=tuple(self.leases.values()),
            failed=frozenset(self.failed),
        )


offsets = st.timedeltas(timedelta(seconds=-5), timedelta(days=2))


@given(rates, st.lists(offsets, max_size=12), offsets, st.booleans())
def test_charges_do_not_depend_on_when_the_ticks_run(
    rate: int, ticks: list[timedelta], ended: timedelta, failed: bool
) -> None:
    """Any ticks, in any order, before the end or after it, doubled or none: the same sum, which is
    none where the start failed."""
    book = Book(leases={"lease-1": lease(rate=rate)})
    for tick in ticks:
        seen = book.leases["lease-1"]
        book.tick(seen, T0 + tick)
        book.tick(seen, T0 + tick)  # a second service that read the same lease
    book.end("lease-1", T0 + ended, failed)
    expected = 0 if failed else ledger_rules.owed(rate, T0, T0 + ended)
    assert book.leases["lease-1"].charged == expected
    assert book.balances[ANNA] == -expected
    assert book.balances[SYSTEM_USAGE] == expected
    assert checks.check_all(book.books()) == []


class BooksMachine(RuleBasedStateMachine):
    """Random grants, leases, ticks, ends and reversals: the checks hold after each."""

    running = Bundle("running")
    members = st.sampled_from([member_account(name) for name in ("anna", "bert", "cara")])

    def __init__(self) -> None:
        super().__init__()
        self.book = Book()
        self.now = T0
        self.count = 0
        self.stale: Lease | None = None

    def fresh(self) -> str:
        self.count += 1
        return f"n{self.count}"

    @rule(account=members, amount=st.integers(1, 10**12))
    def gives(self, account: str, amount: int) -> None:
        key = self.fresh()
        entry = ledger_rules.grant(
            account, amount, key=key, at=self.now, actor="admin", reason="gift"
        )
        assert self.book.post(entry)
        assert not self.book.post(entry)

    @rule(account=members, amount=st.integers(-(10**9), 10**9).filter(bool))
    def corrects(self, account: str, amount: int) -> None:
        key = self.fresh()
        self.book.post(
            ledger_rules.adjustment(
                account, amount, key=key, at=self.now, actor="admin", reason="typo"
            )
        )

    @precondition(lambda self: self.book.transfers)
    @rule(data=st.data())
    def reverses(self, data: st.DataObject) -> None:
        gifts = [t for t in self.book.transfers.values() if t.lease_id is None]
        if gifts:
            entry = data.draw(st.sampled_from(gifts))
            key = f"undo:{entry.key}"
            self.book.post(
                ledger_rules.reversal(entry, key=key, at=self.now, actor="admin", reason="typo")
            )

    @rule(target=running, account=members, rate=rates, hold=st.integers(0, 10**9))
    def starts(self, account: str, rate: int, hold: int) -> str:
        name = self.fresh()
        self.book.leases[name] = lease(
            id=name, account=account, rate=rate, hold=hold, granted_at=self.now, started_at=self.now
        )
        return name

    @rule(step=st.timedeltas(timedelta(0), timedelta(days=1)))
    def waits(self, step: timedelta) -> None:
        self.now += step

    @rule(name=running)
    def ticks(self, name: str) -> None:
        self.stale = self.book.leases[name]
        self.book.tick(self.stale, self.now)

    @precondition(lambda self: self.stale is not None)
    @rule()
    def ticks_with_what_it_read_earlier(self) -> None:
        assert self.stale is not None
        self.book.tick(self.stale, self.now)

    @rule(name=consumes(running), earlier=st.timedeltas(timedelta(0), HOUR), failed=st.booleans())
    def ends(self, name: str, earlier: timedelta, failed: bool) -> None:
        self.book.end(name, self.now - earlier, failed)

    @invariant()
    def holds(self) -> None:
        assert checks.check_all(self.book.books()) == []
        assert sum(self.book.balances.values()) == 0


TestBooks = BooksMachine.TestCase


# The checks find what they are for.

GIFT = ledger_rules.grant(ANNA, 5, key="k", at=T0, actor="admin", reason="gift")
ROWS = rows_of([GIFT])
ENDED = lease(state=LeaseState.ENDED, ended_at=T0 + HOUR, charged=4 * MICRO)


ANNA_HAS_FOUR = Account(name=ANNA, balance=4)
NO_ANNA = Account(name=SYSTEM_GRANTS, balance=-5)
HELD = Account(name=ANNA, held=MICRO)


@pytest.mark.parametrize(
    ("check", "books", "words"),
    [
        ("zero_sum", {"postings": (replace(ROWS[0], amount=6), ROWS[1])}, "sum to 1 microcredits"),
        ("keys", {"postings": (*ROWS, replace(ROWS[0], transfer_id="2"))}, "was posted 2 times"),
        (
            "balances",
            {"postings": ROWS, "accounts": (ANNA_HAS_FOUR,)},
            "is 4 microcredits, but its",
        ),
        ("balances", {"postings": ROWS, "accounts": (NO_ANNA,)}, "anna, but no such account"),
        ("holds", {"accounts": (HELD,), "leases": (ENDED,)}, "but its open leases hold 0"),
        ("holds", {"accounts": (Account(name=ANNA),), "leases": (lease(),)}, "leases hold 1000000"),
        ("lease_postings", {"leases": (lease(charged=3),)}, "but its postings took 0"),
        ("settled", {"leases": (replace(ENDED, charged=1),)}, "owed 4000000 microcredits, but 1"),
        ("settled", {"leases": (ENDED,), "failed": frozenset({ENDED.id})}, "owed 0 microcredits"),
        ("settled", {"leases": (replace(ENDED, ended_at=None),)}, "ended at an unknown time"),
    ],
)
def test_each_ledger_check_reports_its_fault(check: str, books: dict[str, Any], words: str) -> None:
    found = checks.Books(**books)
    (problem,) = getattr(checks, f"check_{check}")(found)
    assert words in problem
    assert problem in checks.check_all(found)


def test_ledger_checks_accept_missing_system_accounts() -> None:
    books = checks.Books(postings=ROWS, accounts=(Account(name=ANNA, balance=5),))
    assert checks.check_all(books) == []
