"""What simulated devices do: they work as hard as the processes of the lease that they are given
to, and fail as a script says; see :mod:`.script`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..model import Device, DeviceProcess
from ..telemetry import Sample
from ..telemetry.values import Condition
from .base import LooksLost
from .simulated import SimulatedDevices

IDLE_SHARE = 0.05
"""A process that takes less of a processor does not compute: servers and kernels that wait do."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class _Seen:
    """A process as it was at the last look."""

    cpu_seconds: float
    at: float
    computes: bool


class SimulatedSampler:
    """Samples a simulated fleet. For one thread."""

    def __init__(self, devices: SimulatedDevices, proc: Path = Path("/proc")) -> None:
        self._devices = devices
        self._proc = proc
        self._seen: dict[int, _Seen] = {}
        self._reported: dict[str, tuple[int, ...]] = {}
        self.pids: Mapping[str, Sequence[int]] = {}
        """Which processes each device is leased to, by its UUID. Set by who knows the leases."""

    def sample(self, now: datetime, monotonic: float) -> tuple[Sample, ...]:
        """One look at the fleet; see :class:`gpuspawner.devices.base.Sampler`."""
        inventory = self._devices.observe(now)
        if inventory.error:
            raise LooksLost(inventory.error)
        pids, script = self.pids, self._devices.script
        alive: dict[int, _Seen] = {}
        samples = []
        for device in inventory.devices:
            sample = self._of(device, pids.get(device.uuid, ()), now, monotonic, alive)
            samples.append(self._as_scripted(sample, script.of(device.uuid, device.index)))
        self._seen = alive
        return tuple(samples)

    def _of(
        self,
        device: Device,
        pids: Sequence[int],
        now: datetime,
        monotonic: float,
        alive: dict[int, _Seen],
    ) -> Sample:
        load, used, processes = 0.0, 0, list(device.processes)
        for pid in pids:
            read = self._read(pid)
            if read is None:
                continue
            cpu, resident, name = read
            before = self._seen.get(pid)
            passed = monotonic - before.at if before else 0.0
            share = (cpu - before.cpu_seconds) / passed if before and passed > 0 else 0.0
            computed = before is not None and before.computes
            alive[pid] = _Seen(cpu, monotonic, computed or share >= IDLE_SHARE)
            if alive[pid].computes:
                load += share if share >= IDLE_SHARE else 0.0
                used += resident
                processes.append(DeviceProcess(pid, resident, "compute", name))
        use = min(100, round(100 * load))
        return Sample(
            uuid=device.uuid,
            index=device.index,
            at=now,
            use=use,
            memory_activity=use // 2,
            used_bytes=min(used, device.memory_bytes),
            total_bytes=device.memory_bytes,
            milliwatts=60_000 + 2_400 * use,
            celsius=35 + use * 2 // 5,
            sm_mhz=1410 if use else 210,
            memory_mhz=1593,
            ecc_errors=0,
            processes=tuple(processes),
            error=device.reason if device.status.value == "unknown" else "",
        )

    def _read(self, pid: int) -> tuple[float, int, str] | None:
        """Seconds of processor, bytes resident and name; None when it is gone."""
        try:
            stat = (self._proc / str(pid) / "stat").read_text(errors="replace")
        except OSError:
            return None
        name, _, rest = stat.partition("(")[2].rpartition(")")
        fields = rest.split()
        if fields[0] in ("Z", "X"):
            return None
        return (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[21]) * _PAGE, name

    # The script.

    def _as_scripted(self, sample: Sample, changed: Mapping[str, Any]) -> Sample:
        shows = dict(changed)
        for name in ("probe", "processes", "held_bytes"):  # it is the device that shows these
            shows.pop(name, None)
        if "condition" in shows:
            shows["condition"] = Condition(**shows["condition"])
        xids = tuple(shows.pop("xids", ()))
        if xids != self._reported.get(sample.uuid, ()):  # an error is reported once
            self._reported[sample.uuid] = xids
            shows["xids"] = xids
        if shows.get("error"):
            return Sample(
                uuid=sample.uuid,
                index=sample.index,
                at=sample.at,
                error=shows["error"],
                xids=shows.get("xids", ()),
            )
        return replace(sample, **shows) if shows else sample

    def fails_probe(self, uuid: str) -> str:
        """Why a device of this fleet fails a probe; empty when it passes. For any thread."""
        for device in self._devices.observe(datetime.now(timezone.utc)).devices:
            if device.uuid == uuid:
                shows = self._devices.script.of(uuid, device.index)
                return str(shows.get("probe") or shows.get("error") or "")
        return "there is no such device"
