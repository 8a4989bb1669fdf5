"""Servers on a cluster against servers on one machine, and a seeded day on 44 GPUs.

Real: Slurm with its daemons and database, Docker Engines in networks of their own, JupyterHub with
its proxy and the accounting service, SQLite. The GPUs are stand-ins, and all of it shares this
machine: a cluster's nodes are not as quick here as machines of their own.

* ``submit to ready``: until a server that answers at once is ready, on a free GPU. ``submit to
  kernel``: until a kernel of JupyterLab's image has answered. Both with GPUDockerSpawner on the
  first node's engine, in turns, as the baseline; same image, same requests;
* ``GPU freed``: from a member's stop until the server of the next one in the queue is ready;
* ``container dead``: from the kill of a server's process until its lease has ended, and with it
  the job in Slurm;
* ``node lost``: from the cut of its cable until the leases on it have ended.

The day: 12 teams, 200 sessions, 7 nodes (see support/slurm_event.py), an hour in some seconds.
``difference``: our seconds and sacct's of one session, the greatest. ``longest step``: how long our
code ever held the hub's event loop; the clock also runs while others have the processor, of which
this machine has two for everything.

``queries``: how often hub and service together asked Slurm's controller anything (with squeue,
sinfo and sdiag, and with scancel when it looks for a job by its name; not what a node's prolog asks
at the start of a job where other servers run); ``looks``: how often the hub asked for its jobs;
``database``: calls of sacctmgr and sacct, most of them for members who are new, as all are on this
day.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

from support import say
from support.report import Report, Series, argument_parser, in_turns, pair
from support.slurm_event import NODES, SESSIONS, Day, live_a_day
from support.slurm_hubs import Hubs, hubs

from tests.support.processes import wait_for

MOST_RATIO = 1.3
MOST_FREED = 5
MOST_DEAD = 3
MOST_LOST = 25
MOST_STEP_MS = 20
MOST_QUERIES = 1

Found = dict[str, dict[str, list[float]]]


def spawns(both: Hubs, runs: int, kernels: int) -> Found:
    """Seconds of each step, by side."""
    sides = {"ours": both.ours, "single": both.single}
    found: Found = {}

    def quick(name: str) -> None:
        ready, gone = sides[name].to_ready()
        found[name]["ready"].append(ready)
        found[name]["gone"].append(gone)

    def notebook(name: str) -> None:
        found[name]["kernel"].append(sides[name].to_kernel())

    for count in (1, runs):  # the first of all loads what the next ones share
        found.update({name: {"ready": [], "gone": [], "kernel": []} for name in sides})
        say(f"spawns: {count} of each side, and {min(count, kernels)} notebooks")
        in_turns(count, lambda _: quick("ours"), lambda _: quick("single"))
        more = min(count, kernels)
        in_turns(more, lambda _: notebook("ours"), lambda _: notebook("single"))
    return found


def freed(both: Hubs) -> float:
    """Seconds from a stop to the next member's server."""
    hub = both.slurm
    hub.ask("bench", gpus=1, gpu_model="H100")
    first = hub.wait_lease("bench")
    with ThreadPoolExecutor(1) as threads:  # the hub answers when the server is ready
        waits = threads.submit(hub.ask, "next", gpus=1, gpu_model="H100", wait=True)
        pending = ("squeue", "-h", "-t", "pending")
        wait_for(lambda: both.cluster.run(*pending), "the next one to wait")
        time.sleep(2)
        began = time.perf_counter()
        hub.api("DELETE", "users/bench/server")
        hub.wait_lease("next")
        took = time.perf_counter() - began
        waits.result()
    hub.wait_end(first)
    hub.stop_server("next")
    return took


def dead(both: Hubs) -> float:
    """Seconds from the death of a container to the end of its lease."""
    hub = both.slurm
    hub.ask("bench", gpus=2)
    lease = hub.wait_lease("bench")
    node = hub.node_of(lease)
    (container,) = hub.containers(node)
    time.sleep(2)
    began = time.perf_counter()
    node.engine.client.kill(container["Id"])
    hub.wait_end(lease)
    took = time.perf_counter() - began
    wait_for(lambda: hub.server("bench") is None, "the hub to know")
    return took


def lost(both: Hubs) -> float:
    """Seconds from the loss of a node to the end of the leases on it."""
    hub, cluster = both.slurm, both.cluster
    hub.ask("bench", gpus=1, gpu_model="H100")
    lease = hub.wait_lease("bench")
    node = hub.node_of(lease)
    time.sleep(2)
    began = time.perf_counter()
    cluster.cut(node)
    hub.wait_end(lease, timeout=90)
    took = time.perf_counter() - began
    wait_for(lambda: hub.server("bench") is None, "the hub to know")
    cluster.heal(node)
    cluster.wait_nodes()
    wait_for(lambda: not hub.containers(node), "its container to go")
    return took


def main() -> None:
    parser = argument_parser(__doc__, runs=20)
    parser.add_argument("--kernels", type=int, default=8, help="notebooks of each side (8)")
    parser.add_argument("--faults", type=int, default=3, help="runs of each fault (3)")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help=f"of the day ({SESSIONS})")
    parser.add_argument("--minutes", type=float, default=10, help="that the day is lived in (10)")
    parser.add_argument("--nodes", type=int, default=len(NODES), help=f"for it ({len(NODES)})")
    parser.add_argument("--only", choices=("spawns", "faults", "day"), help="one part alone")
    args = parser.parse_args()
    report = Report("slurm", ("what", "runs", "on the cluster, s", "on one machine, s", "ratio"))
    report.figure("runs", args.runs)
    parts = {
        ("spawns", "faults"): lambda: measure_pair(report, args),
        ("day",): lambda: add_day(report, live_a_day(args.sessions, args.minutes * 60, args.nodes)),
    }
    failed = False
    for names, measure in parts.items():
        if args.only is not None and args.only not in names:
            continue
        try:
            measure()
        except Exception as error:  # what the other part took so long to find is not lost
            traceback.print_exception(error)
            report.notes.append(f"{' and '.join(names)} FAILED: {error!r:.200}")
            failed = True
    report.print(args.json)
    sys.exit(1 if failed else 0)


def measure_pair(report: Report, args: argparse.Namespace) -> None:
    """What is measured on a cluster of two nodes, beside a hub of one machine."""
    with hubs() as both:
        if args.only != "faults":
            add_spawns(report, spawns(both, args.runs, min(args.runs, args.kernels)))
        if args.only != "spawns":
            add_faults(report, both, min(args.runs, args.faults))


def add_spawns(report: Report, found: Found) -> None:
    """Rows of both sides."""
    names = {
        "ready": "submit to ready",
        "gone": "stop to gone",
        "kernel": "submit to kernel",
    }
    for key, what in names.items():
        both = pair(found["ours"][key], found["single"][key])
        texts = (both.ours.text(2), both.baseline.text(2), both.ratios.text(2))
        report.row(what, str(len(both.ours.values)), *texts)
        report.figure(f"{key}_cluster_s", both.ours.median)
        report.figure(f"{key}_single_s", both.baseline.median)
        most = MOST_RATIO if key == "kernel" else None
        report.figure(f"{key}_ratio", both.ours.median / both.baseline.median, most)


def add_faults(report: Report, both: Hubs, runs: int) -> None:
    """Rows of what a GPU does when somebody goes."""
    for what, measure, most in (
        ("GPU freed", freed, MOST_FREED),
        ("container dead", dead, MOST_DEAD),
        ("node lost", lost, MOST_LOST),
    ):
        say(f"{what}: {runs} times")
        found = Series(tuple(measure(both) for _ in range(runs)))
        report.row(what, str(runs), found.text(2), "", "")
        name = what.replace(" ", "_")
        report.figure(f"{name}_s", found.median)
        report.figure(f"{name}_worst_s", max(found.values), most)


def add_day(report: Report, day: Day) -> None:
    """What became of the day."""
    report.notes += day.sentences()
    report.figure("day_sessions", day.sessions)
    report.figure("day_lost", day.lost, 0)
    report.figure("day_difference_s", day.difference, 1)
    report.figure("day_longest_step_ms", 1e3 * day.steps.clock, MOST_STEP_MS)
    report.figure("day_longest_step_processor_ms", 1e3 * day.steps.work)
    report.figure("day_looks_a_second", day.looks / day.seconds)
    report.figure("day_queries_a_second", day.queries / day.seconds, MOST_QUERIES)
    report.figure("day_database_a_second", day.database / day.seconds)


if __name__ == "__main__":
    main()
