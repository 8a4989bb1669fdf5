"""What leases add to a hub's own work, at 1,000 devices and 500 open leases.

Real: one JupyterHub process, its REST API, the services on SQLite. Nothing else is there to
be measured: the spawners start nothing, and the proxy is a dictionary. In turns, a member of
the one spawner and a member of the other get a server and stop it again; the second spawner
differs from the first by GPUSpawnerMixin alone, which leases one device to each server.

* ``capacity``: time for one spawn and stop while eight members spawn and stop at once, without
  a pause, so that the event loop is what all wait for. A hub has one: what takes the loop, or
  Python's lock from it, in whatever thread, makes the hub serve fewer members, and shows here;
  what runs beside it (the disk's flush, SQLite's own code) costs the hub nothing and does not.
  At most 1.15: the Hub is JupyterHub as it comes, and the store plain SQLAlchemy;
* ``event loop``: processor time of the event loop's thread for one spawn and stop, one at a time.
  At most 1.05: members wait for it;
* ``processor``: the same of the hub's whole process, whose other threads work beside the loop;
* ``wall``: time until both requests are answered, one member at a time;
* ``longest step``: how long the mixin's own code ever held the event loop at a stretch;
* ``ticker``: how late a 1 ms ticker on an idle event loop is while leases are granted and
  released beside it without a pause, and while nothing happens: work in other threads holds
  the loop too, through Python's lock. The worst tick of each turn is taken, and of the turns
  the median, so that a moment that the machine gave to others does not decide.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from support import HUB_PATH
from support.answering import answering_server
from support.members import Members, cpu_seconds
from support.report import Pair, Report, Series, argument_parser, in_turns, pair, quantile

from tests.support.hub import DirectHub, HubProcess

DEVICES = 1000
LEASES = 500
MEMBERS = 8
WARM_UP = 10
CAPACITY_TURNS = 100
LIVES = 2
"""Spawns and stops of each member in a turn of ``capacity``."""
TICKER_SECONDS = 1.0
TICKER_TURNS = 20
MOST_RATIO = {"capacity": 1.15, "event loop": 1.05}
MOST_BLOCKED_MS = 10

CONFIG = f"""
from support.either import by_name
from support.inside import HANDLERS, TimedNoopSpawner
from support.noop import GPUNoopSpawner, NoopSpawner
from tests.support.memory_proxy import MemoryProxy
c.JupyterHub.spawner_class = by_name(
    {{"ours": GPUNoopSpawner, "plain": NoopSpawner, "timed": TimedNoopSpawner}}
)
c.JupyterHub.proxy_class = MemoryProxy
c.JupyterHub.extra_handlers = HANDLERS
c.Spawner.poll_interval = 3600
c.GPUDevices.source = "simulated:{DEVICES}xA100-80GB"
c.GPUCredits.opening_grant = 1000000
"""


class Bench:
    """One hub and what is measured on it."""

    def __init__(self, hub: HubProcess) -> None:
        self.hub = hub
        self.members = Members(hub, connections=MEMBERS)
        self.threads = ThreadPoolExecutor(MEMBERS)
        self.found: dict[str, dict[str, list[float]]] = {}

    def prepare(self, leases: int) -> None:
        """Members, and the servers that hold so many leases all along."""
        held = [f"ours-held-{n}" for n in range(leases)]
        sides = ("ours", "plain", "timed")
        self.members.add(held + [f"{side}-{n}" for side in sides for n in range(MEMBERS)])
        self.members.spawn_all(held, at_once=MEMBERS)

    def spawn_and_stop(self, side: str, turn: int) -> None:
        """One turn of one side, measured."""
        name = f"{side}-{turn % MEMBERS}"
        loop = self.members.ask("clock")
        time.sleep(0.01)
        processor, wall = cpu_seconds(self.hub.pid), time.perf_counter()
        self.members.spawn(name)
        self.members.stop(name)
        wall = time.perf_counter() - wall
        time.sleep(0.01)  # what the hub does after its answer counts too
        processor = cpu_seconds(self.hub.pid) - processor
        found = self.found.setdefault(side, {"processor": [], "event loop": [], "wall": []})
        found["processor"].append(processor)
        found["event loop"].append(self.members.ask("clock") - loop)
        found["wall"].append(wall)

    def compare(self, runs: int) -> dict[str, Pair]:
        """Both sides in turns; seconds."""
        for count in (min(WARM_UP, runs), runs):
            self.found.clear()
            in_turns(
                count,
                lambda turn: self.spawn_and_stop("ours", turn),
                lambda turn: self.spawn_and_stop("plain", turn),
            )
        asking = statistics.median(
            -(self.members.ask("clock") - self.members.ask("clock")) for _ in range(30)
        )
        for side in self.found.values():
            side["event loop"] = [seconds - asking for seconds in side["event loop"]]
        ours, plain = self.found["ours"], self.found["plain"]
        return {what: pair(ours[what], plain[what]) for what in ("event loop", "processor", "wall")}

    def all_at_once(self, side: str) -> float:
        """Seconds for one spawn and stop, when every member of a side does them at once."""

        def live(name: str) -> None:
            for _ in range(LIVES):
                self.members.spawn(name)
                self.members.stop(name)

        began = time.perf_counter()
        list(self.threads.map(live, [f"{side}-{number}" for number in range(MEMBERS)]))
        return (time.perf_counter() - began) / (LIVES * MEMBERS)

    def capacity(self, turns: int) -> tuple[Pair, float]:
        """Both sides in turns, seconds; and which part of its time the stock hub's loop worked."""
        found: dict[str, list[float]] = {"ours": [], "plain": []}
        busy: list[float] = []

        def turn(side: str) -> None:
            worked = self.members.ask("clock")
            found[side].append(self.all_at_once(side))
            worked = (self.members.ask("clock") - worked) / (LIVES * MEMBERS)
            if side == "plain":
                busy.append(worked / found[side][-1])

        in_turns(turns, lambda _: turn("ours"), lambda _: turn("plain"))
        return pair(found["ours"], found["plain"]), statistics.median(busy)

    def steps(self, runs: int) -> list[float]:
        """Seconds for which our code held the event loop, step by step."""
        self.members.ask("steps")
        for turn in range(runs):
            self.members.spawn(f"timed-{turn % MEMBERS}")
            self.members.stop(f"timed-{turn % MEMBERS}")
        found: list[float] = self.members.ask("steps")
        return found

    def ticker(self, turns: int) -> Ticks:
        """A second beside grants and a second of quiet, in turns."""
        beside: list[list[float]] = []
        quiet: list[list[float]] = []
        grants = 0
        for _ in range(turns):
            busy = self.members.ask("ticker", seconds=TICKER_SECONDS, grants=1)
            beside.append(busy["late"])
            grants += busy["grants"]
            quiet.append(self.members.ask("ticker", seconds=TICKER_SECONDS, grants=0)["late"])
        return Ticks(beside, quiet, grants)


@dataclass(frozen=True, slots=True)
class Ticks:
    """Seconds by which each tick was late, by turn."""

    beside: list[list[float]]
    quiet: list[list[float]]
    grants: int
    """How many leases were granted and released meanwhile."""


def main() -> None:
    parser = argument_parser(__doc__, runs=200)
    parser.add_argument("--leases", type=int, default=LEASES, help=f"open leases ({LEASES})")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, answering_server() as address:
        environment = {**HUB_PATH, "BENCHMARK_ADDRESS": address}
        with DirectHub(Path(folder), CONFIG, environment=environment) as hub:
            bench = Bench(hub)
            bench.prepare(args.leases)
            pairs = bench.compare(args.runs)
            capacity, busy = bench.capacity(min(args.runs, CAPACITY_TURNS))
            steps = bench.steps(args.runs)
            ticks = bench.ticker(min(args.runs, TICKER_TURNS))
    columns = ("a spawn and a stop", "runs", "ours, ms", "stock hub, ms", "added, ms", "ratio")
    report = Report("hub_overhead", columns)
    report.figure("devices", DEVICES)
    report.figure("open_leases", args.leases)
    report.figure("runs", args.runs)
    add_pairs(report, {"capacity": capacity, **pairs})
    report.figure("capacity_loop_busy", busy)
    report.notes.append(
        f"capacity: {MEMBERS} at once, {LIVES} lives each a turn; the stock hub's event loop "
        f"computes for {busy:.0%} of that time, and waits for its own database in the rest"
    )
    add_blocking(report, steps, ticks)
    report.print(args.json)


def add_pairs(report: Report, pairs: dict[str, Pair]) -> None:
    """What a spawn and a stop cost on either side."""
    for what, both in pairs.items():
        ours, stock = both.ours.times(1e3), both.baseline.times(1e3)
        added = Series(tuple(a - b for a, b in zip(ours.values, stock.values, strict=True)))
        texts = (ours.text(), stock.text(), added.text(2), both.ratios.text(3))
        report.row(what, str(len(ours.values)), *texts)
        name = what.replace(" ", "_")
        report.figure(f"{name}_ours_ms", ours.median)
        report.figure(f"{name}_stock_ms", stock.median)
        report.figure(f"{name}_added_ms", added.median)
        report.figure(f"{name}_ratio", both.ratios.median, MOST_RATIO.get(what))


def add_blocking(report: Report, steps: list[float], ticks: Ticks) -> None:
    """For how long the event loop could not go on because of us."""
    report.figure("longest_step_ms", 1e3 * max(steps), MOST_BLOCKED_MS)
    report.notes.append(
        f"longest step of ours on the event loop: {1e3 * max(steps):.1f} ms, of {len(steps)}"
    )
    for name, turns in (("beside_grants", ticks.beside), ("quiet", ticks.quiet)):
        worst = Series(tuple(1e3 * max(turn) for turn in turns))
        p99 = 1e3 * quantile([late for turn in turns for late in turn], 0.99)
        most = MOST_BLOCKED_MS if name == "beside_grants" else None
        report.figure(f"ticker_{name}_worst_ms", worst.median, most)
        report.figure(f"ticker_{name}_max_ms", max(worst.values))
        report.figure(f"ticker_{name}_p99_ms", p99)
        when = f"beside {ticks.grants} grants" if name == "beside_grants" else "in quiet"
        report.notes.append(
            f"1 ms ticker {when}, {len(turns)} turns of {TICKER_SECONDS:g} s: worst of a turn "
            f"{worst.text()} ms late, of all {max(worst.values):.1f} ms; p99 {p99:.1f} ms"
        )


if __name__ == "__main__":
    main()
