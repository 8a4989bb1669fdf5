"""A day on 44 GPUs: 7 nodes, 12 teams, 200 sessions, compressed into minutes. Seeded.

What Backend.AI told of an event that it served: teams that ask for one to eight GPUs each, some
for minutes and some for hours, most of them in the first part of the day. Every session waits in
line if it must, runs for its time and is stopped by its member; one in ten gives up its place
while it waits.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from operator import itemgetter
from pathlib import Path

import requests

from gpuspawner.leases.models import Lease, LeaseState, ServerRef
from gpuspawner.slurm.jobs import read_holders
from support import HUB_PATH, say
from support.members import Members
from support.slurm_counted import BY_NAME, CONTROLLER, DATABASE, Counted
from tests.support.processes import wait_for
from tests.support.slurm_cluster import GIB, NodePlan, SlurmCluster
from tests.support.slurm_hub import SlurmHub

SESSIONS = 200
TEAMS = 12
NODES = (8, 6, 6, 6, 6, 6, 6)
SEED = 44

LOOK = 5.0
"""Seconds between two looks of a member at the own server, on a day of some minutes."""
SELDOM = 6
"""Every so many of them also ask the hub, and not only the store."""

CONFIG = """
from support.slurm_inside import HANDLERS, TimedSlurmSpawner
c.JupyterHub.spawner_class = TimedSlurmSpawner
c.JupyterHub.extra_handlers = HANDLERS
c.GPUCredits.opening_grant = 100_000_000
c.Accounting.reconcile_seconds = 15
"""


@dataclass(frozen=True, slots=True)
class Session:
    """One member's wish."""

    user: str
    at: float
    """Seconds after the day's beginning."""
    lasts: float
    gpus: int
    gives_up: bool


@dataclass(frozen=True, slots=True)
class Steps:
    """Of our code on the hub's event loop, in seconds."""

    all: list[tuple[float, float, str]]
    """By the clock and by the processor, and between which lines."""

    @property
    def clock(self) -> float:
        return max(step[0] for step in self.all)

    @property
    def work(self) -> float:
        return max(step[1] for step in self.all)

    def sentences(self) -> list[str]:
        return [
            f"longest steps on the event loop by {kind}, of {len(self.all)}: "
            + ", ".join(
                f"{1e3 * step[number]:.1f} ms ({step[2]})"
                for step in sorted(self.all, key=itemgetter(number), reverse=True)[:3]
            )
            for number, kind in enumerate(("the clock", "the processor"))
        ]


@dataclass(frozen=True, slots=True)
class Day:
    """What became of it."""

    gpus: int
    sessions: int
    served: int
    gave_up: int
    lost: int
    """Sessions that neither ran nor gave up, leases and jobs that are left."""
    seconds: float
    difference: float
    """The greatest, of a session's seconds here and in sacct."""
    looks: int
    """How often the hub asked Slurm for its jobs."""
    shortest: float
    """Seconds between two of these, at the least."""
    calls: Counter[str]
    """How often the hub and the accounting service called each of Slurm's programs."""
    steps: Steps
    gpu_hours: float

    @property
    def queries(self) -> int:
        """How often the controller was asked anything, by all of ours together."""
        return sum(self.calls[name] for name in (*CONTROLLER, BY_NAME))

    @property
    def database(self) -> int:
        """How often its database was asked or told anything: mostly of members who are new."""
        return sum(self.calls[name] for name in DATABASE)

    def sentences(self) -> list[str]:
        """For people."""
        called = ", ".join(f"{name} {count}" for name, count in self.calls.most_common())
        return [
            f"the day: {self.sessions} sessions of {TEAMS} teams on {self.gpus} GPUs in "
            f"{self.seconds:.0f} s: {self.served} ran for {self.gpu_hours:.2f} GPU-hours, "
            f"{self.gave_up} gave up their place, {self.lost} were lost; "
            f"greatest difference to sacct {self.difference:g} s",
            *self.steps.sentences(),
            f"the hub asked Slurm {self.looks} times for its jobs, {self.looks / self.seconds:.2f} "
            f"a second, never sooner than {self.shortest:.2f} s after; hub and service together "
            f"asked the controller {self.queries} times for anything, "
            f"{self.queries / self.seconds:.2f} a second, and its database {self.database} times; "
            f"programs that they called: {called}",
        ]


def plan(count: int, seconds: float) -> list[Session]:
    """The sessions of a day that lasts so many seconds."""
    chance = random.Random(SEED)
    hour = seconds / 24
    found = []
    for number in range(count):
        team = chance.randrange(TEAMS)
        found.append(
            Session(
                user=f"team{team:02}-{number:03}",
                at=seconds * 0.8 * chance.betavariate(1.3, 2),
                lasts=min(6 * hour, hour * chance.lognormvariate(0, 0.9)),
                gpus=chance.choice((1, 1, 1, 2, 2, 4, 6)),
                gives_up=chance.random() < 0.1,
            )
        )
    return sorted(found, key=lambda session: session.at)


def live_a_day(count: int, seconds: float, nodes: int = len(NODES)) -> Day:
    """All of it."""
    sessions = plan(count, seconds)
    devices = NODES[:nodes]
    plans = [NodePlan(devices=each, memory_bytes=40 * GIB) for each in devices]
    with tempfile.TemporaryDirectory() as folder, SlurmCluster(plans) as cluster:
        hub = SlurmHub(Path(folder, "hub"), cluster, CONFIG)
        counted = Counted(Path(folder, "programs"))
        hub.environment.update(HUB_PATH | counted.environment)
        for session in sessions:
            cluster.users.make(session.user)
        with hub:
            try:
                return _live(hub, sessions, counted, min(LOOK, seconds / 20), sum(devices))
            except BaseException:
                print(hub.log_text()[-8000:], file=sys.stderr)
                raise


def _live(hub: SlurmHub, sessions: list[Session], counted: Counted, look: float, gpus: int) -> Day:
    say(f"a day of {len(sessions)} sessions begins")
    began, first = time.monotonic(), datetime.now(timezone.utc)
    called = counted.calls()
    with ThreadPoolExecutor(len(sessions)) as threads:
        running = [threads.submit(_one_of_them, hub, each, began, look) for each in sessions]
        for number, each in enumerate(as_completed(running), start=1):
            each.result()
            if not number % 20:
                say(f"{number} of {len(sessions)} sessions are over")
    outcomes = [each.result() for each in running]
    lasted = time.monotonic() - began
    called = counted.calls() - called
    wait_for(lambda: not hub.cluster.run("squeue", "-h"), "the last job to end")
    left = len(hub.services.leases.open_leases()) + len(hub.services.queue.waiting())
    leases = hub.services.leases.of_account(None, limit=10 * len(sessions))
    difference = greatest_difference(hub, leases, first)
    inside = Members(hub).ask("steps")
    looks = inside["looks"]
    used = sum(len(each.devices) * seconds_of(each) for each in leases)
    return Day(
        gpus=gpus,
        sessions=len(sessions),
        served=outcomes.count("ran"),
        gave_up=outcomes.count("gave up"),
        lost=outcomes.count("lost") + left,
        seconds=lasted,
        difference=difference,
        looks=len(looks),
        shortest=min(later - look for look, later in itertools.pairwise(looks)),
        calls=called,
        steps=Steps(inside["steps"]),
        gpu_hours=used / 3600,
    )


def _one_of_them(hub: SlurmHub, session: Session, began: float, look: float) -> str:
    """As :func:`_live_one`: a hub that fails at one member costs that session, and not the day."""
    try:
        return _live_one(hub, session, began, look)
    except (requests.RequestException, TimeoutError) as error:
        say(f"{session.user}: {error}")
        return "lost"


def _live_one(hub: SlurmHub, session: Session, began: float, look: float) -> str:
    """``ran``, ``gave up`` or ``lost``."""
    time.sleep(max(0.0, began + session.at - time.monotonic()))
    asked = hub.spawn(session.user, {"gpus": session.gpus, "wait": True})
    if asked.status_code not in (201, 202):
        print(f"{session.user}: {asked.status_code} {asked.text}", file=sys.stderr)
        return "lost"
    patience = time.monotonic() + session.lasts if session.gives_up else float("inf")
    for number in itertools.count():
        if _runs(hub, session.user):
            break
        # Two hundred who ask all the time would be all that the hub has to do.
        if not number % SELDOM and not hub.server(session.user):
            print(f"{session.user}: {hub.failure(session.user)}", file=sys.stderr)
            return "lost"
        if time.monotonic() > patience:
            _stop(hub, session.user, look)
            return "gave up"
        time.sleep(look)
    time.sleep(session.lasts)
    _stop(hub, session.user, look)
    return "ran"


def _runs(hub: SlurmHub, user: str) -> bool:
    """As the store says."""
    lease = hub.services.leases.of_server(ServerRef(user))
    return lease is not None and lease.state is LeaseState.RUNNING


def _stop(hub: SlurmHub, user: str, look: float) -> None:
    """And wait until the hub has let go of it."""
    hub.api("DELETE", f"users/{user}/server").raise_for_status()
    wait_for(lambda: hub.server(user) is None, f"{user}'s stop", timeout=120, interval=look)


def seconds_of(lease: Lease) -> float:
    """For which it had its devices."""
    return (lease.ended_at - lease.granted_at).total_seconds() if lease.ended_at else 0.0


def greatest_difference(hub: SlurmHub, leases: list[Lease], since: datetime) -> float:
    """Seconds between what a session had here and what Slurm says of its jobs, at most."""

    def look() -> dict[str, int] | None:
        until = datetime.now(timezone.utc) + timedelta(minutes=1)
        wanted = {lease.ticket_id for lease in leases if lease.ticket_id}
        runs = read_holders(
            hub.services.cluster_members.slurm(), wanted, since - timedelta(minutes=1), until
        )
        found = {name: [run for run in some if run.uses_devices] for name, some in runs.items()}
        if any(not some or any(run.ended_at is None for run in some) for some in found.values()):
            return None  # the database hears of it a little later
        return {name: sum(run.seconds for run in some) for name, some in found.items()}

    theirs = wait_for(look, "the accounts to be whole", interval=0.5)
    return max(
        abs(round(seconds_of(lease)) - theirs.get(lease.ticket_id or "", 0)) for lease in leases
    )
