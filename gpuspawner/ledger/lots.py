"""Credits that expire: which are spent first, and what is left of them at their end. Pure.

A lot is a grant with an end. An account spends from the lot that ends first, then from credits that
do not expire; debts are paid from a new lot. What is left at a lot's end follows from the rates and
times of leases, not of charges, so it can be computed late or repeatedly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate

from ..core.errors import LedgerError
from .models import SYSTEM_GRANTS, Transfer, TransferKind
from .rules import ACTOR_ACCOUNTING, HOUR, move, owed, time_left

_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lot:
    """Credits with an end."""

    id: str
    """The id of the transfer that granted them."""
    account: str
    amount: int
    """Microcredits."""
    starts_at: datetime
    ends_at: datetime
    cancelled_at: datetime | None = None
    """When the grant was reversed: from then on nothing is spent from it, and its use is owed."""
    closed_at: datetime | None = None
    """When what was left at the end was first recorded."""
    taken: int = 0
    """Microcredits taken back so far."""
    takes: int = 0
    """How many transfers took something; late news of a server's end corrects it."""

    def __post_init__(self) -> None:
        if self.ends_at <= self.starts_at:
            raise LedgerError(
                "The ledger refused credits that end: they would end before they begin. Name a "
                "later end."
            )

    @property
    def over_at(self) -> datetime:
        """When it stops being spent."""
        return self.ends_at if self.cancelled_at is None else min(self.ends_at, self.cancelled_at)


@dataclass(frozen=True, slots=True)
class LotUse:
    """A lease's cost to its account, as far as it is known."""

    rate: int
    started_at: datetime
    ended_at: datetime | None = None
    """Its proven end; None while it runs."""
    most: int | None = None
    """Its final cost; None while that is open."""

    def cost(self, at: datetime) -> int:
        """Return the microcredits for the time up to ``at``."""
        until = at if self.ended_at is None else min(at, self.ended_at)
        cost = owed(self.rate, self.started_at, until)
        return cost if self.most is None else min(cost, self.most)


@dataclass(frozen=True, slots=True)
class LotFlow:
    """What moves on an account apart from its lots."""

    uses: Sequence[LotUse] = ()
    moves: Sequence[tuple[datetime, int]] = ()
    """Times, and microcredits into (minus: out of) the account.

    Without charges of leases and reversals of lots.
    """

    def along(self, moments: Iterable[datetime]) -> Iterator[tuple[datetime, int, int]]:
        """Yield each of the ordered moments with what came in and was spent up to it."""
        uses = sorted(self.uses, key=lambda use: use.started_at, reverse=True)
        moves = sorted(self.moves, reverse=True)
        running: list[LotUse] = []
        came = spent = 0
        for moment in moments:
            while moves and moves[-1][0] <= moment:
                amount = moves.pop()[1]
                came, spent = (came + amount, spent) if amount > 0 else (came, spent - amount)
            while uses and uses[-1].started_at <= moment:
                running.append(uses.pop())
            over = [use for use in running if use.ended_at and use.ended_at <= moment]
            spent += sum(use.cost(moment) for use in over)  # which is final
            running = [use for use in running if not use.ended_at or use.ended_at > moment]
            yield moment, came, spent + sum(use.cost(moment) for use in running)


def left_of(lots: Iterable[Lot], flow: LotFlow, now: datetime) -> dict[str, int]:
    """Return the microcredits left of each lot at its end, or now; by lot id.

    For a reversed lot what was left then; for a later one, all of it.
    """
    known = sorted(lots, key=lambda lot: (lot.ends_at, lot.starts_at, lot.id))
    left = {lot.id: lot.amount for lot in known}
    moments = {lot.starts_at for lot in known} | {lot.over_at for lot in known}
    moments |= {lot.cancelled_at for lot in known if lot.cancelled_at}
    free = came_before = spent_before = 0
    until_now = sorted({moment for moment in moments if moment < now} | {now})
    for moment, came, spent in flow.along(until_now):
        # Open from the last moment up to this one.
        usable = [lot for lot in known if lot.starts_at < moment <= lot.over_at]
        free += came - came_before
        free -= _spend(usable, left, spent - spent_before)
        came_before, spent_before = came, spent
        free += sum(left[lot.id] - lot.amount for lot in known if lot.cancelled_at == moment)
        # A debt is paid from what came in.
        new = [lot for lot in known if lot.starts_at <= moment < lot.over_at]
        if free < 0:
            free = -_spend(new, left, -free)
    return left


def _spend(lots: Iterable[Lot], left: dict[str, int], amount: int) -> int:
    """Take an amount from the lots, in their order; return what they do not cover."""
    for lot in lots:
        taken = min(left[lot.id], amount)
        left[lot.id] -= taken
        amount -= taken
    return amount


def lasts(ending: Sequence[tuple[timedelta, int]], available: int, rate: int) -> timedelta | None:
    """Return how long microcredits last at a rate, when some of them expire; None for ever.

    ``ending``: in how long, and how many. Those that end first are spent first.
    """
    if rate <= 0:
        return None
    lots = sorted(ending)
    left = [amount for _, amount in lots]
    free = available - sum(left)
    if free < 0:
        free, left = 0, _without(left, -free)
    at = timedelta(0)
    for number, (end, _) in enumerate(lots):
        rest = left[number:]
        most = time_left(free + sum(rest), rate)
        if most is not None and most <= end - at:
            return at + most
        spent = rate * ((end - at) // _MICROSECOND) // HOUR
        free -= max(0, spent - sum(rest))
        left[number:] = _without(rest, spent)
        left[number], at = 0, max(at, end)
    more = time_left(free, rate)
    return None if more is None or more > timedelta.max - at else at + more


def _without(amounts: Sequence[int], spent: int) -> list[int]:
    """Return what is left of the amounts, which are spent in order."""
    sums = zip(amounts, accumulate(amounts), strict=True)
    return [min(amount, max(0, total - spent)) for amount, total in sums]


def expiry(lot: Lot, taken: int, at: datetime) -> Transfer | None:
    """Return the transfer after which ``taken`` microcredits of a lot are taken back.

    It gives back if too much was taken before. None if nothing is to be moved.
    """
    amount = taken - lot.taken
    if amount == 0:
        return None
    key, kind = f"expiry:{lot.id}:{lot.takes}", TransferKind.EXPIRY
    reason = f"Credits that ended at {lot.ends_at:%Y-%m-%d %H:%M} UTC"
    return move(lot.account, SYSTEM_GRANTS, amount, kind, key, at, ACTOR_ACCOUNTING, reason)
