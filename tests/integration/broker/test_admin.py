"""What admins change. Real: broker, SQLite and PostgreSQL. Simulated: devices and the clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
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
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.support.brokers import Clock, acquire, states

Make = Callable[..., Broker]
KIM = "kim"


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


def ask(broker: Broker, user: str, devices: int = 1, **terms: Any) -> Lease | Ticket:
    request = Request(devices=devices, environment="pytorch")
    terms = {"wait": True, **terms}
    return broker.ask(ServerRef(user), request, engine="docker", terms=Terms(**terms))


def wait(broker: Broker, user: str, devices: int = 1) -> Ticket:
    ticket = ask(broker, user, devices)
    assert isinstance(ticket, Ticket)
    return ticket


def each_a_minute_later(broker: Broker, clock: Clock, *users: str) -> list[Ticket]:
    found = []
    for user in users:
        found.append(wait(broker, user))
        clock.forward(minutes=1)
    return found


@pytest.fixture
def full(broker: Broker) -> Broker:
    """The four devices are in use by one server."""
    acquire(broker, "owner", 4)
    return broker


def line(broker: Broker) -> list[str]:
    return [ticket.server.user for ticket, _, _ in broker.order()]


def trail(broker: Broker) -> list[tuple[str, str, str, str]]:
    return [(c.actor, c.action, c.subject, c.detail) for c in broker.trail()]


# Pause and drain.


def test_while_paused_nobody_gets_a_device_and_who_asks_waits(broker: Broker) -> None:
    assert broker.devices.pause(actor=KIM, reason="new fans")
    assert not broker.devices.pause(actor="other", reason="something else")
    ticket = wait(broker, "anna")
    assert broker.turns(frozenset({ticket.id})) == []
    with pytest.raises(GrantingPaused, match="new fans"):
        broker.start_ticket(ticket.id)
    with pytest.raises(GrantingPaused, match="new fans"):
        ask(broker, "bert", wait=False)
    assert isinstance(ask(broker, "cara", 0), Lease), "a server without a GPU starts"
    assert broker.standings()[ticket.id].why == "the GPUs to be given out again (new fans)"
    assert broker.closures()[closures.GRANTING].actor == KIM

    assert broker.devices.resume(actor=KIM, reason="they turn")
    assert not broker.devices.resume(actor=KIM)
    assert broker.turns(frozenset({ticket.id})) == [ticket.id]
    assert broker.start_ticket(ticket.id).ticket_id == ticket.id
    assert trail(broker) == [
        (KIM, "resume", "granting", "they turn"),
        (KIM, "pause", "granting", "new fans"),
    ]


def test_a_drained_device_ends_its_session_and_gets_nobody_new(broker: Broker) -> None:
    lease = acquire(broker, "anna")
    (uuid,) = lease.uuids
    assert broker.devices.drain(uuid, actor=KIM, reason="a fan")
    assert not broker.devices.drain(uuid, actor=KIM)
    assert states(broker).count("draining") == 1
    assert broker.lease(lease.id).ended_at is None, "its session goes on"
    broker.release(lease.id, reason="stopped")
    assert states(broker).count("drained") == 1
    got = acquire(broker, "bert", 3)
    assert uuid not in got.uuids
    with pytest.raises(NoDeviceFree):
        acquire(broker, "cara")
    ticket = wait(broker, "cara")
    assert broker.turns(frozenset({ticket.id})) == []
    with pytest.raises(NoDeviceFree):
        broker.start_ticket(ticket.id)
    assert broker.devices.undrain(uuid, actor=KIM)
    assert not broker.devices.undrain(uuid, actor=KIM)
    assert broker.turns(frozenset({ticket.id})) == [ticket.id]
    assert broker.start_ticket(ticket.id).uuids == (uuid,)
    assert [(action, subject) for _, action, subject, _ in trail(broker)] == [
        ("undrain", uuid),
        ("drain", uuid),
    ]


def test_devices_are_named_by_index_or_uuid(make: Make) -> None:
    broker = make(device_source="simulated:2xT4")
    devices = [view.device for view in broker.overview().devices]
    assert (
        broker.devices.find_device("1") == broker.devices.find_device(devices[1].uuid) == devices[1]
    )
    for name in ("2", "", "GPU-0", "\x00", "granting"):
        with pytest.raises(InvalidRequest, match="No device has the UUID or index"):
            broker.devices.drain(name, actor=KIM)
    with pytest.raises(InvalidRequest):
        broker.devices.undrain("granting", actor=KIM)
    assert trail(broker) == []


def test_a_device_that_is_gone_can_be_undrained(make: Make) -> None:
    before = make(device_source="simulated:2xT4")
    gone = before.overview().devices[1].device.uuid
    before.devices.drain(gone, actor=KIM)
    after = make(device_source="simulated:1xA100-80GB")
    after.overview()
    assert after.devices.undrain(gone, actor=KIM)
    assert after.closures() == {}


# The order.


def test_moves_and_boosts_change_the_order_and_are_written_down(full: Broker, clock: Clock) -> None:
    first, second, third = each_a_minute_later(full, clock, "anna", "bert", "cara")
    moved = full.move(third.id, 1, actor=KIM, reason="a demo")
    assert (moved.position, moved.version) == (1, third.version + 1)
    assert line(full) == ["cara", "anna", "bert"]
    clock.forward(minutes=1)
    full.boost(second.id, 5.5, actor="cli:root", reason="a deadline")
    assert line(full) == ["cara", "bert", "anna"]
    assert full.place_of(second.id) == 2
    full.move(third.id, None, actor=KIM)
    full.boost(second.id, 0, actor=KIM)
    assert line(full) == ["anna", "bert", "cara"]
    assert trail(full) == [
        (KIM, "boost", f"ticket {second.id} of bert", "+0 points"),
        (KIM, "move", f"ticket {third.id} of cara", "back to the order"),
        ("cli:root", "boost", f"ticket {second.id} of bert", "+5.5 points: a deadline"),
        (KIM, "move", f"ticket {third.id} of cara", "to place 1: a demo"),
    ]
    at = [change.at for change in full.trail()]
    assert at == [clock.now, clock.now, clock.now, clock.now - timedelta(minutes=1)]
    assert first.version == full.ticket(first.id).version, "nothing of others was changed"


def test_every_score_is_the_sum_of_its_parts(full: Broker) -> None:
    for user in ("anna", "bert", "cara"):
        wait(full, user)
    for place, (ticket, ranked, standing) in enumerate(full.order(), start=1):
        assert ranked.id == ticket.id
        assert (ranked.place, standing.place, standing.of) == (place, place, 3)
        assert sum(part.points for part in ranked.parts) == pytest.approx(ranked.score)


@pytest.mark.parametrize(
    "points", [math.nan, math.inf, -math.inf, 1e6 + 1, 10**400, True, "5", None]
)
def test_a_boost_that_is_no_number_is_refused(full: Broker, points: Any) -> None:
    ticket = wait(full, "anna")
    with pytest.raises(InvalidRequest, match="no number of points"):
        full.boost(ticket.id, points, actor=KIM)
    assert (full.ticket(ticket.id), trail(full)) == (ticket, [])


@pytest.mark.parametrize("position", [0, -1, 10**7, 10**400, 1.0, True, "1"])
def test_a_position_that_is_none_is_refused(full: Broker, position: Any) -> None:
    ticket = wait(full, "anna")
    with pytest.raises(InvalidRequest, match="no position in line"):
        full.move(ticket.id, position, actor=KIM)
    assert (full.ticket(ticket.id), trail(full)) == (ticket, [])


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [("x" * 301, "301 characters"), ("a\x00b", "nobody can read"), ("\ud800", "nobody can read")],
)
def test_a_reason_that_nobody_could_read_changes_nothing(
    full: Broker, reason: str, sentence: str
) -> None:
    ticket = wait(full, "anna")
    uuid = full.overview().devices[0].device.uuid
    for change in (
        lambda: full.devices.pause(actor=KIM, reason=reason),
        lambda: full.devices.resume(actor=KIM, reason=reason),
        lambda: full.devices.drain(uuid, actor=KIM, reason=reason),
        lambda: full.devices.undrain(uuid, actor=KIM, reason=reason),
        lambda: full.boost(ticket.id, 1, actor=KIM, reason=reason),
        lambda: full.move(ticket.id, 1, actor=KIM, reason=reason),
        lambda: full.cancel(ticket.id, actor=KIM, reason=reason),
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            change()
    assert (full.ticket(ticket.id), full.closures(), trail(full)) == (ticket, {}, [])


# Cancelling.


def test_a_cancelled_ticket_has_its_end_written_and_its_member_is_told(
    full: Broker, clock: Clock
) -> None:
    ticket, waiting = each_a_minute_later(full, clock, "anna", "bert")
    ended = full.cancel(ticket.id, actor=KIM, reason=" the course\nis over ")
    assert (ended.outcome, ended.ended_at) == ("cancelled", clock.now)
    assert ended.end_reason == "an admin cancelled it: the course is over"
    assert line(full) == ["bert"]
    (told,) = full.notifications.notices_of("anna")
    assert told.kind is NoticeKind.TICKET_ENDED and "the course is over" in told.body
    (change,) = full.trail()
    assert (change.at, change.actor, change.action) == (clock.now, KIM, "cancelled")
    assert change.subject == f"ticket {ticket.id} of anna"
    for act in (
        lambda: full.cancel(ticket.id, actor="other", reason="again"),
        lambda: full.move(ticket.id, 1, actor="other"),
        lambda: full.boost(ticket.id, 1, actor="other"),
        lambda: full.start_ticket(ticket.id),
    ):
        with pytest.raises(TicketEnded):
            act()
    assert full.ticket(ticket.id) == ended and len(full.trail()) == 1
    assert full.ticket(waiting.id) == waiting


def test_a_cancel_needs_a_reason_and_a_ticket(full: Broker) -> None:
    ticket = wait(full, "anna")
    with pytest.raises(InvalidRequest, match="The reason is missing"):
        full.cancel(ticket.id, actor=KIM, reason="  ")
    with pytest.raises(UnknownTicket):
        full.cancel("no-such-ticket", actor=KIM, reason="x")
    assert (full.ticket(ticket.id), trail(full)) == (ticket, [])


def test_a_cancel_that_comes_after_the_turn_is_refused(broker: Broker) -> None:
    lease = acquire(broker, "owner", 4)
    ticket = wait(broker, "anna")
    broker.release(lease.id, reason="stopped")
    granted = broker.start_ticket(ticket.id)
    with pytest.raises(TicketEnded, match="granted: its turn came"):
        broker.cancel(ticket.id, actor=KIM, reason="too late")
    assert broker.ticket(ticket.id).lease_id == granted.id
    assert trail(broker) == []


# Two processes: the service and the command line change what the hub grants from.


def test_what_another_process_changed_is_seen_at_the_next_look(
    full: Broker, make: Make, clock: Clock
) -> None:
    service = make(gpu_rates={"A100": 4, "T4": "0.5"})
    first, second, third = each_a_minute_later(full, clock, "anna", "bert", "cara")
    assert line(service) == ["anna", "bert", "cara"]
    service.move(third.id, 1, actor=KIM)
    service.cancel(first.id, actor=KIM, reason="x")
    assert line(full) == ["cara", "bert"]
    assert set(full.standings()) == {second.id, third.id}
    service.devices.pause(actor=KIM)
    present = frozenset({second.id, third.id})
    for lease in full.open_leases():
        full.release(lease.id, reason="stopped")
    assert full.turns(present) == []
    service.devices.resume(actor=KIM)
    service.devices.drain("0", actor=KIM)
    assert full.turns(present) == [third.id, second.id]
    drained = service.devices.find_device("0").uuid
    got = [full.start_ticket(ticket_id) for ticket_id in (third.id, second.id)]
    assert drained not in {uuid for lease in got for uuid in lease.uuids}


# The trail.


def test_nothing_in_the_trail_can_be_changed_or_removed(broker: Broker) -> None:
    broker.devices.pause(actor=KIM)
    before = broker.trail()
    for statement in ("UPDATE audit SET actor = 'me'", "DELETE FROM audit"):
        with pytest.raises(sa.exc.DBAPIError), broker.store.engine.begin() as connection:
            connection.execute(sa.text(statement))
    assert broker.trail() == before
