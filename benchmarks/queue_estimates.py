"""Does the interval shown to a ticket hold its true start, and how wide is it?

A trace is replayed with a virtual clock, the production scheduler and the production estimator;
nobody knows how long a session will last. Each ticket that does not start at once is told when
it will probably start, as a member would be: with what is known at that moment. Who starts at
once has no ticket, and is not counted. Beside ours, in the same run:

* ``latest``: the 10th to the 90th percentile of the last 500 waits;
* ``afterwards``: the narrowest interval that is right for 80% when the same is told to all
  tickets, known only when all is over.

``inside`` is the part of the tickets that started within their interval, ``score`` the mean
interval score (the width, and ten times what it misses by): the less the better, and a wide
interval cannot make up for it. The rows below say whether 80% of all is 80% of each kind of
ticket. ``told again`` are the same tickets at the ages of 1, 2, 4, ... minutes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence

from support.report import Report, argument_parser
from support.telling import Telling, Told, narrowest

from gpuspawner.queue.replay import ANY, read_trace, replay_trace
from gpuspawner.queue.scheduler import Scheduler

HOUR = 3600.0
DAY = 24 * HOUR
MOST_OUTSIDE = 0.2
FEW = 200
"""Kinds of tickets of which there are fewer are left out."""


def main() -> None:
    parser = argument_parser(__doc__, 1)
    parser.add_argument("--trace", help="a CSV file, as of `gpuspawner simulate`")
    parser.add_argument("--gpus", type=int, action="append", help="devices (600), repeatable")
    options = parser.parse_args()
    if not options.trace:
        print("queue_estimates needs --trace FILE, as queue_replay does. Left out.")
        sys.exit(0)
    jobs = read_trace(options.trace)
    half = jobs[len(jobs) // 2].asked_at
    columns = ("devices", "tickets", "number", "inside", "median width", "too late", "score")
    report = Report("queue_estimates", columns)
    for devices in options.gpus or [600]:
        scheduler = Scheduler()
        scheduler.set_capacity({ANY: devices})
        telling = Telling(scheduler)
        replay_trace(jobs, {ANY: devices}, telling)
        fill(report, devices, telling, half)
    report.print(options.json)


def fill(report: Report, devices: int, telling: Telling, half: float) -> None:
    """The rows and figures of one replay."""
    told = [one for one in telling.told if one.first]
    low, high = narrowest([one.wait for one in told], 1 - MOST_OUTSIDE)
    for one in told:
        one.said["afterwards"] = (one.at + low, one.at + high)

    def row(name: str, some: Sequence[Told], who: str = "ours") -> None:
        if len(some) >= FEW:
            report.row(str(devices), name, *cells(some, who))

    row("all", told)
    row("all: latest", told, "latest")
    row("all: afterwards", told, "afterwards")
    row("second half", [one for one in told if one.at >= half])
    row("second half: latest", [one for one in told if one.at >= half], "latest")
    for name, some in kinds(told, lambda one: one.wait / HOUR, (0, 1, 3, 8, 24)):
        row(f"waited {name} h", some)
    for name, some in kinds(told, lambda one: one.ticket.devices, (1, 2, 4, 8)):
        row(f"for {name} GPUs", some)
    begin = told[0].at
    for name, some in kinds(told, lambda one: (one.at - begin) / DAY, (0, 21, 42, 63, 84)):
        row(f"asked in days {name}", some)
    groups = by_group(told)
    row("worst group", groups[0])
    row("median group", groups[len(groups) // 2])
    row("best group", groups[-1])
    again = [one for one in telling.told if not one.first]
    row("told again", again)
    ages = (0, 1, 6, 24)
    for name, some in kinds(again, lambda one: (one.at - one.ticket.asked_at) / HOUR, ages):
        row(f"told again after {name} h", some)

    name = f"{devices}_outside"
    report.figure(name, 1 - inside(told, "ours"), MOST_OUTSIDE if devices == 600 else None)
    second = [one for one in told if one.at >= half]
    report.figure(f"{devices}_outside_second_half", 1 - inside(second, "ours"))
    report.figure(f"{devices}_outside_worst_group", 1 - inside(groups[0], "ours"))
    report.figure(f"{devices}_median_width_hours", width(told, "ours"))
    report.figure(f"{devices}_median_width_hours_afterwards", width(told, "afterwards"))
    report.figure(f"{devices}_microseconds", 1e6 * telling.seconds / max(1, len(telling.told)))
    report.notes.append(
        f"{devices} devices: {len(told)} tickets were told, {telling.not_told} came before enough "
        f"was known. {sum(one.start < one.likely for one in told) / len(told):.0%} started before "
        f"the likely moment. An estimate takes {report.figures[f'{devices}_microseconds']:.0f} us."
    )


def cells(some: Sequence[Told], who: str) -> tuple[str, ...]:
    late = sum(one.start > one.said[who][1] for one in some) / len(some)
    score = statistics.fmean(one.score(who) for one in some)
    return (
        str(len(some)),
        f"{inside(some, who):.1%}",
        f"{width(some, who):.2f} h",
        f"{late:.1%}",
        f"{score / HOUR:.1f} h",
    )


def inside(some: Sequence[Told], who: str) -> float:
    return sum(one.holds(who) for one in some) / len(some)


def width(some: Sequence[Told], who: str) -> float:
    return statistics.median(one.width(who) for one in some) / HOUR


def kinds(
    told: Iterable[Told], value: Callable[[Told], float], bounds: Sequence[float]
) -> list[tuple[str, list[Told]]]:
    """Tickets by the bounds that a value lies between."""
    told = list(told)
    found = []
    for low, high in zip(bounds, [*bounds[1:], float("inf")], strict=True):
        name = f"{low:g} and more" if high == float("inf") else f"{low:g} to {high:g}"
        found.append((name, [one for one in told if low <= value(one) < high]))
    return found


def by_group(told: Iterable[Told]) -> list[list[Told]]:
    """The tickets of each group that has enough of them, the worst served first."""
    groups: dict[str, list[Told]] = {}
    for one in told:
        groups.setdefault(one.ticket.group, []).append(one)
    enough = [some for some in groups.values() if len(some) >= FEW]
    return sorted(enough, key=lambda some: inside(some, "ours"))


if __name__ == "__main__":
    main()
