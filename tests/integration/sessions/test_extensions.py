"""Sessions that go on. Real here: SQLite and PostgreSQL, the production scheduler; the clock is
the test's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuspawner.core.errors import CannotExtend, UnknownLease
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.support.brokers import make_broker
from tests.support.rounds import START, Clock
from tests.support.sessions import HOUR, session, told, wait, warn
from tests.support.tier import examples


def test_an_extension_begins_the_whole_length_anew_and_is_warned_anew(
    broker: Broker, clock: Clock
) -> None:
    lease = session(broker, "ada")
    clock.advance(3000.5)
    assert warn(broker) == [10]
    extended = broker.extend(lease.id, actor="ada")
    assert extended == broker.lease(lease.id)
    assert extended.ends_at == START + timedelta(seconds=3001 + HOUR)
    assert warn(broker) == []
    clock.advance(3001)
    assert warn(broker) == [10]
    assert len(told(broker, "ada", NoticeKind.SESSION_ENDS)) == 2
    assert broker.trail() == []


def test_an_admins_extension_is_in_the_audit_trail(broker: Broker, clock: Clock) -> None:
    lease = session(broker, "ada")
    clock.advance(60)
    broker.extend(lease.id, actor="kim")
    (change,) = broker.trail()
    assert (change.actor, change.action) == ("kim", "extend")
    assert change.subject == f"lease {lease.id} of ada"


def test_nobody_who_waits_is_delayed(broker: Broker, clock: Clock) -> None:
    mine, bobs = session(broker, "ada"), session(broker, "bob")
    clock.advance(600)
    wait(broker, "cleo")
    # Bob's device comes back when mine does: with mine kept longer, Cleo still has that one.
    extended = broker.extend(mine.id, actor="ada")
    assert extended.ends_at == clock.now + timedelta(hours=1)
    with pytest.raises(CannotExtend) as caught:
        broker.extend(bobs.id, actor="bob")
    assert caught.value.message == (
        "The session cannot be extended: 1 member waits for this GPU and would start later."
    )
    wait(broker, "dan")
    clock.advance(60)
    with pytest.raises(CannotExtend, match="2 members wait for this GPU"):
        broker.extend(bobs.id, actor="kim")
    with pytest.raises(CannotExtend, match="1 member waits for this GPU"):
        broker.extend(mine.id, actor="ada")
    assert (broker.lease(mine.id), broker.lease(bobs.id)) == (extended, bobs)
    assert broker.trail() == []


def test_who_waits_for_another_model_is_not_in_the_way(broker: Broker, clock: Clock) -> None:
    mine = session(broker, "ada")
    session(broker, "bob", model="T4")
    clock.advance(600)
    wait(broker, "cleo", model="T4")
    assert broker.extend(mine.id, actor="ada").extended == 600


def test_another_process_sees_the_extension_and_the_line(
    database_url: str, broker: Broker, clock: Clock
) -> None:
    """The service extends, the hub decides: each has a line of its own."""
    hub, service = (
        broker,
        make_broker(
            database_url=database_url, device_source="simulated:2xA100-80GB,1xT4", clock=clock
        ),
    )
    mine = session(hub, "ada")
    session(hub, "bob", seconds=2 * HOUR)
    clock.advance(600)
    assert service.extend(mine.id, actor="ada").extended == 600
    ticket = wait(hub, "cleo")
    planned = hub.standings()[ticket.id].planned
    assert planned == clock.now + timedelta(hours=1)
    with pytest.raises(CannotExtend):
        clock.advance(60)
        service.extend(mine.id, actor="ada")


@pytest.mark.parametrize("actor", ["ada", "kim"])
def test_what_cannot_be_extended_says_why(broker: Broker, clock: Clock, actor: str) -> None:
    def refused(lease_id: str) -> str:
        with pytest.raises(CannotExtend) as caught:
            broker.extend(lease_id, actor=actor)
        return caught.value.message

    with pytest.raises(UnknownLease):
        broker.extend("nothing", actor=actor)
    request = Request(devices=1, model="A100")
    starting = broker.ask(ServerRef("bob"), request, engine="local", terms=Terms(seconds=HOUR))
    assert "its server is not up yet" in refused(starting.id)
    broker.release(starting.id, reason="failed", failed=True)
    assert "it has ended" in refused(starting.id)

    lease = session(broker, "ada")
    endless, free = session(broker, "cleo", None), session(broker, "dan", devices=0)
    clock.advance(60)
    for some in (endless, free):
        assert broker.extend(some.id, actor=actor) == some
    broker.devices.drain(lease.devices[0].uuid, actor="kim", reason="a new fan")
    assert "needed for maintenance after this session (a new fan)" in refused(lease.id)
    broker.devices.undrain(lease.devices[0].uuid, actor="kim")
    broker.devices.pause(actor="kim", reason="a new rack")
    assert broker.extend(lease.id, actor=actor).extended == 60, "what runs goes on"
    clock.advance(HOUR)
    assert "its server is being stopped" in refused(lease.id)
    broker.end_session(lease.id)
    clock.advance(-HOUR)
    assert "its server is being stopped" in refused(lease.id)


def test_hours_held_are_limited(broker: Broker, clock: Clock) -> None:
    broker.settings.queue.member_limits = {"gpu_hours": 1.5}
    mine = session(broker, "ada")
    clock.advance(1800)
    assert broker.extend(mine.id, actor="ada").extended == 1800
    request, terms = Request(devices=1, model="T4"), Terms(seconds=1200)
    second = broker.ask(ServerRef("ada", "second"), request, engine="local", terms=terms)
    broker.confirm(second.id)
    clock.advance(600)
    assert broker.extend(mine.id, actor="ada").extended == 2400, "3,600 + 600 seconds"
    assert broker.extend(second.id, actor="ada").extended == 600, "3,600 + 1,200 seconds"
    broker.settings.queue.member_limits = {"gpu_hours": 1.25}
    clock.advance(60)
    with pytest.raises(CannotExtend, match=r"1\.25 GPU-hours may be held at once, and with it"):
        broker.extend(mine.id, actor="ada")
    assert broker.extend(session(broker, "bob").id, actor="bob").extended == 0


steps = st.lists(
    st.tuples(
        st.sampled_from(["extend", "wait", "leave", "end", "turn"]),
        st.integers(0, 3),
        st.floats(0, 5000),
    ),
    max_size=12,
)


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_no_extension_moves_a_planned_start_to_later(
    fresh: Callable[[], Broker], steps: list[tuple[str, int, float]]
) -> None:
    """Whatever was asked, ended and extended before: every promise is kept, all in the store."""
    broker = fresh()
    clock = broker.clock
    assert isinstance(clock, Clock)
    users = ["ada", "bob", "cleo", "dan"]
    for action, number, seconds in steps:
        clock.advance(seconds)
        user = users[number]
        lease = broker.lease_of(ServerRef(user))
        mine = [ticket for ticket in broker.waiting() if ticket.server.user == user]
        if action == "wait" and lease is None and not mine:
            request = Request(devices=1 + number % 2, model="A100")
            terms = Terms(seconds=1800 * (1 + number), wait=True)
            got = broker.ask(ServerRef(user), request, engine="local", terms=terms)
            if isinstance(got, Lease):
                broker.confirm(got.id)
        elif action == "leave" and mine:
            broker.end_ticket(mine[0].id, "cancelled", "enough")
        elif action == "end" and lease is not None:
            broker.release(lease.id, ended_at=clock.now, reason="stopped")
        elif action == "turn":
            present = frozenset(ticket.id for ticket in broker.waiting())
            for ticket in broker.turns(present):
                broker.confirm(broker.start_ticket(ticket).id)
        elif action == "extend" and lease is not None:
            _extension_keeps_promises(broker, lease)


def _extension_keeps_promises(broker: Broker, lease: Lease) -> None:
    tickets = {ticket.id: ticket for ticket in broker.waiting()}
    before = broker.standings()
    try:
        extended = broker.extend(lease.id, actor=lease.server.user)
    except CannotExtend:
        assert broker.lease(lease.id) == lease
        return
    assert extended.ends_at is not None and lease.ends_at is not None
    assert extended.ends_at >= max(lease.ends_at, broker.clock())
    broker.line.revision += 1  # not the standings that were kept for a second
    after = broker.standings()
    for name, standing in before.items():
        if tickets[name].server != lease.server and standing.planned:
            later = after[name].planned
            assert later is None or later <= standing.planned + timedelta(seconds=1)
