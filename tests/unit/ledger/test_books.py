"""The ledger as a whole: real rules and checks, on plain values."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import LeaseState
from gpuspawner.ledger import checks
from gpuspawner.ledger import rules as ledger_rules
from gpuspawner.ledger.models import SYSTEM_GRANTS, SYSTEM_USAGE, Account
from tests.unit.ledger.books import ANNA, HOUR, T0, lease

rates = st.integers(0, 1000 * MICRO)
offsets = st.timedeltas(timedelta(seconds=-5), timedelta(days=2))


@given(rates, st.lists(offsets, max_size=12), offsets, st.booleans())
def test_charges_do_not_depend_on_when_the_ticks_run(
    rate: int, ticks: list[timedelta], ended: timedelta, failed: bool
) -> None:
    """Any ticks, in any order, before the end or after it, doubled or none: the same sum, which is
    none where the start failed."""
    some, moved = lease(rate=rate), dict[str, int]()
    for tick in ticks:
        seen = some
        for late in (timedelta(0), timedelta(seconds=1)):  # a second service read the same lease
            due = ledger_rules.charge_due(seen, T0 + tick + late)
            entry = ledger_rules.charge(seen, due, T0 + tick + late)
            if entry and entry.key not in moved:  # as the store posts it
                moved[entry.key] = entry.amount_for(SYSTEM_USAGE)
                some = replace(seen, charged=seen.charged + due)
    due = ledger_rules.settlement(some, T0 + ended, failed)
    if entry := ledger_rules.settle(some, due, T0 + ended):
        moved[entry.key] = entry.amount_for(SYSTEM_USAGE)
    expected = 0 if failed else ledger_rules.owed(rate, T0, T0 + ended)
    assert some.charged + due == sum(moved.values()) == expected


# The checks find what they are for.

GIFT = ledger_rules.grant(ANNA, 5, key="k", at=T0, actor="admin", reason="gift")
ROWS = tuple(
    checks.PostingRow(
        **{name: getattr(GIFT, name) for name in ("key", "kind", "lease_id")},
        transfer_id=GIFT.id,
        account=posting.account,
        amount=posting.amount,
    )
    for posting in GIFT.postings
)
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


def test_books_without_the_ledgers_own_accounts_are_valid() -> None:
    valid = checks.Books(postings=ROWS, accounts=(Account(name=ANNA, balance=5),))
    assert checks.check_all(valid) == []
