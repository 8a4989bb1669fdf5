"""Charts of use, drawn as SVG."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import NamedTuple

from ..core.units import MICRO, format_credits, round_credits
from ..leases.models import Lease, LeasedDevice
from ..ledger.usage import LeaseUse
from ..services import Services
from .models import HOUR, MINUTE, DeviceUse, combine

CHART_WIDTH, CHART_HEIGHT = 360, 150
"""The size of the drawing; it is stretched to the available width."""

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
    """Draw one bar per week for its cost; the highest fills the height.

    A week that cost anything has a visible bar.
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
    """Format credits as a statement does: ``12.50``; from 10,000 on shorter: ``12k``, ``3.4M``."""
    if micro <= 0:
        return "0"
    if round_credits(micro) < 10_000 * MICRO:
        return format_credits(micro)
    if micro < 999_500 * MICRO:
        return f"{format_credits(micro // 1000, 0)}k"
    return format_credits(micro // 10**6, 1 if micro < (10**8 - 50_000) * MICRO else 0) + "M"


CURVE_WIDTH, CURVE_HEIGHT = 360, 96
"""The size of the drawing; it is stretched to the available width."""
_LEFT, _RIGHT, _CURVE_TOP, _CURVE_BOTTOM = 38, 4, 6, 16

LAST = timedelta(hours=1)
POINTS = 60
"""Maximum points in the curve of a session."""
BY_MINUTES = timedelta(hours=12)
"""Longer sessions are drawn by the hour."""


@dataclass(frozen=True, slots=True)
class DrawnCurve:
    """One device in one span of time, as paths in the drawing's own units."""

    title: str
    start: datetime
    end: datetime
    use: str
    memory: str
    summary: str
    """The same in words, for people who cannot see it."""
    width: int = CURVE_WIDTH
    height: int = CURVE_HEIGHT
    left: int = _LEFT
    right: int = CURVE_WIDTH - _RIGHT
    top: int = _CURVE_TOP
    ground: int = CURVE_HEIGHT - _CURVE_BOTTOM


@dataclass(frozen=True, slots=True)
class DeviceCurves:
    """The curves of one device of a lease."""

    device: LeasedDevice
    curves: tuple[DrawnCurve, ...]
    """Empty if nothing was measured yet."""


def of_leases(services: Services, leases: Collection[Lease]) -> dict[str, list[DeviceCurves]]:
    """Return the curves of running servers, by lease id. Blocks."""
    now = services.clock()
    return {
        lease.id: [_of_device(services, lease, device, now) for device in lease.devices]
        for lease in leases
        if lease.started_at and lease.devices
    }


def _of_device(
    services: Services, lease: Lease, device: LeasedDevice, now: datetime
) -> DeviceCurves:
    begun = lease.started_at or lease.granted_at
    found = []
    for title, start in (("Last hour", max(begun, now - LAST)), ("Whole session", begun)):
        if title != "Last hour" and now - start <= LAST:
            continue
        seconds = MINUTE if now - start <= BY_MINUTES else HOUR
        parts = services.monitoring.use_between(start, now, seconds=seconds, uuids=[device.uuid])
        if parts:
            found.append(curve(title, parts, start, now, device.memory_bytes))
    return DeviceCurves(device, tuple(found))


def curve(
    title: str, parts: Sequence[DeviceUse], start: datetime, end: datetime, memory_bytes: int
) -> DrawnCurve:
    """Draw what is known about the span. Where nothing is known, there is no line."""
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
    """Yield seconds since the start, and the use at that time."""

    def number(part: DeviceUse) -> int:
        return int((part.since - start).total_seconds() // step)

    for at, some in groupby(parts, key=number):
        yield (at + 0.5) * step, combine(some, start, step)


def _use(some: DeviceUse) -> float | None:
    """Return the use in percent; if it is not reported, the share of time with processes."""
    if some.measured:
        return some.use
    return 100 * some.busy / some.known if some.known else None


def _filled(some: DeviceUse, memory_bytes: int) -> float | None:
    return 100 * some.memory_max / memory_bytes if some.known and memory_bytes else None


def _path(points: Sequence[tuple[float, float | None]], length: float, step: int) -> str:
    """Return an SVG path, broken where nothing is known. A single point is a dot."""
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
    """Summarize the use in one sentence."""
    mean = _use(whole)
    if mean is None:
        return "It did not respond."
    if whole.measured:
        used = f"used {mean:.0f} % on average, {whole.use_max} % at most"
    else:
        used = f"had processes for {mean:.0f} % of the time (its use cannot be measured)"
    filled = f"{whole.memory_max / 2**30:.1f} of {memory_bytes / 2**30:.0f} GB at most"
    return f"{used}; memory {filled}"
