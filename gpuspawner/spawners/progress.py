"""What a pending spawn tells the page: an append-only list that readers can follow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from ..patience import within

SIGN = 10.0
"""Seconds between two signs of life; the pending page gives up on the stream after 25."""


class Progress:
    """Messages of one spawn. Written from any thread, read on an event loop."""

    def __init__(self) -> None:
        self._events: list[tuple[int, bool, dict[str, Any]]] = []
        """Number, whether it can be replaced, and what the page gets."""
        self._readers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        """What tells each reader that there is more, and where it waits for that."""
        self._writing = threading.Lock()
        self._number = 0
        self._last = 0

    def say(self, message: str, percent: int | None = None, *, replaces: bool = False) -> None:
        """Add a message; the bar never goes back.

        One that ``replaces`` takes the place of the last such one: who waits for hours and
        comes back reads the newest place in line, and not all that there were.
        """
        with self._writing:
            self._last = max(self._last, percent or 0)
            if self.last == message:
                return
            if replaces and self._events and self._events[-1][1]:
                self._events.pop()
            self._number += 1
            event = {"progress": self._last, "message": message}
            self._events.append((self._number, replaces, event))
            readers = list(self._readers.items())
        for more, loop in readers:
            with suppress(RuntimeError):  # that loop is closed, and the reader with it
                loop.call_soon_threadsafe(more.set)

    @property
    def last(self) -> str:
        """The newest message."""
        return str(self._events[-1][2]["message"]) if self._events else "nothing yet"

    @property
    def followed(self) -> bool:
        """Whether anybody reads along just now."""
        return bool(self._readers)

    async def follow(self) -> AsyncIterator[dict[str, Any]]:
        """Every message so far and those to come; ends when the reader goes away.

        While there is nothing to say, a sign of life each :data:`SIGN` seconds: a proxy keeps
        a page's connection open when the hub behind it is gone, and the page cannot know.
        """
        more = asyncio.Event()
        seen = 0
        with self._writing:
            self._readers[more] = asyncio.get_running_loop()
        try:
            while True:
                more.clear()
                for number, _, event in list(self._events):
                    if number > seen:
                        seen = number
                        yield event
                try:
                    await within(SIGN, more.wait())
                except asyncio.TimeoutError:
                    yield {"progress": self._last}
        finally:
            with self._writing:
                del self._readers[more]
