"""Health of devices: symptoms in samples, and the verdict that follows. Pure.

For each cause an admin sets an action: ``ignore``, ``watch`` (it is shown) or ``drain``. A sick
device gets no new leases, and returns after a time without any symptom and a successful probe. The
time doubles with each relapse; after a few within a day, only an admin returns it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from .models import THROTTLE, Condition, Sample

ACTIONS = ("ignore", "watch", "drain")


@dataclass(frozen=True, slots=True)
class XidClass:
    """Driver errors (Xid) with the same consequence for granting."""

    cause: str
    codes: tuple[int, ...]
    """Empty means all others."""
    what: str


XIDS = (
    XidClass("xid program", (8, 11, 13, 31, 32, 43, 45, 68, 69), "a program's own mistake"),
    XidClass("xid memory", (48, 64, 94, 95, 140), "its memory lost data"),
    XidClass("xid stuck", (46, 61, 62, 110, 119, 120, 143, 158), "the card hangs"),
    XidClass("xid link", (54, 74, 79), "it lost power, NVLink or the bus"),
    XidClass("xid minor", (), "a lesser error"),
)

CAUSES: Mapping[str, tuple[str, str]] = {
    "xid program": ("ignore", "a program's own mistake, which happens every day"),
    "xid memory": ("drain", "its memory lost data, or has nothing to replace bad rows with"),
    "xid stuck": ("drain", "the card or its firmware hangs"),
    "xid link": ("drain", "it lost power, NVLink or the bus"),
    "xid minor": ("watch", "any other error that the driver reports"),
    "xid often": ("drain", "the third lesser error within an hour"),
    "lost": ("drain", "it has not answered for half a minute: it may have fallen off the bus"),
    "ecc": ("drain", "new memory errors that ECC could not correct"),
    "ecc before": ("watch", "there were some since the driver was loaded, before the first sample"),
    "remap pending": ("drain", "bad rows of its memory are replaced when it is reset"),
    "remap failed": ("drain", "it has no spare rows left: it needs to be replaced"),
    "pages pending": ("drain", "bad pages of its memory are retired when it is reset"),
    "hot": ("drain", "at 95 °C or above for a minute, until it is at 85 °C"),
    "slowed": ("watch", "its hardware has slowed it down for a minute"),
    "narrow": ("watch", "its PCIe link has had fewer lanes than it could have for a minute"),
    "weak": ("watch", "its power limit is below nine tenths of its default"),
}
"""The default action of each cause, and its meaning."""

HOT, COOL = 95, 85
"""Degrees Celsius."""
NONSENSE = 150
"""No working sensor reports this."""
SLOWED = 0x8 | 0x40 | 0x80
"""The bits of :data:`gpuspawner.monitoring.models.THROTTLE` that nobody chose."""
WEAK = 0.9
STEADY = timedelta(minutes=1)
"""How long a lasting symptom must last to count: a single reading proves nothing."""
SILENT = timedelta(seconds=30)
LONGEST_STEP = timedelta(seconds=10)
"""The most time counted between two samples, so that no symptom lasts because a clock was set."""
OFTEN = timedelta(hours=1)
TIMES = 3


@dataclass(frozen=True, slots=True)
class Symptom:
    """A fault of a device."""

    cause: str
    """One of :data:`CAUSES`."""
    said: str
    """In words, without a full stop."""
    at: datetime
    lasting: bool = False
    """True if it continues; otherwise it happened at that time."""


def xid_class(code: int) -> XidClass:
    """Return the class of a driver error."""
    return next(each for each in XIDS if code in each.codes or not each.codes)


class SymptomWindow:
    """Symptoms found in consecutive samples of one device."""

    def __init__(self) -> None:
        self._at: datetime | None = None
        self._lasted: dict[str, timedelta] = {}
        self._since: dict[str, datetime] = {}
        self._said: dict[str, str] = {}
        self._ecc: int | None = None
        self._minor: list[datetime] = []
        self._happened: dict[str, Symptom] = {}

    def add(self, samples: Iterable[Sample]) -> None:
        """Add samples of the device, in the order in which they were taken."""
        for sample in samples:
            self._add(sample)

    @property
    def going_on(self) -> frozenset[str]:
        """The causes that continue, including those that have not lasted long enough to count."""
        return frozenset(self._lasted)

    def judged(self) -> None:
        """Mark everything that happened as judged."""
        self._happened.clear()

    def look(self) -> tuple[Symptom, ...]:
        """Return what happened since :meth:`judged`, and what continues."""
        lasting = (
            Symptom(cause, self._said[cause], self._since[cause], lasting=True)
            for cause, lasted in self._lasted.items()
            if lasted >= (SILENT if cause == "lost" else STEADY)
        )
        return (*self._happened.values(), *lasting)

    def _add(self, it: Sample) -> None:
        if it.silent:
            return  # nothing was found about it, healthy or sick
        step = timedelta(0)
        if self._at is not None:
            step = min(max(it.at - self._at, timedelta(0)), LONGEST_STEP)
        self._at = it.at
        for code in it.xids:
            self._reported(code, it.at)
        self._lasts("lost", bool(it.error), it.error.rstrip("."), it.at, step)
        if it.error:
            return  # the state of lasting causes is unknown, so it stays as it was
        self._warmth(it, step)
        if it.ecc_errors is not None:
            self._memory_errors(it.ecc_errors, it.at)
        slowed = it.throttle & SLOWED
        why = ", ".join(text for bit, text in THROTTLE.items() if bit & slowed)
        self._lasts("slowed", bool(slowed), f"slowed down: {why}", it.at, step)
        if it.condition is not None:
            self._state(it, it.condition, step)

    def _reported(self, code: int, at: datetime) -> None:
        kind = xid_class(code)
        said = f"Xid {code}: {kind.what}"
        self._happens(said, Symptom(kind.cause, said, at))
        if kind.cause != "xid minor":
            return
        self._minor = [*(x for x in self._minor if timedelta(0) <= at - x < OFTEN), at]
        if len(self._minor) >= TIMES:
            said = f"{len(self._minor)} lesser errors within an hour, the last one Xid {code}"
            self._happens("xid often", Symptom("xid often", said, at))
            self._minor.clear()

    def _memory_errors(self, count: int, at: datetime) -> None:
        before, self._ecc = self._ecc, count
        if before is None:
            if count:
                said = f"{_errors(count)} since the driver was loaded"
                self._begin("ecc before", said, at)
            return
        new = count - before if count >= before else count  # the counter restarts with the driver
        if new:
            said = f"{_errors(new)} that ECC could not correct"
            self._happens("ecc", Symptom("ecc", said, at))
        if not count:
            self._end("ecc before")

    def _warmth(self, it: Sample, step: timedelta) -> None:
        if it.celsius is None or it.celsius > NONSENSE:
            return
        if it.celsius >= HOT or it.celsius <= COOL or "hot" not in self._lasted:
            self._lasts("hot", it.celsius >= HOT, f"{it.celsius} °C", it.at, step)

    def _state(self, it: Sample, found: Condition, step: timedelta) -> None:
        for cause, flag, said in (
            ("remap pending", found.remap_pending, "rows of its memory wait to be replaced"),
            ("remap failed", found.remap_failed, "it has no spare rows of memory left"),
            ("pages pending", found.pages_pending, "pages of its memory wait to be retired"),
        ):
            if flag:
                self._begin(cause, said, it.at)
            elif flag is not None:
                self._end(cause)
        width, most = found.link_width, found.link_most
        if width and most:
            said = f"{width} of {most} lanes of PCIe"
            self._lasts("narrow", width < most, said, it.at, step)
        limit, usual = found.limit_milliwatts, found.usual_milliwatts
        if limit and usual:
            said = f"limited to {limit // 1000} of {usual // 1000} W"
            self._lasts("weak", limit < WEAK * usual, said, it.at, step)

    def _happens(self, key: str, symptom: Symptom) -> None:
        """Record a symptom, the first of its kind until it is judged, however long that takes."""
        self._happened.setdefault(key, symptom)

    # Lasting symptoms.

    def _lasts(self, cause: str, on: bool, said: str, at: datetime, step: timedelta) -> None:
        """Add up the time for which a cause lasts, or end it."""
        if not on:
            self._end(cause)
            return
        before = self._lasted.get(cause)
        if before is None:
            self._since[cause] = at
        self._lasted[cause] = timedelta(0) if before is None else min(before + step, STEADY)
        self._said[cause] = said

    def _begin(self, cause: str, said: str, at: datetime) -> None:
        """Start a lasting cause that counts at once."""
        if cause not in self._lasted:
            self._since[cause] = at
        self._lasted[cause], self._said[cause] = STEADY, said

    def _end(self, cause: str) -> None:
        self._lasted.pop(cause, None)


def _errors(count: int) -> str:
    return f"{count} memory error{'' if count == 1 else 's'}"


def checked_actions(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the actions of causes as an admin set them.

    By the names of :data:`CAUSES`, or ``xid 79`` for one code. Raises ValueError with a sentence.
    """
    for name, action in config.items():
        word, _, code = str(name).partition(" ")
        one_code = word == "xid" and code.isascii() and code.isdigit()
        if name not in CAUSES and not one_code:
            known = ", ".join(CAUSES)
            raise ValueError(f'{name!r} is not a cause: write "xid 79" for one error, or {known}')
        if action not in ACTIONS:
            raise ValueError(f"{name!r} is to {action!r}; write ignore, watch or drain")
    return dict(config)


FINE, WATCH, SICK = "fine", "watch", "sick"

CALM = timedelta(hours=1)
"""A device on watch is fine again after this long without a symptom."""
DAY = timedelta(days=1)
"""A relapse within this time counts as flapping."""
AGAIN = timedelta(seconds=30)
"""A lasting symptom is recorded at most this often."""
LONGEST_QUIET = timedelta(hours=12)


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """The admin's decisions."""

    actions: Mapping[str, str]
    """Actions that differ from the defaults in :data:`gpuspawner.monitoring.health.CAUSES`."""
    quiet: timedelta
    """How long a sick device must be without symptoms before it is probed, the first time."""
    most_falls: int
    """After this many relapses within a day, it stays out until an admin returns it."""

    def action(self, symptom: Symptom) -> str:
        """Return a symptom's action; one for the single error takes precedence over its class's."""
        one = symptom.said.partition(":")[0].lower()
        return self.actions.get(one) or self.actions.get(symptom.cause) or CAUSES[symptom.cause][0]


@dataclass(frozen=True, slots=True)
class HealthState:
    """The health of a device."""

    since: datetime
    """When the verdict began."""
    verdict: str = FINE
    cause: str = ""
    """The cause of the verdict, as in :data:`gpuspawner.monitoring.health.CAUSES`."""
    reason: str = ""
    fault_at: datetime | None = None
    """When the fault began that made it sick."""
    last_at: datetime | None = None
    """The last symptom that counted."""
    falls: int = 0
    """How often it became sick, each time within a day of the last."""
    fell_at: datetime | None = None
    probed_at: datetime | None = None
    """The last failed probe."""
    accepted: frozenset[str] = frozenset()
    """Causes that continued when an admin returned it, and still do."""


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """The new state, and what is due."""

    state: HealthState
    event: str = ""
    """``sick``, ``watch`` or ``fine``: it just became so; ``probe``: one is due."""


def judge(
    policy: HealthPolicy,
    state: HealthState,
    symptoms: Iterable[Symptom],
    now: datetime,
    going_on: Collection[str] = (),
) -> HealthVerdict:
    """Judge the symptoms found up to ``now``. ``going_on``: lasting causes, counted or not."""
    state = replace(state, accepted=state.accepted.intersection(going_on))
    found = [each for each in symptoms if not (each.lasting and each.cause in state.accepted)]
    drains = [each for each in found if policy.action(each) == "drain"]
    counted = drains or [each for each in found if policy.action(each) == "watch"]
    if state.verdict == SICK:
        if drains:
            told = _passed(state.last_at or state.since, now)
            if timedelta(0) < told < min(AGAIN, policy.quiet / 4):
                return HealthVerdict(state)
            return HealthVerdict(replace(state, last_at=now))
        return HealthVerdict(state, "probe" if probe_is_due(policy, state, now) else "")
    if drains:
        return HealthVerdict(_fallen(state, drains[0], now), "sick")
    if counted:
        if state.verdict == WATCH and state.cause == counted[0].cause:
            return HealthVerdict(replace(state, last_at=now, reason=counted[0].said))
        return HealthVerdict(_with(state, WATCH, counted[0], now), "watch")
    if state.verdict == WATCH and _passed(state.last_at or state.since, now) >= CALM:
        return HealthVerdict(replace(state, verdict=FINE, cause="", reason="", since=now), "fine")
    return HealthVerdict(state)


def probe_is_due(policy: HealthPolicy, state: HealthState, now: datetime) -> bool:
    """Return True if a sick device may be probed."""
    if needs_admin(policy, state):
        return False
    last = max(filter(None, (state.last_at, state.probed_at)), default=state.since)
    quiet = policy.quiet * 2 ** min(max(0, state.falls - 1), 20)  # twice as long with each relapse
    return _passed(last, now) >= min(LONGEST_QUIET, quiet)


def needs_admin(policy: HealthPolicy, state: HealthState) -> bool:
    """Return True if it became sick so often that it does not return by itself."""
    return state.verdict == SICK and state.falls >= policy.most_falls


def returned(state: HealthState, now: datetime, *, by_hand: bool = False) -> HealthState:
    """Return the state of a device that is back in service and watched for a while.

    An admin returns it as it is: lasting causes are not new then, and relapses are counted from
    zero.
    """
    back = replace(state, verdict=WATCH, since=now, last_at=now, fault_at=None, probed_at=None)
    if not by_hand:
        return back
    return replace(back, falls=0, fell_at=None, accepted=frozenset(CAUSES))


def probe_failed(state: HealthState, now: datetime) -> HealthState:
    """Return the state after a failed probe: it stays out, and is probed again after as long."""
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
    """Return the time passed; zero if the clock was set back."""
    return max(timedelta(0), now - since)
