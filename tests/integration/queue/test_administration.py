"""What admins change. Real: services, SQLite and PostgreSQL. Simulated: devices and the clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import (
    GrantingPaused,
    InvalidRequest,
    NoDeviceFree,
    TicketEnded,
    UnknownTicket,
)
from gpuspawner.devices import closures
from gpuspawner.leases.models import Lease
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from tests.support.brokers import Clock, Make, acquire, states
from tests.support.parts import each_database
from tests.support.sessions import ask, line_up

KIM = "kim"


def each_a_minute_later(services: Services, clock: Clock, *users: str) -> list[Ticket]:
    found = []
    for user in users:
        found.append(line_up(services, user))
        clock.forward(minutes=1)
    return found


@pytest.fixture
def full(services: Services) -> Services:
    """The four devices are in use by one server."""
    acquire(services, "owner", 4)
    return services


def line(services: Services) -> list[str]:
    return [ticket.server.user for ticket, _, _ in services.positions.order()]


def trail(services: Services) -> list[tuple[str, str, str, str]]:
    return [(c.actor, c.action, c.subject, c.detail) for c in services.audit.trail()]


# Pause and drain.


def test_paused_granting_refuses_devices_and_keeps_tickets(services: Services) -> None:
    assert services.devices.pause(actor=KIM, reason="new fans")
    assert not services.devices.pause(actor="other", reason="something else")
    ticket = line_up(services, "anna")
    assert services.queue.turns(frozenset({ticket.id})) == []
    with pytest.raises(GrantingPaused, match="new fans"):
        services.queue.start_ticket(ticket.id)
    with pytest.raises(GrantingPaused, match="new fans"):
        ask(services, "bert")
    assert isinstance(ask(services, "cara", 0), Lease), "a server without a GPU starts"
    why = services.positions.standings()[ticket.id].why
    assert why == "new GPU sessions to resume (new fans)"
    assert services.devices.closures()[closures.GRANTING].actor == KIM

    assert services.devices.resume(actor=KIM, reason="they turn")
    assert not services.devices.resume(actor=KIM)
    assert services.queue.turns(frozenset({ticket.id})) == [ticket.id]
    assert services.queue.start_ticket(ticket.id).ticket_id == ticket.id
    assert trail(services) == [
        (KIM, "resume", "granting", "they turn"),
        (KIM, "pause", "granting", "new fans"),
    ]


def test_drained_device_keeps_session_and_gets_no_new_one(services: Services) -> None:
    lease = acquire(services, "anna")
    (uuid,) = lease.uuids
    assert services.devices.drain(uuid, actor=KIM, reason="a fan")
    assert not services.devices.drain(uuid, actor=KIM)
    assert states(services).count("draining") == 1
    assert services.leases.get(lease.id).ended_at is None, "its session goes on"
    services.leases.release(lease.id, reason="stopped")
    assert states(services).count("drained") == 1
    got = acquire(services, "bert", 3)
    assert uuid not in got.uuids
    with pytest.raises(NoDeviceFree):
        acquire(services, "cara")
    ticket = line_up(services, "cara")
    assert services.queue.turns(frozenset({ticket.id})) == []
    with pytest.raises(NoDeviceFree):
        services.queue.start_ticket(ticket.id)
    assert services.devices.undrain(uuid, actor=KIM)
    assert not services.devices.undrain(uuid, actor=KIM)
    assert services.queue.turns(frozenset({ticket.id})) == [ticket.id]
    assert services.queue.start_ticket(ticket.id).uuids == (uuid,)
    assert [(action, subject) for _, action, subject, _ in trail(services)] == [
        ("undrain", uuid),
        ("drain", uuid),
    ]


def test_devices_are_named_by_index_or_uuid(make: Make) -> None:
    services = make(device_source="simulated:2xT4")
    devices = [view.device for view in services.monitoring.overview().devices]
    for name in ("1", devices[1].uuid):
        assert services.devices.find_device(name) == devices[1]
    for name in ("2", "", "GPU-0", "\x00", "granting"):
        with pytest.raises(InvalidRequest, match="No device has the UUID or index"):
            services.devices.drain(name, actor=KIM)
    with pytest.raises(InvalidRequest):
        services.devices.undrain("granting", actor=KIM)
    assert trail(services) == []


def test_removed_device_can_be_undrained(make: Make) -> None:
    before = make(device_source="simulated:2xT4")
    gone = before.monitoring.overview().devices[1].device.uuid
    before.devices.drain(gone, actor=KIM)
    after = make(device_source="simulated:1xA100-80GB")
    after.monitoring.overview()
    assert after.devices.undrain(gone, actor=KIM)
    assert after.devices.closures() == {}


# The order.


def test_invalid_boost_or_queue_position_is_rejected(full: Services) -> None:
    ticket = line_up(full, "anna")
    points: list[Any] = [math.nan, math.inf, -math.inf, 1e6 + 1, 10**400, True, "5", None]
    for value in points:
        with pytest.raises(InvalidRequest, match="is not a number of points"):
            full.queue.boost(ticket.id, value, actor=KIM)
    positions: list[Any] = [0, -1, 10**7, 10**400, 1.0, True, "1"]
    for value in positions:
        with pytest.raises(InvalidRequest, match="is not a position in the queue"):
            full.queue.move(ticket.id, value, actor=KIM)
    assert (full.queue.ticket(ticket.id), trail(full)) == (ticket, [])


@pytest.mark.parametrize(
    ("reason", "sentence"), [("x" * 301, "301 characters"), ("a\x00b", "unreadable characters")]
)
def test_invalid_reason_is_rejected_and_changes_nothing(
    full: Services, reason: str, sentence: str
) -> None:
    ticket = line_up(full, "anna")
    uuid = full.monitoring.overview().devices[0].device.uuid
    changes: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (full.devices.pause, ()),
        (full.devices.resume, ()),
        (full.devices.drain, (uuid,)),
        (full.devices.undrain, (uuid,)),
        (full.queue.boost, (ticket.id, 1)),
        (full.queue.move, (ticket.id, 1)),
        (full.queue.cancel, (ticket.id,)),
    ]
    for change, what in changes:
        with pytest.raises(InvalidRequest, match=sentence):
            change(*what, actor=KIM, reason=reason)
    assert (full.queue.ticket(ticket.id), full.devices.closures(), trail(full)) == (ticket, {}, [])


# Cancelling.


def test_cancelled_ticket_is_recorded_and_notifies_its_member(full: Services, clock: Clock) -> None:
    ticket, waiting = each_a_minute_later(full, clock, "anna", "bert")
    with pytest.raises(InvalidRequest, match="The reason is missing"):
        full.queue.cancel(ticket.id, actor=KIM, reason="  ")
    with pytest.raises(UnknownTicket):
        full.queue.cancel("no-such-ticket", actor=KIM, reason="x")
    assert (full.queue.ticket(ticket.id), trail(full)) == (ticket, [])
    ended = full.queue.cancel(ticket.id, actor=KIM, reason=" the course\nis over ")
    assert (ended.outcome, ended.ended_at) == ("cancelled", clock.now)
    assert ended.end_reason == "an admin cancelled it: the course is over"
    assert line(full) == ["bert"]
    (told,) = full.notifications.notices_of("anna")
    assert told.kind is NoticeKind.TICKET_ENDED and "the course is over" in told.body
    (change,) = full.audit.trail()
    assert (change.at, change.actor, change.action) == (clock.now, KIM, "cancelled")
    assert change.subject == f"ticket {ticket.id} of anna"
    for act in (
        lambda: full.queue.cancel(ticket.id, actor="other", reason="again"),
        lambda: full.queue.move(ticket.id, 1, actor="other"),
        lambda: full.queue.boost(ticket.id, 1, actor="other"),
        lambda: full.queue.start_ticket(ticket.id),
    ):
        with pytest.raises(TicketEnded):
            act()
    assert full.queue.ticket(ticket.id) == ended and len(full.audit.trail()) == 1
    assert full.queue.ticket(waiting.id) == waiting


def test_cancel_after_the_grant_is_refused(services: Services) -> None:
    lease = acquire(services, "owner", 4)
    ticket = line_up(services, "anna")
    services.leases.release(lease.id, reason="stopped")
    granted = services.queue.start_ticket(ticket.id)
    with pytest.raises(TicketEnded, match="granted: its turn came"):
        services.queue.cancel(ticket.id, actor=KIM, reason="too late")
    assert services.queue.ticket(ticket.id).lease_id == granted.id
    assert trail(services) == []


# Two processes: the service and the command line change what the hub grants from.


def test_queue_changes_of_other_processes_take_effect(
    full: Services, make: Make, clock: Clock
) -> None:
    service = make(gpu_rates={"A100": 4, "T4": "0.5"})
    first, second, third = each_a_minute_later(full, clock, "anna", "bert", "cara")
    assert line(service) == ["anna", "bert", "cara"]
    service.queue.move(third.id, 1, actor=KIM)
    service.queue.cancel(first.id, actor=KIM, reason="x")
    assert line(full) == ["cara", "bert"]
    assert set(full.positions.standings()) == {second.id, third.id}
    service.devices.pause(actor=KIM)
    present = frozenset({second.id, third.id})
    for lease in full.leases.open_leases():
        full.leases.release(lease.id, reason="stopped")
    assert full.queue.turns(present) == []
    service.devices.resume(actor=KIM)
    service.devices.drain("0", actor=KIM)
    assert full.queue.turns(present) == [third.id, second.id]
    drained = service.devices.find_device("0").uuid
    got = [full.queue.start_ticket(ticket_id) for ticket_id in (third.id, second.id)]
    assert drained not in {uuid for lease in got for uuid in lease.uuids}


# The trail.


@each_database
def test_audit_trail_is_append_only(services: Services) -> None:
    services.devices.pause(actor=KIM)
    before = services.audit.trail()
    for statement in ("UPDATE audit SET actor = 'me'", "DELETE FROM audit"):
        with pytest.raises(sa.exc.DBAPIError), services.store.engine.begin() as connection:
            connection.execute(sa.text(statement))
    assert services.audit.trail() == before
