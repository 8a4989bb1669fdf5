"""Devices on which something of nobody's stays after a server is gone: in quarantine until it ends.

Such a device is never given out, whatever is written here: the pool sees it as occupied in the very
look by which it grants. The quarantine says so where it lasts, in the audit trail too, and keeps
the device closed also for whoever sees less of the machine.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from ..model import Device
from ..pool import leasable
from ..store import closures, leases
from ..store.closures import LEAK, Closure
from .core import Core

ENDING = timedelta(seconds=20)
"""So long what ran may take to let go of a device after its server ended."""


class Leaks(Core):
    """The part of the broker that knows which free devices are not empty."""

    _leaked_since: dict[str, datetime] | None = None

    def judge_leaks(self) -> list[Closure]:
        """Put in quarantine what is not empty for a while though nobody has it, and lift it where
        that is over; those that begin. A device that does not answer stays as it is."""
        now = self.clock()
        look = self.look()
        with self.store.read() as connection:
            closed = closures.load(connection)
            held = {place.uuid for place in leases.taken(connection)}
        before, self._leaked_since = self._leaked_since or {}, {}
        begun = []
        for device in look.devices:
            uuid = device.uuid
            closure = closed.get(uuid)
            if leasable(device) is not None:
                continue
            if device.empty:
                if closure is not None and closure.actor == LEAK:
                    self._reopen_leaked(uuid, now)
            elif uuid not in held and closure is None:
                since = self._leaked_since[uuid] = min(before.get(uuid, now), now)
                if now - since >= ENDING and (done := self._quarantine(device, now)):
                    begun.append(done)
        return begun

    def _quarantine(self, device: Device, now: datetime) -> Closure | None:
        """None when somebody was quicker, or it was given to a server meanwhile."""
        closure = Closure(device.uuid, now, LEAK, who_holds(device))
        with self.store.write() as connection:
            if any(place.uuid == device.uuid for place in leases.taken(connection)):
                return None
            if not closures.close(connection, closure):
                return None
            closures.note(
                connection,
                at=now,
                actor=LEAK,
                action="quarantine",
                subject=device.uuid,
                detail=closure.reason,
            )
        self.log.warning("Device %s is in quarantine: %s", device.uuid, closure.reason)
        return closure

    def _reopen_leaked(self, uuid: str, now: datetime) -> None:
        with self.store.write() as connection:
            closure = closures.load(connection).get(uuid)
            if closure is not None and closure.actor == LEAK:
                closures.reopen(connection, uuid)
                closures.note(
                    connection,
                    at=now,
                    actor=LEAK,
                    action="undrain",
                    subject=uuid,
                    detail="it is empty again",
                )
        self.log.info("Device %s is empty again", uuid)


def who_holds(device: Device) -> str:
    """What is on a device that nobody has, in words."""
    names = [f"{p.name or 'a process'} (pid {p.pid})" for p in device.compute_processes]
    if names:
        return f"{', '.join(names[:5])} of no server of this hub"
    return f"{device.held_bytes / 2**30:.1f} GB of its memory are held, and by no process in sight"
