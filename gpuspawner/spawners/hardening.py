"""Safe containers by default, and the settings that relax them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jupyterhub.traitlets import ByteSpecification
from traitlets import Bool, Float, Integer, List, Unicode

from ..engines.hardening import CAPABILITIES, Hardening, dangers
from .own_images import GPUDockerOwnImages


class GPUDockerHardening(GPUDockerOwnImages):
    """The part of :class:`~gpuspawner.spawners.docker.GPUDockerSpawner` for safe defaults.

    ``extra_host_config`` wins over every one of them.
    """

    if TYPE_CHECKING:
        _call: Any
        object_name: str

    capabilities = List(
        Unicode(),
        default_value=list(CAPABILITIES),
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
