"""The ledger's entries and rules: all real, pure values."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuspawner.core.errors import LedgerError
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import LeasedDevice, LeaseState
from gpuspawner.ledger import rules as ledger_rules
from gpuspawner.ledger import usage
from gpuspawner.ledger.models import (
    MAX_AMOUNT,
    SYSTEM_GRANTS,
    SYSTEM_USAGE,
    Posting,
    Transfer,
    TransferKind,
    check_account,
    member_account,
)
from tests.unit.ledger.books import ANNA, HOUR, T0, lease


def transfer(**changes: Any) -> Transfer:
    values: dict[str, Any] = {
        "id": "1",
        "key": "key",
        "kind": TransferKind.GRANT,
        "at": T0,
        "actor": "admin",
        "reason": "welcome",
        "postings": (Posting(ANNA, 5), Posting(SYSTEM_GRANTS, -5)),
    }
    return Transfer(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"postings": (Posting(ANNA, 5), Posting(SYSTEM_GRANTS, -4))}, "sum to 1 microcredits"),
        ({"postings": (Posting(ANNA, 5),)}, "1 posting"),
        ({"postings": ()}, "0 posting"),
        ({"key": ""}, "its key is empty"),
        ({"actor": "  "}, "its actor is empty"),
        ({"reason": ""}, "its reason is empty"),
        ({"id": ""}, "its id is empty"),
        ({"at": datetime(2025, 3, 1)}, "not in UTC"),
        ({"at": datetime(2025, 3, 1, tzinfo=timezone(HOUR))}, "not in UTC"),
    ],
)
def test_invalid_transfer_is_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LedgerError, match=words):
        transfer(**changes)


@pytest.mark.parametrize("amount", [1.0, True, "5", None, 0, MAX_AMOUNT + 1, -MAX_AMOUNT - 1])
def test_invalid_posting_amount_is_rejected(amount: Any) -> None:
    with pytest.raises(LedgerError, match=ANNA):
        Posting(ANNA, amount)


@pytest.mark.parametrize(
    "name", ["anna", "user:anna", "member:", "member: anna", "member:an\nna", "", ":", "MEMBER:a"]
)
def test_invalid_account_name_is_rejected(name: str) -> None:
    with pytest.raises(LedgerError, match="account name"):
        check_account(name)


# What is owed.

instants = st.datetimes(
    min_value=datetime(2020, 1, 1), max_value=datetime(2040, 1, 1), timezones=st.just(timezone.utc)
)
rates = st.integers(0, 1000 * MICRO)


@example(3_600, T0, T0 + timedelta(microseconds=999_999))
@example(MICRO, T0, T0 - HOUR)
@given(rates, instants, instants)
def test_amount_owed_is_the_exact_product_rounded_down(
    rate: int, start: datetime, end: datetime
) -> None:
    exact = Fraction(rate) * Fraction((end - start) // timedelta(microseconds=1), 3_600_000_000)
    amount = ledger_rules.owed(rate, start, end)
    assert type(amount) is int
    assert amount == max(0, exact.numerator // exact.denominator)
    assert ledger_rules.owed(rate, None, end) == 0


ENDED = {"state": LeaseState.ENDED, "ended_at": T0 + HOUR, "charged": 4 * MICRO}
NEVER = {"state": LeaseState.GRANTED, "started_at": None}


@pytest.mark.parametrize(
    ("changes", "due", "settled", "failed"),
    [
        ({"charged": MICRO}, 3 * MICRO, 3 * MICRO, -MICRO),
        ({"charged": 5 * MICRO}, 0, -MICRO, -5 * MICRO),
        (NEVER, 0, 0, 0),
        (ENDED, 0, 0, -4 * MICRO),
    ],
    ids=["rest", "too much: no tick gives back", "never started", "settled already"],
)
def test_tick_and_settlement_charge_only_the_unpaid_amount(
    changes: dict[str, Any], due: int, settled: int, failed: int
) -> None:
    """A start that failed costs nothing."""
    some, until = lease(**changes), T0 + HOUR
    assert ledger_rules.charge_due(some, until) == due
    assert ledger_rules.settlement(some, until, failed=False) == settled
    assert ledger_rules.settlement(some, until, failed=True) == failed


# Before the start, and how long it lasts.


@given(st.integers(1, 1000 * MICRO), st.timedeltas(timedelta(0), timedelta(days=30)))
def test_hold_covers_exactly_its_lead_time(rate: int, lead: timedelta) -> None:
    hold = ledger_rules.hold_for(rate, lead)
    assert hold >= max(1, ledger_rules.owed(rate, T0, T0 + lead))
    assert hold - 1 <= ledger_rules.owed(rate, T0, T0 + lead)


def test_empty_account_cannot_afford_a_paid_lease() -> None:
    assert ledger_rules.hold_for(0, HOUR) == 0 and ledger_rules.can_afford(-5 * MICRO, 0)
    hold = ledger_rules.hold_for(MICRO, timedelta(0))
    affordable = [ledger_rules.can_afford(balance, hold) for balance in (0, hold - 1, hold)]
    assert affordable == [False, False, True]


@given(st.integers(0, 10**12), st.integers(1, 1000 * MICRO))
def test_credits_run_out_at_the_computed_time(available: int, rate: int) -> None:
    dry = ledger_rules.runs_dry_at(available, rate, T0)
    if dry is None:  # later than a datetime can say
        assert ledger_rules.owed(rate, T0, datetime.max.replace(tzinfo=timezone.utc)) <= available
        return
    assert ledger_rules.owed(rate, T0, dry) <= available
    assert ledger_rules.owed(rate, T0, dry + timedelta(microseconds=1)) >= available


@pytest.mark.parametrize(
    ("available", "rate", "left"),
    [
        (-5, MICRO, timedelta(0)),
        (0, MICRO, timedelta(0)),
        (6 * MICRO, 4 * MICRO, timedelta(minutes=90)),
        *((5, 0, None), (MAX_AMOUNT, 1, None), (10**9 * MICRO, MICRO // 10, None)),
    ],
)
def test_credits_may_run_out_at_once_or_never(
    available: int, rate: int, left: timedelta | None
) -> None:
    dry = ledger_rules.runs_dry_at(available, rate, T0)
    assert dry == (None if left is None else T0 + left)


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (timedelta(hours=3, minutes=20, seconds=59), "3 h 20 min"),
        (timedelta(hours=3), "3 h"),
        (timedelta(minutes=5), "5 min"),
        (timedelta(seconds=59), "less than a minute"),
        (timedelta(0), "less than a minute"),
        (timedelta(days=2, hours=4, minutes=9), "2 d 4 h"),
        (timedelta(days=2, minutes=9), "2 d"),
    ],
)
def test_time_left_is_formatted_in_words(left: timedelta, words: str) -> None:
    assert ledger_rules.format_time_left(left) == words


# Builders.


def test_grants_and_adjustments_reject_system_accounts() -> None:
    how: dict[str, Any] = {"key": "k", "at": T0, "actor": "admin", "reason": "welcome"}
    entry = ledger_rules.grant(ANNA, 5, **how)
    assert entry.kind is TransferKind.GRANT
    accounts = (ANNA, SYSTEM_GRANTS, member_account("bert"))
    assert [entry.amount_for(account) for account in accounts] == [5, -5, 0]
    down = ledger_rules.adjustment(ANNA, -5, **how)
    assert (down.kind, down.amount_for(ANNA)) == (TransferKind.ADJUSTMENT, -5)
    with pytest.raises(LedgerError, match="more than zero"):
        ledger_rules.grant(ANNA, -5, **how)
    for move in (ledger_rules.grant, ledger_rules.adjustment):
        with pytest.raises(LedgerError, match="own account"):
            move(SYSTEM_USAGE, 5, **how)
    first, again = (ledger_rules.opening_grant(ANNA, 5, at=at, actor="h") for at in (T0, T0 + HOUR))
    assert first is not None and again is not None
    assert (first.key, first.id) == (again.key, again.id), "an account opens once"
    assert ledger_rules.opening_grant(ANNA, 0, at=T0, actor="h") is None


def test_duplicate_ticks_and_settlements_share_a_key() -> None:
    device = LeasedDevice(uuid="GPU-1", slot=0, index=0, model="A100", memory_bytes=40 * 10**9)
    seen = lease(charged=MICRO, devices=(device,))
    one, two = (ledger_rules.charge(seen, 5, T0 + HOUR) for _ in range(2))
    later = ledger_rules.charge(replace(seen, charged=MICRO + 5), 5, T0 + HOUR)
    assert one is not None and one == two and later is not None
    assert one.key == f"charge:lease-1:{MICRO}"
    assert later.key != one.key and later.id != one.id
    assert (one.kind, one.lease_id, one.at) == (TransferKind.CHARGE, "lease-1", T0 + HOUR)
    assert (one.amount_for(ANNA), one.amount_for(SYSTEM_USAGE)) == (-5, 5)
    assert one.reason == "1 x A100 of anna/lab"
    assert ledger_rules.charge(lease(), 0, T0) is None
    more = ledger_rules.settle(lease(), 5, T0 + HOUR)
    less = ledger_rules.settle(lease(charged=10), -5, T0 + HOUR)
    assert more is not None and less is not None
    assert more.key == less.key == "settle:lease-1"
    assert (more.kind, more.amount_for(ANNA)) == (TransferKind.CHARGE, -5)
    assert (less.kind, less.amount_for(ANNA)) == (TransferKind.REFUND, 5)
    assert ledger_rules.settle(lease(), 0, T0 + HOUR) is None


@given(st.lists(st.integers(-(10**15), 10**15).filter(bool), min_size=1, max_size=6))
def test_reversal_nets_zero_for_every_account(amounts: list[int]) -> None:
    lines = [Posting(member_account(f"m{i % 3}"), amount) for i, amount in enumerate(amounts)]
    lines += [Posting(SYSTEM_GRANTS, -amount) for amount in amounts]
    entry = transfer(postings=tuple(lines))
    undone = ledger_rules.reversal(
        entry, key="undo:key", at=T0 + HOUR, actor="admin", reason="typo"
    )
    assert undone.kind is TransferKind.REVERSAL
    assert undone.id != entry.id
    for account in {line.account for line in lines}:
        assert entry.amount_for(account) + undone.amount_for(account) == 0


# What batch jobs owe.


SECONDS = st.integers(0, 10**8)


@given(st.integers(0, 10**12), st.lists(SECONDS, max_size=8), SECONDS)
def test_job_pays_for_its_time_whenever_it_is_sampled(
    rate: int, looks: list[int], lasted: int
) -> None:
    charged = 0
    for so_far in looks:
        due = usage.due_for_job(rate, so_far, charged, over=False)
        assert due >= 0
        charged += due
        assert charged <= usage.cost_of_job(rate, max(looks))
    for _ in range(2):  # told twice
        charged += usage.due_for_job(rate, lasted, charged, over=True)
        assert charged == usage.cost_of_job(rate, lasted) == rate * lasted // 3600


@pytest.mark.parametrize("amount", [0, 7, -7])
def test_job_debit_moves_its_amount_and_zero_posts_nothing(amount: int) -> None:
    found = usage.debit_for_job("member:ada", amount, key="slurm:x:0", at=T0, reason="Batch job 1")
    moved = found and (found.apart, found.amount_for("member:ada"), found.amount_for(SYSTEM_USAGE))
    assert moved == ((True, -amount, amount) if amount else None)
