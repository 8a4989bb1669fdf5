"""How leased devices get into a container: pure builders over Docker's own API values.

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

from collections.abc import Sequence
from typing import Any

CDI_KIND = "nvidia.com/gpu"
MODES = ("cdi", "device_requests", "runtime", "none")
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
CAPABILITIES = frozenset(("gpu", "nvidia", "compute", "utility", "graphics", "video", "display"))
"""Any of these in a request for devices makes the engine hand it to NVIDIA's hook."""


def candidates(info: dict[str, Any]) -> list[str]:
    """The modes worth trying, best first, from the engine's own ``/info``.

    CDI survives what breaks the hook (a ``systemctl daemon-reload``), so it comes first
    where the engine has found NVIDIA's devices. Whether the hook is on the engine's PATH
    ``/info`` does not say: only a container proves it.
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


def detect_injection(info: dict[str, Any]) -> str:
    """The first of :func:`candidates`."""
    return candidates(info)[0]


def gpu_host_config(mode: str, uuids: Sequence[str]) -> dict[str, Any]:
    """The HostConfig entries (Engine API names) that give a container exactly these devices."""
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


def gpu_environment(mode: str, uuids: Sequence[str]) -> dict[str, str]:
    """The variables that go with it. Without devices, images that bake ``all`` get ``void``."""
    return {
        VISIBLE: ",".join(uuids) if uuids else "void",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def without_gpus(host_config: dict[str, Any]) -> dict[str, Any]:
    """The HostConfig less every request for GPUs, and every GPU, that somebody else put there."""
    cleaned = dict(host_config)
    for name, is_gpu in (("DeviceRequests", _asks_for_gpus), ("Devices", _is_gpu)):
        entries = cleaned.pop(name, None) or []
        if others := [entry for entry in entries if not is_gpu(entry)]:
            cleaned[name] = others
    return cleaned


def _asks_for_gpus(request: dict[str, Any]) -> bool:
    if request.get("Driver") == "nvidia":
        return True
    if any(str(name).startswith(CDI_KIND) for name in request.get("DeviceIDs") or []):
        return True
    return any(CAPABILITIES.intersection(group) for group in request.get("Capabilities") or [])


def _is_gpu(device: dict[str, Any]) -> bool:
    return str(device.get("PathOnHost", "")).startswith("/dev/nvidia")
