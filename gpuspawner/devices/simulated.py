"""Simulated GPUs: any fleet from a short text, with scripted faults and samples.

The script is a JSON file named by the environment variable ``GPUSPAWNER_SIMULATION``, read again
whenever it changes. By UUID or index, it sets what a device shows, for as long as the entry exists:
``{"0": {"use": 97, "celsius": 91}, "1": {"error": "It fell off the bus.", "xids": [79]}}``. Most
names are those of :class:`gpuspawner.monitoring.models.Sample`; ``processes`` are ``[[PID, "name"],
...]``, ``held_bytes`` is memory that no process holds, and ``probe`` is why the device fails a
probe.

``4xA100-80GB,2xT4`` is four devices of model ``A100-80GB`` and two of model ``T4``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..monitoring.models import Condition, ProcessUse, Sample
from .models import Device, DeviceProcess, DeviceStatus, Inventory
from .source import DevicesUnavailable, Sampler, unknown
from .topology import NODE, PIX, nvlinks, pair

log = logging.getLogger(__name__)

SCRIPT = "GPUSPAWNER_SIMULATION"
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
    "processes": list,
    "held_bytes": int,
    "probe": str,
}
"""The names that a script may set, with their types."""
CONDITIONS = {each.name: each for each in fields(Condition)}

Shows = Mapping[str, Any]
"""What a device shows instead of its normal values."""


class Script:
    """The current script. A mistake in it changes nothing and is logged."""

    def __init__(self) -> None:
        self._read: tuple[Any, Mapping[str, Shows]] = (None, {})

    def of(self, uuid: str, index: int) -> Shows:
        """Return what one device shows; empty if the script does not mention it."""
        told = self.told()
        return told.get(uuid) or told.get(str(index)) or {}

    def told(self) -> Mapping[str, Shows]:
        """Return the whole script; empty if there is none."""
        path = os.environ.get(SCRIPT)
        if not path:
            return {}
        try:
            stat = os.stat(path)
            version = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if self._read[0] != version:
                self._read = (version, _checked(json.loads(Path(path).read_text())))
        except FileNotFoundError:
            self._read = (None, {})
        except (OSError, ValueError) as error:
            log.warning("The script of simulated devices %s cannot be used: %s", path, error)
        return self._read[1]


def _checked(script: Any) -> dict[str, dict[str, Any]]:
    """Return a valid script. Raises ValueError with a sentence."""
    if not isinstance(script, dict) or not all(isinstance(v, dict) for v in script.values()):
        raise ValueError("write an object of objects, by UUID or index")
    for device, shows in script.items():
        for name, value in shows.items():
            if name not in SCRIPTED:
                raise ValueError(f"device {device} has {name!r}; there are {', '.join(SCRIPTED)}")
            if not isinstance(value, SCRIPTED[name]) or isinstance(value, bool):
                raise ValueError(f"{name} of device {device} is {value!r}")
        for name in shows.get("condition", {}).keys() - CONDITIONS.keys():
            there = ", ".join(CONDITIONS)
            raise ValueError(f"condition of device {device} has {name!r}; there are {there}")
        for each in shows.get("processes", []):
            if not isinstance(each, list) or [type(part) for part in each] != [int, str]:
                raise ValueError(f'{each!r} of device {device} is not [PID, "name"]')
    return script


GIB = 2**30
MOST_DEVICES = 10_000
_NAMESPACE = uuid.UUID("6b1c2f0e-6f0b-5c0a-9d53-2b9b6a1f4c11")
_ENTRY = re.compile(r"(\d+)\s*[x*]\s*(.+)", re.IGNORECASE)
_MEMORY = re.compile(r"(\d+)\s*(?:GB|GiB|G)$", re.IGNORECASE)
_EXAMPLE = "Write it like 4xA100-80GB,2xT4: how many, x, the model, and its memory in GB."

KNOWN_MEMORY_GB = {
    model: memory
    for memory, models in (
        (10, "RTX3080"),
        (11, "GTX1080Ti RTX2080Ti"),
        (12, "RTX3060 RTX4070"),
        (16, "A2 A16 A4000 P100 RTX4060Ti RTX4080 RTX5080 T4 V100"),
        (24, "A10 A30 A5000 L4 RTX3090 RTX4090"),
        (32, "RTX5090"),
        (40, "A100"),
        (48, "A40 A6000 L40 L40S"),
        (80, "H100"),
        (141, "H200"),
        (180, "B200"),
    )
    for model in models.split()
}
"""Memory of common models, so that a spec may leave it out."""

_CANONICAL = {name.lower(): name for name in KNOWN_MEMORY_GB}


class SimulatedDevices:
    """A fleet of simulated devices. Thread-safe; the same spec always gives the same UUIDs.

    Neighbours of one entry are linked as in a typical server: pairs by four NVLinks, fours through
    one PCIe switch, eights through their NUMA node.
    """

    name = "simulated"

    def __init__(self, spec: str) -> None:
        """Create a fleet; ``spec`` as in ``4xA100-80GB,2xT4``. Raises ConfigError."""
        self.spec = spec
        entries = parse_fleet(spec)
        self._healthy = {device.uuid: device for device in _build_devices(entries)}
        self._links = _build_links(entries, list(self._healthy))
        self._now_seen = dict(self._healthy)
        self._lost = ""
        self._lock = threading.Lock()
        self.script = Script()

    def observe(self, now: datetime) -> Inventory:
        """Return the current fleet; see :class:`gpuspawner.devices.source.DeviceSource`."""
        with self._lock:
            if self._lost:
                return Inventory(devices=(), observed_at=now, source=self.name, error=self._lost)
            return Inventory(
                devices=self._as_scripted(),
                observed_at=now,
                source=self.name,
                driver_version="simulated",
                links=self._links,
            )

    def sampler(self, processes_every: float = 60.0) -> Sampler:
        """Return a sampler of the devices' use, a :class:`SimulatedSampler`."""
        return SimulatedSampler(self)

    def fail(self, uuid: str, reason: str = "It is not responding.") -> None:
        """Make one device unknown. KeyError for a UUID that is not in this fleet."""
        with self._lock:
            device = self._now_seen[uuid]
            self._now_seen[uuid] = replace(device, status=DeviceStatus.UNKNOWN, reason=reason)

    def occupy(self, uuid: str, pid: int, kind: str = "compute", name: str = "") -> None:
        """Put a process on a device. KeyError for a UUID that is not in this fleet."""
        process = DeviceProcess(pid=pid, kind=kind, name=name)
        with self._lock:
            device = self._now_seen[uuid]
            self._now_seen[uuid] = replace(device, processes=(*device.processes, process))

    def lose(self, reason: str = "The simulated driver is not responding.") -> None:
        """Show nothing any more, as if the driver were gone."""
        with self._lock:
            self._lost = reason

    def restore(self, uuid: str | None = None) -> None:
        """Make one device, or everything, healthy and without processes again."""
        with self._lock:
            if uuid is None:
                self._lost, self._now_seen = "", dict(self._healthy)
            else:
                self._now_seen[uuid] = self._healthy[uuid]

    def _as_scripted(self) -> tuple[Device, ...]:
        devices = self._now_seen.values()
        if not self.script.told():
            return tuple(devices)
        of = self.script.of
        return tuple(_as_it_shows(each, of(each.uuid, each.index)) for each in devices)


def _as_it_shows(device: Device, shows: Shows) -> Device:
    if error := shows.get("error"):
        return unknown(device, error)
    shown = (DeviceProcess(pid, name=name) for pid, name in shows.get("processes", ()))
    held = shows.get("held_bytes", 0)
    return replace(device, held_bytes=held, processes=(*device.processes, *shown))


def parse_fleet(spec: str) -> list[tuple[int, str, int]]:
    """Parse a spec into (count, model, memory in GiB). Raises ConfigError."""
    entries = [_parse_entry(text.strip()) for text in spec.split(",") if text.strip()]
    if not entries:
        raise ConfigError(f"The simulated fleet is empty. {_EXAMPLE}")
    if sum(count for count, _, _ in entries) > MOST_DEVICES:
        raise ConfigError(f"The simulated fleet {spec!r} has more than {MOST_DEVICES} devices.")
    return entries


def _parse_entry(text: str) -> tuple[int, str, int]:
    found = _ENTRY.fullmatch(text)
    if not found or int(found[1]) == 0:
        raise ConfigError(f"{text!r} is not part of a simulated fleet. {_EXAMPLE}")
    count, model = int(found[1]), found[2].strip()
    head, dash, tail = model.rpartition("-")
    memory = _MEMORY.fullmatch(tail) if dash else None
    if memory and int(memory[1]) > 0:
        return count, f"{_CANONICAL.get(head.lower(), head)}-{int(memory[1])}GB", int(memory[1])
    known = _CANONICAL.get(re.sub(r"[\s_-]", "", model).lower())
    if known is None:
        raise ConfigError(
            f"How much memory a simulated {model!r} has is not known: "
            f"write it after the model, such as {count}x{model}-24GB."
        )
    return count, known, KNOWN_MEMORY_GB[known]


def _build_devices(entries: list[tuple[int, str, int]]) -> list[Device]:
    """Create the devices of a spec.

    A UUID depends on the model and its count so far, so that a longer spec keeps the devices of a
    shorter one.
    """
    devices: list[Device] = []
    seen: dict[tuple[str, int], int] = {}
    for count, model, memory in entries:
        for _ in range(count):
            ordinal = seen[model, memory] = seen.get((model, memory), -1) + 1
            index = len(devices)
            devices.append(
                Device(
                    uuid=f"GPU-sim-{uuid.uuid5(_NAMESPACE, f'{model}/{memory}/{ordinal}')}",
                    index=index,
                    model=model,
                    memory_bytes=memory * GIB,
                    pci_bus_id=f"{index // 240:08X}:{index % 240 + 1:02X}:00.0",
                )
            )
    return devices


def _build_links(
    entries: list[tuple[int, str, int]], uuids: list[str]
) -> dict[tuple[str, str], int]:
    links: dict[tuple[str, str], int] = {}
    first = 0
    for count, _, _ in entries:
        for one in range(count):
            end = min(count, one - one % 8 + 8)
            for other in range(one + 1, end):
                if one // 2 == other // 2:
                    closeness = nvlinks(4)
                elif one // 4 == other // 4:
                    closeness = PIX
                else:
                    closeness = NODE
                links[pair(uuids[first + one], uuids[first + other])] = closeness
        first += count
    return links


IDLE_SHARE = 0.05
"""A process using less of a processor does not compute: idle servers and kernels use less."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class _SeenProcess:
    """A process as it was at the last sample."""

    cpu_seconds: float
    at: float
    computes: bool


class SimulatedSampler:
    """Samples a simulated fleet. For one thread."""

    def __init__(self, devices: SimulatedDevices) -> None:
        self._devices = devices
        self._seen: dict[int, _SeenProcess] = {}
        self._reported: dict[str, tuple[int, ...]] = {}
        self.pids: Mapping[str, Sequence[int]] = {}
        """The leased processes of each device, by UUID. Set by code that knows the leases."""
        self.watched: frozenset[str] = frozenset()
        """UUIDs of devices whose samples have the use by each process; all list their processes."""

    def sample(self, now: datetime, monotonic: float) -> tuple[Sample, ...]:
        """Sample the fleet; see :class:`gpuspawner.devices.source.Sampler`."""
        inventory = self._devices.observe(now)
        if inventory.error:
            raise DevicesUnavailable(inventory.error)
        pids, script = self.pids, self._devices.script
        alive: dict[int, _SeenProcess] = {}
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
        alive: dict[int, _SeenProcess],
    ) -> Sample:
        load, used, processes = 0.0, 0, list(device.processes)
        each_use: list[ProcessUse] = []
        for pid in pids:
            read = self._read(pid)
            if read is None:
                continue
            cpu, resident, name = read
            before = self._seen.get(pid) or _SeenProcess(cpu, monotonic, False)
            passed = monotonic - before.at
            share = (cpu - before.cpu_seconds) / passed if passed > 0 else 0.0
            alive[pid] = _SeenProcess(cpu, monotonic, before.computes or share >= IDLE_SHARE)
            if alive[pid].computes:
                if share >= IDLE_SHARE:
                    load += share
                    each_use.append(ProcessUse(pid, min(100, round(100 * share))))
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
            listed_at=monotonic,
            process_use=tuple(each_use) if device.uuid in self.watched else None,
            error=device.reason if device.status is DeviceStatus.UNKNOWN else "",
        )

    def _read(self, pid: int) -> tuple[float, int, str] | None:
        """Return CPU seconds, resident bytes and name of a process; None if it is gone."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return None
        name, _, rest = stat.partition("(")[2].rpartition(")")
        fields = rest.split()
        if fields[0] in ("Z", "X"):
            return None
        return (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[21]) * _PAGE, name

    # The script.

    def _as_scripted(self, sample: Sample, changed: Mapping[str, Any]) -> Sample:
        of_device = {"probe", "processes", "held_bytes"}  # the device itself shows these
        shows = {name: changed[name] for name in changed.keys() - of_device}
        if "condition" in shows:
            shows["condition"] = Condition(**shows["condition"])
        xids = tuple(shows.pop("xids", ()))
        if xids != self._reported.get(sample.uuid, ()):  # an error is reported once
            self._reported[sample.uuid] = xids
            shows["xids"] = xids
        if error := shows.get("error"):
            blank = Sample(uuid=sample.uuid, index=sample.index, at=sample.at, error=error)
            return replace(blank, xids=shows.get("xids", ()))
        return replace(sample, **shows) if shows else sample

    def fails_probe(self, uuid: str) -> str:
        """Return why a device of this fleet fails a probe; empty if it passes. For any thread."""
        for device in self._devices.observe(datetime.now(timezone.utc)).devices:
            if device.uuid == uuid:
                shows = self._devices.script.of(uuid, device.index)
                return str(shows.get("probe") or shows.get("error") or "")
        return "there is no such device"
