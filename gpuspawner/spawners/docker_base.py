"""The parts of the Docker spawner: workspaces, mounts, member images and hardening."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from docker.errors import ImageNotFound, NotFound
from jinja2 import Environment as Templates
from jinja2 import PackageLoader
from jupyterhub.traitlets import ByteSpecification, Callable
from traitlets import Bool, Dict, Float, Integer, List, Unicode, Union

from ..catalog.member_images import OwnImages, check_contents, check_own_image, own_images
from ..catalog.models import Environment, Mount
from ..core.errors import GPUSpawnerError, NotAllowed, QuotaUnavailable, StartFailed, WorkspaceFull
from ..core.units import format_bytes
from ..engines.images import LocalImage, local_images, offered_digest, remove
from ..engines.injection import KEPT_CAPABILITIES, Hardening, dangers
from ..leases.models import Request
from ..storage.quotas import MEASURE_SECONDS
from ..storage.service import FolderMount
from .mixin import GPUSpawnerMixin
from .recovery import forget_folders

if TYPE_CHECKING:
    from .docker import GPUDockerSpawner


LABEL_WORKSPACE = "gpuspawner.workspace"
LABEL_FOLDER = "gpuspawner.folder"
PREPARED = "gpuspawner_workspaces"
PREPARING = "gpuspawner_workspaces_in_work"
GB = 2**30
_PLACE = "/workspace"


class Storage:
    """What is mounted, and that the workspace is there with the right owner."""

    def __init__(
        self,
        spawner: GPUDockerSpawner,
        source: str,
        target: str,
        mounts: Sequence[Mount],
        *,
        quota: int = 0,
        folders: Sequence[FolderMount] = (),
        folders_target: str = "",
    ) -> None:
        """``quota``: bytes of the workspace, 0 for no limit."""
        self.spawner = spawner
        self.source = source
        self.target = target
        self.mounts = mounts
        self.quota = quota
        self.folders = folders
        self.folders_target = folders_target.rstrip("/")

    def binds(self) -> list[str]:
        """``source:target:mode`` of everything that this server gets."""
        own = [f"{self.source}:{self.target}:rw"] if self.source else []
        others = [f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}" for m in self.mounts]
        # A folder's name has no colon in it and no slash: see storage/rules.py.
        shared = [
            f"{f.source}:{self.folders_target}/{f.name}:{'rw' if f.write else 'ro'}"
            for f in self.folders
        ]
        return own + others + shared

    async def prepare(self, image: str) -> None:
        """Make the workspace and give it to the image's user, before the server needs it.

        The same for shared folders. Raises WorkspaceBusy while an admin works on it.
        """
        broker, user = self.spawner.broker, self.spawner.user.name
        if self.source:
            quota = self.quota or None
            if await broker.run(broker.storage.use_workspace, self.source, user, quota):
                self._prepared.discard((self.source, self.quota))
            await self._prepare(self.source, self.quota, image, {LABEL_WORKSPACE: user})
        for folder in self.folders:
            labels = {LABEL_FOLDER: folder.folder_id}
            await self._prepare(folder.source, broker.settings.folders.quota * GB, image, labels)

    @property
    def _prepared(self) -> set[tuple[str, int]]:
        """What this hub has prepared already, with its quota."""
        found: set[tuple[str, int]] = self.spawner.shared(PREPARED, set)
        return found

    async def _prepare(self, source: str, quota: int, image: str, labels: dict[str, str]) -> None:
        locks: dict[str, asyncio.Lock] = self.spawner.shared(PREPARING, dict)
        # Who comes second waits until it is theirs, and does not take it half done.
        async with locks.setdefault(source, asyncio.Lock()):
            if (source, quota) not in self._prepared:
                await self._make(source, quota, image, labels)

    async def _make(self, source: str, quota: int, image: str, labels: dict[str, str]) -> None:
        directory = source.startswith("/")
        if directory or not await self._volume_exists(source, labels):
            await self._give_to_user(source, image, needed=directory and bool(quota))
        if directory:
            await self._keep_quota(source, quota)
        self._prepared.add((source, quota))

    async def _keep_quota(self, source: str, quota: int) -> None:
        broker = self.spawner.broker
        try:
            await broker.run_outside(broker.storage.keep_quota, source, quota or None)
        except QuotaUnavailable as error:  # an admin's matter, and no reason to keep a member out
            self.spawner.log.error("%s Until then nothing limits %s.", error.message, source)

    async def _volume_exists(self, source: str, labels: dict[str, str]) -> bool:
        try:
            await self.spawner.docker("inspect_volume", source)
            return True
        except NotFound:
            pass
        await self.spawner.docker("create_volume", source, labels=labels)
        return False

    async def _give_to_user(self, source: str, image: str, *, needed: bool) -> None:
        """Hand a new workspace, which Docker makes as root's, to the image's own user.

        A directory that belongs to somebody already is left as it is. ``needed``: it has to be
        there now, for its quota, also when it stays root's.
        """
        config = (await self.spawner.docker("inspect_image", image))["Config"]
        user = (config.get("User") or "").strip()
        if not user or user.split(":")[0] in ("root", "0"):
            if not needed:
                return
            user = "0"
        owner = user if ":" in user or user.isdigit() else f"{user}:"
        script = f'[ "$(stat -c %u {_PLACE})" != 0 ] || chown "$0" {_PLACE}'
        command = ["sh", "-c", script, owner]
        binds = [f"{source}:{_PLACE}:rw"]
        code, words = await self.spawner.run_helper(command, image=image, Binds=binds)
        if code:
            self.spawner.log.error("The workspace %s: %s", source, words)
            raise StartFailed(cause="your workspace could not be made yours (tell your admin)")


_workspace_templates = Templates(
    loader=PackageLoader("gpuspawner.spawners"), autoescape=True, trim_blocks=True
)


class GPUDockerFiles(GPUSpawnerMixin):
    """The part of :class:`~gpuspawner.spawners.docker.GPUDockerSpawner` that knows of files."""

    if TYPE_CHECKING:
        template_namespace: Any
        _call: Any

    workspace = Unicode(
        "",
        config=True,
        help="""
        Where a member's own files are kept: a named volume, or a directory of the host when
        it starts with "/". It is created with the right owner and mounted at
        ``workspace_target``. Empty: only what ``volumes`` says.

        ``{username}`` is the name made safe for Docker, as in ``volumes``. Example::

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
        [Callable(), ByteSpecification()],  # which fails for what has no last character
        default_value=0,
        config=True,
        help="""
        How much a member's workspace may hold; 0: no limit.

        A size, or a callable that takes the spawner; ``group_overrides`` can set it for a group.
        The file system keeps it (XFS project quotas), so ``workspace`` has to be a directory of
        the host. Example::

            c.GPUDockerSpawner.workspace_quota = "50G"
        """,
    )

    folders_target = Unicode(
        "/home/jovyan/shared",
        config=True,
        help="""
        Where the folders are in the container that members share with one another.

        Example::

            c.GPUDockerSpawner.folders_target = "/home/jovyan/shared"
        """,
    )

    _folders: tuple[FolderMount, ...] = ()

    @property
    def workspace_source(self) -> str:
        """This member's workspace: a directory of the host, a volume, or nothing."""
        try:
            return self.workspace.format(**self.template_namespace())
        except (ValueError, KeyError):
            return self.workspace  # as DockerSpawner does with volumes

    @property
    def quota_bytes(self) -> int:
        """``workspace_quota`` for this member; 0: no limit."""
        quota = self.workspace_quota
        return int(quota(self)) if callable(quota) else int(quota)

    def looks_first(self, request: Request) -> bool:
        """Only a start with a GPU needs room to work in."""
        return bool(request.devices and self.quota_bytes and self.workspace_source.startswith("/"))

    async def look_at_files(self, request: Request) -> None:
        """Refuse a start with a GPU when the workspace is full. Raises WorkspaceFull.

        Without a GPU it starts all the same: so that its member can make room.
        """
        if not GPUDockerFiles.looks_first(self, request):
            return
        quota = self.quota_bytes
        use = await self.broker.run_outside(
            self.broker.storage.use_of, self.workspace_source, quota, MEASURE_SECONDS
        )
        if use is not None and use.full:
            raise WorkspaceFull(used=format_bytes(use.used), limit=format_bytes(quota))

    async def get_options_form(self) -> str:
        """The form, below a line about the member's files when they have a limit."""
        form = await super().get_options_form()
        return await self._files_line() + form

    async def _files_line(self) -> str:
        with self._set_for_now(await self._limits_of_groups()):
            quota = self.quota_bytes
        if not quota or not self.workspace_source.startswith("/"):
            return ""
        try:
            use = await self.broker.run_outside(
                self.broker.storage.use_of, self.workspace_source, quota
            )
        except GPUSpawnerError:
            return ""  # the form itself says what does not answer
        told = _workspace_templates.get_template("files.html")
        limit = format_bytes(quota)
        return told.render(use=use, used=format_bytes(use.used) if use else "", limit=limit)

    def storage(self) -> Storage:
        """What this start mounts."""
        mounts = self.load_catalog().mounts_for(self.chosen, self.group_names)
        return Storage(
            self,
            self.workspace_source,
            self.workspace_target,
            mounts,
            quota=self.quota_bytes,
            folders=self._folders,
            folders_target=self.folders_target,
        )

    async def open_workspace(self) -> None:
        """Make the workspace, and give it to the user of the default environment's image.

        Whose image is not here yet cannot be asked for its user: then the first start does it.
        """
        if not self.workspace_source:
            return
        environment = self.load_catalog().default_for(self.group_names)
        image = environment.image or self.image
        with self._set_for_now(await self._limits_of_groups()):
            quota = self.quota_bytes
        storage = Storage(self, self.workspace_source, self.workspace_target, (), quota=quota)
        with suppress(ImageNotFound):
            await self._call("inspect_image", image)
            await storage.prepare(image)

    async def find_folders(self) -> None:
        """Find out which shared folders this start gets, as things are now."""
        if not self.broker.settings.folders.source:
            return
        forget_folders(self.authenticator, self.broker)
        found = await self.broker.run(self.broker.shared_folders.folder_mounts, self.user.name)
        self._folders = tuple(found)


_own_image_templates = Templates(
    loader=PackageLoader("gpuspawner.spawners"), autoescape=True, trim_blocks=True
)


class GPUDockerOwnImages(GPUDockerFiles):
    """The part of :class:`~gpuspawner.spawners.docker.GPUDockerSpawner` for members' images."""

    if TYPE_CHECKING:
        connect: Any
        remove: bool

    own_images = Dict(
        config=True,
        help="""
        Which groups may bring an image of their own, and which images; ``"*"`` is everybody.

        ``images`` are patterns (``*`` is anything but a slash, ``**`` slashes too), ``most`` is
        the size on the disk, ``labels`` are those that a scanner of yours gives. Containers have
        to go when they stop (``c.DockerSpawner.remove = True``). Example::

            c.GPUDockerSpawner.own_images = {
                "research": {"images": ["lab/**"], "most": "20G", "labels": {"scanned": "yes"}},
            }
        """,
    )

    @property
    def own_image(self) -> str:
        """The image of the member's own that this start asks for; empty for none."""
        return self.parse_options(self.user_options or {}).own_image or ""

    def resolve_options(self) -> tuple[Environment, Request]:
        """Also whether the member may bring the image. Raises NotAllowed."""
        resolved = super().resolve_options()
        if own := self.own_image:
            check_own_image(own, self._own_rules())
        return resolved

    def looks_first(self, request: Request) -> bool:
        """An image of the member's own is looked for before anything is leased for it."""
        return bool(self.own_image) or super().looks_first(request)

    async def look_at_files(self, request: Request) -> None:
        """Also whether its registry has the member's own image. Raises ImageUnavailable."""
        await super().look_at_files(request)
        if own := self.own_image:
            await self.broker.run_outside(self._look_for, own)

    def _own_rules(self) -> list[OwnImages]:
        """None where containers are kept: what is kept belongs to the environment's image."""
        return own_images(self.own_images, self.group_names) if self.remove else []

    def _look_for(self, reference: str) -> None:
        """Blocks. One that is here already is judged at once, before any lease."""
        client = self.connect()
        found = local_images(client, reference)
        if found is None:
            offered_digest(client, reference)
        else:
            self._judge(reference, found)

    def _judge(self, reference: str, found: LocalImage) -> None:
        rules = check_own_image(reference, self._own_rules())
        check_contents(reference, found.size, found.labels, rules)

    async def check_own_image_here(self) -> None:
        """After the pull: size and labels; what may not be used does not stay. Raises
        NotAllowed."""
        if own := self.own_image:
            await self.broker.run_outside(self._judge_here, own)

    def _judge_here(self, reference: str) -> None:
        client = self.connect()
        found = local_images(client, reference)
        if found is None:
            return  # the creation of the container says so
        try:
            self._judge(reference, found)
        except NotAllowed:
            remove(client, found)
            raise

    async def get_options_form(self) -> str:
        """The form, with a field for an own image where the member's groups have one."""
        form: str = await super().get_options_form()
        try:
            rules = self._own_rules()
        except GPUSpawnerError as error:
            self.log.error("%s", error.message)
            return form
        if not rules:
            return form
        patterns = sorted({some for rule in rules for some in rule.images})
        last = self.last_choice().own_image or ""
        return form + _own_image_templates.get_template("own_image.html").render(
            patterns=patterns, last=last
        )


class GPUDockerHardening(GPUDockerOwnImages):
    """The part of :class:`~gpuspawner.spawners.docker.GPUDockerSpawner` for safe defaults.

    ``extra_host_config`` wins over every one of them.
    """

    if TYPE_CHECKING:
        _call: Any
        object_name: str

    capabilities = List(
        Unicode(),
        default_value=list(KEPT_CAPABILITIES),
        allow_none=True,
        config=True,
        help="""
        Linux capabilities that root has in a container; a user who is not root has none.

        The default has what start scripts need that begin as root. ``[]`` is for images that
        do not, ``None`` leaves it to the engine. Where ``extra_host_config`` has ``cap_drop``,
        that counts; its ``cap_add`` is added. Example::

            c.GPUDockerSpawner.capabilities = []
        """,
    )

    no_new_privileges = Bool(
        True,
        config=True,
        help="""
        Whether programs in a container can gain nothing by setuid bits: ``sudo`` does not work.

        Where members may use ``sudo`` (``GRANT_SUDO`` of the docker-stacks images), turn it off.
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
        Part of the machine's memory that a server may have where neither ``mem_limit`` nor its
        environment says how much; 0 for no limit.

        Example::

            c.GPUDockerSpawner.memory_share = 0.5
        """,
    )

    disk_limit = ByteSpecification(
        "10G",
        config=True,
        help="""
        What a server may write into its own container, outside of its workspace and of all other
        mounts; 0 for no limit.

        Where the engine's storage driver can keep it (overlay2 on XFS with ``pquota``, btrfs, zfs)
        the server finds no space left beyond it. Elsewhere the accounting service stops a server
        that wrote more, and tells its member; ``gpuspawner check`` says which. Where containers
        are kept (``remove = False``) each start counts anew. ``storage_opt`` in
        ``extra_host_config`` wins. Example::

            c.GPUDockerSpawner.disk_limit = "50G"
        """,
    )

    oom_score_adj = Integer(
        500,
        min=0,
        max=1000,
        config=True,
        help="""
        How much sooner the kernel ends a member's program than the hub's, the database's or the
        engine's when the whole machine is out of memory; 0 makes no difference.

        Example::

            c.GPUDockerSpawner.oom_score_adj = 800
        """,
    )

    async def hardening(self) -> Hardening:
        """What this start adds to its container."""
        memory = 0
        if self.memory_share:
            key = "gpuspawner_machine_memory"
            if key not in self.engine_settings:
                self.engine_settings[key] = int((await self._call("info")).get("MemTotal") or 0)
            memory = int(self.engine_settings[key] * self.memory_share)
        return Hardening(
            capabilities=self.capabilities,
            no_new_privileges=self.no_new_privileges,
            pids=self.pids_limit,
            memory=memory,
            oom_score_adj=self.oom_score_adj,
        )

    def warn_of(self, host: Mapping[str, Any]) -> None:
        """Say in the hub's log what the admin's own settings open."""
        for danger in dangers(host):
            self.log.warning(
                "%s is as good as root on this machine: %s (extra_host_config, volumes)",
                self.object_name,
                danger,
            )
