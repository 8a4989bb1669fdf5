"""Calls to a container engine, and the container arguments for a lease."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from ..catalog.models import Mount
from ..core.errors import QuotaUnavailable, StartFailed, WorkspaceFull
from ..core.units import format_bytes
from ..engines.base import LABEL_DISK, LABEL_ENVIRONMENT, LABEL_LEASE, LABEL_MEMBER, LABEL_SERVER
from ..engines.disk_usage import label_of, may_enforce, refusal, size_option, storage_of
from ..engines.injection import (
    HELPER,
    Hardening,
    candidates,
    gpu_environment,
    gpu_host_config,
    harden,
    without_gpus,
)
from ..engines.preflight import prove_injection
from ..engines.scratch import Scratch
from ..engines.scratch import refusal as scratch_refusal
from ..leases.models import Lease
from ..services import Services
from ..storage.quotas import MEASURE_SECONDS
from ..storage.shared_folders import FolderMount
from .form import templates

ENGINE_ERRORS = (DockerException, OSError)
"""What a call raises if the engine refuses it or is not responding (requests raises OSError)."""

FRESH_SECONDS = 2.0
"""Maximum age in seconds of an engine's answer that was requested ahead of its use."""

LOOKS_AT_REMOVAL = 5
"""How often a stop asks whether the engine has begun to remove a container, before it waits."""

PAUSE_OF_LOOKS = 0.003
"""Seconds before each of these questions; the engine needs about as long to begin."""

THREADS = 16
"""Docker calls that may run at once; DockerSpawner alone has one thread for all members."""


def make_threads() -> ThreadPoolExecutor:
    """Return a thread pool for the Docker calls of one hub."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="gpuspawner-docker")


@dataclass(slots=True)
class EngineCalls:
    """The engine calls of one server's spawner."""

    call: Callable[..., Awaitable[Any]]
    _client: Callable[[], docker.APIClient]
    """Returns the client, which depends on the server's node."""
    _threads: Callable[[], ThreadPoolExecutor]

    @property
    def client(self) -> docker.APIClient:
        """The client of the engine that the server is on."""
        return self._client()

    async def ask(self, question: Callable[..., T], *args: Any) -> T:
        """Run a blocking engine query in the thread pool and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads(), question, *args)

    async def run_helper(
        self, command: list[str], *, image: str, **host_config: Any
    ) -> tuple[int, str]:
        """Run a command as root in a throw-away container without network.

        Returns its exit code and output. ``host_config`` takes Engine API names.
        """
        created = await self.call(
            "create_container",
            image=image,
            entrypoint=command,
            command=[],
            user="0",
            environment={"NVIDIA_VISIBLE_DEVICES": "void"},
            host_config={"NetworkMode": "none", **HELPER, **host_config},
        )
        try:
            await self.call("start", created["Id"])
            code = (await self.call("wait", created["Id"]))["StatusCode"]
            words = await self.call("logs", created["Id"], tail=20)
            return int(code), words.decode(errors="replace").strip()
        finally:
            await self.call("remove_container", created["Id"], force=True)


class PrefetchedAnswer:
    """A query that starts before its answer is needed, in parallel with others."""

    def __init__(self, question: Callable[[], Coroutine[Any, Any, str]]) -> None:
        self._question = question
        self._asked: tuple[float, asyncio.Task[str]] | None = None
        """When the query started, and its task."""

    def ask(self) -> None:
        """Start the query."""
        asked = asyncio.ensure_future(self._question())
        # Mark its exception as retrieved, since nobody may take the answer.
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._asked = time.monotonic(), asked

    async def take(self) -> str:
        """Return the answer; query again if it was not requested or is older than FRESH_SECONDS."""
        asked, self._asked = self._asked, None
        if asked is None or time.monotonic() - asked[0] > FRESH_SECONDS:
            return await self._question()
        return await asked[1]


def explanation(error: Exception) -> str:
    """Return the engine's reason for a refusal, in one line."""
    text = getattr(error, "explanation", None) or str(error)
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return "the container engine refused it: " + " ".join(str(text).split())[:300]


T = TypeVar("T")

ULIMITS = [
    {"Name": "memlock", "Soft": -1, "Hard": -1},
    {"Name": "stack", "Soft": 67108864, "Hard": 67108864},
]
"""The ulimits that NVIDIA recommends for its images: unlimited pinned memory and a deep stack."""


@dataclass(frozen=True, slots=True)
class DiskLimit:
    """The limit on what a server may write into its own container."""

    limit_bytes: int
    storage_bytes: int = 0
    """The size passed to the engine, if it enforces the limit itself; else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """The spawner's settings for a container, in addition to the lease."""

    injection: str
    shm_size: int | None = None
    ulimits: Sequence[Mapping[str, Any]] = ()
    image: str = ""
    """The image kept from an earlier start, which replaces DockerSpawner's; empty for none."""
    binds: Sequence[str] = ()
    """``source:target:mode`` of the workspace, datasets and shared folders."""
    environment: Mapping[str, str]
    """The lease's variables; they override those set elsewhere."""
    hardening: Hardening | None = None
    disk: DiskLimit | None = None
    scratch: Scratch | None = None


def build(create: dict[str, Any], lease: Lease, settings: ContainerSettings) -> dict[str, Any]:
    """Return the keyword arguments of ``create_container`` with the lease applied.

    GPU settings come from the lease alone: device requests from elsewhere are dropped. All other
    settings of the admin are kept.
    """
    built = dict(create)
    host = without_gpus(create.get("host_config") or {})
    if host.get("Runtime") == "nvidia" and settings.injection != "runtime":
        del host["Runtime"]  # this runtime would also act on the image's own variables
    leased = gpu_host_config(settings.injection, lease.uuids)
    if requests := leased.pop("DeviceRequests", None):
        host["DeviceRequests"] = [*(host.get("DeviceRequests") or []), *requests]
    host.update(leased)
    if settings.hardening:
        host = harden(host, settings.hardening)
    _pytorch_defaults(host, settings)
    host["AutoRemove"] = False  # the spawner removes it, after reading the exit code and the logs
    host["Binds"] = [*(host.get("Binds") or []), *settings.binds]
    if settings.scratch:
        host["Mounts"] = [*(host.get("Mounts") or []), settings.scratch.mount(lease.id)]
    built["host_config"] = host
    if settings.image:
        built["image"] = settings.image
    environment = {**_as_dict(create.get("environment")), **settings.environment}
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # host indices are meaningless in a container
    environment.update(gpu_environment(lease.uuids))
    built["environment"] = environment
    built["labels"] = {**_labels(create.get("labels")), **labels(lease)}
    disk = settings.disk
    if disk and not host.get("StorageOpt"):  # the admin's own limit wins
        if disk.storage_bytes:
            host["StorageOpt"] = {"size": str(disk.storage_bytes)}
        built["labels"][LABEL_DISK] = label_of(disk.limit_bytes, bool(disk.storage_bytes))
    return built


def labels(lease: Lease) -> dict[str, str]:
    """Return the labels that tie a container to its lease."""
    return {
        LABEL_LEASE: lease.id,
        LABEL_MEMBER: lease.server.user,
        LABEL_SERVER: lease.server.name,
        LABEL_ENVIRONMENT: lease.environment,
    }


def _pytorch_defaults(host: dict[str, Any], settings: ContainerSettings) -> None:
    """Set shared memory, ulimits and swap as PyTorch users expect, unless the admin set them."""
    memory = host.get("Memory") or 0
    if (size := settings.shm_size) and not host.get("ShmSize") and host.get("IpcMode") != "host":
        host["ShmSize"] = min(size, memory) if memory else size
    said = {limit.get("Name") for limit in host.get("Ulimits") or []}
    missing = [limit for limit in settings.ulimits if limit["Name"] not in said]
    host["Ulimits"] = [*(host.get("Ulimits") or []), *missing]
    if memory and not host.get("MemorySwap"):
        host["MemorySwap"] = memory  # otherwise Docker adds the same amount of swap


def _as_dict(environment: Any) -> dict[str, str]:
    if isinstance(environment, list):
        pairs = (str(item).partition("=") for item in environment)
        return {name: value for name, _, value in pairs}
    return dict(environment or {})


def _labels(given: Any) -> dict[str, str]:
    if isinstance(given, list):
        return {str(name): "" for name in given}
    return dict(given or {})


ZEROS = {"mem_limit": "Memory", "pids_limit": "PidsLimit", "oom_score_adj": "OomScoreAdj"}
"""Settings of ``extra_host_config`` for which 0 is meaningful, and their Engine API names."""


def with_zeros(host: dict[str, Any], said: Mapping[str, Any], *, memory: bool) -> dict[str, Any]:
    """Return the HostConfig with every 0 that the admin set, and without a default ``Memory: 0``.

    docker-py omits zeros, and DockerSpawner sends ``Memory: 0`` if nothing is configured.

    Args:
        host: The HostConfig (Engine API names).
        said: The admin's ``extra_host_config``.
        memory: True if a memory limit was configured elsewhere, so that its 0 counts.
    """
    zeros = {name for name, value in said.items() if value == 0 and value is not False}
    if not host.get("Memory") and memory:
        zeros.add("mem_limit")
    mended = {key: value for key, value in host.items() if key != "Memory" or value}
    return mended | {key: 0 for name, key in ZEROS.items() if name in zeros}


def is_unstarted(container: Mapping[str, Any]) -> bool:
    """Return True if the container was created but never started."""
    return bool(container["State"].get("Status") == "created")


def ending(container: Mapping[str, Any]) -> str:
    """Describe how a container ended; empty if it is running."""
    state = container["State"]
    if state["Running"]:
        return ""
    if state.get("OOMKilled"):
        limit = container["HostConfig"].get("Memory")
        told = f" (its limit is {format_bytes(limit)})" if limit else ""
        return f"it ran out of memory{told}"
    return f"it exited at once with code {state['ExitCode']}"


class EngineAbilities:
    """What one engine supports, tested once for all servers on it."""

    def __init__(self, log: logging.Logger | Any) -> None:
        self.log = log
        self._known: dict[str, Any] = {}
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def _once(self, ability: str, test: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a test, which runs again only if it raised an error."""
        async with self._locks[ability]:
            if ability not in self._known:
                self._known[ability] = await test()
        found: T = self._known[ability]
        return found

    async def injection(
        self, calls: EngineCalls, image: str, uuid: str, say: Callable[[str, int], None]
    ) -> str:
        """Return the best working GPU injection mode. Raises StartFailed if none works.

        Each mode that the engine offers is tried, best first, with the image that is about to
        start and one of the leased devices. The result is kept until the hub restarts.
        """

        async def test() -> str:
            say("Finding out how GPUs get into containers here", 40)
            said = []
            for mode in candidates(await calls.call("info")):
                finding = await asyncio.to_thread(prove_injection, calls.client, image, mode, uuid)
                if finding.status == "ok":
                    self.log.info("GPUs get into containers by %s", mode)
                    return mode
                said.append(f"{mode}: {finding.text}")
            self.log.error("No way to inject a GPU works: %s", "; ".join(said))
            cause = "this machine's container engine cannot hand GPUs to containers (tell your "
            raise StartFailed(cause=cause + "admin: gpuspawner check says what to do)")

        return await self._once("injection", test)

    async def ulimits(self, calls: EngineCalls, image: str) -> list[dict[str, Any]]:
        """Return the default ulimits that this engine can set, possibly none.

        A rootless engine, or one inside another container, may be unable to raise limits, and a
        container that needs it does not start. A throw-away container tests each ulimit.
        """

        async def test() -> list[dict[str, Any]]:
            return [limit for limit in ULIMITS if await self._can_have(calls, image, limit)]

        return await self._once("ulimits", test)

    async def _can_have(self, calls: EngineCalls, image: str, limit: dict[str, Any]) -> bool:
        try:
            code, words = await calls.run_helper(["true"], image=image, Ulimits=[limit])
        except APIError as error:
            if "rlimit" not in str(error):
                raise
            code, words = 1, str(error)
        if code:
            self.log.warning("This engine cannot set the ulimit %s: %s", limit["Name"], words)
        return not code

    async def disk_limit(self, calls: EngineCalls, image: str, limit: int) -> DiskLimit | None:
        """Return the disk limit of a server with this image; None for no limit.

        Whether the engine enforces it is tested once with a container that is never started:
        servers must start even if the engine refuses the limit. ``limit`` is in bytes, 0 for none.
        """
        if not limit:
            return None

        async def test() -> str:
            return await self._enforcing_driver(calls, image, limit)

        try:
            driver = await self._once("disk", test)
        except ImageNotFound:
            raise
        except ENGINE_ERRORS as error:
            # The next start tests again; until then the accounting service watches this server.
            self.log.warning("Whether the engine limits containers is not known: %s", error)
            return DiskLimit(limit)
        if not driver:
            return DiskLimit(limit)
        return DiskLimit(limit, await calls.ask(_size, calls, driver, image, limit))

    async def _enforcing_driver(self, calls: EngineCalls, image: str, limit: int) -> str:
        """Return the storage driver that enforces the limit; empty if none does."""
        info = await calls.call("info")
        if not may_enforce(info):
            return ""
        driver = str(info["Driver"])
        size = await calls.ask(_size, calls, driver, image, limit)
        said = await calls.ask(refusal, calls.client, image, size)
        if said:
            self.log.warning("The engine (%s) limits no container: %s", storage_of(info), said)
        return "" if said else driver

    async def scratch(self, calls: EngineCalls, target: str, limit: int) -> Scratch:
        """Return a scratch directory of ``limit`` bytes, limited by the engine if it can.

        Whether it can is tested once, with a volume.
        """

        async def test() -> str:
            said = await calls.ask(lambda: scratch_refusal(calls.client, limit))
            if said:
                self.log.warning("The engine limits no scratch directory: %s", said)
            return said

        return Scratch(target, limit, is_enforced=not await self._once("scratch", test))

    async def memory(self, calls: EngineCalls) -> int:
        """Return the memory of the engine's machine in bytes; 0 if it is not reported."""

        async def test() -> int:
            return int((await calls.call("info")).get("MemTotal") or 0)

        return await self._once("memory", test)


def _size(calls: EngineCalls, driver: str, image: str, limit: int) -> int:
    """Return the ``size`` for ``storage_opt`` of a container with this image. Blocks."""
    return size_option(calls.client, driver, image, limit)


LABEL_WORKSPACE = "gpuspawner.workspace"
LABEL_FOLDER = "gpuspawner.folder"
GB = 2**30
_PLACE = "/workspace"


@dataclass
class PreparedWorkspaces:
    """The workspaces and folders that a hub has already prepared."""

    sources: set[tuple[str, int]] = field(default_factory=set)
    """Sources with their quotas in bytes."""
    locks: dict[str, asyncio.Lock] = field(default_factory=dict)
    """A lock per source, so that a second start waits until the preparation is complete."""


@dataclass(frozen=True, slots=True)
class MountedWorkspace:
    """A member's workspace, as mounted into a container."""

    source: str
    """A directory of the host, a volume's name, or empty."""
    target: str
    quota: int = 0
    """The maximum size in bytes; 0 for no limit."""

    @property
    def is_limited(self) -> bool:
        """True if the file system enforces the quota, as it can for directories."""
        return bool(self.quota) and self.source.startswith("/")

    async def require_room(self, services: Services) -> None:
        """Raise WorkspaceFull if the quota is used up."""
        if not self.is_limited:
            return
        use = await services.run_outside(
            services.storage.use_of, self.source, self.quota, MEASURE_SECONDS
        )
        if use is not None and use.full:
            raise WorkspaceFull(used=format_bytes(use.used), limit=format_bytes(self.quota))

    async def line(self, services: Services) -> str:
        """Return the form's line about the space used, for a workspace with a limit."""
        use = await services.run_outside(services.storage.use_of, self.source, self.quota)
        used, limit = format_bytes(use.used) if use else "", format_bytes(self.quota)
        return templates.get_template("files.html").render(use=use, used=used, limit=limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Everything that one server mounts; creates what is missing, with the right owner."""

    services: Services
    docker: Callable[..., Awaitable[Any]]
    """The spawner's ``docker``, which an admin's class may override."""
    calls: EngineCalls
    prepared: PreparedWorkspaces
    log: logging.Logger | Any
    user: str
    workspace: MountedWorkspace
    mounts: Sequence[Mount] = ()
    folders: Sequence[FolderMount] = ()

    def binds(self) -> list[str]:
        """Return ``source:target:mode`` of everything that this server mounts."""
        own = self.workspace
        first = [f"{own.source}:{own.target}:rw"] if own.source else []
        others = [f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}" for m in self.mounts]
        home = "/".join(own.target.split("/")[:3])  # where members look, such as /home/jovyan
        # A folder's name contains no colon and no slash: see storage/shared_folders.py.
        shared = [
            f"{f.source}:{home}/shared/{f.name}:{'rw' if f.write else 'ro'}" for f in self.folders
        ]
        return first + others + shared

    async def prepare(self, image: str) -> None:
        """Create the workspace and the shared folders, and give them to the image's user.

        Raises WorkspaceBusy while an admin works on the workspace.
        """
        source, quota = self.workspace.source, self.workspace.quota
        if source:
            use = self.services.storage.use_workspace
            if await self.services.run(use, source, self.user, quota or None):
                self.prepared.sources.discard((source, quota))
            await self._prepare(source, quota, image, {LABEL_WORKSPACE: self.user})
        for folder in self.folders:
            labels = {LABEL_FOLDER: folder.folder_id}
            folder_quota = self.services.settings.folders.quota * GB
            await self._prepare(folder.source, folder_quota, image, labels)

    async def _prepare(self, source: str, quota: int, image: str, labels: dict[str, str]) -> None:
        async with self.prepared.locks.setdefault(source, asyncio.Lock()):
            if (source, quota) in self.prepared.sources:
                return
            directory = source.startswith("/")
            if directory or not await self._volume_exists(source, labels):
                await self._give_to_user(source, image, needed=directory and bool(quota))
            if directory:
                await self._keep_quota(source, quota)
            self.prepared.sources.add((source, quota))

    async def _keep_quota(self, source: str, quota: int) -> None:
        try:
            await self.services.run_outside(self.services.storage.keep_quota, source, quota or None)
        except QuotaUnavailable as error:  # a problem for the admin, not a reason to refuse a start
            self.log.error("%s Until then nothing limits %s.", error.message, source)

    async def _volume_exists(self, source: str, labels: dict[str, str]) -> bool:
        """Return True if there is a volume of this name, else create it and return False."""
        try:
            await self.docker("inspect_volume", source)
        except NotFound:
            await self.docker("create_volume", source, labels=labels)
            return False
        return True

    async def _give_to_user(self, source: str, image: str, *, needed: bool) -> None:
        """Give a new workspace, which Docker creates as root's, to the image's own user.

        A directory with another owner is left as it is. ``needed`` means that it must exist now,
        for its quota, even if it stays root's.
        """
        config = (await self.docker("inspect_image", image))["Config"]
        user = (config.get("User") or "").strip()
        if not user or user.split(":")[0] in ("root", "0"):
            if not needed:
                return
            user = "0"
        owner = user if ":" in user or user.isdigit() else f"{user}:"
        script = f'[ "$(stat -c %u {_PLACE})" != 0 ] || chown "$0" {_PLACE}'
        command = ["sh", "-c", script, owner]
        binds = [f"{source}:{_PLACE}:rw"]
        code, words = await self.calls.run_helper(command, image=image, Binds=binds)
        if code:
            self.log.error("The workspace %s: %s", source, words)
            raise StartFailed(
                cause="you could not be made the owner of your workspace (tell your admin)"
            )
