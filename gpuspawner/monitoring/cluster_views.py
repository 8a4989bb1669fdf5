"""The live page of the whole cluster, and the same as JSON.

Everybody sees every device: its state, since when it is taken, what it does. Whose a device is, is
told to admins, to its member, and to all members where the site says so; what is wrong with it in
the words of the driver, and what an admin wrote of it, to admins alone.

However many watch, the picture is taken once, in a thread, and written as text once for each kind
of reader. A viewer has room for one picture: the newest takes the place of one that was not sent
yet. So a viewer who reads slowly sees fewer of them, and one who never reads is let go.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, cast

from tornado import web
from tornado.http1connection import HTTP1Connection
from tornado.iostream import StreamClosedError

from ..core.errors import GPUSpawnerError, TooManyViewers
from ..devices.models import Device, DeviceStatus
from ..devices.snapshots import DeviceView
from ..leases.models import Lease, LeaseState
from ..services import Services
from ..web.api import APIHandler
from ..web.base import OTHERWISE, POLICY, ServiceHandler
from ..web.fields import whole
from ..web.operations import operation
from ..web.pages import STATES, Page
from .models import THROTTLE, DeviceUse, Sample
from .schemas import ClusterAnswer, ClusterDeviceAnswer

FRESH = timedelta(seconds=15)
"""How old a sample may be to say what a device does now."""

TOO_WARM = 0x20 | 0x40
"""Bits of :data:`~gpuspawner.monitoring.models.THROTTLE` that every reader is told of as heat."""

Recent = Callable[[], Mapping[str, Sequence[Sample]]]
"""Gives the newest samples of each device by its UUID, the oldest first."""


class Sight(Enum):
    """What a reader may see of others."""

    PLAIN = "plain"
    NAMES = "names"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Doing:
    """What a device does; None is what is not known."""

    use: float | None = None
    """Percent; None of a MIG instance."""
    busy: bool | None = None
    used_bytes: int | None = None
    celsius: int | None = None
    watts: float | None = None
    slowed: tuple[str, ...] = ()
    """Why its clocks are low."""
    warm: bool = False
    error: str = ""
    """Why it does not answer."""
    silent: str = ""
    """Why nobody could ask it."""
    resting: bool = False
    """Whether nobody was to expect it to answer."""
    xids: tuple[int, ...] = ()
    """Errors of the last minutes."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A device with whose it is and what it does."""

    view: DeviceView
    lease: Lease | None
    doing: Doing

    @property
    def device(self) -> Device:
        """The device itself."""
        return self.view.device

    @property
    def since(self) -> datetime | None:
        """Since when it is taken."""
        return (self.lease.started_at or self.lease.granted_at) if self.lease else None

    @property
    def starting(self) -> bool:
        """Whether its server is not up yet."""
        return self.lease is not None and self.lease.state is LeaseState.GRANTED

    def health(self, sight: Sight) -> str:
        """What is wrong with it, as this reader is told; empty when nothing is."""
        told, doing = [], self.doing
        if doing.error:
            told.append(f"does not answer: {doing.error}" if _full(sight) else "does not answer")
        if doing.silent and not doing.resting:
            told.append(doing.silent if _full(sight) else "its machine does not tell what it does")
        if doing.xids and _full(sight):
            told.append("Xid " + ", ".join(map(str, doing.xids)))
        if doing.slowed and _full(sight):
            told.append("slowed: " + ", ".join(doing.slowed))
        elif doing.warm:
            told.append("too warm")
        detail = self.view.detail.partition("; ")[2] if self.lease else self.view.detail
        if detail and _full(sight) and detail != self.note:
            told.append(detail)
        return "; ".join(part.rstrip(".") for part in told)

    @property
    def note(self) -> str:
        """What everybody is told of it that is no fault; empty when there is nothing."""
        return self.device.reason if self.device.status is DeviceStatus.OK else ""


@dataclass(frozen=True, slots=True)
class Picture:
    """All devices at one moment."""

    at: datetime
    tiles: tuple[Tile, ...]
    total: int
    free: int
    waiting: int
    """Tickets in line."""
    error: str
    """Why the devices cannot be seen; empty when they can."""
    own: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The names of a member's servers by the UUIDs of their devices, by member."""


def look(services: Services, recent: Recent) -> Picture:
    """The newest picture. Raises StoreUnavailable."""
    now = services.clock()
    overview = services.monitoring.overview()
    opened = {lease.id: lease for lease in services.leases.open_leases()}
    minutes, samples = services.monitoring.use_now(), recent()
    own: dict[str, dict[str, str]] = {}
    tiles = []
    for view in overview.devices:
        lease, uuid = opened.get(view.lease_id or ""), view.device.uuid
        doing = doing_of(samples.get(uuid, ()), minutes.get(uuid), now)
        tiles.append(Tile(view, lease, doing))
        if lease:
            own.setdefault(lease.server.user, {})[uuid] = lease.server.name
    return Picture(
        at=now,
        tiles=tuple(tiles),
        total=overview.total,
        free=overview.free,
        waiting=overview.waiting,
        error=overview.error,
        own=own,
    )


def doing_of(samples: Sequence[Sample], minute: DeviceUse | None, now: datetime) -> Doing:
    """What the newest second says, else what the last minute does."""
    found = [xid for sample in samples for xid in sample.xids]
    xids = tuple(dict.fromkeys([*found, *(minute.xids if minute else ())]))
    sample = samples[-1] if samples else None
    if sample is not None and abs(now - sample.at) <= FRESH:
        return Doing(
            use=sample.use,
            busy=sample.busy,
            used_bytes=sample.used_bytes,
            celsius=sample.celsius,
            watts=None if sample.milliwatts is None else sample.milliwatts / 1000,
            slowed=_slowed(sample.throttle),
            warm=bool(sample.throttle & TOO_WARM),
            error=sample.error,
            silent=sample.silent,
            resting=sample.resting,
            xids=xids,
        )
    if minute is None:
        return Doing()
    return Doing(
        use=minute.use,
        busy=minute.busy > 0 if minute.known else None,
        used_bytes=minute.memory_max if minute.known else None,
        celsius=minute.celsius_max,
        watts=minute.watts,
        slowed=_slowed(minute.throttle),
        warm=bool(minute.throttle & TOO_WARM),
        error="" if minute.known else minute.error,
        xids=xids,
    )


def _slowed(bits: int) -> tuple[str, ...]:
    return tuple(why for bit, why in THROTTLE.items() if bits & bit)


def _full(sight: Sight) -> bool:
    return sight is Sight.ADMIN


def holder(tile: Tile, sight: Sight) -> str:
    """Whose it is, as this reader is told of others; empty when nobody has it."""
    if tile.lease is None:
        return ""
    if sight is Sight.ADMIN:
        return str(tile.lease.server)
    return tile.lease.server.user if sight is Sight.NAMES else "in use"


def words(tile: Tile, sight: Sight, now: datetime) -> dict[str, Any]:
    """What stands on a tile, as text, and how long its two bars are, in percent."""
    doing, size = tile.doing, tile.device.memory_bytes
    filled = None if doing.used_bytes is None or not size else 100 * doing.used_bytes / size
    return {
        "state": tile.view.state,
        "who": holder(tile, sight),
        "since": _since(tile, now),
        "use": _use(doing),
        "level": 0 if doing.use is None else round(doing.use),
        "memory": _memory(doing, size),
        "filled": 0 if filled is None else min(100, round(filled)),
        "temperature": "" if doing.celsius is None else f"{doing.celsius} \N{DEGREE SIGN}C",
        "health": tile.health(sight),
        "note": tile.note,
    }


def mine(server: str) -> str:
    """Whose it is, to its own member."""
    return f"yours: {server}" if server else "yours"


def _since(tile: Tile, now: datetime) -> str:
    if tile.since is None:
        return ""
    local = tile.since.astimezone()
    same_day = local.date() == now.astimezone().date()
    when = local.strftime("%H:%M" if same_day else "%-d %b %H:%M")
    return f"{'starts, since' if tile.starting else 'since'} {when}"


def _use(doing: Doing) -> str:
    if doing.use is not None:
        return f"{doing.use:.0f} %"
    if doing.busy is None:
        return "not known"
    return "has processes" if doing.busy else "no process"


def _memory(doing: Doing, size: int) -> str:
    if doing.used_bytes is None:
        return f"{size / 2**30:.0f} GB"
    return f"{doing.used_bytes / 2**30:.1f} of {size / 2**30:.0f} GB"


def summary(picture: Picture) -> str:
    """How many are free, and how many wait."""
    waiting = picture.waiting
    line = {0: "nobody waits in line", 1: "one waits in line"}.get(
        waiting, f"{waiting} wait in line"
    )
    return f"{picture.free} of {picture.total} free, {line}"


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
        return json.dumps({uuid: mine(name) for uuid, name in own.items()})


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


class LiveCluster:
    """The newest picture, taken while anybody watches."""

    def __init__(self, services: Services, recent: Recent) -> None:
        self._services = services
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
            return await self._services.read(take, self._services, self._recent, sights)
        except GPUSpawnerError as error:
            trouble = error.message
        except Exception:  # whatever goes wrong, the next picture is tried
            log.exception("The picture of the cluster could not be taken")
            trouble = OTHERWISE
        at = self._services.clock().astimezone().strftime("%H:%M:%S")
        return Frame(at, {}, trouble=trouble)


def take(services: Services, recent: Recent, sights: Collection[Sight]) -> Frame:
    """A picture as it is sent to these kinds of readers. Blocks."""
    picture = look(services, recent)
    return Frame(
        at=picture.at.astimezone().strftime("%H:%M:%S"),
        texts={sight: as_text(picture, sight) for sight in sights},
        own=picture.own,
    )


def as_text(picture: Picture, sight: Sight) -> str:
    """The picture as one line of JSON, as this kind of reader may see it."""
    tiles = {tile.device.uuid: words(tile, sight, picture.at) for tile in picture.tiles}
    told = {"summary": summary(picture), "seen": not picture.error, "tiles": tiles}
    return json.dumps(told, separators=(",", ":"))


SCRIPTED = f"{POLICY}; script-src 'self'; connect-src 'self'"
"""Of the one page that has a script, its own: it may ask for pictures."""

MOST_PICTURES = 1000

UNSEEN = "The GPUs cannot be seen just now. Running servers go on; your admin sees why."


class Watching(ServiceHandler):
    """What the page, the stream and the JSON share."""

    @property
    def sight(self) -> Sight:
        """What the one who asks may see of others."""
        if self.admin:
            return Sight.ADMIN
        return Sight.NAMES if self.context.members_see_names else Sight.PLAIN


class ClusterPage(Watching, Page):
    """Every device as a tile. It is whole without a script, and goes on by itself with one."""

    def set_default_headers(self) -> None:
        super().set_default_headers()
        self.set_header("Content-Security-Policy", SCRIPTED)

    @web.authenticated
    async def get(self) -> None:
        picture = await self.read(look, self.services, self.context.recent)
        own = picture.own.get(self.user, {})
        tiles = []
        for tile in picture.tiles:
            told = words(tile, self.sight, picture.at)
            uuid = tile.device.uuid
            if uuid in own:
                told["who"] = mine(own[uuid])
            tiles.append((tile.device, self.services.machines.machine_of(uuid), told, uuid in own))
        self.show(
            "cluster.html",
            now=picture.at,
            summary=summary(picture),
            seen=not picture.error,
            tiles=tiles,
            token=self.xsrf_token.decode(),
            words=json.dumps({**STATES, "unseen": UNSEEN}),
            unseen=UNSEEN,
        )


class ClusterStream(Watching, APIHandler):
    """Pictures as server-sent events, until it is asked anew who watches."""

    _viewer: Viewer | None = None

    async def prepare(self) -> None:
        # After a restart of the service all come at once: the Hub is asked about one at a time,
        # so that it has room for everybody else's requests in between.
        async with self.application.settings.setdefault("live_asks", asyncio.Semaphore(1)):
            await super().prepare()

    @web.authenticated
    async def get(self) -> None:
        pictures = whole(
            self.get_query_argument("pictures", str(MOST_PICTURES)), "pictures", 1, MOST_PICTURES
        )
        shared: LiveCluster = self.application.settings.setdefault(
            "live", LiveCluster(self.services, self.context.recent)
        )
        try:
            viewer = shared.join(self.user, self.sight)
        except GPUSpawnerError as error:
            raise web.HTTPError(error.status_code) from error
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("X-Accel-Buffering", "no")  # a proxy in front passes each on at once
        self._viewer = viewer
        try:
            await self._send(viewer, pictures)
        except StreamClosedError:
            pass
        except asyncio.TimeoutError:  # who never reads is let go, and what waits for them with it
            # Tornado's annotation names a base class that has no close(); a server's is this one.
            cast(HTTP1Connection, self.request.connection).close()
        finally:
            shared.leave(viewer)

    async def _send(self, viewer: Viewer, pictures: int) -> None:
        """Raises TimeoutError when the one who watches does not read."""
        now = asyncio.get_running_loop().time
        # Not all at the same moment: those who came together come back one after the other.
        spread = random.random()  # no secret  # nosec B311
        ends = now() + LASTS * (1 - spread / 4)
        self.write(f"retry: {1000 + int(3000 * spread)}\n\n")
        for _ in range(pictures):
            text = await viewer.next(ends - now())
            if text is None:
                break
            self.write(text)
            await asyncio.wait_for(self.flush(), TAKES_IN)
        await asyncio.wait_for(self.finish(), TAKES_IN)

    def on_connection_close(self) -> None:
        super().on_connection_close()
        if self._viewer:
            self._viewer.go()


class ClusterAPI(Watching, APIHandler):
    """Every device, and what it does just now."""

    @operation("cluster", ClusterAnswer)
    @web.authenticated
    async def get(self) -> None:
        picture: Picture = await self.read(look, self.services, self.context.recent)
        devices = [device(tile, self.user, self.sight) for tile in picture.tiles]
        seen = not picture.error
        self.answer(ClusterAnswer, picture, as_of=picture.at, seen=seen, devices=devices)


def device(tile: Tile, user: str, sight: Sight) -> ClusterDeviceAnswer:
    """A device as JSON, with what this reader may know."""
    server = tile.lease.server if tile.lease else None
    mine = server is not None and server.user == user
    named = server is not None and (mine or sight is not Sight.PLAIN)
    return ClusterDeviceAnswer.of(
        tile,
        mine=mine,
        user=server.user if server and named else None,
        server=server.name if server and (mine or sight is Sight.ADMIN) else None,
        health=tile.health(sight),
    )


HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("cluster", ClusterPage),
    ("cluster/live", ClusterStream),
    ("api/cluster", ClusterAPI),
]
