"""What the whole cluster does at one moment, as one reader may see it. Blocks.

Everybody sees every device: its state, since when it is taken, what it does. Whose a device is, is
told to admins, to its member, and to all members where the site says so; what is wrong with it in
the words of the driver, and what an admin wrote of it, to admins alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from ..broker import Broker, DeviceView
from ..model import Device, DeviceStatus, Lease, LeaseState
from ..telemetry import DeviceUse, Sample
from ..telemetry.values import THROTTLE

FRESH = timedelta(seconds=15)
"""How old a sample may be to say what a device does now."""

TOO_WARM = 0x20 | 0x40
"""Bits of :data:`~gpuspawner.telemetry.values.THROTTLE` that every reader is told of as heat."""

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


def look(broker: Broker, recent: Recent) -> Picture:
    """The newest picture. Raises StoreUnavailable."""
    now = broker.clock()
    overview = broker.overview()
    opened = {lease.id: lease for lease in broker.open_leases()}
    minutes, samples = broker.use_now(), recent()
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
