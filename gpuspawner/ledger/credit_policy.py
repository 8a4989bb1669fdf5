"""What happens to servers whose account runs dry: warnings first, then the policy. Pure.

A policy is fixed in the lease at the grant: ``stop`` after a grace period, let the planned
``session`` end, or continue into an ``overdraft``, whose limit no charge ever passes. What is due
follows from the lease, the account and earlier warnings, so a kill loses and repeats nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..core.errors import ConfigError
from ..core.units import format_credits, parse_credits
from ..leases.models import Lease, LeaseState, SessionEnd, first_end
from . import rules
from .lots import lasts

STOP, SESSION, OVERDRAFT = "stop", "session", "overdraft"

DEFAULT = "*"
"""The group of everybody for whom no other policy applies."""

_MOMENT = timedelta(microseconds=1)

_SKEW = timedelta(minutes=1)
"""How far clocks may differ, or be corrected, unnoticed."""

MOST_OVERDRAFT = 1_000_000_000
"""Credits; anything larger is a typing mistake."""


@dataclass(frozen=True, slots=True)
class CreditPolicy:
    """What to do when an account runs dry."""

    when_dry: str = STOP
    overdraft: int = 0
    """Microcredits."""


def policy_of(
    policies: Mapping[str, CreditPolicy], account: str, groups: Collection[str]
) -> CreditPolicy:
    """Return the policy for a server of a member of these groups, if this account pays.

    A group's own account uses the group's policy; a member's uses that of the first group, in the
    order of ``policies``, that the member is in.
    """
    kind, _, name = account.partition(":")
    mine = [name] if kind == "group" else [each for each in policies if each in groups]
    usual = policies.get(DEFAULT, CreditPolicy())
    return policies.get(mine[0], usual) if mine else usual


@dataclass(frozen=True, slots=True)
class AccountRunway:
    """An account and the running leases that it pays for, at one moment."""

    balance: int
    """Microcredits, less all that is owed up to this moment, even beyond an overdraft."""
    rate: int
    """Microcredits per hour of all leases together."""
    ending: tuple[tuple[timedelta, int], ...] = ()
    """In how long parts of the balance expire, and how many microcredits."""

    @classmethod
    def of(
        cls,
        balance: int,
        leases: Iterable[Lease],
        now: datetime,
        ending: Iterable[tuple[datetime, int]] = (),
    ) -> AccountRunway:
        """Create it from the account's posted ``balance`` and the ``leases`` that it pays for."""
        due = rate = 0
        for lease in leases:
            if lease.state is LeaseState.RUNNING:
                due += rules.charge_due(lease, now)
                rate += lease.rate
        return cls(balance - due, rate, tuple((end - now, left) for end, left in ending))

    def lasts(self, lease: Lease) -> timedelta | None:
        """Return how long it pays for a lease, including its overdraft; None for ever."""
        return lasts(self.ending, self.balance + lease.overdraft, self.rate)


@dataclass(frozen=True, slots=True)
class PolicyStep:
    """One thing that is due about a lease."""

    event: str
    """``low``: a warning. ``dry``: nothing is left. ``back``: there are credits again.

    ``stop``: the lease must be stopped. ``quiet``: credits were added or others expired, without a
    message.
    """
    minutes: float | None = None
    """For ``low`` and ``quiet``: the warning that now counts as given."""


def shares(leases: Iterable[Lease], balance: int, until: datetime) -> dict[str, int]:
    """Return what can be charged for each running lease with an overdraft, by lease id.

    ``leases`` are all that an account pays for, ``balance`` is its posted balance. They share what
    there is, in the order of time, until it is used up; later use is not charged. A lease with a
    larger overdraft continues alone from there.
    """
    running = [x for x in leases if x.state is LeaseState.RUNNING and x.started_at and x.rate > 0]
    bounded = [lease for lease in running if lease.when_dry == OVERDRAFT]
    found: dict[str, int] = {}
    at = min((x.started_at for x in running if x.started_at), default=until)
    for bound in sorted({lease.overdraft for lease in bounded}):
        going_on = [lease for lease in running if lease.id not in found]
        spendable = balance + bound - sum(found.values())
        at = _paid_until(going_on, spendable, min(at, until), until)
        for lease in going_on:
            if lease.when_dry == OVERDRAFT and lease.overdraft == bound:
                found[lease.id] = rules.charge_due(lease, at)
    return found


def _paid_until(
    leases: Sequence[Lease], spendable: int, since: datetime, until: datetime
) -> datetime:
    """Return up to when this many microcredits pay for all of these leases."""
    if _owed(leases, until) <= spendable:
        return until
    low, high = 0, (until - since) // _MOMENT
    while low + 1 < high:
        middle = (low + high) // 2
        enough = _owed(leases, since + middle * _MOMENT) <= spendable
        low, high = (middle, high) if enough else (low, middle)
    return since + low * _MOMENT


def _owed(leases: Iterable[Lease], at: datetime) -> int:
    return sum(rules.charge_due(lease, at) for lease in leases)


def next_step(
    lease: Lease,
    purse: AccountRunway,
    now: datetime,
    grace: timedelta,
    warn_minutes: Sequence[float],
) -> PolicyStep | None:
    """Return what is due now about a running lease that costs something, or None."""
    if lease.state is not LeaseState.RUNNING or lease.rate <= 0 or lease.outcome:
        return None
    if purse.balance > 0 and lease.warned_at is not None:
        return PolicyStep("back")
    if _must_stop(lease, purse, now, grace):
        return PolicyStep("stop")
    if purse.balance <= 0 and not _was_told(lease, now):
        return PolicyStep("dry")
    return _warning(lease, purse, warn_minutes)


def stops_at(
    lease: Lease, purse: AccountRunway, now: datetime, grace: timedelta
) -> datetime | None:
    """Return when a lease ends whose member was told that the account is dry, else None."""
    if lease.warned_at is None or lease.state is LeaseState.ENDED:
        return None
    end = first_end(lease.ends_at, credits_end(lease, purse, now, grace))
    return end.at if end else None


def credits_end(
    lease: Lease, purse: AccountRunway, now: datetime, grace: timedelta
) -> datetime | None:
    """Return when a lease is stopped because its account runs dry at its present rate.

    None if that never happens, as for a lease that costs nothing.
    """
    if lease.state is not LeaseState.RUNNING or lease.rate <= 0:
        return None
    policy = CreditPolicy(lease.when_dry, lease.overdraft)
    end = _dry_end(policy, purse, now, grace, has_limit=lease.ends_at is not None)
    if end and lease.when_dry != OVERDRAFT and purse.balance <= 0 and _was_told(lease, now):
        return rules.after(lease.warned_at or now, grace)  # the grace period has begun
    return end


def planned_end(
    purse: AccountRunway,
    seconds: int | None,
    now: datetime,
    policy: CreditPolicy,
    grace: timedelta,
) -> SessionEnd | None:
    """Return when and why a session would end that starts now, before anything is asked for.

    ``purse`` has the rate of the session and of all others that the account pays for. ``seconds``
    is the time limit, None if there is none.
    """
    limit = None if seconds is None else rules.after(now, timedelta(seconds=seconds))
    return first_end(limit, _dry_end(policy, purse, now, grace, has_limit=limit is not None))


def _dry_end(
    policy: CreditPolicy, purse: AccountRunway, now: datetime, grace: timedelta, *, has_limit: bool
) -> datetime | None:
    """Return when a policy stops a server whose member was not told of an empty account yet."""
    if policy.when_dry == SESSION and has_limit:
        return None
    dry = rules.after(now, lasts(purse.ending, purse.balance + policy.overdraft, purse.rate))
    return dry if dry is None or policy.when_dry == OVERDRAFT else rules.after(dry, grace)


def due_warning(minutes: Sequence[float], left: timedelta | None) -> float | None:
    """Return the smallest of ``minutes`` that covers the time left, or None."""
    if left is None:
        return None
    return min((m for m in minutes if left <= timedelta(minutes=m)), default=None)


def _was_told(lease: Lease, now: datetime) -> bool:
    # A warning dated in the future, from before the clock was set back, does not count: otherwise
    # the grace period would last until then.
    return lease.warned_at is not None and lease.warned_at <= now + _SKEW


def _must_stop(lease: Lease, purse: AccountRunway, now: datetime, grace: timedelta) -> bool:
    if lease.when_dry == OVERDRAFT:
        return purse.balance <= -lease.overdraft
    if lease.when_dry == SESSION and lease.ends_at:
        return False  # it ends anyway
    return purse.balance <= 0 and lease.warned_at is not None and now - lease.warned_at >= grace


def _warning(
    lease: Lease, purse: AccountRunway, warn_minutes: Sequence[float]
) -> PolicyStep | None:
    """Return the warning due: each once on the way down; a new top-up can bring it back."""
    if purse.balance <= 0 and lease.when_dry != OVERDRAFT:
        return None  # there is nothing to add to what was said then
    due = due_warning(warn_minutes, purse.lasts(lease))
    if due == lease.told_dry:
        return None
    lower = due is not None and (lease.told_dry is None or due < lease.told_dry)
    return PolicyStep("low" if lower else "quiet", due)


def parse_policy(group: object, value: object) -> CreditPolicy:
    """Parse a value of ``c.GPUCredits.when_exhausted``. Raises ConfigError naming the group."""
    if value in (STOP, SESSION):
        return CreditPolicy(str(value))
    if not isinstance(value, Mapping) or list(value) != [OVERDRAFT]:
        what = f"c.GPUCredits.when_exhausted[{group!r}] is {value!r}; write 'stop', 'session' or"
        raise ConfigError(what=f"{what} {{'overdraft': 20}}")
    try:
        bound = value[OVERDRAFT]
        amount = 0 if isinstance(bound, bool) else parse_credits(bound)
    except ValueError as error:
        raise ConfigError(what=f"c.GPUCredits.when_exhausted[{group!r}]: {error}") from None
    if not 0 < amount <= parse_credits(MOST_OVERDRAFT):
        said = f"an overdraft of {bound!r} credits"
        limits = f"above 0 and up to {format_credits(parse_credits(MOST_OVERDRAFT), 0)}"
        raise ConfigError(what=f"c.GPUCredits.when_exhausted[{group!r}] is {said}; it is {limits}")
    return CreditPolicy(OVERDRAFT, amount)
