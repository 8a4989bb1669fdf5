"""What admins change: pauses, drains, and the order in line. Every change is in the audit trail."""

from __future__ import annotations

import math
from typing import Any

from ..errors import InvalidRequest, TicketEnded
from ..model import Device, Ticket
from ..store import closures, tickets
from ..store.closures import GRANTING, Closure
from .core import Core

MOST_POINTS = 1e6
"""The greatest boost either way."""


class Admin(Core):
    """The part of the broker that changes what the scheduler goes by."""

    def pause(self, *, actor: str, reason: str = "") -> bool:
        """Give out no devices until :meth:`resume`; what runs goes on, who waits waits on.

        False when granting was paused already: then nothing changes.
        """
        return self._close(GRANTING, "pause", actor, reason)

    def resume(self, *, actor: str) -> bool:
        """Give out devices again. False when granting was not paused."""
        return self._reopen(GRANTING, "resume", actor)

    def drain(self, device: str, *, actor: str, reason: str = "") -> bool:
        """Give a device (UUID or index) to nobody new; the session on it ends normally.

        False when it was drained already. Raises InvalidRequest for an unknown device.
        """
        return self._close(self.find_device(device).uuid, "drain", actor, reason)

    def undrain(self, device: str, *, actor: str) -> bool:
        """Give a device out again. False when it was not drained."""
        known = self.store.run(closures.load)
        uuid = device if device in known else self.find_device(device).uuid
        return self._reopen(uuid, "undrain", actor)

    def boost(self, ticket_id: str, points: float, *, actor: str, reason: str = "") -> Ticket:
        """Set the points that an admin adds to a ticket's score; 0 takes them away.

        Raises UnknownTicket, TicketEnded, or InvalidRequest for what is no number of points.
        """
        if isinstance(points, bool) or not math.isfinite(points) or abs(points) > MOST_POINTS:
            raise InvalidRequest(
                f"{points!r} is no number of points: write one from {-MOST_POINTS:.0f} "
                f"to {MOST_POINTS:.0f}; one point is worth one hour of waiting.",
                field="points",
            )
        return self._change(ticket_id, "boost", f"{points:+g} points", actor, reason, boost=points)

    def move(self, ticket_id: str, position: int | None, *, actor: str, reason: str = "") -> Ticket:
        """Put a ticket at a place of the admin's own: 1 goes before 2, both before all others.

        None gives it back to the order. Raises UnknownTicket, TicketEnded or InvalidRequest.
        """
        if position is not None and not 1 <= position <= 1_000_000:
            raise InvalidRequest(
                f"{position!r} is no place in line: write 1 for next, 2 for the one after it.",
                field="position",
            )
        detail = f"to place {position}" if position is not None else "back to the order"
        return self._change(ticket_id, "move", detail, actor, reason, position=position)

    def find_device(self, device: str) -> Device:
        """A device by UUID or, as people read it, by index. Raises InvalidRequest."""
        devices = self.look().devices
        named = [d for d in devices if d.uuid == device or str(d.index) == device]
        if len(named) == 1:
            return named[0]
        what = f"{len(named)} devices have" if named else "No device has"
        raise InvalidRequest(
            f"{what} the UUID or index {device!r}; `gpuspawner devices` lists them.",
            field="device",
        )

    # Steps of the above.

    def _close(self, subject: str, action: str, actor: str, reason: str) -> bool:
        now = self.clock()
        with self.store.write() as connection:
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

    def _reopen(self, subject: str, action: str, actor: str) -> bool:
        with self.store.write() as connection:
            done = closures.reopen(connection, subject)
            if done:
                closures.note(
                    connection, at=self.clock(), actor=actor, action=action, subject=subject
                )
        return done

    def _change(
        self, ticket_id: str, action: str, detail: str, actor: str, reason: str, **values: Any
    ) -> Ticket:
        with self.store.write() as connection:
            ticket = tickets.get(connection, ticket_id, lock=True)
            if ticket.outcome:
                raise TicketEnded(why=ticket.end_reason.rstrip("."))
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
