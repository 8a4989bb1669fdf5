"""Real: Slurm with its database and two nodes, Linux users, the command line, SQLite.
Stand-in: the GPUs.

Members and groups in Slurm, jobs beside servers on members' accounts, and the audit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from gpuspawner.accounting.batch import OnCluster
from gpuspawner.accounting.hub import Hub
from gpuspawner.accounting.tick import Tick
from gpuspawner.broker import Broker
from gpuspawner.broker.batch import Debited
from gpuspawner.broker.queue import Terms
from gpuspawner.errors import SlurmUnavailable
from gpuspawner.model import MICRO, Lease, Request, ServerRef, Ticket
from gpuspawner.slurm import syncing
from gpuspawner.store.schema import leases
from tests.support.preloaded import PRELOADED
from tests.support.processes import REPO, system_path, wait_for
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_hub import described

CONFIG = """
c = get_config()
c.Broker.database_url = {url!r}
c.Broker.cluster = {file!r}
c.Broker.group_weights = {{"research": 3}}
c.Broker.group_priority = {{"research": "course"}}
"""
LONG = "dana.of-the-very-long-name@mathematics.example.org"
LOG = logging.getLogger(__name__)
QUICK = "#!/bin/sh\nexec sleep 2\n"


class Books:
    """A hub's books beside the cluster, and its command line."""

    def __init__(self, cluster: SlurmCluster, folder: Path, shards: int = 0) -> None:
        self.cluster, self.folder = cluster, folder
        file = folder / "cluster.yaml"
        file.write_text(yaml.safe_dump(described(cluster, shards)))
        url = f"sqlite:///{folder}/books.sqlite"
        (folder / "jupyterhub_config.py").write_text(CONFIG.format(url=url, file=str(file)))
        self.broker = Broker(
            database_url=url,
            cluster=str(file),
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

    def start(self, *words: str) -> subprocess.Popen[str]:
        """``gpuspawner slurm ...``"""
        return subprocess.Popen(
            [sys.executable, "-m", "gpuspawner", "slurm", *words],
            cwd=self.folder,
            env=self._environment,
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
        plan = self.broker.plan_for_cluster()
        syncing.apply(self.broker.slurm(), plan.steps)
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

    def debit(self) -> Debited:
        """As soon as there is something to pay: what a job had is known some seconds later."""

        def look() -> Debited | None:
            return done if (done := self.broker.debit_cluster()).jobs else None

        return wait_for(look, "a debit", interval=0.5)


@pytest.fixture
def books(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Books]:
    books = Books(cluster, tmp_path)
    books.broker.debit_cluster()  # what was before is not ours
    yield books
    books.broker.store.close()


def member(books: Books, name: str, user: str = "") -> str:
    books.cluster.users.make(user or name)
    books.broker.open_account(name)
    return user or name


def associations(books: Books, *words: str) -> list[str]:
    shown = "format=account,user,share,grptres,maxsubmit,defaultqos"
    which = (f"cluster={books.cluster.cluster_name}", *words)
    return books.cluster.run("sacctmgr", "-n", "-P", "show", "assoc", *which, shown).splitlines()


def test_sync_is_shown_first_killed_anywhere_and_done_once(
    books: Books, cluster: SlurmCluster
) -> None:
    cluster.user("gsann", "lab1")
    theirs = [line for line in associations(books) if "gpuspawner" not in line]
    for name in ("gsann", "Erin F", LONG, *(f"crowd{n}" for n in range(6))):
        books.broker.open_account(name)
    books.broker.note_groups({"research": ["gsann", "Erin F"]})

    planned = books.slurm("sync", "--dry-run")
    assert not planned["done"] and not planned["problems"] and len(planned["steps"]) > 8
    assert [line for line in associations(books) if line.startswith("g-research")] == []

    killed = books.start("sync")
    wait_for(lambda: associations(books, "account=gpuspawner-members"), "the first steps")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=30)
    left = books.slurm("sync")
    assert left["done"] and 0 < len(left["steps"]) < len(planned["steps"])
    again = books.broker.plan_for_cluster()
    assert (again.steps, again.problems) == ((), ())

    found = associations(books)
    assert "g-research||300|||" in found
    assert "g-research|gsann|1|||gpuspawner-course" in found
    assert "g-research|u-_45rin_20_46|1|||gpuspawner-course" in found
    assert sum(line.startswith("gpuspawner-members|h-") for line in found) == 1
    assert [line for line in theirs if line not in found] == []


def test_jobs_beside_servers_are_paid_from_the_members_account(
    books: Books, cluster: SlurmCluster
) -> None:
    user = member(books, "Dan G", "u-_44an_20_47")
    cluster.user("gsbob", "lab1")  # whom the hub does not know
    books.sync()
    two = cluster.hold(user, "--gres=gpu:a100:2", "--job-name=a|b\nc", script=QUICK)
    one = cluster.hold("gsbob", "--gres=gpu:h100:1", script=QUICK)
    none = cluster.hold(user, script=QUICK)
    cluster.wait_state(two, "RUNNING")
    assert books.broker.debit_cluster().amount == 0  # not an hour yet
    seconds = books.ended(two)
    books.ended(one)
    books.ended(none)

    done = books.debit()
    assert (done.jobs, done.amount) == (1, 2 * seconds * MICRO)
    assert books.broker.debit_cluster().amount == 0
    assert books.broker.member("Dan G").balance == (1000 - 2 * seconds) * MICRO
    line = books.broker.statement("member:Dan G")[0]
    assert f"Batch job {two} (a|b?c) on 2 NVIDIA A100" in line.reason

    def strangers() -> list[str]:
        books.broker.debit_cluster()
        audit = books.slurm("audit")
        assert audit["batch_jobs"] == 1 and audit["ok"]
        return [job["user"] for job in audit["of_nobody"]]

    assert wait_for(strangers, "the job of nobody", interval=0.5) == ["gsbob"]
    text = books.printed("audit")
    assert "Jobs of users who are no members; nobody was charged:" in text
    assert f"1 batch job of members paid {2 * seconds}.000000 credits." in text


def test_what_happens_while_the_database_is_away_is_paid_afterwards(
    books: Books, cluster: SlurmCluster
) -> None:
    user = member(books, "gsdan")
    books.sync()
    cluster.kill("slurmdbd")
    job = cluster.hold(user, "--gres=gpu:1", script=QUICK)
    wait_for(lambda: cluster.state(job) == "COMPLETED", "its end")
    with pytest.raises(SlurmUnavailable):
        books.broker.debit_cluster()
    cluster.restart("slurmdbd")
    seconds = books.ended(job)
    assert books.debit().amount == seconds * MICRO
    assert books.broker.debit_cluster().amount == 0


def test_an_end_that_becomes_known_late_is_looked_for(books: Books, cluster: SlurmCluster) -> None:
    user = member(books, "gshal")
    books.sync()
    job = cluster.hold(user, "--gres=gpu:1")

    def seen() -> bool:
        books.broker.debit_cluster()
        started = books.broker.clock() - timedelta(hours=1)
        return bool(books.broker.jobs_since(cluster.cluster_name, started))

    wait_for(seen, "the job", interval=0.5)
    later = books.broker.clock() + timedelta(hours=3)
    books.broker.clock = lambda: later
    books.broker.debit_cluster()
    cluster.run("scancel", str(job))
    assert books.ended(job) < 600  # long before the last look, as it says
    assert books.debit().amount == books.ended(job) * MICRO


def test_an_empty_account_keeps_gpu_jobs_waiting_and_no_others(
    books: Books, cluster: SlurmCluster
) -> None:
    user = member(books, "gseve")
    books.sync()
    books.broker.grant("member:gseve", -1000 * MICRO, actor="admin", reason="gone")
    assert books.sync() == ["gseve: in gpuspawner-members: GrpTRES=gres/gpu=0,gres/shard=0"]
    waiting = cluster.hold(user, "--gres=gpu:1")
    share = cluster.hold(user, "--gres=shard:1")
    plain = cluster.hold(user, script=QUICK)
    cluster.wait_state(plain, "RUNNING", "COMPLETED")
    reasons = ("squeue", "-h", "-j", f"{waiting},{share}", "-o", "%r")
    wait_for(lambda: cluster.run(*reasons).split() == ["AssocGrpGRES"] * 2, "the reason")
    # A server that a group pays for is another matter.
    books.broker.admit_to_cluster(
        Ticket(
            id="x",
            server=ServerRef("gseve"),
            request=Request(devices=1),
            created_at=books.broker.clock(),
        )
    )
    cluster.wait_state(waiting, "RUNNING")


def test_who_has_left_hands_in_nothing_any_more(books: Books, cluster: SlurmCluster) -> None:
    user = member(books, "gsfay")
    books.sync()
    books.broker.membership_ended("gsfay", "the course is over", actor="admin")
    books.sync()
    with pytest.raises(RuntimeError, match="AssocMaxSubmitJobLimit"):
        cluster.hold(user, "--account=gpuspawner-members")
    books.broker.membership_returned("gsfay", actor="admin", by_roster=False)
    books.sync()
    cluster.hold(user, "--account=gpuspawner-members", script=QUICK)


def session(books: Books, user: str) -> Lease:
    """A server's lease, from its ticket to the end of its job; no container is needed for it."""
    asked = books.broker.ask(
        ServerRef(user), Request(devices=2), engine="slurm", terms=Terms(wait=True)
    )
    assert isinstance(asked, Ticket)

    def granted() -> Lease | None:
        turns = books.broker.turns(frozenset({asked.id}))
        return books.broker.start_ticket(turns[0]) if turns else None

    lease = wait_for(granted, "the turn", interval=0.2)
    books.broker.confirm(lease.id, "")
    time.sleep(2)  # so that there is something to compare
    delegate = books.broker.delegate
    assert delegate is not None
    delegate.cancel(asked.id)

    def over() -> Any:
        return (turn := delegate.turns()[asked.id]).over and turn.ended_at

    ended_at = wait_for(over, "the end of its job", interval=0.2)
    return books.broker.release(lease.id, ended_at=ended_at, reason="done")


def test_sessions_are_held_against_slurms_jobs_to_the_second(
    books: Books, cluster: SlurmCluster
) -> None:
    member(books, "gsgil")
    lease = session(books, "gsgil")
    assert lease.ended_at is not None
    assert associations(books, "user=gsgil", "account=gpuspawner-members"), "made for its ticket"
    books.holder_ended(lease)
    said = books.slurm("audit")
    assert (said["ok"], said["sessions"], said["differences"]) == (True, 1, [])
    assert books.broker.debit_cluster().jobs == 0  # it is no job beside servers

    sooner = lease.granted_at - timedelta(seconds=7)
    with books.broker.store.write() as connection:
        mine = leases.c.id == lease.id
        connection.execute(sa.update(leases).where(mine).values(granted_at=sooner))
    said = books.slurm("audit", code=1)
    (found,) = said["differences"]
    assert found["ours"] - found["slurm"] in (6, 7, 8)
    assert lease.id in found["subject"] and "in Slurm (job " in found["what"]
    since = f"{lease.ended_at - timedelta(days=1):%Y-%m-%d}"
    text = books.printed("audit", "--since", since, code=1)
    assert text.startswith(f"DIFFERS  lease {lease.id} of gsgil: ")
    assert "--since: 'soon' is no date" in books.printed("audit", "--since", "soon", code=1)

    # The service does it once a day.
    tick = Tick(broker=books.broker, hub=Hub("http://127.0.0.1:9", ""), engines={}, log=LOG)
    asyncio.run(OnCluster(tick).audit())
    assert books.broker.trail() == []
    now = books.broker.clock() + timedelta(days=1, hours=1)
    books.broker.clock = lambda: now
    for _ in range(2):
        asyncio.run(OnCluster(tick).audit())
        (change,) = books.broker.trail()
        assert (change.action, lease.id in change.subject) == ("slurm audit", True)
