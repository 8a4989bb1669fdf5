"""The Hub's records of who connected to a server, for detecting no-shows."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import sqlalchemy as sa
from jupyterhub import orm
from jupyterhub.spawner import Spawner

QUERY_SECONDS = 2.0
"""Seconds between two queries of the Hub's records."""

SERVERS_PER_QUERY = 500


class HubRecords:
    """The Hub's records of who used which server, read at once for all concurrent callers."""

    def __init__(self) -> None:
        self._asking: dict[Spawner, asyncio.Future[Sequence[datetime]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def has_connected(self, spawner: Spawner, since: datetime) -> bool:
        """Return True if the next query shows that the member has used this server after ``since``.

        A server checks each browser or program that connects at the Hub, with a token of the
        server's own OAuth client, and reports what they do there as activity.
        """
        if spawner not in self._asking:
            self._asking[spawner] = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._look())
        activity, *tokens = await asyncio.shield(self._asking[spawner])
        # The Hub also counts the start as activity, but that is not the member's.
        return activity > since + timedelta(seconds=1) or any(at > since for at in tokens)

    async def _look(self) -> None:
        await asyncio.sleep(QUERY_SECONDS)
        asking, self._asking = self._asking, {}
        try:
            found = dict(_times(list(asking)))
        except Exception as error:
            for future in asking.values():
                future.set_exception(error)
            return
        for spawner, future in asking.items():
            future.set_result(found[spawner])


def _times(spawners: Sequence[Spawner]) -> Iterator[tuple[Spawner, Sequence[datetime]]]:
    """Yield each server with its last activity and when its tokens were last created and used."""
    for first in range(0, len(spawners), SERVERS_PER_QUERY):
        some = spawners[first : first + SERVERS_PER_QUERY]
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
