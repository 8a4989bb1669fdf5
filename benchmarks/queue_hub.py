"""What happens in a hub when 2,000 members ask for a server at once and there are 16 devices.

Real: JupyterHub, its REST API, the services on SQLite. The spawners start nothing, and the proxy is
a dictionary, so that the hub itself is measured; ours differs from the stock one by
GPUSpawnerMixin alone. Each run has a hub of its own, in turns; the requests are on open
connections and sent in one go. Both hubs have no ``concurrent_spawn_limit``, as
``gpuspawner.add_services`` sets it; with JupyterHub's default of 100 the hub itself refuses most
of those who would wait, and the last row counts that.

* ``taken up``: spawns a second that reach the pre-spawn stage, from the first to the last;
* ``place told``: seconds from there until the member is told the place in the queue or the device;
* ``longest step``: for how long a single step ever held the event loop.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import HUB_PATH
from support.all_at_once import ask_for_all
from support.answering import answering_server
from support.members import Members
from support.report import Report, Series, argument_parser, in_turns, pair, quantile

from tests.support.hub import DirectHub
from tests.support.processes import wait_for

DEVICES = 16
MEMBERS = 2000
LEAST_RATE = 0.95
MOST_TOLD_MS = 100
MOST_LONGER_MS = 10

CONFIG = f"""
from tests.support.memory_proxy import MemoryProxy
from support.taking_up import HANDLERS, WatchedGPUNoop, WatchedNoop, watch
watch()
c.JupyterHub.spawner_class = {{spawner}}
c.JupyterHub.proxy_class = MemoryProxy
c.JupyterHub.extra_handlers = HANDLERS
c.JupyterHub.cleanup_servers = False
c.Spawner.poll_interval = 3600
c.GPUDevices.source = "simulated:{DEVICES}xA100-80GB"
c.GPUCredits.opening_grant = 1000000
{{limit}}
"""
NO_LIMIT = "c.JupyterHub.concurrent_spawn_limit = 0"
SIDES = {"ours": "WatchedGPUNoop", "stock": "WatchedNoop"}


@dataclass(frozen=True, slots=True)
class Run:
    """One burst on one hub."""

    statuses: Counter[int]
    taken: dict[str, float]
    told: dict[str, float | None]
    steps: list[float]
    waiting: int

    @property
    def rate(self) -> float:
        """Spawns taken up a second."""
        moments = self.taken.values()
        return (len(moments) - 1) / (max(moments) - min(moments))

    @property
    def until_told(self) -> list[float]:
        """Milliseconds until each member knew the place; who never did counts for ever."""
        return [1e3 * ((self.told[name] or float("inf")) - at) for name, at in self.taken.items()]


def burst(side: str, members: int, address: str, limit: str = NO_LIMIT) -> Run:
    """Ask a new hub for everybody's server."""
    config = CONFIG.format(spawner=SIDES[side], limit=limit)
    environment = {**HUB_PATH, "BENCHMARK_ADDRESS": address}
    with (
        tempfile.TemporaryDirectory() as folder,
        DirectHub(Path(folder), config, environment=environment) as hub,
    ):
        client = Members(hub)
        names = [f"member{number}" for number in range(members)]
        client.add(names)
        client.spawn("member0")  # what is done once in a hub's life is not measured
        client.stop("member0")
        client.ask("forget")
        statuses = ask_for_all("127.0.0.1", hub.hub_port, hub.token, names[1:])

        def all_told() -> dict[str, Any] | None:
            found: dict[str, Any] = client.ask("taken")
            refused = statuses[429]
            told = len(found["told"]) if side == "ours" else members
            wanted = len(names) - 1 - refused
            return found if len(found["taken"]) >= wanted and told >= wanted else None

        found = wait_for(all_told, "every request to be taken up", timeout=120)
        hub.kill9()
    return Run(statuses, found["taken"], found["told"], found["steps"], found["waiting"])


def main() -> None:
    parser = argument_parser(__doc__, runs=5)
    parser.add_argument("--members", type=int, default=MEMBERS, help=f"who ask ({MEMBERS})")
    args = parser.parse_args()
    runs: dict[str, list[Run]] = {"ours": [], "stock": []}
    with answering_server() as address:
        in_turns(
            args.runs,
            lambda _: runs["ours"].append(burst("ours", args.members, address)),
            lambda _: runs["stock"].append(burst("stock", args.members, address)),
        )
        limited = burst("stock", args.members, address, limit="")
    report = Report("queue_hub", ("", "runs", "ours", "stock hub", "ours beside it"))
    report.figure("members", args.members)
    report.figure("devices", DEVICES)
    report.figure("runs", args.runs)
    fill(report, runs["ours"], runs["stock"])
    report.row("429, with JupyterHub's default limit", "1", "", str(limited.statuses[429]), "")
    report.print(args.json)


def fill(report: Report, ours: list[Run], stock: list[Run]) -> None:
    """The rows and figures."""
    count = str(len(ours))
    rates = pair([run.rate for run in ours], [run.rate for run in stock])
    texts = (rates.ours.text(), rates.baseline.text(), rates.ratios.text(3))
    report.row("taken up, a second", count, *texts)
    longest = pair([1e3 * run.steps[-1] for run in ours], [1e3 * run.steps[-1] for run in stock])
    both = zip(longest.ours.values, longest.baseline.values, strict=True)
    longer = Series(tuple(a - b for a, b in both))
    texts = (longest.ours.text(), longest.baseline.text(), f"{longer.text()} longer")
    report.row("longest step, ms", count, *texts)
    told = [milliseconds for run in ours for milliseconds in run.until_told]
    for name, part in (("median", 0.5), ("p99", 0.99), ("most", 1.0)):
        report.row(f"place told, {name}, ms", count, f"{quantile(told, part):.1f}", "", "")
    refused = [sum(run.statuses[429] for run in side) for side in (ours, stock)]
    report.row("429", count, str(refused[0]), str(refused[1]), "")
    waiting = Series(tuple(float(run.waiting) for run in ours))
    report.row("tickets in the queue", count, waiting.text(0), "", "")

    report.figure("lost_rate", 1 - rates.ratios.median, 1 - LEAST_RATE)
    report.figure("refused_429", refused[0], 0)
    report.figure("place_told_most_ms", max(told), MOST_TOLD_MS)
    report.figure("place_told_p99_ms", quantile(told, 0.99))
    report.figure("longest_step_ours_ms", longest.ours.median)
    report.figure("longest_step_stock_ms", longest.baseline.median)
    report.figure("longest_step_longer_ms", longer.median, MOST_LONGER_MS)
    report.figure("fewest_tickets", min(waiting.values))


if __name__ == "__main__":
    main()
