"""The duties for members: low credits, ended memberships, removed members, refills.

What is due is read from the store every time and written in one transaction with its notices, so a
service that was down or killed continues where it was. Stops ordered here are carried out by the
session duty, until the servers are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.errors import Unavailable
from ..core.units import format_credits
from ..ledger.credit_policy import OVERDRAFT
from ..ledger.exhaustion import CreditEvent, credits_back
from ..ledger.refills import Refill
from ..notifications.models import Notice
from .worker import Tick, TickDuty


class CreditDuty(TickDuty):
    """Warns of low credits, and stops what nobody pays for."""

    def __init__(
        self,
        tick: Tick,
        *,
        warn_minutes: Sequence[float],
        poke: Callable[[], None] = lambda: None,
        tell_admin: Callable[[Notice], None] = lambda notice: None,
    ) -> None:
        super().__init__(tick, poke)
        self.warn_minutes = tuple(warn_minutes)
        self.tell_admin = tell_admin

    async def round(self) -> None:
        """Handle every account with something due about its servers."""
        for account in await self.services.run(
            self.services.exhaustion.accounts_to_see_to, self.warn_minutes
        ):
            # Whatever goes wrong, other accounts are handled all the same.
            with self.tick.going_on(f"Credits of {account}", Exception):
                await self._see_to(account)

    async def _see_to(self, account: str) -> None:
        happened = await self.services.run(
            self.services.exhaustion.see_to, account, self.warn_minutes
        )
        for each in happened:
            self._log(each)
            if each.event == "back":
                self.tell_admin(credits_back(each.lease, each.purse, self.services.clock()))
        if happened:
            self.poke()

    def _log(self, it: CreditEvent) -> None:
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


class Members(TickDuty):
    """Ends memberships, and what former members still have."""

    async def round(self) -> None:
        """Expire memberships and stop the servers of former members."""
        told = await self.services.run(self.services.roster.see_to_roster)
        for user in await self.services.run(self.services.members.former_holding):
            with self.tick.going_on(f"Membership of {user}"):
                told += await self.services.run(self.services.members.see_to_former, user)
        if told:
            self.poke()


class FolderOwnerDuty(TickDuty):
    """Takes shared folders from members who were removed while no server of theirs started."""

    async def round(self) -> None:
        """Check all of them once. Raises Unavailable if the Hub does not answer."""
        services = self.services
        for user in await services.run(services.shared_folders.folder_people):
            if not await self.tick.hub.has_member(user):
                await services.run(services.shared_folders.member_left, user)
                self.tick.log.info("%s left the hub, and has no shared folder any more", user)


class RefillDuty(TickDuty):
    """Grants what is due, and takes back what has expired."""

    async def round(self) -> None:
        """Take back what is left of expired credits, and grant every due refill.

        After a day without the service there may be many occurrences: each is granted, in order. A
        refill that cannot be granted now does not delay others.
        """
        await self.services.run(self.services.ledger.end_lots)
        for refill in await self.services.run(self.services.refills.due_refills):
            with self.tick.going_on(f"Refill {refill.id}"):
                members = await self._members(refill)
                give = self.services.refills.give_refill
                while await self.services.run(give, refill.id, members):
                    pass

    async def _members(self, refill: Refill) -> dict[str, frozenset[str]]:
        """Return the members of the refill's groups, from the Hub. Raises Unavailable.

        Nothing is granted while a group does not exist: its members would miss it for good.
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
