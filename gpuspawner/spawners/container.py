"""What a lease changes in a container, as pure functions over the Engine API's own values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engines.base import (
    LABEL_DISK,
    LABEL_ENVIRONMENT,
    LABEL_LEASE,
    LABEL_MEMBER,
    LABEL_SERVER,
)
from ..engines.disk import label_of
from ..engines.hardening import Hardening, harden
from ..engines.injection import gpu_environment, gpu_host_config, without_gpus
from ..model import Lease

ULIMITS = [
    {"Name": "memlock", "Soft": -1, "Hard": -1},
    {"Name": "stack", "Soft": 67108864, "Hard": 67108864},
]
"""What NVIDIA's images ask for: pinned memory without a limit, and a deep stack."""


@dataclass(frozen=True, slots=True)
class DiskLimit:
    """How much a server may write into its own container."""

    limit_bytes: int
    storage_bytes: int = 0
    """What the engine is told, where it keeps the limit itself; 0 where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """What the spawner knows beside the lease."""

    injection: str
    shm_size: int | None = None
    ulimits: Sequence[Mapping[str, Any]] = ()
    image: str = ""
    """Another image than DockerSpawner would take: the kept one of an earlier start."""
    binds: Sequence[str] = ()
    """``source:target:mode``: the workspace, datasets and shared folders."""
    environment: Mapping[str, str]
    """The lease's variables; they win over whatever else was set."""
    hardening: Hardening | None = None
    disk: DiskLimit | None = None
    """None: no limit."""


def build(create: dict[str, Any], lease: Lease, settings: ContainerSettings) -> dict[str, Any]:
    """The keyword arguments of ``create_container`` with the lease applied.

    Everything about GPUs is set from the lease alone: requests for devices that came from
    elsewhere are dropped. Everything else that the admin set stays as it is.
    """
    built = dict(create)
    host = without_gpus(create.get("host_config") or {})
    if host.get("Runtime") == "nvidia" and settings.injection != "runtime":
        del host["Runtime"]  # it would read the variables of the image once more
    host.update(_merged_requests(host, settings.injection, lease.uuids))
    if settings.hardening:
        host = harden(host, settings.hardening)
    _pytorch_defaults(host, settings)
    host["AutoRemove"] = False  # an exit code and the last words are worth keeping: we remove
    host["Binds"] = [*(host.get("Binds") or []), *settings.binds]
    built["host_config"] = host
    if settings.image:
        built["image"] = settings.image
    environment = {**_as_dict(create.get("environment")), **settings.environment}
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # indices of the host mean nothing inside
    environment.update(gpu_environment(settings.injection, lease.uuids))
    built["environment"] = environment
    built["volumes"] = [*(create.get("volumes") or []), *(_target(b) for b in settings.binds)]
    built["labels"] = {**_labels(create.get("labels")), **labels(lease)}
    if settings.disk and not host.get("StorageOpt"):  # else the admin says it
        _limit_disk(built, settings.disk)
    return built


def labels(lease: Lease) -> dict[str, str]:
    """The labels that tie a container to its lease."""
    return {
        LABEL_LEASE: lease.id,
        LABEL_MEMBER: lease.server.user,
        LABEL_SERVER: lease.server.name,
        LABEL_ENVIRONMENT: lease.environment,
    }


def _limit_disk(built: dict[str, Any], disk: DiskLimit) -> None:
    """The limit as the engine keeps it, and as the accounting service reads it."""
    if disk.storage_bytes:
        built["host_config"]["StorageOpt"] = {"size": str(disk.storage_bytes)}
    built["labels"][LABEL_DISK] = label_of(disk.limit_bytes, bool(disk.storage_bytes))


def _merged_requests(
    host: Mapping[str, Any], injection: str, uuids: Sequence[str]
) -> dict[str, Any]:
    changes = gpu_host_config(injection, uuids)
    if "DeviceRequests" in changes:
        others = list(host.get("DeviceRequests") or [])
        changes["DeviceRequests"] = [*others, *changes["DeviceRequests"]]
    return changes


def _pytorch_defaults(host: dict[str, Any], settings: ContainerSettings) -> None:
    """Shared memory, limits and swap as PyTorch's users expect, unless the admin said it."""
    memory = host.get("Memory") or 0
    if (size := settings.shm_size) and not host.get("ShmSize") and host.get("IpcMode") != "host":
        host["ShmSize"] = min(size, memory) if memory else size
    said = {limit.get("Name") for limit in host.get("Ulimits") or []}
    missing = [limit for limit in settings.ulimits if limit["Name"] not in said]
    host["Ulimits"] = [*(host.get("Ulimits") or []), *missing]
    if memory and not host.get("MemorySwap"):
        host["MemorySwap"] = memory  # else Docker gives as much swap on top


def _as_dict(environment: Any) -> dict[str, str]:
    if isinstance(environment, list):
        pairs = (str(item).partition("=") for item in environment)
        return {name: value for name, _, value in pairs}
    return dict(environment or {})


def _labels(given: Any) -> dict[str, str]:
    if isinstance(given, list):
        return {str(name): "" for name in given}
    return dict(given or {})


def _target(bind: str) -> str:
    return bind.split(":")[1]
