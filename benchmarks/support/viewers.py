"""Very many who watch the live page, as browsers do: each by a connection of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit


class Viewers:
    """``with Viewers(url, tokens) as viewers``: they watch until the end of the block."""

    def __init__(self, url: str, tokens: Sequence[str]) -> None:
        self._at = urlsplit(url)
        self._tokens = tokens
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._all(),))
        self._stop = asyncio.Event()
        self.pictures = [0] * len(tokens)
        """How many each of them got."""
        self.bytes = 0
        self.refused = 0

    def __enter__(self) -> Viewers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _all(self) -> None:
        tasks = [asyncio.ensure_future(self._watch(n)) for n in range(len(self._tokens))]
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, number: int) -> None:
        while True:
            await asyncio.sleep(3 * number / len(self._tokens))
            reader, writer = await asyncio.open_connection(self._at.hostname, self._at.port)
            try:
                writer.write(
                    f"GET {self._at.path} HTTP/1.1\r\nHost: {self._at.netloc}\r\n"
                    f"Authorization: token {self._tokens[number]}\r\n"
                    "Connection: close\r\n\r\n".encode()
                )
                status = await reader.readline()
                if b" 200 " not in status:
                    self.refused += 1
                while data := await reader.read(65536):
                    self.bytes += len(data)
                    self.pictures[number] += data.count(b"event: time")
            finally:
                writer.close()
            await asyncio.sleep(1)
