"""A machine whose GPUs can be divided: a fleet, nvidia-smi's stand-in, and processes of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.nvml_library import GIB, GPU
from tests.support.processes import REPO

WATCHER = """
import sys, time
from datetime import datetime, timezone
from traitlets.config import Config
from gpuspawner.core.errors import GPUSpawnerError
from gpuspawner.services import Services
from tests.support.brokers import acquire

config = Config()
config.GPUDatabase.url = sys.argv[1]
config.GPUCredits.opening_grant = 1000
services = Services(config)
sampler = services.watch.source.sampler()
for line in sys.stdin:
    if line == "look\\n":
        inventory = services.devices.look(fresh=True).inventory
        print(inventory.error or sorted(device.uuid for device in inventory.devices), flush=True)
    elif line == "sample\\n":
        now = datetime.now(timezone.utc)
        print(sorted(each.uuid for each in sampler.sample(now, time.monotonic())), flush=True)
    elif line.startswith("release "):
        services.leases.release(line.split()[1], reason="its start failed", failed=True)
        print("done", flush=True)
    else:
        try:
            print(acquire(services, line.split()[1]).uuids[0], flush=True)
        except GPUSpawnerError as error:
            print(type(error).__name__, flush=True)
"""
"""A hub and an accounting service in one: it keeps NVML open, and grants."""

NVIDIA_SMI = Path(__file__).with_name("nvidia_smi.py")
KILLED = -signal.SIGKILL

CHILD = """
import os, signal, sys
from pathlib import Path
from traitlets.config import Config
from gpuspawner.core.errors import GPUSpawnerError
from gpuspawner.services import Services
from tests.support.nvml import nvidia_smi

def point():
    if nvidia_smi.is_killed_here():
        os.kill(os.getpid(), signal.SIGKILL)

url, action, *words = sys.argv[1:]
if os.environ.get("WAITS"):
    print("ready", flush=True)
    sys.stdin.readline()
config = Config()
config.GPUDatabase.url = url
command = os.environ.get("MIG_COMMAND", f"{sys.executable} {nvidia_smi.__file__}")
config.GPUSharing.mig_command = command.split()
services = Services(config)
services.mig.release_seconds = float(os.environ.get("RELEASE_SECONDS", 120))
read = services.mig.read_states

def read_states(device):
    point()
    found = read(device)
    point()
    return found

def say(text):
    point()
    print(text, flush=True)
    point()

services.mig.read_states = read_states
try:
    if action == "apply":
        services.mig.apply(*words, actor="kim", say=say)
    else:
        for each in services.mig.restore(actor="kim", say=say):
            print(each.layout, each.done, each.refusal, flush=True)
except GPUSpawnerError as error:
    print(error.message, flush=True)
    sys.exit(1)
"""
"""Changes layouts, and is killed at a point that the test names: before and after each look at
the GPU, each report, and in the calls of nvidia-smi."""


def dividable(number: int = 0, **fields: Any) -> GPU:
    """An A100 of 40 GB in MIG mode, without instances."""
    made: dict[str, Any] = {
        "uuid": f"GPU-{number:08x}-aaaa-2222-3333-444444444444",
        "bus": f"00000000:{number + 1:02X}:00.0",
        "name": "NVIDIA A100-SXM4-40GB",
        "memory_bytes": 40 * GIB,
        "mig": True,
        "profiles": nvml.A100_40GB,
    }
    return GPU(**(made | fields))


class Watcher:
    """What such a process is told and answers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, command: str) -> str:
        """Send ``look``, ``sample``, ``grant MEMBER`` or ``release LEASE``; the answer."""
        self.begin(command)
        return self.answer()

    def begin(self, command: str) -> None:
        """Send it without waiting for the answer."""
        assert self.process.stdin
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """Wait for the answer."""
        assert self.process.stdout
        return self.process.stdout.readline().strip()


class DividedMachine:
    """The fleet's file of such a machine, and what runs on it."""

    def __init__(self, library: Path, fleet: Path, url: str) -> None:
        self.fleet = fleet
        self.url = url
        self.environment = os.environ | nvml.environment(library, fleet)
        self.environment["PYTHONPATH"] = str(REPO)

    def has(self, *gpus: GPU) -> None:
        """The machine has these GPUs, undivided: as after a restart."""
        nvml.write_fleet(self.fleet, gpus)

    def show(self, fleet: str) -> None:
        """The machine is as its file was at some time."""
        new = self.beside("new")
        new.write_text(fleet)
        new.replace(self.fleet)

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Begin ``apply DEVICE LAYOUT`` or ``restore`` in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, self.url, *words],
            env=self.environment | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPO,
        )

    @contextmanager
    def watched(self) -> Iterator[Watcher]:
        """A process that keeps NVML open as hub and accounting service do."""
        process = subprocess.Popen(
            [sys.executable, "-c", WATCHER, self.url],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPO,
        )
        try:
            yield Watcher(process)
        finally:
            process.kill()
            process.communicate(timeout=60)

    def run(self, *words: str, **variables: str) -> tuple[int, str]:
        """Run it to its end; its exit status and what it said."""
        process = self.start(*words, **variables)
        said, _ = process.communicate(timeout=120)
        return process.returncode, said

    def smi(self, *words: str) -> str:
        """What an admin does by hand with nvidia-smi."""
        done = subprocess.run(
            [sys.executable, NVIDIA_SMI, "mig", "-i", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not done.stderr, done.stderr
        return done.stdout

    def layout(self, gpu: int = 0) -> list[tuple[str, int, int]]:
        """Profile, start and id of each instance that can be used, by start."""
        return sorted(self._instances(gpu, True), key=lambda each: each[1])

    def unfinished(self, gpu: int = 0) -> list[tuple[str, int, int]]:
        """The same of those without a compute instance."""
        return self._instances(gpu, False)

    def uuids(self) -> list[str]:
        """The UUIDs of all MIG devices."""
        lines = self.fleet.read_text().splitlines()
        return [line.split()[2] for line in lines if line.startswith("mig ")]

    def calls(self) -> list[str]:
        """The arguments of each call of nvidia-smi."""
        calls = self.beside("calls")
        return calls.read_text().splitlines() if calls.exists() else []

    def beside(self, suffix: str) -> Path:
        """A file that tells the stand-ins something; see nvidia_smi.py."""
        return self.fleet.with_name(f"{self.fleet.name}.{suffix}")

    def _instances(self, gpu: int, has_device: bool) -> list[tuple[str, int, int]]:
        lines = self.fleet.read_text().splitlines()
        starts = [n for n, line in enumerate(lines) if line.startswith("gpu ")] + [len(lines)]
        own = lines[starts[gpu] : starts[gpu + 1]]
        names = {words[2]: words[3] for words in _words(own, "profile")}
        used = {int(words[1]) for words in _words(own, "of")}
        return [
            (names[words[2]], int(words[3]), int(words[1]))
            for words in _words(own, "instance")
            if (int(words[1]) in used) == has_device
        ]


def _words(lines: Sequence[str], key: str) -> list[list[str]]:
    return [line.split() for line in lines if line.startswith(f"{key} ")]
