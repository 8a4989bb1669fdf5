"""``gpuspawner slurm inventory``: what this machine would bring into a cluster."""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
from pathlib import Path

import docker
from docker.errors import DockerException
from requests import RequestException

from ..broker.broker import utcnow
from ..devices import open_source
from ..errors import ConfigError, GPUSpawnerError
from ..model import Device, DeviceStatus, Inventory
from ..slurm.cluster import NodeDevice
from ..slurm.commands import Slurm
from ..slurm.inventory import HostInventory
from .config import Settings

SECONDS = 20.0
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
_MINOR = re.compile(r"^Device Minor:\s*(\d+)$", re.MULTILINE)
_LAYOUT = ("Boards", "SocketsPerBoard", "CoresPerSocket", "ThreadsPerCore")


def inventory(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print this machine's inventory as JSON. 1 when its GPUs cannot be seen."""
    print(this_host(settings).to_json())
    return 0


def this_host(settings: Settings) -> HostInventory:
    """What this machine has. Raises ConfigError when its GPUs cannot be seen."""
    seen = open_source(settings.broker.device_source).observe(utcnow())
    if seen.error:
        raise ConfigError(f"No GPU of this machine can be seen: {seen.error}")
    hardware = _hardware()
    memory = int(hardware.get("RealMemory", "0")) * 2**20
    return HostInventory(
        hostname=socket.gethostname().partition(".")[0],
        cpus=int(hardware.get("CPUs", "0")) or os.cpu_count() or 1,
        memory_bytes=memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        layout=" ".join(f"{word}={hardware[word]}" for word in _LAYOUT if word in hardware),
        slurm=_asked("slurmd", "-V").removeprefix("slurm-wlm ").removeprefix("slurm ").strip(),
        engine=_engine(),
        driver=seen.driver_version,
        devices=tuple(node_devices(seen)),
    )


def node_devices(seen: Inventory, gpus: Path = DRIVER_GPUS) -> list[NodeDevice]:
    """The devices in the order of their files. One that does not answer is an error: Slurm counts
    by place, and those behind it would be taken for others."""
    silent = [d for d in seen.devices if d.status is DeviceStatus.UNKNOWN]
    if silent:
        raise ConfigError(
            f"The GPU {silent[0].index} does not answer: {silent[0].reason} Mend it first, or take "
            "it out."
        )
    whole = [d for d in seen.devices if d.status is not DeviceStatus.PARENT]
    numbered = [(_minor(device, gpus), device) for device in whole]
    if len({minor for minor, _ in numbered}) < len(numbered):
        numbered = [(device.index, device) for device in whole]
    numbered.sort(key=lambda pair: pair[0])
    return [
        NodeDevice(device.uuid, device.model, device.memory_bytes, f"/dev/nvidia{minor}")
        for minor, device in numbered
    ]


def _minor(device: Device, gpus: Path) -> int:
    """N of the GPU's /dev/nvidiaN: the driver's own count, which need not be NVML's."""
    domain, _, rest = device.pci_bus_id.lower().partition(":")
    try:
        told = (gpus / f"{domain[-4:]}:{rest}" / "information").read_text(encoding="utf-8")
    except OSError:
        return device.index
    found = _MINOR.search(told)
    return int(found[1]) if found else device.index


def _hardware() -> dict[str, str]:
    """What slurmd finds on this machine, in slurm.conf's words; nothing where it is not there."""
    first = _asked("slurmd", "-C").partition("\n")[0]
    return dict(word.split("=", 1) for word in first.split() if "=" in word)


def _asked(program: str, *words: str) -> str:
    try:
        return Slurm(seconds=SECONDS, folder=_folder(program)).run(program, *words)
    except GPUSpawnerError:
        return ""


def _folder(program: str) -> str:
    """Where root finds it, and others often do not look."""
    return next((f for f in ("/usr/sbin", "/usr/local/sbin") if os.access(f"{f}/{program}", 1)), "")


def _engine() -> str:
    try:
        return str(docker.from_env(timeout=5).version()["Version"])
    except (DockerException, RequestException, OSError, KeyError):
        return ""


# Other hosts'.


def fetched(host: str) -> str:
    """What ``gpuspawner slurm inventory`` prints on another host, asked by ssh. Raises
    ConfigError."""
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--", host]
    remedy = f"Run it there by hand, and give the file: {host}=FILE."
    try:
        done = subprocess.run(
            [*command, "gpuspawner", "slurm", "inventory"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(f"There is no ssh on this machine to ask {host} by. {remedy}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{host} did not answer within 60 seconds. {remedy}") from None
    if done.returncode:
        said = " ".join(done.stderr.split())[-300:] or f"ssh ended with {done.returncode}"
        raise ConfigError(
            f"gpuspawner slurm inventory cannot be asked on {host}: {said.rstrip('.')}. {remedy}"
        )
    return done.stdout
