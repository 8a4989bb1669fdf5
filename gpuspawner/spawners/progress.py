"""What a pending spawn tells the page: an append-only list that readers can follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any


class Progress:
    """Messages of one spawn. Written and read on the event loop."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._more = asyncio.Event()
        self._last = 0

    def say(self, message: str, percent: int | None = None) -> None:
        """Add a message; the bar never goes back."""
        self._last = max(self._last, percent or 0)
        if self._events and self._events[-1]["message"] == message:
            return
        self._events.append({"progress": self._last, "message": message})
        self._more.set()
        self._more = asyncio.Event()

    @property
    def last(self) -> str:
        """The newest message."""
        return str(self._events[-1]["message"]) if self._events else "nothing yet"

    async def follow(self) -> AsyncIterator[dict[str, Any]]:
        """Every message so far and those to come; ends when the reader goes away."""
        seen = 0
        while True:
            more = self._more
            while seen < len(self._events):
                yield self._events[seen]
                seen += 1
            await more.wait()
