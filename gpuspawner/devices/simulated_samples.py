"""What simulated devices do: they work as hard as the processes of the lease that they are given
to, and fail as a script says.

The script is a JSON file, named by the environment variable ``GPUSPAWNER_SIMULATION`` and read
anew when it changes. It says by UUID or index what a device shows instead, until it is gone from
the script: ``{"0": {"use": 97, "celsius": 91}, "1": {"error": "It fell off the bus.", "xids":
[79]}}``. Every name is one of :class:`gpuspawner.telemetry.Sample`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..model import Device, DeviceProcess
from ..telemetry import Sample
from ..telemetry.values import Condition
from .base import LooksLost
from .simulated import SimulatedDevices

log = logging.getLogger(__name__)

SCRIPT = "GPUSPAWNER_SIMULATION"
IDLE_SHARE = 0.05
"""A process that takes less of a processor does not compute: servers and kernels that wait do."""
SCRIPTED = {
    "use": int,
    "memory_activity": int,
    "used_bytes": int,
    "milliwatts": int,
    "celsius": int,
    "sm_mhz": int,
    "throttle": int,
    "ecc_errors": int,
    "xids": list,
    "error": str,
    "condition": dict,
    "probe": str,
}
"""What a script may say, and of which type. ``probe``: why the device fails a probe."""
CONDITIONS = tuple(each.name for each in fields(Condition))

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
        self._script: tuple[Any, Mapping[str, Mapping[str, Any]]] = (None, {})
        self._reported: dict[str, tuple[int, ...]] = {}
        self.pids: Mapping[str, Sequence[int]] = {}
        """Which processes each device is leased to, by its UUID. Set by who knows the leases."""

    def sample(self, now: datetime, monotonic: float) -> tuple[Sample, ...]:
        """One look at the fleet; see :class:`gpuspawner.devices.base.Sampler`."""
        inventory = self._devices.observe(now)
        if inventory.error:
            raise LooksLost(inventory.error)
        pids, script = self.pids, self._read_script()
        alive: dict[int, _Seen] = {}
        samples = []
        for device in inventory.devices:
            sample = self._of(device, pids.get(device.uuid, ()), now, monotonic, alive)
            changed = script.get(device.uuid) or script.get(str(device.index)) or {}
            samples.append(self._as_scripted(sample, changed))
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
        shows.pop("probe", None)
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
        now = datetime.now(timezone.utc)
        for device in self._devices.observe(now).devices:
            if device.uuid == uuid:
                script = self._read_script()
                changed = script.get(uuid) or script.get(str(device.index)) or {}
                return str(changed.get("probe") or changed.get("error") or "")
        return "there is no such device"

    def _read_script(self) -> Mapping[str, Mapping[str, Any]]:
        path = os.environ.get(SCRIPT)
        if not path:
            return {}
        try:
            stat = os.stat(path)
            version = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if self._script[0] != version:
                self._script = (version, _checked(json.loads(Path(path).read_text())))
        except FileNotFoundError:
            self._script = (None, {})
        except (OSError, ValueError) as error:
            log.warning("The script of simulated devices %s cannot be used: %s", path, error)
        return self._script[1]


def _checked(script: Any) -> dict[str, dict[str, Any]]:
    """Raises ValueError with a sentence for what is no script."""
    if not isinstance(script, dict) or not all(isinstance(v, dict) for v in script.values()):
        raise ValueError("write an object of objects, by UUID or index")
    for device, shows in script.items():
        for name, value in shows.items():
            if name not in SCRIPTED:
                raise ValueError(f"device {device} has {name!r}; there are {', '.join(SCRIPTED)}")
            if not isinstance(value, SCRIPTED[name]) or isinstance(value, bool):
                raise ValueError(f"{name} of device {device} is {value!r}")
        for name in shows.get("condition", {}):
            if name not in CONDITIONS:
                there = ", ".join(CONDITIONS)
                raise ValueError(f"condition of device {device} has {name!r}; there are {there}")
    return script
