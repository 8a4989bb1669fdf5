"""A stand-in for NVML: builds the library and writes the fleet that it shows.

A program that starts with :func:`environment` sees the fleet through its own, unchanged pynvml.
The fleet may be rewritten at any time; the program's next call sees the new one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support import c_library

SOURCE = Path(__file__).with_name("nvml_standin.c")
LIBRARY = "libnvidia-ml.so.1"
CUDA_SOURCE = Path(__file__).with_name("cuda_standin.c")
CUDA_LIBRARY = "libcuda.so.1"

GIB = 2**30
NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
UNKNOWN = 999


@dataclass(frozen=True)
class Profile:
    """A kind of MIG instance, as NVML tells it."""

    index: int
    """NVML's number of the kind, the same on every GPU."""
    id: int
    name: str
    slices: int
    most: int
    megabytes: int
    size: int
    """In slices of the GPU's memory, as the starts."""
    starts: Sequence[int]


def _profiles(slice_gb: int) -> tuple[Profile, ...]:
    kinds = (
        (0, 19, "1g.{}gb", 1, 7, 1, range(7)),
        (1, 14, "2g.{}gb", 2, 3, 2, (0, 2, 4)),
        (2, 9, "3g.{}gb", 3, 2, 4, (0, 4)),
        (3, 5, "4g.{}gb", 4, 1, 4, (0,)),
        (4, 0, "7g.{}gb", 7, 1, 8, (0,)),
        (7, 20, "1g.{}gb+me", 1, 1, 1, range(7)),
        (9, 15, "1g.{}gb", 1, 4, 2, (0, 2, 4, 6)),
    )
    return tuple(
        Profile(
            index=index,
            id=id,
            name=name.format(size * slice_gb),
            slices=slices,
            most=most,
            megabytes=size * slice_gb * 1024 - 256,
            size=size,
            starts=tuple(starts),
        )
        for index, id, name, slices, most, size, starts in kinds
    )


A100_40GB = _profiles(5)
"""By the tables of NVIDIA's user guide of MIG."""
H100_80GB = _profiles(10)


@dataclass
class Instance:
    """A MIG instance in a slot (0 to 6) of its GPU."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    memory_bytes: int = 5 * GIB
    slot: int = 0
    gpu_instance: int | None = None
    """The driver's number of the GPU instance that it is on."""
    counted: tuple[float, float, float, float] | None = None
    """Seconds in which its graphics engine, its multiprocessors and its memory were busy, and until
    which second. A negative one cannot be counted."""
    used_bytes: int = 0
    attributes: tuple[int, int, int] | None = None
    """Compute slices of its GPU instance, its own of them, and megabytes; None: not supported."""
    compute: Sequence[tuple[int, int]] = ()
    """(process id, bytes) of each compute process; -1 bytes is not available."""
    fails: Mapping[str, int] = field(default_factory=dict)
    """What a function of NVML answers for this device, by its full name in the library."""


@dataclass
class GPU:
    """A GPU as NVML would show it. ``mig`` is None where MIG is not supported."""

    uuid: str
    bus: str = "00000000:01:00.0"
    name: str = "NVIDIA A100-SXM4-80GB"
    memory_bytes: int = 80 * GIB
    mode: int = 0
    mig: bool | None = None
    instances: Sequence[Instance] = ()
    slices: int = 7
    """The most instances that it can have in MIG mode, which is its compute slices."""
    compute: Sequence[tuple[int, int]] = ()
    graphics: Sequence[tuple[int, int]] = ()
    nvlinks: Sequence[str] = ()
    """What each link leads to: the bus id of a GPU, or ``switch``."""
    fails: Mapping[str, int] = field(default_factory=dict)
    delays: Mapping[str, int] = field(default_factory=dict)
    """How many milliseconds a function takes for this device."""
    worked: Sequence[tuple[int, int, int, int]] = ()
    """(process id, percent of its kernels, and of memory, until which microsecond) of processes."""
    use: tuple[int, int] = (0, 0)
    """Percent of the time, that kernels ran and that memory was used."""
    used_bytes: int = 0
    milliwatts: int = 60_000
    celsius: int = 35
    clocks: tuple[int, int] = (1410, 1593)
    throttle: int = 0
    ecc_errors: int = 0
    xids: Sequence[tuple[int, int]] = ()
    """(serial, code) of each error; a serial that was reported is not reported again."""
    remapped: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Rows replaced for correctable and for other errors; whether some are pending, or failed."""
    pages_pending: int | None = None
    """To be retired; only for GPUs before Ampere, as the later ones replace rows instead."""
    lanes: tuple[int, int] = (16, 16)
    """Of PCIe: those in use, and those that it could have."""
    limits: tuple[int, int] = (400_000, 400_000)
    """Milliwatts that it may take now, and that it is made for."""
    gpm: bool = False
    """True if it has performance counters, as GPUs have since Hopper."""
    profiles: Sequence[Profile] = ()
    """What it can be divided into; nvidia_smi.py divides it."""


def gpus(count: int) -> list[GPU]:
    """So many healthy GPUs, told apart by UUID and bus id."""
    return [
        GPU(
            uuid=f"GPU-{n:08x}-1111-2222-3333-444444444444",
            bus=f"00000000:{n + 1:02X}:00.0",
        )
        for n in range(count)
    ]


def mig_gpu(*slots: int, **fields: Any) -> GPU:
    """A healthy A100 in MIG mode with an instance in each of these slots; the bus id and the
    UUID are those of ``gpus(2)[1]``."""
    instances = [
        Instance(
            uuid=f"MIG-{slot:08x}-1111-2222-3333-444444444444",
            slot=slot,
            name=f"NVIDIA A100-SXM4-40GB MIG {slot + 1}g.5gb",
            memory_bytes=(slot + 1) * 5 * GIB,
        )
        for slot in slots
    ]
    made: dict[str, Any] = {"name": "NVIDIA A100-SXM4-40GB", "mig": True, "instances": instances}
    return replace(gpus(2)[1], **(made | fields))


def build_nvml_library(directory: Path) -> Path:
    """Compile the stand-in into ``directory`` and return the library's path."""
    return c_library.build(directory, LIBRARY, SOURCE)


def build_cuda_library(directory: Path) -> Path:
    """Compile the stand-in for CUDA's own library; what it does, its source says."""
    return c_library.build(directory, CUDA_LIBRARY, CUDA_SOURCE)


def write_fleet(
    path: Path,
    fleet: Sequence[GPU],
    *,
    driver: str = "550.54.15",
    cuda: int = 12040,
    levels: Mapping[tuple[int, int], int] | None = None,
    fails: Mapping[str, int] | None = None,
    spins: Mapping[str, int] | None = None,
    hangs: Sequence[str] = (),
) -> None:
    """Show this fleet from now on.

    ``levels`` are nearest common ancestors by index (nvmlGpuTopologyLevel_t), ``fails`` what
    functions answer whatever the device, ``spins`` the microseconds that they compute, and
    ``hangs`` those that answer only after the next call of this. The file is replaced at once,
    never half-written.
    """
    lines = [f"driver {driver}", f"cuda {cuda}"]
    lines += [f"level {a} {b} {level}" for (a, b), level in (levels or {}).items()]
    lines += _rules("fail", fails or {}) + _rules("spin", spins or {})
    lines += _rules("hang", dict.fromkeys(hangs, 1))
    for gpu in fleet:
        lines += [f"gpu {gpu.uuid}", f"name {gpu.name}", f"memory {gpu.memory_bytes}"]
        lines += [f"bus {gpu.bus}", f"mode {gpu.mode}"]
        lines += [f"migmode {int(gpu.mig)}"] if gpu.mig is not None else []
        lines += [f"slices {gpu.slices}"] if gpu.slices != 7 else []
        lines += [f"compute {pid} {used}" for pid, used in gpu.compute]
        lines += [f"graphics {pid} {used}" for pid, used in gpu.graphics]
        lines += [f"worked {' '.join(map(str, each))}" for each in gpu.worked]
        lines += [f"nvlink {number} {end}" for number, end in enumerate(gpu.nvlinks)]
        lines += [f"use {gpu.use[0]} {gpu.use[1]}", f"used {gpu.used_bytes}"]
        lines += [f"power {gpu.milliwatts}", f"celsius {gpu.celsius}"]
        lines += [f"clocks {gpu.clocks[0]} {gpu.clocks[1]}", f"throttle {gpu.throttle}"]
        lines += [f"remapped {' '.join(map(str, gpu.remapped))}"]
        lines += [f"pages {gpu.pages_pending}"] if gpu.pages_pending is not None else []
        lines += [f"lanes {gpu.lanes[0]} {gpu.lanes[1]}"]
        lines += [f"limits {gpu.limits[0]} {gpu.limits[1]}"]
        lines += [profile_line(each) for each in gpu.profiles]
        lines += ["gpm 1"] if gpu.gpm else []
        lines += [f"ecc {gpu.ecc_errors}", *(f"xid {n} {code}" for n, code in gpu.xids)]
        lines += _rules("fail", gpu.fails) + _rules("delay", gpu.delays)
        for part in gpu.instances:
            lines += [f"mig {part.slot} {part.uuid}", f"name {part.name}"]
            lines += [f"memory {part.memory_bytes}", f"used {part.used_bytes}"]
            lines += [f"of {part.gpu_instance}"] if part.gpu_instance is not None else []
            lines += [f"counted {' '.join(map(str, part.counted))}"] if part.counted else []
            if part.attributes is not None:
                lines += [f"attributes {' '.join(map(str, part.attributes))}"]
            lines += [f"compute {pid} {used}" for pid, used in part.compute]
            lines += _rules("fail", part.fails)
    new = path.with_name(f"{path.name}.new")
    new.write_text("\n".join(lines) + "\n")
    new.replace(path)


def profile_line(profile: Profile) -> str:
    """The profile as the fleet's file has it."""
    starts = " ".join(map(str, profile.starts))
    sizes = f"{profile.slices} {profile.most} {profile.megabytes} {profile.size}"
    return f"profile {profile.index} {profile.id} {profile.name} {sizes} {starts}"


def samples_held(path: Path) -> int:
    """How many samples of counters the program that sees this fleet has allocated."""
    return int(path.with_name(f"{path.name}.samples").read_text())


def times_open(path: Path) -> int:
    """How often the program that sees this fleet has NVML open."""
    return int(path.with_name(f"{path.name}.opened").read_text())


def environment(library: Path, fleet: Path) -> dict[str, str]:
    """What to set for a program that is to see the fleet (over ``os.environ``)."""
    found = os.environ.get("LD_LIBRARY_PATH")
    folders = [str(library.parent), *([found] if found else [])]
    return {"LD_LIBRARY_PATH": ":".join(folders), "GPUSPAWNER_STANDIN_NVML": str(fleet)}


def _rules(kind: str, rules: Mapping[str, int]) -> list[str]:
    return [f"{kind} {function} {value}" for function, value in rules.items()]
