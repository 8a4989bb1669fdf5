"""Limits of members and groups, and which limit keeps a ticket waiting."""

from __future__ import annotations

from collections.abc import Mapping

from .models import HOUR, QueueLimits, RunningLease


class Party:
    """A member or a group with a limit, and what it holds."""

    __slots__ = (
        "devices",
        "held",
        "leases",
        "limits",
        "name",
        "taken_devices",
        "taken_hours",
        "version",
    )

    def __init__(self, name: str, limits: QueueLimits) -> None:
        self.name = name
        """``The member`` or ``The group``: the start of a sentence."""
        self.limits = limits
        self.devices = 0
        self.leases: dict[str, int] = {}
        """Devices by lease."""
        self.version = 0
        """Increases with every change."""
        self.taken_devices = 0
        """What the current decision gives it."""
        self.taken_hours = 0.0
        self.held = (-1, 0.0, 0.0)
        """Version and time of the last sum of its GPU-hours, and the sum."""

    def take(self, devices: int, seconds: float) -> None:
        """Add what the current decision starts for this party."""
        self.taken_devices += devices
        self.taken_hours += devices * seconds / HOUR
        self.version += 1

    def give_back(self) -> None:
        """Forget what the current decision took; it counts again when the leases begin."""
        self.taken_devices = 0
        self.taken_hours = 0.0
        self.version += 1


class LimitedRequests:
    """Requests whose member or group may have limits, and what was found out about them last."""

    __slots__ = (
        "checked",
        "checked_at",
        "devices",
        "parties",
        "refusal",
        "refused_for_a_while",
        "seconds",
    )

    def __init__(self, parties: tuple[Party, ...], devices: int) -> None:
        self.parties = parties
        self.devices = devices
        """How many each of them asks for."""
        self.seconds = 0.0
        """How long each of them keeps its devices: as asked for, else as guessed."""
        self.checked = -1
        self.checked_at = 0.0
        self.refusal = ""
        """The limit that keeps them waiting, as of the check."""
        self.refused_for_a_while = False
        """Whether the passing of time alone may change that."""


class Limiter:
    """All members and groups that have limits."""

    def __init__(self, members: QueueLimits, groups: Mapping[str, QueueLimits]) -> None:
        self._members = members
        self._groups = dict(groups)
        self.any = any(map(_limits, (members, *groups.values())))
        """True if there is any limit."""
        self._parties: dict[tuple[str, str], Party] = {}
        self._until: dict[str, float] = {}
        self._taken: dict[Party, None] = {}

    def of(self, member: str, group: str) -> tuple[Party, ...]:
        """Return the parties whose limits apply to a ticket; most tickets have none."""
        found = []
        if _limits(self._members):
            found.append(self._party("The member", member, self._members))
        limits = self._groups.get(group)
        if limits is not None and _limits(limits):
            found.append(self._party("The group", group, limits))
        return tuple(found)

    def put(self, lease: RunningLease, until: float) -> None:
        """Record that a lease began, or that its end ``until`` (known or expected) changed."""
        if not self.any:
            return
        for party in self.of(lease.member, lease.group):
            self._until[lease.id] = until
            party.devices += lease.devices - party.leases.get(lease.id, 0)
            party.leases[lease.id] = lease.devices
            party.version += 1

    def remove(self, lease: RunningLease) -> None:
        """Record that a lease ended."""
        if not self.any:
            return
        self._until.pop(lease.id, None)
        for party in self.of(lease.member, lease.group):
            party.devices -= party.leases.pop(lease.id, 0)
            party.version += 1

    def refusal(self, batch: LimitedRequests, now: float) -> str:
        """Why the tickets of a batch have to wait, as a sentence; empty when they need not."""
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
        """The decision that is being made starts one ticket of a batch."""
        for party in batch.parties:
            party.take(batch.devices, seconds)
            self._taken[party] = None

    def give_back(self) -> None:
        """Forget what the current decision took; it counts again when the leases begin."""
        for party in self._taken:
            party.give_back()
        self._taken.clear()

    def _devices(self, party: Party, devices: int) -> str:
        most, held = party.limits.devices, party.devices + party.taken_devices
        if most is None or held + devices <= most:
            return ""
        return f"{party.name} may have {most} {_gpus(most)} at once and has {held}."

    def _hours(self, party: Party, batch: LimitedRequests, now: float) -> str:
        most = party.limits.gpu_hours
        if most is None:
            return ""
        if party.held[:2] != (party.version, now):
            party.held = (party.version, now, self._hours_held(party, now))
        held = party.held[2]
        asked = batch.devices * batch.seconds / HOUR
        if held + asked <= most:
            return ""
        return (
            f"{party.name} may hold {most:g} GPU-hours and holds {held:.1f}; "
            f"this request is for {asked:.1f}."
        )

    def _hours_held(self, party: Party, now: float) -> float:
        return party.taken_hours + sum(
            devices * max(0.0, self._until[lease_id] - now) / HOUR
            for lease_id, devices in party.leases.items()
        )

    def _party(self, name: str, who: str, limits: QueueLimits) -> Party:
        found = self._parties.get((name, who))
        if found is None:
            found = self._parties[(name, who)] = Party(name, limits)
        return found


def _limits(limits: QueueLimits) -> bool:
    """Return True if a limit can keep a ticket waiting (``tickets`` is checked earlier)."""
    return limits.devices is not None or limits.gpu_hours is not None


def _gpus(count: int) -> str:
    return "GPU" if count == 1 else "GPUs"
