"""Samplers of nodes that are parts of a test: one that lies, and one that looks when it is told."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from gpuspawner.slurm.sampler import Recorder, listening


class Liar:
    """Answers everybody with the same bytes; slowly where ``slow``."""

    def __init__(self, path: Path, answer: bytes, *, slow: bool = False) -> None:
        self.answer, self.slow = answer, slow
        self._over = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._socket.accept()
                with client:
                    client.recv(65_536)
                    if not self.slow:
                        client.sendall(self.answer)
                    for byte in self.answer if self.slow else b"":
                        client.sendall(bytes([byte]))
                        self._over.wait(0.2)
                        if self._over.is_set():
                            return
            except OSError:
                continue  # it had enough of us


@contextmanager
def telling(recorder: Recorder, url: str) -> Iterator[None]:
    """The node's part, in a thread; it looks when the test does."""

    async def answer() -> None:
        with listening(recorder, url, Path()):
            stop.set_result(asyncio.get_running_loop())
            await over.wait()

    stop, over = Future[asyncio.AbstractEventLoop](), asyncio.Event()
    thread = threading.Thread(target=asyncio.run, args=(answer(),))
    thread.start()
    loop = stop.result(90)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
