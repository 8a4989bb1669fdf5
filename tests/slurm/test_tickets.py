"""Tickets of services as jobs in Slurm: looks that are old, machines that are closed, what an admin
decides, a controller that hangs. Real: Slurm with two nodes, services and its store. Stand-in: the
GPUs, and what is found of them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import (
    InvalidRequest,
    NoDeviceFree,
    SlurmRefused,
    SlurmUnavailable,
    TooMuchAsked,
)
from gpuspawner.core.units import MICRO
from gpuspawner.devices import closures
from gpuspawner.devices.closures import HEALTH, Closure
from gpuspawner.leases.models import LeaseState, Request, ServerRef, Sharing, Terms
from gpuspawner.monitoring.health import Symptom
from gpuspawner.monitoring.health_service import FoundSymptoms
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.positions import Outlook
from gpuspawner.queue.schemas import TicketAnswer
from gpuspawner.services import Services
from gpuspawner.slurm import scheduler
from gpuspawner.slurm.cluster import read_cluster
from gpuspawner.slurm.jobs import NO_REPORT, read_jobs
from gpuspawner.slurm.priority import FIRST_PAUSE, MARK, PriorityOverrides
from gpuspawner.slurm.programs import Slurm
from gpuspawner.slurm.scheduler import NO_DEVICE, SlurmDelegate
from tests.support.processes import wait_for
from tests.support.slurm_broker import (
    asked,
    frozen,
    opened,
    squeue_without_device,
    until,
    weak_programs,
)
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_node import Node

GONE = "it is lost"

ALL = ("--gres=gpu:a100:2", "--gres=gpu:h100:1")


@pytest.fixture
def services(tmp_path: Path, cluster: SlurmCluster, ann: str) -> Iterator[Services]:
    services = opened(tmp_path, cluster)
    yield services
    services.store.close()


@pytest.fixture
def all_in_use(services: Services, cluster: SlurmCluster) -> None:
    """Others have all GPUs."""
    for gres in ALL:
        cluster.wait_state(cluster.hold("ann", gres), "RUNNING")


# What happens between two looks at Slurm, when the last one does not show it yet.


def delegate_of(services: Services) -> SlurmDelegate:
    assert isinstance(services.delegation.delegate, SlurmDelegate)
    return services.delegation.delegate


END_JOB: dict[str, Callable[[SlurmDelegate, str, int], None]] = {
    "a GPU that is closed is given back": lambda slurm, ticket, job: slurm.decline(ticket),
    "the ticket is cancelled": lambda slurm, ticket, job: slurm.cancel(ticket),
    "the container was removed": lambda slurm, ticket, job: slurm.cancel_job(job),
}


@contextmanager
def nothing_begins(cluster: SlurmCluster) -> Iterator[None]:
    """Meanwhile Slurm starts no job."""
    cluster.run("scontrol", "update", "partitionname=gpu", "state=down")
    try:
        yield
    finally:
        cluster.run("scontrol", "update", "partitionname=gpu", "state=up")


def test_ticket_gets_no_devices_from_a_cancelled_job(
    services: Services, cluster: SlurmCluster
) -> None:
    ticket = asked(services, "ann")
    until(services, [ticket], lambda turns: turns == [ticket.id])
    slurm = delegate_of(services)
    for why, end in END_JOB.items():
        first = slurm.job(ticket.id)
        assert first is not None
        with nothing_begins(cluster):  # for a look that comes late could show another job
            end(slurm, ticket.id, first.id)
            # The last look shows it running.
            assert services.queue.turns(frozenset([ticket.id])) == [], why
            with pytest.raises(NoDeviceFree):
                services.queue.start_ticket(ticket.id)

        # It waits on, and gets another job.
        until(services, [ticket], lambda turns: turns == [ticket.id])
        second = slurm.job(ticket.id)
        assert second is not None and second.id != first.id
    lease = services.queue.start_ticket(ticket.id)
    assert lease.ticket_id == ticket.id
    wait_for(lambda: cluster.holder(ticket.id) == "RUNNING", "the jobs before to be cleaned up")


def test_job_that_slurm_refuses_to_end_counts_again(
    services: Services, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*jobs: int) -> None:
        raise SlurmRefused(why="Access/permission denied")

    monkeypatch.setattr(scheduler, "ENDING", 3600.0)
    monkeypatch.setattr(Slurm, "cancel", lambda self, *jobs: refuse(*jobs))
    ticket = asked(services, "ann")
    until(services, [ticket], lambda turns: turns == [ticket.id])
    delegate_of(services).decline(ticket.id)
    assert services.queue.turns(frozenset([ticket.id])) == []
    monkeypatch.setattr(scheduler, "ENDING", 0.0)
    until(services, [ticket], lambda turns: turns == [ticket.id])
    assert cluster.holder(ticket.id) == "RUNNING"


def test_ticket_granted_during_cleanup_keeps_its_job(
    services: Services, cluster: SlurmCluster
) -> None:
    ticket = asked(services, "ann")
    until(services, [ticket], lambda turns: turns == [ticket.id])
    granted = []
    with ThreadPoolExecutor(1) as hub:

        @sa.event.listens_for(services.store.read_engine, "after_cursor_execute")
        def grant(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if not granted and "FROM leases" in statement:
                granted.append("soon")  # once
                granted.append(
                    hub.submit(services.queue.start_ticket, ticket.id).result(timeout=60).id
                )

        assert services.delegation.end_deserted() == []
    assert services.leases.get(granted[1]).state is LeaseState.GRANTED
    assert cluster.holder(ticket.id) == "RUNNING"


def test_session_can_be_extended_right_after_its_start(
    services: Services, cluster: SlurmCluster
) -> None:
    """The accounting service extends it; its last look at Slurm was before the job was there."""
    service = SlurmDelegate(
        read_cluster(services.settings.slurm.cluster_file),
        Slurm(conf=str(cluster.conf), seconds=60),
    )
    before = service.turns()
    ticket = asked(services, "ann", seconds=3600)
    assert ticket.id not in before
    wait_for(lambda: cluster.holder(ticket.id) == "RUNNING", "its job")
    service._answered = scheduler.time.monotonic()  # as if that look had been just now
    service.extend(ticket.id, 2 * 3600)
    assert cluster.holder(ticket.id, "%l") == "2:20:00"
    with pytest.raises(SlurmRefused, match="its job has ended"):
        service.extend("f" * 16, 3600)


def test_no_latest_start_is_named(services: Services) -> None:
    """Slurm expects starts and promises none: another job may get the devices first."""
    holder = asked(services, "ann", model="H100", seconds=3600)
    until(services, [holder], lambda turns: turns == [holder.id])
    services.leases.confirm(services.queue.start_ticket(holder.id).id, "container")
    waiting = asked(services, "ann", "b", model="H100", seconds=3600)
    wanted = {"it": Request(devices=1, model="H100")}
    outlook = services.positions.outlooks(wanted, "ann", seconds=3600)["it"]
    assert outlook == Outlook(0, 1, at_once=False, ahead=1)
    standing = services.positions.standings()[waiting.id]
    answer = TicketAnswer.of(ticket=waiting, standing=standing)
    assert standing.latest is answer.latest is None


def test_members_share_the_slots_of_one_gpu(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Five servers want the H100, which has four parts: the fifth waits for one of them.

    Slurm chooses the parts, and a member may get two of one GPU.
    """
    servers = [("part0", ""), ("part0", "second"), ("part1", ""), ("part2", ""), ("part3", "")]
    for user in {user for user, _ in servers}:
        cluster.users.make(user)
    services = opened(tmp_path, cluster, shards=4, gpu_rates={"*": 3600}, opening_grant=100_000)
    with closing(services.store):
        tickets = [
            asked(services, *server, model="H100", sharing=Sharing.SLOT) for server in servers
        ]
        turns = until(services, tickets, lambda turns: turns if len(turns) == 4 else None)
        leases = [services.queue.start_ticket(turn) for turn in turns]
        (place,) = {lease.devices[0].uuid for lease in leases}
        assert {lease.devices[0].slot for lease in leases} == {0, 1, 2, 3}
        assert [lease.rate for lease in leases] == [3600 * MICRO // 4] * 4
        (last,) = (ticket for ticket in tickets if ticket.id not in turns)

        delegate = delegate_of(services)
        delegate.cancel(turns[0])
        wait_for(lambda: delegate.turns()[turns[0]].over, "the end of its job")
        services.leases.release(leases[0].id, reason="stopped")
        until(services, [last], lambda turns: turns == [last.id])
        (device,) = services.queue.start_ticket(last.id).devices
        assert (device.uuid, device.slot) == (place, leases[0].devices[0].slot)


def test_shares_wait_until_their_machine_reports_to_a_restarted_slurm(
    cluster: SlurmCluster, ann: str, tmp_path: Path
) -> None:
    """Until then Slurm 22.05 says that no machine has such shares, if somebody has one; and after
    it, until those end, it may start a job without any."""
    for user in ("early", "late"):
        cluster.users.make(user)
    services = opened(tmp_path, cluster, shards=4)
    node = cluster.nodes[0]
    others = [cluster.hold(ann, "--gres=shard:a100:4") for _ in node.devices]
    for job in others:
        cluster.wait_state(job, "RUNNING")
    with closing(services.store):
        early = asked(services, "early", model="A100", sharing=Sharing.SLOT)
        wait_for(lambda: cluster.holder(early.id), "the job that waits")
        cluster.cut(node)
        cluster.restart("slurmctld")
        late = asked(services, "late", model="A100", sharing=Sharing.SLOT)
        assert cluster.holder(late.id) == "", "Slurm refuses its job"
        given_up = "PENDING BadConstraints"
        wait_for(lambda: cluster.holder(early.id, "%T %r") == given_up, "Slurm to give up a job")
        assert services.queue.turns(frozenset([early.id, late.id])) == []
        standings = services.positions.standings()
        for ticket in (early, late):
            assert NO_REPORT in standings[ticket.id].why
        cluster.mend()

        def are_tried() -> bool:
            assert services.queue.turns(frozenset([early.id, late.id])) == [], "none is free"
            standings = services.positions.standings()
            return all(NO_DEVICE in standings[ticket.id].why for ticket in (early, late))

        wait_for(are_tried, "jobs without a share to be given back", timeout=60)
        cluster.run("scancel", *map(str, others))
        until(services, [early, late], lambda turns: {early.id, late.id} == set(turns))


def test_share_has_all_its_shards_on_one_gpu(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Each A100 has four shards of 10 GB. With three of each taken, two are free in all, but a
    share of two waits."""
    for user in ("wide0", "wide1", "wide2"):
        cluster.users.make(user)
    # After a crash of its controller, Slurm 22.05 may count a GPU as in use that is not. It counts
    # anew when it is started without jobs.
    cluster.restart("slurmctld")
    services = opened(tmp_path, cluster, shards=4, gpu_rates={"*": 3600}, opening_grant=100_000)

    def ask(user: str, gib: int) -> Ticket:
        memory_bytes = gib * 2**30
        return asked(services, user, model="A100", sharing=Sharing.SLOT, memory_bytes=memory_bytes)

    with closing(services.store):
        wide = [ask("wide0", 25), ask("wide1", 25)]
        until(services, wide, lambda turns: len(turns) == 2)
        leases = [services.queue.start_ticket(ticket.id) for ticket in wide]
        assert {device.uuid for lease in leases for device in lease.devices} == {
            device.uuid for device in cluster.nodes[0].devices
        }
        narrow = ask("wide2", 15)
        waits = "PENDING Resources gres:shard:a100:2"
        wait_for(lambda: cluster.holder(narrow.id, "%T %r %b") == waits, "Slurm to look at it")
        delegate = delegate_of(services)
        delegate.cancel(wide[1].id)
        wait_for(lambda: delegate.turns()[wide[1].id].over, "the end of its job")
        services.leases.release(leases[1].id, reason="stopped")
        until(services, [narrow], lambda turns: turns == [narrow.id])
        (device,) = services.queue.start_ticket(narrow.id).devices
        assert (device.uuid, device.held_slots) == (leases[1].devices[0].uuid, 2)
        assert device.equivalent == Fraction(1, 2)


# Machines that are closed, by us and by others.


def fall_sick(services: Services, uuid: str) -> None:
    symptom = Symptom("lost", GONE, services.clock())
    (change,) = services.health.judge_health({uuid: FoundSymptoms((symptom,))})
    assert change.event == "sick"


def why(cluster: SlurmCluster, node: Node) -> str:
    """Why Slurm gives out nothing of a node; empty if it does."""
    state, reason = cluster.run("sinfo", "-h", "-n", node.name, "-o", "%T|%E").strip().split("|", 1)
    return reason if state.startswith("drain") else ""


def test_sick_gpu_closes_its_node_until_all_are_well(
    services: Services, cluster: SlurmCluster
) -> None:
    node = cluster.nodes[0]
    one, two = (device.uuid for device in node.devices)
    fall_sick(services, one)
    assert why(cluster, node) == f"gpuspawner: {one} is sick: {GONE}"
    (seen,) = [x for x in services.devices.look(fresh=True).devices if x.uuid == two]
    assert seen.reason == f"drained: {one} is sick: {GONE}"
    fall_sick(services, two)
    assert services.health.probed(one) and one not in services.devices.closures()
    assert why(cluster, node), "the other one is still sick"
    assert services.health.probed(two) and not why(cluster, node)

    # Whoever looked before that was written closes it, and opens it again.
    stale = {two: Closure(two, services.clock(), HEALTH, GONE)}
    services.machines.keep_closed(stale)
    assert not why(cluster, node)


def test_node_closures_reach_slurm_after_an_outage(
    services: Services, cluster: SlurmCluster
) -> None:
    first, second = cluster.nodes
    one, other = first.devices[0].uuid, second.devices[0].uuid
    fall_sick(services, other)
    cluster.kill("slurmctld")
    fall_sick(services, one)
    with pytest.raises(SlurmUnavailable):
        services.health.probed(other)
    assert services.devices.closures().keys() == {one, other}
    assert services.health.device_states()[other].state.verdict == "sick", "it is probed again"
    cluster.restart("slurmctld")
    services.machines.keep_closed()
    assert one in why(cluster, first)
    assert services.health.probed(other) and services.devices.closures().keys() == {one}
    assert not why(cluster, second)


def test_node_drained_by_others_is_not_reopened(
    services: Services, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """A node whose epilog failed may still have somebody's container on its GPU."""
    node = cluster.nodes[1]
    uuid = node.devices[0].uuid
    cluster.fail_epilog(node)
    job = cluster.hold("ann", "--gres=gpu:h100:1")
    cluster.wait_state(job, "RUNNING")
    cluster.run("scancel", str(job))
    wait_for(lambda: why(cluster, node), "the epilog to fail")
    assert services.devices.drain(uuid, actor="admin", reason="a look at it")
    assert why(cluster, node) == "Epilog error", "Slurm's own reason stays"

    with pytest.raises(InvalidRequest, match=r"Epilog error \(by slurm\)") as refused:
        services.devices.undrain(uuid, actor="admin")
    assert why(cluster, node) and uuid in services.devices.closures()
    assert "undrain" not in [change.action for change in services.audit.trail()]
    command = re.search(r"run: (scontrol .*=RESUME)\.", refused.value.message)
    assert command
    cluster.run(*command[1].split())  # as the sentence says
    assert not why(cluster, node)

    opened(tmp_path, cluster).machines.keep_closed()  # what is closed here is still closed
    assert why(cluster, node) == "gpuspawner: a look at it"
    assert services.devices.undrain(uuid, actor="admin") and not why(cluster, node)
    assert not services.devices.undrain(uuid, actor="admin")


def running_on(services: Services, cluster: SlurmCluster, node: Node) -> Ticket:
    """A ticket that Slurm gave devices of this node, whose turn nobody has seen yet."""
    (other,) = (other for other in cluster.nodes if other is not node)
    job = cluster.hold("ann", f"--gres=gpu:{len(other.devices)}", f"--nodelist={other.name}")
    cluster.wait_state(job, "RUNNING")
    ticket = asked(services, "ann", "mine")
    wait_for(lambda: cluster.holder(ticket.id, "%T %N") == f"RUNNING {node.name}", "its job")
    cluster.run("scancel", str(job))
    return ticket


def closed(services: Services, uuid: str) -> None:
    """As a service leaves it that is killed before it tells Slurm."""
    with services.store.write() as connection:
        closures.close(connection, Closure(uuid, services.clock(), HEALTH, GONE))


def test_ticket_moves_from_a_closed_node_to_another(
    services: Services, cluster: SlurmCluster, tmp_path: Path
) -> None:
    first, second = cluster.nodes
    ticket = running_on(services, cluster, first)
    closed(services, first.devices[0].uuid)
    closed(services, first.devices[1].uuid)
    until(services, [ticket], lambda turns: turns == [ticket.id])
    lease = services.queue.start_ticket(ticket.id)
    assert lease.uuids == (second.devices[0].uuid,)
    assert GONE in why(cluster, first)


def test_declined_job_is_replaced_after_a_hub_restart(
    services: Services, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The job is ended, nobody has handed in another one, and nobody remembers why."""
    ticket = running_on(services, cluster, cluster.nodes[0])
    assert services.delegation.delegate is not None
    wait_for(lambda: ticket.id in services.delegation.delegate.turns(), "a look at it")
    services.delegation.delegate.decline(ticket.id)
    wait_for(lambda: not cluster.holder(ticket.id), "its end")
    anew = opened(tmp_path, cluster)
    until(anew, [ticket], lambda turns: turns == [ticket.id])
    assert anew.queue.start_ticket(ticket.id).ticket_id == ticket.id


def test_job_that_slurm_gave_no_device_is_replaced(
    services: Services, cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm 22.05 starts such jobs while nodes register with a controller that was restarted."""
    monkeypatch.setenv("PATH", squeue_without_device(tmp_path / "bin"))
    ticket = asked(services, "ann", "mine")
    until(services, [ticket], lambda turns: turns == [ticket.id])
    none = (tmp_path / "bin/none").read_text()
    assert none and cluster.holder(ticket.id, "%i") != none
    assert len(services.queue.start_ticket(ticket.id).uuids) == 1


def test_node_that_slurm_cannot_drain_is_excluded(
    services: Services, cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub without an admin's rights cannot drain a node."""
    first, second = cluster.nodes
    monkeypatch.setenv("PATH", weak_programs(tmp_path / "bin", "ann", "*NodeName=*"))
    ticket = running_on(services, cluster, first)
    closed(services, first.devices[0].uuid)
    until(services, [ticket], lambda turns: turns == [ticket.id])
    assert not why(cluster, first)
    runs = f"RUNNING {second.name}"
    wait_for(lambda: cluster.holder(ticket.id, "%T %N") == runs, "its first job to be cleaned up")
    assert f"ExcNodeList={first.name}" in cluster.run("scontrol", "show", "job")

    # Where no other machine would do, it waits without a job.
    other = asked(services, "ann", "other", model="A100")
    until(services, [ticket, other], lambda turns: other.id not in turns)
    assert not cluster.holder(other.id) and not services.queue.ticket(other.id).outcome
    with services.store.write() as connection:
        closures.reopen(connection, first.devices[0].uuid)
    until(services, [ticket, other], lambda turns: other.id in turns)
    assert services.queue.start_ticket(other.id).devices[0].model == first.devices[0].model


# What an admin decides of a line, and a controller that hangs.


@pytest.mark.usefixtures("all_in_use")
def test_end_of_a_pause_releases_only_its_own_holds(
    services: Services, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Also of a hub that was started anew meanwhile; and nothing of what somebody else held, or
    of another hub's, or of who uses sbatch, whose jobs run on in the pause."""
    mine, held, own = (asked(services, "ann", name) for name in ("mine", "held", "own"))
    tickets = [mine, held, own]
    other = cluster.hold("ann", "--gres=gpu:1", f"--job-name=gpuspawner-{'f' * 16}")
    batch = cluster.hold("ann", "--gres=gpu:1")
    cluster.run("scontrol", "hold", cluster.holder(held.id, "%i"))
    cluster.run("scontrol", "update", f"JobId={cluster.holder(mine.id, '%i')}", "AdminComment=old")

    def says(ticket: Ticket, *reasons: str) -> bool:
        return cluster.holder(ticket.id, "%r") in reasons

    services.devices.pause(actor="admin", reason="new fans")
    until(services, tickets, lambda _: says(mine, "JobHeldAdmin") and says(own, "JobHeldAdmin"))
    for job in (other, batch):
        assert cluster.run("squeue", "-h", "-j", str(job), "-o", "%Q").strip() != "0"
    # In the pause an admin makes the hold of one of them their own.
    cluster.run("scontrol", "uhold", cluster.holder(own.id, "%i"))
    cluster.run("scancel", "--state=running", "--user=ann")
    cluster.wait_state(batch, "RUNNING")
    assert says(mine, "JobHeldAdmin")

    anew = opened(tmp_path, cluster)
    until(anew, tickets, lambda turns: turns == [])
    assert anew.devices.resume(actor="admin")
    until(anew, tickets, lambda _: says(mine, "Priority", "Resources", "None"))
    until(anew, tickets, lambda _: MARK not in cluster.run("scontrol", "show", "job"))
    assert says(held, "JobHeldAdmin") and says(own, "JobHeldUser")
    assert "AdminComment=old" in cluster.run("scontrol", "show", "job")


@pytest.mark.usefixtures("all_in_use")
def test_refused_changes_are_retried_with_growing_pauses(
    services: Services, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", weak_programs(folder, "ann", "*Nice=* | *Priority=*"))
    ticket = asked(services, "ann")
    slurm, now = Slurm(conf=str(cluster.conf)), [0.0]
    hand = PriorityOverrides(slurm, logging.getLogger(__name__), clock=lambda: now[0])

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
    assert cluster.holder(ticket.id, "%Q") not in ("0", "3999999999")
    (folder / "strong").touch()
    assert told(replace(ticket, position=1), up_to=now[0] + FIRST_PAUSE) == 1
    assert cluster.holder(ticket.id, "%Q") == "3999999999"


@pytest.fixture
def patient_programs(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slurm's programs wait for minutes, and the hub does not."""
    monkeypatch.setattr(scheduler, "PATIENCE", 5.0)
    cluster.reconfigure(MessageTimeout=90)
    yield
    cluster.reconfigure(MessageTimeout=5)


@pytest.mark.usefixtures("all_in_use", "patient_programs")
def test_hanging_controller_blocks_no_requests(services: Services, cluster: SlurmCluster) -> None:
    """Who asks, leaves or is refused does not wait for its programs."""
    delegate = SlurmDelegate(
        read_cluster(services.settings.slurm.cluster_file),
        Slurm(conf=str(cluster.conf), seconds=300),
    )
    services.delegation.delegate = services.machines.delegate = services.watch.source = delegate
    leaves = asked(services, "ann", "leaves")
    until_in_line(services, leaves)  # it reads its settings anew, and may take nothing meanwhile
    with frozen(cluster, "slurmctld"), ThreadPoolExecutor(4) as threads:
        delegate._nodes_at = float("-inf")  # the nodes are to be looked at again
        with pytest.raises(SlurmUnavailable, match="has not answered for"):
            while True:
                services.queue.turns(frozenset([leaves.id]))
        rounds = threads.submit(services.queue.turns, frozenset([leaves.id]))
        refused = threads.submit(_ask_now, services, 1)
        too_many = threads.submit(_ask_now, services, 40)
        assert isinstance(refused.exception(timeout=60), NoDeviceFree)
        assert isinstance(too_many.exception(timeout=60), TooMuchAsked)
        comes = threads.submit(asked, services, "ann", "comes")
        ended = threads.submit(services.queue.end_ticket, leaves.id, "left", "they left")
        new = comes.result(timeout=60)
        assert ended.result(timeout=60).outcome == "left"
        assert isinstance(rounds.exception(timeout=60), SlurmUnavailable)
        (standing,) = services.positions.standings().values()
        assert "Slurm is not responding; the hub retries until it does" in standing.why
        assert delegate._asker.seconds > 0 and delegate._nodes_asker.seconds > 0, "both hang yet"
    until_in_line(services, new)
    assert "is not responding" not in services.positions.standings()[new.id].why
    assert cluster.holder(new.id) == "PENDING"
    wait_for(
        lambda: services.delegation.end_deserted() or not cluster.holder(leaves.id), "its job to go"
    )


def until_in_line(services: Services, ticket: Ticket) -> None:
    """Rounds until Slurm answers and has the ticket's job."""

    def place() -> int:
        assert services.delegation.delegate is not None
        try:
            services.queue.turns(frozenset([ticket.id]))
            return services.delegation.delegate.turns()[ticket.id].place
        except (SlurmUnavailable, KeyError):
            return 0

    wait_for(place, "a place in the queue", timeout=60)
    services.queue.turns(frozenset([ticket.id]))


def _ask_now(services: Services, devices: int) -> object:
    server = ServerRef("ann", f"now{devices}")
    return services.queue.ask(server, Request(devices=devices), engine="slurm", terms=Terms())
