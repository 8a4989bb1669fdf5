"""20 spawns at once: GPUDockerSpawner against plain DockerSpawner, same image.

Real: Docker Engine, JupyterHub with its proxy, SQLite. The GPUs are stand-ins: 20 simulated
devices, each of which is leased in every burst of ours and reaches its container by a device
request through NVIDIA's hook, which is a small script here; the stock spawner's containers
have a device request too. One hub and one engine serve both, in turns.

The image's server answers at once, so that spawners are measured and not Jupyter's imports.
A burst ends when the hub says of the last server that it is ready and routed. The stock
spawner has one Docker thread for all members; how many containers the engine itself starts
in a second is the floor for both.
"""

from __future__ import annotations

import time

from support.docker_hub import DockerHub, docker_hub
from support.report import Report, argument_parser, in_turns, pair

AT_ONCE = 20
MOST = 0.8


def burst(hub: DockerHub, names: list[str]) -> tuple[float, float]:
    """Seconds until all are ready, and then until all are gone."""
    began = time.perf_counter()
    hub.members.spawn_all(names, at_once=len(names))
    ready = time.perf_counter()
    hub.members.stop_all(names, at_once=len(names))
    return ready - began, time.perf_counter() - ready


def main() -> None:
    parser = argument_parser(__doc__, runs=8)
    parser.add_argument("--servers", type=int, default=AT_ONCE, help=f"spawns at once ({AT_ONCE})")
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "stock": []}
    with docker_hub(args.servers) as hub:
        for names in (hub.ours, hub.stock):
            burst(hub, names)  # the first of all loads what the next ones share
        in_turns(
            args.runs,
            lambda turn: found["ours"].append(burst(hub, hub.ours)),
            lambda turn: found["stock"].append(burst(hub, hub.stock)),
        )
    columns = ("what", "bursts", "GPUDockerSpawner, s", "DockerSpawner, s", "ratio")
    report = Report("burst", columns)
    report.figure("servers", args.servers)
    report.figure("runs", args.runs)
    for at, name in enumerate(("spawns", "stops")):
        both = pair([run[at] for run in found["ours"]], [run[at] for run in found["stock"]])
        texts = (both.ours.text(2), both.baseline.text(2), both.ratios.text(3))
        report.row(f"{args.servers} {name} at once", str(args.runs), *texts)
        report.figure(f"{name}_ours_s", both.ours.median)
        report.figure(f"{name}_stock_s", both.baseline.median)
        report.figure(f"{name}_ratio", both.ratios.median, MOST if name == "spawns" else None)
    report.print(args.json)


if __name__ == "__main__":
    main()
