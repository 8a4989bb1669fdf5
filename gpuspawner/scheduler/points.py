"""The arithmetic of a score. One point is a request half as large."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from .policy import HOUR, Policy
from .use import Use
from .values import Part, Priority

FIRST = 1e9
"""Points of a ticket that an admin gave a position: before every score."""

BY_AGE = 1e6
"""Points of a ticket that goes first because of its age."""


class Reckoning(NamedTuple):
    """The points of a request, and the figures behind them."""

    size: float = 0.0
    gpu_hours: float = 0.0
    member: float = 0.0
    member_used: float = 0.0
    group: float = 0.0
    group_used: float = 0.0


class Points:
    """Works out points from policy, weights and past use."""

    def __init__(
        self,
        policy: Policy,
        member_weights: Mapping[str, float],
        group_weights: Mapping[str, float],
    ) -> None:
        self._policy = policy
        self._member_weights = dict(member_weights)
        self._group_weights = dict(group_weights)
        self._members = Use(policy.half_life_seconds)
        self._groups = Use(policy.half_life_seconds)
        self._whole = self._members.full
        """GPU-seconds that all devices can come to: past use is a part of them."""

    def set_capacity(self, devices: int) -> None:
        """How many usable devices there are."""
        self._whole = max(1, devices) * self._members.full

    def start(self, member: str, group: str, devices: int, at: float) -> None:
        """So many devices more are in use by a member, for a group."""
        if member:
            self._members.change(member, devices, at)
        if group:
            self._groups.change(group, devices, at)

    def end(self, member: str, group: str, devices: int, at: float) -> None:
        """So many were given back."""
        self.start(member, group, -devices, at)

    def reckon(self, member: str, group: str, devices: int, cost: float, now: float) -> Reckoning:
        """The points of a request for so many devices that is expected to cost ``cost`` seconds."""
        policy = self._policy
        gpu_hours = devices * cost / HOUR
        size = math.log2(policy.level_gpu_hours / gpu_hours)
        member_used = member_points = group_used = group_points = 0.0
        if member:
            member_used = self._members.of(member, now)
            share = member_used / (self._whole * self._member_weights.get(member, 1.0))
            member_points = -policy.member_share_points * share
        if group:
            group_used = self._groups.of(group, now)
            share = group_used / (self._whole * self._group_weights.get(group, 1.0))
            group_points = -policy.group_share_points * share
        return Reckoning(size, gpu_hours, member_points, member_used, group_points, group_used)

    def sum(self, reckoning: Reckoning, priority: Priority, boost: float) -> float:
        """All points but those for waiting."""
        own = reckoning.size + reckoning.member + reckoning.group
        return own + self._policy.priority_points.get(priority, 0.0) + boost

    def parts(
        self, reckoning: Reckoning, member: str, group: str, priority: Priority, boost: float
    ) -> list[Part]:
        """The same, line by line."""
        level = self._policy.level_gpu_hours
        size = f"about {reckoning.gpu_hours:.1f} GPU-hours expected, {level:g} give 0 points"
        parts = [Part("size", reckoning.size, size)]
        if member:
            used = _used(reckoning.member_used, self._member_weights.get(member, 1.0))
            parts.append(Part("share of the member", reckoning.member, used))
        if group:
            used = _used(reckoning.group_used, self._group_weights.get(group, 1.0))
            parts.append(Part("share of the group", reckoning.group, used))
        if priority != Priority.NORMAL:
            of_class = self._policy.priority_points.get(priority, 0.0)
            parts.append(Part("priority", of_class, f"class {Priority(priority).name.lower()}"))
        if boost:
            parts.append(Part("boost", boost, "given by an admin"))
        return parts


def _used(seconds: float, weight: float) -> str:
    return f"used {seconds / HOUR:.1f} GPU-hours of late, weight {weight:g}"
