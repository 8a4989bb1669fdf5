"""The Hub's records of who connected to a server: whose member never comes is a no-show."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import sqlalchemy as sa
from jupyterhub import orm
from jupyterhub.spawner import Spawner

LOOK = 2.0
"""Seconds between two looks at the Hub's records."""

AT_ONCE = 500
"""Servers in one query."""


class HubRecords:
    """The Hub's records of who used which server, read for all who ask together."""

    def __init__(self) -> None:
        self._asking: dict[Spawner, asyncio.Future[Sequence[datetime]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def has_connected(self, spawner: Spawner, since: datetime) -> bool:
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


def _times(spawners: Sequence[Spawner]) -> Iterator[tuple[Spawner, Sequence[datetime]]]:
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
