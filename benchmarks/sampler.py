"""What it costs to sample eight GPUs once a second.

The production sampling thread and its writes run in a process of their own, through pynvml, over a
stand-in for NVML that computes as long as an H100's driver was measured to (``real_gpu.py``): 2 us
for most readings, 8 us for the memory, 54 us for a list of processes, 215 us for the MIG mode. With
``--real`` it is this machine's own driver. The processor time is the process's own, of all threads
and of the kernel, the driver's share included.

Memory is that of ``gpuspawner slurm sampler``, which is a process of its own on each node, over the
same driver; and what samples add to the accounting service, which has all its libraries anyway.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests
from support.report import Report, Series, argument_parser

from tests.support.nvml import nvml_library as nvml
from tests.support.processes import free_port, wait_for

GPUS = 8
MOST_PERCENT = 0.2
MOST_MB = 60.0
"""Of the sampler of a node."""
LATENCIES_US = {
    "nvmlDeviceGetUtilizationRates": 2,
    "nvmlDeviceGetMemoryInfo": 8,
    "nvmlDeviceGetComputeRunningProcesses_v3": 54,
    "nvmlDeviceGetMigMode": 215,
    "nvmlDeviceGetCurrPcieLinkWidth": 33,
    "nvmlEventSetWait_v2": 4,
    **dict.fromkeys(
        (
            "nvmlDeviceGetPowerUsage",
            "nvmlDeviceGetTemperature",
            "nvmlDeviceGetClockInfo",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            "nvmlDeviceGetTotalEccErrors",
            "nvmlDeviceGetRemappedRows",
            "nvmlDeviceGetRetiredPagesPendingStatus",
            "nvmlDeviceGetMaxPcieLinkWidth",
            "nvmlDeviceGetEnforcedPowerLimit",
            "nvmlDeviceGetPowerManagementDefaultLimit",
        ),
        2,
    ),
}
"""As medians on an H100, driver 580.159.04; where load changes one, the greater."""

CHILD = """
import json, logging, resource, sys, time
from datetime import datetime, timezone
from pathlib import Path
from gpuspawner.service.device_monitor import Sampling
from gpuspawner.devices.nvml import NVMLDevices
from gpuspawner.db.engine import Store; from gpuspawner.monitoring import repository as use

def utcnow():
    return datetime.now(timezone.utc)

def resident():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in l)
    return int(line.split()[1]) / 1024

def processor():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

class Counted:
    def __init__(self, sampler):
        self.sampler, self.taken = sampler, 0

    def sample(self, now, monotonic):
        self.taken += 1
        return self.sampler.sample(now, monotonic)

url, seconds = sys.argv[1], float(sys.argv[2])
store = Store.open(url)
store.run(lambda connection: None)
empty = resident()
counted = Counted(NVMLDevices().sampler())
sampling = Sampling(counted, utcnow, 1.0, logging.getLogger())
sampling.start()
time.sleep(3)  # it opens NVML, and reads everything for the first time
before, began, first = processor(), time.monotonic(), counted.taken
while time.monotonic() - began < seconds:
    time.sleep(5)
    if minutes := sampling.complete():
        store.run(lambda connection: use.remember_use(connection, minutes), write=True)
        sampling.written(minutes)
spent, passed = processor() - before, time.monotonic() - began
taken = counted.taken - first
forks = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
with store.read() as connection:
    rows = len(use.newest_use(connection, utcnow()))
found = [100 * spent / passed, resident(), empty, taken, passed, forks, rows]
print(json.dumps(found))
"""


def main() -> None:
    parser = argument_parser(__doc__, 3)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each run")
    parser.add_argument("--real", action="store_true", help="this machine's GPUs, no stand-in")
    options = parser.parse_args()
    report = Report("sampler", ("what", "runs", "seconds each", "median (p10-p90)"))
    with tempfile.TemporaryDirectory() as folder:
        library = None if options.real else nvml.build_nvml_library(Path(folder) / "lib")
        runs = [_run(library, Path(folder), n, options.seconds) for n in range(options.runs)]
    report.figure("runs", options.runs)
    percent, resident, empty, samples, passed, *_, of_node = (
        Series(tuple(run[at] for run in runs)) for at in range(8)
    )
    for what, series, digits in (
        ("processor, % of a core", percent, 3),
        ("memory of a node's sampler, MB", of_node, 1),
        ("memory of the service, MB", resident, 1),
        ("the same without samples, MB", empty, 1),
    ):
        report.row(what, str(options.runs), f"{options.seconds:g}", series.text(digits))
    report.figure("processor_percent", percent.median, MOST_PERCENT)
    report.figure("memory_mb", of_node.median, MOST_MB)
    report.figure("memory_of_samples_mb", resident.median - empty.median)
    missed = max(abs(p - s) for p, s in zip(passed.values, samples.values, strict=True))
    report.figure("most_samples_missed", missed, 2.0)  # one at either end
    report.figure("children_started", max(run[5] for run in runs), 0)
    gpus = "the GPUs of this machine" if options.real else f"{GPUS} GPUs"
    report.notes.append(f"{gpus}, a sample each second; process lists every 60 s, one at a time")
    report.print(options.json)


def _run(library: Path | None, folder: Path, number: int, seconds: float) -> list[float]:
    environment = dict(os.environ)
    if library is not None:
        fleet = folder / f"fleet{number}"
        gpus = nvml.gpus(GPUS)
        for gpu in gpus:
            gpu.use, gpu.used_bytes, gpu.compute = (73, 41), 2**34, [(os.getpid(), 2**34)]
        nvml.write_fleet(fleet, gpus, spins=LATENCIES_US)
        environment |= nvml.environment(library, fleet)
    url = f"sqlite:///{folder}/run{number}.sqlite"
    done = subprocess.run(
        [sys.executable, "-c", CHILD, url, str(seconds)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    if seconds >= 60:
        devices = int(found[6])  # with a whole minute written
        assert devices == GPUS if library else devices > 0, "no minute was written"
    return [*found, _node_sampler(environment, min(seconds, 20.0))]


def _node_sampler(environment: dict[str, str], seconds: float) -> float:
    """Return how many MB a node's sampler holds while the hub asks it once a second."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "gpuspawner", "slurm", "sampler", "--listen", url]
    with subprocess.Popen(command, env=environment) as node:
        try:
            wait_for(lambda: _samples(url), "the sampler of a node")
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                time.sleep(1.0)
                assert _samples(url)
            status = Path(f"/proc/{node.pid}/status").read_text()
        finally:
            node.terminate()
    line = next(line for line in status.splitlines() if "VmRSS" in line)
    return int(line.split()[1]) / 1024


def _samples(url: str) -> bool:
    try:
        return requests.get(f"{url}/samples", timeout=30).ok
    except requests.ConnectionError:
        return False


if __name__ == "__main__":
    main()
