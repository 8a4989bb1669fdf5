"""One GPU of 80 GB in four slots, seen through pynvml, and the programs of the leases on it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

from gpuspawner.engines.local import LEASE_VARIABLE
from gpuspawner.leases.models import Lease
from gpuspawner.services import Services
from tests.support.nvml.machine import Machine
from tests.support.nvml.nvml_library import GPU
from tests.support.rounds import SITE

if TYPE_CHECKING:
    from typing_extensions import Self

SHARED: dict[str, Any] = SITE | {
    "device_source": "simulated:1xA100-80GB",
    "shared_devices": {"A100": 4},
    "opening_grant": 1000,
}
"""Settings: one A100 of 80 GB in four slots; accounts open with 1000 credits."""

PROGRAM = """
import signal, sys
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""


class SharedDevice:
    """The GPU of :data:`SHARED`, and a program for each name. Use it in a ``with`` block."""

    def __init__(self, services: Services, machine: Machine) -> None:
        self.services = services
        self.machine = machine
        self.gpu = GPU(uuid=services.devices.look().devices[0].uuid)
        self.programs: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.programs.values():
            program.kill()
            program.communicate()

    def start_program(self, name: str, lease: Lease, *arguments: str) -> None:
        """Start a program of a lease; with ``stubborn`` it ignores SIGTERM."""
        self.programs[name] = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            env={LEASE_VARIABLE: lease.id},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = self.programs[name].stdout
        assert said and said.readline() == "ready\n"
