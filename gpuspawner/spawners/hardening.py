"""What keeps a container from its neighbours and from the machine, where the admin said nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from traitlets import Bool, Float, Integer, List, Unicode

from .own_images import GPUDockerOwnImages

CAPABILITIES = (
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"),
)
"""What start scripts need that begin as root and change to the member's user. Of Docker's own
list go: device nodes, raw sockets, chroot, and giving capabilities to files and processes."""

HELPER = {
    "CapDrop": ["ALL"],
    "CapAdd": ["CHOWN"],
    "SecurityOpt": ["no-new-privileges"],
    "PidsLimit": 64,
    "Memory": 256 * 2**20,
}
"""For throw-away containers of ours, which run a program of the image as root."""

SOCKETS = ("docker.sock", "containerd.sock", "podman.sock")


@dataclass(frozen=True, slots=True)
class Hardening:
    """What a container gets unless its host configuration says otherwise."""

    capabilities: Sequence[str] | None = CAPABILITIES
    """None: the engine's own."""
    no_new_privileges: bool = True
    pids: int = 4096
    """Processes and threads; 0 for no limit."""
    memory: int = 0
    """Bytes; 0 for no limit."""
    oom_score_adj: int = 500


def harden(host: Mapping[str, Any], hardening: Hardening) -> dict[str, Any]:
    """The HostConfig (Engine API names) with what it does not say itself. Pure.

    A privileged container is what its admin wants it to be: only its limits are added.
    """
    hard = dict(host)
    if not host.get("Privileged"):
        if hardening.capabilities is not None and not host.get("CapDrop"):
            added = host.get("CapAdd") or []
            kept = [name for name in hardening.capabilities if name not in added]
            hard |= {"CapDrop": ["ALL"], "CapAdd": [*added, *kept]}
        said = list(host.get("SecurityOpt") or [])
        if hardening.no_new_privileges and not any(_is_about_privileges(each) for each in said):
            hard["SecurityOpt"] = [*said, "no-new-privileges"]
    if hardening.pids and not host.get("PidsLimit"):
        hard["PidsLimit"] = hardening.pids
    if hardening.memory and not host.get("Memory"):
        hard["Memory"] = hardening.memory
    if hardening.oom_score_adj and not host.get("OomScoreAdj"):
        hard["OomScoreAdj"] = hardening.oom_score_adj
    return hard


def dangers(host: Mapping[str, Any]) -> list[str]:
    """What of a HostConfig makes its member as good as root on the machine, in words."""
    found = []
    if host.get("Privileged"):
        found.append("it is privileged")
    mounts = [str(bind).split(":")[0] for bind in host.get("Binds") or []]
    mounts += [str(mount.get("Source", "")) for mount in host.get("Mounts") or []]
    if any(path.endswith(SOCKETS) for path in mounts):
        found.append("it has the socket of the container engine")
    for name in ("PidMode", "NetworkMode", "IpcMode", "UsernsMode"):
        if host.get(name) == "host":
            found.append(f"its {name} is 'host'")
    return found


def _is_about_privileges(option: str) -> bool:
    return option.startswith("no-new-privileges")


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
            if key not in self.hub_settings:
                self.hub_settings[key] = int((await self._call("info")).get("MemTotal") or 0)
            memory = int(self.hub_settings[key] * self.memory_share)
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
