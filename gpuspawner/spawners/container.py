"""Arguments of a container from a lease, and what this engine can do.

An engine may not be able to raise the limits that PyTorch's users expect, or to limit what is
written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import requests
from docker.errors import APIError, DockerException, ImageNotFound

from ..core.errors import StartFailed
from ..engines.base import LABEL_DISK, LABEL_ENVIRONMENT, LABEL_LEASE, LABEL_MEMBER, LABEL_SERVER
from ..engines.disk_usage import label_of, may_enforce, refusal, size_option, storage_of
from ..engines.injection import (
    Hardening,
    candidates,
    gpu_environment,
    gpu_host_config,
    harden,
    without_gpus,
)
from ..engines.preflight import prove_injection
from ..leases.models import Lease

if TYPE_CHECKING:
    from .docker import GPUDockerSpawner


INJECTION_KEY = "gpuspawner_injection"


async def injection_mode(spawner: GPUDockerSpawner, uuids: Sequence[str]) -> str:
    """The mode for this start. Raises StartFailed when no way works.

    ``auto`` tries what the engine offers, best first, with a container of the image that
    is about to start and one of the leased devices; what works serves the hub's life.
    """
    if spawner.gpu_injection != "auto":
        return str(spawner.gpu_injection)
    if not uuids:
        return "none"
    look = await spawner.broker.read(spawner.broker.look)
    if look.inventory.source == "simulated":
        return "none"
    lock = spawner.of_engine(f"{INJECTION_KEY}_lock", asyncio.Lock)
    async with lock:
        if INJECTION_KEY not in spawner.engine_settings:
            spawner.engine_settings[INJECTION_KEY] = await _prove(spawner, uuids[0])
    mode: str = spawner.engine_settings[INJECTION_KEY]
    return mode


async def _prove(spawner: GPUDockerSpawner, uuid: str) -> str:
    spawner.said.say("Finding out how GPUs get into containers here", 40)
    info = await spawner.docker("info")
    said = []
    for mode in candidates(info):
        finding = await asyncio.to_thread(
            prove_injection, spawner.client, spawner.image, mode, uuid
        )
        if finding.status == "ok":
            spawner.log.info("GPUs get into containers by %s", mode)
            return mode
        said.append(f"{mode}: {finding.text}")
    spawner.log.error("No way to inject a GPU works: %s", "; ".join(said))
    cause = "this machine's container engine cannot hand GPUs to containers (tell your admin: "
    raise StartFailed(cause=cause + "gpuspawner check says what to do)")


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


LIMITS_KEY = "gpuspawner_ulimits"
DISK_DRIVER = "gpuspawner_disk_driver"


async def allowed_ulimits(spawner: GPUDockerSpawner) -> list[dict[str, Any]]:
    """The default ulimits that containers can have here, maybe none.

    A rootless engine, or one inside another container, may not raise limits, and a
    container that asks for it does not start. One throw-away container tells.
    """
    lock = spawner.of_engine(f"{LIMITS_KEY}_lock", asyncio.Lock)
    async with lock:
        if LIMITS_KEY not in spawner.engine_settings:
            spawner.engine_settings[LIMITS_KEY] = [
                limit for limit in ULIMITS if await _can_have(spawner, limit)
            ]
    found: list[dict[str, Any]] = spawner.engine_settings[LIMITS_KEY]
    return found


async def _can_have(spawner: GPUDockerSpawner, limit: dict[str, Any]) -> bool:
    try:
        code, words = await spawner.run_helper(["true"], Ulimits=[limit])
    except APIError as error:
        if "rlimit" not in str(error):
            raise
        code, words = 1, str(error)
    if code:
        spawner.log.warning("This engine cannot set the ulimit %s: %s", limit["Name"], words)
    return not code


async def disk_limit(spawner: GPUDockerSpawner, image: str) -> DiskLimit | None:
    """How much a server of this image may write into its own container; None: no limit.

    Whether the engine keeps it is proved once, by a container that is created and never started:
    one that the engine refuses must not keep servers from starting.
    """
    limit = int(spawner.disk_limit)
    if not limit:
        return None
    lock = spawner.of_engine(f"{DISK_DRIVER}_lock", asyncio.Lock)
    async with lock:
        try:
            driver = spawner.engine_settings.get(DISK_DRIVER)
            if driver is None:
                driver = await _enforcing_driver(spawner, image, limit)
                spawner.engine_settings[DISK_DRIVER] = driver
        except ImageNotFound:
            raise
        except (DockerException, requests.RequestException, OSError) as error:
            # The next start asks again; meanwhile the accounting service watches this one.
            spawner.log.warning("Whether the engine limits containers is not known: %s", error)
            return DiskLimit(limit)
    if not driver:
        return DiskLimit(limit)
    return DiskLimit(limit, await spawner._ask_engine(_size, spawner, driver, image, limit))


async def _enforcing_driver(spawner: GPUDockerSpawner, image: str, limit: int) -> str:
    """The storage driver that keeps the limit; empty when none does."""
    info = await spawner._call("info")
    if not may_enforce(info):
        return ""
    driver = str(info["Driver"])
    size = await spawner._ask_engine(_size, spawner, driver, image, limit)
    said = await spawner._ask_engine(refusal, spawner.client, image, size)
    if said:
        spawner.log.warning("The engine (%s) limits no container: %s", storage_of(info), said)
    return "" if said else driver


def _size(spawner: GPUDockerSpawner, driver: str, image: str, limit: int) -> int:
    return size_option(spawner.client, driver, image, limit)
