"""Arguments of containers: GPU injection and hardening. Pure.

======================  ==================================================================
mode                    what it needs
======================  ==================================================================
``cdi``                 Engine 25 or later, a CDI specification that names the devices
``device_requests``     NVIDIA's hook on the engine's PATH (``docker run --gpus``)
``runtime``             a runtime named ``nvidia`` registered with the engine
``none``                nothing is injected: simulated devices
======================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEPT_CAPABILITIES = (
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"),
)
"""What start scripts need that begin as root and switch to the member's user.

Of Docker's default list these are removed: device nodes, raw sockets, chroot, and giving
capabilities to files and processes.
"""

HELPER = {
    "CapDrop": ["ALL"],
    "CapAdd": ["CHOWN"],
    "SecurityOpt": ["no-new-privileges"],
    "PidsLimit": 64,
    "Memory": 256 * 2**20,
}
"""For our short-lived containers, which run a program of the image as root."""

SOCKETS = ("docker.sock", "containerd.sock", "podman.sock")


OOM_SCORE_ADJ = 500
"""Half of the kernel's scale: when the machine is out of memory, members' programs end before those
of the hub, the database and the engine, which have 0."""


@dataclass(frozen=True, slots=True)
class Hardening:
    """Restrictions of a container, unless its host configuration sets them."""

    capabilities: Sequence[str] | None = KEPT_CAPABILITIES
    """None: the engine's default."""
    no_new_privileges: bool = True
    pids: int = 4096
    """Processes and threads; 0 for no limit."""
    memory: int = 0
    """Bytes; 0 for no limit."""


def harden(host: Mapping[str, Any], hardening: Hardening) -> dict[str, Any]:
    """Return the HostConfig (Engine API names) with restrictions that it does not set itself.

    For a privileged container, which is the admin's decision, only limits are added. Pure.
    """
    hard = dict(host)
    if not host.get("Privileged"):
        if hardening.capabilities is not None and not host.get("CapDrop"):
            added = host.get("CapAdd") or []
            kept = [name for name in hardening.capabilities if name not in added]
            hard |= {"CapDrop": ["ALL"], "CapAdd": [*added, *kept]}
        said = list(host.get("SecurityOpt") or [])
        has_said = any(option.startswith("no-new-privileges") for option in said)
        if hardening.no_new_privileges and not has_said:
            hard["SecurityOpt"] = [*said, "no-new-privileges"]
    limits = {
        "PidsLimit": hardening.pids,
        "Memory": hardening.memory,
        "OomScoreAdj": OOM_SCORE_ADJ,
    }
    hard |= {name: limit for name, limit in limits.items() if limit and host.get(name) is None}
    return hard


def dangers(host: Mapping[str, Any]) -> list[str]:
    """Describe what makes a HostConfig's member as powerful as root on the machine."""
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


CDI_KIND = "nvidia.com/gpu"
MODES = ("cdi", "device_requests", "runtime", "none")
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
GPU_CAPABILITIES = frozenset(
    ("gpu", "nvidia", "compute", "utility", "graphics", "video", "display")
)
"""Any of these in a device request makes the engine hand it to NVIDIA's hook."""


def candidates(info: dict[str, Any]) -> list[str]:
    """Return the modes worth trying, best first, from the engine's ``/info``.

    CDI survives what breaks the hook (a ``systemctl daemon-reload``), so it comes first if the
    engine has discovered NVIDIA's devices. ``/info`` does not show if the hook is on the engine's
    PATH: only a container proves it.
    """
    found = []
    discovered = info.get("DiscoveredDevices") or []
    if any(str(device.get("ID", "")).startswith(f"{CDI_KIND}=") for device in discovered):
        found.append("cdi")
    found.append("device_requests")
    if "nvidia" in (info.get("Runtimes") or {}):
        found.append("runtime")
    if "cdi" not in found and info.get("CDISpecDirs"):
        found.append("cdi")
    return found


def gpu_host_config(mode: str, uuids: Sequence[str]) -> dict[str, Any]:
    """Return the HostConfig entries (Engine API names) that inject exactly these devices."""
    if not uuids or mode == "none":
        return {}
    if mode == "cdi":
        names = [f"{CDI_KIND}={uuid}" for uuid in uuids]
        return {"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": names}]}
    if mode == "device_requests":
        request = {"Driver": "", "DeviceIDs": list(uuids), "Capabilities": [["gpu"]]}
        return {"DeviceRequests": [request]}
    if mode == "runtime":
        return {"Runtime": "nvidia"}
    raise ValueError(f"unknown way to inject GPUs: {mode!r}")


def gpu_environment(uuids: Sequence[str]) -> dict[str, str]:
    """Return the variables that go with these devices; ``void`` overrides an image's ``all``."""
    return {
        VISIBLE: ",".join(uuids) if uuids else "void",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def without_gpus(host_config: dict[str, Any]) -> dict[str, Any]:
    """Return the HostConfig without any GPU or GPU request that somebody else added."""
    cleaned = dict(host_config)
    for name in ("DeviceRequests", "Devices"):
        entries = cleaned.pop(name, None) or []
        if others := [entry for entry in entries if not _asks_for_gpus(entry)]:
            cleaned[name] = others
    return cleaned


def _asks_for_gpus(entry: dict[str, Any]) -> bool:
    """Return True for a device request or a device that is NVIDIA's."""
    if entry.get("Driver") == "nvidia":
        return True
    if str(entry.get("PathOnHost", "")).startswith("/dev/nvidia"):
        return True
    if any(str(name).startswith(CDI_KIND) for name in entry.get("DeviceIDs") or []):
        return True
    return any(GPU_CAPABILITIES.intersection(group) for group in entry.get("Capabilities") or [])


FRAMEWORK_PART = 0.9
"""The part of a share that JAX allocates at once; the rest is for the CUDA context."""


def framework_hints(share: float) -> dict[str, str]:
    """Return variables that keep frameworks from taking the memory of a whole shared device.

    They are hints: nothing enforces them. ``share`` is the leased part of the device.
    """
    return {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share * FRAMEWORK_PART:.3f}",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
