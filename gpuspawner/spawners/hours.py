"""Session length: what the admin sets, and what the form offers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from jupyterhub.traitlets import Callable
from traitlets import Float, Union
from traitlets.config import Configurable

from ..catalog import MOST_HOURS, Environment, SessionHours
from ..errors import ConfigError
from ..ledger.rules import format_time_left
from ..model import format_credits
from . import options

STEPS = (1.0, 2.0, 4.0, 8.0, 12.0, 24.0, 48.0, 72.0, 168.0)
"""Hours that the form offers, as far as they are allowed."""


class Hours(Configurable):
    """The traits that limit how long servers with a GPU run."""

    default_hours = Union(
        [Float(), Callable()],
        default_value=None,
        allow_none=True,
        config=True,
        help="""
        Hours that a server with a GPU may run when its member does not say how long.

        A number, or a callable that takes the spawner. None: as many as ``most_hours``; an
        environment of the catalog may say otherwise. Example::

            c.GPUSpawnerMixin.default_hours = 8
        """,
    )

    most_hours = Union(
        [Float(), Callable()],
        default_value=None,
        allow_none=True,
        config=True,
        help="""
        The most hours of one session with a GPU; an environment may allow fewer.

        A number, or a callable that takes the spawner. ``group_overrides`` can set it for
        a group. None: no limit, and no end unless the member asks for one. Servers without
        a GPU have no end. Example::

            c.GPUSpawnerMixin.most_hours = 24
            c.GPUSpawnerMixin.most_hours = lambda spawner: 72 if spawner.user.admin else 12
        """,
    )

    def session_hours(self, environment: Environment) -> SessionHours:
        """The usual and the greatest length for this member in this environment.

        Raises ConfigError when a setting makes no sense.
        """
        usual, most = self._hours("default_hours"), self._hours("most_hours")
        return options.combine(environment.hours, SessionHours(usual, most))

    def _hours(self, trait: str) -> float | None:
        value = getattr(self, trait)
        hours: Any = value(self) if callable(value) else value
        if hours is None:
            return None
        number = isinstance(hours, (int, float)) and not isinstance(hours, bool)
        if not number or not 0 < hours <= MOST_HOURS:
            what = (
                f"c.GPUSpawnerMixin.{trait} is {hours!r}; it is a number of hours, or None. "
                f"{MOST_HOURS} is the most"
            )
            raise ConfigError(what=what)
        return float(hours)


@dataclass(frozen=True, slots=True)
class HourChoice:
    """One line of the form's list of hours."""

    hours: float
    value: str
    label: str


def hour_choices(
    limits: Sequence[SessionHours], last: float | None, rates: Iterable[int]
) -> list[HourChoice]:
    """The hours that a form offers, shortest first, with what they cost.

    ``limits`` are those of the environments that the member may choose, ``last`` what was
    chosen last time, ``rates`` microcredits per GPU-hour of the models there are.
    """
    most = max((_most(limit) for limit in limits), default=0.0)
    offered = {hours for hours in STEPS if hours <= most}
    if most < math.inf:
        offered.add(most)
    if last is not None and last <= most:
        offered.add(last)
    found = sorted(rates)
    return [
        HourChoice(hours, repr(hours).removesuffix(".0"), _label(hours, found))
        for hours in sorted(offered)
        if hours >= options.LEAST_HOURS
    ]


def usual_label(limits: Sequence[SessionHours]) -> str:
    """What happens when the member says nothing, in words."""
    defaults = {limit.default for limit in limits}
    if len(defaults) > 1:
        return "usual for the environment"
    (usual,) = defaults or {None}
    return f"as usual: {length(usual)}" if usual is not None else "until I stop it"


def length(hours: float) -> str:
    """``1 h 30 min``, ``3 d``, or ``less than a minute``."""
    return format_time_left(timedelta(hours=hours))


def _most(limit: SessionHours) -> float:
    return math.inf if limit.max is None else limit.max


def _label(hours: float, rates: Sequence[int]) -> str:
    """``4 h, 2 to 16 credits a GPU``; the price is left out where everything is free."""
    costs = sorted({format_credits(math.ceil(rate * hours)) for rate in rates}, key=float)
    if not rates or not rates[-1]:
        return length(hours)
    price = costs[0] if len(costs) == 1 else f"{costs[0]} to {costs[-1]}"
    return f"{length(hours)}, {price} credits a GPU"
