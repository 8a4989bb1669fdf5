"""How long members would have waited: a trace under our scheduler and under other policies.

Real: :class:`gpuspawner.queue.scheduler.Scheduler`, the class that the hub runs, event by event;
the clock is virtual. Nobody knows how long a job will last but the clairvoyant bound and EASY
backfill, which are told exactly. No preemption; a job's GPUs are given all at once, from one
pool of GPUs that are all alike; the trace's virtual cluster is the group, and there are no
members. A job wider than the pool is refused, as the hub does.

Waits in hours. ``slowdown`` is the mean of (wait + duration) / max(duration, 10 s), at least 1;
``worst`` the mean wait of the group that waited longest; ``fairness`` Jain's index over groups.
``half`` says which jobs a row is about: all, or those of the second half of the trace, of which
nothing was seen when the parameters were chosen.

``--trace FILE`` is a CSV as ``gpuspawner simulate`` takes it. The figures of benchmarks/README.md
are of the Philly trace (Microsoft, CC-BY-4.0; Jeon et al., USENIX ATC 2019) in the form that the
authors of Pollux published: github.com/petuum/adaptdl, branch osdi21-artifact.
"""

from __future__ import annotations

import sys
import time

from support.report import Report, argument_parser

from gpuspawner.queue import replay
from gpuspawner.queue.replay import (
    ANY,
    ReplayFigures,
    ReplayTarget,
    TraceJob,
    figures,
    read_trace,
    replay_trace,
)
from gpuspawner.queue.scheduler import Scheduler

OURS = "gpuspawner"
TARGET_GPUS = 600
MOST = {
    "mean_h": 2.4,
    "slowdown": 10.0,
    "worst_group_h": 24.0,
    "longest_days": 7.0,
    "seconds": 5.0,
}
"""At 600 GPUs, for the whole trace."""


def main() -> None:
    parser = argument_parser(__doc__, runs=1)
    parser.add_argument("--trace", help="the CSV of jobs (.gz is unpacked)")
    parser.add_argument("--gpus", type=int, action="append", help="so many GPUs; may be repeated")
    parser.add_argument("--policy", action="append", help="only this policy; may be repeated")
    args = parser.parse_args()
    if not args.trace:
        print("queue_replay needs --trace FILE; its docstring says where there is one. Left out.")
        sys.exit(0)
    jobs = read_trace(args.trace)
    columns = (
        "GPUs", "policy", "half", "mean", "p50", "p95", "longest, d", "worst", "slowdown",
        "used", "fairness", "replay, s",
    )  # fmt: skip
    report = Report("queue_replay", columns)
    report.figure("jobs", len(jobs))
    for gpus in args.gpus or [TARGET_GPUS]:
        for name in args.policy or [OURS, *replay.NAMES]:
            play(report, jobs, gpus, name)
    report.print(args.json)


def play(report: Report, jobs: list[TraceJob], gpus: int, name: str) -> None:
    """One policy at one size: two rows, and the figures of the first."""
    player = ours(gpus) if name == OURS else replay.make(name, jobs)
    began = time.process_time()
    played = replay_trace(jobs, {ANY: gpus}, player, replay.wakes(name))
    seconds = time.process_time() - began
    whole = figures(played)
    add_row(report, gpus, name, "both", whole, f"{seconds:.1f}")
    add_row(report, gpus, name, "second", figures(played, len(jobs) // 2), "")
    values = {
        "mean_h": whole.mean,
        "slowdown": whole.slowdown,
        "worst_group_h": whole.worst_group,
        "longest_days": whole.longest / 24,
        "seconds": seconds,
    }
    for what, value in values.items():
        most = MOST[what] if (gpus, name) == (TARGET_GPUS, OURS) else None
        report.figure(f"{name}_{gpus}_{what}", value, most)


def ours(gpus: int) -> ReplayTarget:
    """The hub's own scheduler as it comes."""
    scheduler = Scheduler()
    scheduler.set_capacity({ANY: gpus})
    return scheduler


def add_row(
    report: Report, gpus: int, name: str, half: str, some: ReplayFigures, seconds: str
) -> None:
    report.row(
        str(gpus),
        name,
        half,
        f"{some.mean:.2f}",
        f"{some.p50:.2f}",
        f"{some.p95:.2f}",
        f"{some.longest / 24:.1f}",
        f"{some.worst_group:.1f}",
        f"{some.slowdown:.1f}",
        f"{some.utilisation:.0%}",
        f"{some.fairness:.3f}",
        seconds,
    )


if __name__ == "__main__":
    main()
