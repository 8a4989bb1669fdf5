"""Servers that nobody came to, and stops that admins order. Real here: SQLite and PostgreSQL; the
clock is the test's."""

from __future__ import annotations

import pytest

from gpuspawner.core.errors import CannotStop, InvalidRequest, UnknownLease
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease
from gpuspawner.ledger.rules import owed
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.services import Broker
from tests.support.rounds import RATE, START, Clock
from tests.support.sessions import HOUR, WARN, session, told, turn, wait

# No-shows.


def from_the_queue(broker: Broker, user: str) -> Lease:
    """A server of a member who had to wait for it."""
    others = [session(broker, f"{user}-before-{n}") for n in range(2)]
    ticket = wait(broker, user)
    for lease in others:
        broker.release(lease.id, ended_at=broker.clock(), reason="stopped")
    return turn(broker, ticket)


def test_nobody_connected_in_time(broker: Broker, clock: Clock) -> None:
    lease = from_the_queue(broker, "ada")
    clock.advance(599)
    broker.ledger.charge_all()
    assert broker.ledger.member("ada").balance < 1000 * MICRO
    assert broker.no_show(lease.id).outcome == ""
    clock.advance(1)
    assert broker.no_show(lease.id).outcome == "no_show"
    assert broker.claim(lease.id).claimed_at is None, "too late is too late"
    assert [some.id for some in broker.due_sessions(WARN).stop] == [lease.id]
    clock.advance(5)
    ended = broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert (ended.outcome, ended.charged) == ("no_show", 0)
    assert ended.end_reason == "nobody connected within 10 min of its start"
    assert broker.lease(lease.id) == ended
    assert broker.ledger.member("ada").balance == 1000 * MICRO
    (notice,) = told(broker, "ada", NoticeKind.STOPPED)
    assert "Nothing was charged." in notice.body and "end of the line" not in notice.body


def test_who_connected_keeps_the_server(broker: Broker, clock: Clock) -> None:
    lease = from_the_queue(broker, "ada")
    clock.advance(599)
    claimed = broker.claim(lease.id)
    assert claimed.claimed_at == clock.now and claimed.claim_by is None
    clock.advance(HOUR)
    assert broker.no_show(lease.id).outcome == ""
    assert broker.claim(lease.id).claimed_at == claimed.claimed_at
    straight = session(broker, "eve")
    assert broker.no_show(straight.id) == straight == broker.claim(straight.id)


def test_after_two_no_shows_in_a_row_the_next_ticket_is_last(broker: Broker, clock: Clock) -> None:
    def misses(user: str) -> str:
        lease = from_the_queue(broker, user)
        clock.advance(600)
        broker.no_show(lease.id)
        broker.release(lease.id, ended_at=clock.now, reason="stopped")
        clock.advance(60)
        return told(broker, user, NoticeKind.STOPPED)[-1].body

    assert "end of the line" not in misses("ada")
    comes = from_the_queue(broker, "ada")
    broker.claim(comes.id)
    broker.release(comes.id, ended_at=clock.now, reason="stopped")
    clock.advance(60)
    assert "end of the line" not in misses("ada"), "it was not the second in a row"
    assert "next time you wait at the end of the line" in misses("ada")
    for n in range(2):
        session(broker, f"other-{n}")
    assert wait(broker, "ada").last
    assert not wait(broker, "bob").last


# Orders of admins.


def test_an_order_stays_and_says_who_gave_it(broker: Broker, clock: Clock) -> None:
    lease = session(broker, "ada")
    why = "The machine gets a new fan"
    ordered = broker.order_stop(lease.id, "admin", actor="kim", reason=why)
    assert (ordered.outcome, ordered.end_reason) == ("admin", why)
    assert broker.order_stop(lease.id, "admin", actor="lee", reason="other") == ordered
    (change,) = broker.trail()
    assert (change.actor, change.action, change.detail) == ("kim", "stop", why)
    clock.advance(2 * HOUR)
    assert broker.end_session(lease.id) is None
    broker.release(lease.id, ended_at=clock.now, reason="stopped")
    ended = broker.lease(lease.id)
    assert (ended.outcome, ended.end_reason) == ("admin", why)
    assert ended.charged == owed(RATE, START, clock.now)
    assert broker.order_stop(lease.id, "admin", actor="lee", reason="other") == ended
    (notice,) = told(broker, "ada", NoticeKind.STOPPED)
    assert notice.body.startswith("The machine gets a new fan. Your files")


def test_an_admin_hears_that_there_is_nothing_to_stop(broker: Broker, clock: Clock) -> None:
    lease = session(broker, "ada")
    for reason, words in (("", "reason is missing"), ("x" * 301, "300 is the most")):
        with pytest.raises(InvalidRequest, match=words):
            broker.stop(lease.id, actor="kim", reason=reason)
    with pytest.raises(UnknownLease):
        broker.stop("nothing", actor="kim", reason="a fan")
    broker.stop(lease.id, actor="kim", reason="a fan")
    with pytest.raises(CannotStop, match=r"is being stopped already \(a fan\)"):
        broker.stop(lease.id, actor="lee", reason="other")
    broker.release(lease.id, ended_at=clock.now, reason="stopped")
    with pytest.raises(CannotStop, match="has stopped already"):
        broker.stop(lease.id, actor="lee", reason="other")
    assert [change.actor for change in broker.trail()] == ["kim"]
    assert broker.lease(lease.id).end_reason == "a fan"
