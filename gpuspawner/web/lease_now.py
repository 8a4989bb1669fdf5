"""What a server's GPUs do now and did in the last hour, and what its member will be warned of: for
the item in JupyterLab, which asks with the token of its server.

Nothing from before the lease is told: it was somebody else's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tornado import web

from ..broker import Broker
from ..broker.idle import Resting
from ..model import Lease, LeasedDevice
from ..telemetry import DeviceUse, Sample
from . import figures
from .access import may_see_balance
from .api import APIHandler, funds, instant, lease, leased
from .base import Handler
from .sessions import own_lease

CURVE = timedelta(hours=1)
"""How far back the curve goes."""

SMOOTH = 5
"""Samples whose mean is the use now: a single second says little."""

FRESH = timedelta(seconds=30)
"""How old the newest sample may be to tell of now."""

Recent = Mapping[str, Sequence[Sample]]


@dataclass(frozen=True, slots=True)
class Now:
    """A running server, its account, its devices' last hour, and what comes."""

    at: datetime
    lease: figures.LeaseFigures
    funds: figures.Funds
    minutes: tuple[DeviceUse, ...]
    ending: bool
    """Whether its session ends so soon that its member is warned."""
    resting: Resting | None
    lost: bool
    """Whether the server does not reach its devices any more."""
    sick: bool
    """Whether one of its devices fell sick since it had it."""


def look(
    broker: Broker,
    it: Lease,
    warn_minutes: Sequence[float],
    session_warn_minutes: Sequence[float],
) -> Now:
    """All of it from the store. Blocks: use :meth:`Broker.run`."""
    now = broker.clock()
    since = max(now - CURVE, it.started_at or it.granted_at)
    minutes = broker.use_between(since, now, uuids=it.uuids) if it.devices else []
    opened = broker.open_leases()
    account = broker.account(it.account)
    paying = figures.ending_of(broker, account.name)
    (told,) = figures.lease_figures(broker, [it], now)
    user = it.server.user
    return Now(
        at=now,
        lease=told,
        funds=figures.funds(account, opened, now, warn_minutes, paying),
        minutes=tuple(minutes),
        ending=figures.ends_soon(told, now, session_warn_minutes),
        resting=next((r for r in broker.resting(user) if r.lease.id == it.id), None),
        lost=any(lease.id == it.id for lease in broker.lost_of(user)),
        sick=any(found.lease.id == it.id for found in broker.sick_of(user)),
    )


class NowAPI(APIHandler):
    """For the member, by whatever token, and for the server itself."""

    for_servers = True

    @web.authenticated
    async def get(self, lease_id: str) -> None:
        it = await own_lease(self, lease_id)
        warn, session_warn = self.context.warn_minutes, self.context.session_warn_minutes
        found: Now = await self.read(look, self.broker, it, warn, session_warn)
        recent = self.context.recent()
        mine = may_see_balance(self, it.account)
        self.answer(
            {
                "as_of": instant(found.at),
                "page": self.context.prefix,
                "lease": lease(found.lease),
                "account": funds(found.funds) if mine else None,
                "devices": [device(each, found, recent) for each in it.devices],
                "warnings": warnings(found, mine),
            }
        )


def device(it: LeasedDevice, found: Now, recent: Recent) -> dict[str, Any]:
    """A device now and in the last hour."""
    minutes = [minute for minute in found.minutes if minute.uuid == it.uuid]
    since = max(found.lease.since, found.at - FRESH)
    samples = [some for some in recent.get(it.uuid, ()) if some.at >= since]
    uses = [some.use for some in samples[-SMOOTH:] if some.use is not None]
    newest = samples[-1] if samples else None
    return {
        **leased(it),
        "use_percent": sum(uses) / len(uses) if uses else None,
        "busy": newest.busy if newest else None,
        "used_bytes": newest.used_bytes if newest else None,
        "error": newest.error if newest else "",
        "minutes": [
            {
                "at": instant(minute.since),
                "use_percent": minute.use,
                "used_bytes": minute.memory_max if minute.known else None,
            }
            for minute in minutes
        ],
    }


def warnings(found: Now, may_see_funds: bool) -> list[dict[str, Any]]:
    """What is to be told now, each under a key that stays while it is the same warning."""
    told = []
    it = found.lease.lease
    if it.outcome or it.ended_at:
        return []
    if found.lost:
        told.append(_warning("lost", "lost", None))
    if found.sick:
        told.append(_warning("sick", "sick", None))
    if (resting := found.resting) is not None:
        key = f"idle:{resting.stops_at.timestamp():.0f}" if resting.stops_at else "idle"
        told.append(_warning("idle", key, resting.stops_at, resting.snooze_minutes))
    if found.ending and it.ends_at is not None:
        told.append(_warning("session", f"session:{it.ends_at.timestamp():.0f}", it.ends_at))
    if found.lease.stops_at is not None:
        told.append(_warning("credits", "credits:dry", found.lease.stops_at))
    elif it.rate and may_see_funds and found.funds.warning is not None:
        told.append(_warning("credits", f"credits:{found.funds.warning:g}", found.funds.dry_at))
    return told


def _warning(kind: str, key: str, at: datetime | None, snooze: float = 0.0) -> dict[str, Any]:
    return {"kind": kind, "key": key, "at": instant(at), "snooze_minutes": snooze}


HANDLERS: list[tuple[str, type[Handler]]] = [
    ("api/leases/([0-9a-f]{1,64})/now", NowAPI),
]
