"""What a member's GPUs did in the last hour and in the whole session, drawn here as curves: the
browser needs no script for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby

from ..broker import Broker
from ..model import Lease, LeasedDevice
from ..telemetry import DeviceUse, combine
from ..telemetry.values import HOUR, MINUTE

WIDTH, HEIGHT = 360, 96
"""Of the drawing; it is stretched to the width of its place."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 4, 6, 16

LAST = timedelta(hours=1)
POINTS = 60
"""At the most, in the curve of a session."""
BY_MINUTES = timedelta(hours=12)
"""A longer session is told by its hours."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One device in one span of time, as paths in the drawing's own units."""

    title: str
    start: datetime
    end: datetime
    use: str
    memory: str
    summary: str
    """The same in words, for who does not see it."""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    top: int = _TOP
    ground: int = HEIGHT - _BOTTOM


@dataclass(frozen=True, slots=True)
class DeviceCurves:
    """A device of a lease."""

    device: LeasedDevice
    curves: tuple[Curve, ...]
    """None where nothing was measured yet."""


def of_leases(broker: Broker, leases: Collection[Lease]) -> dict[str, list[DeviceCurves]]:
    """The curves of servers that are up, by the id of the lease. Blocks."""
    now = broker.clock()
    return {
        lease.id: [_of_device(broker, lease, device, now) for device in lease.devices]
        for lease in leases
        if lease.started_at and lease.devices
    }


def _of_device(broker: Broker, lease: Lease, device: LeasedDevice, now: datetime) -> DeviceCurves:
    begun = lease.started_at or lease.granted_at
    found = []
    for title, start in (("Last hour", max(begun, now - LAST)), ("Whole session", begun)):
        if title != "Last hour" and now - start <= LAST:
            continue
        seconds = MINUTE if now - start <= BY_MINUTES else HOUR
        parts = broker.use_between(start, now, seconds=seconds, uuids=[device.uuid])
        if parts:
            found.append(curve(title, parts, start, now, device.memory_bytes))
    return DeviceCurves(device, tuple(found))


def curve(
    title: str, parts: Sequence[DeviceUse], start: datetime, end: datetime, memory_bytes: int
) -> Curve:
    """Draw what is known of the span. Of what is not known there is no line."""
    length = max((end - start).total_seconds(), 1.0)
    step = max(parts[0].seconds, -(-int(length) // POINTS // MINUTE) * MINUTE)
    points = list(_points(parts, start, step))
    whole = combine(parts, start, parts[0].seconds)
    uses = [(at, _use(some)) for at, some in points]
    fills = [(at, _filled(some, memory_bytes)) for at, some in points]
    return Curve(
        title=title,
        start=start,
        end=end,
        use=_path(uses, length, step),
        memory=_path(fills, length, step),
        summary=_summary(whole, memory_bytes),
    )


def _points(
    parts: Sequence[DeviceUse], start: datetime, step: int
) -> Iterator[tuple[float, DeviceUse]]:
    """So many seconds after the start, and what was done then."""

    def number(part: DeviceUse) -> int:
        return int((part.since - start).total_seconds() // step)

    for at, some in groupby(parts, key=number):
        yield (at + 0.5) * step, combine(some, start, step)


def _use(some: DeviceUse) -> float | None:
    """In percent; of a MIG instance, how much of the time it had processes."""
    if some.measured:
        return some.use
    return 100 * some.busy / some.known if some.known else None


def _filled(some: DeviceUse, memory_bytes: int) -> float | None:
    return 100 * some.memory_max / memory_bytes if some.known and memory_bytes else None


def _path(points: Sequence[tuple[float, float | None]], length: float, step: int) -> str:
    """An SVG path; it is broken where nothing is known. A point by itself is a dot."""
    drawn: list[str] = []
    before: float | None = None
    for at, value in points:
        if value is None:
            before = None
            continue
        across = (WIDTH - _LEFT - _RIGHT) * min(1.0, max(0.0, at / length))
        down = (HEIGHT - _TOP - _BOTTOM) * (1 - min(100.0, value) / 100)
        place = f"{_LEFT + across:.1f} {_TOP + down:.1f}"
        broken = before is None or at - before > 1.5 * step
        drawn.append(f"M{place}L{place}" if broken else f"L{place}")
        before = at
    return "".join(drawn)


def _summary(whole: DeviceUse, memory_bytes: int) -> str:
    """One sentence."""
    mean = _use(whole)
    if mean is None:
        return "It did not answer."
    if whole.measured:
        used = f"used {mean:.0f} % on average, {whole.use_max} % at most"
    else:
        used = f"had processes for {mean:.0f} % of the time (its use cannot be measured)"
    filled = f"{whole.memory_max / 2**30:.1f} of {memory_bytes / 2**30:.0f} GB at most"
    return f"{used}; memory {filled}"
