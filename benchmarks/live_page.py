"""For how long 200 viewers of the live page hold up the hub and the service that serves it.

Real: JupyterHub with its proxy, the accounting service with all of its duties, which samples 64
simulated GPUs each second, 48 leases, and 200 members, each with a stream of their own through the
proxy. What the GPUs do changes every second, so that each picture is sent whole.

Turns of quiet and turns of watching take each other's place. In each second of both the worst tick
is taken of a millisecond's ticker on the hub's loop and on the service's, and of the seconds of all
turns the median, and the worst. The first seconds of a turn, in which all viewers come within
three seconds, as they do when the service was started anew, and the hub says who each of them is,
are told apart. A turn is longer than a stream lasts, so each of them comes again in it.

* ``late``: by how much a tick was late, for whatever reason, other programs of the machine too:
  compare it with the same while nobody watches;
* ``computed``: for how long the loop's own thread computed between two ticks. This is what the
  loop is blocked by, and the target is about its worst.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from support import HUB_PATH
from support.members import cpu_seconds
from support.report import Report, Series, argument_parser
from support.viewers import Viewers

from gpuspawner.leases.models import Request, ServerRef
from tests.support.brokers import make_services
from tests.support.hub import HubProcess
from tests.support.processes import free_port, wait_for

GPUS, LEASES, VIEWERS = 64, 48, 200
COMING = 5
"""Seconds in which all viewers come."""
MOST_BLOCKED_MS = 10

CONFIG = """
from support.ticks import HANDLERS
c.JupyterHub.extra_handlers = HANDLERS
c.GPUDatabase.url = {database!r}
c.GPUDevices.source = "simulated:{gpus}xA100-80GB"
c.GPUCredits.opening_grant = 1000000
c.Accounting.reconcile_seconds = 86400
c.JupyterHub.services = []
import gpuspawner
gpuspawner.add_services(c, url={url!r})
for service in c.JupyterHub.services:
    if service["name"] == "gpu":
        service["command"] = [{python!r}, "-m", "support.ticks"]
        service["environment"] |= {environment!r}
"""


class Site:
    """A hub, its service, and GPUs that are never still."""

    def __init__(self, folder: Path, viewers: int) -> None:
        self.ticks = folder / "ticks.jsonl"
        self.script = folder / "script.json"
        database = f"sqlite:///{folder}/gpuspawner.sqlite"
        environment = {**HUB_PATH, "BENCHMARK_TICKS": str(self.ticks)}
        config = CONFIG.format(
            database=database,
            gpus=GPUS,
            url=f"http://127.0.0.1:{free_port()}",
            python=sys.executable,
            environment=environment,
        )
        self._change()
        everywhere = {**HUB_PATH, "GPUSPAWNER_SIMULATION": str(self.script)}
        self.hub = HubProcess(folder / "hub", config, environment=everywhere)
        self._viewers = viewers
        self._database = database
        self._stop = threading.Event()
        self._changing = threading.Thread(target=self._go_on)

    def __enter__(self) -> Site:
        self.hub.start()
        style = f"{self.hub.url}/services/gpu/static/gpu.css"
        wait_for(lambda: requests.get(style, timeout=5).ok, "the service")
        wait_for(self.ticks.exists, "the service's first ticks")
        self._lease()
        names = [f"viewer{number}" for number in range(self._viewers)]
        self.hub.api("POST", "users", json={"usernames": names}).raise_for_status()
        with ThreadPoolExecutor(4) as threads:
            self.tokens = list(threads.map(self.hub.user_token, names))
        self._changing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._changing.join()
        self.hub.stop()

    def _lease(self) -> None:
        source = f"simulated:{GPUS}xA100-80GB"
        services = make_services(database_url=self._database, device_source=source)
        for number in range(LEASES):
            server = ServerRef(f"member{number}")
            lease = services.leases.grant(server, Request(devices=1), engine="none")
            services.leases.confirm(lease.id, "none")
        services.store.close()

    def _change(self) -> None:
        shown = {
            str(index): {
                "use": random.randint(0, 100),
                "used_bytes": random.randint(0, 80) * 2**30,
                "celsius": random.randint(30, 90),
            }
            for index in range(GPUS)
        }
        new = self.script.with_suffix(".new")
        new.write_text(json.dumps(shown))
        os.replace(new, self.script)

    def _go_on(self) -> None:
        while not self._stop.wait(1.0):
            self._change()

    def service(self) -> int:
        """The process of the accounting service."""
        for process in self.hub.children_left():
            if "support.ticks" in process.cmdline():
                return process.pid
        raise RuntimeError("the service does not run")

    def measure(self, seconds: int) -> dict[str, list[tuple[float, float]]]:
        """The worst of each second on both loops."""
        before = len(self._lines())
        url = f"{self.hub.url}/hub/benchmark/ticks"
        hub = requests.get(url, params={"seconds": seconds}, timeout=seconds + 60).json()
        # The seconds of both do not begin together: the first and last of one are left out.
        lines = wait_for(
            lambda: found if len(found := self._lines()) > before + seconds - 1 else None,
            "the service's ticks",
        )
        service = [tuple(json.loads(line)) for line in lines[before + 1 : before + seconds]]
        return {"hub": [tuple(each) for each in hub], "service": service or [(0.0, 0.0)]}

    def _lines(self) -> list[str]:
        return [line for line in self.ticks.read_text().splitlines() if line.endswith("]")]


def main() -> None:
    parser = argument_parser(__doc__, runs=5)
    parser.add_argument("--viewers", type=int, default=VIEWERS, help=f"who watch ({VIEWERS})")
    parser.add_argument("--seconds", type=int, default=65, help="of each turn")
    options = parser.parse_args()
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    pictures: list[float] = []
    spent: list[float] = []
    with tempfile.TemporaryDirectory() as folder, Site(Path(folder), options.viewers) as site:
        time.sleep(COMING)
        for _ in range(options.runs):
            _add(found, "nobody", site.measure(options.seconds))
            with Viewers(f"{site.hub.url}/services/gpu/cluster/live", site.tokens) as viewers:
                _add(found, "coming", site.measure(COMING))
                wait_for(lambda: min(viewers.pictures), "a picture for everybody")
                before, began = sum(viewers.pictures), time.monotonic()
                processor = cpu_seconds(site.service())
                _add(found, "watching", site.measure(options.seconds))
                passed = time.monotonic() - began
                spent.append((cpu_seconds(site.service()) - processor) / passed)
                pictures.append((sum(viewers.pictures) - before) / passed / options.viewers)
                refused, least = viewers.refused, min(viewers.pictures)
            if refused or not least:
                raise SystemExit(f"{refused} were refused; one got {least} pictures")
            time.sleep(2)
    report = Report("live_page", ("loop", "viewers", "seconds", "late, ms", "computed, ms"))
    report.figure("runs", options.runs)
    report.figure("viewers", options.viewers)
    for loop in ("hub", "service"):
        for when, count in (("nobody", 0), ("coming", options.viewers), ("watching", None)):
            _row(report, loop, when, found[loop][when], count or options.viewers * bool(when))
    report.figure("pictures_a_second", Series(tuple(pictures)).median)
    report.figure("service_processor_percent", 100 * Series(tuple(spent)).median)
    report.notes.append(
        f"{GPUS} GPUs; each viewer got {Series(tuple(pictures)).median:.2f} pictures a second; "
        f"the service took {100 * Series(tuple(spent)).median:.0f} % of a core while they watched"
    )
    report.print(options.json)


def _add(
    found: dict[str, dict[str, list[tuple[float, float]]]],
    when: str,
    measured: dict[str, list[tuple[float, float]]],
) -> None:
    for loop, ticks in measured.items():
        found.setdefault(loop, {}).setdefault(when, []).extend(ticks)


def _row(
    report: Report, loop: str, when: str, ticks: Sequence[tuple[float, float]], viewers: int
) -> None:
    late, busy = (Series(tuple(1e3 * tick[at] for tick in ticks)) for at in (0, 1))
    worst = (
        f"{late.text()}, worst {max(late.values):.1f}",
        f"{busy.text(2)}, worst {max(busy.values):.1f}",
    )
    told = {"nobody": "none", "coming": f"{viewers} come", "watching": f"{viewers} watch"}[when]
    report.row(loop, told, str(len(ticks)), *worst)
    report.figure(f"{loop}_{when}_late_ms", late.median)
    report.figure(f"{loop}_{when}_late_worst_ms", max(late.values))
    report.figure(f"{loop}_{when}_computed_ms", busy.median)
    most = MOST_BLOCKED_MS if when == "watching" else None
    report.figure(f"{loop}_{when}_computed_worst_ms", max(busy.values), most)


if __name__ == "__main__":
    main()
