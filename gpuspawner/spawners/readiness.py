"""Whether a server that was just started answers over HTTP yet, and how long its start may take."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from ssl import SSLContext
from typing import Any

from jupyterhub.utils import exponential_backoff
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.iostream import UnsatisfiableReadError
from tornado.netutil import DefaultLoopResolver
from tornado.simple_httpclient import SimpleAsyncHTTPClient

PATIENCE = 5.0
"""Seconds for one attempt."""

LONGEST = 2**40
"""Bytes of a body, which is thrown away as it comes: a large first page is an answer too."""


MOST_AT_ONCE = 10_000
"""Probes side by side: silent servers hold up nobody else's."""


class ProbeClient(SimpleAsyncHTTPClient):
    """Tornado's client, one for each event loop as always, and not the one that all others share.

    Not pycurl's, which takes no SSLContext.
    """


class AddressResolver(DefaultLoopResolver):
    """Tornado's resolver, which asks in a thread, for names alone: an address needs no look-up."""

    async def resolve(
        self, host: str, port: int, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[tuple[int, Any]]:
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
    """Return True if a server answers there; a refusal to show something is an answer too."""
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
        # Refused, too slow, no HTTP, or closed by Docker's proxy: nobody listens behind it yet.
        return False
    except ValueError:  # Tornado's word for one that was closed before TLS could begin
        return False
    return answer.code < 500


ASK_AGAIN = 0.05
"""Seconds after which a server that did not answer is asked again; later, more seldom."""

ASK_SELDOM = 0.2
"""Seconds between two such questions at most: half of it, on average, is a member's wait."""

LOOK_AFTER = 0.25
"""Seconds after which the engine is asked again whether a server that does not answer lives."""


async def wait_for_answer(
    url: str,
    ssl_context: SSLContext | None,
    require_alive: Callable[[], Awaitable[None]],
    timeout: float,
) -> None:
    """Wait until a server answers there.

    An open port proves nothing (Docker's proxy accepts for a container that does not
    listen yet), so this asks over HTTP, as the Hub would after us.

    Args:
        require_alive: Raises what the start ends with when the server has provably ended.
        timeout: Seconds after which jupyterhub.utils.AnyTimeoutError is raised.
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
    """How long a start has taken, beside ``start_timeout``, which limits the engine's part."""

    def __init__(self, timeout: float, spawn: asyncio.Task[Any] | None) -> None:
        """``timeout`` in seconds; ``spawn`` is the Hub's own task."""
        self._deadline = time.monotonic() + timeout - 1
        self._spawn = spawn

    def is_up(self) -> bool:
        """Return True if a cancellation now is the Hub's, of a start that takes too long.

        It also cancels one that its member stops.
        """
        return time.monotonic() >= self._deadline

    async def outlast(self, steps: Coroutine[Any, Any, None]) -> None:
        """Run the steps to their end, also after ``start_timeout``.

        The Hub then cancels the start once and, as ``asyncio.wait_for`` does, takes what still
        comes of it. Any other cancellation, and the end of the Hub's own task, ends the steps.
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
                    raise  # Python before 3.12 does not pass on that the member stopped it
                task.result()
        finally:
            task.cancel()
