"""A process that looks at the stand-in's fleet through the real NVMLDevices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from pathlib import Path
from typing import Any

from gpuspawner.devices.models import Device, DeviceProcess, DeviceStatus
from gpuspawner.monitoring.models import ProcessUse, Sample
from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.nvml_library import GPU

START = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)

CHILD = """
import json, sys
from dataclasses import asdict
from datetime import datetime
from gpuspawner.devices.source import DevicesUnavailable
from gpuspawner.devices.nvml import NVMLDevices

source = NVMLDevices()
sampler = source.sampler()
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    if word in ("close", "begin", "release"):
        source.close() if word == "close" else source.release()
        if word == "begin":
            source = NVMLDevices()
            sampler = source.sampler()
        print("null", flush=True)
        continue
    if word == "watch":
        sampler.watched = frozenset(rest.split())
        print("null", flush=True)
        continue
    if word == "sample":
        at, _, monotonic = rest.partition(" ")
        try:
            samples = sampler.sample(datetime.fromisoformat(at), float(monotonic))
            print(json.dumps([asdict(sample) for sample in samples], default=str), flush=True)
        except DevicesUnavailable as lost:
            print(json.dumps(str(lost)), flush=True)
        continue
    inventory = source.observe(datetime.fromisoformat(rest))
    found = asdict(inventory) | {"links": [[*key, n] for key, n in inventory.links.items()]}
    print(json.dumps(found, default=str), flush=True)
"""


class Machine:
    """A child process with one NVMLDevices after the other, and the fleet that it sees."""

    def __init__(self, library: Path, fleet: Path) -> None:
        self.fleet = fleet
        self.now = START
        self.log = fleet.with_name("log")
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CHILD],
                env=os.environ | nvml.environment(library, fleet),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def begin(self) -> Machine:
        """Go on as a process that has just started, on a machine whose driver is not loaded."""
        self.fleet.unlink(missing_ok=True)
        self.log.write_text("")
        self.now = START
        self.tell("begin")
        return self

    def has(self, *fleet: GPU, **driver: Any) -> Machine:
        """Show these GPUs from now on; ``driver`` as for :func:`nvml.write_fleet`."""
        nvml.write_fleet(self.fleet, fleet, **driver)
        return self

    def look(self, later: timedelta = timedelta(seconds=1)) -> dict[str, Any]:
        """The inventory as plain values, and its links as [uuid, uuid, closeness]."""
        self.now += later
        inventory: dict[str, Any] = self.tell(f"observe {self.now.isoformat()}")
        assert datetime.fromisoformat(inventory["observed_at"]) == self.now
        return inventory

    def sample(self, seconds: float = 1.0) -> list[dict[str, Any]]:
        """The samples so many seconds after the last; a text when there is nothing to be seen."""
        self.now += timedelta(seconds=seconds)
        told = (self.now - START).total_seconds()
        samples: list[dict[str, Any]] = self.tell(f"sample {self.now.isoformat()} {told}")
        return samples

    def tell(self, command: str) -> Any:
        """Send a command and return the answer.

        ``begin``, ``observe TIME``, ``sample TIME SECONDS``, ``watch UUIDS``, ``close``, or
        ``release``: close NVML as before a change of a MIG layout.
        """
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.log.read_text()
        return json.loads(answer)

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=120)


def as_sample(fields: dict[str, Any]) -> Sample:
    """One of the child's samples as the service takes it."""
    listed, worked = fields["processes"], fields["process_use"]
    return Sample(
        **fields
        | {
            "at": datetime.fromisoformat(fields["at"]),
            "processes": listed and tuple(DeviceProcess(**process) for process in listed),
            "process_use": worked and tuple(ProcessUse(**process) for process in worked),
            "condition": None,
        }
    )


def statuses(inventory: dict[str, Any]) -> dict[str, str]:
    """Each device's status by its UUID."""
    return {d["uuid"]: d["status"] for d in inventory["devices"]}


def reasons(inventory: dict[str, Any]) -> dict[str, str]:
    """Each device's reason, where there is one, by its UUID."""
    return {d["uuid"]: d["reason"] for d in inventory["devices"] if d["reason"]}


def links(inventory: dict[str, Any], fleet: Sequence[GPU]) -> dict[tuple[int, int], int]:
    """The links by the positions of the GPUs in ``fleet``."""
    index = {gpu.uuid: n for n, gpu in enumerate(fleet)}
    return {(min(index[a], index[b]), max(index[a], index[b])): n for a, b, n in inventory["links"]}


def as_devices(inventory: dict[str, Any]) -> list[Device]:
    """The child's devices as the pool takes them."""
    made = []
    for fields in inventory["devices"]:
        fields = dict(fields)
        fields["status"] = DeviceStatus(fields["status"])
        fields["part"] = Fraction(fields["part"])
        fields["processes"] = tuple(DeviceProcess(**p) for p in fields["processes"])
        fields["reserved_for"] = tuple(fields["reserved_for"])
        made.append(Device(**fields))
    return made
