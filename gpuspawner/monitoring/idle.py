"""Rules that decide when a server with GPUs is idle. Pure.

A server has idle credit, in seconds, and loses a second of it with every second in which its GPUs
are idle. Work earns credit: a second at full use earns :attr:`IdlePolicy.gain` seconds, up to
:attr:`IdlePolicy.most_minutes`. So a long run keeps its server, a member whose GPUs worked a lot
may take a longer break, and a trickle of fake work has no effect. While kernels have output, credit
decreases more slowly but does not stand still: a printing loop is no GPU work.

At zero credit the member is warned. Working again keeps the server, and snoozing gives more time,
but only a few times; otherwise it is stopped when the countdown ends. Unknown is not idle: while a
GPU does not answer, no credit is lost and nothing is stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from math import ceil
from typing import Any

from .models import DeviceUse

MODES = ("off", "advise", "enforce")

LONGEST_GAP = timedelta(minutes=2)
"""A countdown pauses during longer gaps in the samples."""

BACK_SECONDS = 300.0
"""How much credit must be earned during a countdown to end it."""


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """The admin's decisions. In minutes, except :attr:`gain` and :attr:`output`."""

    mode: str = "off"
    """``off``; ``advise``: members are warned but nothing is stopped; or ``enforce``."""
    mode_waiting: str = ""
    """The mode while others wait for GPUs, if different."""
    first_minutes: float = 30.0
    """Credit of a server that has just started."""
    most_minutes: float = 260.0
    """The most credit that work can earn."""
    sooner_minutes: float = 0.0
    """How much sooner a server counts as idle while others wait."""
    countdown_minutes: float = 10.0
    """The time between the warning and the stop."""
    snooze_minutes: float = 30.0
    """How much later the stop is after one snooze."""
    most_snoozes: int = 2
    """The maximum number of snoozes before a stop."""
    gain: float = 40.0
    """Seconds of credit for a second at full use: with 40, 2.5 % of a GPU keeps the server."""
    output: float = 0.5
    """The rate at which credit decreases in a minute with kernel output, relative to 1."""

    def mode_now(self, waiting: bool) -> str:
        """Return the mode that applies, depending on whether others wait."""
        return self.mode_waiting or self.mode if waiting else self.mode


@dataclass(frozen=True, slots=True)
class Activity:
    """What a server did in a period."""

    seconds: float
    use: float | None = None
    """Mean use of a GPU in percent over the period; None if NVML cannot tell."""
    busy: float | None = None
    """Seconds in which any of its GPUs worked; None if unknown."""
    output: bool = False
    """True if a kernel had output, or its member did anything."""


@dataclass(frozen=True, slots=True)
class IdleState:
    """A server's idle credit and countdown."""

    credit: float
    """Seconds."""
    warned_at: datetime | None = None
    stops_at: datetime | None = None
    """The end of the countdown; None without one, such as if members are only advised."""
    snoozes: int = 0


@dataclass(frozen=True, slots=True)
class IdleVerdict:
    """What is due for a server now."""

    state: IdleState
    event: str = ""
    """``warn``: the countdown begins; ``back``: it is called off; ``stop``: it is over."""


def begin(policy: IdlePolicy) -> IdleState:
    """Return the state of a server that has just started."""
    return IdleState(credit=60 * policy.first_minutes)


def judge(
    policy: IdlePolicy, state: IdleState, it: Activity, now: datetime, *, waiting: bool = False
) -> IdleVerdict:
    """Judge a server's activity up to ``now``. ``waiting``: others wait for GPUs like its own."""
    state = replace(state, credit=credit_after(policy, state.credit, it))
    mode = policy.mode_now(waiting)
    if mode == "off":
        return IdleVerdict(replace(state, warned_at=None, stops_at=None))
    floor = 60 * policy.sooner_minutes if waiting else 0.0
    if state.warned_at is not None and state.credit >= floor + BACK_SECONDS:
        return IdleVerdict(replace(state, warned_at=None, stops_at=None), "back")
    if mode == "advise":  # no countdown: one begins when others come to wait
        state = replace(state, stops_at=None)
    if it.busy is None or (state.credit > floor and state.stops_at is None):
        return IdleVerdict(state)
    if mode == "advise":
        told = "" if state.warned_at else "warn"
        return IdleVerdict(replace(state, warned_at=state.warned_at or now), told)
    if state.stops_at is None:
        stops_at = now + timedelta(minutes=policy.countdown_minutes)
        return IdleVerdict(replace(state, warned_at=now, stops_at=stops_at), "warn")
    return IdleVerdict(state, "stop" if now >= state.stops_at else "")


def credit_after(policy: IdlePolicy, credit: float, it: Activity) -> float:
    """Return the credit after the activity, in seconds."""
    if it.busy is None:
        return credit
    most = 60 * policy.most_minutes
    if it.use is None:  # for some MIG instances it is only known if anybody holds memory on them
        if it.busy > 0:
            return most
        worked = 0.0
    else:
        worked = it.seconds * it.use / 100
    rested = max(0.0, it.seconds - it.busy) * (policy.output if it.output else 1.0)
    return min(max(most, credit), max(0.0, credit + policy.gain * worked - rested))


def after_gap(state: IdleState, gap: timedelta) -> IdleState:
    """Return the state after a time without samples, which extends a countdown.

    The service was down or the clock was set forward: nobody could snooze in that time.
    """
    if state.stops_at is None or gap <= LONGEST_GAP:
        return state
    return replace(state, stops_at=state.stops_at + gap)


def snooze(policy: IdlePolicy, state: IdleState, now: datetime) -> IdleState | None:
    """Extend a countdown on request; None without one, or if no snooze is left."""
    if state.stops_at is None or state.snoozes >= policy.most_snoozes:
        return None
    later = max(now, state.stops_at) + timedelta(minutes=policy.snooze_minutes)
    return replace(state, stops_at=later, snoozes=state.snoozes + 1)


def own_use(own: DeviceUse | None, whole: DeviceUse) -> DeviceUse:
    """Return what a lease did on a shared device in a period.

    Args:
        own: What is known of its own work; None if nothing is.
        whole: What the whole device did, which counts while its own work is not known: otherwise a
            server could be stopped because figures failed.
    """
    if own is None or not own.known:
        return whole
    missing = own.samples - own.known
    if missing <= 0 or not whole.known:
        return own
    use = ceil(missing * whole.use_sum / whole.measured) if whole.measured else 0
    return replace(
        own,
        known=own.samples,
        busy=min(own.samples, own.busy + ceil(missing * whole.busy / whole.known)),
        measured=own.samples if whole.measured else own.measured,
        use_sum=own.use_sum + use,
    )


def activity_of(minutes: Iterable[DeviceUse], seconds: float, *, output: bool) -> Activity:
    """Return the activity of the busiest of a server's devices in the same period.

    It is unknown if one of the devices did not respond, unless another one worked.
    """
    uses: list[float] = []
    busy: list[float] = []
    unknown = False
    for minute in minutes:
        if not minute.known:
            unknown = True
            continue
        busy.append(seconds * minute.busy / minute.known)
        if minute.use is not None:
            uses.append(minute.use)
        elif minute.busy:
            return Activity(seconds, None, busy[-1], output)
    if not busy or (unknown and not any(busy)):
        return Activity(seconds, output=output)
    return Activity(seconds, max(uses, default=None), max(busy), output)


class IdlePolicies:
    """The policies of a site: ``"*"``, then ``"group:NAME"``, then ``"environment:NAME"``."""

    def __init__(self, config: Mapping[str, Mapping[str, Any]]) -> None:
        """Check the configuration. Raises ValueError with a sentence."""
        self._config = {name: _checked(name, values) for name, values in config.items()}

    def of(self, group: str, environment: str) -> IdlePolicy:
        """Return the policy of a server; each entry changes only what it names."""
        merged: dict[str, Any] = {}
        for name in ("*", f"group:{group}", f"environment:{environment}"):
            merged |= self._config.get(name, {})
        return IdlePolicy(**merged)


def _checked(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    kind, colon, rest = name.partition(":")
    if name != "*" and not (kind in ("group", "environment") and colon and rest):
        raise ValueError(
            f'{name!r} names no servers: write "*", "group:NAME" or "environment:NAME"'
        )
    known = {each.name for each in fields(IdlePolicy)}
    for field, value in values.items():
        if field not in known:
            raise ValueError(f"{name} has {field!r}; there are {', '.join(sorted(known))}")
        if field.startswith("mode"):
            if value not in (*MODES, *([""] if field == "mode_waiting" else [])):
                raise ValueError(f"{field} of {name} is {value!r}; write off, advise or enforce")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise ValueError(f"{field} of {name} is {value!r}; write a number from 0 on")
    return dict(values)
