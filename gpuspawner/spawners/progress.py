"""What a pending spawn tells the page: an append-only list that readers can follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

SIGN = 10.0
"""Seconds between two signs of life; the pending page gives up on the stream after 25."""


class Progress:
    """Messages of one spawn. Written and read on the event loop."""

    def __init__(self) -> None:
        self._events: list[tuple[int, bool, dict[str, Any]]] = []
        """Number, whether it can be replaced, and what the page gets."""
        self._more = asyncio.Event()
        self._number = 0
        self._last = 0

    def say(self, message: str, percent: int | None = None, *, replaces: bool = False) -> None:
        """Add a message; the bar never goes back.

        One that ``replaces`` takes the place of the last such one: who waits for hours and
        comes back reads the newest place in line, and not all that there were.
        """
        self._last = max(self._last, percent or 0)
        if self.last == message:
            return
        if replaces and self._events and self._events[-1][1]:
            self._events.pop()
        self._number += 1
        self._events.append((self._number, replaces, {"progress": self._last, "message": message}))
        self._more.set()
        self._more = asyncio.Event()

    @property
    def last(self) -> str:
        """The newest message."""
        return str(self._events[-1][2]["message"]) if self._events else "nothing yet"

    async def follow(self) -> AsyncIterator[dict[str, Any]]:
        """Every message so far and those to come; ends when the reader goes away.

        While there is nothing to say, a sign of life each :data:`SIGN` seconds: a proxy keeps
        a page's connection open when the hub behind it is gone, and the page cannot know.
        """
        seen = 0
        while True:
            more = self._more
            for number, _, event in list(self._events):
                if number > seen:
                    seen = number
                    yield event
            if more is self._more:
                try:
                    await asyncio.wait_for(more.wait(), SIGN)
                except asyncio.TimeoutError:
                    yield {"progress": self._last}
