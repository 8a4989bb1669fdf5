"""Real: Slurm with its database and two nodes, Linux users, the command line, SQLite.
Stand-in: the GPUs.

Batch jobs are paid from members' accounts, whatever Slurm's database was told when.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config

from gpuspawner.cli.check_slurm import check_slurm
from gpuspawner.cli.hub import open_hub
from gpuspawner.core.errors import SlurmUnavailable
from gpuspawner.core.units import MICRO
from gpuspawner.engines.preflight import CheckFinding, Status
from gpuspawner.services import utcnow
from gpuspawner.slurm import repository as slurm_repository
from gpuspawner.slurm.job_billing import LATE, OVERLAP, SETTLED, BillingResult
from gpuspawner.slurm.jobs import behind
from tests.support.processes import wait_for
from tests.support.slurm_books import (
    QUICK,
    Books,
    begin,
    cluster_duty,
    finish,
    member,
    moved_database,
)
from tests.support.slurm_cluster import SlurmCluster

LOG = logging.getLogger(__name__)


def forward(books: Books, **step: float) -> None:
    """The services' clock goes on, and runs on from there; Slurm's knows nothing of it."""
    ahead = books.services.clock() - utcnow() + timedelta(**step)
    books.services.clock = lambda: utcnow() + ahead


def read_up_to(books: Books) -> datetime:
    """Up to when jobs were read."""
    services = books.services
    return services.job_billing.marks(books.cluster.cluster_name, services.clock()).until


def settled_round(books: Books) -> BillingResult:
    """One after a while. The controller may have something to tell its database just then."""
    forward(books, seconds=SETTLED.total_seconds() + 1)
    return books.services.job_billing.debit_cluster()


def end_after_a_second(cluster: SlurmCluster, job: int) -> None:
    """End a running job: Slurm counts whole seconds, and a job of none costs nothing."""
    ran = ("squeue", "-h", "-j", str(job), "-o", "%M")
    wait_for(lambda: cluster.run(*ran).strip() >= "0:01", "a second of the job")
    cluster.run("scancel", str(job))


def checked(books: Books) -> CheckFinding:
    """What ``gpuspawner check`` says of the database."""
    hub = open_hub(Config())
    found = check_slurm(hub, None, books.services.cluster_members.nodes(), False)
    return next(finding for finding in found if finding.name == "slurmdbd")


def test_batch_jobs_are_charged_to_the_member_account(books: Books, cluster: SlurmCluster) -> None:
    user = member(books, "Dan G", "u-_44an_20_47")
    cluster.user("gsbob", "lab1")  # whom the hub does not know
    books.sync()
    two = cluster.hold(user, "--gres=gpu:a100:2", "--job-name=a|b\nc")
    one = cluster.hold("gsbob", "--gres=gpu:h100:1", script=QUICK)
    none = cluster.hold(user, script=QUICK)
    cluster.wait_state(two, "RUNNING")
    assert books.services.job_billing.debit_cluster().amount == 0  # not an hour yet
    end_after_a_second(cluster, two)
    seconds = books.ended(two)
    books.ended(one)
    books.ended(none)

    done = books.debit()
    assert (done.jobs, done.amount) == (1, 2 * seconds * MICRO)
    assert books.services.job_billing.debit_cluster().amount == 0
    assert books.services.ledger.member("Dan G").balance == (1000 - 2 * seconds) * MICRO
    line = books.services.ledger.statement("member:Dan G")[0]
    assert f"Batch job {two} (a|b?c) on 2 NVIDIA A100" in line.reason

    def strangers() -> list[str]:
        books.services.job_billing.debit_cluster()
        audit = books.slurm("audit")
        assert audit["batch_jobs"] == 1 and audit["ok"]
        return [job["user"] for job in audit["of_nobody"]]

    assert wait_for(strangers, "the job of nobody", interval=0.5) == ["gsbob"]
    text = books.printed("audit")
    assert "Jobs of users who are not members (not charged):" in text
    assert f"1 batch job of members paid {2 * seconds}.000000 credits." in text


def test_job_that_is_found_late_is_charged(
    books: Books, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that ends hours after the last look, and one that was missing for a day because an
    older database of Slurm's had been restored."""
    user = member(books, "gshal")
    books.sync()
    job = cluster.hold(user, "--gres=gpu:1")

    def seen() -> bool:
        books.services.job_billing.debit_cluster()
        started = books.services.clock() - timedelta(hours=1)
        return bool(books.services.job_billing.jobs_since(cluster.cluster_name, started))

    wait_for(seen, "the job", interval=0.5)
    begun, write = [], books.services.store.write
    with monkeypatch.context() as patch:
        patch.setattr(books.services.store, "write", lambda: begun.append(None) or write())
        for _ in range(2):
            books.services.job_billing.debit_cluster()
        assert begun == [], "no round writes anything while nothing happens"
    forward(books, hours=3)
    books.services.job_billing.debit_cluster()
    end_after_a_second(cluster, job)
    assert books.ended(job) < 600  # long before the last look, as it says
    assert books.debit().amount == books.ended(job) * MICRO

    job = cluster.hold(user, "--gres=gpu:1", script=QUICK)
    seconds = books.ended(job)
    forward(books, hours=3)
    with books.services.store.write() as connection:
        slurm_repository.mark(connection, cluster.cluster_name, until=books.services.clock())
    assert books.services.job_billing.debit_cluster().jobs == 0
    forward(books, days=1)
    found = wait_for(lambda: settled_round(books).amount, "the job", interval=0.5)
    assert found == seconds * MICRO
    assert settled_round(books).amount == 0


def test_job_named_like_a_server_is_still_charged(books: Books, cluster: SlurmCluster) -> None:
    """Anybody can call a job as the hub calls those that servers run on."""
    user = member(books, "gsfake")
    books.sync()
    lease = begin(books, user)
    names = (f"gpuspawner-{lease.ticket_id}", "gpuspawner-0123456789abcdef")
    jobs = [
        cluster.hold(user, "--gres=gpu:h100:1", f"--job-name={name}", script=QUICK)
        for name in names
    ]
    ended = [books.ended(job) for job in jobs]
    finish(books, lease)

    def both() -> bool:
        books.services.job_billing.debit_cluster()
        found = books.services.job_billing.jobs_since(cluster.cluster_name, lease.granted_at)
        return [job.ended_at is not None for job in found] == [True, True]

    wait_for(both, "both to be paid", interval=0.5)
    statement = books.services.ledger.statement(f"member:{user}", 100)
    paid = [line for line in statement if line.kind == "batch"]
    assert -sum(line.amount for line in paid) == sum(ended) * MICRO

    def compared() -> Any:
        audit = books.slurm("audit")
        return audit["ok"] and (audit["sessions"], audit["batch_jobs"])

    # The end of the session's own job is known to the database a little later.
    assert wait_for(compared, "an audit in which all agree", interval=0.5) == (1, 2)
    assert books.services.job_billing.debit_cluster().jobs == 0


def test_delayed_slurm_database_loses_no_debit_and_admins_are_warned(
    books: Books,
    cluster: SlurmCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It answers and is told nothing, then it is away: both are said once a day. Two jobs come and
    go meanwhile. When it is back it answers at once, and knows nothing of them yet; and by then the
    last hour is long after their end."""
    monkeypatch.chdir(tmp_path)
    user = member(books, "gslag")
    books.sync()
    billing, duties = books.services.job_billing, cluster_duty(books, LOG)

    def told() -> list[str]:
        """What two rounds say of it."""
        caplog.clear()
        for _ in range(2):
            asyncio.run(duties.tick.round("Batch jobs", duties.jobs))
        said = [record.getMessage() for record in caplog.records if record.name == LOG.name]
        return [text for text in said if "may not be paid yet" in text]

    slurm = books.services.cluster_members.slurm()
    wait_for(lambda: behind(slurm) == 0, "it to be told everything", interval=0.3)
    begun = books.services.clock()
    assert checked(books).status is Status.OK
    with moved_database(cluster):
        jobs = [cluster.hold(user, f"--gres=gpu:a100:{n}", script=QUICK) for n in (1, 2)]
        for job in jobs:
            wait_for(lambda job=job: cluster.state(job) == "COMPLETED", "its end")
        found = checked(books)
        assert found.status is Status.FAIL and "systemctl status slurmdbd" in found.remedy
        assert " messages that the accounting database has not taken yet" in found.text
        assert told() == [] and billing.unread_since() is None, "it is not behind for long"
        forward(books, seconds=LATE.total_seconds() + 60)
        assert billing.unread_since() == read_up_to(books) < begun + OVERLAP
        (text,) = told()
        assert f"{read_up_to(books):%Y-%m-%d %H:%M} UTC" in text
        assert "systemctl status slurmctld slurmdbd" in text
        forward(books, hours=23)
        assert told() == []
        cluster.kill("slurmdbd")
        found = checked(books)
        assert found.status is Status.FAIL and "systemctl status slurmdbd" in found.remedy
        with pytest.raises(SlurmUnavailable):
            billing.debit_cluster()
        assert told() == []
        forward(books, hours=2)
        assert len(told()) == 1

    def paid() -> int:
        with suppress(SlurmUnavailable):
            billing.debit_cluster()
        lines = books.services.ledger.statement(f"member:{user}", 100)
        return sum(line.kind == "batch" for line in lines)

    wait_for(lambda: paid() == len(jobs), "both to be paid", interval=0.5)
    owed = sum(n * books.ended(job) for n, job in enumerate(jobs, start=1))
    assert books.services.ledger.member(user).balance == (1000 - owed) * MICRO
    assert read_up_to(books) < begun + OVERLAP, "who was behind may be so again"

    def read() -> bool:
        assert settled_round(books).jobs == 0
        return read_up_to(books) > begun + LATE

    wait_for(read, "all to be read up to now", interval=0.5)
    assert billing.unread_since() is None and told() == []
    assert checked(books).status is Status.OK
