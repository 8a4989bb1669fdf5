"""Runs from submission to their end. Real: services, SQLite. Simulated: devices and clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.models import Ticket
from gpuspawner.runs.models import Run, RunState, Work
from gpuspawner.runs.rules import MOST_RESTARTS
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, Make, acquire

WORK = Work(command=("python3", "train.py"), folder="runs/train")


def run_of(number: int = 1, **fields: Any) -> Run:
    return Run(
        id=f"{number:016x}", title="train", work=WORK, created_at=T0, **{"user": "ada", **fields}
    )


def ask(services: Services, run: Run, seconds: int = 3600) -> Lease | Ticket:
    terms = Terms(wait=True, seconds=seconds)
    return services.queue.ask(run.server, Request(devices=1), engine="docker", terms=terms)


def start(services: Services, run: Run) -> Lease:
    """Grant what a run asks for, and see its container."""
    Clock.of(services).forward(seconds=1)
    lease = ask(services, run)
    assert isinstance(lease, Lease)
    return services.leases.confirm(lease.id, "container", started_at=services.clock())


def state_of(services: Services, run: Run) -> RunState:
    return services.runs.get(run.id).state


def test_run_is_charged_and_done_once(make: Make) -> None:
    services = make(gpu_rates={"*": 60})
    run, is_new = services.runs.submit(run_of())
    assert is_new
    assert state_of(services, run) is RunState.WAITING
    lease = start(services, run)
    assert state_of(services, run) is RunState.RUNNING
    Clock.of(services).forward(seconds=60)
    services.runs.note_exit(run.id, 0)
    services.leases.release(lease.id, stopped_at=services.clock(), reason="exit code 0")

    assert [ended.id for ended in services.runs.settle()] == [run.id]
    assert services.runs.settle() == []
    followed = services.runs.get(run.id)
    assert (followed.state, followed.run.exit_code) == (RunState.DONE, 0)
    assert followed.lease is not None
    assert followed.lease.charged == 10**6


def test_ended_run_is_not_started_again_before_it_is_settled(make: Make) -> None:
    services = make()
    run, _ = services.runs.submit(run_of(requeue=True))

    def is_to_be_started() -> bool:
        return services.runs.get(run.id).is_to_be_started

    assert is_to_be_started()
    lease = start(services, run)
    services.leases.release(lease.id, reason="exit code 143")
    assert not is_to_be_started(), "it may be done"
    services.runs.settle()
    assert is_to_be_started(), "it was interrupted"
    lease = start(services, run)
    services.runs.note_exit(run.id, 0)
    services.leases.release(lease.id, reason="exit code 0")
    assert not is_to_be_started()
    services.runs.settle()
    assert not is_to_be_started()


def test_same_key_submits_once(make: Make) -> None:
    services = make()
    first, _ = services.runs.submit(run_of(1, key="night"))
    again, is_new = services.runs.submit(run_of(2, key="night"))
    assert (again, is_new) == (first, False)
    _, other = services.runs.submit(run_of(3, key="night", user="bob"))
    assert other, "another member's key is another key"
    assert len(services.runs.open_runs()) == 2


def test_failed_program_is_told_with_its_status(make: Make) -> None:
    services = make()
    run, _ = services.runs.submit(run_of(requeue=True))
    lease = start(services, run)
    services.runs.note_exit(run.id, 3)
    services.leases.release(lease.id, reason="exit code 3")
    services.runs.settle()
    ended = services.runs.get(run.id)
    assert ended.state is RunState.FAILED
    assert ended.run.reason == "Its program ended with exit status 3."


@pytest.mark.parametrize("requeue", [True, False])
def test_interrupted_run_begins_again_if_it_may(make: Make, requeue: bool) -> None:
    services = make()
    run, _ = services.runs.submit(run_of(requeue=requeue))
    for _ in range(MOST_RESTARTS if requeue else 0):
        lease = start(services, run)
        services.leases.release(lease.id, reason="the machine went down")
        assert services.runs.settle() == []
        assert services.runs.settle() == [], "one end is counted once"
        assert state_of(services, run) is RunState.WAITING
    lease = start(services, run)
    services.leases.release(lease.id, reason="the machine went down")
    (ended,) = services.runs.settle()
    assert ended.outcome == "failed"
    assert ended.reason == "It was interrupted: the machine went down."
    assert ended.restarts == (MOST_RESTARTS if requeue else 0)


def test_interrupted_run_has_its_old_place(make: Make) -> None:
    services = make()
    clock = Clock.of(services)
    run, _ = services.runs.submit(run_of(requeue=True))
    lease = start(services, run)
    acquire(services, "owner", 3)
    clock.forward(hours=20)
    later = services.queue.ask(
        ServerRef("bob"), Request(devices=4), engine="docker", terms=Terms(wait=True, seconds=3600)
    )
    assert isinstance(later, Ticket)
    clock.forward(hours=20)
    services.leases.release(lease.id, reason="the machine went down")
    services.runs.settle()
    again = services.queue.ask(
        run.server,
        Request(devices=4),
        engine="docker",
        terms=Terms(wait=True, seconds=3600, since=run.created_at),
    )
    assert isinstance(again, Ticket)
    assert services.queue.turns(frozenset({later.id, again.id})) == []
    line = services.queue.line.scheduler.in_line(clock().timestamp())
    assert line == [again.id, later.id]


def test_start_that_came_to_nothing_is_made_again(make: Make) -> None:
    services = make()
    run, _ = services.runs.submit(run_of(requeue=False))
    lease = ask(services, run)
    assert isinstance(lease, Lease)
    services.leases.release(lease.id, reason="the server was gone", lost=True)
    assert services.runs.settle() == []
    assert state_of(services, run) is RunState.WAITING


def test_waiting_run_is_stopped_at_once(make: Make) -> None:
    services = make()
    acquire(services, "owner", 4)
    run, _ = services.runs.submit(run_of())
    ticket = ask(services, run)
    assert isinstance(ticket, Ticket)
    services.runs.stop(run.id, actor="ada")
    assert services.queue.waiting() == []
    ended = services.runs.get(run.id)
    assert (ended.state, ended.run.reason) == (RunState.STOPPED, "Its member stopped it.")
    assert services.runs.stop(run.id, actor="ada") == ended, "again changes nothing"


def test_running_run_is_stopped_by_an_order(make: Make) -> None:
    services = make()
    run, _ = services.runs.submit(run_of())
    lease = start(services, run)
    services.runs.stop(run.id, actor="boss", reason="the room is needed")
    ordered = services.leases.get(lease.id)
    assert (ordered.outcome, ordered.end_reason) == ("admin", "the room is needed")
    assert state_of(services, run) is RunState.RUNNING, "until its container has ended"
    services.leases.release(lease.id, reason="exit code 137")
    services.runs.settle()
    ended = services.runs.get(run.id).run
    assert (ended.outcome, ended.reason) == ("stopped", "The room is needed.")


def test_stop_between_the_end_and_its_notice_changes_nothing(make: Make) -> None:
    """A duty orders it in every round until the run has ended."""
    services = make()
    run, _ = services.runs.submit(run_of())
    lease = start(services, run)
    for _ in range(2):
        services.runs.stop(run.id, actor="boss", reason="the room is needed")
        services.leases.release(lease.id, reason="exit code 137")
    services.runs.settle()
    assert services.runs.get(run.id).run.reason == "The room is needed."
    assert [told.kind for told in services.notifications.notices_of("ada")] == [
        NoticeKind.RUN_ENDED
    ]


def test_run_lost_with_its_hub_is_started_from_its_old_place(make: Make) -> None:
    services = make()
    taken = acquire(services, "owner", 4)
    run, _ = services.runs.submit(run_of())
    ticket = ask(services, run)
    services.leases.release(taken.id, reason="stopped")
    assert services.queue.turns(frozenset({ticket.id})) == [ticket.id]
    lease = services.queue.start_ticket(ticket.id)
    services.leases.release(lease.id, reason="the server was gone", lost=True)
    assert services.runs.settle() == []
    assert services.runs.get(run.id).is_to_be_started, "its ticket waits again"


def test_runs_from_the_queue_need_nobody_to_connect(make: Make) -> None:
    services = make()
    taken = acquire(services, "owner", 4)
    run, _ = services.runs.submit(run_of())
    ticket = ask(services, run)
    services.leases.release(taken.id, reason="stopped")
    assert services.queue.turns(frozenset({ticket.id})) == [ticket.id]
    Clock.of(services).forward(seconds=60)
    lease = services.queue.start_ticket(ticket.id)
    assert lease.claim_seconds is None
    assert services.notifications.notices_of("ada") == [], "nobody waits before a page"


def test_newest_come_in_pages(make: Make) -> None:
    services = make()
    for number in range(1, 6):
        services.runs.submit(
            replace(run_of(number), created_at=Clock.of(services).forward(seconds=1))
        )
    first = services.runs.newest("ada", limit=2)
    then = services.runs.newest("ada", limit=3, before=first[-1].run.id)
    assert [int(x.run.id, 16) for x in (*first, *then)] == [5, 4, 3, 2, 1]
    assert services.runs.newest("bob") == []
