"""The queue's configuration, ``c.GPUQueue.NAME``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from traitlets import Dict, Float
from traitlets.config import LoggingConfigurable

from ..core.errors import ConfigError
from ..leases.host_resources import HostBudget
from .models import Priority, QueueLimits, QueuePolicy
from .scheduler import Scheduler

LIMITS = tuple(field.name for field in fields(QueueLimits))
POLICY = tuple(field.name for field in fields(QueuePolicy))


class GPUQueue(LoggingConfigurable):
    """Who goes before whom, and how much a member may have."""

    group_weights = Dict(
        config=True,
        help="""
        How much of the GPUs a group deserves compared with other groups. A group that is not named
        has the weight 1.

        A member of several groups counts towards the one with the highest priority, then the
        highest weight. Example::

            c.GPUQueue.group_weights = {"research": 3, "course-ml": 2}
        """,
    )

    group_priority = Dict(
        config=True,
        help="""
        The priority of groups: ``admin`` is served before ``course``, ``course`` before ``normal``
        (the default), ``normal`` before ``low``.

        A long wait outweighs a priority in the end. Example::

            c.GPUQueue.group_priority = {"course-ml": "course", "guests": "low"}
        """,
    )

    member_limits = Dict(
        {"tickets": 3},
        config=True,
        help="""
        The most that each member may have: ``devices`` at once, waiting ``tickets``, and
        ``gpu_hours`` held (devices times the rest of their sessions). A key that is not named has
        no limit. Example::

            c.GPUQueue.member_limits = {"devices": 2, "tickets": 2, "gpu_hours": 48}
        """,
    )

    group_limits = Dict(
        config=True,
        help="""
        The most that all members of a group may have together, by group, with the keys of
        ``member_limits``. Example::

            c.GPUQueue.group_limits = {"guests": {"devices": 1, "tickets": 10}}
        """,
    )

    policy = Dict(
        config=True,
        help="""
        Parameters of the queue's order that differ from the defaults. ``gpuspawner simulate`` tries
        them on the site's own past. Example::

            c.GPUQueue.policy = {"half_life_seconds": 14 * 86400}
        """,
    )

    claim_minutes = Float(
        10.0,
        min=0.0,
        config=True,
        help="""
        Minutes that a member has to connect to a server that started from the queue. If they do not
        connect, it stops and costs nothing. After the second time in a row, their next request
        waits at the end of the queue. 0 turns this off. Example::

            c.GPUQueue.claim_minutes = 15
        """,
    )

    def make_scheduler(self, host: HostBudget | None = None) -> Scheduler:
        """Create the scheduler from these settings, for a host with this budget.

        Raises ConfigError naming a bad setting.
        """
        return Scheduler(
            self.read_policy(),
            group_weights=_weights(self.group_weights),
            member_limits=_limits("member_limits", self.member_limits),
            group_limits={
                group: _limits(f"group_limits[{group!r}]", limits)
                for group, limits in self.group_limits.items()
            },
            host=host,
        )

    def standing_of(self, groups: Iterable[str]) -> tuple[str, int]:
        """Return the group that a member counts against (``""`` if none) and its priority."""
        named = {*self.group_weights, *self.group_priority, *self.group_limits}
        mine = sorted(named.intersection(groups))
        if not mine:
            return "", int(Priority.NORMAL)
        best = max(mine, key=lambda g: (self._priority(g), float(self.group_weights.get(g, 1))))
        return best, int(self._priority(best))

    def limits_of(self, group: str) -> tuple[QueueLimits, QueueLimits]:
        """Return the member's limits and the group's."""
        group_limits = self.group_limits.get(group, {})
        return (
            _limits("member_limits", self.member_limits),
            _limits(f"group_limits[{group!r}]", group_limits),
        )

    def _priority(self, group: str) -> Priority:
        name = str(self.group_priority.get(group, "normal"))
        try:
            return Priority[name.upper()]
        except KeyError:
            names = ", ".join(p.name.lower() for p in Priority)
            what = f"c.GPUQueue.group_priority[{group!r}] is {name!r}; there are {names}"
            raise ConfigError(what=what) from None

    def read_policy(self) -> QueuePolicy:
        """Return the queue policy from the settings. Raises ConfigError."""
        if unknown := sorted(set(self.policy) - set(POLICY)):
            what = f"c.GPUQueue.policy has {unknown[0]!r}; there are {', '.join(POLICY)}"
            raise ConfigError(what=what)
        try:
            return QueuePolicy(**self.policy)
        except (TypeError, ValueError) as error:
            raise ConfigError(what=f"c.GPUQueue.policy: {error}") from None


def _weights(found: Mapping[str, Any]) -> dict[str, float]:
    for group, weight in found.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not weight > 0:
            what = (
                f"c.GPUQueue.group_weights[{group!r}] is {weight!r}; a weight is a number above 0"
            )
            raise ConfigError(what=what)
    return {group: float(weight) for group, weight in found.items()}


def _limits(name: str, found: Mapping[str, Any]) -> QueueLimits:
    if not isinstance(found, Mapping):
        raise ConfigError(what=f"c.GPUQueue.{name} is {found!r}; write it like {{'devices': 2}}")
    if unknown := sorted(set(found) - set(LIMITS)):
        what = f"c.GPUQueue.{name} has {unknown[0]!r}; there are {', '.join(LIMITS)}"
        raise ConfigError(what=what)
    for limit, value in found.items():
        whole = limit != "gpu_hours"
        right = int if whole else (int, float)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, right) or not value >= 0
        ):
            number = "a whole number" if whole else "a number"
            what = f"c.GPUQueue.{name}[{limit!r}] is {value!r}; it is {number} from 0, or absent"
            raise ConfigError(what=what)
    return QueueLimits(**found)
