"""Credits that end. Real: everything, it is pure."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.errors import LedgerError
from gpuspawner.core.units import MICRO
from gpuspawner.ledger.lots import Lot, LotFlow, LotUse, expiry, lasts, left_of
from gpuspawner.ledger.models import TransferKind

T0 = datetime(2025, 3, 1, 12, tzinfo=timezone.utc)


def hour(number: float) -> datetime:
    return T0 + timedelta(hours=number)


def lot(name: str, amount: int, starts: float, ends: float, cancelled: float | None = None) -> Lot:
    return Lot(
        id=name,
        account="member:anna",
        amount=amount * MICRO,
        starts_at=hour(starts),
        ends_at=hour(ends),
        cancelled_at=None if cancelled is None else hour(cancelled),
    )


def credits(left: dict[str, int]) -> dict[str, float]:
    return {name: amount / MICRO for name, amount in left.items()}


SPENT = LotFlow([LotUse(MICRO, hour(0), hour(4), 4 * MICRO)])
WRONG = lot("wrong", 10, 0, 10, cancelled=4)
"""A reversal takes the whole amount: what was spent of it is owed."""


@pytest.mark.parametrize(
    ("lots", "flow", "moments"),
    [
        (
            [lot("later", 10, 0, 20), lot("sooner", 10, 0, 10)],  # the first to end is spent first
            LotFlow([LotUse(MICRO, hour(1))]),
            {
                5: {"sooner": 6, "later": 10},
                15: {"sooner": 1, "later": 5},
                50: {"sooner": 1, "later": 0},
            },
        ),
        (
            [lot("a", 5, 0, 10)],  # credits without an end are spent last
            LotFlow([LotUse(MICRO, hour(0))], [(hour(-5), 100 * MICRO)]),
            {4: {"a": 1}, 9: {"a": 0}},
        ),
        (
            [lot("a", 5, 0, 10)],  # what is left at the end stays so
            LotFlow([LotUse(MICRO, hour(8))]),
            {10: {"a": 3}, 11: {"a": 3}, 1000: {"a": 3}},
        ),
        # A debt is paid from a lot that comes.
        ([lot("a", 5, 1, 10)], LotFlow([], [(hour(0), -3 * MICRO)]), {2: {"a": 2}}),
        (
            [lot("a", 5, 1, 10)],
            LotFlow([], [(hour(0), -3 * MICRO), (hour(0.5), MICRO)]),
            {2: {"a": 3}},
        ),
        ([lot("a", 5, 3, 10)], LotFlow([LotUse(MICRO, hour(0))]), {2: {"a": 5}}),
        # A reversed lot takes no other with it.
        ([WRONG, lot("other", 10, 0, 20)], SPENT, {12: {"wrong": 6, "other": 6}}),
        ([WRONG, lot("other", 10, 0, 5)], SPENT, {12: {"wrong": 10, "other": 6}}),
        (
            [lot("wrong", 10, 0, 3, cancelled=4), lot("other", 10, 0, 20)],
            SPENT,
            {12: {"wrong": 7, "other": 6}},
        ),
    ],
)
def test_lot_balances_follow_spending_expiry_and_reversal(
    lots: list[Lot], flow: LotFlow, moments: dict[int, dict[str, int]]
) -> None:
    for at, expected in moments.items():
        assert credits(left_of(lots, flow, hour(at))) == expected


def test_expiry_moves_the_difference_and_lot_dates_are_checked() -> None:
    mine = lot("a", 5, 0, 10)
    taken = expiry(mine, 3 * MICRO, hour(10))
    assert taken and taken.kind is TransferKind.EXPIRY and taken.key == "expiry:a:0"
    assert taken.amount_for("member:anna") == -3 * MICRO
    again = replace(mine, taken=3 * MICRO, takes=1)
    assert expiry(again, 3 * MICRO, hour(11)) is None
    back = expiry(again, MICRO, hour(11))
    assert back and back.amount_for("member:anna") == 2 * MICRO and back.key == "expiry:a:1"

    with pytest.raises(LedgerError, match="end before they begin"):
        lot("a", 5, 3, 3)


# Whatever happens.

times = st.integers(0, 40).map(float)
amounts = st.integers(1, 10)


@st.composite
def some_lots(draw: st.DrawFn) -> list[Lot]:
    found = []
    for number in range(draw(st.integers(0, 4))):
        start = draw(times)
        end = start + draw(st.integers(1, 30))
        cancelled = draw(st.none() | st.integers(int(start), int(end)))
        found.append(lot(str(number), draw(amounts), start, end, cancelled))
    return found


@st.composite
def some_uses(draw: st.DrawFn) -> list[LotUse]:
    found = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(times)
        end = draw(st.none() | st.integers(int(start), 60))
        rate = draw(st.integers(1, 3 * MICRO))
        found.append(LotUse(rate, hour(start), None if end is None else hour(end)))
    return found


moves = st.lists(st.tuples(times.map(hour), st.integers(-10 * MICRO, 10 * MICRO).filter(bool)))


@given(some_lots(), some_uses(), moves, st.lists(times, min_size=1))
def test_lots_never_grow_nor_lose_more_than_was_spent(
    lots: list[Lot], uses: list[LotUse], moved: list[tuple[datetime, int]], looks: list[float]
) -> None:
    flow = LotFlow(uses, moved)
    before = {lot.id: lot.amount for lot in lots}
    for at in sorted(looks):
        left = left_of(lots, flow, hour(at))
        for one in lots:
            assert 0 <= left[one.id] <= before[one.id] <= one.amount
            if one.over_at <= hour(at):
                assert left_of(lots, flow, hour(100))[one.id] == left[one.id]
        before = left
    lots = [replace(one, cancelled_at=None) for one in lots]  # a reversal is owed, and paid again
    left = left_of(lots, flow, hour(100))
    ((_, _, spent),) = flow.along([hour(100)])
    assert sum(one.amount - left[one.id] for one in lots) <= spent


@given(some_lots(), some_uses(), st.lists(times, min_size=1))
def test_lots_ignore_when_a_server_end_becomes_known(
    lots: list[Lot], uses: list[LotUse], looks: list[float]
) -> None:
    """A server that was believed to run on leaves no trace once its end is known."""
    known = [LotUse(use.rate, use.started_at, use.ended_at or hour(50)) for use in uses]
    for at in looks:
        late = [
            use if use.ended_at and use.ended_at <= hour(at) else LotUse(use.rate, use.started_at)
            for use in known
        ]
        assert left_of(lots, LotFlow(late), hour(at)) == left_of(lots, LotFlow(known), hour(at))


# How long they last.


def test_runway_excludes_credits_that_expire_unspent() -> None:
    day = timedelta(days=1)
    assert lasts([], 10, 0) is None
    assert lasts([], 10 * MICRO, MICRO) == timedelta(hours=10)
    assert lasts([(timedelta(hours=4), 10 * MICRO)], 10 * MICRO, MICRO) == timedelta(hours=4)
    assert lasts([(timedelta(hours=4), 9 * MICRO)], 10 * MICRO, MICRO) == timedelta(hours=5)
    assert lasts([(day, 6 * MICRO), (2 * day, 6 * MICRO)], 12 * MICRO, MICRO) == day / 2
    assert lasts([(day, MICRO)], 0, MICRO) == timedelta(0)
    assert lasts([(day, 2 * MICRO)], -MICRO, MICRO) == timedelta(0)
    assert lasts([(day, MICRO)], 10**30, 1) is None


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**9)), max_size=5),
    st.integers(0, 10**9),
    st.integers(3_600_000, 10**9),
)
def test_runway_ends_when_no_credits_are_left(
    ending: list[tuple[int, int]], free: int, rate: int
) -> None:
    """As the lots themselves are settled."""
    spans = [(timedelta(seconds=seconds), amount) for seconds, amount in ending]
    found = lasts(spans, free + sum(amount for _, amount in ending), rate)
    assert found is not None

    def left(span: timedelta) -> int:
        now = T0 + span
        lots = [
            Lot(id=str(n), account="member:a", amount=amount, starts_at=T0, ends_at=T0 + end)
            for n, (end, amount) in enumerate(spans)
        ]
        use = LotUse(rate, T0)
        gone = left_of(lots, LotFlow([use], [(T0, free)]), now)
        lost = sum(gone[lot.id] for lot in lots if lot.ends_at <= now)
        return free + sum(lot.amount for lot in lots) - lost - use.cost(now)

    assert left(found) <= len(ending) + 1
    if found > timedelta(seconds=1):
        assert left(found - timedelta(seconds=1)) > 0


def test_lot_flow_totals_match_the_sums_at_each_moment() -> None:
    chance = random.Random(5)

    def some() -> datetime:
        return hour(chance.choice((chance.randint(0, 40), 40 * chance.random())))

    for _ in range(300):
        uses = []
        for _ in range(chance.randint(0, 6)):
            began, ended = sorted((some(), some()))
            over = chance.random() < 0.7
            most = chance.choice((None, chance.randint(0, 30 * MICRO))) if over else None
            uses.append(LotUse(chance.randint(1, 3 * MICRO), began, ended if over else None, most))
        moves = [(some(), chance.choice((-1, 1)) * chance.randint(1, 9)) for _ in range(4)]
        moments = sorted(some() for _ in range(chance.randint(1, 9)))
        for moment, came, spent in LotFlow(uses, moves).along(moments):
            past = [amount for at, amount in moves if at <= moment]
            assert came == sum(amount for amount in past if amount > 0)
            out = -sum(amount for amount in past if amount < 0)
            assert spent == out + sum(use.cost(moment) for use in uses)
