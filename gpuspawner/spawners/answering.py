"""Whether a server that was just started answers over HTTP yet."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from ssl import SSLContext
from urllib.parse import urlsplit

from ..patience import within

PATIENCE = 5.0
"""Seconds for one attempt."""

LONGEST = 65536
"""Bytes of an answer without the end of a line, at most."""


async def answers(url: str, ssl_context: SSLContext | None) -> bool:
    """Whether a server answers there; a refusal to show something is an answer too.

    By hand and not by an HTTP client: only the first line is wanted, and every spawn of the
    hub asks at least once.
    """
    try:
        return await within(PATIENCE, _status(url, ssl_context)) < 500
    except (OSError, ValueError, asyncio.TimeoutError):
        return False  # refused, too slow, or closed by Docker's proxy: nobody listens behind it yet


async def _status(url: str, ssl_context: SSLContext | None) -> int:
    """The status code. Raises ValueError for what is no HTTP answer."""
    there = urlsplit(url)
    port = there.port or (443 if ssl_context else 80)
    host = there.hostname or ""
    question = f"GET {there.path} HTTP/1.1\r\nHost: {there.netloc}\r\nConnection: close\r\n\r\n"
    family = _family(host)
    if family is None or ssl_context is not None:
        line = await _ask(host, port, ssl_context, question.encode())
    else:
        line = await _ask_address(family, host, port, question.encode())
    protocol, code, *_ = line.split(maxsplit=2)
    if not protocol.startswith(b"HTTP/"):
        raise ValueError(f"{protocol!r} is not HTTP")
    return int(code)


def _family(host: str) -> socket.AddressFamily | None:
    """Of an address that is written in numbers; None for a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return family
    return None


async def _ask(host: str, port: int, ssl_context: SSLContext | None, question: bytes) -> bytes:
    """The first line of the answer."""
    reader, writer = await asyncio.open_connection(host, port, ssl=ssl_context)
    try:
        writer.write(question)
        return await reader.readline()
    finally:
        writer.close()


async def _ask_address(
    family: socket.AddressFamily, host: str, port: int, question: bytes
) -> bytes:
    """The same without streams, which take longer than the question itself."""
    loop = asyncio.get_running_loop()
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, (host, port))
        await loop.sock_sendall(connection, question)
        answer = b""
        while b"\n" not in answer and len(answer) < LONGEST:
            part = await loop.sock_recv(connection, LONGEST)
            if not part:
                break
            answer += part
    return answer.partition(b"\n")[0]
