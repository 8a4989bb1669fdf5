"""Who is a member, by sign-in and roster. Real: SQLite, PostgreSQL, threads. Simulated: the devices
and the time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from gpuspawner.core.errors import InvalidRequest, MembershipEnded
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import EndReason, Lease, Request, ServerRef, SessionEnd, Terms
from gpuspawner.ledger.refills import EVERYBODY
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from gpuspawner.web import view_models
from tests.support.brokers import Clock, Make, acquire, broken_invariants, running
from tests.support.parts import each_database
from tests.support.threads import at_once

SIGN_IN, SERVICE = "sign-in", "accounting"


@pytest.fixture
def services(make: Make) -> Iterator[Services]:
    yield (services := make(membership_grace_minutes=30, opening_grant=100))
    assert broken_invariants(services) == {}


def list_until(services: Services, text: str, name: str = "ada") -> None:
    table = f"name,groups,ends\n{name},course,{text}\n".encode()
    done = services.roster.import_roster(table, actor="eva")
    assert done.done and done.problems == ()


def sign_in(services: Services, user: str = "ada", *, by_roster: bool = True) -> bool:
    services.ledger.open_account(user)
    return services.members.membership_returned(user, actor=SIGN_IN, by_roster=by_roster)


def wait(services: Services, user: str, devices: int = 4) -> Ticket:
    server, request = ServerRef(user, "waits"), Request(devices=devices, environment="pytorch")
    ticket = services.queue.ask(server, request, engine="docker", terms=Terms(wait=True))
    assert isinstance(ticket, Ticket)
    return ticket


def see_to_all(services: Services) -> None:
    """A round of the accounting service."""
    services.roster.see_to_roster()
    for user in services.members.former_holding():
        services.members.see_to_former(user)


def trail(services: Services) -> list[tuple[str, str, str]]:
    """The audit log of memberships, the oldest first."""
    lines = reversed(services.audit.trail())
    return [(x.actor, x.action, x.subject) for x in lines if x.action.startswith("membership")]


def told(services: Services, user: str, kind: NoticeKind) -> list[str]:
    return [x.title for x in services.notifications.notices_of(user) if x.kind is kind]


# On the roster.


def test_roster_reports_membership_period_and_refusal_reason(
    services: Services, clock: Clock
) -> None:
    assert services.roster.roster_member("ada").why == "this name is not on the roster of members"
    services.roster.import_roster(
        b"name,course,groups,starts,ends\n"
        b"ada,ml,course-ml,2025-03-02,2025-03-03\n"
        b'ada,vision,"course-vision,gpu",2025-03-03,2025-03-04\n'
        b"bob,,,,\n",
        actor="eva",
    )
    listed = services.roster.roster_member
    assert listed("ada").why == "the time on the roster (ml) starts on 2025-03-02"
    clock.forward(hours=12)  # the second of March begins
    first = listed("Ada")
    assert first.member and first.groups == {"course-ml"} and first.why == ""
    clock.forward(days=1)
    both = listed("ada")
    assert both.groups == {"course-ml", "course-vision", "gpu"}
    assert both.until == clock.now + timedelta(days=2)
    clock.forward(days=1)
    assert listed("ada").groups == {"course-vision", "gpu"}
    clock.forward(days=1)
    over = listed("ada")
    assert not over.member and not over.groups
    assert over.why == "the time on the roster (vision) ended on 2025-03-04"
    for_ever = listed("bob")
    assert for_ever.member and for_ever.until is None


@each_database
def test_roster_import_is_atomic_and_applies_only_changes(services: Services) -> None:
    broken = b"name,ends\nada,2025-04-01\nbob,soon\n"
    assert not services.roster.import_roster(broken, actor="eva").done
    assert services.roster.entries() == [] and services.audit.trail() == []

    good = b"name,course,ends\nada,ml,2025-04-01\nbob,ml,\ncara,vision,\n"
    tried = services.roster.import_roster(good, actor="eva", dry_run=True)
    assert [change.event for change in tried.changes] == ["new"] * 3 and not tried.done
    assert services.roster.entries() == []
    assert services.roster.import_roster(good, actor="eva").count("new") == 3
    again = services.roster.import_roster(good, actor="eva")
    assert again.done and again.count("same") == 3
    assert [line.detail for line in services.audit.trail()] == ["3 new"]

    # The next list of one course is without bob: he goes, and nobody of another course does.
    table = b"name,course,ends\nada,ml,2025-05-01\ndan,ml,\n"
    whole = services.roster.import_roster(table, actor="eva", whole=True)
    events = [(change.after.user, change.event) for change in whole.changes]
    assert events == [("ada", "changed"), ("dan", "new"), ("bob", "ended")]
    assert not services.roster.roster_member("bob").member
    assert all(services.roster.roster_member(name).member for name in ("ada", "cara", "dan"))
    assert services.audit.trail()[0].detail == "1 new, 1 changed, 1 ended"


def test_membership_lasts_until_the_last_course_ends(services: Services) -> None:
    services.roster.import_roster(b"name,course\nada,ml\nada,vision\n", actor="eva")
    end = services.roster.end_on_roster
    with pytest.raises(InvalidRequest, match="'bob' on the roster is not there"):
        end("bob", actor="eva")
    with pytest.raises(InvalidRequest, match="'ada' on the roster for 'nlp' is not there"):
        end("ada", actor="eva", course="nlp")
    (ended,) = end("Ada", actor="eva", course="ml", reason="failed it")
    assert (ended.user, ended.course) == ("ada", "ml")
    assert services.roster.roster_member("ada").member
    (ended,) = end("ada", actor="eva", reason="left")
    assert ended.course == "vision" and not services.roster.roster_member("ada").member
    with pytest.raises(InvalidRequest, match="has ended already"):
        end("ada", actor="eva")
    noted = [(line.action, line.subject, line.detail) for line in services.audit.trail()[:2]]
    assert noted == [
        ("roster end", "member:ada", "left"),
        ("roster end", "member:ada", "ml: failed it"),
    ]


# No longer a member, and back.


def test_expired_membership_warns_and_then_stops_sessions(services: Services, clock: Clock) -> None:
    list_until(services, "2025-03-01")
    assert sign_in(services)
    lease, waiting = running(services, "ada", 1), wait(services, "ada")
    see_to_all(services)
    assert services.members.membership("ada") and services.members.former_holding() == []

    clock.forward(hours=12)
    see_to_all(services)
    why = "the time on the roster ended on 2025-03-01"
    ended = services.members.membership("ada")
    assert ended and (ended.ended_at, ended.reason) == (clock.now, why)
    assert services.queue.ticket(waiting.id).outcome == "member_gone"
    assert services.queue.ticket(waiting.id).end_reason == f"your membership has ended: {why}"
    assert not services.positions.in_line(waiting.id)
    (warning,) = told(services, "ada", NoticeKind.SESSION_ENDS)
    assert warning.startswith("Your server stops at ")
    title = "You lost your place in the queue: your membership has ended"
    assert told(services, "ada", NoticeKind.TICKET_ENDED) == [title]
    for devices in (0, 1):  # not even a server without a GPU
        with pytest.raises(MembershipEnded, match=f"has ended: {why}. Your files"):
            acquire(services, "ada", devices, "another")
    with pytest.raises(MembershipEnded):
        wait(services, "ada")

    clock.forward(minutes=29)
    see_to_all(services)
    assert services.leases.get(lease.id).outcome == ""
    clock.forward(minutes=1)
    see_to_all(services)
    see_to_all(services)
    ordered = services.leases.get(lease.id)
    assert ordered.outcome == "member_gone"
    assert ordered.end_reason == f"the membership of ada ended: {why}"
    assert [x.id for x in services.sessions.due_sessions().stop] == [lease.id]
    title = "Your server was stopped: your membership has ended"
    assert told(services, "ada", NoticeKind.STOPPED) == [title]
    assert len(told(services, "ada", NoticeKind.SESSION_ENDS)) == 1
    settled = services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert services.ledger.member("ada").balance == 100 * MICRO - settled.charged
    assert trail(services) == [
        (SIGN_IN, "membership began", "member:ada"),
        (SERVICE, "membership ended", "member:ada"),
    ]


def test_session_ends_with_the_membership_unless_something_is_earlier(
    services: Services, clock: Clock
) -> None:
    list_until(services, "2025-03-02")
    sign_in(services)
    end = services.roster.roster_member("ada").until
    assert end is not None
    stops_at = end + timedelta(minutes=30)
    lease = running(services, "ada", 1)

    def shown() -> SessionEnd | None:
        lease_now = services.leases.get(lease.id)
        return view_models.session_ends(services, [lease_now], clock.now).get(lease.id)

    assert shown() == SessionEnd(stops_at, EndReason.MEMBERSHIP)
    list_until(services, "2025-03-01")
    assert shown() == SessionEnd(stops_at - timedelta(days=1), EndReason.MEMBERSHIP)
    clock.now = end - timedelta(days=1)
    see_to_all(services)
    assert shown() == SessionEnd(stops_at - timedelta(days=1), EndReason.MEMBERSHIP)
    clock.forward(minutes=30)
    see_to_all(services)
    assert services.leases.get(lease.id).outcome == "member_gone"
    assert shown() is None, "it is being stopped"


def test_returning_to_the_roster_restores_membership(services: Services, clock: Clock) -> None:
    list_until(services, "2025-03-01")
    sign_in(services)
    lease = running(services, "ada")
    clock.forward(hours=12)
    see_to_all(services)
    list_until(services, "2025-06-30")
    see_to_all(services)
    clock.forward(hours=1)  # the grace would be over
    see_to_all(services)
    assert services.leases.get(lease.id).outcome == ""
    assert "Your server continues" in told(services, "ada", NoticeKind.SESSION_ENDS)
    assert not sign_in(services)
    acquire(services, "ada", 1, "another")
    known = services.members.membership("ada")
    assert known and known.ended_at is None and known.reason == ""
    actions = [action.removeprefix("membership ") for _, action, _ in trail(services)]
    assert actions == ["began", "ended", "returned"]


def test_roster_does_not_restore_membership_ended_at_sign_in(
    services: Services, clock: Clock
) -> None:
    list_until(services, "")
    sign_in(services)
    assert services.members.membership_ended("ada", "on the deny list.", actor=SIGN_IN)
    assert not services.members.membership_ended("ada", "another reason", actor=SIGN_IN)
    assert services.roster.see_to_roster() == 0
    (former,) = services.members.former_members()
    assert (former.user, former.reason, former.actor) == ("ada", "on the deny list", SIGN_IN)
    clock.forward(minutes=5)
    assert sign_in(services)
    assert services.members.former_members() == []


def test_roster_end_keeps_members_admitted_by_other_means(services: Services, clock: Clock) -> None:
    list_until(services, "2025-03-01")
    sign_in(services, by_roster=False)
    clock.forward(days=3)
    assert services.roster.see_to_roster() == 0
    # From now on the roster alone lets them in: the next round sees that it does not.
    assert sign_in(services, by_roster=True)
    assert services.roster.see_to_roster() == 1


def test_rejected_strangers_leave_no_record(services: Services) -> None:
    assert not services.members.membership_ended("mallory", "not on the list", actor=SIGN_IN)
    assert services.members.membership("mallory") is None and services.audit.trail() == []
    services.ledger.open_account("old")  # of before anybody wrote down who is a member
    assert services.members.membership_ended("old", "x" * 1000, actor=SIGN_IN)
    assert [known.user for known in services.members.former_members()] == ["old"]


def test_former_members_receive_no_refills(services: Services, clock: Clock) -> None:
    sign_in(services)
    sign_in(services, "bob")
    plan = services.refills.plan_refill(
        "FREQ=DAILY", amount=10 * MICRO, audience=[EVERYBODY], actor="eva", reason="the day"
    )
    refill = services.refills.add_refill(plan)
    services.members.membership_ended("ada", "left", actor=SIGN_IN)
    clock.forward(minutes=2)
    _, gifts = services.refills.preview_refill(services.refills.refill(refill.id))
    assert [account.name for account, _ in gifts] == ["member:bob"]
    services.refills.give_refill(refill.id)
    assert services.ledger.member("ada").balance == 100 * MICRO
    assert services.ledger.member("bob").balance == 110 * MICRO
    sign_in(services)
    clock.forward(days=1)
    services.refills.give_refill(refill.id)
    assert services.ledger.member("ada").balance == 110 * MICRO  # and not what came meanwhile


# All at once.


@each_database
def test_concurrent_sign_ins_start_one_membership(services: Services) -> None:
    began = services.members.membership_returned
    found = at_once(8, lambda _: began("ada", actor=SIGN_IN, by_roster=True))
    assert sorted(found) == [False] * 7 + [True]
    assert trail(services) == [(SIGN_IN, "membership began", "member:ada")]


@each_database
def test_starts_racing_membership_end_are_refused_or_stopped(
    services: Services, clock: Clock
) -> None:
    """Whatever slips in beside the end is warned and stopped like what ran before."""
    users = [f"user{number}" for number in range(6)]
    for user in users:
        sign_in(services, user)

    def start_or_end(number: int) -> Lease | bool:
        user = users[number // 2]
        if number % 2:
            return services.members.membership_ended(user, "left", actor=SIGN_IN)
        return acquire(services, user, 0)

    got = at_once(2 * len(users), start_or_end)
    started = {lease.server.user: lease for lease in got[::2] if isinstance(lease, Lease)}
    assert sum(isinstance(each, MembershipEnded) for each in got) == len(users) - len(started)
    assert [known.user for known in services.members.former_members()] == users
    see_to_all(services)
    for user in started:
        assert len(told(services, user, NoticeKind.SESSION_ENDS)) == 1
    clock.forward(minutes=30)
    see_to_all(services)
    assert {x.server.user for x in services.sessions.due_sessions().stop} == set(started)
    for lease in started.values():
        services.leases.release(lease.id, reason="stopped")
