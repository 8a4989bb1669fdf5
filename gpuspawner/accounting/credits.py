"""The service's part in accounts that run dry: members are told in time, and by policy stopped.

What is due is read from the store every time and written in one transaction with what is told,
so a service that was killed goes on where it was. The stops that are ordered here are carried
out beside those of sessions, until the servers are gone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from ..broker.dry import Happened
from ..errors import GPUSpawnerError
from ..ledger.dry import OVERDRAFT
from ..model import format_credits
from .hook import Hook
from .sessions import instant
from .tick import Tick


class Credits:
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
        self.hook = Hook(command, command_seconds, tick.log, "c.Accounting.credits_hook")
        self.poke = poke

    async def round(self) -> None:
        """See to every account about whose servers something is due."""
        for account in await self.broker.run(self.broker.accounts_to_see_to, self.warn_minutes):
            try:
                await self._see_to(account)
            except Exception as error:  # nobody else's credits are less looked after
                foreseen = isinstance(error, GPUSpawnerError)
                self.tick.trouble(f"Credits of {account}", error, trace=not foreseen)
            else:
                self.tick.well(f"Credits of {account}")

    async def _see_to(self, account: str) -> None:
        happened = await self.broker.run(self.broker.see_to, account, self.warn_minutes)
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
