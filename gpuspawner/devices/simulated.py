"""Simulated devices: any fleet from a short text, for trying out and for tests.

``4xA100-80GB,2xT4`` is four devices of model ``A100-80GB`` and two of model ``T4``.
"""

from __future__ import annotations

import re
import threading
import uuid
from dataclasses import replace
from datetime import datetime

from ..errors import ConfigError
from ..model import Device, DeviceProcess, DeviceStatus, Inventory
from .base import NODE, PIX, Sampler, nvlinks, pair
from .look import unknown
from .script import Script, Shows, processes_of

GIB = 2**30
MOST_DEVICES = 10_000
_NAMESPACE = uuid.UUID("6b1c2f0e-6f0b-5c0a-9d53-2b9b6a1f4c11")
_ENTRY = re.compile(r"(\d+)\s*[x*]\s*(.+)", re.IGNORECASE)
_MEMORY = re.compile(r"(\d+)\s*(?:GB|GiB|G)$", re.IGNORECASE)
_EXAMPLE = "Write it like 4xA100-80GB,2xT4: how many, x, the model, and its memory in GB."

KNOWN_MEMORY_GB = {
    "A2": 16,
    "A10": 24,
    "A16": 16,
    "A30": 24,
    "A40": 48,
    "A100": 40,
    "A4000": 16,
    "A5000": 24,
    "A6000": 48,
    "B200": 180,
    "GTX1080Ti": 11,
    "H100": 80,
    "H200": 141,
    "L4": 24,
    "L40": 48,
    "L40S": 48,
    "P100": 16,
    "RTX2080Ti": 11,
    "RTX3060": 12,
    "RTX3080": 10,
    "RTX3090": 24,
    "RTX4060Ti": 16,
    "RTX4070": 12,
    "RTX4080": 16,
    "RTX4090": 24,
    "RTX5080": 16,
    "RTX5090": 32,
    "T4": 16,
    "V100": 16,
}
"""Memory of usual models, so that a spec may leave it out."""

_CANONICAL = {name.lower(): name for name in KNOWN_MEMORY_GB}


class SimulatedDevices:
    """A fleet that exists only here. Thread-safe; the same spec gives the same UUIDs anywhere.

    Neighbours of one entry are linked as in a usual server: pairs by four NVLinks, fours
    through one PCIe switch, eights through their NUMA node.
    """

    name = "simulated"

    def __init__(self, spec: str) -> None:
        """``spec`` as in ``4xA100-80GB,2xT4``. Raises ConfigError."""
        self.spec = spec
        entries = parse_fleet(spec)
        self._healthy = {device.uuid: device for device in _build_devices(entries)}
        self._links = _build_links(entries, list(self._healthy))
        self._now_seen = dict(self._healthy)
        self._devices = tuple(self._now_seen.values())
        self._lost = ""
        self._lock = threading.Lock()
        self.script = Script()

    def observe(self, now: datetime) -> Inventory:
        """The fleet as it stands; see :class:`gpuspawner.devices.base.DeviceSource`."""
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
        """What tells what they do; see :mod:`.simulated_samples`."""
        from .simulated_samples import SimulatedSampler

        return SimulatedSampler(self)

    def fail(self, uuid: str, reason: str = "It does not answer.") -> None:
        """Make one device unknown. KeyError for a UUID that is not of this fleet."""
        with self._lock:
            device = self._now_seen[uuid]
            self._put(replace(device, status=DeviceStatus.UNKNOWN, reason=reason))

    def occupy(self, uuid: str, pid: int, kind: str = "compute", name: str = "") -> None:
        """Put a process on a device. KeyError for a UUID that is not of this fleet."""
        process = DeviceProcess(pid=pid, kind=kind, name=name)
        with self._lock:
            device = self._now_seen[uuid]
            self._put(replace(device, processes=(*device.processes, process)))

    def lose(self, reason: str = "The simulated driver does not answer.") -> None:
        """See nothing any more, as when the driver is gone."""
        with self._lock:
            self._lost = reason

    def restore(self, uuid: str | None = None) -> None:
        """Make one device, or everything, healthy and without processes again."""
        with self._lock:
            if uuid is None:
                self._lost = ""
            for device in self._healthy.values() if uuid is None else (self._healthy[uuid],):
                self._now_seen[device.uuid] = device
            self._devices = tuple(self._now_seen.values())

    def _as_scripted(self) -> tuple[Device, ...]:
        if not self.script.told():
            return self._devices
        of = self.script.of
        return tuple(_as_it_shows(each, of(each.uuid, each.index)) for each in self._devices)

    def _put(self, device: Device) -> None:
        self._now_seen[device.uuid] = device
        self._devices = tuple(self._now_seen.values())


def _as_it_shows(device: Device, shows: Shows) -> Device:
    if error := shows.get("error"):
        return unknown(device, error)
    held, processes = shows.get("held_bytes", 0), processes_of(shows)
    return replace(device, held_bytes=held, processes=(*device.processes, *processes))


def parse_fleet(spec: str) -> list[tuple[int, str, int]]:
    """The entries of a spec as (count, model, memory in GiB). Raises ConfigError."""
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
    """One device per place in the spec; a UUID depends on the model and its count so far,
    so that a longer spec keeps the devices of a shorter one."""
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
