"""Real: Slurm with its database and two nodes, Linux users, the command line, SQLite.
Stand-in: the GPUs.

Members and groups in Slurm, and the audit of their sessions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from gpuspawner.core.units import MICRO
from gpuspawner.db.schema import leases
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.queue.models import Ticket
from gpuspawner.slurm.accounts import user_of
from tests.support.processes import wait_for
from tests.support.slurm_books import QUICK, Books, begin, cluster_duty, finish, member
from tests.support.slurm_broker import asked, hanging_sacctmgr, opened
from tests.support.slurm_cluster import SlurmCluster

LONG = "dana.of-the-very-long-name@mathematics.example.org"
LOG = logging.getLogger(__name__)


def associations(books: Books, *words: str) -> list[str]:
    shown = "format=account,user,share,grptres,maxsubmit,defaultqos"
    which = (f"cluster={books.cluster.cluster_name}", *words)
    return books.cluster.run("sacctmgr", "-n", "-P", "show", "assoc", *which, shown).splitlines()


def test_slurm_sync_is_previewed_and_resumes_after_a_kill(
    books: Books, cluster: SlurmCluster, tmp_path: Path
) -> None:
    cluster.user("gsann", "lab1")
    before = associations(books)
    theirs = [line for line in before if not line.startswith(("gpuspawner", "g-"))]
    for name in ("gsann", "Erin F", LONG, *(f"crowd{n}" for n in range(6))):
        books.services.ledger.open_account(name)
    books.services.cluster_members.note_groups({"research": ["gsann", "Erin F"]})

    planned = books.slurm("sync", "--dry-run")
    assert not planned["done"] and not planned["problems"] and len(planned["steps"]) > 8
    assert associations(books) == before

    folder = tmp_path / "programs"
    killed = books.start("sync", path=hanging_sacctmgr(folder, len(planned["steps"])))
    wait_for((folder / "hangs").exists, "all steps but the last one")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=120)
    (folder / "hangs").unlink()
    assert associations(books) != before
    left = books.slurm("sync")
    assert left["done"] and 0 < len(left["steps"]) < len(planned["steps"])
    again = books.services.cluster_members.plan_for_cluster()
    assert (again.steps, again.problems) == ((), ())

    found = associations(books)
    assert "g-research||300|||" in found
    assert "g-research|gsann|1|||gpuspawner-course" in found
    assert "g-research|u-_45rin_20_46|1|||gpuspawner-course" in found
    short = user_of(LONG)
    assert short.startswith("h-")
    assert sum(line.startswith(f"gpuspawner-members|{short}|") for line in found) == 1
    assert theirs and [line for line in theirs if line not in found] == []


def test_empty_account_holds_gpu_jobs_and_former_member_submits_none(
    books: Books, cluster: SlurmCluster
) -> None:
    user, former = member(books, "gseve"), member(books, "gsfay")
    books.sync()
    books.services.ledger.grant("member:gseve", -1000 * MICRO, actor="admin", reason="gone")
    assert books.sync() == ["gseve: in gpuspawner-members: GrpTRES=gres/gpu=0,gres/shard=0"]
    books.services.members.membership_ended("gsfay", "the course is over", actor="admin")
    books.sync()
    with pytest.raises(RuntimeError, match="AssocMaxSubmitJobLimit"):
        cluster.hold(former, "--account=gpuspawner-members")
    waiting = cluster.hold(user, "--gres=gpu:1")
    share = cluster.hold(user, "--gres=shard:1")
    plain = cluster.hold(user, script=QUICK)
    cluster.wait_state(plain, "RUNNING", "COMPLETED")
    reasons = ("squeue", "-h", "-j", f"{waiting},{share}", "-o", "%r")
    wait_for(lambda: cluster.run(*reasons).split() == ["AssocGrpGRES"] * 2, "the reason")
    # A server that a group pays for is another matter.
    server, now = ServerRef("gseve"), books.services.clock()
    ticket = Ticket(id="x", server=server, request=Request(devices=1), created_at=now)
    books.services.cluster_members.admit_to_cluster(ticket)
    cluster.wait_state(waiting, "RUNNING")

    books.services.members.membership_returned("gsfay", actor="admin", by_roster=False)
    books.sync()
    cluster.hold(former, "--account=gpuspawner-members", script=QUICK)


def test_audit_reports_sessions_that_differ_from_slurm(books: Books, cluster: SlurmCluster) -> None:
    member(books, "gsgil")
    lease = begin(books, "gsgil")
    job = f"--name=gpuspawner-{lease.ticket_id}"
    ran = ("squeue", "-h", job, "-o", "%M")
    wait_for(lambda: cluster.run(*ran).strip() > "0:01", "something to compare")
    lease = finish(books, lease)
    assert lease.ended_at is not None
    assert associations(books, "user=gsgil", "account=gpuspawner-members"), "made for its ticket"
    books.holder_ended(lease)
    said = books.slurm("audit")
    assert (said["ok"], said["sessions"], said["differences"]) == (True, 1, [])
    assert books.services.job_billing.debit_cluster().jobs == 0  # it is no job beside servers

    sooner = lease.granted_at - timedelta(seconds=7)
    with books.services.store.write() as connection:
        mine = leases.c.id == lease.id
        connection.execute(sa.update(leases).where(mine).values(granted_at=sooner))
    said = books.slurm("audit", code=1)
    (found,) = said["differences"]
    assert found["ours"] - found["slurm"] in (6, 7, 8)
    assert lease.id in found["subject"] and "in Slurm (job " in found["what"]
    since = f"{lease.ended_at - timedelta(days=1):%Y-%m-%d}"
    text = books.printed("audit", "--since", since, code=1)
    assert text.startswith(f"DIFFERS  lease {lease.id} of gsgil: ")
    assert "--since: 'soon' is not a date" in books.printed("audit", "--since", "soon", code=1)

    # The service does it once a day.
    asyncio.run(cluster_duty(books, LOG).audit())
    assert books.services.audit.trail() == []
    now = books.services.clock() + timedelta(days=1, hours=1)
    books.services.clock = lambda: now
    for _ in range(2):
        asyncio.run(cluster_duty(books, LOG).audit())
        (change,) = books.services.audit.trail()
        assert (change.action, lease.id in change.subject) == ("slurm audit", True)


def test_server_job_runs_under_the_members_group_account(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    cluster.user("gsmia", "lab1")  # the site's own
    services = opened(tmp_path, cluster, group_weights={"course": 1, "thesis": 4})
    groups = frozenset({"course", "thesis"})
    ticket = asked(services, "gsmia", groups=groups)
    assert ticket.group == "thesis"
    assert cluster.holder(ticket.id, "%a") == "g-thesis"
    shown = ("show", "user", "gsmia", "format=defaultaccount")
    assert cluster.run("sacctmgr", "-n", "-P", *shown).strip() == "lab1"

    # What Slurm does not know any more keeps nobody from starting.
    services.queue.end_ticket(ticket.id, "left", "they left")
    wait_for(lambda: not cluster.holder(ticket.id), "its job to end")
    where = ("name=gsmia", "account=g-thesis", f"cluster={cluster.cluster_name}")
    cluster.run("sacctmgr", "-i", "delete", "user", "where", *where)
    other = asked(services, "gsmia", "other", groups=groups)
    assert cluster.holder(other.id, "%a") == "lab1"
    services.store.close()
