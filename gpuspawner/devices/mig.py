"""How a GPU is divided into MIG instances, read by NVML.

Nothing here changes a GPU. NVML is open only while it is read, because an open NVML keeps others
from making and destroying instances.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_uint
from typing import Any

import pynvml

from ..core.errors import InvalidRequest, Unavailable
from ..core.text import short_text
from .models import DeviceProcess, MIGInstance, MIGPlacement, MIGProfile, MIGState
from .nvml import (
    DriverLost,
    DriverTooOld,
    QueryFailed,
    Unsupported,
    ask,
    ask_driver,
    ask_or,
    running_processes,
)

NEEDS_ROOT = (
    "NVML shows how a GPU can be divided to root only: run this as root, for example with sudo."
)


def read_mig_state(device: str) -> MIGState:
    """Read one GPU, named by its UUID or index.

    Raises InvalidRequest if there is no such GPU, and Unavailable if it does not answer.
    """
    states = read_mig_states(device)
    if not states:
        raise InvalidRequest(
            f"No GPU of this machine has the UUID or index {short_text(device)}; "
            "`gpuspawner devices` lists them.",
            field="device",
        )
    return states[0]


def read_mig_states(device: str | None = None) -> list[MIGState]:
    """Read all GPUs, or the one with this UUID or index. Raises Unavailable."""
    try:
        with _open_nvml():
            return list(_read_all(device))
    except QueryFailed as failure:
        is_forbidden = failure.code == pynvml.NVML_ERROR_NO_PERMISSION
        raise Unavailable(NEEDS_ROOT if is_forbidden else str(failure)) from failure
    except DriverLost as lost:
        raise Unavailable(str(lost)) from lost


@contextmanager
def _open_nvml() -> Iterator[None]:
    ask_driver(pynvml.nvmlInit)
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _read_all(device: str | None) -> Iterator[MIGState]:
    for index in range(ask_driver(pynvml.nvmlDeviceGetCount)):
        handle = ask("handle", pynvml.nvmlDeviceGetHandleByIndex, index)
        uuid = ask("UUID", pynvml.nvmlDeviceGetUUID, handle)
        if device in (None, uuid, str(index)):
            yield _read_gpu(handle, index, uuid)


def _read_gpu(handle: Any, index: int, uuid: str) -> MIGState:
    model = ask_or("unknown model", "name", pynvml.nvmlDeviceGetName, handle)
    modes = ask_or((0, 0), "MIG mode", pynvml.nvmlDeviceGetMigMode, handle)
    is_enabled, is_next = (mode == pynvml.NVML_DEVICE_MIG_ENABLE for mode in modes)
    state = MIGState(uuid, index, model, is_enabled, is_pending=is_enabled != is_next)
    if not is_enabled:
        return state
    profiles: list[MIGProfile] = []
    instances: list[MIGInstance] = []
    devices, processes = _read_mig_devices(handle)
    for info in _profile_infos(handle):
        profiles.append(
            MIGProfile(info.id, _name_of(info), info.instanceCount, _placements(handle, info.id))
        )
        instances += _instances(handle, info, devices)
    return MIGState(
        uuid,
        index,
        model,
        is_enabled,
        state.is_pending,
        tuple(profiles),
        tuple(sorted(instances, key=lambda instance: instance.placement)),
        processes,
    )


def _read_mig_devices(handle: Any) -> tuple[dict[int, list[str]], tuple[DeviceProcess, ...]]:
    """Return the UUIDs of the MIG devices by their instance, and all processes on the GPU."""
    found: dict[int, list[str]] = {}
    processes = {process.pid: process for process in running_processes(handle)}
    for slot in range(ask("number of instances", pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
        try:
            part = ask("instance", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
        except QueryFailed as failure:
            if failure.code != pynvml.NVML_ERROR_NOT_FOUND:  # an empty slot is no failure
                raise
            continue
        instance = ask("instance's id", pynvml.nvmlDeviceGetGpuInstanceId, part)
        found.setdefault(instance, []).append(ask("UUID", pynvml.nvmlDeviceGetUUID, part))
        processes |= {process.pid: process for process in running_processes(part)}
    return found, tuple(processes[pid] for pid in sorted(processes))


def _profile_infos(handle: Any) -> Iterator[Any]:
    """Yield what NVML says of each profile that the GPU has."""
    call = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            try:
                yield ask("MIG profiles", call, handle, number, 2)
            except DriverTooOld:
                yield ask("MIG profiles", call, handle, number, 1)
        except Unsupported:
            continue
        except QueryFailed as failure:
            # An older driver does not know the later profiles' numbers.
            if failure.code != pynvml.NVML_ERROR_INVALID_ARGUMENT:
                raise


def _name_of(info: Any) -> str:
    """Return a profile's name such as ``1g.5gb``, as nvidia-smi takes it."""
    if name := getattr(info, "name", b""):
        return str(name.decode() if isinstance(name, bytes) else name).removeprefix("MIG ")
    return f"{info.sliceCount}g.{-(-info.memorySizeMB // 1024)}gb"


def _placements(handle: Any, profile_id: int) -> tuple[MIGPlacement, ...]:
    call, count = pynvml.nvmlDeviceGetGpuInstancePossiblePlacements, c_uint()
    ask("MIG placements", call, handle, profile_id, None, byref(count))
    found = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    if count.value:
        ask("MIG placements", call, handle, profile_id, found, byref(count))
    return tuple(sorted(MIGPlacement(each.start, each.size) for each in found[: count.value]))


def _instances(handle: Any, info: Any, devices: dict[int, list[str]]) -> Iterator[MIGInstance]:
    count = c_uint(info.instanceCount)
    handles = (pynvml.c_nvmlGpuInstance_t * info.instanceCount)()
    ask("instances", pynvml.nvmlDeviceGetGpuInstances, handle, info.id, handles, byref(count))
    for each in handles[: count.value]:
        found = ask("instance", pynvml.nvmlGpuInstanceGetInfo, each)
        place = MIGPlacement(found.placement.start, found.placement.size)
        yield MIGInstance(found.id, info.id, place, tuple(devices.get(found.id, ())))
