"""DockerSpawner with leases; docs/compatibility.md names each of its settings that changes."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.utils import kwargs_from_env
from dockerspawner import DockerSpawner
from jupyterhub.traitlets import ByteSpecification
from traitlets import CaselessStrEnum

from ..core.errors import EngineUnavailable, StartFailed
from ..engines.base import LABEL_LEASE
from ..engines.docker import (
    DockerEngine,
    belongs_to,
    foreign_holder,
    is_alive,
    lease_of,
    sighting_of,
)
from ..engines.injection import HELPER, MODES
from ..leases.models import Lease
from .base import spawn_exception
from .container import ContainerSettings, allowed_ulimits, build, disk_limit, injection_mode
from .docker_base import GPUDockerHardening
from .docker_commit import Kept, Plain, keep, leave_plain
from .mixin import ExitStatus
from .progress import Pulls

T = TypeVar("T")

THREADS = 16
"""Docker calls that may run at once; the stock spawner has one thread for all members."""

FRESH_SECONDS = 2.0
"""For so long an answer of the engine is used that was asked for ahead of its use."""

ZEROS = {"mem_limit": "Memory", "pids_limit": "PidsLimit", "oom_score_adj": "OomScoreAdj"}
"""Settings of ``extra_host_config`` whose 0 means something, and their names in the Engine API."""


class GPUDockerSpawner(GPUDockerHardening, DockerSpawner):
    """Leases GPUs to containers on this machine's Docker Engine."""

    engine_name = "docker"
    if TYPE_CHECKING:
        extra_host_config: Any

    gpu_injection = CaselessStrEnum(
        ["auto", *MODES],
        default_value="auto",
        config=True,
        help="""
        How GPUs get into containers: ``auto``, ``device_requests``, ``cdi``, ``runtime``,
        or ``none`` (only the variables are set: simulated devices).

        ``auto`` asks the engine what it offers and proves it once with a container.
        Example::

            c.GPUDockerSpawner.gpu_injection = "cdi"
        """,
    )

    shm_size = ByteSpecification(
        "8G",
        config=True,
        help="""
        Size of /dev/shm, which PyTorch's data loaders need; never more than ``mem_limit``.

        It takes memory only as it is used. The environment may say another size, and
        ``extra_host_config`` wins. Example::

            c.GPUDockerSpawner.shm_size = "16G"
        """,
    )

    _changing: asyncio.Future[Any] | None = None
    _identity: tuple[float, asyncio.Future[str]] | None = None
    """Which engine answers, asked for ahead of the container's creation, and when."""
    _last_alone: tuple[float, str, str] | None = None
    """When the engine had this container, which had ended, and nothing else that may hold the
    devices of this lease: the ids of container and lease."""
    _removed = ""
    """The id of the container that the engine removed last at our word."""
    _kept = Kept()
    _plain: Plain | None = None

    @property
    def own_form_traits(self) -> tuple[str, ...]:
        """A catalog says which images there are; without one, ``allowed_images`` does."""
        if self.catalog:
            return ("options_form",)
        return ("options_form", "allowed_images", "image_whitelist")  # the latter: its old name

    # Docker, without one call blocking another.

    @property
    def executor(self) -> ThreadPoolExecutor:
        """The threads for Docker calls of this hub."""
        pool: ThreadPoolExecutor = self.shared(
            "gpuspawner_docker_threads",
            lambda: ThreadPoolExecutor(THREADS, thread_name_prefix="gpuspawner-docker"),
        )
        return pool

    @property
    def engine_settings(self) -> MutableMapping[str, Any]:
        """What is kept of the engine that this server is on, for all servers on it."""
        return self.hub_settings

    def of_engine(self, key: str, make: Callable[[], Any]) -> Any:
        """One object for each engine, made by whoever needs it first."""
        if key not in self.engine_settings:
            self.engine_settings[key] = make()
        return self.engine_settings[key]

    @property
    def client(self) -> docker.APIClient:
        """The client for DockerSpawner's own calls: one a hub, and the first one stays.

        DockerSpawner has threads that ask at once put theirs one after the other into an
        attribute of the class; CPython crashes when one of them still reads the last.
        """
        kept = self.engine_settings
        made: docker.APIClient | None = kept.get("gpuspawner_docker_client")
        return made or kept.setdefault("gpuspawner_docker_client", self.connect())

    def connect(self, timeout: float = 60) -> docker.APIClient:
        """A client of its own with the spawner's settings."""
        settings: dict[str, Any] = {"version": "auto", "timeout": timeout}
        if self.tls_config:
            settings["tls"] = docker.tls.TLSConfig(**self.tls_config)
        settings.update(kwargs_from_env())
        settings.update(self.client_kwargs)
        return docker.APIClient(**settings)

    def engine(self) -> DockerEngine:
        found: DockerEngine = self.of_engine(
            "gpuspawner_docker_engine",
            lambda: DockerEngine(self.connect, lambda: self.broker.stamp_error),
        )
        return found

    def server_engine(self) -> DockerEngine:
        """The engine that this server is on."""
        return self.engine()

    async def _ask_engine(self, ask: Callable[..., T], *args: Any) -> T:
        """Run a blocking question to the engine in one of the threads for it."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, ask, *args)

    def docker(self, method: str, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Make a Docker call in a thread; the server's container gets the lease applied.

        As in DockerSpawner the call is under way when this returns: a hook need not wait for it.
        """
        return asyncio.ensure_future(self._docker_call(method, *args, **kwargs))

    async def _docker_call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "create_container" and self._plain:
            return await self._call(method, *args, **self._plain.applied(kwargs))
        if method == "create_container" and not args:
            # DockerSpawner names the image of the server, and passes that of its helper for
            # certificates by position: the helper gets neither lease nor workspace.
            kwargs, _ = await asyncio.gather(self._built(kwargs), self._note_engine())
        elif method != "start":
            return await self._call(method, *args, **kwargs)
        # The call outlives a cancelled spawn: keep hold of it, so that the release waits
        # for it and sees what there is.
        self.touched = True
        self._changing = asyncio.ensure_future(self._call(method, *args, **kwargs))
        return await asyncio.shield(self._changing)

    async def _built(self, create: dict[str, Any]) -> dict[str, Any]:
        """The arguments of ``create_container`` with the lease applied."""
        create["host_config"] = self._with_own_zeros(create.get("host_config") or {})
        await self.find_folders()
        create = build(create, self._held(), await self._container_settings())
        self.warn_of(create["host_config"])
        await self.storage().prepare(self.image)
        return create

    async def _note_engine(self) -> None:
        """Write which engine gets the container, where the lease does not say so already."""
        lease = self._held()
        asked, self._identity = self._identity, None
        if asked is None or time.monotonic() - asked[0] > FRESH_SECONDS:
            identity = await self._ask_engine(self.server_engine().identity)
        else:
            identity = await asked[1]
        if identity != lease.engine_id:
            self.broker.engine_ids[lease.engine] = identity
            await self.broker.run(self.broker.note_engine, lease.id, identity)
            self.lease = replace(lease, engine_id=identity)

    def _ask_identity(self) -> None:
        """Ask which engine it is, beside what else is asked before the container is created."""
        asked = asyncio.ensure_future(self._ask_engine(self.server_engine().identity))
        asked.add_done_callback(_ignore_failure)
        self._identity = time.monotonic(), asked

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await super().docker(method, *args, **kwargs)

    async def run_helper(
        self, command: list[str], *, image: str = "", **host_config: Any
    ) -> tuple[int, str]:
        """Run a command as root in a throw-away container, without network.

        Its exit code and what it printed. Without ``image`` it is of this start's image;
        ``host_config`` takes the Engine API's names.
        """
        created = await self._call(
            "create_container",
            image=image or self.image,
            entrypoint=command,
            command=[],
            user="0",
            environment={"NVIDIA_VISIBLE_DEVICES": "void"},
            host_config={"NetworkMode": "none", **HELPER, **host_config},
        )
        try:
            await self._call("start", created["Id"])
            code = (await self._call("wait", created["Id"]))["StatusCode"]
            words = await self._call("logs", created["Id"], tail=20)
            return int(code), words.decode(errors="replace").strip()
        finally:
            await self._call("remove_container", created["Id"], force=True)

    def _held(self) -> Any:
        if self.lease is None:
            raise StartFailed(cause="it holds no lease")
        return self.lease

    async def _container_settings(self) -> ContainerSettings:
        lease = self._held()
        chosen = self.chosen.shm_size if self.chosen else None
        return ContainerSettings(
            injection=await injection_mode(self, lease.uuids),
            shm_size=chosen or self.shm_size,
            ulimits=await allowed_ulimits(self),
            binds=[*self.storage().binds(), *self._kept.binds],
            image=self._kept.image,
            environment=self.with_lease_environment({}),
            hardening=await self.hardening(),
            disk=await disk_limit(self, self._kept.image or self.image),
        )

    # Start.

    async def start(self) -> Any:
        """Start as DockerSpawner does; whatever fails is said in words."""
        try:
            self._kept = Kept() if self.remove else await keep(self)
            self._ask_identity()
            return await super().start()
        except ImageNotFound as error:
            cause = f"the image {self.image} is not on this machine"
            raise self._did_not_start(cause, error) from error
        except (APIError, DockerException) as error:
            cause = _explanation(error)
            raise self._did_not_start(cause, error) from error
        except (requests.RequestException, OSError) as error:
            self.log.error("The Docker Engine does not answer: %s", error)
            raise spawn_exception(EngineUnavailable()) from error

    def _did_not_start(self, cause: str, error: Exception) -> Exception:
        self.log.error("%s did not start: %s", self.server_ref, error)
        return spawn_exception(StartFailed(cause=cause))

    def apply_environment(self, environment: Any) -> None:
        """Also the image, which the catalog or the admin's configuration names, or the member
        where ``own_images`` allows it."""
        super().apply_environment(environment)
        if image := self.own_image or environment.image:
            self.image = image

    async def pull_image(self, image: str) -> None:
        """As DockerSpawner, away from everybody else's calls and with progress."""
        await self._pull(image)
        await self.check_own_image_here()

    async def _pull(self, image: str) -> None:
        policy = self.pull_policy.lower()
        if policy == "skip":
            return
        if policy != "always":
            try:
                await self.docker("inspect_image", image)
                return
            except NotFound:
                if policy == "never":
                    cause = f"the image {image} is not on this machine, and pulling is off"
                    raise StartFailed(cause=cause) from None
        self.said.say(f"Pulling {image}", 15)
        pulls: Pulls = self.of_engine("gpuspawner_pulls", lambda: Pulls(self.connect))
        await pulls.pull(image, lambda message: self.said.say(message, 20))

    async def create_object(self) -> Any:
        """Create the container; the admin's ``extra_host_config`` is evaluated here, once."""
        self.said.say("Creating the container", 50)
        configured = self.extra_host_config
        host = configured(self) if callable(configured) else configured
        if inspect.isawaitable(host):
            host = await host
        self.extra_host_config = host
        try:
            return await super().create_object()
        finally:
            self.extra_host_config = configured

    def _with_own_zeros(self, host: dict[str, Any]) -> dict[str, Any]:
        """The HostConfig with each 0 that the admin wrote, and without the default's.

        docker-py leaves a 0 out, and DockerSpawner sends Memory 0 where nothing is configured.
        """
        configured = self.extra_host_config
        said = {} if callable(configured) else configured  # only a hook's own call finds one
        zeros = {name for name, value in said.items() if value == 0 and value is not False}
        in_catalog = self.chosen is not None and self.chosen.mem_limit is not None
        if not host.get("Memory") and (self.is_configured("mem_limit") or in_catalog):
            zeros.add("mem_limit")
        mended = {key: value for key, value in host.items() if key != "Memory" or value}
        return mended | {key: 0 for name, key in ZEROS.items() if name in zeros}

    async def start_object(self) -> None:
        self.said.say("Starting the container", 60)
        await super().start_object()

    async def stop_object(self) -> None:
        """Stop the container; what comes after, its removal, is not the member's time.

        While the engine has the ended container, its list proves what else may hold the devices: no
        other engine has one of this id. After the removal it would have to say which engine it is.
        """
        await super().stop_object()
        self.stopped_at = self.broker.clock()
        container_id, lease, asked_at = self.container_id, self.lease, time.monotonic()
        self._last_alone, self._removed = None, ""
        if lease is None or self._is_changing():
            container = await self._inspected()
        else:
            container = None
            with suppress(DockerException, requests.RequestException, OSError, EngineUnavailable):
                found = await self._holders(lease)
                container = next((each for each in found if each["Id"] == container_id), None)
                if container and len(found) == 1 and not is_alive(container):
                    self._last_alone = asked_at, container_id, lease.id
        if container is not None:
            self.finished_at = sighting_of(container).ended_at

    async def remove_object(self) -> None:
        """Remove the container, as DockerSpawner; it may be going by itself."""
        await self._remove(self.object_id)

    async def engine_started_at(self) -> datetime | None:
        container = await self._inspected()
        return sighting_of(container).started_at if container else None

    async def _inspected(self) -> dict[str, Any] | None:
        """The container as the engine describes it; None when it is gone, or nobody can say."""
        try:
            found: dict[str, Any] = await self._call("inspect_container", self.container_id)
        except (DockerException, requests.RequestException, OSError):
            return None
        return found

    async def create_plain(self, plain: Plain) -> None:
        """Create the container as DockerSpawner alone would, and do not start it."""
        self._plain = plain
        try:
            await DockerSpawner.create_object(self)
        finally:
            self._plain = None

    def get_env(self) -> dict[str, str]:
        env: dict[str, str] = DockerSpawner.get_env(self) if self._plain else super().get_env()
        return env

    async def _release(self, reason: str) -> bool:
        released = await super()._release(reason)
        if released and not self.remove:
            try:
                await leave_plain(self)
            except (DockerException, requests.RequestException, OSError) as error:
                self.log.warning("%s is kept as it ended: %s", self.object_name, error)
        return released

    def engine_ref(self) -> str:
        return self.container_id or ""

    async def get_url(self) -> str:
        """Where the server is: a hub that was killed during the start wrote down no address."""
        try:
            return self._server_url(await self.get_ip_and_port()).removesuffix("api")
        except (DockerException, requests.RequestException, OSError, RuntimeError) as error:
            self.log.warning("Cannot see where %s is: %s", self.server_ref, error)
            url: str = await super().get_url()
            return url

    @property
    def will_resume(self) -> bool:
        """Never: every start makes a new container, so the old token must not live on."""
        return False

    # What Docker says, and what it does not.

    async def get_object(self) -> Any:
        """As DockerSpawner, except that only 404 means gone, since an error is no answer; and a
        container of this lease that was renamed is found by its id and label."""
        container = await self._inspect(self.object_name)
        if self.lease_id and self.touched and not self._is_own(container):
            container = await self._find_own() or container
        self.object_id = container[self.object_id_key] if container else ""
        return container

    def _is_own(self, container: dict[str, Any] | None) -> bool:
        """Return True for the container of this server's lease."""
        if container is None:
            return False
        return lease_of(container) == self.lease_id or container["Id"] == self._known_id

    @property
    def _known_id(self) -> str:
        """The recorded id of the server's container; empty before it answered."""
        return (self.lease.engine_ref if self.lease else "") or self.object_id or ""

    async def _find_own(self) -> dict[str, Any] | None:
        """The container of this server's lease, whatever its name is; one that lives first."""
        wanted = {"label": f"{LABEL_LEASE}={self.lease_id}"}
        listed = await self._call("containers", all=True, filters=wanted)
        ids = dict.fromkeys([*(each["Id"] for each in listed), self._known_id])
        found = [state for ref in ids if ref and (state := await self._inspect(ref))]
        return next((each for each in found if is_alive(each)), found[0] if found else None)

    async def _inspect(self, ref: str) -> dict[str, Any] | None:
        """A container by its name or id; None when the engine has none (404)."""
        try:
            container: dict[str, Any] = await self._call("inspect_" + self.object_type, ref)
        except NotFound:
            return None
        return container

    async def poll(self) -> Any:
        """None while the server lives or nobody can say: unknown is not dead."""
        await self.cleared()
        if not self.touched and self.pending != "spawn":
            return 0  # refused before anything was created
        try:
            status = await super().poll()
        except (DockerException, requests.RequestException, OSError) as error:
            self.log.warning("Cannot see whether %s lives: %s", self.server_ref, error)
            return None
        if status is None:
            self.seen_alive_at = self.broker.clock()
        return status

    async def prove_gone(self) -> ExitStatus:
        """Gone when no container lives that may hold the lease: by its label, its recorded id, its
        name or its devices. Only exits and absence count, and nothing else."""
        if not self.touched or self.lease is None:
            return ExitStatus(gone=True)
        if self._changing is not None and self._is_changing():
            await asyncio.wait([self._changing])
        lease = self.lease
        if self._was_last(lease):
            return ExitStatus(gone=True)
        try:
            found = await self._holders(lease)
            living = [each for each in found if is_alive(each) and not _is_unstarted(each)]
            if living:
                return ExitStatus(gone=False, detail=self._why_not_gone(living, lease))
            own = [each for each in found if belongs_to(each, lease)]
            for each in own:
                if self.remove or _is_unstarted(each):
                    await self._remove(each["Id"])
            if not own:  # removed, or never created: an older one may be there under the name
                return ExitStatus(gone=True, ended_at=await self._died_at())
        except (DockerException, requests.RequestException, OSError) as error:
            raise EngineUnavailable() from error
        ends = [sighting_of(each) for each in own]
        last = max((end.ended_at for end in ends if end.ended_at), default=None)
        return ExitStatus(
            gone=True, ended_at=last, detail=next((e.detail for e in ends if e.detail), "")
        )

    def _was_last(self, lease: Lease) -> bool:
        """Return True if the engine had nothing but the lease's own container, which had ended,
        just before it removed that one at our word.

        True once: whoever asks again wants a new look.
        """
        last, self._last_alone = self._last_alone, None
        if last is None or time.monotonic() - last[0] > FRESH_SECONDS:
            return False
        return last[1:] == (self._removed, lease.id)

    def _is_changing(self) -> bool:
        """Return True while the engine creates or starts the container."""
        return self._changing is not None and not self._changing.done()

    async def _holders(self, lease: Lease) -> list[dict[str, Any]]:
        """Every container that may hold the lease's devices."""
        return await self._ask_engine(self.server_engine().holders, lease, self.object_name)

    def _is_ours(self, container: dict[str, Any], lease: Lease) -> bool:
        """Return True for the lease's own container, and for what has this server's name."""
        return belongs_to(container, lease) or container["Name"] == f"/{self.object_name}"

    def _why_not_gone(self, living: list[dict[str, Any]], lease: Lease) -> str:
        foreign = [each for each in living if not self._is_ours(each, lease)]
        return foreign_holder(foreign[0], lease) if foreign else "its container lives"

    async def _remove(self, container_id: str) -> None:
        """Remove a container that has ended; it may be going by itself."""
        self.log.info("Removing the container %s of %s", container_id[:12], self.server_ref)
        try:
            await self._call("remove_container", container_id, v=True)
            self._removed = container_id
        except APIError as error:
            if error.status_code not in (404, 409):
                raise

    async def _died_at(self) -> datetime | None:
        lease = self.lease
        if lease is None or not lease.engine_ref or self.stopped_at:
            return None
        return await self._ask_engine(self.server_engine().died_at, lease.engine_ref)

    async def end_leftover(self) -> None:
        """End every container of this server that lives, by its id; what only shares a device with
        it is somebody else's."""
        lease = self._held()
        try:
            found = await self._holders(lease)
            for each in found:
                if is_alive(each) and self._is_ours(each, lease):
                    self.object_id = each["Id"]
                    await self.stop_object()
        except (DockerException, requests.RequestException, OSError) as error:
            raise EngineUnavailable() from error

    async def failure_detail(self) -> str:
        """How the container ended; its last words go to the hub's log, for the admin."""
        try:
            container = await self.get_object()
            if container is None:
                return "its container was removed"
            words = await self._call("logs", self.container_id, tail=20)
        except (DockerException, requests.RequestException, OSError):
            return ""
        self.log.error(
            "The last words of %s:\n%s", self.object_name, words.decode(errors="replace").strip()
        )
        state = container["State"]
        if state["Running"]:
            return ""
        if state.get("OOMKilled"):
            return "it ran out of memory"
        return f"it exited at once with code {state['ExitCode']}"


def _ignore_failure(asked: asyncio.Future[str]) -> None:
    """Take the failure of a question whose answer nobody may come for."""
    if not asked.cancelled():
        asked.exception()


def _is_unstarted(container: dict[str, Any]) -> bool:
    """Return True for a container that was created and never started."""
    return bool(container["State"].get("Status") == "created")


def _explanation(error: Exception) -> str:
    text = getattr(error, "explanation", None) or str(error)
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return "the container engine refused it: " + " ".join(str(text).split())[:300]
