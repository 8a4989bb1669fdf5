"""Who left the hub has no shared folder any more, and nobody has to be at hand for that."""

from __future__ import annotations

from dataclasses import dataclass

from .tick import Tick


@dataclass(slots=True)
class Leaving:
    """Asks the Hub whether everybody is still there who has a shared folder.

    A hub that removes a member takes their folders from them at once; this is for who was
    removed while no server of this hub had started, or behind its back.
    """

    tick: Tick

    async def round(self) -> None:
        """One look at all of them. Raises Unavailable when the Hub does not answer."""
        broker = self.tick.broker
        for user in await broker.run(broker.folder_people):
            if not await self.tick.hub.has_member(user):
                await broker.run(broker.member_left, user)
                self.tick.log.info("%s left the hub, and has no shared folder any more", user)
