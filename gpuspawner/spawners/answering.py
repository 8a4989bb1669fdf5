"""Whether a server that was just started answers over HTTP yet."""

from __future__ import annotations

from ssl import SSLContext

from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.iostream import UnsatisfiableReadError
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


async def answers(url: str, ssl_context: SSLContext | None) -> bool:
    """Return True if a server answers there; a refusal to show something is an answer too."""
    client = ProbeClient(max_clients=MOST_AT_ONCE, max_body_size=LONGEST)
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
