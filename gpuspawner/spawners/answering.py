"""Whether a server that was just started answers over HTTP yet."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from ssl import SSLContext
from typing import Any
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
    there = urlsplit(url)
    host = there.hostname or ""
    question = f"GET {there.path} HTTP/1.1\r\nHost: {there.netloc}\r\nConnection: close\r\n\r\n"
    family = _family(host)
    try:
        port = there.port or (443 if ssl_context else 80)
        if family is None or ssl_context is not None:
            ask = _ask(host, port, ssl_context, question.encode())
            return _status(await within(PATIENCE, ask)) < 500
        return _status(await _ask_address(family, host, port, question.encode())) < 500
    except (OSError, ValueError, asyncio.TimeoutError):
        return False  # refused, too slow, or closed by Docker's proxy: nobody listens behind it yet


def _status(line: bytes) -> int:
    """The status code. Raises ValueError for what is no HTTP answer."""
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
    """The same within :data:`PATIENCE`, without streams and without a task, which take longer than
    the question itself. Raises asyncio.TimeoutError."""
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        code = connection.connect_ex((host, port))
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
        try:
            connection.send(question)  # on this machine a connection is there at once
        except BlockingIOError:
            await _until(end, loop.add_writer, loop.remove_writer, connection)
            connection.send(question)
        answer = b""
        while b"\n" not in answer and len(answer) < LONGEST:
            await _until(end, loop.add_reader, loop.remove_reader, connection)
            part = connection.recv(LONGEST)
            if not part:
                break
            answer += part
    return answer.partition(b"\n")[0]


async def _until(
    end: float, watch: Callable[..., Any], forget: Callable[..., Any], connection: socket.socket
) -> None:
    """Wait until a connection is ready. Raises asyncio.TimeoutError at ``end``."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    too_late = loop.call_at(end, _settle, ready, asyncio.TimeoutError())
    watch(connection, _settle, ready)
    try:
        await ready
    finally:
        too_late.cancel()
        forget(connection)


def _settle(ready: asyncio.Future[None], error: Exception | None = None) -> None:
    if ready.done():
        return
    if error is not None:
        ready.set_exception(error)
    else:
        ready.set_result(None)
