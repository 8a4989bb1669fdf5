"""The host's memory and CPU in the decisions of a scheduler: what is left, and for whom. Pure.

A ticket starts only if what it is guaranteed is left. While it waits for that alone, others may
use what is too little for it; after some time, what becomes free is kept for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.units import DeviceCount
from ..leases.host_resources import NOTHING, HostAmount, HostBudget
from .limits import LimitedRequests


@dataclass(frozen=True, slots=True)
class HostUse:
    """What a decision finds on the host."""

    reserved: HostAmount = NOTHING
    """For open leases and restarts, without leases that yield to every start."""
    free_devices: DeviceCount = 0
    """Devices that could be granted now."""


class HostAdmission:
    """Decides which tickets find enough memory and CPU on the host."""

    def __init__(self, budget: HostBudget, patience: float) -> None:
        """Create it; after ``patience`` seconds, what one ticket waits for is kept for it."""
        self._budget = budget
        self._patience = patience
        self._since: dict[str, float] = {}
        """Since when each waiting ticket has found everything but memory or CPU."""
        self._left = budget.total
        self._free_devices: DeviceCount = 0
        self._kept_for: LimitedRequests | None = None

    def begin(self, use: HostUse) -> None:
        """Begin a decision."""
        self._left = self._budget.total - use.reserved
        self._free_devices = use.free_devices
        self._kept_for = None

    @property
    def left(self) -> HostAmount:
        """What preemptible runs and starts with a device may have after those of the decision."""
        return self._left_for_others(self._left, NOTHING)

    def note(self, ticket_id: str, now: float) -> None:
        """Record that a ticket found its devices, and no limit, but not enough on the host."""
        self._since.setdefault(ticket_id, now)

    def forget(self, ticket_id: str) -> None:
        """Record that a ticket left the queue."""
        self._since.pop(ticket_id, None)

    def in_need(self, now: float) -> list[str]:
        """Return the tickets for which something is kept if they do not fit, the first first."""
        due = [(at, name) for name, at in self._since.items() if now - at >= self._patience]
        return [name for _, name in sorted(due)]

    def keep_for(self, requests: LimitedRequests) -> None:
        """Let no other ticket of this decision have what these requests need."""
        self._kept_for = requests

    def fits(self, requests: LimitedRequests) -> bool:
        """Return True if one of the requests finds enough."""
        return requests.host is None or requests.host.fits(self._left_for(requests))

    def lacking(self, requests: LimitedRequests) -> str:
        """Describe what one of the requests does not find; empty if it fits."""
        return requests.host.lacking(self._left_for(requests)) if requests.host else ""

    def take(self, requests: LimitedRequests) -> None:
        """Record that the decision starts one of the requests."""
        self._left -= requests.host or NOTHING
        self._free_devices -= requests.devices
        if requests is self._kept_for:
            self._kept_for = None

    def _left_for(self, requests: LimitedRequests) -> HostAmount:
        per_free_gpu = self._budget.per_free_gpu
        left = self._left
        if not requests.devices:
            left -= per_free_gpu.for_devices(max(0, self._free_devices))
        if requests is self._kept_for:
            return left
        return self._left_for_others(left, per_free_gpu.for_devices(requests.devices))

    def _left_for_others(self, left: HostAmount, share: HostAmount) -> HostAmount:
        """Return what is left beside what is kept.

        A ticket without a device keeps nothing of the part that belongs to each free GPU.
        """
        if self._kept_for is None:
            return left
        beside = left - (self._kept_for.host or NOTHING)
        return beside if self._kept_for.devices else beside.at_least(left.at_most(share))
