"""Whether a server that was just started answers over HTTP yet."""

from __future__ import annotations

import socket
from contextlib import suppress
from ssl import SSLContext
from typing import Any

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
