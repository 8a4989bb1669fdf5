"""Servers that lost their GPUs, and start again with them. Real: both databases, threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from gpuspawner.core.errors import CannotRestart, GPUSpawnerError, NoDeviceFree
from gpuspawner.leases.gpu_loss import KEPT
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef
from gpuspawner.monitoring.models import DeviceUse
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.support.brokers import Clock, acquire, open_broker, problems, running, states

ADA = ServerRef("ada")


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    broker = open_broker(database_url, Clock(), opening_grant=1000)
    yield broker
    assert problems(broker.store) == []
    assert [finding for finding in broker.audit()[0] if finding.problem] == []
    broker.store.close()


def asked(broker: Broker, user: str, devices: int = 1, **terms: Any) -> Lease | Ticket:
    """What the broker answers to the spawn of a server."""
    request = Request(devices=devices, environment="pytorch")
    return broker.ask(ServerRef(user), request, engine="docker", terms=Terms(**terms))


def restarted(broker: Broker, devices: int = 2) -> Lease:
    """A server of Ada's that lost its devices, and was stopped to start again with them."""
    lease = running(broker, "ada", devices)
    broker.restarts.tell_lost(lease.id)
    broker.restarts.restart(lease.id, actor="ada")
    return broker.release(lease.id, reason="stopped")


def test_the_same_devices_and_nobody_between(broker: Broker) -> None:
    for name in "bcd":
        running(broker, name)
    lease = running(broker, "ada")
    broker.release(running_of(broker, "b").id, reason="stopped")
    assert broker.restarts.tell_lost(lease.id)
    assert not broker.restarts.tell_lost(lease.id)  # once
    ordered = broker.restarts.restart(lease.id, actor="ada")
    assert ordered.outcome == "restart"
    assert broker.due_sessions().stop == (broker.lease(lease.id),)  # the service has it stopped
    (going_on,) = broker.restarts.all_restarts()
    assert (going_on.server, going_on.is_gone) == (ADA, False)
    acquire(broker, "eve")  # what b left
    broker.release(lease.id, reason="stopped")
    assert broker.restarts.all_restarts()[0].is_gone
    assert "drained" in states(broker)
    assert "kept for ada, which starts again" in [x.detail for x in broker.overview().devices]
    with pytest.raises(NoDeviceFree):
        acquire(broker, "mallory")
    again = asked(broker, "ada")
    assert isinstance(again, Lease)
    assert again.uuids == lease.uuids
    assert again.id != lease.id
    assert broker.restarts.all_restarts() == []
    assert broker.closures() == {}
    (change,) = [x for x in broker.trail() if x.action == "restart"]
    assert (change.actor, change.subject) == ("ada", f"lease {lease.id} of ada")


def running_of(broker: Broker, user: str) -> Lease:
    lease = broker.lease_of(ServerRef(user))
    assert lease
    return lease


def test_a_free_one_that_fits_better_is_not_taken_instead(broker: Broker) -> None:
    """All four are free: the lowest index would be the first choice of anybody else."""
    other = running(broker, "bob", 2)
    lease = restarted(broker)
    broker.release(other.id, reason="stopped")
    again = asked(broker, "ada", 2)
    assert isinstance(again, Lease)
    assert again.uuids == lease.uuids


def test_who_waits_does_not_come_before(broker: Broker) -> None:
    running(broker, "bob", 2)
    lease = running(broker, "ada", 2)
    ticket = asked(broker, "eve", wait=True)
    assert isinstance(ticket, Ticket)
    broker.restarts.tell_lost(lease.id)
    broker.restarts.restart(lease.id, actor="ada")
    broker.release(lease.id, reason="stopped")
    assert broker.turns(frozenset({ticket.id})) == []
    again = asked(broker, "ada", 2, wait=True)
    assert isinstance(again, Lease)
    assert again.uuids == lease.uuids
    broker.release(again.id, reason="stopped")
    assert broker.turns(frozenset({ticket.id})) == [ticket.id]


def test_a_race_for_what_is_kept(broker: Broker) -> None:
    running(broker, "bob", 2)
    lease = restarted(broker)

    def ask(user: str) -> Lease | Ticket | None:
        try:
            return asked(broker, user, 2 if user == "ada" else 1)
        except GPUSpawnerError:
            return None

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, ["eve", "mal", "ada", "ada", "oscar", "trudy", "ada", "peggy"]))
    (mine,) = [each for each in got if each]
    assert isinstance(mine, Lease)
    assert (mine.server, mine.uuids) == (ADA, lease.uuids)


def test_the_session_ends_when_it_would_have(broker: Broker) -> None:
    got = asked(broker, "ada", seconds=7200)
    assert isinstance(got, Lease)
    broker.confirm(got.id)
    clock(broker).forward(minutes=50)
    broker.restarts.tell_lost(got.id)
    ends_at = broker.restarts.restart(got.id, actor="ada").ends_at
    clock(broker).forward(seconds=20)
    broker.release(got.id, reason="stopped")
    again = asked(broker, "ada", seconds=7200)
    assert isinstance(again, Lease)
    assert again.ends_at == ends_at
    # Another start, later, has its whole length.
    broker.release(again.id, reason="stopped")
    later = asked(broker, "ada", seconds=7200)
    assert isinstance(later, Lease)
    assert later.seconds == 7200


def clock(broker: Broker) -> Clock:
    assert isinstance(broker.clock, Clock)
    return broker.clock


def test_a_restart_gains_no_time_for_who_rests(broker: Broker) -> None:
    """Whoever is root in a container can make it look as if its GPUs were lost."""
    broker.settings.idle.policy = {"*": {"mode": "enforce", "first_minutes": 1}}
    lease = running(broker, "ada")

    def rest(some: Lease, minutes: int) -> list[str]:
        for _ in range(minutes):
            since = broker.clock().replace(second=0, microsecond=0)
            counts = {"samples": 60, "known": 60, "measured": 60}
            use = [DeviceUse(uuid=uuid, since=since, seconds=60, **counts) for uuid in some.uuids]
            broker.monitoring.remember_use(use)
            clock(broker).forward(minutes=1)
        held = broker.idle.holding_gpus()
        return [it.event for it in broker.idle.judge_idle({each.server: None for each in held})]

    assert rest(lease, 3) == ["warn"]
    stops_at = broker.idle.resting("ada")[0].stops_at
    broker.restarts.tell_lost(lease.id)
    broker.restarts.restart(lease.id, actor="ada")
    assert rest(lease, 1) == []
    broker.release(lease.id, reason="stopped")
    assert rest(lease, 1) == []
    again = asked(broker, "ada")
    assert isinstance(again, Lease)
    assert rest(again, 1) == []  # it starts
    broker.confirm(again.id, "again")
    assert broker.idle.resting("ada")[0].stops_at == stops_at
    assert rest(again, 7) == ["stop"]


def test_who_asks_for_something_else_keeps_nothing(broker: Broker) -> None:
    restarted(broker)
    got = asked(broker, "ada", 1)
    assert isinstance(got, Lease)
    assert broker.closures() == {}
    broker.release(got.id, reason="stopped")
    restarted(broker)
    without = asked(broker, "ada", 0)
    assert isinstance(without, Lease)
    assert broker.closures() == {}


def test_who_asks_for_more_than_is_kept_waits_like_everybody(broker: Broker) -> None:
    for name in "bc":
        running(broker, name)
    restarted(broker, devices=1)  # and one is free
    first = asked(broker, "first", devices=2, wait=True)
    assert isinstance(first, Ticket)
    more = asked(broker, "ada", devices=2, wait=True)
    assert isinstance(more, Ticket), "not before who came first, by two that were never kept"
    assert len(broker.open_leases()) == 2


def test_another_server_of_the_same_member_is_another(broker: Broker) -> None:
    running(broker, "bob", 2)
    restarted(broker)
    with pytest.raises(NoDeviceFree):
        acquire(broker, "ada", server="night")


def test_what_does_not_come_back_is_opened_to_all(broker: Broker) -> None:
    lease = restarted(broker)
    (going_on,) = broker.restarts.all_restarts()
    assert going_on.since == lease.ended_at
    clock(broker).forward(seconds=KEPT.total_seconds() + 1)
    assert broker.clock() - going_on.since > KEPT
    broker.restarts.end_restart(ADA, "its start failed 3 times")
    assert broker.restarts.all_restarts() == []
    assert states(broker) == ["free"] * 4
    newest = broker.notifications.notices_of("ada")[0]
    assert newest.title == "Your server did not start again"
    assert "Its start failed 3 times" in newest.body
    broker.restarts.end_restart(ADA, "its start failed 3 times")  # twice is once
    assert len([x for x in broker.notifications.notices_of("ada") if "did not" in x.title]) == 1


def test_when_it_cannot_be(broker: Broker) -> None:
    lease = acquire(broker, "ada")
    with pytest.raises(CannotRestart, match="it does not run"):
        broker.restarts.restart(lease.id, actor="ada")
    broker.confirm(lease.id)
    with pytest.raises(CannotRestart, match="it reaches them"):
        broker.restarts.restart(lease.id, actor="ada")
    broker.restarts.tell_lost(lease.id)
    assert broker.restarts.lost_of("ada") == [broker.lease(lease.id)]
    assert broker.restarts.lost_of("bob") == []
    broker.devices.drain(lease.uuids[0], actor="admin", reason="a new fan")
    with pytest.raises(CannotRestart, match="GPU 0 is drained: a new fan"):
        broker.restarts.restart(lease.id, actor="ada")
    broker.devices.undrain(lease.uuids[0], actor="admin")
    broker.devices.pause(actor="admin", reason="an upgrade")
    with pytest.raises(CannotRestart, match="no GPUs are given out"):
        broker.restarts.restart(lease.id, actor="ada")
    broker.devices.resume(actor="admin")
    assert broker.closures() == {}
    broker.stop(lease.id, actor="admin", reason="a test")
    with pytest.raises(CannotRestart, match="being stopped already"):
        broker.restarts.restart(lease.id, actor="ada")
    assert broker.restarts.lost_of("ada") == []
    broker.release(lease.id, reason="stopped")
    assert not broker.restarts.tell_lost(lease.id)
    with pytest.raises(CannotRestart, match="does not run"):
        broker.restarts.restart(lease.id, actor="ada")


def test_a_session_that_ends_anyway_is_not_restarted(broker: Broker) -> None:
    got = asked(broker, "ada", seconds=3600)
    assert isinstance(got, Lease)
    broker.confirm(got.id)
    broker.restarts.tell_lost(got.id)
    clock(broker).forward(minutes=59, seconds=10)
    with pytest.raises(CannotRestart, match="ends within a minute"):
        broker.restarts.restart(got.id, actor="ada")


def test_what_the_member_is_told(broker: Broker) -> None:
    lease = running(broker, "ada", 2, server="a b/ç")
    broker.restarts.tell_lost(lease.id)
    (told,) = broker.notifications.notices_of("ada")
    assert told.title == "Your server a b/ç cannot reach its GPUs any more"
    assert "Failed to initialize NVML: Unknown Error" in told.body
    broker.restarts.restart(lease.id, actor="ada")
    told = broker.notifications.notices_of("ada")[0]
    assert told.kind is NoticeKind.STOPPED
    assert told.title == "Your server a b/ç starts again with the same GPUs"
    (going_on,) = broker.restarts.all_restarts()
    assert going_on.server == lease.server  # whatever its name has in it
    assert broker.release(lease.id, reason="stopped").state is LeaseState.ENDED
    assert broker.lease(lease.id).end_reason == "it starts again with the same GPUs"


def test_a_clock_that_is_set_back_keeps_it(broker: Broker) -> None:
    restarted(broker)
    clock(broker).forward(hours=-3)
    (going_on,) = broker.restarts.all_restarts()
    assert broker.clock() - going_on.since < timedelta(0)
    again = asked(broker, "ada", 2)
    assert isinstance(again, Lease)
