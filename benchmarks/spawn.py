"""A spawn and a stop: GPUDockerSpawner against plain DockerSpawner, same image.

Real: Docker Engine, JupyterHub with its proxy, SQLite. The GPU is a stand-in: NVIDIA's hook is
a small script, which the engine runs for each container with a device request.

Both spawners serve one hub and one engine, in turns, with the same settings (``remove``, internal
address) and the same image, whose server answers at once: what is timed is the hub, the
spawner and the engine. To be fair to ours, which always hands a GPU to the container, the stock
spawner has a fixed device request in ``extra_host_config``, so that the hook runs on both
sides. To be fair to the stock spawner, ours does all that it does for members: it leases,
writes the lease down, sets the limits that PyTorch needs, confirms, settles.

A spawn ends when the hub says that the server is ready and its route is in the proxy, a stop
when the container is gone. ``hub's processor`` is the processor time of the hub's process for
both together, all threads.
"""

from __future__ import annotations

import time

from support.docker_hub import DockerHub, docker_hub
from support.members import cpu_seconds
from support.report import Report, arguments, in_turns, pair

MEMBERS = 4
WARM_UP = 4
PARTS = ("spawn", "stop", "spawn and stop", "hub's processor")
IDLE = 0.02
MOST = 1.05


def measure(hub: DockerHub, runs: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each part, by side."""
    found: dict[str, dict[str, list[float]]] = {}

    def spawn_and_stop(side: str, name: str) -> None:
        time.sleep(IDLE)
        processor, began = cpu_seconds(hub.hub.pid), time.perf_counter()
        hub.members.spawn(name)
        ready = time.perf_counter()
        hub.members.stop(name)
        gone = time.perf_counter()
        time.sleep(IDLE)  # what the hub does after its answer counts too
        processor = cpu_seconds(hub.hub.pid) - processor
        took = (ready - began, gone - ready, gone - began, processor)
        for part, seconds in zip(PARTS, took, strict=True):
            found[side][part].append(seconds * 1e3)

    for count in (min(WARM_UP, runs), runs):
        found.update({side: {part: [] for part in PARTS} for side in ("ours", "stock")})
        in_turns(
            count,
            lambda turn: spawn_and_stop("ours", hub.ours[turn % MEMBERS]),
            lambda turn: spawn_and_stop("stock", hub.stock[turn % MEMBERS]),
        )
    return found


def main() -> None:
    args = arguments(__doc__, runs=60)
    with docker_hub(MEMBERS) as hub:
        found = measure(hub, args.runs)
    columns = ("what", "runs", "GPUDockerSpawner, ms", "DockerSpawner, ms", "ratio")
    report = Report("spawn", columns)
    report.figure("runs", args.runs)
    for part in PARTS:
        both = pair(found["ours"][part], found["stock"][part])
        texts = (both.ours.text(), both.baseline.text(), both.ratios.text(3))
        report.row(part, str(args.runs), *texts)
        name = part.replace("'", "").replace(" ", "_")
        report.figure(f"{name}_ours_ms", both.ours.median)
        report.figure(f"{name}_stock_ms", both.baseline.median)
        most = MOST if part == "spawn and stop" else None
        report.figure(f"{name}_ratio", both.ratios.median, most)
    report.print(args.json)


if __name__ == "__main__":
    main()
