"""Whether the member of a server that came from the queue has connected to it."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from jupyterhub import orm

from ..errors import GPUSpawnerError

if TYPE_CHECKING:
    from .mixin import GPUSpawnerMixin

LOOK = 2.0
"""Seconds between two looks at the Hub's records."""


async def watch(spawner: GPUSpawnerMixin) -> None:
    """Write down that the member connected, or order the stop when the time for it is over."""
    broker = spawner.broker
    while (lease := spawner.lease) is not None and lease.claim_by is not None:
        try:
            # The Hub writes down what it sees by the wall clock.
            since = (lease.up_since or lease.granted_at) + min(broker.skew, timedelta())
            if connected(spawner, since):
                spawner.lease = await broker.run(broker.claim, lease.id)
                return
            if broker.clock() >= lease.claim_by:
                await broker.run(broker.no_show, lease.id)
                spawner.log.warning("%s: nobody connected in time", spawner.server_ref)
                return
        except GPUSpawnerError as error:
            spawner.log.warning("%s: %s", spawner.server_ref, error.message)
        await asyncio.sleep(LOOK)


def connected(spawner: GPUSpawnerMixin, since: datetime) -> bool:
    """Whether the Hub has seen the member at this server since then.

    A browser or a program that comes to a server is checked by it at the Hub, with a token of
    the server's own OAuth client; what it does there is activity that the server reports.
    """
    seen = spawner.orm_spawner.last_activity
    # The Hub itself counts the start as activity: that is not the member.
    if seen is not None and _utc(seen) > since + timedelta(seconds=1):
        return True
    token = orm.APIToken
    mine = spawner.user.db.query(token.created, token.last_activity).filter(
        token.client_id == spawner.oauth_client_id
    )
    return any(_utc(at) > since for times in mine for at in times if at is not None)


def _utc(at: datetime) -> datetime:
    return at.replace(tzinfo=timezone.utc) if at.tzinfo is None else at
