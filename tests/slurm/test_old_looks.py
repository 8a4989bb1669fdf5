"""What happens between two looks at Slurm, when the last one does not show it yet. Real: Slurm with
two nodes, a broker and its store. Stand-in: the GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import NoDeviceFree, SlurmRefused
from gpuspawner.leases.models import LeaseState
from gpuspawner.services import Broker
from gpuspawner.slurm import scheduler
from gpuspawner.slurm.cluster import read_cluster
from gpuspawner.slurm.programs import Slurm
from gpuspawner.slurm.scheduler import SlurmDelegate
from tests.support.processes import wait_for
from tests.support.slurm_broker import asked, has_job, opened, until
from tests.support.slurm_cluster import SlurmCluster


@pytest.fixture
def broker(tmp_path: Path, cluster: SlurmCluster) -> Iterator[Broker]:
    cluster.user("ann")
    broker = opened(tmp_path, cluster)
    yield broker
    broker.store.close()


def delegate_of(broker: Broker) -> SlurmDelegate:
    assert isinstance(broker.delegate, SlurmDelegate)
    return broker.delegate


END_JOB: dict[str, Callable[[SlurmDelegate, str, int], None]] = {
    "a GPU that is closed is given back": lambda slurm, ticket, job: slurm.decline(ticket),
    "the ticket is cancelled": lambda slurm, ticket, job: slurm.cancel(ticket),
    "the container was removed": lambda slurm, ticket, job: slurm.cancel_job(job),
}


@pytest.mark.parametrize("why", END_JOB)
def test_a_ticket_gets_nothing_from_a_job_that_was_told_to_end(
    broker: Broker, cluster: SlurmCluster, why: str
) -> None:
    ticket = asked(broker, "ann")
    until(broker, [ticket], lambda turns: turns == [ticket.id])
    slurm = delegate_of(broker)
    first = slurm.job(ticket.id)
    assert first is not None
    END_JOB[why](slurm, ticket.id, first.id)
    assert broker.turns(frozenset([ticket.id])) == [], "the last look shows it running"
    with pytest.raises(NoDeviceFree):
        broker.start_ticket(ticket.id)

    # It waits on, and gets another job.
    until(broker, [ticket], lambda turns: turns == [ticket.id])
    second = slurm.job(ticket.id)
    assert second is not None and second.id != first.id
    lease = broker.start_ticket(ticket.id)
    assert lease.ticket_id == ticket.id and has_job(cluster, ticket) == "RUNNING"


def test_a_job_that_slurm_does_not_let_us_end_counts_again(
    broker: Broker, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*jobs: int) -> None:
        raise SlurmRefused(why="Access/permission denied")

    monkeypatch.setattr(scheduler, "ENDING", 0.0)
    monkeypatch.setattr(Slurm, "cancel", lambda self, *jobs: refuse(*jobs))
    ticket = asked(broker, "ann")
    until(broker, [ticket], lambda turns: turns == [ticket.id])
    delegate_of(broker).decline(ticket.id)
    assert broker.turns(frozenset([ticket.id])) == []
    until(broker, [ticket], lambda turns: turns == [ticket.id])
    assert has_job(cluster, ticket) == "RUNNING"


def test_a_ticket_that_becomes_a_lease_while_the_store_is_read_keeps_its_job(
    broker: Broker, cluster: SlurmCluster
) -> None:
    ticket = asked(broker, "ann")
    until(broker, [ticket], lambda turns: turns == [ticket.id])
    granted = []
    with ThreadPoolExecutor(1) as hub:

        @sa.event.listens_for(broker.store.read_engine, "after_cursor_execute")
        def grant(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if not granted and "FROM leases" in statement:
                granted.append("soon")  # once
                granted.append(hub.submit(broker.start_ticket, ticket.id).result(timeout=60).id)

        assert broker.end_deserted() == []
    assert broker.lease(granted[1]).state is LeaseState.GRANTED
    assert has_job(cluster, ticket) == "RUNNING"


def test_a_session_can_be_extended_right_after_its_start(
    broker: Broker, cluster: SlurmCluster
) -> None:
    """The accounting service extends it; its last look at Slurm was before the job was there."""
    service = SlurmDelegate(
        read_cluster(broker.settings.slurm.cluster_file), Slurm(conf=str(cluster.conf), seconds=60)
    )
    before = service.turns()
    ticket = asked(broker, "ann", seconds=3600)
    assert ticket.id not in before
    wait_for(lambda: has_job(cluster, ticket) == "RUNNING", "its job")
    service._answered = scheduler.time.monotonic()  # as if that look had been just now
    service.extend(ticket.id, 2 * 3600)
    assert has_job(cluster, ticket, "%l") == "2:20:00"
    with pytest.raises(SlurmRefused, match="its job has ended"):
        service.extend("f" * 16, 3600)
