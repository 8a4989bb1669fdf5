"""A client that asks a hub for very many servers at the same moment, over raw connections."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

OPENING = 64
"""Connections that are opened at a time: more would only wait in the kernel's queue."""


def ask_for_all(host: str, port: int, token: str, names: Sequence[str]) -> Counter[int]:
    """Ask for the server of every member at once; how often each status came."""
    return asyncio.run(_ask_for_all(host, port, token, names))


async def _ask_for_all(host: str, port: int, token: str, names: Sequence[str]) -> Counter[int]:
    opening = asyncio.Semaphore(OPENING)
    all_open = asyncio.Event()
    left = len(names)

    async def ask(name: str) -> int:
        nonlocal left
        async with opening:
            reader, writer = await asyncio.open_connection(host, port)
        left -= 1
        if not left:
            all_open.set()
        await all_open.wait()
        head = (
            f"POST /hub/api/users/{name}/server HTTP/1.1\r\nHost: {host}:{port}\r\n"
            f"Authorization: token {token}\r\nContent-Type: application/json\r\n"
            "Content-Length: 2\r\nConnection: close\r\n\r\n{}"
        )
        writer.write(head.encode())
        status = int((await reader.readline()).split()[1])
        await reader.read()
        writer.close()
        return status

    return Counter(await asyncio.gather(*map(ask, names)))
