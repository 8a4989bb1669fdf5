"""When a server that holds GPUs counts as idle. Pure.

A server has credit, in seconds, and loses a second of it with every second in which its GPUs rest.
Work earns credit: a second at full use :attr:`IdlePolicy.gain` seconds, up to
:attr:`IdlePolicy.most_minutes`. So a long run keeps a server for as long as it lasts, whether or
not anybody looks on; who worked much may take a longer break than who never worked; and a trickle
of fake work, which earns in proportion to its share of a GPU, comes to nothing. While kernels have
output credit goes more slowly, and does not stand still: a loop that prints is no work of a GPU.

At no credit the member is warned. Who works again keeps the server; who snoozes has more time, a
few times; else it is stopped when the countdown ends. What is not known is not idleness: while a
GPU does not answer, nothing is lost and nothing is stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any

from .models import DeviceUse

MODES = ("off", "advise", "enforce")

LONGEST_GAP = timedelta(minutes=2)
"""A countdown stands still in a longer time of which nothing is known."""

BACK_SECONDS = 300.0
"""So much credit must be earned during a countdown to end it."""


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """What an admin decides. Minutes, but for :attr:`gain` and :attr:`output`."""

    mode: str = "off"
    """``off``; ``advise``: members are warned, and nothing is stopped; or ``enforce``."""
    mode_waiting: str = ""
    """The mode while others wait for GPUs, if another one."""
    first_minutes: float = 30.0
    """Credit of a server that has just started."""
    most_minutes: float = 260.0
    """The most credit that work can earn."""
    sooner_minutes: float = 0.0
    """How much sooner a server counts as idle while others wait."""
    countdown_minutes: float = 10.0
    snooze_minutes: float = 30.0
    most_snoozes: int = 2
    gain: float = 40.0
    """Seconds of credit for a second at full use: with 40, 2.5 % of a GPU keep it."""
    output: float = 0.5
    """How fast credit goes in a minute in which a kernel had output, beside 1."""

    def mode_now(self, waiting: bool) -> str:
        """The mode, when others wait or not."""
        return self.mode_waiting or self.mode if waiting else self.mode


@dataclass(frozen=True, slots=True)
class Activity:
    """What a server did in a while."""

    seconds: float
    use: float | None = None
    """Percent of a GPU, the mean over the time; None where NVML cannot tell."""
    busy: float | None = None
    """Seconds in which any of its GPUs worked; None when that is not known."""
    output: bool = False
    """Whether a kernel had output, or its member did anything."""


@dataclass(frozen=True, slots=True)
class IdleState:
    """Where a server stands."""

    credit: float
    """Seconds."""
    warned_at: datetime | None = None
    stops_at: datetime | None = None
    """The end of the countdown; None when there is none, as where members are only advised."""
    snoozes: int = 0


@dataclass(frozen=True, slots=True)
class IdleVerdict:
    """What is due for a server now."""

    state: IdleState
    event: str = ""
    """``warn``: the countdown begins; ``back``: it is called off; ``stop``: it is over."""


def begin(policy: IdlePolicy) -> IdleState:
    """A server that has just started."""
    return IdleState(credit=60 * policy.first_minutes)


def judge(
    policy: IdlePolicy, state: IdleState, it: Activity, now: datetime, *, waiting: bool = False
) -> IdleVerdict:
    """Go on by what a server did up to ``now``. ``waiting``: others wait for GPUs like its own."""
    state = replace(state, credit=credit_after(policy, state.credit, it))
    mode = policy.mode_now(waiting)
    if mode == "off":
        return IdleVerdict(replace(state, warned_at=None, stops_at=None))
    floor = 60 * policy.sooner_minutes if waiting else 0.0
    if state.warned_at is not None and state.credit >= floor + BACK_SECONDS:
        return IdleVerdict(replace(state, warned_at=None, stops_at=None), "back")
    if mode == "advise":  # there is no countdown: it begins when others come to wait
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
    """The credit after a while, in seconds."""
    if it.busy is None:
        return credit
    most = 60 * policy.most_minutes
    if it.use is None:  # of a MIG instance it is known only whether anybody holds memory on it
        if it.busy > 0:
            return most
        worked = 0.0
    else:
        worked = it.seconds * it.use / 100
    rested = max(0.0, it.seconds - it.busy) * (policy.output if it.output else 1.0)
    return min(max(most, credit), max(0.0, credit + policy.gain * worked - rested))


def after_gap(state: IdleState, gap: timedelta) -> IdleState:
    """The state after a time in which nobody sampled, as the service was away, or which only the
    clock says has passed. Nobody could snooze then: the countdown is longer by it."""
    if state.stops_at is None or gap <= LONGEST_GAP:
        return state
    return replace(state, stops_at=state.stops_at + gap)


def snooze(policy: IdlePolicy, state: IdleState, now: datetime) -> IdleState | None:
    """More time for who asks for it during a countdown; None when there is none, or no more."""
    if state.stops_at is None or state.snoozes >= policy.most_snoozes:
        return None
    later = max(now, state.stops_at) + timedelta(minutes=policy.snooze_minutes)
    return replace(state, stops_at=later, snoozes=state.snoozes + 1)


def activity_of(minutes: Iterable[DeviceUse], seconds: float, *, output: bool) -> Activity:
    """What a server did that holds these devices, from what each did in the same while: the use is
    that of the one that worked most, so that who holds two and works on one counts as working.

    It is not known when one of the devices did not answer, unless another one worked.
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
        """Raises ValueError with a sentence about a mistake."""
        self._config = {name: _checked(name, values) for name, values in config.items()}

    def of(self, group: str, environment: str) -> IdlePolicy:
        """What holds for a server; each entry changes only what it names."""
        merged: dict[str, Any] = {}
        for name in ("*", f"group:{group}", f"environment:{environment}"):
            merged |= self._config.get(name, {})
        return IdlePolicy(**merged)


def _checked(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    kind, colon, rest = name.partition(":")
    if name != "*" and not (kind in ("group", "environment") and colon and rest):
        raise ValueError(f'{name!r} is no server\'s: write "*", "group:NAME" or "environment:NAME"')
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
