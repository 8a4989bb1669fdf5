"""Whether a server that was just started answers over HTTP yet."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ssl import SSLContext
from typing import Any
from urllib.parse import urlsplit

from tornado.httputil import HTTPHeaders, HTTPInputError

from ..patience import within

PATIENCE = 5.0
"""Seconds for one attempt."""

LONGEST = 65536
"""Bytes of an answer without the end of its head, at most."""

_END = b"\r\n\r\n"
_ANYWHERE = ("", "0.0.0.0", "::")  # never listened on  # nosec B104


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said, as far as the Hub wants to know it."""

    status: int
    headers: HTTPHeaders


async def answer_of(url: str, ssl_context: SSLContext | None) -> Answer | None:
    """What a server answers there, None when it does not yet; a refusal to show something is an
    answer too.

    By hand and not by an HTTP client: only the head is wanted, and every spawn of the hub asks
    at least once.
    """
    there = urlsplit(url)
    host = there.hostname or ""
    question = f"GET {there.path} HTTP/1.1\r\nHost: {there.netloc}\r\nConnection: close\r\n\r\n"
    family = _family(host)
    try:
        port = there.port or (443 if ssl_context else 80)
        if family is None or ssl_context is not None:
            ask = _ask(host, port, ssl_context, question.encode())
            answer = _read(await within(PATIENCE, ask))
        else:
            answer = _read(await _ask_address(family, host, port, question.encode()))
    except (OSError, ValueError, asyncio.TimeoutError):
        return None  # refused, too slow, or closed by Docker's proxy: nobody listens behind it yet
    return answer if answer.status < 500 else None


def spare_hub(server: Any, started: Any, answer: Answer) -> None:
    """Have the Hub's own question, with which it waits for a server that was just started, answered
    with what the server has just said. Once: who asks later asks the server.

    ``started`` is what the start returned, an URL or (ip, port).
    """
    host = urlsplit(started).hostname if isinstance(started, str) else started[0]
    if host in _ANYWHERE:
        return  # the Hub then asks at another address, which nobody has tried

    async def wait_up(*args: Any, **kwargs: Any) -> Answer:
        del server.wait_up
        return answer

    server.wait_up = wait_up


def _read(head: bytes) -> Answer:
    """Raises ValueError for what is no HTTP answer."""
    line, _, rest = head.partition(b"\r\n")
    protocol, code, *_ = line.split(maxsplit=2)
    if not protocol.startswith(b"HTTP/"):
        raise ValueError(f"{protocol!r} is not HTTP")
    try:
        headers = HTTPHeaders.parse(rest.decode("latin-1"))
    except HTTPInputError:
        headers = HTTPHeaders()  # it answers, if only in a way of its own
    return Answer(int(code), headers)


def _family(host: str) -> socket.AddressFamily | None:
    """Of an address that is written in numbers; None for a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return family
    return None


async def _ask(host: str, port: int, ssl_context: SSLContext | None, question: bytes) -> bytes:
    """The head of the answer."""
    reader, writer = await asyncio.open_connection(host, port, ssl=ssl_context)
    try:
        writer.write(question)
        return await _head(partial(reader.read, LONGEST))
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

        async def receive() -> bytes:
            await _until(end, loop.add_reader, loop.remove_reader, connection)
            return connection.recv(LONGEST)

        return await _head(receive)


async def _head(receive: Callable[[], Awaitable[bytes]]) -> bytes:
    """What comes until the head of an answer is over, or the connection."""
    answer = b""
    while _END not in answer and len(answer) < LONGEST:
        part = await receive()
        if not part:
            break
        answer += part
    return answer.partition(_END)[0]


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
