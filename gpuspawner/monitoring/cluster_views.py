"""The live page of the whole cluster, and the same as JSON.

Everybody sees every device: its state, how long it has been leased and its current use. Admins and
the member who has it also see the member's name; other members do if the site allows it. Only
admins see the driver's error messages and the notes that admins wrote.

The picture is taken once for all viewers, and serialized once for each kind of viewer. A newer one
replaces one that waits to be sent, and a viewer that never reads is disconnected.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import Enum
from fractions import Fraction
from typing import Any, cast

from tornado import web
from tornado.http1connection import HTTP1Connection
from tornado.iostream import StreamClosedError

from ..core.errors import GPUSpawnerError, TooManyViewers
from ..devices.models import Device, DeviceStatus
from ..devices.snapshots import DeviceView, Overview
from ..leases.host_resources import HostSnapshot
from ..leases.models import Lease, LeaseState
from ..services import Services
from ..web import view_models
from ..web.api import APIHandler, operation
from ..web.base import OTHERWISE, ServiceHandler
from ..web.fields import whole
from ..web.pages import STATES, Page
from ..web.schemas import instant
from .models import THROTTLE, DeviceUse, Sample
from .schemas import ClusterAnswer, ClusterDeviceAnswer, HostAnswer

FRESH = timedelta(seconds=15)
"""Maximum age of a sample that counts as current."""

TOO_WARM = 0x20 | 0x40
"""Bits of :data:`~gpuspawner.monitoring.models.THROTTLE` that all viewers see as heat."""

Recent = Callable[[], Mapping[str, Sequence[Sample]]]
"""A function that returns the newest samples of each device by its UUID, oldest first."""


class ViewerScope(Enum):
    """What a viewer may see of other members."""

    PLAIN = "plain"
    NAMES = "names"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class DeviceActivity:
    """A device's current figures; None if unknown."""

    use: float | None = None
    """Percent; None for some MIG instances."""
    busy: bool | None = None
    used_bytes: int | None = None
    celsius: int | None = None
    watts: float | None = None
    slowed: tuple[str, ...] = ()
    """Why its clocks are reduced."""
    warm: bool = False
    error: str = ""
    """Why it is not responding."""
    silent: str = ""
    """Why it could not be queried."""
    resting: bool = False
    """True if it is not expected to answer."""
    xids: tuple[int, ...] = ()
    """Driver errors of the last minutes."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A device with its leases and its current figures."""

    view: DeviceView
    leases: tuple[Lease, ...]
    """The leases on it, each once; several if it is shared."""
    doing: DeviceActivity

    @property
    def device(self) -> Device:
        """The device itself."""
        return self.view.device

    @property
    def since(self) -> datetime | None:
        """When the oldest of its leases began; None if it is not leased."""
        return min((it.started_at or it.granted_at for it in self.leases), default=None)

    @property
    def starting(self) -> bool:
        """True if none of its servers is up yet."""
        return bool(self.leases) and all(it.state is LeaseState.GRANTED for it in self.leases)

    @property
    def taken(self) -> tuple[bool, ...]:
        """Whether each slot is leased; of a device with no known leases, False for all."""
        return tuple(map(bool, self.view.leases)) or (False,) * self.device.slots

    @property
    def share(self) -> str:
        """How many slots are leased, such as ``3 of 4 slots in use``; empty without slots."""
        slots = self.device.slots
        return f"{sum(self.taken)} of {slots} slots in use" if slots > 1 else ""

    def held_by(self, lease: Lease) -> str:
        """Return `` (2 slots)`` if a lease has several slots of the device, and not all; or ''."""
        slots = self.view.leases.count(lease.id)
        return f" ({slots} slots)" if 1 < slots < self.device.slots else ""

    def health(self, sight: ViewerScope) -> str:
        """Return the device's problems as this viewer may see them; empty if there are none."""
        told, doing = [], self.doing
        if doing.error:
            told.append(
                f"is not responding: {doing.error}" if _full(sight) else "is not responding"
            )
        if doing.silent and not doing.resting:
            told.append(doing.silent if _full(sight) else "no measurements from its machine")
        if doing.xids and _full(sight):
            told.append("Xid " + ", ".join(map(str, doing.xids)))
        if doing.slowed and _full(sight):
            told.append("slowed: " + ", ".join(doing.slowed))
        elif doing.warm:
            told.append("too warm")
        detail = self.view.detail.partition("; ")[2] if self.leases else self.view.detail
        if detail and _full(sight) and detail != self.note:
            told.append(detail)
        return "; ".join(part.rstrip(".") for part in told)

    @property
    def note(self) -> str:
        """A remark for everybody about a device without a fault, or an empty string."""
        return self.device.reason if self.device.status is DeviceStatus.OK else ""


@dataclass(frozen=True, slots=True)
class OwnPlace:
    """A member's part of a device."""

    server: str
    """The name of their server; empty for the default one."""
    slots: tuple[int, ...]
    """The numbers of the slots that it holds."""
    held: str
    """How many these are, as :meth:`Tile.held_by` says it."""
    since: str
    """Since when, in words."""
    since_at: str
    """The same in ISO 8601."""

    @property
    def words(self) -> dict[str, str]:
        """Return what its own member sees in place of these fields of :func:`words`."""
        who = f"yours: {self.server}" if self.server else "yours"
        return {"who": f"{who}{self.held}", "since": self.since, "since_at": self.since_at}


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All devices at one moment."""

    at: datetime
    tiles: tuple[Tile, ...]
    total: int
    free: int
    waiting: int
    """Number of waiting tickets."""
    error: str
    """Why the devices cannot be seen; empty if they can."""
    own: Mapping[str, Mapping[str, OwnPlace]] = field(default_factory=dict)
    """For each member, what they have of each device, by UUID."""
    host: HostSnapshot | None = None
    """The host's memory and CPU; None without a budget."""


def look(services: Services, recent: Recent) -> ClusterSnapshot:
    """Take a picture. Raises StoreUnavailable."""
    now = services.clock()
    overview = services.monitoring.overview()
    opened = {lease.id: lease for lease in services.leases.open_leases()}
    minutes, samples = services.monitoring.use_now(), recent()
    own: dict[str, dict[str, OwnPlace]] = {}
    tiles = []
    for view in overview.devices:
        ids, uuid = dict.fromkeys(filter(None, view.leases)), view.device.uuid
        leases = tuple(opened[each] for each in ids if each in opened)
        doing = doing_of(samples.get(uuid, ()), minutes.get(uuid), now)
        tiles.append(tile := Tile(view, leases, doing))
        for lease in leases:
            alone = replace(tile, leases=(lease,))
            own.setdefault(lease.server.user, {})[uuid] = OwnPlace(
                lease.server.name,
                tuple(slot for slot, each in enumerate(view.leases) if each == lease.id),
                tile.held_by(lease),
                _since(alone, now),
                instant(alone.since) or "",
            )
    return ClusterSnapshot(
        at=now,
        tiles=tuple(tiles),
        total=overview.total,
        free=overview.free,
        waiting=overview.waiting,
        error=overview.error,
        own=own,
        host=_host(services, overview),
    )


def _host(services: Services, overview: Overview) -> HostSnapshot | None:
    budget = services.leases.budget
    if budget is None:
        return None
    free = sum(Fraction(view.free_slots, view.device.slots) for view in overview.devices)
    return HostSnapshot(budget, services.leases.host_reserved(), free)


def doing_of(samples: Sequence[Sample], minute: DeviceUse | None, now: datetime) -> DeviceActivity:
    """Return the figures of the newest sample if it is fresh, else those of the last minute."""
    found = [xid for sample in samples for xid in sample.xids]
    xids = tuple(dict.fromkeys([*found, *(minute.xids if minute else ())]))
    sample = samples[-1] if samples else None
    if sample is not None and abs(now - sample.at) <= FRESH:
        return DeviceActivity(
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
        return DeviceActivity()
    return DeviceActivity(
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


def _full(sight: ViewerScope) -> bool:
    return sight is ViewerScope.ADMIN


def holder(tile: Tile, sight: ViewerScope) -> str:
    """Return who has the device, as this viewer may see it; empty if nobody has it."""
    if not tile.leases:
        return ""
    if sight is ViewerScope.ADMIN:
        return ", ".join(f"{lease.server}{tile.held_by(lease)}" for lease in tile.leases)
    named = ", ".join(f"{lease.server.user}{tile.held_by(lease)}" for lease in tile.leases)
    return named if sight is ViewerScope.NAMES else "in use"


def words(tile: Tile, sight: ViewerScope, now: datetime) -> dict[str, Any]:
    """Return a tile's text, the lengths of its two bars in percent, and which slots are taken."""
    doing, size = tile.doing, tile.device.memory_bytes
    filled = None if doing.used_bytes is None or not size else 100 * doing.used_bytes / size
    shared = {"share": tile.share, "slots": tile.taken} if tile.share else {}
    return {
        "state": tile.view.state,
        "who": holder(tile, sight),
        "since": _since(tile, now),
        "since_at": instant(tile.since) or "",
        "use": _use(doing),
        "level": 0 if doing.use is None else round(doing.use),
        "memory": _memory(doing, size),
        "filled": 0 if filled is None else min(100, round(filled)),
        "temperature": "" if doing.celsius is None else f"{doing.celsius} \N{DEGREE SIGN}C",
        "health": tile.health(sight),
        "note": tile.note,
        "reserved": tile.view.reservation,
        **shared,
    }


def _since(tile: Tile, now: datetime) -> str:
    if tile.since is None:
        return ""
    local = tile.since.astimezone()
    same_day = local.date() == now.astimezone().date()
    when = local.strftime("%H:%M" if same_day else "%-d %b %H:%M")
    return f"{'starts, since' if tile.starting else 'since'} {when}"


def _use(doing: DeviceActivity) -> str:
    if doing.use is not None:
        return f"{doing.use:.0f} %"
    if doing.busy is None:
        return "not known"
    return "has processes" if doing.busy else "no process"


def _memory(doing: DeviceActivity, size: int) -> str:
    if doing.used_bytes is None:
        return f"{size / 2**30:.0f} GB"
    return f"{doing.used_bytes / 2**30:.1f} of {size / 2**30:.0f} GB"


def summary(picture: ClusterSnapshot) -> str:
    """Return how many devices and slots are free, what is reserved, and how many tickets wait."""
    queue = f"{picture.waiting} in the queue" if picture.waiting else "the queue is empty"
    shared = [tile.view for tile in picture.tiles if tile.device.slots > 1]
    total = sum(view.device.slots for view in shared if view.in_service)
    slots = f"{sum(view.free_slots for view in shared)} of {total} slots free, " if total else ""
    host = f"{picture.host.text}, " if picture.host else ""
    return f"{picture.free} of {picture.total} free, {slots}{host}{queue}"


log = logging.getLogger(__name__)

EVERY = 2.0
"""Seconds between two pictures."""
TAKES_IN = 30.0
"""Seconds in which a viewer has to read what was sent."""
LASTS = 60.0
"""Maximum seconds of a stream; then the browser connects again, with its permissions checked."""
MOST_OF_ONE = 8
"""Maximum number of streams per member."""
MOST = 1000
"""Maximum number of streams."""
AT_ONCE, PAUSE = 8, 0.01
"""Viewers that are served at once, and seconds for other work between two such batches."""


@dataclass(frozen=True, slots=True)
class SerializedSnapshot:
    """A picture in serialized form."""

    at: str
    """When it was taken, in ISO 8601."""
    texts: Mapping[ViewerScope, str]
    """One line of JSON for each kind of viewer."""
    own: Mapping[str, Mapping[str, OwnPlace]] = field(default_factory=dict)
    trouble: str = ""
    """Why there is no picture now, as a message."""

    def is_for(self, sight: ViewerScope) -> bool:
        """Return True if it contains something for this kind of viewer."""
        return bool(self.trouble) or sight in self.texts

    def mine(self, user: str) -> str:
        """Return the member's own devices as one line of JSON."""
        own = self.own.get(user, {})
        told = {uuid: {**it.words, "slots": it.slots} for uuid, it in own.items()}
        return json.dumps(told)


class Viewer:
    """One client of the live stream."""

    def __init__(self, user: str, sight: ViewerScope) -> None:
        self.user = user
        self.sight = sight
        self._frame: SerializedSnapshot | None = None
        self._new = asyncio.Event()
        self._gone = False
        self._sent: dict[str, str] = {}

    def offer(self, frame: SerializedSnapshot) -> None:
        """Replace the pending picture by a newer one."""
        self._frame = frame
        self._new.set()

    def go(self) -> None:
        """End the stream because the client has disconnected."""
        self._gone = True
        self._new.set()

    async def next(self, seconds: float) -> str | None:
        """Return the next events; None after ``seconds``, or if the client has disconnected."""
        try:
            await asyncio.wait_for(self._new.wait(), max(0.0, seconds))
        except asyncio.TimeoutError:
            return None
        self._new.clear()
        frame = self._frame
        return None if self._gone or frame is None else self._events(frame)

    def _events(self, frame: SerializedSnapshot) -> str:
        """Return the events for what has changed since the last frame."""
        told = {"trouble": json.dumps(frame.trouble)}
        if not frame.trouble:
            told |= {"picture": frame.texts[self.sight], "mine": frame.mine(self.user)}
        changed = {name: data for name, data in told.items() if self._sent.get(name) != data}
        self._sent |= changed
        changed["time"] = json.dumps(frame.at)
        return "".join(f"event: {name}\ndata: {data}\n\n" for name, data in changed.items())


class LiveCluster:
    """The newest picture, which is updated while there are viewers."""

    def __init__(self, services: Services, recent: Recent) -> None:
        self._services = services
        self._recent = recent
        self._viewers: list[Viewer] = []
        self._task: asyncio.Task[None] | None = None
        self._frame: SerializedSnapshot | None = None

    def join(self, user: str, sight: ViewerScope) -> Viewer:
        """Add a viewer. Raises TooManyViewers."""
        own = sum(viewer.user == user for viewer in self._viewers)
        if len(self._viewers) >= MOST or own >= MOST_OF_ONE:
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
        """Remove a viewer."""
        self._viewers.remove(viewer)

    async def _go_on(self) -> None:
        """Take pictures until there are no viewers."""
        while self._viewers:
            self._frame = await self._take()
            for number, viewer in enumerate(list(self._viewers), start=1):
                if self._frame.is_for(viewer.sight):  # not if they joined a moment ago
                    viewer.offer(self._frame)
                if number % AT_ONCE == 0:
                    await asyncio.sleep(PAUSE)
            await asyncio.sleep(EVERY)

    async def _take(self) -> SerializedSnapshot:
        sights = {viewer.sight for viewer in self._viewers}
        try:
            return await self._services.read(take, self._services, self._recent, sights)
        except GPUSpawnerError as error:
            trouble = error.message
        except Exception:  # try again with the next picture
            log.exception("The picture of the cluster could not be taken")
            trouble = OTHERWISE
        at = instant(self._services.clock()) or ""
        return SerializedSnapshot(at, {}, trouble=trouble)


def take(services: Services, recent: Recent, sights: Collection[ViewerScope]) -> SerializedSnapshot:
    """Take a picture and serialize it for these kinds of viewers. Blocks."""
    picture = look(services, recent)
    return SerializedSnapshot(
        at=instant(picture.at) or "",
        texts={sight: as_text(picture, sight) for sight in sights},
        own=picture.own,
    )


def as_text(picture: ClusterSnapshot, sight: ViewerScope) -> str:
    """Return the picture as one line of JSON, as this kind of viewer may see it."""
    tiles = {tile.device.uuid: words(tile, sight, picture.at) for tile in picture.tiles}
    told = {"summary": summary(picture), "seen": not picture.error, "tiles": tiles}
    return json.dumps(told, separators=(",", ":"))


MOST_PICTURES = 1000

UNSEEN = "GPU status is unavailable. Running servers continue; your admin can see why."


class ClusterHandler(ServiceHandler):
    """What the page, the stream and the API have in common."""

    @property
    def sight(self) -> ViewerScope:
        """What the user may see of other members."""
        if self.admin:
            return ViewerScope.ADMIN
        return ViewerScope.NAMES if self.context.members_see_names else ViewerScope.PLAIN


class ClusterPage(ClusterHandler, Page):
    """All devices as tiles. A script keeps the page up to date; it also works without one."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        picture = await self.read(look, self.services, self.context.recent)
        own, rates = picture.own.get(self.user, {}), self.services.prices.rates
        tiles, devices = [], [tile.device for tile in picture.tiles]
        for tile in picture.tiles:
            told = words(tile, self.sight, picture.at)
            uuid = tile.device.uuid
            if held := own.get(uuid):
                told |= held.words
            tiles.append((tile.device, self.services.machines.machine_of(uuid), told, held))
        self.show(
            "cluster.html",
            now=picture.at,
            summary=summary(picture),
            seen=not picture.error,
            tiles=tiles,
            rates={
                device.uuid: rates.rate_of(device.model, part=device.part) for device in devices
            },
            slot_rates={
                device.uuid: rates.rate_of(device.model, device.slots, device.part)
                for device in devices
            },
            tickets=await self.read(view_models.own_tickets, self.services, self.user),
            xsrf=self.xsrf,
            token=self.xsrf_token.decode(),
            words=json.dumps({**STATES, "unseen": UNSEEN}),
            unseen=UNSEEN,
        )


class ClusterStream(ClusterHandler, APIHandler):
    """Pictures as server-sent events, until the browser has to connect again."""

    _viewer: Viewer | None = None

    async def prepare(self) -> None:
        """Look up the user, one request at a time: after a restart all browsers connect at once."""
        async with self.application.settings.setdefault("live_asks", asyncio.Semaphore(1)):
            await super().prepare()

    @web.authenticated
    async def get(self) -> None:
        """Send pictures until the stream ends or the client disconnects."""
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
        self.set_header("X-Accel-Buffering", "no")  # a proxy must not buffer the events
        self._viewer = viewer
        try:
            await self._send(viewer, pictures)
        except StreamClosedError:
            pass
        except asyncio.TimeoutError:  # the client does not read: drop it and its buffer
            # Tornado's annotation names a base class without close(); a server uses this one.
            cast(HTTP1Connection, self.request.connection).close()
        finally:
            shared.leave(viewer)

    async def _send(self, viewer: Viewer, pictures: int) -> None:
        """Send pictures. Raises TimeoutError if the client does not read them."""
        now = asyncio.get_running_loop().time
        # Spread the reconnects of clients that connected at the same time.
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
        """End the stream when the client disconnects."""
        super().on_connection_close()
        if self._viewer:
            self._viewer.go()


class ClusterAPI(ClusterHandler, APIHandler):
    """All devices as JSON."""

    @operation("cluster", ClusterAnswer)
    @web.authenticated
    async def get(self) -> None:
        """List every device and its current activity."""
        picture: ClusterSnapshot = await self.read(look, self.services, self.context.recent)
        devices = [device(tile, self.user, self.sight) for tile in picture.tiles]
        seen = not picture.error
        host = HostAnswer.of_snapshot(picture.host) if picture.host else None
        self.answer(ClusterAnswer, picture, as_of=picture.at, seen=seen, host=host, devices=devices)


def device(tile: Tile, user: str, sight: ViewerScope) -> ClusterDeviceAnswer:
    """Return a device as JSON, with what this user may see.

    For a device with several leases, it names the reader's own and no others.
    """
    servers = [lease.server for lease in tile.leases]
    own = next((server for server in servers if server.user == user), None)
    server = own or (servers[0] if len(servers) == 1 else None)
    mine = own is not None
    named = server is not None and (mine or sight is not ViewerScope.PLAIN)
    return ClusterDeviceAnswer.of(
        tile,
        mine=mine,
        user=server.user if server and named else None,
        server=server.name if server and (mine or sight is ViewerScope.ADMIN) else None,
        health=tile.health(sight),
    )


HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("cluster", ClusterPage),
    ("cluster/live", ClusterStream),
    ("api/cluster", ClusterAPI),
]
