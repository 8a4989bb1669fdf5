"""Readiness probe of a new server over HTTP, and the time limit of its start."""

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
