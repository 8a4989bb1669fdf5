"""What admins change: pauses, drains, and the order in line. Every change is in the audit trail."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import InvalidRequest, TicketEnded
from ..model import Device, Ticket
from ..store import closures, devices, health, tickets
from ..store.closures import GRANTING, HEALTH, LEAK, Closure
from .machines import Machines
from .view import DeviceView

MOST_POINTS = 1_000_000
"""The greatest boost either way."""

LAST_POSITION = 1_000_000
"""The greatest place of an admin's own."""

LONGEST_REASON = 300
"""Characters."""


class Admin(Machines):
    """The part of the broker that changes what the scheduler goes by."""

    @property
    def hours_a_point(self) -> float:
        """How long a ticket waits for one point more."""
        return self.line.scheduler.policy.waiting_point_seconds / 3600

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
        if self.delegate is not None:
            self.delegate.close(uuid, reason or f"drained by {actor}")
        done = [self._close(each, "drain", actor, reason) for each in self.on_machine(uuid)]
        return any(done)

    def undrain(self, device: str, *, actor: str, reason: str = "") -> bool:
        """Give a device out again, one that is gone too, and a sick one as it is: only what is
        new drains it. False when it was not drained.

        Raises Refused, and changes nothing, where somebody else closed its machine.
        """
        drained = self.store.run(closures.load).keys() - {GRANTING}
        uuid = device if device in drained else self.find_device(device).uuid
        reason = checked_reason(reason)
        if self.delegate is not None:
            self.delegate.reopen(uuid)
        done = [self._reopen(each, "undrain", actor, reason) for each in self.on_machine(uuid)]
        if self.delegate is not None and any(done):
            self._open_there(uuid)  # it may have been closed once more before this was written
        return any(done)

    def on_machines(self, views: Sequence[DeviceView]) -> tuple[DeviceView, ...]:
        """The same, each with the name of its machine."""
        return tuple(replace(each, machine=self.machine_of(each.device.uuid)) for each in views)

    def boost(self, ticket_id: str, points: float, *, actor: str, reason: str = "") -> Ticket:
        """Set the points that an admin adds to a ticket's score; 0 takes them away.

        Raises UnknownTicket, TicketEnded, or InvalidRequest for what is no number of points.
        """
        if not _is_number(points) or not abs(points) <= MOST_POINTS:  # so, NaN is refused too
            raise InvalidRequest(
                f"{_short(points)} is no number of points: write one from {-MOST_POINTS} "
                f"to {MOST_POINTS}; one is worth {self.hours_a_point:g} hours of waiting.",
                field="points",
            )
        return self._change(ticket_id, "boost", f"{points:+g} points", actor, reason, boost=points)

    def move(self, ticket_id: str, position: int | None, *, actor: str, reason: str = "") -> Ticket:
        """Put a ticket at a place of the admin's own: 1 goes before 2, both before all others.

        None gives it back to the order. Raises UnknownTicket, TicketEnded or InvalidRequest.
        """
        whole = _is_number(position) and isinstance(position, int)
        if position is not None and not (whole and 1 <= position <= LAST_POSITION):
            raise InvalidRequest(
                f"{_short(position)} is no position in line: write 1 for next, 2 for the one "
                "after it.",
                field="position",
            )
        detail = f"to place {position}" if position is not None else "back to the order"
        return self._change(ticket_id, "move", detail, actor, reason, position=position)

    def cancel(self, ticket_id: str, *, actor: str, reason: str) -> Ticket:
        """Take a ticket out of the line; its member is told the reason.

        Raises UnknownTicket, TicketEnded, or InvalidRequest without a reason.
        """
        why = f"an admin cancelled it: {checked_reason(reason, needed=True)}"
        if (ticket := self.store.run(lambda c: tickets.get(c, ticket_id))).outcome:
            raise TicketEnded(_has_ended(ticket))
        ended = self.end_ticket(ticket_id, "cancelled", why, actor=actor)
        if ended.end_reason != why:  # its turn came, or somebody was quicker
            raise TicketEnded(_has_ended(ended))
        return ended

    def find_device(self, device: str) -> Device:
        """A device by UUID or, as people read it, by index. Raises InvalidRequest.

        The store's own: whoever asks may see less of the machine than the hub does.
        """
        source = self.watch.source.name
        known = self.store.run(lambda connection: devices.load(connection, source))
        named = [d for d in known or self.look().devices if device in (d.uuid, str(d.index))]
        if len(named) == 1:
            return named[0]
        what = f"{len(named)} devices have" if named else "No device has"
        raise InvalidRequest(
            f"{what} the UUID or index {_short(device)}; `gpuspawner devices` lists them.",
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
                health.take_back(connection, subject, now)
                closures.note(
                    connection,
                    at=now,
                    actor=actor,
                    action=action,
                    subject=subject,
                    detail=reason,
                )
        return done

    def _change(
        self, ticket_id: str, action: str, detail: str, actor: str, reason: str, **values: Any
    ) -> Ticket:
        reason = checked_reason(reason)
        with self.store.write() as connection:
            ticket = tickets.get(connection, ticket_id, lock=True)
            if ticket.outcome:
                raise TicketEnded(_has_ended(ticket))
            tickets.update(connection, ticket_id, **values)
            closures.note(
                connection,
                at=self.clock(),
                actor=actor,
                action=action,
                subject=f"ticket {ticket_id} of {ticket.server}",
                detail=f"{detail}: {reason}" if reason else detail,
            )
            return tickets.get(connection, ticket_id)


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


def _has_ended(ticket: Ticket) -> str:
    return (
        f"The ticket of {ticket.server} does not wait any more ({ticket.outcome}: "
        f"{ticket.end_reason.rstrip('.')}). Nothing was changed."
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: object) -> str:
    """What somebody sent, as a sentence can name it."""
    if isinstance(value, int) and abs(value) > 10**40:  # Python itself refuses to write some
        return "That"
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
