"""What a real NVIDIA GPU and its driver do: figures that no stand-in can give.

Each part runs in a process of its own with a time limit, so that one that fails or hangs loses
nothing of the others, and prints one JSON object when it is done. Without a GPU nothing is run.

``calls``       how long NVML takes for each of our queries, at rest and under load
``looks``       a snapshot and a sample, and what they see
``use``         a busy, a bursty, a trickling and an idle program: what NVML calls its use, and what
                becomes of its server by the idle policy
``window``      over how long the driver takes that use, and what it keeps of it
``gpm``         the figures of GPM (Hopper and newer), and what they cost
``neighbours``  memory of two programs, and what an illegal address in one does to the other
``probe``       the health probe: time, and false alarms, alone and beside a busy program
``checkpoint``  a program is parked and resumed: time, memory freed, and whether all is as before
``engine``      whether a Docker Engine could run on this machine

No setting of the device is changed. ``--to FILE`` adds each result to a file as it comes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
from support.report import quantile

from gpuspawner.devices.nvml import NVMLDevices
from gpuspawner.engines import device_probe
from gpuspawner.engines.device_probe import probe_by_process
from gpuspawner.monitoring.idle import Activity, IdlePolicy, begin, judge
from tests.support.cuda import Cuda, CudaError, Program

GIB = 2**30
Found = dict[str, Any]


def utcnow() -> datetime:
    return datetime.now(timezone.utc)


def milliseconds(took: list[float]) -> Found:
    """Median, 99th percentile and the longest of seconds, in milliseconds."""
    found = {"median": statistics.median(took), "p99": quantile(took, 0.99), "most": max(took)}
    return {name: round(1e3 * value, 4) for name, value in found.items()} | {"runs": len(took)}


def timed(call: Callable[[], Any], runs: int, most_seconds: float = 3.0) -> tuple[list[float], Any]:
    """How long a call took each time, and its last answer, or the name of its error."""
    took: list[float] = []
    answer: Any = None
    until = time.monotonic() + most_seconds
    while len(took) < runs and time.monotonic() < until:
        began = time.perf_counter()
        try:
            answer = call()
        except pynvml.NVMLError as error:
            answer = f"{type(error).__name__} ({error.value})"
        took.append(time.perf_counter() - began)
    return took, answer


@contextmanager
def programs(count: int, size: int = GIB) -> Iterator[list[Program]]:
    """So many programs on the first GPU, each with memory."""
    with ExitStack() as stack:
        made = [stack.enter_context(Program()) for _ in range(count)]
        for each in made:
            each.tell("open")
            each.tell("hold", size)
        yield made


def first_handle() -> Any:
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def plain(value: Any) -> Any:
    """A value of NVML as JSON."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    fields = getattr(value, "_fields_", None)
    if fields is not None:
        return {name: plain(getattr(value, name)) for name, *_ in fields}
    if isinstance(value, (int, float, str)) or value is None:
        return value
    found = getattr(value, "__dict__", None)
    return {k: plain(v) for k, v in found.items()} if found else repr(value)


# The parts.


def machine() -> Found:
    """What this machine is."""
    handle = first_handle()
    cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    found: Found = {
        "model": pynvml.nvmlDeviceGetName(handle),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "nodes": sorted(str(p) for p in Path("/dev").glob("nvidia*")),
        "at": utcnow().isoformat(),
    }
    for name in ("PersistenceMode", "ComputeMode", "MigMode", "DriverModel", "Architecture"):
        call = getattr(pynvml, f"nvmlDeviceGet{name}", None)
        if call is not None:
            found[name] = plain(timed(lambda call=call: call(handle), 1)[1])
    pynvml.nvmlShutdown()
    began = time.perf_counter()
    pynvml.nvmlInit()
    found["init_ms"] = round(1e3 * (time.perf_counter() - began), 2)
    return found


def queries(handle: Any) -> dict[str, Callable[[], Any]]:
    """Every query of ours, by the name of its function in pynvml."""
    nvml = pynvml
    uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    events = nvml.nvmlEventSetCreate()
    asked: dict[str, tuple[Any, ...]] = {
        "nvmlSystemGetDriverVersion": (),
        "nvmlSystemGetCudaDriverVersion_v2": (),
        "nvmlDeviceGetCount": (),
        "nvmlDeviceGetHandleByIndex": (0,),
        "nvmlDeviceGetUUID": (handle,),
        "nvmlDeviceGetName": (handle,),
        "nvmlDeviceGetPciInfo": (handle,),
        "nvmlDeviceGetMemoryInfo": (handle,),
        "nvmlDeviceGetComputeMode": (handle,),
        "nvmlDeviceGetMigMode": (handle,),
        "nvmlDeviceGetMaxMigDeviceCount": (handle,),
        "nvmlDeviceGetGraphicsRunningProcesses_v3": (handle,),
        "nvmlDeviceGetComputeRunningProcesses_v3": (handle,),
        "nvmlDeviceGetNvLinkState": (handle, 0),
        "nvmlDeviceGetNvLinkRemoteDeviceType": (handle, 0),
        "nvmlDeviceGetNvLinkRemotePciInfo": (handle, 0),
        "nvmlDeviceGetUtilizationRates": (handle,),
        "nvmlDeviceGetPowerUsage": (handle,),
        "nvmlDeviceGetTemperature": (handle, nvml.NVML_TEMPERATURE_GPU),
        "nvmlDeviceGetClockInfo": (handle, nvml.NVML_CLOCK_SM),
        "nvmlDeviceGetCurrentClocksThrottleReasons": (handle,),
        "nvmlDeviceGetTotalEccErrors": (handle, *uncorrected),
        "nvmlDeviceGetRemappedRows": (handle,),
        "nvmlDeviceGetRetiredPagesPendingStatus": (handle,),
        "nvmlDeviceGetCurrPcieLinkWidth": (handle,),
        "nvmlDeviceGetMaxPcieLinkWidth": (handle,),
        "nvmlDeviceGetEnforcedPowerLimit": (handle,),
        "nvmlDeviceGetPowerManagementDefaultLimit": (handle,),
        "nvmlEventSetWait_v2": (events, 0),
        "nvmlDeviceGetProcessUtilization": (handle, 0),
    }
    return {name: partial(getattr(nvml, name), *given) for name, given in asked.items()}


def calls(runs: int = 300) -> Found:
    """Each query, at rest and while two programs compute."""
    handle = first_handle()
    found: Found = {"nvlink": {}}
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        answer = timed(lambda link=link: pynvml.nvmlDeviceGetNvLinkState(handle, link), 1)[1]
        found["nvlink"][link] = plain(answer)

    def measure() -> Found:
        made: Found = {}
        for name, call in queries(handle).items():
            took, answer = timed(call, runs, 1.0)
            made[name] = {**milliseconds(took), "answer": plain(answer)}
        return made

    found["idle"] = measure()
    with programs(2) as made:
        for each in made:
            each.send("repeat", 0.05, 0.01, 45.0, 64)
        time.sleep(1)
        found["load"] = measure()
    return found


def looks() -> Found:
    """A snapshot and a sample, each the first time and later, and what they see."""
    devices = NVMLDevices()
    sampler = devices.sampler()
    found: Found = {}
    for name, call in (
        ("snapshot", lambda: devices.observe(utcnow())),
        ("sample", lambda: sampler.sample(utcnow(), time.monotonic())),
    ):
        first, _ = timed(call, 1)
        took, answer = timed(call, 200)
        found[name] = {"first": milliseconds(first), "later": milliseconds(took)}
        found[f"{name}_seen"] = json.loads(json.dumps(_as_plain(answer), default=str))
    with programs(2) as made:
        seen = devices.observe(utcnow())
        found["snapshot_with_two_programs"] = json.loads(json.dumps(_as_plain(seen), default=str))
        found["pids"] = [each.pid for each in made]
    freed = time.monotonic()
    while not devices.observe(utcnow()).devices[0].empty and time.monotonic() < freed + 20:
        time.sleep(0.02)
    found["free_after_s"] = round(time.monotonic() - freed, 3)
    return found


def _as_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_as_plain(each) for each in value]
    found = asdict(value)
    if "links" in found:
        found["links"] = [[*key, n] for key, n in value.links.items()]
    return found


TURNS = {
    "busy": (0.5, 0.0),
    "0.3 s of each": (0.3, 0.7),
    "1 s of 5": (1.0, 4.0),
    "0.1 s of 5": (0.1, 4.9),
    "5 ms of 100": (0.005, 0.095),
    "open, and idle": (0.0, 1.0),
}
"""Seconds of computing and of rest."""


def use(seconds: float = 16.0) -> Found:
    """What NVML says of programs, a sample each second, and what the idle policy makes of it."""
    handle = first_handle()
    sampler = NVMLDevices().sampler()
    found: Found = {}
    for name, (busy, rest) in TURNS.items():
        with programs(1) as (program,):
            since = int(time.time() * 1e6)
            program.send("repeat", busy, rest, seconds)
            uses, began = [], time.monotonic()
            while time.monotonic() - began < seconds - 1:
                time.sleep(1)
                (sample,) = sampler.sample(utcnow(), time.monotonic())
                uses.append((sample.use, sample.milliwatts))
            each = timed(partial(pynvml.nvmlDeviceGetProcessUtilization, handle, since), 1)[1]
            kept = buffered(handle, since)
            computed = sum(program.read())
            settled = [u for u, _ in uses[1:] if u is not None]
            mean = statistics.mean(settled)
            active = 60 * sum(u > 0 for u in settled) / len(settled)
            found[name] = {
                "computed_percent": round(100 * computed / seconds, 2),
                "uses": [u for u, _ in uses],
                "mean": round(mean, 2),
                "buffered_mean": round(statistics.mean(u for _, u in kept), 2) if kept else None,
                "buffered": len(kept),
                "watts": [round((w or 0) / 1000) for _, w in uses],
                "processes": plain(each),
                "pid": program.pid,
                "stopped_after_minutes": stopped_after(mean, active),
            }
            say(name, found[name])
    return found


def buffered(handle: Any, since: int) -> list[tuple[int, int]]:
    """The utilization that the driver keeps since a time in microseconds: times and percents."""
    try:
        _, kept = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, since)
    except pynvml.NVMLError:
        return []
    return [(int(each.timeStamp), int(each.sampleValue.uiVal)) for each in kept]


def window() -> Found:
    """Over how long the driver takes the utilization, how often, and what its buffer costs."""
    handle = first_handle()
    found: Found = {}
    with programs(1) as (program,):
        since = int(time.time() * 1e6)
        program.send("repeat", 0.3, 0.7, 10.0)
        changes: list[tuple[float, int]] = []
        began = time.monotonic()
        while time.monotonic() - began < 5:
            now = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            if not changes or changes[-1][1] != now:
                changes.append((round(time.monotonic() - began, 3), now))
            time.sleep(0.002)
        found["changes"] = changes
        program.read()
        kept = buffered(handle, since)
        found["kept"] = [((at - since) / 1e6, percent) for at, percent in kept]
        found["kept_mean"] = statistics.mean(u for _, u in kept) if kept else None
    newest = kept[-1][0] if kept else 0
    for name, start in (("all", 0), ("newest", newest), ("second", newest - 1_000_000)):
        took, _ = timed(partial(buffered, handle, start), 100, 2.0)
        found[f"buffer_{name}"] = {**milliseconds(took), "count": len(buffered(handle, start))}
    return found


def stopped_after(mean: float, active: float) -> int | None:
    """After how many minutes of this use a server is stopped; None within a day."""
    policy = IdlePolicy(mode="enforce")
    state, now = begin(policy), datetime(2026, 3, 1, tzinfo=timezone.utc)
    for minute in range(1, 24 * 60):
        verdict = judge(
            policy, state, Activity(60.0, mean, active), now + timedelta(minutes=minute)
        )
        state = verdict.state
        if verdict.event == "stop":
            return minute
    return None


def gpm() -> Found:
    """The figures of GPM at rest, for one thread that computes, and for a full GPU."""
    handle = first_handle()
    support = pynvml.nvmlGpmQueryDeviceSupport(handle)
    found: Found = {"support": plain(getattr(support, "isSupportedDevice", support))}
    names = {
        number: name.removeprefix("NVML_GPM_METRIC_").lower()
        for name, number in vars(pynvml).items()
        if name.startswith("NVML_GPM_METRIC_") and isinstance(number, int) and 0 < number < 60
    }
    samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
    took, _ = timed(lambda: pynvml.nvmlGpmSampleGet(handle, samples[0]), 300)
    found["sample"] = milliseconds(took)

    def figures(wanted: Mapping[int, str], seconds: float = 1.0) -> Found:
        pynvml.nvmlGpmSampleGet(handle, samples[0])
        time.sleep(seconds)
        pynvml.nvmlGpmSampleGet(handle, samples[1])
        asked = pynvml.c_nvmlGpmMetricsGet_t()
        asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(wanted)
        asked.sample1, asked.sample2 = samples
        for place, number in enumerate(wanted):
            asked.metrics[place].metricId = number
        took, error = timed(lambda: pynvml.nvmlGpmMetricsGet(asked), 50)
        made: Found = {"cost": milliseconds(took)}
        if isinstance(error, str):
            made["error"] = error
        for place, name in enumerate(wanted.values()):
            metric = asked.metrics[place]
            made[name] = (
                round(metric.value, 3) if not metric.nvmlReturn else f"error {metric.nvmlReturn}"
            )
        return made

    found["rest"] = figures(names)
    with programs(1) as (program,):
        for name, blocks in (("one_thread", 1), ("full", 1056)):
            program.send("repeat", 0.3, 0.0, 3.0, blocks)
            time.sleep(0.7)
            found[name] = figures(names)
            program.read()
        program.send("repeat", 0.25, 0.25, 7.0, 1056)
        time.sleep(0.7)
        few = {1: "graphics_util", 2: "sm_util", 3: "sm_occupancy"}
        found["half_of_the_time"] = figures(few, 5.0)
        program.read()
    found["as_nobody"] = _as_nobody()
    return found


def _as_nobody() -> str:
    """What GPM says to a user who is not root."""
    code = (
        "import pynvml as p; p.nvmlInit(); h = p.nvmlDeviceGetHandleByIndex(0); "
        "s = p.nvmlGpmSampleAlloc(); p.nvmlGpmSampleGet(h, s); print('ok')"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], user=65534, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return repr(error)
    return (done.stdout + done.stderr)[-200:].strip()


def neighbours() -> Found:
    """Memory of two programs, time slices, and an illegal address in one of them."""
    found: Found = {}
    handle = first_handle()
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
    with programs(2, 2 * GIB) as (one, other):
        running = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
        found["memory"] = {
            {one.pid: "one", other.pid: "other"}.get(p.pid, "else"): p.usedGpuMemory
            for p in running
        }
        found["used"] = pynvml.nvmlDeviceGetMemoryInfo(handle).used
        for each in (one, other):
            each.tell("fill", 5)
        found["alone_s"] = other.tell("work", 600)
        for each in (one, other):
            each.send("work", 600)
        found["shared_s"] = [each.read() for each in (one, other)]
        for each in (one, other):
            each.tell("fill", 5)
        other.send("repeat", 0.2, 0.0, 4.0, 64)
        time.sleep(1)
        with suppress(RuntimeError):
            one.tell("illegal")
        found["first"] = _error_of(lambda: one.tell("spin", 0.01))
        found["other_goes_on"] = _error_of(other.read)
        found["other_differs"] = _error_of(lambda: other.tell("differing", 5))
        found["other_spins"] = _error_of(lambda: other.tell("spin", 0.1))
        found["new_program"] = _error_of(_run_once)
        found["xids"] = []
        for _ in range(10):
            with suppress(pynvml.NVMLError):
                found["xids"].append(pynvml.nvmlEventSetWait_v2(events, 200).eventData)
        found["utilization"] = plain(pynvml.nvmlDeviceGetUtilizationRates(handle))
    with programs(1) as (one,):  # killed in the middle of a long kernel
        one.send("spin", 8.0, 1056, 1024)
        time.sleep(1)
        began = time.monotonic()
        one.end()
        found["killed_s"] = round(time.monotonic() - began, 3)
        found["after_kill"] = _error_of(_run_once)
        found["usable_after_kill_s"] = round(time.monotonic() - began, 3)
    return found


def _error_of(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        return str(error)


def _run_once() -> str:
    with Program() as program:
        program.tell("open")
        program.tell("spin", 0.01)
    return "fine"


def probe(runs: int = 50, whole: int = 2, seconds: float = 0.6) -> Found:
    """The probe in full, and shortened many times, alone and beside a busy program."""
    uuid = pynvml.nvmlDeviceGetUUID(first_handle())
    found: Found = {}

    def many(count: int, limit: float) -> Found:
        program = device_probe._source()
        short = program.replace("SECONDS = 15.0", f"SECONDS = {limit}")
        assert short != program or limit == 15.0
        device_probe._source = lambda: short
        took, failures, texts = [], [], set()
        for _ in range(count):
            began = time.perf_counter()
            result = probe_by_process(uuid)
            took.append(time.perf_counter() - began)
            failures += [result.failure] if result.failure else []
            texts.add(result.text)
        device_probe._source = lambda: program
        return {**milliseconds(took), "failures": failures, "texts": sorted(texts)[:5]}

    found["whole"] = many(whole, 15.0)
    say("whole", found["whole"])
    found["alone"] = many(runs, seconds)
    say("alone", found["alone"])
    with programs(1, 8 * GIB) as (program,):
        program.send("repeat", 0.2, 0.01, 1000.0, 1056)
        found["whole_beside"] = many(1, 15.0)
        found["beside"] = many(runs, seconds)
    return found


STATES = ("running", "locked", "checkpointed", "failed")


def checkpoint(sizes: tuple[int, ...] = (1, 10, 60)) -> Found:
    """Park a program of 1, 10 and 60 GiB, use the GPU meanwhile, resume it, and compare."""
    handle = first_handle()
    cuda = Cuda()
    cuda.call("cuInit", 0)
    found: Found = {"has": cuda.has("cuCheckpointProcessCheckpoint")}
    found["tool"] = shutil.which("cuda-checkpoint")
    if not found["has"]:
        return found

    def used() -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)

    def state(pid: int) -> str:
        value = ctypes.c_int()
        cuda.call("cuCheckpointProcessGetState", pid, ctypes.byref(value))
        return STATES[value.value]

    def step(name: str, pid: int, arguments: Any = None) -> float:
        began = time.perf_counter()
        cuda.call(f"cuCheckpointProcess{name}", pid, arguments)
        return round(time.perf_counter() - began, 3)

    for size in sizes:
        made: Found = {"before": used()}
        found[f"{size} GiB"] = made
        try:
            with programs(1, size * GIB) as (program,):
                program.tell("fill", size)
                made |= {"held": used(), "lock_s": step("Lock", program.pid)}
                made |= {"locked": state(program.pid)}
                made |= {"checkpoint_s": step("Checkpoint", program.pid)}
                made |= {"parked": state(program.pid), "parked_used": used()}
                made["processes_while_parked"] = [
                    p.pid == program.pid
                    for p in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
                ]
                status = Path(f"/proc/{program.pid}/status").read_text()
                made["host_memory"] = next(x for x in status.splitlines() if "VmRSS" in x)
                with programs(1, 70 * GIB if size > 1 else GIB) as (other,):
                    other.tell("fill", 99)
                    made["other_differs"] = other.tell("differing", 99)
                    if size == 10:
                        made["restore_without_room"] = _cuda_error(
                            lambda: step("Restore", program.pid)
                        )
                        made["state_then"] = state(program.pid)
                if state(program.pid) == "checkpointed":
                    made["restore_s"] = step("Restore", program.pid)
                made |= {"unlock_s": step("Unlock", program.pid), "state": state(program.pid)}
                made["differs"] = program.tell("differing", size)
                made["computes"] = _error_of(lambda: program.tell("spin", 0.01))
        except (CudaError, RuntimeError) as error:
            made["error"] = str(error)
        say(f"{size} GiB", made)
    with programs(1, 4 * GIB) as (program,):  # no room to come back to
        program.tell("fill", 4)
        made = {}
        found["without room"] = made
        step("Lock", program.pid)
        step("Checkpoint", program.pid)
        with programs(1, 76 * GIB):
            made["first"] = _cuda_error(lambda: step("Restore", program.pid))
            made["then"] = _cuda_error(lambda: state(program.pid))
        time.sleep(1)
        made["used"] = used()
        made["second"] = _cuda_error(lambda: step("Restore", program.pid))
        made["after"] = _cuda_error(lambda: state(program.pid))
        made["unlock"] = _cuda_error(lambda: step("Unlock", program.pid))
        program.process.poll()
        made["exit"] = program.process.returncode
        say("without room", made)
    with programs(1, GIB) as (program,):  # in the middle of a kernel
        program.tell("fill", 3)
        program.send("spin", 2.0)
        time.sleep(0.5)
        made = {}
        found["during a kernel"] = made
        made["lock"] = _cuda_error(lambda: step("Lock", program.pid))
        made["checkpoint"] = _cuda_error(lambda: step("Checkpoint", program.pid))
        made["restore"] = _cuda_error(lambda: step("Restore", program.pid))
        made["unlock"] = _cuda_error(lambda: step("Unlock", program.pid))
        made["kernel"] = _error_of(program.read)
        made["differs"] = _error_of(lambda: program.tell("differing", 3))
    return found


def _cuda_error(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except CudaError as error:
        return str(error)


def engine() -> Found:
    """What a Docker Engine needs of the kernel, and what is installed."""
    found: Found = {}
    names = ("dockerd", "containerd", "runc", "podman", "nvidia-ctk", "nvidia-container-cli")
    for name in (*names, "nvidia-container-runtime-hook", "iptables", "nft", "unshare"):
        found[name] = shutil.which(name)
    found["filesystems"] = Path("/proc/filesystems").read_text().split()
    with tempfile.TemporaryDirectory() as folder:
        for part in ("lower", "upper", "work", "merged", "cgroup"):
            Path(folder, part).mkdir()
        overlay = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
        for name, command in (
            ("namespaces", "unshare -m -p -n -u -i -f true"),
            ("overlay", f"unshare -m mount -t overlay -o {overlay} o {folder}/merged"),
            ("cgroup2", f"unshare -m sh -c 'mount -t cgroup2 c {folder}/cgroup && "
             f"cat {folder}/cgroup/cgroup.controllers'"),
            ("cgroups", "cat /proc/self/cgroup /proc/cgroups"),
            ("mounts", "grep cgroup /proc/mounts"),
            ("bridge", "unshare -n ip link add b type bridge"),
            ("veth", "unshare -n ip link add v type veth peer name w"),
            ("iptables", "unshare -n iptables -t nat -L"),
            ("config", "zcat /proc/config.gz | grep -E 'OVERLAY_FS=|CGROUPS=|BRIDGE=|VETH=|"
             "NF_NAT=|NF_TABLES=|SECCOMP=|CGROUP_DEVICE=|USER_NS=|MODULES='"),
        ):  # fmt: skip
            done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20)
            said = (done.stdout + done.stderr).strip()[-700:]
            found[f"try_{name}"] = f"{done.returncode}: {said}"
    return found


PARTS: dict[str, tuple[Callable[[], Found], float]] = {
    "machine": (machine, 30),
    "calls": (calls, 90),
    "looks": (looks, 60),
    "neighbours": (neighbours, 60),
    "gpm": (gpm, 60),
    "engine": (engine, 60),
    "checkpoint": (checkpoint, 180),
    "use": (use, 200),
    "window": (window, 40),
    "probe": (probe, 330),
}
"""Each part, and how many seconds it may take."""


def say(name: str, found: Any) -> None:
    """What is known so far, in case the part does not come to its end."""
    print(json.dumps({"so far": name, "found": found}), file=sys.stderr, flush=True)


def run(part: str) -> Found:
    """Run a part in a process of its own; what it found, or why not."""
    command = [sys.executable, __file__, "--part", part]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as told, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=told, stderr=errors, start_new_session=True)
        try:
            process.wait(timeout=PARTS[part][1])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
        told.seek(0)
        errors.seek(0)
        lines = told.read().splitlines()
        took = round(time.monotonic() - began, 1)
        if process.returncode == 0 and lines:
            return {"part": part, "seconds": took, "found": json.loads(lines[-1])}
        return {"part": part, "seconds": took, "failed": errors.read()[-6000:]}


def main() -> None:
    first = (__doc__ or "").strip().splitlines()[0]
    parser = argparse.ArgumentParser(description=first)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--part", choices=[*PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help="a file to which each result is added")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    if options.part:
        print(json.dumps(PARTS[options.part][0]()))
        return
    try:
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        print(f"Nothing is measured: there is no NVIDIA GPU on this machine ({error}).")
        return
    for part in options.parts or PARTS:
        line = json.dumps(run(part))
        if options.to:
            with options.to.open("a") as file:
                file.write(line + "\n")
        print(line, flush=True)


if __name__ == "__main__":
    main()
