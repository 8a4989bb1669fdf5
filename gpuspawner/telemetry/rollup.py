"""From samples to minutes, and from minutes to hours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime

from ..model import DeviceProcess
from .values import MINUTE, DeviceUse, Sample

MOST_XIDS = 20
"""How many different errors of a device are kept of one time: a sick one reports without end."""


def beginning(at: datetime, seconds: int) -> datetime:
    """When the minute or the hour began that a time lies in."""
    if seconds == MINUTE:
        return at.replace(second=0, microsecond=0)
    return at.replace(minute=0, second=0, microsecond=0)


def combine(some: Iterable[DeviceUse], since: datetime, seconds: int) -> DeviceUse:
    """Several of one device as one, in whatever order they come. Raises ValueError for none."""
    parts = sorted(some, key=lambda part: part.since)
    if not parts:
        raise ValueError("there is nothing to combine")
    temperatures = [p.celsius_max for p in parts if p.celsius_max is not None]
    clocks = [p.sm_mhz_max for p in parts if p.sm_mhz_max is not None]
    throttle = 0
    for part in parts:
        throttle |= part.throttle
    return DeviceUse(
        uuid=parts[0].uuid,
        since=since,
        seconds=seconds,
        samples=sum(p.samples for p in parts),
        known=sum(p.known for p in parts),
        busy=sum(p.busy for p in parts),
        measured=sum(p.measured for p in parts),
        use_sum=sum(p.use_sum for p in parts),
        use_max=max(p.use_max for p in parts),
        memory_max=max(p.memory_max for p in parts),
        powered=sum(p.powered for p in parts),
        milliwatts_sum=sum(p.milliwatts_sum for p in parts),
        celsius_max=max(temperatures, default=None),
        sm_mhz_max=max(clocks, default=None),
        throttle=throttle,
        ecc_errors=sum(p.ecc_errors for p in parts),
        xids=_different(xid for part in parts for xid in part.xids),
        processes=max(p.processes for p in parts),
        strangers=max(p.strangers for p in parts),
        error=next((p.error for p in reversed(parts) if p.error), ""),
    )


def _different(xids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(xids))[:MOST_XIDS]


class Rollups:
    """Gathers the samples of all devices. A minute is complete when a sample of another one comes,
    also of an earlier one: the clock may be set back."""

    def __init__(self, is_strange: Callable[[DeviceProcess], bool] = lambda process: False) -> None:
        self.is_strange = is_strange
        self._open: dict[str, DeviceUse] = {}
        self._ecc: dict[str, int] = {}

    def add(self, samples: Iterable[Sample]) -> list[DeviceUse]:
        """Take one look in; the minutes that are complete by now."""
        done, latest = [], None
        for sample in samples:
            latest = beginning(sample.at, MINUTE)
            if sample.silent:
                continue
            current = self._open.get(sample.uuid)
            if current is not None and current.since != latest:
                done.append(current)
                current = None
            if current is None:
                current = DeviceUse(uuid=sample.uuid, since=latest, seconds=MINUTE)
            self._open[sample.uuid] = self._with(current, sample)
        if latest is not None:  # of a device that is gone, nothing comes that would complete it
            for uuid in [u for u, use in self._open.items() if use.since != latest]:
                done.append(self._open.pop(uuid))
        return done

    def rest(self) -> list[DeviceUse]:
        """The minutes that are not complete, at the end of all sampling."""
        left = list(self._open.values())
        self._open.clear()
        return left

    def _with(self, so_far: DeviceUse, it: Sample) -> DeviceUse:
        if it.error:
            xids = _different((*so_far.xids, *it.xids))
            return replace(so_far, samples=so_far.samples + 1, error=it.error, xids=xids)
        busy = it.busy
        compute = [p for p in it.processes or () if p.kind == "compute"]
        return DeviceUse(
            uuid=so_far.uuid,
            since=so_far.since,
            seconds=so_far.seconds,
            samples=so_far.samples + 1,
            known=so_far.known + (busy is not None),
            busy=so_far.busy + (busy is True),
            measured=so_far.measured + (it.use is not None),
            use_sum=so_far.use_sum + (it.use or 0),
            use_max=max(so_far.use_max, it.use or 0),
            memory_max=max(so_far.memory_max, it.used_bytes or 0),
            powered=so_far.powered + (it.milliwatts is not None),
            milliwatts_sum=so_far.milliwatts_sum + (it.milliwatts or 0),
            celsius_max=_greater(so_far.celsius_max, it.celsius),
            sm_mhz_max=_greater(so_far.sm_mhz_max, it.sm_mhz),
            throttle=so_far.throttle | it.throttle,
            ecc_errors=so_far.ecc_errors + self._new_ecc(it),
            xids=_different((*so_far.xids, *it.xids)) if it.xids else so_far.xids,
            processes=max(so_far.processes, len(compute)),
            strangers=max(so_far.strangers, sum(map(self.is_strange, compute))),
            error=so_far.error,
        )

    def _new_ecc(self, it: Sample) -> int:
        """Errors since the last count of this device. The count begins anew with the driver."""
        if it.ecc_errors is None:
            return 0
        before = self._ecc.get(it.uuid, it.ecc_errors)
        self._ecc[it.uuid] = it.ecc_errors
        return it.ecc_errors - before if it.ecc_errors >= before else it.ecc_errors


def _greater(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
