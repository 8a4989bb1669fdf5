"""DockerSpawner with leases. docs/compatibility.md lists the settings that behave differently."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.utils import kwargs_from_env
from dockerspawner import DockerSpawner
from jupyterhub.traitlets import ByteSpecification
from jupyterhub.traitlets import Callable as CallableTrait
from traitlets import Bool, CaselessStrEnum, Dict, Float, Integer, List, Unicode, Union

from ..catalog.models import Environment
from ..core.errors import EngineUnavailable, GPUSpawnerError, StartFailed
from ..engines.base import LABEL_LEASE
from ..engines.disk_usage import size
from ..engines.docker import (
    DockerEngine,
    belongs_to,
    foreign_holder,
    is_alive,
    lease_of,
    sighting_of,
)
from ..engines.injection import KEPT_CAPABILITIES, MODES, Hardening, dangers
from ..engines.scratch import Scratch, archive_of
from ..leases.models import Lease, Request
from ..monitoring.last_sample import last_sample
from ..runs.models import Run
from ..storage.shared_folders import FolderMount
from .container import (
    ENGINE_ERRORS,
    FRESH_SECONDS,
    LOOKS_AT_REMOVAL,
    PAUSE_OF_LOOKS,
    ContainerSettings,
    EngineAbilities,
    EngineCalls,
    MountedWorkspace,
    PrefetchedAnswer,
    PreparedWorkspaces,
    Storage,
    build,
    ending,
    explanation,
    is_unstarted,
    make_threads,
    with_zeros,
)
from .form import templates
from .member_images import (
    KeptImages,
    OwnImages,
    Plain,
    SavedContainer,
    check_own_image,
    judge_here,
    look_for,
    own_image_field,
    own_images,
)
from .mixin import ExitStatus, GPUSpawnerMixin, T, kept_in
from .progress import FailedSpawn, Pulls
from .recovery import forget_folders


class GPUDockerSpawner(GPUSpawnerMixin, DockerSpawner):
    """Spawner that leases GPUs to containers on this machine's Docker Engine."""

    engine_name = "docker"
    if TYPE_CHECKING:
        extra_host_config: Any
        object_name: str
        remove: bool
        template_namespace: Any

    gpu_injection = CaselessStrEnum(
        ["auto", *MODES],
        default_value="auto",
        config=True,
        help="""
        How containers get their GPUs: ``auto``, ``device_requests``, ``cdi``, ``runtime``, or
        ``none`` (only the variables are set, for simulated devices).

        ``auto`` asks the engine what it offers, and tests it once with a container. Example::

            c.GPUDockerSpawner.gpu_injection = "cdi"
        """,
    )

    shm_size = ByteSpecification(
        "8G",
        config=True,
        help="""
        The size of /dev/shm, which PyTorch's data loaders need. It is never more than
        ``mem_limit``, and takes memory only as it is used.

        An environment can set another size, and ``extra_host_config`` wins over both. Example::

            c.GPUDockerSpawner.shm_size = "16G"
        """,
    )

    workspace = Unicode(
        "",
        config=True,
        help="""
        Where a member's own files are kept: a named volume or, if this starts with "/", a directory
        of the host. It is created with the right owner and mounted at ``workspace_target``. Empty:
        no workspace, only what ``volumes`` mounts.

        ``{username}`` is the member's name made safe for Docker, as in ``volumes``. Example::

            c.GPUDockerSpawner.workspace = "gpuspawner-work-{username}"
            c.GPUDockerSpawner.workspace = "/srv/workspaces/{username}"
        """,
    )

    workspace_target = Unicode(
        "/home/jovyan/work",
        config=True,
        help="""
        Where the workspace is in the container.

        Example::

            c.GPUDockerSpawner.workspace_target = "/home/jovyan/work"
        """,
    )

    workspace_quota = Union(
        [CallableTrait(), ByteSpecification()],  # in this order: the latter fails on callables
        default_value=0,
        config=True,
        help="""
        How much a member's workspace may hold: a size, or a callable that takes the spawner. 0: no
        limit. ``group_overrides`` can set it for a group.

        The file system enforces it (XFS project quotas), so ``workspace`` must be a directory of
        the host. Example::

            c.GPUDockerSpawner.workspace_quota = "50G"
        """,
    )

    own_images = Dict(
        config=True,
        help="""
        Which groups may use images of their own, and which images; ``"*"`` is everybody. By default
        nobody may.

        ``images`` are patterns (``*`` matches anything but a slash, ``**`` slashes too), ``most``
        is the maximum size on the disk, and ``labels`` are labels that the image must have, such as
        those of your scanner. Containers must be removed when they stop
        (``c.DockerSpawner.remove = True``). Example::

            c.GPUDockerSpawner.own_images = {
                "research": {"images": ["lab/**"], "most": "20G", "labels": {"scanned": "yes"}},
            }
        """,
    )

    capabilities = List(
        Unicode(),
        default_value=list(KEPT_CAPABILITIES),
        allow_none=True,
        config=True,
        help="""
        Linux capabilities of root in a container. Users other than root have none.

        The default is what start scripts need if they begin as root. Set ``[]`` if your images do
        not begin as root, or ``None`` to leave it to the engine. If ``extra_host_config`` has
        ``cap_drop``, that is used instead; its ``cap_add`` is added. Example::

            c.GPUDockerSpawner.capabilities = []
        """,
    )

    no_new_privileges = Bool(
        True,
        config=True,
        help="""
        Keep programs in a container from gaining privileges by setuid bits. ``sudo`` then does not
        work. On by default.

        Turn it off if members may use ``sudo`` (``GRANT_SUDO`` of the docker-stacks images).
        Example::

            c.GPUDockerSpawner.no_new_privileges = False
        """,
    )

    pids_limit = Integer(
        4096,
        min=0,
        config=True,
        help="""
        Processes and threads that a container may have at once; 0 for no limit.

        Example::

            c.GPUDockerSpawner.pids_limit = 16384
        """,
    )

    memory_share = Float(
        0.9,
        min=0.0,
        max=1.0,
        config=True,
        help="""
        The share of the machine's memory, from 0 to 1, that a server may use if neither
        ``mem_limit`` nor its environment sets a limit. 0: no limit.

        Example::

            c.GPUDockerSpawner.memory_share = 0.5
        """,
    )

    disk_limit = ByteSpecification(
        "10G",
        config=True,
        help="""
        How much a server may write into its own container, outside of its workspace and all other
        mounts. 0: no limit.

        If the engine's storage driver can enforce this (overlay2 on XFS with ``pquota``, btrfs,
        zfs), the server finds no space left beyond it. Otherwise the accounting service stops a
        server that has written more, and tells its member. ``gpuspawner check`` says which applies.
        If containers are kept (``remove = False``), each start counts from zero. ``storage_opt`` in
        ``extra_host_config`` wins. Example::

            c.GPUDockerSpawner.disk_limit = "50G"
        """,
    )

    scratch_size = ByteSpecification(
        0,
        config=True,
        help="""
        The size of the scratch directory that each session and run gets: fast local disk, deleted
        with everything in it at the end. Members are told so. 0: none. ``group_overrides`` can set
        it for a group.

        It is a volume of the engine, on the disk of the engine's data. That must be XFS mounted
        with ``pquota`` for the size to be enforced; ``gpuspawner check`` says whether it is. There
        is none if containers are kept (``remove = False``). Example::

            c.GPUDockerSpawner.scratch_size = "200G"
        """,
    )

    scratch_target = Unicode(
        "/scratch",
        config=True,
        help="""
        Where the scratch directory is in the container. Programs find it in ``GPUSPAWNER_SCRATCH``.

        Example::

            c.GPUDockerSpawner.scratch_target = "/scratch"
        """,
    )

    _changing: asyncio.Future[Any] | None = None
    _last_alone: tuple[float, str, str] | None = None
    """When the engine reported that nothing but this container, which had ended, could hold the
    lease's devices; and the ids of the container and the lease."""
    _removed = ""
    _removal: asyncio.Future[None] | None = None
    _inspection: dict[str, Any] | None = None
    """What the engine answered when DockerSpawner asked for the address of the container."""
    _kept = SavedContainer()
    _plain: Plain | None = None
    _folders: tuple[FolderMount, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # DockerSpawner's own method, without what this class adds to it.
        self.calls = EngineCalls(super().docker, lambda: self.client, lambda: self.executor)
        # Queried in parallel with the other queries before the container is created.
        self._identity = PrefetchedAnswer(lambda: self.calls.ask(self.server_engine().identity))
        super().__init__(*args, **kwargs)

    @property
    def own_form_traits(self) -> tuple[str, ...]:
        """Traits that, once configured, put the spawner's own form above ours.

        With a catalog, which defines the images, ``allowed_images`` is not one of them.
        """
        if self.catalog:
            return ("options_form",)
        return ("options_form", "allowed_images", "image_whitelist")  # the last is an old name

    # Docker calls, which do not block each other.

    @property
    def executor(self) -> ThreadPoolExecutor:
        """The thread pool for the Docker calls of this hub."""
        return self.shared("gpuspawner_docker_threads", make_threads)

    @property
    def engine_settings(self) -> MutableMapping[str, Any]:
        """The cache for this server's engine, shared by all servers on it."""
        return self.hub_settings

    def of_engine(self, key: str, make: Callable[[], T]) -> T:
        """Return the object under ``key`` in the engine's cache, creating it on first use."""
        return kept_in(self.engine_settings, key, make)

    @property
    def abilities(self) -> EngineAbilities:
        """What this server's engine supports."""
        return self.of_engine("gpuspawner_abilities", lambda: EngineAbilities(self.log))

    @property
    def client(self) -> docker.APIClient:
        """The client for DockerSpawner's own calls; the first one per engine is kept.

        In DockerSpawner, concurrent threads each replace a class attribute with their own client.
        CPython crashes if a thread still uses the previous one.
        """
        kept = self.engine_settings
        made: docker.APIClient | None = kept.get("gpuspawner_docker_client")
        return made or kept.setdefault("gpuspawner_docker_client", self.connect())

    def connect(self, timeout: float = 60) -> docker.APIClient:
        """Return a new client with the spawner's settings."""
        settings: dict[str, Any] = {"version": "auto", "timeout": timeout}
        if self.tls_config:
            settings["tls"] = docker.tls.TLSConfig(**self.tls_config)
        settings.update(kwargs_from_env())
        settings.update(self.client_kwargs)
        return docker.APIClient(**settings)

    def engine(self) -> DockerEngine:
        """Return this machine's Docker Engine."""
        return self.of_engine(
            "gpuspawner_docker_engine",
            lambda: DockerEngine(self.connect, lambda: self.services.time.stamp_error),
        )

    def server_engine(self) -> DockerEngine:
        """Return the engine that runs this server."""
        return self.engine()

    def docker(self, method: str, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Make a Docker call in a thread; the server's container gets the lease applied.

        As in DockerSpawner, the call is under way when this returns, so a hook need not await it.
        """
        return asyncio.ensure_future(self._docker_call(method, *args, **kwargs))

    async def _docker_call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "create_container" and self._plain:
            return await self.calls.call(method, *args, **self._plain.applied(kwargs))
        if method == "create_container" and not args:
            # DockerSpawner passes the server's image by name, and the image of its certificate
            # helper by position: the helper gets neither lease nor workspace.
            kwargs, _ = await asyncio.gather(self._built(kwargs), self._note_engine())
            self.touched = True
            kwargs = self.placed(kwargs)
        elif method != "start":
            answer = await self.calls.call(method, *args, **kwargs)
            if method == "inspect_container" and self._is_starting:
                self._inspection = answer
            return answer
        # The call outlives a cancelled spawn. Keep a reference, so that the release waits for
        # it and sees its result.
        self.touched = True
        self._changing = asyncio.ensure_future(self.calls.call(method, *args, **kwargs))
        return await asyncio.shield(self._changing)

    def placed(self, create: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``create_container``, adapted to where the server runs."""
        return create

    async def _built(self, create: dict[str, Any]) -> dict[str, Any]:
        create["host_config"] = self._with_own_zeros(create.get("host_config") or {})
        await self._find_folders()
        create = build(create, self._held(), await self._container_settings())
        for danger in dangers(create["host_config"]):
            self.log.warning(
                "%s is as good as root on this machine: %s (extra_host_config, volumes)",
                self.object_name,
                danger,
            )
        await self.storage().prepare(self.image)
        return create

    async def _note_engine(self) -> None:
        """Record which engine gets the container, unless the lease already names it."""
        lease = self._held()
        identity = await self._identity.take()
        if identity != lease.engine_id:
            self.services.leases.engine_ids[lease.engine] = identity
            await self.services.run(self.services.leases.note_engine, lease.id, identity)
            self.lease = replace(lease, engine_id=identity)

    def _held(self) -> Lease:
        if self.lease is None:
            raise StartFailed(cause="it holds no lease")
        return self.lease

    async def _container_settings(self) -> ContainerSettings:
        calls, share = self.calls, self.memory_share
        chosen = self.chosen.shm_size if self.chosen else None
        starts_from = self._kept.image or self.image
        mounted = self.storage().binds()
        taken = {bind.split(":")[1] for bind in mounted}
        # An image that was kept may declare volumes where this start mounts the member's files.
        kept = [bind for bind in self._kept.binds if bind.split(":")[1] not in taken]
        return ContainerSettings(
            injection=await self._injection_mode(self._held().uuids),
            shm_size=chosen or self.shm_size,
            ulimits=await self.abilities.ulimits(calls, self.image),
            binds=[*mounted, *kept],
            image=self._kept.image,
            environment=self.with_lease_environment({}),
            hardening=Hardening(
                capabilities=self.capabilities,
                no_new_privileges=self.no_new_privileges,
                pids=self.pids_limit,
                memory=int(await self.abilities.memory(calls) * share) if share else 0,
            ),
            disk=await self.abilities.disk_limit(calls, starts_from, int(self.disk_limit)),
            scratch=await self._scratch(),
        )

    async def _scratch(self) -> Scratch | None:
        if not self.has_scratch:
            return None
        limit = int(self.scratch_size)
        return await self.abilities.scratch(self.calls, self.scratch_target, limit)

    @property
    def has_scratch(self) -> bool:
        """True if this start has a scratch directory: its container is removed with it."""
        return bool(self.scratch_size) and self.remove

    async def _injection_mode(self, uuids: Sequence[str]) -> str:
        if self.gpu_injection != "auto":
            return str(self.gpu_injection)
        if not uuids:
            return "none"
        look = await self.services.read(self.services.devices.look)
        if look.inventory.source == "simulated":
            return "none"
        return await self.abilities.injection(self.calls, self.image, uuids[0], self.said.say)

    # The member's files.

    @property
    def workspace_source(self) -> str:
        """This member's workspace: a directory of the host, a volume's name, or empty."""
        try:
            return self.workspace.format(**self.template_namespace())
        except (ValueError, KeyError):
            return self.workspace  # as DockerSpawner does with volumes

    @property
    def _kept_folder(self) -> str:
        """Where in the container files are kept; empty for nowhere."""
        return self.workspace_target if self.workspace_source else ""

    @property
    def _workspace(self) -> MountedWorkspace:
        quota = int(self._value_of("workspace_quota"))
        return MountedWorkspace(self.workspace_source, self.workspace_target, quota)

    def looks_first(self, request: Request) -> bool:
        """Return True if the member's files or image must be checked before asking for a lease.

        Only a start with a GPU needs free space; an image of the member's own is always checked.
        """
        return bool(self.own_image or (request.devices and self._workspace.is_limited))

    async def look_at_files(self, request: Request) -> None:
        """Refuse a GPU start with a full workspace, and an own image that cannot be used.

        A server without a GPU starts anyway, so that its member can make room. Raises
        WorkspaceFull, ImageUnavailable or NotAllowed.
        """
        if request.devices:
            await self._workspace.require_room(self.services)
        if own := self.own_image:
            await self.services.run_outside(look_for, self.connect, own, self._own_rules())

    async def get_options_form(self) -> str:
        """Return the spawn form, with optional parts around it.

        Above it is a line about the member's files if they have a limit, and one about the scratch
        directory if there is one; below it a field for an own image if the member's groups may
        bring one.
        """
        form = await super().get_options_form()
        files = ""
        workspace = await self.spawn_form.within_group_limits(lambda: self._workspace)
        if workspace.is_limited:
            with suppress(GPUSpawnerError):  # the form itself reports the problem
                files = await workspace.line(self.services)
        files += await self.spawn_form.within_group_limits(self._scratch_line)
        return files + form + self._own_image_field()

    def _scratch_line(self) -> str:
        if not self.has_scratch:
            return ""
        return templates.get_template("scratch.html").render(
            target=self.scratch_target,
            limit=size(int(self.scratch_size)),
            kept=self._kept_folder,
        )

    def storage(self) -> Storage:
        """Return what this start mounts."""
        chosen = cast("Environment", self.chosen)
        mounts = self.load_catalog().mounts_for(chosen, self.group_names)
        return replace(self._storage_of(self._workspace), mounts=mounts, folders=self._folders)

    def _storage_of(self, workspace: MountedWorkspace) -> Storage:
        return Storage(
            services=self.services,
            docker=self.docker,
            calls=self.calls,
            prepared=self.shared("gpuspawner_workspaces", PreparedWorkspaces),
            log=self.log,
            user=self.user.name,
            workspace=workspace,
        )

    async def open_workspace(self) -> None:
        """Create the workspace, and give it to the user of the default environment's image.

        If that image is not here yet, its user is unknown, and the first start does this instead.
        """
        if not self.workspace_source:
            return
        environment = self.load_catalog().default_for(self.group_names)
        image = environment.image or self.image
        workspace = await self.spawn_form.within_group_limits(lambda: self._workspace)
        with suppress(ImageNotFound):
            await self.calls.call("inspect_image", image)
            await self._storage_of(workspace).prepare(image)

    async def _find_folders(self) -> None:
        services = self.services
        if services.settings.folders.source:
            forget_folders(self.authenticator, services)
            find = services.shared_folders.folder_mounts
            self._folders = tuple(await services.run(find, self.user.name))

    # The member's own image.

    @property
    def own_image(self) -> str:
        """The member's own image that this start asks for; empty for none."""
        return self.choice.own_image or ""

    def resolve_options(self) -> tuple[Environment, Request]:
        """Additionally verify that the member may use their own image. Raises NotAllowed."""
        resolved = super().resolve_options()
        if own := self.own_image:
            check_own_image(own, self._own_rules())
        return resolved

    def _own_rules(self) -> list[OwnImages]:
        """Return the member's rules for own images.

        The list is empty if containers are kept: they belong to the environment's image.
        """
        return own_images(self.own_images, self.group_names) if self.remove else []

    def _own_image_field(self) -> str:
        try:
            last = self.spawn_form.last_choice().own_image or ""
            return own_image_field(self._own_rules(), last)
        except GPUSpawnerError as error:
            self.log.error("%s", error.message)
            return ""

    # Start.

    async def start(self) -> Any:
        """Start as DockerSpawner does, and explain every failure in words."""
        with self.in_words():
            return await self._start()

    async def _start(self) -> Any:
        try:
            if self._removal is not None:
                await asyncio.wait([self._removal])
            self._kept = SavedContainer() if self.remove else await self._keep()
            self._identity.ask()
            return await super().start()
        except DockerException as error:
            self.log.error("%s did not start: %s", self.server_ref, error)
            is_missing = isinstance(error, ImageNotFound)
            missing = f"the image {self.image} is not on this machine"
            cause = missing if is_missing else explanation(error)
            raise FailedSpawn(StartFailed(cause=cause)) from error
        except OSError as error:
            self.log.error("The Docker Engine is not responding: %s", error)
            raise FailedSpawn(EngineUnavailable()) from error

    async def _keep(self) -> SavedContainer:
        """Turn the server's old container into an image, and return what to start from."""
        old = await self.get_object()
        if old is not None:
            self.said.say("Keeping what you installed last time", 12)
            if old["State"]["Running"]:
                await self.stop_object()
        return await self._kept_images.keep(old, self.lease.environment if self.lease else "")

    @property
    def _kept_images(self) -> KeptImages:
        return KeptImages(self.docker, self.connect, self.object_name)

    def apply_environment(self, environment: Any) -> None:
        """Additionally set the image: the member's own if they chose one, else the environment's.

        Without either, the image that the admin configured stays.
        """
        super().apply_environment(environment)
        if image := self.own_image or environment.image:
            self.image = image

    async def pull_image(self, image: str) -> None:
        """Pull as DockerSpawner does, but with progress and without blocking other calls."""
        await self._pull(image)
        if own := self.own_image:  # check size and labels; an image that is not allowed is removed
            await self.services.run_outside(judge_here, self.connect, own, self._own_rules())

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
        pulls = self.of_engine("gpuspawner_pulls", lambda: Pulls(self.connect))
        await pulls.pull(image, lambda message: self.said.say(message, 20))

    async def create_object(self) -> Any:
        """Create the container, after evaluating the admin's ``extra_host_config`` once."""
        self.said.say("Creating the container", 50)
        configured = self.extra_host_config
        host = configured(self) if callable(configured) else configured
        if inspect.isawaitable(host):
            host = await host
        self.extra_host_config = host
        try:
            created = await super().create_object()
        finally:
            self.extra_host_config = configured
        if self.has_scratch and created:
            place, archive = archive_of(self.scratch_target, self._kept_folder)
            await self.calls.call("put_archive", created[self.object_id_key], place, archive)
        return created

    def _with_own_zeros(self, host: dict[str, Any]) -> dict[str, Any]:
        """Return the HostConfig with every 0 that the admin set; see :func:`with_zeros`."""
        configured = self.extra_host_config
        said = {} if callable(configured) else configured  # callable only in a hook's own call
        in_catalog = self.chosen is not None and self.chosen.mem_limit is not None
        return with_zeros(host, said, memory=self.is_configured("mem_limit") or in_catalog)

    async def start_object(self) -> None:
        """Start the container, and report it to the member."""
        self.said.say("Starting the container", 60)
        await super().start_object()

    async def stop_object(self) -> None:
        """Stop the container. Its removal afterwards does not count as the member's time.

        While the engine has the ended container, its list proves what else may hold the devices,
        since no other engine has a container with this id. After the removal, the engine
        would have to be identified.
        """
        async with self._last_sample():
            await super().stop_object()
        self.stopped_at = self.services.clock()
        container_id, asked_at = self.container_id, time.monotonic()
        self._last_alone, self._removed = None, ""
        if self.remove and self.lease is not None and not self._is_changing():
            with suppress(*ENGINE_ERRORS, EngineUnavailable):
                question = self.server_engine().is_only_holder
                if await self.calls.ask(question, container_id, self.lease, self.object_name):
                    self._last_alone = asked_at, container_id, self.lease.id
                    return  # the removal shows when it ended
        if (container := await self._inspected()) is not None:
            self.finished_at = sighting_of(container).ended_at

    def _last_sample(self) -> AbstractAsyncContextManager[None]:
        lease, container_id = self.lease, self.container_id
        if lease is None or not container_id or lease.engine_ref != container_id:
            return nullcontext()  # such as the container of an earlier lease
        return last_sample(self.services, self.server_engine(), lease.id, container_id)

    async def remove_object(self) -> None:
        """Remove the container as DockerSpawner does, unless it is already being removed.

        The engine first marks it dead, and nobody can start it again: a stop does not wait until
        the engine has deleted the files as well, but the next start of the server does.
        """
        container_id = self.object_id
        removal = asyncio.ensure_future(self._remove(container_id))
        if self._last_alone is not None and self._last_alone[1] == container_id:
            for _ in range(LOOKS_AT_REMOVAL):
                await asyncio.wait([removal], timeout=PAUSE_OF_LOOKS)
                container = None if removal.done() else await self._inspected(container_id)
                if container is None:
                    break
                self.finished_at = sighting_of(container).ended_at
                if container["State"].get("Dead"):
                    self._removed, self._removal = container_id, removal
                    removal.add_done_callback(self._note_removal)
                    return
        await removal
        left = await self._inspected(container_id)
        if left is not None and left["State"].get("Dead"):  # an earlier stop is removing it
            with suppress(*ENGINE_ERRORS):
                await self.calls.call("wait", container_id, condition="removed")

    def _note_removal(self, removal: asyncio.Future[None]) -> None:
        if not removal.cancelled() and (error := removal.exception()) is not None:
            self.log.warning("The container of %s is left: %s", self.server_ref, error)

    runs_programs = True

    def become_run(self, run: Run) -> None:
        """Start a run: its container is removed when it has ended, whatever servers' are."""
        super().become_run(run)
        self.remove = True

    async def get_ip_and_port(self) -> tuple[str, int]:
        """Return the server's address. A run has none, and may have ended already."""
        if self.run is not None:
            return "", self.port
        address: tuple[str, int] = await super().get_ip_and_port()
        return address

    async def engine_started_at(self) -> datetime | None:
        """Return when the container was started, by the engine's clock; None if unknown."""
        container, self._inspection = self._inspection, None
        if container is None or container["Id"] != self.container_id or not is_alive(container):
            container = await self._inspected()
        return sighting_of(container).started_at if container else None

    async def _inspected(self, container_id: str = "") -> dict[str, Any] | None:
        """Return the container as the engine describes it; None if it is gone or unknown."""
        with suppress(*ENGINE_ERRORS):
            return await self._inspect(container_id or self.container_id)
        return None

    async def create_plain(self, plain: Plain) -> None:
        """Create the container as DockerSpawner alone would, without starting it."""
        self._plain = plain
        try:
            await DockerSpawner.create_object(self)
        finally:
            self._plain = None

    def get_env(self) -> dict[str, str]:
        """Return the server's environment; DockerSpawner's alone for a plain container."""
        env: dict[str, str] = DockerSpawner.get_env(self) if self._plain else super().get_env()
        if self.workspace_source:
            env["GPUSPAWNER_WORKSPACE"] = self.workspace_target
        if self.has_scratch and not self._plain:
            env["GPUSPAWNER_SCRATCH"] = self.scratch_target
        return env

    async def _release(self, reason: str) -> bool:
        released = await super()._release(reason)
        if self.lease is None and self.lease_id and self.remove:
            await self._remove_settled()
        if released and not self.remove:
            try:
                await self._kept_images.leave_plain(await self.get_object(), self.create_plain)
            except ENGINE_ERRORS as error:
                self.log.warning("%s is kept as it ended: %s", self.object_name, error)
        return released

    async def _remove_settled(self) -> None:
        """Remove the ended container of a lease that the accounting service settled.

        The service does that if the hub was killed during a stop, and leaves the container. By
        then a container of somebody else may have its name: the label decides.
        """
        try:
            container = await self._find_own()
            if container is None or lease_of(container) != self.lease_id or is_alive(container):
                return
            await self._remove(container["Id"])
        except (DockerException, requests.RequestException, OSError) as error:
            self.log.warning("The container of %s is left: %s", self.server_ref, error)

    def engine_ref(self) -> str:
        """Return the container's id; empty if there is none."""
        return self.container_id or ""

    async def get_url(self) -> str:
        """Return the server's address, as Docker reports it if possible.

        A hub that was killed during the start did not record the address.
        """
        try:
            return self._server_url(await self.get_ip_and_port()).removesuffix("api")
        except (*ENGINE_ERRORS, RuntimeError) as error:
            self.log.warning("Cannot see where %s is: %s", self.server_ref, error)
            url: str = await super().get_url()
            return url

    @property
    def will_resume(self) -> bool:
        """False: every start creates a new container, so the old token must be revoked."""
        return False

    # Container states, and proof that a server is gone.

    async def get_object(self) -> Any:
        """Return the server's container like DockerSpawner, or None if it is gone.

        Only a 404 means gone, other errors are raised. A container of this lease that was renamed
        is found by its id and label.
        """
        container = await self._inspect(self.object_name)
        if self.lease_id and self.touched and not self._is_own(container):
            container = await self._find_own() or container
        self.object_id = container[self.object_id_key] if container else ""
        return container

    def _is_own(self, container: dict[str, Any] | None) -> bool:
        if container is None:
            return False
        return lease_of(container) == self.lease_id or container["Id"] == self._known_id

    @property
    def _known_id(self) -> str:
        """The id of the server's container, in the lease or found last; empty if unknown."""
        return (self.lease.engine_ref if self.lease else "") or self.object_id or ""

    async def _find_own(self) -> dict[str, Any] | None:
        """Return the container of this server's lease, whatever its name; a living one first."""
        wanted = {"label": f"{LABEL_LEASE}={self.lease_id}"}
        listed = await self.calls.call("containers", all=True, filters=wanted)
        ids = dict.fromkeys([*(each["Id"] for each in listed), self._known_id])
        found = [state for ref in ids if ref and (state := await self._inspect(ref))]
        return next((each for each in found if is_alive(each)), found[0] if found else None)

    async def _inspect(self, ref: str) -> dict[str, Any] | None:
        """Return a container by its name or id; None if the engine has none (404)."""
        try:
            container: dict[str, Any] = await self.calls.call("inspect_" + self.object_type, ref)
        except NotFound:
            return None
        return container

    async def poll(self) -> Any:
        """Return the exit status; None while the server lives or its state is unknown."""
        await self.cleared()
        if not self.touched and self.pending != "spawn":
            return 0  # refused before anything was created
        asked_at = self.services.clock()  # it may have ended by the time that the answer is here
        try:
            status = await super().poll()
        except ENGINE_ERRORS as error:
            self.log.warning("Cannot see whether %s lives: %s", self.server_ref, error)
            return None
        if status is None:
            self.seen_alive_at = asked_at
        return status

    async def prove_gone(self) -> ExitStatus:
        """Check whether the server is gone. Raises EngineUnavailable if that is unknown.

        It is gone if no living container may hold the lease, by its label, recorded id, name or
        devices. Only exits and absence count as proof.
        """
        if not self.touched or self.lease is None:
            return ExitStatus(gone=True)
        if self._changing is not None and self._is_changing():
            await asyncio.wait([self._changing])
        lease = self.lease
        if self._was_last(lease):
            return ExitStatus(gone=True)
        try:
            found = await self._holders(lease)
            living = [each for each in found if is_alive(each) and not is_unstarted(each)]
            if living:
                return ExitStatus(gone=False, detail=self._why_not_gone(living, lease))
            own = [each for each in found if belongs_to(each, lease)]
            for each in own:
                if self.remove or is_unstarted(each):
                    await self._remove(each["Id"])
            if not own:  # removed or never created; an older container may have the name
                return ExitStatus(gone=True, ended_at=await self._died_at())
        except ENGINE_ERRORS as error:
            raise EngineUnavailable() from error
        ends = [sighting_of(each) for each in own]
        last = max((end.ended_at for end in ends if end.ended_at), default=None)
        detail = next((end.detail for end in ends if end.detail), "")
        return ExitStatus(gone=True, ended_at=last, detail=detail)

    def _was_last(self, lease: Lease) -> bool:
        """Return True if only the lease's own ended container could hold the lease's devices.

        The engine must have reported that just before this spawner removed the container. The
        report is used once: the next call needs a new query.
        """
        last, self._last_alone = self._last_alone, None
        if last is None or time.monotonic() - last[0] > FRESH_SECONDS:
            return False
        return last[1:] == (self._removed, lease.id)

    def _is_changing(self) -> bool:
        return self._changing is not None and not self._changing.done()

    async def _holders(self, lease: Lease) -> list[dict[str, Any]]:
        return await self.calls.ask(self.server_engine().holders, lease, self.object_name)

    def _is_ours(self, container: dict[str, Any], lease: Lease) -> bool:
        """Return True if the container is the lease's own or has this server's name."""
        return belongs_to(container, lease) or container["Name"] == f"/{self.object_name}"

    def _why_not_gone(self, living: list[dict[str, Any]], lease: Lease) -> str:
        foreign = [each for each in living if not self._is_ours(each, lease)]
        return foreign_holder(foreign[0], lease) if foreign else "its container lives"

    async def _remove(self, container_id: str) -> None:
        """Remove an ended container, unless it is gone or already being removed."""
        self.log.info("Removing the container %s of %s", container_id[:12], self.server_ref)
        try:
            await self.calls.call("remove_container", container_id, v=True)
            self._removed = container_id
        except APIError as error:
            if error.status_code not in (404, 409):
                raise

    async def _died_at(self) -> datetime | None:
        lease = self.lease
        if lease is None or not lease.engine_ref or self.stopped_at:
            return None
        return await self.calls.ask(self.server_engine().died_at, lease.engine_ref)

    async def end_leftover(self) -> None:
        """End every living container of this server, by its id. Raises EngineUnavailable.

        A container that only shares a device with it is left alone.
        """
        lease = self._held()
        try:
            found = await self._holders(lease)
            for each in found:
                if is_alive(each) and self._is_ours(each, lease):
                    self.object_id = each["Id"]
                    await self.stop_object()
        except ENGINE_ERRORS as error:
            raise EngineUnavailable() from error

    async def failure_detail(self) -> str:
        """Describe how the container ended, and log its last output for the admin."""
        try:
            container = await self.get_object()
            if container is None:
                return "its container was removed"
            words = await self.calls.call("logs", self.container_id, tail=20)
        except ENGINE_ERRORS:
            return ""
        self.log.error(
            "The last output of %s:\n%s", self.object_name, words.decode(errors="replace").strip()
        )
        return ending(container)
