"""The duties for members: low credits, ended memberships, removed members, refills.

What is due is read from the store every time and written in one transaction with what is told,
so a service that was killed goes on where it was. The stops that are ordered here are carried
out beside those of sessions, until the servers are gone.

Everything is read from the store every time, so a service that was down does what is due as soon
as it is back. The stops that are ordered here are carried out beside those of sessions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..core.errors import GPUSpawnerError, Unavailable
from ..core.units import format_credits
from ..ledger.credit_policy import OVERDRAFT
from ..ledger.exhaustion import Happened
from ..ledger.refills import Refill
from ..services import Broker
from .notifier import Hook
from .session_duties import instant
from .worker import Tick


class CreditDuty:
    """Rounds of this duty, one after the other; hooks run beside them."""

    def __init__(
        self,
        tick: Tick,
        *,
        warn_minutes: Sequence[float],
        command: Sequence[str] = (),
        command_seconds: float = 10.0,
        poke: Callable[[], None] = lambda: None,
    ) -> None:
        self.tick = tick
        self.broker = tick.broker
        self.log = tick.log
        self.warn_minutes = tuple(warn_minutes)
        self.hook = Hook(command, command_seconds, tick.log, "c.GPUCredits.hook")
        self.poke = poke

    async def round(self) -> None:
        """See to every account about whose servers something is due."""
        for account in await self.broker.run(
            self.broker.exhaustion.accounts_to_see_to, self.warn_minutes
        ):
            try:
                await self._see_to(account)
            except Exception as error:  # nobody else's credits are less looked after
                foreseen = isinstance(error, GPUSpawnerError)
                self.tick.trouble(f"Credits of {account}", error, trace=not foreseen)
            else:
                self.tick.well(f"Credits of {account}")

    async def _see_to(self, account: str) -> None:
        happened = await self.broker.run(self.broker.exhaustion.see_to, account, self.warn_minutes)
        for each in happened:
            self._log(each)
            self.hook.start(told(each, self.broker.clock()))
        if happened:
            self.poke()

    async def close(self) -> None:
        """Leave everything as it is: the next service goes on."""
        await self.hook.close()

    def _log(self, it: Happened) -> None:
        lease, left = it.lease, format_credits(it.purse.balance)
        match it.event:
            case "low":
                what = "%s has %s credits left: %s was warned that less than %g min are left"
                self.log.info(what, lease.account, left, lease.server, it.minutes)
            case "back":
                self.log.info("%s has credits again: %s goes on", lease.account, lease.server)
            case "dry":
                until = f"until {it.stops_at:%Y-%m-%d %H:%M:%S %Z}" if it.stops_at else "on"
                what = "%s ran dry (%s credits): %s goes on %s, unless credits are given"
                self.log.warning(what, lease.account, left, lease.server, until)
            case "stop":
                why = "its overdraft is used up" if lease.when_dry == OVERDRAFT else "it ran dry"
                what = "%s has %s credits: %s is to be stopped, %s"
                self.log.warning(what, lease.account, left, lease.server, why)


def told(it: Happened, now: datetime) -> bytes:
    """What the hook reads: one JSON object and a line end."""
    seen: dict[str, Any] = {
        "event": it.event,
        "account": it.lease.account,
        "balance": format_credits(it.purse.balance, 6),
        "rate_per_hour": format_credits(it.purse.rate, 6),
        "lease": it.lease.id,
        "user": it.lease.server.user,
        "server": it.lease.server.name,
        "environment": it.lease.environment,
        "when_dry": it.lease.when_dry,
        "minutes": it.minutes or 0,
        "stops_at": instant(it.stops_at),
        "at": instant(now),
    }
    return json.dumps(seen).encode() + b"\n"


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
        told = await self.broker.run(self.broker.roster.see_to_roster)
        for user in await self.broker.run(self.broker.members.former_holding):
            part = f"Membership of {user}"
            try:
                told += await self.broker.run(self.broker.members.see_to_former, user)
            except GPUSpawnerError as error:
                self.tick.trouble(part, error)
            else:
                self.tick.well(part)
        if told:
            self.poke()


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
        for user in await broker.run(broker.shared_folders.folder_people):
            if not await self.tick.hub.has_member(user):
                await broker.run(broker.shared_folders.member_left, user)
                self.tick.log.info("%s left the hub, and has no shared folder any more", user)


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
        await self.broker.run(self.broker.ledger.end_lots)
        for refill in await self.broker.run(self.broker.refills.due_refills):
            part = f"Refill {refill.id}"
            try:
                await self._give(refill)
            except GPUSpawnerError as error:
                self.tick.trouble(part, error)
            else:
                self.tick.well(part)

    async def _give(self, refill: Refill) -> None:
        members = await self._members(refill)
        while await self.broker.run(self.broker.refills.give_refill, refill.id, members):
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
