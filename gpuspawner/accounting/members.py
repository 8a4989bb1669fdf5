"""The service's part in memberships: time on the roster is over, and what runs then has to end.

Everything is read from the store every time, so a service that was down does what is due as soon
as it is back. The stops that are ordered here are carried out beside those of sessions.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import GPUSpawnerError
from .tick import Tick

MEMBERS_EVERY = 5.0
"""Seconds between two looks for memberships that are over and what former members still have."""


class Members:
    """Rounds of this duty, one after the other."""

    def __init__(self, tick: Tick, poke: Callable[[], None] = lambda: None) -> None:
        self.tick = tick
        self.broker = tick.broker
        self.poke = poke

    async def round(self) -> None:
        """End memberships whose time is over, and see to the servers of who is none any more."""
        told = await self.broker.run(self.broker.see_to_roster)
        for user in await self.broker.run(self.broker.former_holding):
            part = f"Membership of {user}"
            try:
                told += await self.broker.run(self.broker.see_to_former, user)
            except GPUSpawnerError as error:
                self.tick.trouble(part, error)
            else:
                self.tick.well(part)
        if told:
            self.poke()
