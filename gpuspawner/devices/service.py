"""Devices taken out of service: drains, quarantine, closed nodes, and the queue's pause.

What is closed, and why, is in the store. The scheduler beside ours is told after that, and again
until it answers: whoever dies in between leaves nothing open that is closed here.

A device with an unexplained process is never given out, whatever is written here: placement sees it
as occupied in the very look by which it grants. The quarantine says so where it lasts, in the audit
trail too, and keeps the device closed also for whoever sees less of the machine.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from ..core.errors import GPUSpawnerError, InvalidRequest
from ..db.engine import Store
from ..leases import repository as leases_repository
from . import closures, repository
from .closures import GRANTING, HEALTH, LEAK, Closure, kept_for
from .models import Device, MachineScheduler
from .placement import leasable
from .snapshots import DeviceView, InventoryCache, InventorySnapshot


class MachineService:
    """Has machines closed and opened with their devices, where another scheduler gives these out.

    Without one, a device is its own machine.
    """

    def __init__(
        self, store: Store, delegate: MachineScheduler | None, log: logging.Logger
    ) -> None:
        self.store = store
        self.delegate = delegate
        self.log = log

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
            if not self.closed_on(uuid, still):
                self.open_there(uuid)

    def closed_on(self, uuid: str, closed: Collection[str]) -> list[str]:
        """What is closed of the machine that a device is in."""
        return [each for each in self.on_machine(uuid) if each in closed]

    def open_there(self, uuid: str) -> None:
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


ENDING = timedelta(seconds=20)
"""So long what ran may take to let go of a device after its server ended."""


class LeakService:
    """Knows which free devices are not empty, and puts them in quarantine."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], datetime],
        look: Callable[[], InventorySnapshot],
        log: logging.Logger,
    ) -> None:
        self.store = store
        self.clock = clock
        self.look = look
        self.log = log
        self._leaked_since: dict[str, datetime] = {}

    def judge_leaks(self) -> list[Closure]:
        """Put in quarantine what is not empty for a while though nobody has it, and lift it where
        that is over; those that begin. A device that does not answer stays as it is."""
        now = self.clock()
        look = self.look()
        with self.store.read() as connection:
            closed = closures.load(connection)
            held = {place.uuid for place in leases_repository.taken(connection)}
        before, self._leaked_since = self._leaked_since, {}
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
            if any(place.uuid == device.uuid for place in leases_repository.taken(connection)):
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


LONGEST_REASON = 300
"""Characters."""


class DeviceService:
    """Takes devices out of service and gives them back, for an admin."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], datetime],
        inventory: InventoryCache,
        machines: MachineService,
    ) -> None:
        self.store = store
        self.clock = clock
        self.inventory = inventory
        self.machines = machines

    def pause(self, *, actor: str, reason: str = "") -> bool:
        """Give out no devices until :meth:`resume`; what runs goes on, who waits waits on.

        False when granting was paused already: then nothing changes.
        """
        return self._close(GRANTING, "pause", actor, reason)

    def resume(self, *, actor: str, reason: str = "") -> bool:
        """Give out devices again. False when granting was not paused."""
        return self._reopen(GRANTING, "resume", actor, reason)

    def drain(self, device: str, *, actor: str, reason: str = "") -> bool:
        """Give a device (UUID or index) to nobody new; the session on it ends normally.

        False when it was drained already. Raises InvalidRequest for an unknown device. Where
        somebody else gives out the devices of several machines, a machine is drained whole; see
        :meth:`on_machine`.
        """
        uuid, reason = self.find_device(device).uuid, checked_reason(reason)
        if self.machines.delegate is not None:
            self.machines.delegate.close(uuid, reason or f"drained by {actor}")
        done = [
            self._close(each, "drain", actor, reason) for each in self.machines.on_machine(uuid)
        ]
        return any(done)

    def undrain(self, device: str, *, actor: str, reason: str = "") -> bool:
        """Give a device out again, one that is gone too, and a sick one as it is: only what is
        new drains it. False when it was not drained.

        Raises Refused, and changes nothing, where somebody else closed its machine.
        """
        drained = self.store.run(closures.load).keys() - {GRANTING}
        uuid = device if device in drained else self.find_device(device).uuid
        reason = checked_reason(reason)
        if self.machines.delegate is not None:
            self.machines.delegate.reopen(uuid)
        done = [
            self._reopen(each, "undrain", actor, reason) for each in self.machines.on_machine(uuid)
        ]
        if self.machines.delegate is not None and any(done):
            self.machines.open_there(
                uuid
            )  # it may have been closed once more before this was written
        return any(done)

    def on_machines(self, views: Sequence[DeviceView]) -> tuple[DeviceView, ...]:
        """The same, each with the name of its machine."""
        return tuple(
            replace(each, machine=self.machines.machine_of(each.device.uuid)) for each in views
        )

    def find_device(self, device: str) -> Device:
        """A device by UUID or, as people read it, by index. Raises InvalidRequest.

        The store's own: whoever asks may see less of the machine than the hub does.
        """
        source = self.inventory.source.name
        known = self.store.run(lambda connection: repository.load_devices(connection, source))
        named = [
            d
            for d in known or self.inventory.look(self.clock()).devices
            if device in (d.uuid, str(d.index))
        ]
        if len(named) == 1:
            return named[0]
        what = f"{len(named)} devices have" if named else "No device has"
        raise InvalidRequest(
            f"{what} the UUID or index {short_text(device)}; `gpuspawner devices` lists them.",
            field="device",
        )

    # Steps of the above.

    def _close(self, subject: str, action: str, actor: str, reason: str) -> bool:
        now, reason = self.clock(), checked_reason(reason)
        with self.store.write() as connection:
            before = closures.load(connection).get(subject)
            if before is not None and before.actor in (HEALTH, LEAK):
                closures.reopen(connection, subject)  # what an admin drains, nobody else gives back
            done = closures.close(connection, Closure(subject, now, actor, reason))
            if done:
                closures.note(
                    connection,
                    at=now,
                    actor=actor,
                    action=action,
                    subject=subject,
                    detail=reason,
                )
        return done

    def _reopen(self, subject: str, action: str, actor: str, reason: str) -> bool:
        now, reason = self.clock(), checked_reason(reason)
        with self.store.write() as connection:
            done = closures.reopen(connection, subject)
            if done:
                repository.take_back_sick_lease(connection, subject, now)
                closures.note(
                    connection,
                    at=now,
                    actor=actor,
                    action=action,
                    subject=subject,
                    detail=reason,
                )
        return done


def checked_reason(reason: str, *, needed: bool = False) -> str:
    """An admin's reason on one line. Raises InvalidRequest for what is not one."""
    text = " ".join(reason.split())
    if needed and not text:
        raise InvalidRequest(
            "The reason is missing: say in a few words why; the member reads it.", field="reason"
        )
    if len(text) > LONGEST_REASON:
        raise InvalidRequest(
            f"The reason has {len(text)} characters: {LONGEST_REASON} is the most.", field="reason"
        )
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise InvalidRequest("The reason has characters that nobody can read.", field="reason")
    return text


def short_text(value: object) -> str:
    """What somebody sent, as a sentence can name it."""
    if isinstance(value, int) and abs(value) > 10**40:  # Python itself refuses to write some
        return "That"
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
