"""Limits of members and groups, and which limit keeps a ticket waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.units import DeviceCount, format_devices
from ..leases.host_resources import HostAmount
from .models import HOUR, QueueLimits, RunningLease


@dataclass(slots=True, eq=False)
class Party:
    """A member or a group with a limit, and what it holds."""

    name: str
    """``The member`` or ``The group``: the start of a sentence."""
    limits: QueueLimits
    devices: DeviceCount = 0
    leases: dict[str, RunningLease] = field(default_factory=dict)
    """What it holds, by lease."""
    version: int = 0
    """Increases with every change."""
    taken_devices: DeviceCount = 0
    """What the current decision gives it."""
    taken_hours: float = 0.0
    held: tuple[int, float, float] = (-1, 0.0, 0.0)
    """Version and time of the last sum of its GPU-hours, and the sum."""

    def take(self, devices: DeviceCount, hours: float) -> None:
        """Add the devices and GPU-hours that the current decision starts for this party."""
        self.taken_devices += devices
        self.taken_hours += hours
        self.version += 1

    def give_back(self) -> None:
        """Forget what the current decision took; it counts again when the leases begin."""
        self.taken_devices = 0
        self.taken_hours = 0.0
        self.version += 1


@dataclass(slots=True, eq=False)
class LimitedRequests:
    """Requests whose member or group may have limits, and what was found out about them last."""

    parties: tuple[Party, ...]
    devices: DeviceCount
    """How many each of them asks for."""
    equivalents: DeviceCount
    """How many GPUs these are at most; a MIG instance counts as its part."""
    seconds: float = 0.0
    """How long each of them keeps its devices: as asked for, else as guessed."""
    checked: int = -1
    checked_at: float = 0.0
    refusal: str = ""
    """The limit that keeps them waiting, as of the check."""
    host: HostAmount | None = None
    """What each of them is guaranteed of the host's memory and CPU; None for nothing."""
    refused_for_a_while: bool = False
    """True if the passing of time alone may change the refusal."""


class Limiter:
    """All members and groups that have limits."""

    def __init__(self, members: QueueLimits, groups: Mapping[str, QueueLimits]) -> None:
        self._members = members
        self._groups = dict(groups)
        self.any = any(limits.can_hold_back for limits in (members, *groups.values()))
        """True if there is any limit."""
        self._parties: dict[tuple[str, str], Party] = {}
        self._until: dict[str, float] = {}
        self._taken: dict[Party, None] = {}

    def of(self, member: str, group: str) -> tuple[Party, ...]:
        """Return the parties whose limits apply to a ticket; most tickets have none."""
        found = []
        if self._members.can_hold_back:
            found.append(self._party("The member", member, self._members))
        limits = self._groups.get(group)
        if limits is not None and limits.can_hold_back:
            found.append(self._party("The group", group, limits))
        return tuple(found)

    def put(self, lease: RunningLease, until: float) -> None:
        """Record that a lease began, or that its end ``until`` (known or expected) changed."""
        if not self.any:
            return
        for party in self.of(lease.member, lease.group):
            self._until[lease.id] = until
            before = party.leases.get(lease.id)
            party.devices += lease.devices - (before.devices if before else 0)
            party.leases[lease.id] = lease
            party.version += 1

    def remove(self, lease: RunningLease) -> None:
        """Record that a lease ended."""
        if not self.any:
            return
        self._until.pop(lease.id, None)
        for party in self.of(lease.member, lease.group):
            before = party.leases.pop(lease.id, None)
            party.devices -= before.devices if before else 0
            party.version += 1

    def refusal(self, batch: LimitedRequests, now: float) -> str:
        """Return why the tickets of a batch have to wait, as a sentence; "" if they need not."""
        if not batch.parties:
            return ""
        version = 0
        for party in batch.parties:
            version += party.version
        # As long as nobody returns devices, a limit that is not reached stays so, and a reached
        # limit on devices stays reached. Held GPU-hours decrease as time passes.
        if version == batch.checked and (now == batch.checked_at or not batch.refused_for_a_while):
            return batch.refusal
        batch.checked, batch.checked_at, batch.refused_for_a_while = version, now, False
        batch.refusal = ""
        for party in batch.parties:
            batch.refusal = self._devices(party, batch.devices)
            if batch.refusal:
                return batch.refusal
        for party in batch.parties:
            batch.refusal = self._hours(party, batch, now)
            if batch.refusal:
                batch.refused_for_a_while = True
                break
        return batch.refusal

    def take(self, batch: LimitedRequests, seconds: float) -> None:
        """Record that the decision that is being made starts one ticket of a batch."""
        for party in batch.parties:
            party.take(batch.devices, batch.equivalents * seconds / HOUR)
            self._taken[party] = None

    def give_back(self) -> None:
        """Forget what the current decision took; it counts again when the leases begin."""
        for party in self._taken:
            party.give_back()
        self._taken.clear()

    def _devices(self, party: Party, devices: DeviceCount) -> str:
        most, held = party.limits.devices, party.devices + party.taken_devices
        if most is None or held + devices <= most:
            return ""
        gpus = "GPU" if most == 1 else "GPUs"
        return f"{party.name} may have {most} {gpus} at once and has {format_devices(held)}."

    def _hours(self, party: Party, batch: LimitedRequests, now: float) -> str:
        most = party.limits.gpu_hours
        if most is None:
            return ""
        if party.held[:2] != (party.version, now):
            hours = party.taken_hours + sum(
                lease.equivalents * max(0.0, self._until[lease_id] - now) / HOUR
                for lease_id, lease in party.leases.items()
            )
            party.held = (party.version, now, hours)
        held = party.held[2]
        asked = batch.equivalents * batch.seconds / HOUR
        if held + asked <= most:
            return ""
        return (
            f"{party.name} may hold {most:g} GPU-hours and holds {held:.1f}; "
            f"this request is for {asked:.1f}."
        )

    def _party(self, name: str, who: str, limits: QueueLimits) -> Party:
        return self._parties.setdefault((name, who), Party(name, limits))
