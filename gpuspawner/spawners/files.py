"""What a container's spawner knows of files: the workspace with its quota, and shared folders."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from docker.errors import ImageNotFound
from jinja2 import Environment as Templates
from jinja2 import PackageLoader
from jupyterhub.traitlets import ByteSpecification, Callable
from traitlets import Unicode, Union

from ..broker.folders import FolderMount
from ..errors import GPUSpawnerError, WorkspaceFull
from ..model import Request
from ..workspaces.measure import PATIENCE
from ..workspaces.sizes import format_bytes
from .mixin import GPUSpawnerMixin
from .removal import forget_folders
from .storage import Storage

_templates = Templates(
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
            self.broker.use_of, self.workspace_source, quota, PATIENCE
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
            use = await self.broker.run_outside(self.broker.use_of, self.workspace_source, quota)
        except GPUSpawnerError:
            return ""  # the form itself says what does not answer
        told = _templates.get_template("files.html")
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
        if not self.broker.folder_source:
            return
        forget_folders(self.authenticator, self.broker)
        found = await self.broker.run(self.broker.folder_mounts, self.user.name)
        self._folders = tuple(found)
