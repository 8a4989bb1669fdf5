"""The service's part in refills, and in credits that end: what is due is done, once."""

from __future__ import annotations

from ..broker import Broker
from ..errors import GPUSpawnerError, Unavailable
from ..ledger.refills import Refill
from .tick import Tick


class Refilling:
    """Rounds of this duty, one after the other."""

    def __init__(self, tick: Tick) -> None:
        self.tick = tick
        self.broker: Broker = tick.broker

    async def round(self) -> None:
        """Take back what is left of credits that have ended, and give every refill that is due.

        After a day without the service there may be many occurrences: each is given, in its
        order. A refill that cannot be given now keeps no other one waiting.
        """
        await self.broker.run(self.broker.end_lots)
        for refill in await self.broker.run(self.broker.due_refills):
            part = f"Refill {refill.id}"
            try:
                await self._give(refill)
            except GPUSpawnerError as error:
                self.tick.trouble(part, error)
            else:
                self.tick.well(part)

    async def _give(self, refill: Refill) -> None:
        members = await self._members(refill)
        while await self.broker.run(self.broker.give_refill, refill.id, members):
            pass

    async def _members(self, refill: Refill) -> dict[str, frozenset[str]]:
        """The members of the refill's groups, from the Hub. Raises Unavailable.

        Nothing is given while a group is not there: its members would miss it for good.
        """
        found = {}
        for group in refill.groups:
            members = await self.tick.hub.members_of(group)
            if members is None:
                raise Unavailable(
                    f"The Hub has no group {group!r}, whose members are to get {refill.reason!r}. "
                    f"Make the group, or end it: gpuspawner refills remove {refill.id}."
                )
            found[group] = members
        return found
