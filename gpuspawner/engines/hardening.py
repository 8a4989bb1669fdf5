"""What keeps a container from its neighbours and from the machine, where nobody said otherwise:
pure rules over the Engine API's own values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    if hardening.pids and host.get("PidsLimit") is None:
        hard["PidsLimit"] = hardening.pids
    if hardening.memory and host.get("Memory") is None:
        hard["Memory"] = hardening.memory
    if hardening.oom_score_adj and host.get("OomScoreAdj") is None:
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
