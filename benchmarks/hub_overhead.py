"""What leases add to a hub's own work, at 1,000 devices and 500 open leases.

Real: one JupyterHub process, its REST API, the broker on SQLite. Nothing else is there to
be measured: the spawners start nothing, and the proxy is a dictionary. In turns, a member of
the one spawner and a member of the other get a server and stop it again; the second spawner
differs from the first by GPUSpawnerMixin alone, which leases one device to each server.

* ``processor``: processor time of the hub's process for one spawn and stop, all threads;
* ``event loop``: the part of it that the event loop's thread spends;
* ``wall``: time until both requests are answered;
* ``longest step``: how long the mixin's own code ever held the event loop at a stretch;
* ``ticker``: how late a 1 ms ticker on an idle event loop is while leases are granted and
  released beside it without a pause, and while nothing happens: work in other threads holds
  the loop too, through Python's lock.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from support import HUB_PATH
from support.answering import answering_server
from support.members import Members, cpu_seconds
from support.report import Pair, Report, Series, arguments, in_turns, pair, quantile

from tests.support.hub import HubProcess

DEVICES = 1000
LEASES = 500
MEMBERS = 5
WARM_UP = 10
TICKER_SECONDS = 1.0
TICKER_TURNS = 10

CONFIG = f"""
from support.either import by_name
from support.inside import HANDLERS, TimedNoopSpawner
from support.noop import GPUNoopSpawner, MemoryProxy, NoopSpawner
c.JupyterHub.spawner_class = by_name(
    {{"ours": GPUNoopSpawner, "plain": NoopSpawner, "timed": TimedNoopSpawner}}
)
c.JupyterHub.proxy_class = MemoryProxy
c.JupyterHub.extra_handlers = HANDLERS
c.Spawner.poll_interval = 3600
c.Broker.device_source = "simulated:{DEVICES}xA100-80GB"
c.Broker.opening_grant = 1000000
"""


class DirectHub(HubProcess):
    """A hub that is spoken to without a proxy."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.hub_port}"


class Bench:
    """One hub and what is measured on it."""

    def __init__(self, hub: HubProcess) -> None:
        self.hub = hub
        self.members = Members(hub, connections=8)
        self.found: dict[str, dict[str, list[float]]] = {}

    def prepare(self) -> None:
        """Members, and the servers that hold a lease all along."""
        held = [f"ours-held-{n}" for n in range(LEASES)]
        sides = ("ours", "plain", "timed")
        self.members.add(held + [f"{side}-{n}" for side in sides for n in range(MEMBERS)])
        self.members.spawn_all(held, at_once=8)

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
        for count in (WARM_UP, runs):
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
        return {what: pair(ours[what], plain[what]) for what in ours}

    def steps(self, runs: int) -> list[float]:
        """Seconds for which our code held the event loop, step by step."""
        self.members.ask("steps")
        for turn in range(runs):
            self.members.spawn(f"timed-{turn % MEMBERS}")
            self.members.stop(f"timed-{turn % MEMBERS}")
        found: list[float] = self.members.ask("steps")
        return found

    def ticker(self, turns: int) -> tuple[list[float], list[float], int]:
        """Lateness beside grants, lateness without, and how many grants there were."""
        beside: list[float] = []
        quiet: list[float] = []
        grants = 0
        for _ in range(turns):
            busy = self.members.ask("ticker", seconds=TICKER_SECONDS, grants=1)
            beside += busy["late"]
            grants += busy["grants"]
            quiet += self.members.ask("ticker", seconds=TICKER_SECONDS, grants=0)["late"]
        return beside, quiet, grants


def main() -> None:
    args = arguments(__doc__, runs=200)
    with tempfile.TemporaryDirectory() as folder, answering_server() as address:
        environment = {**HUB_PATH, "BENCHMARK_ADDRESS": address}
        with DirectHub(Path(folder), CONFIG, environment=environment) as hub:
            bench = Bench(hub)
            bench.prepare()
            pairs = bench.compare(args.runs)
            steps = bench.steps(args.runs)
            beside, quiet, grants = bench.ticker(min(args.runs, TICKER_TURNS))
    report(pairs, steps, beside, quiet, grants).print(args.json)


def report(
    pairs: dict[str, Pair],
    steps: list[float],
    beside: list[float],
    quiet: list[float],
    grants: int,
) -> Report:
    """The table. All values come in seconds."""
    columns = ("a spawn and a stop", "runs", "ours, ms", "stock hub, ms", "added, ms", "ratio")
    found = Report("hub_overhead", columns)
    found.figure("devices", DEVICES)
    found.figure("open_leases", LEASES)
    found.figure("runs", len(pairs["wall"].ours.values))
    for what, both in pairs.items():
        in_ms = pair([1e3 * s for s in both.ours.values], [1e3 * s for s in both.baseline.values])
        added = Series(
            tuple(a - b for a, b in zip(in_ms.ours.values, in_ms.baseline.values, strict=True))
        )
        found.row(
            what,
            str(len(both.ours.values)),
            in_ms.ours.text(),
            in_ms.baseline.text(),
            added.text(2),
            in_ms.ratios.text(3),
        )
        name = what.replace(" ", "_")
        found.figure(f"{name}_ours_ms", in_ms.ours.median)
        found.figure(f"{name}_stock_ms", in_ms.baseline.median)
        found.figure(f"{name}_added_ms", added.median)
        found.figure(
            f"{name}_ratio", in_ms.ratios.median, most=1.05 if what == "processor" else None
        )
    found.figure("longest_step_ms", 1e3 * max(steps), most=10)
    found.figure("ticker_beside_grants_p99_ms", 1e3 * quantile(beside, 0.99))
    found.figure("ticker_beside_grants_max_ms", 1e3 * max(beside), most=10)
    found.figure("ticker_quiet_p99_ms", 1e3 * quantile(quiet, 0.99))
    found.figure("ticker_quiet_max_ms", 1e3 * max(quiet))
    found.notes += [
        f"longest step of ours on the event loop: {1e3 * max(steps):.1f} ms of {len(steps)} steps",
        f"1 ms ticker beside {grants} grants: late by p99 {1e3 * quantile(beside, 0.99):.1f} ms, "
        f"at most {1e3 * max(beside):.1f} ms; while nothing happens: p99 "
        f"{1e3 * quantile(quiet, 0.99):.1f} ms, at most {1e3 * max(quiet):.1f} ms",
    ]
    return found


if __name__ == "__main__":
    main()
