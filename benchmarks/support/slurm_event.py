"""A day on 44 GPUs: 7 nodes, 12 teams, 200 sessions, compressed into minutes. Seeded.

What Backend.AI told of an event that it served: teams that ask for one to eight GPUs each, some
for minutes and some for hours, most of them in the first part of the day. Every session waits in
line if it must, runs for its time and is stopped by its member; one in ten gives up its place
while it waits.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from gpuspawner.model import Lease
from gpuspawner.slurm.usage import read_holders
from support import HUB_PATH
from support.members import Members
from tests.support.processes import wait_for
from tests.support.slurm_cluster import GIB, NodePlan, SlurmCluster
from tests.support.slurm_hub import SlurmHub

SESSIONS = 200
TEAMS = 12
NODES = (8, 6, 6, 6, 6, 6, 6)
SEED = 44

LOOK = 5.0
"""Seconds between two looks of a member at the own server."""

CONFIG = """
from support.slurm_inside import HANDLERS, TimedSlurmSpawner
c.JupyterHub.spawner_class = TimedSlurmSpawner
c.JupyterHub.extra_handlers = HANDLERS
c.Broker.opening_grant = 100_000_000
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
class Day:
    """What became of it."""

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
    requests: int
    """How often anybody did: the hub, the accounting service, and every scancel by a job's name."""
    steps: int
    longest_step: float
    longest_work: float
    gpu_hours: float

    def sentences(self) -> list[str]:
        """For people."""
        return [
            f"the day: {self.sessions} sessions of {TEAMS} teams on {sum(NODES)} GPUs in "
            f"{self.seconds:.0f} s: {self.served} ran for {self.gpu_hours:.2f} GPU-hours, "
            f"{self.gave_up} gave up their place, {self.lost} were lost; "
            f"greatest difference to sacct {self.difference:g} s",
            f"longest step on the event loop: {1e3 * self.longest_step:.1f} ms by the clock, "
            f"{1e3 * self.longest_work:.1f} ms by the processor, of {self.steps}; "
            f"the hub asked Slurm {self.looks} times for its jobs, {self.looks / self.seconds:.2f} "
            f"a second, never sooner than {self.shortest:.2f} s after; with the service and with "
            f"scancel, which asks too, {self.requests} times",
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


def live_a_day(count: int, seconds: float) -> Day:
    """All of it."""
    sessions = plan(count, seconds)
    plans = [NodePlan(devices=devices, memory_bytes=40 * GIB) for devices in NODES]
    with tempfile.TemporaryDirectory() as folder, SlurmCluster(plans) as cluster:
        hub = SlurmHub(Path(folder, "hub"), cluster, CONFIG)
        hub.environment.update(HUB_PATH)
        for session in sessions:
            cluster.users.make(session.user)
        with hub:
            return _live(hub, sessions)


def _live(hub: SlurmHub, sessions: list[Session]) -> Day:
    began, first = time.monotonic(), datetime.now(timezone.utc)
    before = requests_for_jobs(hub.cluster)
    with ThreadPoolExecutor(len(sessions)) as threads:
        outcomes = list(threads.map(lambda each: _live_one(hub, each, began), sessions))
    lasted = time.monotonic() - began
    asked = requests_for_jobs(hub.cluster) - before
    wait_for(lambda: not hub.cluster.run("squeue", "-h"), "the last job to end")
    left = len(hub.broker.open_leases()) + len(hub.broker.waiting())
    leases = hub.broker.leases_of(None, limit=10 * len(sessions))
    difference = greatest_difference(hub, leases, first)
    inside = Members(hub).ask("steps")
    steps, looks = inside["steps"], inside["looks"]
    used = sum(len(each.devices) * seconds_of(each) for each in leases)
    return Day(
        sessions=len(sessions),
        served=outcomes.count("ran"),
        gave_up=outcomes.count("gave up"),
        lost=outcomes.count("lost") + left,
        seconds=lasted,
        difference=difference,
        looks=len(looks),
        shortest=min(later - look for look, later in itertools.pairwise(looks)),
        requests=asked,
        steps=len(steps),
        longest_step=max(clock for clock, _ in steps),
        longest_work=max(work for _, work in steps),
        gpu_hours=used / 3600,
    )


def _live_one(hub: SlurmHub, session: Session, began: float) -> str:
    """``ran``, ``gave up`` or ``lost``."""
    time.sleep(max(0.0, began + session.at - time.monotonic()))
    asked = hub.spawn(session.user, {"gpus": session.gpus, "wait": True})
    if asked.status_code not in (201, 202):
        print(f"{session.user}: {asked.status_code} {asked.text}", file=sys.stderr)
        return "lost"
    patience = time.monotonic() + session.lasts if session.gives_up else float("inf")
    while not (server := hub.server(session.user) or {}).get("ready"):
        if not server:
            print(f"{session.user}: {hub.failure(session.user)}", file=sys.stderr)
            return "lost"
        if time.monotonic() > patience:
            hub.stop_server(session.user)
            return "gave up"
        time.sleep(LOOK)
    time.sleep(session.lasts)
    hub.stop_server(session.user, timeout=120)
    return "ran"


def seconds_of(lease: Lease) -> float:
    """For which it had its devices."""
    return (lease.ended_at - lease.granted_at).total_seconds() if lease.ended_at else 0.0


def greatest_difference(hub: SlurmHub, leases: list[Lease], since: datetime) -> float:
    """Seconds between what a session had here and what Slurm says of its jobs, at the most."""

    def look() -> dict[str, int] | None:
        until = datetime.now(timezone.utc) + timedelta(minutes=1)
        wanted = {lease.ticket_id for lease in leases if lease.ticket_id}
        runs = read_holders(hub.broker.slurm(), wanted, since - timedelta(minutes=1), until)
        found = {name: [run for run in some if run.uses_devices] for name, some in runs.items()}
        if any(not some or any(run.ended_at is None for run in some) for some in found.values()):
            return None  # the database hears of it a little later
        return {name: sum(run.seconds for run in some) for name, some in found.items()}

    theirs = wait_for(look, "the accounts to be whole", interval=0.5)
    return max(
        abs(round(seconds_of(lease)) - theirs.get(lease.ticket_id or "", 0)) for lease in leases
    )


def requests_for_jobs(cluster: SlurmCluster) -> int:
    """How often the controller was asked for its jobs, by anybody."""
    found = re.search(r"REQUEST_JOB_INFO\s.*?count:(\d+)", cluster.run("sdiag"))
    if found is None:
        raise RuntimeError("sdiag does not say how often the controller was asked for jobs")
    return int(found[1])
