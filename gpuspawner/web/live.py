"""The live page: one picture of the cluster for all who watch, sent as it changes.

However many watch, the picture is taken once, in a thread, and written as text once for each kind
of reader. A viewer has room for one picture: the newest takes the place of one that was not sent
yet. So a viewer who reads slowly sees fewer of them, and one who never reads is let go.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..broker import Broker
from ..errors import GPUSpawnerError, TooManyViewers
from . import cluster
from .base import OTHERWISE
from .cluster import Picture, Recent, Sight

log = logging.getLogger(__name__)

EVERY = 2.0
"""Seconds between two pictures."""
TAKES_IN = 30.0
"""Seconds that a viewer may take to read what was sent."""
LASTS = 60.0
"""Seconds after which a stream ends, and the browser asks anew: so it is known again who asks."""
MOST_OF_ONE = 8
"""Streams of one member."""
MOST = 1000
"""Streams of all together."""
AT_ONCE, PAUSE = 8, 0.01
"""So many viewers are told at once, with so many seconds between: nothing else waits for long."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A picture as it is sent."""

    at: str
    """The time of day that it is of."""
    texts: Mapping[Sight, str]
    """One line of JSON for each kind of reader."""
    own: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    trouble: str = ""
    """Why there is none just now, as a sentence."""

    def is_for(self, sight: Sight) -> bool:
        """Whether there is something for this kind of reader."""
        return bool(self.trouble) or sight in self.texts

    def mine(self, user: str) -> str:
        """Which devices are this member's, as one line of JSON."""
        own = self.own.get(user, {})
        return json.dumps({uuid: cluster.mine(name) for uuid, name in own.items()})


class Viewer:
    """One who watches."""

    def __init__(self, user: str, sight: Sight) -> None:
        self.user = user
        self.sight = sight
        self._frame: Frame | None = None
        self._new = asyncio.Event()
        self._gone = False
        self._sent: dict[str, str] = {}

    def offer(self, frame: Frame) -> None:
        """Here is a newer picture."""
        self._frame = frame
        self._new.set()

    def go(self) -> None:
        """Nobody is there any more."""
        self._gone = True
        self._new.set()

    async def next(self, seconds: float) -> str | None:
        """What to send next: a picture whole, or only the time when nothing else changed. None
        when nothing came in this time, or nobody is there any more."""
        try:
            await asyncio.wait_for(self._new.wait(), max(0.0, seconds))
        except asyncio.TimeoutError:
            return None
        self._new.clear()
        frame = self._frame
        return None if self._gone or frame is None else self._events(frame)

    def _events(self, frame: Frame) -> str:
        """What changed since the last one. Nobody is told twice what stays as it was."""
        told = {"trouble": json.dumps(frame.trouble)}
        if not frame.trouble:
            told |= {"picture": frame.texts[self.sight], "mine": frame.mine(self.user)}
        changed = {name: data for name, data in told.items() if self._sent.get(name) != data}
        self._sent |= changed
        changed["time"] = json.dumps(frame.at)
        return "".join(f"event: {name}\ndata: {data}\n\n" for name, data in changed.items())


class Live:
    """The newest picture, taken while anybody watches."""

    def __init__(self, broker: Broker, recent: Recent) -> None:
        self._broker = broker
        self._recent = recent
        self._viewers: list[Viewer] = []
        self._task: asyncio.Task[None] | None = None
        self._frame: Frame | None = None

    def join(self, user: str, sight: Sight) -> Viewer:
        """Begin to watch. Raises TooManyViewers."""
        if len(self._viewers) >= MOST or self._of(user) >= MOST_OF_ONE:
            raise TooManyViewers
        viewer = Viewer(user, sight)
        self._viewers.append(viewer)
        if self._task is None or self._task.done():
            self._frame = None
            self._task = asyncio.get_running_loop().create_task(self._go_on())
        elif self._frame is not None and self._frame.is_for(sight):
            viewer.offer(self._frame)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Watch no more."""
        self._viewers.remove(viewer)

    @property
    def watched(self) -> int:
        """By how many."""
        return len(self._viewers)

    def _of(self, user: str) -> int:
        return sum(viewer.user == user for viewer in self._viewers)

    async def _go_on(self) -> None:
        """Take pictures until nobody watches."""
        while self._viewers:
            self._frame = await self._take()
            for number, viewer in enumerate(list(self._viewers), start=1):
                if self._frame.is_for(viewer.sight):  # else they came a moment ago
                    viewer.offer(self._frame)
                if number % AT_ONCE == 0:
                    await asyncio.sleep(PAUSE)
            await asyncio.sleep(EVERY)

    async def _take(self) -> Frame:
        sights = {viewer.sight for viewer in self._viewers}
        try:
            return await self._broker.read(take, self._broker, self._recent, sights)
        except GPUSpawnerError as error:
            trouble = error.message
        except Exception:  # whatever goes wrong, the next picture is tried
            log.exception("The picture of the cluster could not be taken")
            trouble = OTHERWISE
        at = self._broker.clock().astimezone().strftime("%H:%M:%S")
        return Frame(at, {}, trouble=trouble)


def take(broker: Broker, recent: Recent, sights: Collection[Sight]) -> Frame:
    """A picture as it is sent to these kinds of readers. Blocks."""
    picture = cluster.look(broker, recent)
    return Frame(
        at=picture.at.astimezone().strftime("%H:%M:%S"),
        texts={sight: as_text(picture, sight) for sight in sights},
        own=picture.own,
    )


def as_text(picture: Picture, sight: Sight) -> str:
    """The picture as one line of JSON, as this kind of reader may see it."""
    tiles = {tile.device.uuid: cluster.words(tile, sight, picture.at) for tile in picture.tiles}
    told = {"summary": cluster.summary(picture), "seen": not picture.error, "tiles": tiles}
    return json.dumps(told, separators=(",", ":"))
