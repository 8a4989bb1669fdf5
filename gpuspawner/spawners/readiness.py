"""Whether a new server answers, within the time limit of its start, and its member connects."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from ssl import SSLContext
from typing import Any

import sqlalchemy as sa
from jupyterhub import orm
from jupyterhub.spawner import Spawner
from jupyterhub.utils import exponential_backoff
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.iostream import UnsatisfiableReadError
from tornado.netutil import DefaultLoopResolver
from tornado.simple_httpclient import SimpleAsyncHTTPClient

PATIENCE = 5.0
"""Seconds for one attempt."""

LONGEST = 2**40
"""Maximum bytes of a body. It is discarded as it arrives, so a large page counts as an answer."""


MOST_AT_ONCE = 10_000
"""Maximum concurrent probes, high enough that silent servers do not delay the others."""


class ProbeClient(SimpleAsyncHTTPClient):
    """Tornado's client in its own class: one per event loop, not shared with Tornado's other users.

    pycurl's client is not an option, since it does not accept an SSLContext.
    """


class AddressResolver(DefaultLoopResolver):
    """Tornado's resolver, which uses a thread, but only for names: an address needs no look-up."""

    async def resolve(
        self, host: str, port: int, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[tuple[int, Any]]:
        """Return the address if ``host`` is one; look it up otherwise."""
        for kind, address in (
            (socket.AF_INET, (host, port)),
            (socket.AF_INET6, (host, port, 0, 0)),
        ):
            if family in (socket.AF_UNSPEC, kind):
                with suppress(OSError):
                    socket.inet_pton(kind, host)
                    return [(kind, address)]
        return await super().resolve(host, port, family)


_RESOLVER = AddressResolver()


async def answers(url: str, ssl_context: SSLContext | None) -> bool:
    """Return True if a server answers at ``url``, even with a refusal (a status below 500)."""
    client = ProbeClient(max_clients=MOST_AT_ONCE, max_body_size=LONGEST, resolver=_RESOLVER)
    request = HTTPRequest(
        url,
        connect_timeout=PATIENCE,
        request_timeout=PATIENCE,
        follow_redirects=False,
        decompress_response=False,
        ssl_options=ssl_context,
        streaming_callback=lambda part: None,
    )
    try:
        answer = await client.fetch(request, raise_error=False)
    except (HTTPClientError, OSError, UnsatisfiableReadError):
        # Refused, too slow, not HTTP, or closed by Docker's proxy because nothing listens yet.
        return False
    except ValueError:  # raised by Tornado if the connection closes before TLS begins
        return False
    return answer.code < 500


ASK_AGAIN = 0.05
"""Seconds until the first retry; later retries are less frequent."""

ASK_SELDOM = 0.2
"""Maximum seconds between two retries; on average, a member waits half of it."""

LOOK_AFTER = 0.25
"""Seconds between two checks at the engine that a silent server is still alive."""


async def wait_for_answer(
    url: str,
    ssl_context: SSLContext | None,
    require_alive: Callable[[], Awaitable[None]],
    timeout: float,
) -> None:
    """Wait until a server answers at ``url``.

    An open port proves nothing, since Docker's proxy accepts connections for a container that
    does not listen yet. So this sends HTTP requests, as the Hub does afterwards.

    ``require_alive`` raises the error of the start if the server has provably ended. Raises
    jupyterhub.utils.AnyTimeoutError after ``timeout`` seconds.
    """
    looked_at = 0.0

    async def answered() -> bool:
        nonlocal looked_at
        if await answers(url, ssl_context):
            return True
        if time.monotonic() - looked_at >= LOOK_AFTER:
            looked_at = time.monotonic()
            await require_alive()
        return False

    if await answers(url, ssl_context):
        return
    await asyncio.sleep(ASK_AGAIN)
    await exponential_backoff(
        answered, f"no answer at {url}", start_wait=ASK_AGAIN, max_wait=ASK_SELDOM, timeout=timeout
    )


class StartTime:
    """Tells if a start has exceeded ``start_timeout``, which limits only the engine's part."""

    def __init__(self, timeout: float, spawn: asyncio.Task[Any] | None) -> None:
        """Start the clock. ``timeout`` is in seconds; ``spawn`` is the Hub's own task."""
        self._deadline = time.monotonic() + timeout - 1
        self._spawn = spawn

    def is_up(self) -> bool:
        """Return True if a cancellation now means that the Hub ends a start that takes too long.

        The Hub also cancels a start that its member stops.
        """
        return time.monotonic() >= self._deadline

    async def outlast(self, steps: Coroutine[Any, Any, None]) -> None:
        """Run the steps to completion, even after ``start_timeout``.

        At that time the Hub cancels the start once and, like ``asyncio.wait_for``, still accepts
        its result. Any other cancellation, and the end of the Hub's own task, cancels the steps.
        """
        task = asyncio.ensure_future(steps)
        try:
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                if not self.is_up():
                    raise
                spawn = {self._spawn} if self._spawn is not None else set()
                await asyncio.wait({task, *spawn}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    raise  # before Python 3.12, the member's stop is not passed on
                task.result()
        finally:
            task.cancel()


# No-shows: members who never connect.

LOOK_AT_RECORDS = 2.0
"""Seconds between two queries of the Hub's records."""

SERVERS_AT_ONCE = 500
"""How many servers one query asks for."""


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
        await asyncio.sleep(LOOK_AT_RECORDS)
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
    for first in range(0, len(spawners), SERVERS_AT_ONCE):
        some = spawners[first : first + SERVERS_AT_ONCE]
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
