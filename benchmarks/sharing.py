"""A class on a few GPUs: how many members work, and how long they wait, with and without slots.

Real: :class:`gpuspawner.queue.scheduler.Scheduler`, the class that the hub runs, event by event;
the clock is virtual. A class of 30 has two hours and four GPUs. Its members come within the first
15 minutes, in a random order, and each wants to work for 40 to 110 minutes. In one half of each
pair a member gets a whole GPU, in the other one of four slots of a shared GPU. Who starts less than
20 minutes before the end of the class is not served.

Slots have a price: programs on one GPU take turns. ``slower`` is how much longer computing takes
with slots, if each member's programs compute for ``--busy`` percent of the time at random moments:
1 plus the other programs that compute at the same moment on the same GPU, on average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from statistics import fmean

from support.report import Report, Series, argument_parser, pair

from gpuspawner.devices.models import Device
from gpuspawner.queue.kinds import kind_of
from gpuspawner.queue.models import RunningLease
from gpuspawner.queue.replay import TraceJob, replay_trace
from gpuspawner.queue.scheduler import Scheduler

MINUTE = 60.0
CLASS_MINUTES, COMING_MINUTES, LEAST_MINUTES = 120.0, 15.0, 20.0
SHORTEST_MINUTES, LONGEST_MINUTES = 40.0, 110.0
MOST_UNSERVED = 0.25
"""Members who are not served with slots, at most, as a share of those without."""
MOST_WAIT = 0.5
"""Their mean wait, likewise."""


class RecordingScheduler(Scheduler):
    """Notes on which device each lease is."""

    def __init__(self) -> None:
        super().__init__()
        self.device_of: dict[str, str] = {}

    def started(self, lease: RunningLease) -> None:
        self.device_of[lease.id] = next(iter(lease.held))
        super().started(lease)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What became of one class."""

    unserved: int
    wait_minutes: float
    """The mean of all members; of those who are not served, until the end of the class."""
    slower: float


def main() -> None:
    parser = argument_parser(__doc__, 40)
    parser.add_argument("--members", type=int, default=30)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--busy", type=float, default=20.0, help="percent of the time (20)")
    parser.add_argument("--seed", type=int, default=2026)
    args = parser.parse_args()
    whole, shared = [], []
    for number in range(args.runs):
        for slots, lessons in ((1, whole), (args.slots, shared)):
            random = Random(args.seed + number)  # the same members in both
            lessons.append(lesson(random, args.members, args.gpus, slots, args.busy / 100))
    report = Report("sharing", ("what", "runs", f"{args.slots} slots a GPU", "whole GPUs", "ratio"))
    report.figure("runs", args.runs)
    for name, label, most in (
        ("unserved", "members not served", MOST_UNSERVED),
        ("wait_minutes", "mean wait, minutes", MOST_WAIT),
    ):
        both = pair(*([getattr(each, name) for each in lessons] for lessons in (shared, whole)))
        report.row(
            label, str(args.runs), both.ours.text(), both.baseline.text(), both.ratios.text(3)
        )
        report.figure(f"{name}_ratio", both.ratios.median, most)
    slower = Series(tuple(each.slower for each in shared))
    report.row("computing takes longer", str(args.runs), slower.text(2), "1", slower.text(2))
    report.figure("slower", slower.median)
    report.print(args.json)


def lesson(random: Random, members: int, gpus: int, slots: int, busy: float) -> Lesson:
    """Replay one class on so many GPUs of so many slots each."""
    fleet = [
        Device(uuid=f"GPU-{n}", index=n, model="A100", memory_bytes=80 * 2**30, slots=slots)
        for n in range(gpus)
    ]
    devices: dict[str, int] = {}
    for device in fleet:
        devices[kind_of(device)] = devices.get(kind_of(device), 0) + 1
    coming = sorted(random.uniform(0, COMING_MINUTES) for _ in range(members))
    jobs = [
        TraceJob(
            asked_at=MINUTE * at,
            duration=MINUTE * random.uniform(SHORTEST_MINUTES, LONGEST_MINUTES),
            devices=Fraction(1, slots) if slots > 1 else 1,
            member=f"member{number}",
            kinds=frozenset(devices),
        )
        for number, at in enumerate(coming)
    ]
    scheduler = RecordingScheduler()
    found = replay_trace(jobs, devices, scheduler)
    last = MINUTE * (CLASS_MINUTES - LEAST_MINUTES)
    waits = [
        min(start, MINUTE * CLASS_MINUTES) - job.asked_at
        for job, start in zip(jobs, found.starts, strict=True)
    ]
    return Lesson(
        unserved=sum(start > last for start in found.starts),
        wait_minutes=fmean(waits) / MINUTE,
        slower=1 + busy * neighbours(jobs, found.starts, scheduler.device_of),
    )


def neighbours(
    jobs: Sequence[TraceJob], starts: Sequence[float], device_of: Mapping[str, str]
) -> float:
    """Return how many others are on a session's GPU, on average over the sessions' time."""
    spans = [
        (start, start + job.duration, device_of[str(number)])
        for number, (job, start) in enumerate(zip(jobs, starts, strict=True))
    ]
    shared = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for number, (start, end, device) in enumerate(spans)
        for other, (other_start, other_end, other_device) in enumerate(spans)
        if number != other and device == other_device
    )
    return shared / sum(end - start for start, end, _ in spans)


if __name__ == "__main__":
    main()
