"""Charts of use, drawn as SVG."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import NamedTuple

from ..core.units import MICRO, format_credits
from ..leases.models import Lease, LeasedDevice
from ..ledger.usage import LeaseUse
from ..services import Broker
from .models import HOUR, MINUTE, DeviceUse, combine

CHART_WIDTH, CHART_HEIGHT = 360, 150
"""Of the drawing; it is stretched to the width of its place."""

_CHART_TOP, _CHART_BOTTOM, _GAP = 18, 20, 8


class Bar(NamedTuple):
    """One week, in the drawing's own units."""

    x: int
    y: int
    width: int
    height: int
    middle: int
    value: str
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """All bars, and the line that they stand on."""

    bars: tuple[Bar, ...]
    width: int = CHART_WIDTH
    height: int = CHART_HEIGHT
    ground: int = CHART_HEIGHT - _CHART_BOTTOM


def chart(uses: Sequence[LeaseUse], labels: Sequence[str]) -> Chart:
    """A bar a week, as high as its cost; the highest fills the height.

    A week that cost anything has a bar that can be seen.
    """
    step = CHART_WIDTH // max(1, len(uses))
    most = max((use.cost for use in uses), default=0)
    space = CHART_HEIGHT - _CHART_TOP - _CHART_BOTTOM
    bars = []
    for number, (use, label) in enumerate(zip(uses, labels, strict=True)):
        height = max(2, use.cost * space // most) if use.cost > 0 else 0
        x = number * step + _GAP // 2
        bars.append(
            Bar(
                x=x,
                y=CHART_HEIGHT - _CHART_BOTTOM - height,
                width=step - _GAP,
                height=height,
                middle=x + (step - _GAP) // 2,
                value=short(use.cost),
                label=label,
            )
        )
    return Chart(tuple(bars))


def short(micro: int) -> str:
    """Credits in five characters at the most: ``0``, ``0.25``, ``12.5``, ``3.4k``."""
    if micro <= 0:
        return "0"
    if micro < MICRO // 100:
        return "<0.01"
    for limit, places, unit in ((10, 2, 1), (1000, 1, 1), (10_000, 1, 1000), (10**6, 0, 1000)):
        if micro < limit * MICRO:
            return format_credits(micro // unit, places) + ("k" if unit > 1 else "")
    return format_credits(micro // 1_000_000, 1 if micro < 10**8 * MICRO else 0) + "M"


CURVE_WIDTH, CURVE_HEIGHT = 360, 96
"""Of the drawing; it is stretched to the width of its place."""
_LEFT, _RIGHT, _CURVE_TOP, _CURVE_BOTTOM = 38, 4, 6, 16

LAST = timedelta(hours=1)
POINTS = 60
"""At the most, in the curve of a session."""
BY_MINUTES = timedelta(hours=12)
"""A longer session is told by its hours."""


@dataclass(frozen=True, slots=True)
class DrawnCurve:
    """One device in one span of time, as paths in the drawing's own units."""

    title: str
    start: datetime
    end: datetime
    use: str
    memory: str
    summary: str
    """The same in words, for who does not see it."""
    width: int = CURVE_WIDTH
    height: int = CURVE_HEIGHT
    left: int = _LEFT
    right: int = CURVE_WIDTH - _RIGHT
    top: int = _CURVE_TOP
    ground: int = CURVE_HEIGHT - _CURVE_BOTTOM


@dataclass(frozen=True, slots=True)
class DeviceCurves:
    """A device of a lease."""

    device: LeasedDevice
    curves: tuple[DrawnCurve, ...]
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
        parts = broker.monitoring.use_between(start, now, seconds=seconds, uuids=[device.uuid])
        if parts:
            found.append(curve(title, parts, start, now, device.memory_bytes))
    return DeviceCurves(device, tuple(found))


def curve(
    title: str, parts: Sequence[DeviceUse], start: datetime, end: datetime, memory_bytes: int
) -> DrawnCurve:
    """Draw what is known of the span. Of what is not known there is no line."""
    length = max((end - start).total_seconds(), 1.0)
    step = max(parts[0].seconds, -(-int(length) // POINTS // MINUTE) * MINUTE)
    points = list(_points(parts, start, step))
    whole = combine(parts, start, parts[0].seconds)
    uses = [(at, _use(some)) for at, some in points]
    fills = [(at, _filled(some, memory_bytes)) for at, some in points]
    return DrawnCurve(
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
        across = (CURVE_WIDTH - _LEFT - _RIGHT) * min(1.0, max(0.0, at / length))
        down = (CURVE_HEIGHT - _CURVE_TOP - _CURVE_BOTTOM) * (1 - min(100.0, value) / 100)
        place = f"{_LEFT + across:.1f} {_CURVE_TOP + down:.1f}"
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
