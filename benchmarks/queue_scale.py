"""What one decision takes with 10,000 tickets waiting and 1,000 devices leased.

Four kinds of devices; requests for 1 to 16 of them that fit one kind or several; 3,000 members in
40 groups, some with limits; half of the sessions have an end that is known. A virtual clock leaps
from one end of a session to the next; as many tickets come as start, and some are withdrawn, so
that 10,000 wait at all times. Each decision is timed by itself, in processor time of the process
(other processes of a shared machine are not ours) and by the clock. Two sites:

* ``wanted``: there are tickets for every kind of device;
* ``unwanted``: 50 devices are free at all times that few can use, so that no decision may stop
  at the first tickets of the line.

The baseline is what is done without an index: sort all tickets by their score, then walk. It is
timed every tenth decision, on the same tickets and the same devices; it has no limits, learns no
lengths and plans no starts.
"""

from __future__ import annotations

import heapq
import math
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

from support.report import Report, Series, argument_parser, quantile

from gpuspawner.core.units import DeviceCount
from gpuspawner.queue.estimates import DevicesAhead, Estimator
from gpuspawner.queue.models import Decision, QueueLimits, RunningLease, WaitingTicket
from gpuspawner.queue.scheduler import Scheduler

TICKETS = 10_000
KINDS = {"a100": 400, "l40s": 300, "v100": 200, "t4": 100}
UNWANTED = {"k80": 50}
FITS = [
    frozenset({"a100"}),
    frozenset({"l40s"}),
    frozenset({"v100"}),
    frozenset({"a100", "l40s"}),
    frozenset({"v100", "t4"}),
    frozenset(KINDS),
]
WIDTHS = (1, 1, 1, 1, 1, 1, 1, 2, 2, 4, 8, 16)
HOUR = 3600.0
MOST_MS = 5.0
SEED = 1

Timed = TypeVar("Timed")


class Site:
    """Members who ask, sessions that end, and the production scheduler between them."""

    def __init__(self, unwanted: bool) -> None:
        self.random = random.Random(SEED)
        self.now = 1.7e9
        self.free = {**KINDS, **(UNWANTED if unwanted else {})}
        self.scheduler = Scheduler(
            member_limits=QueueLimits(devices=16),
            group_limits={
                f"group {g}": QueueLimits(devices=40, gpu_hours=400.0) for g in range(0, 40, 4)
            },
        )
        self.scheduler.set_capacity(self.free)
        self.estimator = Estimator()
        self.ends: list[tuple[float, str]] = []
        self._number = 0

    def ask(self) -> str:
        """One more ticket."""
        self._number += 1
        member = self.random.randrange(3000)
        ticket = WaitingTicket(
            id=f"{self._number:08x}",
            member=f"member {member}",
            group=f"group {member % 40}",
            devices=self.random.choice(WIDTHS),
            kinds=self.random.choice(FITS),
            asked_at=self.now,
            seconds=self.random.choice((None, 1800.0, 4 * HOUR, 8 * HOUR)[: 2 + member % 3]),
        )
        self.scheduler.submit(ticket)
        self.estimator.asked(ticket)
        return ticket.id

    def start(self, ticket_id: str, held: Mapping[str, DeviceCount]) -> None:
        ticket = self.scheduler.waiting[ticket_id]
        lasts = self.random.expovariate(1 / (3 * HOUR))
        lease = RunningLease(
            id=ticket_id,
            member=ticket.member,
            group=ticket.group,
            held=held,
            started_at=self.now,
            ends_at=None if ticket.seconds is None else self.now + ticket.seconds,
        )
        for kind, devices in held.items():
            self.free[kind] -= devices
        heapq.heappush(self.ends, (self.now + min(lasts, ticket.seconds or math.inf), ticket_id))
        self.scheduler.started(lease)
        self.estimator.started(lease)

    def end(self) -> None:
        """Time goes on to the next end of a session."""
        self.now, lease_id = heapq.heappop(self.ends)
        for kind, devices in self.scheduler.running[lease_id].held.items():
            self.free[kind] += devices
        self.scheduler.ended(lease_id, self.now)

    def leave(self) -> None:
        """One of those who wait loses patience."""
        ticket_id = self.random.choice(list(self.scheduler.waiting))
        self.scheduler.withdraw(ticket_id)
        self.estimator.withdrawn(ticket_id, self.now)

    def fill(self) -> None:
        """A line that has grown over two days, with all devices leased."""
        while len(self.scheduler.waiting) < TICKETS:
            for _ in range(50):
                self.now += 2 * 24 * HOUR / TICKETS
                self.ask()
            while self.ends and self.ends[0][0] <= self.now:
                self.end()
            self.decide_and_start()

    def decide_and_start(self) -> None:
        decision = self.scheduler.decide(self.now, self.free)
        for ticket_id in decision.starts:
            self.start(ticket_id, decision.takes[ticket_id])


class Clocks:
    """Milliseconds of the same thing, many times."""

    def __init__(self) -> None:
        self.processor: list[float] = []
        self.wall: list[float] = []

    def time(self, what: Callable[[], Timed]) -> Timed:
        wall, processor = time.perf_counter(), time.process_time()
        result = what()
        self.processor.append(1000 * (time.process_time() - processor))
        self.wall.append(1000 * (time.perf_counter() - wall))
        return result

    def cells(self) -> tuple[str, ...]:
        cpu = self.processor
        figures = (quantile(cpu, 0.99), max(cpu), quantile(self.wall, 0.99))
        return (str(len(cpu)), Series(tuple(cpu)).text(3), *(f"{ms:.2f}" for ms in figures))


def main() -> None:
    options = argument_parser(__doc__, 2000).parse_args()
    columns = ("site", "what", "times", "ms, median (p10-p90)", "p99", "most", "p99 by the clock")
    report = Report("queue_scale", columns)
    report.figure("runs", options.runs)
    for name, unwanted in (("wanted", False), ("unwanted", True)):
        measure(report, name, Site(unwanted), options.runs)
    memory(report)
    report.print(options.json)


def measure(report: Report, name: str, site: Site, decisions: int) -> None:
    """The rows and figures of one site."""
    site.fill()
    scheduler = site.scheduler
    ours, planned, baseline, place, line, order, event, estimates = (Clocks() for _ in range(8))
    for turn in range(decisions):
        site.end()
        decide = partial(scheduler.decide, site.now, site.free)
        decision = ours.time(decide)
        if turn % 10 == 0:
            planned.time(partial(decide, planned=8))
            baseline.time(partial(sort_and_walk, site))
        newest = event.time(partial(follow, site, decision))
        place.time(partial(scheduler.place, newest, site.now))
        if turn % 50 == 0:
            line.time(partial(scheduler.in_line, site.now))
            order.time(partial(scheduler.order, site.now))
            estimates.time(partial(estimate_all, site))
    report.row(name, "a decision", *ours.cells())
    report.row(name, "baseline: sort and walk", *baseline.cells())
    report.row(name, "a decision that plans 8 starts", *planned.cells())
    report.row(name, "what it starts, what comes", *event.cells())
    report.row(name, "the place of a newcomer", *place.cells())
    report.row(name, "the whole line, ids", *line.cells())
    report.row(name, "the whole line, with scores", *order.cells())
    report.row(name, "all estimates", *estimates.cells())
    p99 = quantile(ours.processor, 0.99)
    report.figure(f"{name}_decision_ms_p99", p99, MOST_MS)
    report.figure(f"{name}_decision_ms_median", quantile(ours.processor, 0.5))
    report.figure(f"{name}_decision_ratio", p99 / quantile(baseline.processor, 0.99))
    report.figure(f"{name}_place_ms_p99", quantile(place.processor, 0.99))
    report.figure(f"{name}_estimate_ms", quantile(estimates.processor, 0.5) / TICKETS, 0.1)


def follow(site: Site, decision: Decision) -> str:
    """What was decided begins; as many tickets come, the last of which is returned."""
    for ticket_id in decision.starts:
        site.start(ticket_id, decision.takes[ticket_id])
    if site.random.random() < 0.05:
        site.leave()
    newest = site.ask()
    while len(site.scheduler.waiting) < TICKETS:
        newest = site.ask()
    return newest


def estimate_all(site: Site) -> int:
    """An estimate for each ticket in the queue, as the pages ask for them; how many there are."""
    ahead, said = DevicesAhead(), 0
    for ticket_id in site.scheduler.in_line(site.now):
        before = ahead.of(site.scheduler.waiting[ticket_id])
        said += site.estimator.estimate(ticket_id, site.now, before) is not None
    return said


def sort_and_walk(site: Site) -> list[str]:
    """The baseline: score everybody, sort, start who fits."""

    def score(ticket: WaitingTicket) -> tuple[float, str]:
        hours = ticket.devices * (ticket.seconds or 2 * HOUR) / HOUR
        return (site.now - ticket.asked_at) / HOUR / 15 - math.log2(hours), ticket.id

    left = dict(site.free)
    starts = []
    for ticket in sorted(site.scheduler.waiting.values(), key=score, reverse=True):
        kind = next((k for k in ticket.kinds if left.get(k, 0) >= ticket.devices), None)
        if kind is not None:
            left[kind] -= ticket.devices
            starts.append(ticket.id)
    return starts


def memory(report: Report) -> None:
    """What the line and the estimates of 10,000 tickets take."""
    tracemalloc.start()
    try:
        sizes = list(grow())
    finally:
        tracemalloc.stop()
    empty, line, estimated = sizes
    report.figure("kb_a_ticket", (line - empty) / TICKETS / 1000)
    report.figure("kb_a_ticket_estimated", (estimated - empty) / TICKETS / 1000)
    report.notes.append(
        f"Memory: {(line - empty) / TICKETS / 1000:.1f} kB a ticket with its place, "
        f"{(estimated - empty) / TICKETS / 1000:.1f} kB once it has had estimates for two days."
    )


def grow() -> Iterator[int]:
    """Bytes in use: with an empty line, with 10,000 tickets, and when all have been estimated."""
    site = Site(False)
    yield tracemalloc.get_traced_memory()[0]
    site.fill()
    yield tracemalloc.get_traced_memory()[0]
    for _ in range(12):
        estimate_all(site)
        site.now += 4 * HOUR
    yield tracemalloc.get_traced_memory()[0]


if __name__ == "__main__":
    main()
