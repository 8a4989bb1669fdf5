"""The readiness probe of servers that answer, not yet, or never. Real: sockets and TLS."""

from __future__ import annotations

import asyncio
import gc
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from certipy import Certipy
from jupyterhub.utils import make_ssl_context
from tornado.iostream import IOStream

from gpuspawner.spawners import readiness
from gpuspawner.spawners.readiness import answers
from tests.support.processes import free_port

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    """Fail if an exception was never retrieved."""
    left: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context))
    yield
    await asyncio.sleep(0)
    gc.collect()
    assert not left


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of this process, which is client and server, is no slow server."""
    monkeypatch.setattr(readiness, "PATIENCE", 60.0)


def saying(text: bytes) -> Handler:
    """Return a server that reads a request and answers this."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(text)
        writer.close()

    return handle


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def asked(
    handler: Handler, there: ssl.SSLContext | None = None, here: ssl.SSLContext | None = None
) -> bool:
    """Return True if a server with this handler answers."""
    async with await asyncio.start_server(handler, "127.0.0.1", 0, ssl=there) as server:
        port = server.sockets[0].getsockname()[1]
        scheme = "https" if there else "http"
        return await answers(f"{scheme}://127.0.0.1:{port}/user/anna/api", here)


@pytest.mark.parametrize(
    ("said", "answered"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", True),
        (b"HTTP/1.0 302 Found\r\nLocation: /hub/login\r\n\r\n", True),
        (b"HTTP/1.1 404 \r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nnot empty", True),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n", False),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        (b"", False),
        (b"\r\n", False),
        (b"SSH-2.0-OpenSSH_9.2\r\n", False),
        (b"220 mail.example ESMTP\r\n", False),
        (b"x" * 1_000_000, False),
        (b"HTTP/1.1 200 OK\r\nNonsense\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n" + b"x" * 4_000_000, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", False),
    ],
)
async def test_readiness_requires_a_complete_response_below_500(
    said: bytes, answered: bool
) -> None:
    assert await asked(saying(said)) is answered


async def test_readiness_probe_does_not_follow_redirects() -> None:
    redirect, requests = saying(b"HTTP/1.1 302 Found\r\nLocation: /hub/login\r\n\r\n"), []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(reader)
        await redirect(reader, writer)

    assert await asked(handle)
    assert len(requests) == 1


@pytest.mark.parametrize("end", ["it answered", "it was too slow", "nobody waits any more"])
async def test_readiness_probe_always_closes_its_connection(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, closed = asyncio.Event(), asyncio.Event()

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        opened.set()
        if end == "it answered":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await reader.read()
        closed.set()
        writer.close()

    async with await asyncio.start_server(keep, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        asking = asyncio.ensure_future(answers(f"http://127.0.0.1:{port}/user/anna/api", None))
        await asyncio.wait_for(opened.wait(), 60)
        if end == "nobody waits any more":
            asking.cancel()
        if end != "it answered":
            loop = asyncio.get_running_loop()
            time, later = loop.time, 2 * readiness.PATIENCE
            monkeypatch.setattr(loop, "time", lambda: time() + later)
        await asyncio.wait([asking], timeout=120)
        assert asking.cancelled() or asking.result() is (end == "it answered")
        await asyncio.wait_for(closed.wait(), 60)


@pytest.mark.parametrize(("host", "written"), [("localhost", "localhost"), ("::1", "[::1]")])
async def test_readiness_probe_supports_host_names_and_ipv6(host: str, written: str) -> None:
    async with await asyncio.start_server(saying(b"HTTP/1.1 200 OK\r\n\r\n"), host, 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await answers(f"http://{written}:{port}/user/anna/api", None)


async def test_readiness_probe_of_an_ip_needs_no_lookup_thread() -> None:
    before = set(threading.enumerate())
    assert await asked(saying(b"HTTP/1.1 200 OK\r\n\r\n"))
    assert not [thread for thread in threading.enumerate() if thread not in before]


async def test_closed_port_is_not_ready() -> None:
    assert not await answers(f"http://127.0.0.1:{free_port()}/api", None)


async def test_silent_server_is_not_ready_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readiness, "PATIENCE", 0.2)
    assert not await asyncio.wait_for(asked(silent), 60)


async def test_readiness_probe_requires_certificates_of_the_hub(tmp_path: Path) -> None:
    def certificates(name: str) -> tuple[str, str, str]:
        """Key, certificate and authority, as ``JupyterHub.internal_ssl`` makes them."""
        maker = Certipy(store_dir=str(tmp_path / name))
        authority = maker.create_ca("authority")["files"]["cert"]
        pair = maker.create_signed_pair("server", "authority", alt_names=["IP:127.0.0.1"])
        files = pair["files"]
        return files["key"], files["cert"], authority

    key, cert, authority = certificates("ours")
    there = make_ssl_context(key, cert, cafile=authority, purpose=ssl.Purpose.CLIENT_AUTH)
    ok = saying(b"HTTP/1.1 200 OK\r\n\r\n")
    assert await asked(ok, there, make_ssl_context(key, cert, cafile=authority))
    key, cert, authority = certificates("theirs")
    assert not await asked(ok, there, make_ssl_context(key, cert, cafile=authority))


async def test_connection_closed_before_tls_is_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Docker's proxy does while nothing listens behind it yet."""
    start_tls = IOStream.start_tls

    def closed_meanwhile(stream: IOStream, *args: Any, **kwargs: Any) -> Any:
        stream.close()
        return start_tls(stream, *args, **kwargs)

    monkeypatch.setattr(IOStream, "start_tls", closed_meanwhile)
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        context = ssl.create_default_context()
        assert not await answers(f"https://127.0.0.1:{port}/user/anna/api", context)
