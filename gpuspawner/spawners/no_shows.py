"""Whether the member of a server that came from the queue has connected to it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from jupyterhub import orm

from ..core.errors import GPUSpawnerError

if TYPE_CHECKING:
    from .mixin import GPUSpawnerMixin


LOOK = 2.0
"""Seconds between two looks at the Hub's records."""

AT_ONCE = 500
"""Servers in one query."""

KEY = "gpuspawner_activity"


async def watch(spawner: GPUSpawnerMixin) -> None:
    """Write down that the member connected, or order the stop when the time for it is over."""
    broker = spawner.broker
    records: HubRecords = spawner.shared(KEY, HubRecords)
    while (lease := spawner.lease) is not None and lease.claim_by is not None:
        try:
            # The Hub writes down what it sees by the wall clock.
            since = (lease.up_since or lease.granted_at) + min(broker.skew, timedelta())
            if await records.has_connected(spawner, since):
                spawner.lease = await broker.run(broker.claim, lease.id)
                return
            if broker.clock() >= lease.claim_by:
                await broker.run(broker.no_show, lease.id)
                spawner.log.warning("%s: nobody connected in time", spawner.server_ref)
                return
        except GPUSpawnerError as error:
            spawner.log.warning("%s: %s", spawner.server_ref, error.message)


class HubRecords:
    """The Hub's records of who used which server, read for all who ask together."""

    def __init__(self) -> None:
        self._asking: dict[GPUSpawnerMixin, asyncio.Future[Sequence[datetime]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def has_connected(self, spawner: GPUSpawnerMixin, since: datetime) -> bool:
        """Return True if the Hub has seen the member at this server since then, at the next look.

        A browser or a program that comes to a server is checked by it at the Hub, with a token of
        the server's own OAuth client; what it does there is activity that the server reports.
        """
        if spawner not in self._asking:
            self._asking[spawner] = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._look())
        activity, *tokens = await asyncio.shield(self._asking[spawner])
        # The Hub itself counts the start as activity: that is not the member.
        return activity > since + timedelta(seconds=1) or any(at > since for at in tokens)

    async def _look(self) -> None:
        await asyncio.sleep(LOOK)
        asking, self._asking = self._asking, {}
        try:
            found = dict(_times(list(asking)))
        except Exception as error:
            for future in asking.values():
                future.set_exception(error)
            return
        for spawner, future in asking.items():
            future.set_result(found[spawner])


def _times(
    spawners: Sequence[GPUSpawnerMixin],
) -> Iterator[tuple[GPUSpawnerMixin, Sequence[datetime]]]:
    """Yield each server's last activity, then those times at which its tokens were made or used."""
    for first in range(0, len(spawners), AT_ONCE):
        some = spawners[first : first + AT_ONCE]
        db, server, token = some[0].user.db, orm.Spawner, orm.APIToken
        ids = [spawner.orm_spawner.id for spawner in some]
        clients = [spawner.oauth_client_id for spawner in some]
        active = dict(_rows(db, sa.select(server.id, server.last_activity), server.id, ids))
        latest = sa.select(
            token.client_id, sa.func.max(token.created), sa.func.max(token.last_activity)
        ).group_by(token.client_id)
        used = {client: times for client, *times in _rows(db, latest, token.client_id, clients)}
        for spawner, number, client in zip(some, ids, clients, strict=True):
            yield spawner, [_utc(at) for at in (active.get(number), *used.get(client, ()))]


def _rows(db: Any, query: Any, column: Any, among: Collection[Any]) -> list[Any]:
    return list(db.execute(query.where(column.in_(among))))


def _utc(at: datetime | None) -> datetime:
    if at is None:
        return datetime.min.replace(tzinfo=timezone.utc)
    return at.replace(tzinfo=timezone.utc) if at.tzinfo is None else at
