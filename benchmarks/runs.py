"""Runs beside what one would do by hand, and idle GPUs filled with preemptible ones.

Real: Docker Engine, JupyterHub with its proxy, the accounting service, SQLite, images/base with
papermill. The GPUs are a stand-in.

* ``submit to first cell``: from the request ``POST /runs`` until the first cell of a notebook has
  the time; the baseline is `jupyter execute` of the same notebook in a container of the same
  image, user and mounts, from the request that creates it.
* ``GPU free after the end``: from the last cell until the store has the GPU free for others.
* ``1,000 waiting runs``: the hub's event loop beside so many, and without any.
* ``a day``: sessions drawn by a seed on four GPUs, with the production services and a simulated
  clock: alone, and with preemptible runs that fill what is idle. Half of their programs save for 20
  seconds when they are warned; the others do not handle that, and are killed after 10.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import requests
from support import HUB_PATH, say
from support.members import cpu_seconds
from support.report import Report, Series, argument_parser, in_turns, pair

from gpuspawner.core.errors import NoDeviceFree
from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.runs.models import Run, Work
from gpuspawner.services import Services
from tests.support import images
from tests.support.brokers import T0, Clock, open_services
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.processes import free_port, wait_for

GPUS = 4
MOST_FIRST_CELL = 1.1
MOST_FREE_SECONDS = 2.0
MOST_DELAY = 1.01
WAITING = 1000
MEMBERS = 10
USER = "ada"

CATALOG = f"""
environments:
  - slug: base
    display_name: Base
    image: {images.BASE}
    default: true
    devices: {{default: 1, max: {GPUS}}}
"""

CONFIG = """
from support.ticks import HANDLERS
c.JupyterHub.extra_handlers = HANDLERS
c.GPUDockerSpawner.workspace = "{folder}/work-{{raw_username}}"
c.GPUCredits.opening_grant = 1000000
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""

NOTEBOOK = {
    "cells": [
        {
            "cell_type": "code",
            "id": name,
            "metadata": {},
            "execution_count": None,
            "outputs": [],
            "source": f"import time; open('{name}', 'w').write(str(time.time()))",
        }
        for name in ("first", "last")
    ],
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}


@dataclass(slots=True)
class Hub:
    """The hub, and what its members' containers look like."""

    hub: GPUHub
    workspace: Path
    like: dict[str, Any] = field(default_factory=dict)
    """The engine's configuration of a run's container."""


@contextlib.contextmanager
def started() -> Iterator[Hub]:
    with tempfile.TemporaryDirectory() as name, PrivateEngine() as engine:
        folder = Path(name)
        folder.chmod(0o755)
        images.ensure_images(engine, [images.BASE])
        config = CONFIG.format(folder=folder, port=free_port())
        fleet = f"{GPUS}xA100-80GB"
        with GPUHub(
            folder / "hub", engine, config, fleet=fleet, catalog=CATALOG, environment=HUB_PATH
        ) as hub:
            yield Hub(hub, folder / f"work-{USER}")


def submit(hub: GPUHub, user: str, **body: Any) -> dict[str, Any]:
    hub.browser_of(user)
    answer = hub.call(user, "POST", "runs", json=body)
    answer.raise_for_status()
    return dict(answer.json())


def moment(file: Path) -> float:
    """The time that a cell wrote, as soon as it is there."""

    def read() -> str:
        return file.read_text() if file.exists() else ""

    return float(wait_for(read, f"the cell {file.name}", timeout=120, interval=0.01))


def by_run(it: Hub, first: list[float], free: list[float]) -> None:
    """One run of the notebook, by ours."""
    clear(it)
    began = time.time()
    submit(it.hub, USER, notebook="job.ipynb", options={"hours": 1})
    first.append(moment(it.workspace / "first") - began)
    if not it.like:
        (container,) = it.hub.containers()
        it.like = it.hub.engine.client.inspect_container(container["Id"])
    ended = moment(it.workspace / "last")
    wait_for(lambda: not it.hub.taken(), "the GPU", timeout=60, interval=0.01)
    free.append(time.time() - ended)
    wait_for(lambda: not it.hub.containers(), "the end of the container")


def by_hand(it: Hub, first: list[float]) -> None:
    """The same notebook in a container that is made by hand."""
    clear(it)
    client = it.hub.engine.client
    its, host = it.like["Config"], it.like["HostConfig"]
    wanted = ("Binds", "Mounts", "DeviceRequests", "NetworkMode", "ShmSize", "SecurityOpt")
    place = next(m["Destination"] for m in it.like["Mounts"] if m["Source"] == str(it.workspace))
    config = {
        "Image": its["Image"],
        "User": its["User"],
        "Entrypoint": [],
        "Cmd": ["jupyter", "execute", "job.ipynb"],
        "Env": [x for x in its["Env"] if not x.startswith("GPUSPAWNER_RUN")],
        "WorkingDir": place,
        "HostConfig": {name: host[name] for name in wanted if host.get(name)},
    }
    began = time.time()
    made = client.create_container_from_config(config, "by-hand")
    client.start(made["Id"])
    first.append(moment(it.workspace / "first") - began)
    client.wait(made["Id"])
    client.remove_container(made["Id"], force=True)


def clear(it: Hub) -> None:
    for name in ("first", "last"):
        (it.workspace / name).unlink(missing_ok=True)


def first_cell(report: Report, it: Hub, runs: int) -> None:
    """The rows of one run after the other."""
    submit(it.hub, USER, command=["true"])  # the first one makes the workspace
    wait_for(lambda: it.workspace.exists() and not it.hub.taken(), "the workspace", timeout=120)
    (it.workspace / "job.ipynb").write_text(json.dumps(NOTEBOOK))
    ours: list[float] = []
    free: list[float] = []
    hand: list[float] = []
    by_run(it, [], [])  # what is done once is not measured
    in_turns(runs, lambda _: by_run(it, ours, free), lambda _: by_hand(it, hand))
    both = pair(ours, hand)
    texts = (both.ours.text(2), both.baseline.text(2), both.ratios.text(3))
    report.row("submit to first cell, s", str(runs), *texts)
    report.figure("first_cell_ours_s", both.ours.median)
    report.figure("first_cell_by_hand_s", both.baseline.median)
    report.figure("first_cell_ratio", both.ratios.median, MOST_FIRST_CELL)
    after = Series(tuple(free))
    report.row("GPU free after the end, s", str(runs), after.text(2), "", "")
    report.figure("free_after_end_s", after.median, MOST_FREE_SECONDS)


def event_loop(hub: GPUHub, seconds: int) -> tuple[float, list[float], list[float]]:
    """The hub's processor time per second, and the worst tick and step of each second, in ms."""
    before = cpu_seconds(hub.pid)
    url = f"{hub.url}/hub/benchmark/ticks"
    answer = requests.get(url, params={"seconds": seconds}, timeout=300)
    answer.raise_for_status()
    worst = answer.json()
    return (
        (cpu_seconds(hub.pid) - before) / seconds,
        [1e3 * late for late, _ in worst],
        [1e3 * busy for _, busy in worst],
    )


def waiting(report: Report, it: Hub, count: int, seconds: int = 30) -> None:
    """The rows of so many runs that wait."""
    hub = it.hub
    for _ in range(GPUS):
        submit(hub, USER, command=["sleep", "3600"], options={"hours": 2})
    wait_for(lambda: len(hub.taken()) == GPUS, "runs on all GPUs", timeout=60)
    without = event_loop(hub, seconds)
    say(f"submitting {count} runs")
    for number in range(count):
        submit(hub, f"member{number % MEMBERS}", command=["true"], options={"hours": 1})
    beside = event_loop(hub, seconds)
    names = ("the hub's processor, %", "worst tick of a second, ms", "longest step, ms")
    for name, ours, base in zip(names, beside, without, strict=True):
        if isinstance(ours, float) and isinstance(base, float):
            texts = f"{100 * ours:.1f}", f"{100 * base:.1f}", f"{ours / base:.2f}"
        else:
            texts = Series(tuple(ours)).text(), Series(tuple(base)).text(), ""
        report.row(f"{count} waiting runs: {name}", str(seconds), *texts)
    report.figure("waiting_processor_share", beside[0])
    report.figure("waiting_processor_share_without", without[0])


# A day, by the production services and a simulated clock.


@dataclass(frozen=True, slots=True)
class Session:
    """What a member does on this day."""

    asks_at: float
    devices: int
    seconds: float


def a_day(seed: int) -> list[Session]:
    """Sessions of a lab on four GPUs: a busy day, a quiet night."""
    random, found, at = Random(seed), [], 0.0
    while True:
        by_day = 8 <= (at / 3600 + 6) % 24 < 20
        at += random.expovariate(1 / (2400 if by_day else 9000))
        if at >= 86400:
            return found
        devices = random.choices((1, 2, 4), (75, 20, 5))[0]
        found.append(Session(at, devices, min(8 * 3600.0, random.lognormvariate(8.6, 0.9))))


@dataclass(slots=True)
class Day:
    """What came of it."""

    delays: list[float]
    used: float = 0.0
    """GPU-seconds of everybody within the day."""


def live(services: Services, sessions: list[Session], *, fill: bool) -> Day:
    """Play the day: every second counts, and those in which nothing happens are skipped."""
    clock = Clock.of(services)
    day = Day([0.0] * len(sessions))
    events: list[tuple[float, int, str, Any]] = []
    numbers = iter(range(10**9))

    def later(at: float, what: str, value: Any) -> None:
        heapq.heappush(events, (at, next(numbers), what, value))

    later(0.0, "begin", None)
    for number, session in enumerate(sessions):
        later(session.asks_at, "ask", number)
    began: dict[str, tuple[float, int]] = {}
    leaving: set[str] = set()

    def runs_now(number: int, lease: Lease, at: float) -> None:
        day.delays[number] = at - sessions[number].asks_at
        began[lease.id] = at, len(lease.devices)
        services.leases.confirm(lease.id, "container")
        later(at + sessions[number].seconds, "end", lease.id)

    waits: dict[str, int] = {}
    fillers = 0
    while events:
        at, _, what, value = heapq.heappop(events)
        clock.now = T0 + timedelta(seconds=at)
        if what == "ask":
            session = sessions[value]
            terms = Terms(wait=True, seconds=8 * 3600)
            server, request = ServerRef(f"member{value}"), Request(devices=session.devices)
            got = services.queue.ask(server, request, engine="docker", terms=terms)
            if isinstance(got, Lease):
                runs_now(value, got, at)
            else:
                waits[got.id] = value
        elif what == "end":
            since, devices = began.pop(value)
            day.used += devices * (min(at, 86400) - min(since, 86400))
            leaving.discard(value)
            services.leases.release(value, stopped_at=clock(), reason="it ended")
        for ticket_id in services.queue.turns(frozenset(waits)):
            runs_now(waits.pop(ticket_id), services.queue.start_ticket(ticket_id), at)
        for lease in services.leases.open_leases():
            if lease.yields_at and lease.id not in leaving:
                leaving.add(lease.id)
                number = int(lease.server.run_id.rpartition("-")[2])
                later(at + (20 if number % 2 else 10), "end", lease.id)
        while fill and at < 86400:
            terms = Terms(seconds=24 * 3600, preemptible=True)
            run = Run(
                id=f"run-{fillers}",
                user="night",
                title="fill",
                work=Work(command=("true",)),
                created_at=clock(),
                preemptible=True,
            )
            try:
                got = services.queue.ask(
                    run.server, Request(devices=1), engine="docker", terms=terms
                )
            except NoDeviceFree:
                break
            assert isinstance(got, Lease)
            fillers += 1
            began[got.id] = at, 1
            services.leases.confirm(got.id, "container")
        if not events and fill:
            for lease in services.leases.open_leases():
                since, devices = began[lease.id]
                day.used += devices * (86400 - min(since, 86400))
    return day


def days(report: Report, count: int) -> None:
    """The rows of the days."""
    ratios, alone_used, filled_used, delays = [], [], [], []
    for seed in range(count):
        sessions = a_day(seed)
        found = []
        for fill in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                url = f"sqlite:///{folder}/day.sqlite"
                services = open_services(url, Clock(T0), gpu_rates={"*": 0})
                found.append(live(services, sessions, fill=fill))
                services.store.close()
        alone, filled = found
        lasts = [session.seconds for session in sessions]
        turnaround = [fmean(map(sum, zip(day.delays, lasts, strict=True))) for day in found]
        ratios.append(turnaround[1] / turnaround[0])
        delays.append(fmean(filled.delays) - fmean(alone.delays))
        alone_used.append(100 * alone.used / (GPUS * 86400))
        filled_used.append(100 * filled.used / (GPUS * 86400))
    texts = Series(tuple(filled_used)).text(), Series(tuple(alone_used)).text(), ""
    report.row("a day: GPUs in use, %", str(count), *texts)
    longer = Series(tuple(delays)).text()
    report.row("a day: sessions start later by, s", str(count), longer, "", "")
    report.row("a day: from request to end", str(count), "", "", Series(tuple(ratios)).text(4))
    report.figure("day_used_alone", fmean(alone_used))
    report.figure("day_used_filled", fmean(filled_used))
    report.figure("day_turnaround_ratio", fmean(ratios), MOST_DELAY)


def main() -> None:
    parser = argument_parser(__doc__, runs=10)
    parser.add_argument("--days", type=int, default=10, help="days that are played (10)")
    parser.add_argument("--waiting", type=int, default=WAITING, help=f"that wait ({WAITING})")
    args = parser.parse_args()
    report = Report("runs", ("what", "runs", "ours", "baseline", "ratio"))
    report.figure("runs", args.runs)
    days(report, args.days)
    with started() as it:
        first_cell(report, it, args.runs)
        waiting(report, it, args.waiting)
        it.hub.kill9()
    report.print(args.json)


if __name__ == "__main__":
    main()
