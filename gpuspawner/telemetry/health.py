"""Whether a device is well: from symptoms to a verdict, a drain, a probe and a return. Pure.

A device is ``fine``, on ``watch``, or ``sick``. A sick one is given to nobody new. It comes back
when a while passed without any symptom and a probe then succeeded: a device that comes and goes is
out for twice as long each time, and after a few times within a day until an admin takes it back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from .symptoms import CAUSES, Symptom

FINE, WATCH, SICK = "fine", "watch", "sick"

CALM = timedelta(hours=1)
"""A device on watch is fine again after so long without a symptom."""
DAY = timedelta(days=1)
"""Falling sick again within so long counts as flapping."""
AGAIN = timedelta(seconds=30)
"""What goes on is not written down sooner than after so long."""
LONGEST_QUIET = timedelta(hours=12)


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """What an admin decides."""

    actions: Mapping[str, str] = field(default_factory=dict)
    """What causes do, where it is not what :data:`gpuspawner.telemetry.symptoms.CAUSES` says."""
    quiet: timedelta = timedelta(minutes=10)
    """How long a sick device must be without symptoms before it is probed, the first time."""
    most_falls: int = 3
    """So often within a day, and it stays out until an admin takes it back."""

    def action(self, symptom: Symptom) -> str:
        """What it does: the one error counts before its class."""
        one = symptom.said.partition(":")[0].lower()
        return self.actions.get(one) or self.actions.get(symptom.cause) or CAUSES[symptom.cause][0]


@dataclass(frozen=True, slots=True)
class HealthState:
    """Where a device stands."""

    since: datetime
    """When the verdict began."""
    verdict: str = FINE
    cause: str = ""
    """What it was for, as in :data:`gpuspawner.telemetry.symptoms.CAUSES`."""
    reason: str = ""
    fault_at: datetime | None = None
    """When the fault began for which it is sick."""
    last_at: datetime | None = None
    """The last symptom, of those that count."""
    falls: int = 0
    """How often it fell sick, each within a day of the one before."""
    fell_at: datetime | None = None
    probed_at: datetime | None = None
    """The last probe that failed."""
    accepted: frozenset[str] = frozenset()
    """What went on when an admin took it back, and still does."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows."""

    state: HealthState
    event: str = ""
    """``sick``: it just fell sick; ``watch``; ``fine``: it is well again; ``probe``: one is due."""


def judge(
    policy: HealthPolicy,
    state: HealthState,
    symptoms: Iterable[Symptom],
    now: datetime,
    going_on: Collection[str] = (),
) -> Verdict:
    """Go on by what was found up to ``now``. ``going_on``: the causes that do, counted or not."""
    state = replace(state, accepted=state.accepted.intersection(going_on))
    found = [each for each in symptoms if not (each.lasting and each.cause in state.accepted)]
    drains = [each for each in found if policy.action(each) == "drain"]
    counted = drains or [each for each in found if policy.action(each) == "watch"]
    if state.verdict == SICK:
        if drains:
            told = _passed(state.last_at or state.since, now)
            if timedelta(0) < told < min(AGAIN, policy.quiet / 4):
                return Verdict(state)
            return Verdict(replace(state, last_at=now))
        return Verdict(state, "probe" if probe_is_due(policy, state, now) else "")
    if drains:
        return Verdict(_fallen(state, drains[0], now), "sick")
    if counted:
        if state.verdict == WATCH and state.cause == counted[0].cause:
            return Verdict(replace(state, last_at=now, reason=counted[0].said))
        return Verdict(_with(state, WATCH, counted[0], now), "watch")
    if state.verdict == WATCH and _passed(state.last_at or state.since, now) >= CALM:
        return Verdict(replace(state, verdict=FINE, cause="", reason="", since=now), "fine")
    return Verdict(state)


def probe_is_due(policy: HealthPolicy, state: HealthState, now: datetime) -> bool:
    """Whether a sick device may show that it is well."""
    if state.verdict != SICK or needs_admin(policy, state):
        return False
    last = max(filter(None, (state.last_at, state.probed_at)), default=state.since)
    return _passed(last, now) >= quiet_of(policy, state)


def quiet_of(policy: HealthPolicy, state: HealthState) -> timedelta:
    """How long it must be without symptoms: twice as long with each fall."""
    return min(LONGEST_QUIET, policy.quiet * 2 ** min(max(0, state.falls - 1), 20))


def needs_admin(policy: HealthPolicy, state: HealthState) -> bool:
    """Whether it fell sick so often that it does not come back by itself."""
    return state.verdict == SICK and state.falls >= policy.most_falls


def returned(state: HealthState, now: datetime, *, by_hand: bool = False) -> HealthState:
    """In service again, and watched for a while. An admin takes it back as it is: what goes on
    then is nothing new, and it begins to count anew how often it falls sick."""
    back = replace(state, verdict=WATCH, since=now, last_at=now, fault_at=None, probed_at=None)
    if not by_hand:
        return back
    return replace(back, falls=0, fell_at=None, accepted=frozenset(CAUSES))


def probe_failed(state: HealthState, now: datetime) -> HealthState:
    """It stays out, and is probed again after as long."""
    return replace(state, probed_at=now)


def _fallen(state: HealthState, symptom: Symptom, now: datetime) -> HealthState:
    again = state.fell_at is not None and _passed(state.fell_at, now) < DAY
    fallen = _with(state, SICK, symptom, now)
    falls = state.falls + 1 if again else 1
    fault_at = min(symptom.at, now)
    return replace(fallen, fault_at=fault_at, falls=falls, fell_at=now, probed_at=None)


def _with(state: HealthState, verdict: str, symptom: Symptom, now: datetime) -> HealthState:
    return replace(
        state, verdict=verdict, cause=symptom.cause, reason=symptom.said, since=now, last_at=now
    )


def _passed(since: datetime, now: datetime) -> timedelta:
    """A clock that was set back makes nothing longer."""
    return max(timedelta(0), now - since)
