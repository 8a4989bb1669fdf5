"""Whether a server that was just started answers over HTTP yet."""

from __future__ import annotations

import asyncio
from ssl import SSLContext
from urllib.parse import urlsplit

PATIENCE = 5.0
"""Seconds for one attempt."""


async def answers(url: str, ssl_context: SSLContext | None) -> bool:
    """Whether a server answers there; a refusal to show something is an answer too.

    By hand and not by an HTTP client: only the first line is wanted, and every spawn of the
    hub asks at least once.
    """
    try:
        return await asyncio.wait_for(_status(url, ssl_context), PATIENCE) < 500
    except (OSError, ValueError, asyncio.TimeoutError):
        return False  # refused, too slow, or closed by Docker's proxy: nobody listens behind it yet


async def _status(url: str, ssl_context: SSLContext | None) -> int:
    """The status code. Raises ValueError for what is no HTTP answer."""
    there = urlsplit(url)
    port = there.port or (443 if ssl_context else 80)
    reader, writer = await asyncio.open_connection(there.hostname, port, ssl=ssl_context)
    try:
        ask = f"GET {there.path} HTTP/1.1\r\nHost: {there.netloc}\r\nConnection: close\r\n\r\n"
        writer.write(ask.encode())
        protocol, code, *_ = (await reader.readline()).split(maxsplit=2)
        if not protocol.startswith(b"HTTP/"):
            raise ValueError(f"{protocol!r} is not HTTP")
        return int(code)
    finally:
        writer.close()
