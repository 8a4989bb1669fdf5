"""Real: sockets, TLS, how the Hub waits. Servers that answer, do not yet, and never will."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from certipy import Certipy
from jupyterhub.objects import Server
from jupyterhub.utils import AnyTimeoutError, make_ssl_context
from tornado.httputil import HTTPHeaders

from gpuspawner.spawners import answering
from gpuspawner.spawners.answering import Answer, spare_hub
from tests.support.processes import free_port

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def saying(text: bytes) -> Handler:
    """A server that reads a request and says this."""

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
) -> Answer | None:
    """What is found out about a server with this handler."""
    async with await asyncio.start_server(handler, "127.0.0.1", 0, ssl=there) as server:
        port = server.sockets[0].getsockname()[1]
        scheme = "https" if there else "http"
        return await answering.answer_of(f"{scheme}://127.0.0.1:{port}/user/anna/api", here)


@pytest.mark.parametrize(
    ("said", "answers"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", True),
        (b"HTTP/1.0 302 Found\r\nLocation: /hub/login\r\n\r\n", True),
        (b"HTTP/1.1 404\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nNonsense\r\n\r\n", True),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n", False),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        (b"", False),
        (b"\r\n", False),
        (b"SSH-2.0-OpenSSH_9.2\r\n", False),
        (b"220 mail.example ESMTP\r\n", False),
        (b"x" * 1_000_000, False),
    ],
)
async def test_what_counts_as_an_answer(said: bytes, answers: bool) -> None:
    assert (await asked(saying(said)) is not None) is answers


async def test_what_it_said_is_known() -> None:
    head = b"HTTP/1.1 405 Method Not Allowed\r\nX-JupyterHub-Version: 6.1.0\r\nA: b\r\n\r\n{}"
    headers = HTTPHeaders({"X-JupyterHub-Version": "6.1.0", "A": "b"})
    assert await asked(saying(head)) == Answer(405, headers)


@pytest.mark.parametrize(("host", "written"), [("localhost", "localhost"), ("::1", "[::1]")])
async def test_a_server_by_name_and_by_another_kind_of_address(host: str, written: str) -> None:
    async with await asyncio.start_server(saying(b"HTTP/1.1 200 OK\r\n\r\n"), host, 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await answering.answer_of(f"http://{written}:{port}/user/anna/api", None)


async def test_nobody_listens() -> None:
    assert await answering.answer_of(f"http://127.0.0.1:{free_port()}/api", None) is None


async def test_the_hub_takes_what_was_answered_once_and_then_asks_itself() -> None:
    address = f"http://127.0.0.1:{free_port()}/user/anna/"  # where nobody listens
    server, answer = Server.from_url(address), Answer(200, HTTPHeaders())
    spare_hub(server, address, answer)
    assert await server.wait_up(http=True, timeout=0.1, extra_path="api") is answer
    with pytest.raises(AnyTimeoutError):
        await server.wait_up(http=True, timeout=0.1, extra_path="api")


@pytest.mark.parametrize("started", ["http://0.0.0.0:8888", "http://[::]:8888", ("", 8888)])
async def test_the_hub_asks_itself_where_it_knows_another_address(
    started: str | tuple[str, int],
) -> None:
    server = Server.from_url(f"http://127.0.0.1:{free_port()}/user/anna/")
    spare_hub(server, started, Answer(200, HTTPHeaders()))
    with pytest.raises(AnyTimeoutError):
        await server.wait_up(http=True, timeout=0.1, extra_path="api")


async def test_a_silent_server_is_not_waited_for_longer_than_one_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answering, "PATIENCE", 0.2)
    assert await asyncio.wait_for(asked(silent), 5) is None


async def test_a_server_with_the_hubs_own_certificates_and_one_with_others(tmp_path: Path) -> None:
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
    other_key, other_cert, other_authority = certificates("theirs")
    assert not await asked(
        ok, there, make_ssl_context(other_key, other_cert, cafile=other_authority)
    )
