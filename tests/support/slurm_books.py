"""A hub's books beside a cluster, without the hub: services and its command line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuspawner.leases.models import Lease
from gpuspawner.service.duties import ClusterDuty
from gpuspawner.service.hub_client import HubClient
from gpuspawner.service.worker import Tick
from gpuspawner.slurm import accounts
from gpuspawner.slurm.job_billing import BillingResult
from tests.support import slurm_files
from tests.support.preloaded import PRELOADED
from tests.support.processes import REPO, free_port, system_path, wait_for
from tests.support.slurm_broker import asked, opened, until
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_daemons import file_of
from tests.support.slurm_files import Places

CONFIG = """
c = get_config()
c.GPUDatabase.url = "sqlite:///{folder}/gpuspawner.sqlite"
c.GPUSlurm.cluster_file = "{folder}/cluster.yaml"
c.GPUQueue.group_weights = {{"research": 3}}
c.GPUQueue.group_priority = {{"research": "course"}}
"""
QUICK = "#!/bin/sh\nexec sleep 2\n"


class Books:
    """A hub's books beside the cluster, and its command line."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "jupyterhub_config.py").write_text(CONFIG.format(folder=folder))
        self.services = opened(
            folder,
            cluster,
            gpu_rates={"*": 3600},  # a credit a second
            opening_grant=1000,
            hold_minutes=0.01,
            group_weights={"research": 3},
            group_priority={"research": "course"},
        )

    @property
    def _environment(self) -> dict[str, str]:
        found = {"PATH": system_path(), "PYTHONPATH": str(REPO), "HOME": str(self.folder)}
        return found | {"LC_ALL": "C.UTF-8", "TZ": "UTC"}

    def start(self, *words: str, path: str = "") -> subprocess.Popen[str]:
        """``gpuspawner slurm ...``; ``path``: the PATH on which it finds Slurm's programs."""
        changed = {"PATH": path} if path else {}
        return subprocess.Popen(
            [sys.executable, "-m", "gpuspawner", "slurm", *words],
            cwd=self.folder,
            env=self._environment | changed,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def slurm(self, *words: str, code: int = 0) -> Any:
        """The same to its end, as JSON."""
        return json.loads(self.printed(*words, "--json", code=code))

    def printed(self, *words: str, code: int = 0) -> str:
        """What it says to people."""
        done = PRELOADED.run(("slurm", *words), self.folder, self._environment, "")
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def sync(self) -> list[str]:
        plan = self.services.cluster_members.plan_for_cluster()
        accounts.apply_plan(self.services.cluster_members.slurm(), plan.steps)
        return [step.what for step in plan.steps]

    def ended(self, job: int) -> int:
        """When sacct knows of the job's end: its seconds."""
        return self._ended("-j", str(job))

    def holder_ended(self, lease: Lease) -> int:
        """The same of the job of a session."""
        return self._ended(f"--name=gpuspawner-{lease.ticket_id}")

    def _ended(self, *which: str) -> int:
        def look() -> str:
            asked = ("-a", "-X", "-n", "-P", "-S", "now-1hour", "-o", "state,end,elapsedraw")
            state, end, seconds = (
                self.cluster.run("sacct", *asked, *which).strip() or "|Unknown|"
            ).split("|")
            done = state.partition(" ")[0] in ("COMPLETED", "CANCELLED") and end != "Unknown"
            return seconds if done else ""

        return int(wait_for(look, f"the end of {which[-1]} in the database", interval=0.2))

    def debit(self) -> BillingResult:
        """As soon as there is something to pay: what a job had is known some seconds later."""

        def look() -> BillingResult | None:
            return done if (done := self.services.job_billing.debit_cluster()).jobs else None

        return wait_for(look, "a debit", interval=0.5)


def cluster_duty(books: Books, log: logging.Logger) -> ClusterDuty:
    """The accounting service's part, without a hub."""
    hub = HubClient("http://127.0.0.1:9", "")
    return ClusterDuty(Tick(services=books.services, hub=hub, engines={}, log=log))


def member(books: Books, name: str, user: str = "") -> str:
    books.cluster.users.make(user or name)
    books.services.ledger.open_account(name)
    return user or name


def begin(books: Books, user: str) -> Lease:
    """A server's lease, from its ticket on; no container is needed for it."""
    ticket = asked(books.services, user, devices=2)
    until(books.services, [ticket], lambda turns: turns == [ticket.id])
    lease = books.services.queue.start_ticket(ticket.id)
    books.services.leases.confirm(lease.id, "")
    return lease


def finish(books: Books, lease: Lease) -> Lease:
    """To the end of its job."""
    delegate, ticket = books.services.delegation.delegate, lease.ticket_id
    assert delegate is not None and ticket is not None
    delegate.cancel(ticket)

    def over() -> Any:
        return (turn := delegate.turns()[ticket]).over and turn.ended_at

    ended_at = wait_for(over, "the end of its job", interval=0.2)
    return books.services.leases.release(lease.id, ended_at=ended_at, reason="done")


@contextmanager
def moved_database(cluster: SlurmCluster) -> Iterator[None]:
    """slurmdbd listens at another port, and everybody knows that but the controller: it answers,
    and is told nothing."""
    try:
        _move_database(cluster, replace(cluster.places, accounting_port=free_port()))
        yield
    finally:
        _move_database(cluster, cluster.places)


def _move_database(cluster: SlurmCluster, places: Places) -> None:
    text = slurm_files.slurmdbd_conf(places, cluster._password)
    file_of("slurm", cluster.directory / "etc/slurmdbd.conf", text.encode(), "0600")
    cluster._write_settings({"AccountingStoragePort": places.accounting_port})
    cluster.restart("slurmdbd")
