"""Machines of a cluster: they are closed to new leases whole, for one of their devices too.

What is closed, and why, is in the store. The scheduler beside ours is told after that, and again
until it answers: whoever dies in between leaves nothing open that is closed here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..errors import GPUSpawnerError
from ..store import closures
from ..store.closures import GRANTING, HEALTH, Closure, kept_for
from .core import Core


class Machines(Core):
    """The part of the broker that has machines closed and opened with their devices."""

    def on_machine(self, uuid: str) -> tuple[str, ...]:
        """The devices that are drained together with a device, itself among them."""
        return (uuid,) if self.delegate is None else self.delegate.on_machine(uuid)

    def machine_of(self, uuid: str) -> str:
        """The name of the machine that a device is in; empty where there is only this one."""
        return "" if self.delegate is None else self.delegate.machine_of(uuid)

    def keep_closed(self, known: Mapping[str, Closure] | None = None) -> None:
        """Have nothing given out of the machines of devices that are closed; ``known`` is what
        is, if somebody has just looked. What cannot be told now is told the next time."""
        if self.delegate is None:
            return
        closed = closed_devices(self.store.run(closures.load) if known is None else known)
        told = self.delegate.keep_closed({uuid: _why(each) for uuid, each in closed.items()})
        # Somebody may have opened one between the question and the answer.
        still = closed_devices(self.store.run(closures.load)) if told else {}
        for uuid in told:
            if not self._closed_on(uuid, still):
                self._open_there(uuid)

    def _closed_on(self, uuid: str, closed: Collection[str]) -> list[str]:
        """What is closed of the machine that a device is in."""
        return [each for each in self.on_machine(uuid) if each in closed]

    def _open_there(self, uuid: str) -> None:
        """Give the machine of a device out again, now that nothing of it is closed here."""
        if self.delegate is None:
            return
        try:
            self.delegate.reopen(uuid)
        except GPUSpawnerError as error:
            machine = self.machine_of(uuid)
            self.log.warning("The machine %s stays closed: %s", machine, error.message)


def _why(closure: Closure) -> str:
    """Why the machine of a device is closed, for who looks there."""
    if closure.actor == HEALTH:
        return f"{closure.subject} is sick: {closure.reason}"
    return closure.reason or f"drained by {closure.actor}"


def closed_devices(known: Mapping[str, Closure]) -> dict[str, Closure]:
    """What is closed to everybody, without what is kept for somebody and the pause of it all."""
    return {
        subject: closure
        for subject, closure in known.items()
        if subject != GRANTING and kept_for(closure) is None
    }
