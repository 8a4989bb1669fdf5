"""Machines that are closed, by us and by others. Real: Slurm with two nodes, a broker and its
store. Stand-in: the GPUs, and what is found of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuspawner.core.errors import InvalidRequest, SlurmUnavailable
from gpuspawner.devices import closures
from gpuspawner.devices.closures import HEALTH, Closure
from gpuspawner.monitoring.health import Symptom
from gpuspawner.monitoring.health_service import FoundSymptoms
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Broker
from tests.support.processes import wait_for
from tests.support.slurm_broker import asked, has_job, opened, until, weak_programs
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_node import Node

GONE = "it is lost"


@pytest.fixture
def broker(tmp_path: Path, cluster: SlurmCluster) -> Iterator[Broker]:
    cluster.user("ann")
    broker = opened(tmp_path, cluster)
    yield broker
    broker.store.close()


def fall_sick(broker: Broker, uuid: str) -> None:
    symptom = Symptom("lost", GONE, broker.clock())
    (change,) = broker.health.judge_health({uuid: FoundSymptoms((symptom,))})
    assert change.event == "sick"


def why(cluster: SlurmCluster, node: Node) -> str:
    """Why Slurm gives out nothing of a node; empty when it does."""
    state, reason = cluster.run("sinfo", "-h", "-n", node.name, "-o", "%T|%E").strip().split("|", 1)
    return reason if state.startswith("drain") else ""


def test_a_sick_gpu_closes_its_machine_until_all_of_it_is_well(
    broker: Broker, cluster: SlurmCluster
) -> None:
    node = cluster.nodes[0]
    one, two = (device.uuid for device in node.devices)
    fall_sick(broker, one)
    assert why(cluster, node) == f"gpuspawner: {one} is sick: {GONE}"
    (seen,) = [x for x in broker.look(fresh=True).devices if x.uuid == two]
    assert seen.reason == f"drained: {one} is sick: {GONE}"
    fall_sick(broker, two)
    assert broker.health.probed(one) and one not in broker.closures()
    assert why(cluster, node), "the other one is still sick"
    assert broker.health.probed(two) and not why(cluster, node)

    # Whoever looked before that was written closes it, and opens it again.
    stale = {two: Closure(two, broker.clock(), HEALTH, GONE)}
    broker.machines.keep_closed(stale)
    assert not why(cluster, node)


def test_what_slurm_was_not_told_it_is_told_later(broker: Broker, cluster: SlurmCluster) -> None:
    first, second = cluster.nodes
    one, other = first.devices[0].uuid, second.devices[0].uuid
    fall_sick(broker, other)
    cluster.kill("slurmctld")
    fall_sick(broker, one)
    with pytest.raises(SlurmUnavailable):
        broker.health.probed(other)
    assert broker.closures().keys() == {one, other}
    assert broker.health.device_states()[other].state.verdict == "sick", "it is probed again"
    cluster.restart("slurmctld")
    broker.machines.keep_closed()
    assert one in why(cluster, first)
    assert broker.health.probed(other) and broker.closures().keys() == {one}
    assert not why(cluster, second)


def test_what_others_drained_they_open(
    broker: Broker, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """A node whose epilog failed may still have somebody's container on its GPU."""
    node = cluster.nodes[1]
    uuid = node.devices[0].uuid
    cluster.fail_epilog(node)
    job = cluster.hold("ann", "--gres=gpu:h100:1")
    cluster.wait_state(job, "RUNNING")
    cluster.run("scancel", str(job))
    wait_for(lambda: why(cluster, node), "the epilog to fail")
    assert broker.devices.drain(uuid, actor="admin", reason="a look at it")
    assert why(cluster, node) == "Epilog error", "Slurm's own reason stays"

    with pytest.raises(InvalidRequest, match=r"Epilog error \(by slurm\)") as refused:
        broker.devices.undrain(uuid, actor="admin")
    assert why(cluster, node) and uuid in broker.closures()
    assert "undrain" not in [change.action for change in broker.trail()]
    command = re.search(r"type: (scontrol .*=RESUME)\.", refused.value.message)
    assert command
    cluster.run(*command[1].split())  # as the sentence says
    assert not why(cluster, node)

    opened(tmp_path, cluster).machines.keep_closed()  # what is closed here is still closed
    assert why(cluster, node) == "gpuspawner: a look at it"
    assert broker.devices.undrain(uuid, actor="admin") and not why(cluster, node)
    assert not broker.devices.undrain(uuid, actor="admin")


def running_on(broker: Broker, cluster: SlurmCluster, node: Node) -> Ticket:
    """A ticket that Slurm gave devices of this node, whose turn nobody has seen yet."""
    others = [
        cluster.hold("ann", f"--gres=gpu:{len(other.devices)}", f"--nodelist={other.name}")
        for other in cluster.nodes
        if other is not node
    ]
    for other in others:
        cluster.wait_state(other, "RUNNING")
    ticket = asked(broker, "ann", "mine")
    wait_for(lambda: has_job(cluster, ticket, "%T %N") == f"RUNNING {node.name}", "its job")
    cluster.run("scancel", *map(str, others))
    return ticket


def closed(broker: Broker, uuid: str) -> None:
    """As a service leaves it that is killed before it tells Slurm."""
    with broker.store.write() as connection:
        closures.close(connection, Closure(uuid, broker.clock(), HEALTH, GONE))


def test_a_ticket_does_not_wait_with_what_is_closed(
    broker: Broker, cluster: SlurmCluster, tmp_path: Path
) -> None:
    first, second = cluster.nodes
    ticket = running_on(broker, cluster, first)
    closed(broker, first.devices[0].uuid)
    closed(broker, first.devices[1].uuid)
    until(broker, [ticket], lambda turns: turns == [ticket.id])
    lease = broker.start_ticket(ticket.id)
    assert lease.uuids == (second.devices[0].uuid,)
    assert GONE in why(cluster, first)


def test_a_hub_that_dies_while_it_gives_something_back(
    broker: Broker, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The job is ended, nobody has handed in another one, and nobody remembers why."""
    ticket = running_on(broker, cluster, cluster.nodes[0])
    assert broker.delegate is not None
    wait_for(lambda: ticket.id in broker.delegate.turns(), "a look at it")
    broker.delegate.decline(ticket.id)
    wait_for(lambda: not has_job(cluster, ticket), "its end")
    anew = opened(tmp_path, cluster)
    until(anew, [ticket], lambda turns: turns == [ticket.id])
    assert anew.start_ticket(ticket.id).ticket_id == ticket.id


def test_what_slurm_does_not_close_is_left_out(
    broker: Broker, cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub without an admin's rights cannot drain a node."""
    first, second = cluster.nodes
    monkeypatch.setenv("PATH", weak_programs(tmp_path / "bin", "ann", "*NodeName=*"))
    ticket = running_on(broker, cluster, first)
    closed(broker, first.devices[0].uuid)
    until(broker, [ticket], lambda turns: turns == [ticket.id])
    assert not why(cluster, first)
    assert has_job(cluster, ticket, "%T %N") == f"RUNNING {second.name}"
    assert f"ExcNodeList={first.name}" in cluster.run("scontrol", "show", "job")

    # Where no other machine would do, it waits without a job.
    other = asked(broker, "ann", "other", model="A100")
    until(broker, [ticket, other], lambda turns: other.id not in turns)
    assert not has_job(cluster, other) and not broker.ticket(other.id).outcome
    with broker.store.write() as connection:
        closures.reopen(connection, first.devices[0].uuid)
    until(broker, [ticket, other], lambda turns: other.id in turns)
    assert broker.start_ticket(other.id).devices[0].model == first.devices[0].model
