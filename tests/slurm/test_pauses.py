"""What an admin decides of a line in Slurm, and what they did there themselves; and a controller
that hangs. Real: Slurm with two nodes, a broker and its store. Stand-in: the GPUs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gpuspawner.core.errors import NoDeviceFree, SlurmUnavailable, TooMuchAsked
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from gpuspawner.slurm.cluster import read_cluster
from gpuspawner.slurm.jobs import SlurmJob, read_jobs
from gpuspawner.slurm.priority import FIRST_PAUSE, MARK, Hand
from gpuspawner.slurm.programs import Slurm
from gpuspawner.slurm.scheduler import SlurmDelegate
from tests.support.processes import wait_for
from tests.support.slurm_broker import asked, frozen, has_job, opened, until, weak_programs
from tests.support.slurm_cluster import SlurmCluster

ALL = ("--gres=gpu:a100:2", "--gres=gpu:h100:1")


@pytest.fixture
def broker(tmp_path: Path, cluster: SlurmCluster) -> Iterator[Broker]:
    """All GPUs are in use."""
    cluster.user("ann")
    for gres in ALL:
        cluster.wait_state(cluster.hold("ann", gres), "RUNNING")
    broker = opened(tmp_path, cluster)
    yield broker
    broker.store.close()


def test_the_end_of_a_pause_releases_what_it_held(
    broker: Broker, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Also of a hub that was started anew meanwhile; and nothing of what somebody else held, or
    of another hub's, or of who uses sbatch."""
    mine, held, own = (asked(broker, "ann", name) for name in ("mine", "held", "own"))
    tickets = [mine, held, own]
    other = cluster.hold("ann", "--gres=gpu:1", f"--job-name=gpuspawner-{'f' * 16}")
    batch = cluster.hold("ann", "--gres=gpu:1")
    cluster.run("scontrol", "hold", has_job(cluster, held, "%i"))
    cluster.run("scontrol", "update", f"JobId={has_job(cluster, mine, '%i')}", "AdminComment=old")

    def says(ticket: Ticket, *reasons: str) -> bool:
        return has_job(cluster, ticket, "%r") in reasons

    broker.devices.pause(actor="admin", reason="new fans")
    until(broker, tickets, lambda _: says(mine, "JobHeldAdmin") and says(own, "JobHeldAdmin"))
    for job in (other, batch):
        assert cluster.run("squeue", "-h", "-j", str(job), "-o", "%Q").strip() != "0"
    # In the pause an admin makes the hold of one of them their own.
    cluster.run("scontrol", "uhold", has_job(cluster, own, "%i"))

    anew = opened(tmp_path, cluster)
    until(anew, tickets, lambda turns: turns == [])
    assert anew.devices.resume(actor="admin")
    until(anew, tickets, lambda _: says(mine, "Priority", "Resources", "None"))
    until(anew, tickets, lambda _: MARK not in cluster.run("scontrol", "show", "job"))
    assert says(held, "JobHeldAdmin") and says(own, "JobHeldUser")
    assert "AdminComment=old" in cluster.run("scontrol", "show", "job")


def test_who_uses_sbatch_goes_on_in_a_pause(
    broker: Broker, cluster: SlurmCluster, tmp_path: Path
) -> None:
    ticket = asked(broker, "ann")
    batch = cluster.hold("ann", "--gres=gpu:h100:1")
    broker.devices.pause(actor="admin")
    until(broker, [ticket], lambda _: has_job(cluster, ticket, "%r") == "JobHeldAdmin")
    cluster.run("scancel", "--state=running", "--user=ann")
    cluster.wait_state(batch, "RUNNING")
    assert has_job(cluster, ticket, "%r") == "JobHeldAdmin"


def test_a_hub_without_rights_holds_and_releases_its_own(
    broker: Broker, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A job's owner may hold it, and nobody can lift an admin's hold but an admin."""
    mine, held = (asked(broker, "ann", name) for name in ("mine", "held"))
    cluster.run("scontrol", "hold", has_job(cluster, held, "%i"))
    monkeypatch.setenv("PATH", weak_programs(tmp_path / "bin", "ann", "*"))
    slurm = Slurm(conf=str(cluster.conf))

    def jobs() -> list[SlurmJob]:
        return [job for job in read_jobs(slurm) if job.ticket_id]

    hand = Hand(slurm, logging.getLogger(__name__), user=jobs()[0].uid)
    hand.pause(jobs())
    assert has_job(cluster, mine, "%r") == "JobHeldUser"

    def is_released() -> bool:
        hand.go_on(jobs(), {})  # as in every round, until it is so
        return int(has_job(cluster, mine, "%Q")) > 0

    wait_for(is_released, "its priority")
    assert has_job(cluster, held, "%r") == "JobHeldAdmin"


def test_what_slurm_refused_is_told_again_and_ever_more_seldom(
    broker: Broker, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", weak_programs(folder, "ann", "*Nice=* | *Priority=*"))
    ticket = asked(broker, "ann")
    slurm, now = Slurm(conf=str(cluster.conf)), [0.0]
    hand = Hand(slurm, logging.getLogger(__name__), clock=lambda: now[0])

    def told(wanted: Ticket, *, up_to: float = 0.0) -> int:
        """How often it was, while it was wanted each second until then."""
        (folder / "told").write_text("", encoding="utf-8")
        (job,) = (job for job in read_jobs(slurm) if job.ticket_id == ticket.id)
        while True:
            hand.order([(wanted, job)])
            if now[0] >= up_to:
                return len((folder / "told").read_text(encoding="utf-8").splitlines())
            now[0] += 1

    points = replace(ticket, boost=5.0)
    assert told(points) == 1
    assert told(points, up_to=FIRST_PAUSE - 1) == 0
    assert told(points, up_to=3 * FIRST_PAUSE) == 2, "after 5 and after 10 more"
    assert told(replace(ticket, boost=6.0)) == 1, "another wish is not refused yet"
    assert told(replace(ticket, position=1), up_to=now[0] + FIRST_PAUSE - 1) == 1
    assert has_job(cluster, ticket, "%Q") not in ("0", "3999999999")
    (folder / "strong").touch()
    assert told(replace(ticket, position=1), up_to=now[0] + FIRST_PAUSE) == 1
    assert has_job(cluster, ticket, "%Q") == "3999999999"


def test_a_controller_that_hangs_holds_up_nobody(
    broker: Broker, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Its programs would wait for minutes; who asks, leaves or is refused waits for none of it."""
    cluster.reconfigure(MessageTimeout=90)
    try:
        _hangs(broker, cluster)
    finally:
        cluster.reconfigure(MessageTimeout=5)


def _hangs(broker: Broker, cluster: SlurmCluster) -> None:
    delegate = SlurmDelegate(
        read_cluster(broker.settings.slurm.cluster_file), Slurm(conf=str(cluster.conf), seconds=300)
    )
    broker.delegate = broker.machines.delegate = broker.watch.source = delegate
    leaves = asked(broker, "ann", "leaves")
    until_in_line(broker, leaves)  # it reads its settings anew, and may take nothing meanwhile
    with frozen(cluster, "slurmctld"), ThreadPoolExecutor(4) as threads:
        delegate._nodes_at = float("-inf")  # the nodes are to be looked at again
        with pytest.raises(SlurmUnavailable, match="has not answered for"):
            while True:
                broker.turns(frozenset([leaves.id]))
        rounds = threads.submit(broker.turns, frozenset([leaves.id]))
        refused = threads.submit(_ask_now, broker, 1)
        too_many = threads.submit(_ask_now, broker, 40)
        assert isinstance(refused.exception(timeout=60), NoDeviceFree)
        assert isinstance(too_many.exception(timeout=60), TooMuchAsked)
        comes = threads.submit(asked, broker, "ann", "comes")
        ended = threads.submit(broker.end_ticket, leaves.id, "left", "they left")
        new = comes.result(timeout=60)
        assert ended.result(timeout=60).outcome == "left"
        assert isinstance(rounds.exception(timeout=60), SlurmUnavailable)
        (standing,) = broker.standings().values()
        assert "Slurm does not answer just now; it is asked again" in standing.why
        assert delegate._asker.seconds > 0 and delegate._nodes_asker.seconds > 0, "both hang yet"
    until_in_line(broker, new)
    assert "does not answer" not in broker.standings()[new.id].why
    assert has_job(cluster, new) == "PENDING"
    wait_for(lambda: broker.end_deserted() or not has_job(cluster, leaves), "its job to go")


def until_in_line(broker: Broker, ticket: Ticket) -> None:
    """Rounds until Slurm answers and has the ticket's job."""

    def place() -> int:
        assert broker.delegate is not None
        try:
            broker.turns(frozenset([ticket.id]))
            return broker.delegate.turns()[ticket.id].place
        except (SlurmUnavailable, KeyError):
            return 0

    wait_for(place, "a place in line", timeout=60)
    broker.turns(frozenset([ticket.id]))


def _ask_now(broker: Broker, devices: int) -> object:
    server = ServerRef("ann", f"now{devices}")
    return broker.ask(server, Request(devices=devices), engine="slurm", terms=Terms())
