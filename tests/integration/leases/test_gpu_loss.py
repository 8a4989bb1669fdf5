"""Servers that lost their GPUs, and start again with them. Real: both databases, threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpuspawner.core.errors import CannotRestart, GPUSpawnerError, NoDeviceFree
from gpuspawner.leases.gpu_loss import KEPT
from gpuspawner.leases.models import Lease, LeaseState, ServerRef
from gpuspawner.monitoring.models import DeviceUse
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.services import Services
from tests.support.brokers import (
    Clock,
    Make,
    acquire,
    broken_invariants,
    running,
    states,
)
from tests.support.parts import each_database
from tests.support.sessions import ask, line_up
from tests.support.threads import at_once

ADA = ServerRef("ada")


@pytest.fixture
def services(make: Make) -> Iterator[Services]:
    yield (services := make(opening_grant=1000))
    assert broken_invariants(services) == {}


def started(services: Services, user: str, devices: int = 1, **terms: Any) -> Lease:
    """A lease at once."""
    got = ask(services, user, devices, **terms)
    assert isinstance(got, Lease)
    return got


def restarted(services: Services, devices: int = 2) -> Lease:
    """A server of Ada's that lost its devices, and was stopped to start again with them."""
    lease = running(services, "ada", devices)
    services.restarts.tell_lost(lease.id)
    services.restarts.restart(lease.id, actor="ada")
    return services.leases.release(lease.id, reason="stopped")


def test_restarted_server_gets_its_devices_back_exclusively(services: Services) -> None:
    for name in "bcd":
        running(services, name)
    lease = running(services, "ada")
    services.leases.release(running_of(services, "b").id, reason="stopped")
    assert services.restarts.tell_lost(lease.id)
    assert not services.restarts.tell_lost(lease.id)  # once
    ordered = services.restarts.restart(lease.id, actor="ada")
    assert ordered.outcome == "restart"
    # The service has it stopped.
    assert services.sessions.due_sessions().stop == (services.leases.get(lease.id),)
    (going_on,) = services.restarts.all_restarts()
    assert (going_on.server, going_on.is_gone) == (ADA, False)
    acquire(services, "eve")  # what b left
    services.leases.release(lease.id, reason="stopped")
    assert services.restarts.all_restarts()[0].is_gone
    assert "drained" in states(services)
    assert "kept for ada, which starts again" in [
        x.detail for x in services.monitoring.overview().devices
    ]
    with pytest.raises(NoDeviceFree):
        acquire(services, "mallory")
    again = started(services, "ada")
    assert again.uuids == lease.uuids
    assert again.id != lease.id
    assert services.restarts.all_restarts() == []
    assert services.devices.closures() == {}
    (change,) = [x for x in services.audit.trail() if x.action == "restart"]
    assert (change.actor, change.subject) == ("ada", f"lease {lease.id} of ada")


def running_of(services: Services, user: str) -> Lease:
    lease = services.leases.of_server(ServerRef(user))
    assert lease
    return lease


def test_waiting_ticket_does_not_overtake_a_restart(services: Services) -> None:
    running(services, "bob", 2)
    lease = running(services, "ada", 2)
    ticket = line_up(services, "eve")
    services.restarts.tell_lost(lease.id)
    services.restarts.restart(lease.id, actor="ada")
    services.leases.release(lease.id, reason="stopped")
    assert services.queue.turns(frozenset({ticket.id})) == []
    again = started(services, "ada", 2, wait=True)
    assert again.uuids == lease.uuids
    services.leases.release(again.id, reason="stopped")
    assert services.queue.turns(frozenset({ticket.id})) == [ticket.id]


@each_database
def test_devices_kept_for_a_restart_survive_a_race(services: Services) -> None:
    running(services, "bob", 2)
    lease = restarted(services)
    users = ["eve", "mal", "ada", "ada", "oscar", "trudy", "ada", "peggy"]
    got = at_once(8, lambda n: ask(services, users[n], 2 if users[n] == "ada" else 1))
    (mine,) = (each for each in got if isinstance(each, Lease))
    assert (mine.server, mine.uuids) == (ADA, lease.uuids)
    assert sum(isinstance(each, GPUSpawnerError) for each in got) == 7


def test_restarted_session_keeps_its_original_end(services: Services, clock: Clock) -> None:
    got = started(services, "ada", seconds=7200)
    services.leases.confirm(got.id)
    clock.forward(minutes=50)
    services.restarts.tell_lost(got.id)
    ends_at = services.restarts.restart(got.id, actor="ada").ends_at
    clock.forward(seconds=20)
    services.leases.release(got.id, reason="stopped")
    again = started(services, "ada", seconds=7200)
    assert again.ends_at == ends_at
    # Another start, later, has its whole length.
    services.leases.release(again.id, reason="stopped")
    later = started(services, "ada", seconds=7200)
    assert later.seconds == 7200


def test_restart_does_not_delay_the_idle_stop(services: Services, clock: Clock) -> None:
    """Whoever is root in a container can make it look as if its GPUs were lost."""
    services.settings.idle.policy = {"*": {"mode": "enforce", "first_minutes": 1}}
    lease = running(services, "ada")

    def rest(some: Lease, minutes: int) -> list[str]:
        for _ in range(minutes):
            since = services.clock().replace(second=0, microsecond=0)
            counts = {"samples": 60, "known": 60, "measured": 60}
            use = [DeviceUse(uuid=uuid, since=since, seconds=60, **counts) for uuid in some.uuids]
            services.monitoring.remember_use(use)
            clock.forward(minutes=1)
        held = services.idle.holding_gpus()
        return [it.event for it in services.idle.judge_idle({each.server: None for each in held})]

    assert rest(lease, 3) == ["warn"]
    stops_at = services.idle.resting("ada")[0].stops_at
    services.restarts.tell_lost(lease.id)
    services.restarts.restart(lease.id, actor="ada")
    assert rest(lease, 1) == []
    services.leases.release(lease.id, reason="stopped")
    assert rest(lease, 1) == []
    again = started(services, "ada")
    assert rest(again, 1) == []  # it starts
    services.leases.confirm(again.id, "again")
    assert services.idle.resting("ada")[0].stops_at == stops_at
    assert rest(again, 7) == ["stop"]


def test_request_for_fewer_devices_releases_the_kept_ones(services: Services) -> None:
    restarted(services)
    got = started(services, "ada", 1)
    assert services.devices.closures() == {}
    services.leases.release(got.id, reason="stopped")
    restarted(services)
    started(services, "ada", 0)
    assert services.devices.closures() == {}


def test_request_for_more_than_kept_waits_in_the_queue(services: Services) -> None:
    for name in "bc":
        running(services, name)
    restarted(services, devices=1)  # and one is free
    line_up(services, "first", devices=2)
    line_up(services, "ada", devices=2)  # not before who came first, by two that were never kept
    assert len(services.leases.open_leases()) == 2


def test_other_server_of_the_member_gets_no_kept_device(services: Services) -> None:
    other = running(services, "bob", 2)
    lease = restarted(services)
    with pytest.raises(NoDeviceFree):
        acquire(services, "ada", server="night")
    # The lowest index is anybody else's first choice.
    services.leases.release(other.id, reason="stopped")
    assert started(services, "ada", 2).uuids == lease.uuids


def test_failed_restart_frees_the_kept_devices(services: Services, clock: Clock) -> None:
    lease = restarted(services)
    (going_on,) = services.restarts.all_restarts()
    assert going_on.since == lease.ended_at
    clock.forward(seconds=KEPT.total_seconds() + 1)
    assert services.clock() - going_on.since > KEPT
    services.restarts.end_restart(ADA, "its start failed 3 times")
    assert services.restarts.all_restarts() == []
    assert states(services) == ["free"] * 4
    newest = services.notifications.notices_of("ada")[0]
    assert newest.title == "Your server did not start again"
    assert "Its start failed 3 times" in newest.body
    services.restarts.end_restart(ADA, "its start failed 3 times")  # twice is once
    assert len([x for x in services.notifications.notices_of("ada") if "did not" in x.title]) == 1


def test_impossible_restart_is_refused_with_the_reason(services: Services, clock: Clock) -> None:
    def refused(lease: Lease, why: str) -> None:
        with pytest.raises(CannotRestart, match=why):
            services.restarts.restart(lease.id, actor="ada")

    lease = acquire(services, "ada")
    refused(lease, "it does not run")
    services.leases.confirm(lease.id)
    refused(lease, "it reaches them")
    services.restarts.tell_lost(lease.id)
    assert services.restarts.lost_of("ada") == [services.leases.get(lease.id)]
    assert services.restarts.lost_of("bob") == []
    services.devices.drain(lease.uuids[0], actor="admin", reason="a new fan")
    refused(lease, "GPU 0 is drained: a new fan")
    services.devices.undrain(lease.uuids[0], actor="admin")
    services.devices.pause(actor="admin", reason="an upgrade")
    refused(lease, "new GPU sessions are paused")
    services.devices.resume(actor="admin")
    assert services.devices.closures() == {}
    services.sessions.stop(lease.id, actor="admin", reason="a test")
    refused(lease, "being stopped already")
    assert services.restarts.lost_of("ada") == []
    services.leases.release(lease.id, reason="stopped")
    assert not services.restarts.tell_lost(lease.id)
    refused(lease, "does not run")
    ending = started(services, "ada", seconds=3600)
    services.leases.confirm(ending.id)
    services.restarts.tell_lost(ending.id)
    clock.forward(minutes=59, seconds=10)
    refused(ending, "ends within a minute")


def test_member_is_notified_of_gpu_loss_and_restart(services: Services) -> None:
    lease = running(services, "ada", 2, server="a b/ç")
    services.restarts.tell_lost(lease.id)
    (told,) = services.notifications.notices_of("ada")
    assert told.title == "Your server a b/ç has lost access to its GPUs"
    assert "Failed to initialize NVML: Unknown Error" in told.body
    services.restarts.restart(lease.id, actor="ada")
    told = services.notifications.notices_of("ada")[0]
    assert told.kind is NoticeKind.STOPPED
    assert told.title == "Your server a b/ç restarts with the same GPUs"
    (going_on,) = services.restarts.all_restarts()
    assert going_on.server == lease.server  # whatever its name has in it
    assert services.leases.release(lease.id, reason="stopped").state is LeaseState.ENDED
    assert services.leases.get(lease.id).end_reason == "it starts again with the same GPUs"
