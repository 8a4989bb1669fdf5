"""Who is a member, by sign-in and roster. Real: SQLite, PostgreSQL, threads. Simulated: the devices
and the time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

from gpuspawner.core.errors import InvalidRequest, MembershipEnded
from gpuspawner.core.units import MICRO
from gpuspawner.db.engine import Store
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.ledger.refills import EVERYBODY
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.support.brokers import Clock, acquire, open_broker, problems, running

SIGN_IN, SERVICE = "sign-in", "accounting"


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(database_url: str, clock: Clock) -> Iterator[Broker]:
    broker = open_broker(database_url, clock, membership_grace_minutes=30, opening_grant=100)
    yield broker
    assert problems(broker.store) == []
    findings, _ = broker.audit()
    assert [finding for finding in findings if finding.problem] == []
    Store.open(database_url).close()


def list_until(broker: Broker, text: str, name: str = "ada") -> None:
    done = broker.roster.import_roster(
        f"name,groups,ends\n{name},course,{text}\n".encode(), actor="eva"
    )
    assert done.done and done.problems == ()


def sign_in(broker: Broker, user: str = "ada", *, by_roster: bool = True) -> bool:
    broker.ledger.open_account(user)
    return broker.members.membership_returned(user, actor=SIGN_IN, by_roster=by_roster)


def wait(broker: Broker, user: str, devices: int = 4) -> Ticket:
    ticket = broker.ask(
        ServerRef(user, "waits"),
        Request(devices=devices, environment="pytorch"),
        engine="docker",
        terms=Terms(wait=True),
    )
    assert isinstance(ticket, Ticket)
    return ticket


def see_to_all(broker: Broker) -> None:
    """A round of the accounting service."""
    broker.roster.see_to_roster()
    for user in broker.members.former_holding():
        broker.members.see_to_former(user)


def trail(broker: Broker) -> list[tuple[str, str, str]]:
    """The audit trail of memberships, the oldest first."""
    lines = reversed(broker.trail())
    return [(x.actor, x.action, x.subject) for x in lines if x.action.startswith("membership")]


def told(broker: Broker, user: str, kind: NoticeKind) -> list[str]:
    return [notice.title for notice in broker.notifications.notices_of(user) if notice.kind is kind]


# On the roster.


def test_the_roster_says_who_is_a_member_until_when_and_else_why_not(
    broker: Broker, clock: Clock
) -> None:
    assert broker.roster.roster_member("ada").why == "this name is not on the roster of members"
    broker.roster.import_roster(
        b"name,course,groups,starts,ends\n"
        b"ada,ml,course-ml,2025-03-02,2025-03-03\n"
        b'ada,vision,"course-vision,gpu",2025-03-03,2025-03-04\n'
        b"bob,,,,\n",
        actor="eva",
    )
    assert (
        broker.roster.roster_member("ada").why == "the time on the roster (ml) starts on 2025-03-02"
    )
    clock.forward(hours=12)  # the second of March begins
    first = broker.roster.roster_member("Ada")
    assert first.member and first.groups == {"course-ml"} and first.why == ""
    clock.forward(days=1)
    both = broker.roster.roster_member("ada")
    assert both.groups == {"course-ml", "course-vision", "gpu"}
    assert both.until == clock.now + timedelta(days=2)
    clock.forward(days=1)
    assert broker.roster.roster_member("ada").groups == {"course-vision", "gpu"}
    clock.forward(days=1)
    over = broker.roster.roster_member("ada")
    assert not over.member and not over.groups
    assert over.why == "the time on the roster (vision) ended on 2025-03-04"
    for_ever = broker.roster.roster_member("bob")
    assert for_ever.member and for_ever.until is None


def test_an_import_is_all_or_nothing_and_changes_only_what_is_new(broker: Broker) -> None:
    broken = b"name,ends\nada,2025-04-01\nbob,soon\n"
    assert not broker.roster.import_roster(broken, actor="eva").done
    assert broker.roster.entries() == [] and broker.trail() == []

    good = b"name,course,ends\nada,ml,2025-04-01\nbob,ml,\ncara,vision,\n"
    tried = broker.roster.import_roster(good, actor="eva", dry_run=True)
    assert [change.event for change in tried.changes] == ["new"] * 3 and not tried.done
    assert broker.roster.entries() == []
    assert broker.roster.import_roster(good, actor="eva").count("new") == 3
    again = broker.roster.import_roster(good, actor="eva")
    assert again.done and again.count("same") == 3
    assert [line.detail for line in broker.trail()] == ["3 new"]

    # The next list of one course is without bob: he goes, and nobody of another course does.
    whole = broker.roster.import_roster(
        b"name,course,ends\nada,ml,2025-05-01\ndan,ml,\n", actor="eva", whole=True
    )
    assert [(c.after.user, c.event) for c in whole.changes] == [
        ("ada", "changed"),
        ("dan", "new"),
        ("bob", "ended"),
    ]
    assert not broker.roster.roster_member("bob").member
    assert all(broker.roster.roster_member(name).member for name in ("ada", "cara", "dan"))
    assert broker.trail()[0].detail == "1 new, 1 changed, 1 ended"


def test_an_end_is_now_and_is_told_of_whom_there_is_nothing_to_end(broker: Broker) -> None:
    list_until(broker, "")
    with pytest.raises(InvalidRequest, match="'bob' on the roster is not there"):
        broker.roster.end_on_roster("bob", actor="eva")
    (entry,) = broker.roster.end_on_roster("Ada", actor="eva", reason="left the course")
    assert entry.user == "ada" and not broker.roster.roster_member("ada").member
    with pytest.raises(InvalidRequest, match="has ended already"):
        broker.roster.end_on_roster("ada", actor="eva")
    (line, _) = broker.trail()
    assert (line.action, line.subject, line.detail) == (
        "roster end",
        "member:ada",
        "left the course",
    )


def test_one_of_two_courses_may_end(broker: Broker) -> None:
    broker.roster.import_roster(b"name,course\nada,ml\nada,vision\n", actor="eva")
    with pytest.raises(InvalidRequest, match="'ada' on the roster for 'nlp' is not there"):
        broker.roster.end_on_roster("ada", actor="eva", course="nlp")
    (ended,) = broker.roster.end_on_roster("ada", actor="eva", course="ml", reason="failed it")
    assert ended.course == "ml" and broker.roster.roster_member("ada").member
    assert broker.trail()[0].detail == "ml: failed it"
    assert broker.roster.end_on_roster("ada", actor="eva")[0].course == "vision"


# No longer a member, and back.


def test_when_the_time_is_over_what_runs_is_warned_and_stopped_and_all_else_stays(
    broker: Broker, clock: Clock
) -> None:
    list_until(broker, "2025-03-01")
    assert sign_in(broker)
    lease, waiting = running(broker, "ada", 1), wait(broker, "ada")
    see_to_all(broker)
    assert broker.members.membership("ada") is not None and broker.members.former_holding() == []

    clock.forward(hours=12)
    see_to_all(broker)
    why = "the time on the roster ended on 2025-03-01"
    ended = broker.members.membership("ada")
    assert ended and (ended.ended_at, ended.reason) == (clock.now, why)
    assert broker.ticket(waiting.id).outcome == "member_gone"
    assert broker.ticket(waiting.id).end_reason == f"your membership has ended: {why}"
    assert not broker.in_line(waiting.id)
    (warning,) = told(broker, "ada", NoticeKind.SESSION_ENDS)
    assert warning.startswith("Your server stops at ")
    assert told(broker, "ada", NoticeKind.TICKET_ENDED) == [
        "Your place in line is gone: your membership has ended"
    ]
    for devices in (0, 1):  # not even a server without a GPU
        with pytest.raises(MembershipEnded, match=f"has ended: {why}. Your files"):
            acquire(broker, "ada", devices, "another")
    with pytest.raises(MembershipEnded):
        wait(broker, "ada")

    clock.forward(minutes=29)
    see_to_all(broker)
    assert broker.lease(lease.id).outcome == ""
    clock.forward(minutes=1)
    see_to_all(broker)
    see_to_all(broker)
    ordered = broker.lease(lease.id)
    assert ordered.outcome == "member_gone"
    assert ordered.end_reason == f"the membership of ada ended: {why}"
    assert [x.id for x in broker.due_sessions().stop] == [lease.id]
    assert told(broker, "ada", NoticeKind.STOPPED) == [
        "Your server is stopped: your membership has ended"
    ]
    assert len(told(broker, "ada", NoticeKind.SESSION_ENDS)) == 1
    settled = broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert broker.ledger.member("ada").balance == 100 * MICRO - settled.charged
    assert trail(broker) == [
        (SIGN_IN, "membership began", "member:ada"),
        (SERVICE, "membership ended", "member:ada"),
    ]


def test_who_is_on_the_roster_again_is_a_member_with_all_that_they_had(
    broker: Broker, clock: Clock
) -> None:
    list_until(broker, "2025-03-01")
    sign_in(broker)
    lease = running(broker, "ada")
    clock.forward(hours=12)
    see_to_all(broker)
    list_until(broker, "2025-06-30")
    see_to_all(broker)
    clock.forward(hours=1)  # the grace would be over
    see_to_all(broker)
    assert broker.lease(lease.id).outcome == ""
    assert "Your server goes on" in told(broker, "ada", NoticeKind.SESSION_ENDS)
    assert not sign_in(broker)
    acquire(broker, "ada", 1, "another")
    known = broker.members.membership("ada")
    assert known and known.ended_at is None and known.reason == ""
    assert [line[1] for line in trail(broker)] == [
        "membership began",
        "membership ended",
        "membership returned",
    ]


def test_what_sign_in_ended_the_roster_does_not_give_back(broker: Broker, clock: Clock) -> None:
    list_until(broker, "")
    sign_in(broker)
    assert broker.members.membership_ended("ada", "on the deny list.", actor=SIGN_IN)
    assert not broker.members.membership_ended("ada", "another reason", actor=SIGN_IN)
    assert broker.roster.see_to_roster() == 0
    (former,) = broker.members.former_members()
    assert (former.user, former.reason, former.actor) == ("ada", "on the deny list", SIGN_IN)
    clock.forward(minutes=5)
    assert sign_in(broker)
    assert broker.members.former_members() == []


def test_who_is_a_member_by_more_than_the_roster_stays_one(broker: Broker, clock: Clock) -> None:
    list_until(broker, "2025-03-01")
    sign_in(broker, by_roster=False)
    clock.forward(days=3)
    assert broker.roster.see_to_roster() == 0
    # From now on the roster alone lets them in: the next round sees that it does not.
    assert sign_in(broker, by_roster=True)
    assert broker.roster.see_to_roster() == 1


def test_strangers_at_the_door_leave_no_trace(broker: Broker) -> None:
    assert not broker.members.membership_ended("mallory", "not on the list", actor=SIGN_IN)
    assert broker.members.membership("mallory") is None and broker.trail() == []
    broker.ledger.open_account("old")  # of before anybody wrote down who is a member
    assert broker.members.membership_ended("old", "x" * 1000, actor=SIGN_IN)
    assert [known.user for known in broker.members.former_members()] == ["old"]


def test_credits_of_former_members_stay_as_they_are(broker: Broker, clock: Clock) -> None:
    sign_in(broker)
    sign_in(broker, "bob")
    plan = broker.refills.plan_refill(
        "FREQ=DAILY", amount=10 * MICRO, audience=[EVERYBODY], actor="eva", reason="the day"
    )
    refill = broker.refills.add_refill(plan)
    broker.members.membership_ended("ada", "left", actor=SIGN_IN)
    clock.forward(minutes=2)
    _, gifts = broker.refills.preview_refill(broker.refills.refill(refill.id))
    assert [account.name for account, _ in gifts] == ["member:bob"]
    broker.refills.give_refill(refill.id)
    assert broker.ledger.member("ada").balance == 100 * MICRO
    assert broker.ledger.member("bob").balance == 110 * MICRO
    sign_in(broker)
    clock.forward(days=1)
    broker.refills.give_refill(refill.id)
    assert broker.ledger.member("ada").balance == 110 * MICRO  # and not what came meanwhile


# All at once.


def test_many_sign_in_at_once_and_one_membership_begins(broker: Broker) -> None:
    gate, found = threading.Barrier(8), []

    def sign() -> None:
        gate.wait(120)
        found.append(broker.members.membership_returned("ada", actor=SIGN_IN, by_roster=True))

    threads = [threading.Thread(target=sign) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [False] * 7 + [True]
    assert trail(broker) == [(SIGN_IN, "membership began", "member:ada")]


def test_starts_that_race_with_the_end_are_refused_or_seen_to(broker: Broker, clock: Clock) -> None:
    """Whatever slips in beside the end is warned and stopped like what ran before."""
    users = [f"user{number}" for number in range(6)]
    for user in users:
        sign_in(broker, user)
    gate, got = threading.Barrier(2 * len(users)), dict[str, Lease | MembershipEnded]()

    def start(user: str) -> None:
        gate.wait(120)
        try:
            got[user] = acquire(broker, user, 0)
        except MembershipEnded as refused:
            got[user] = refused

    def end(user: str) -> None:
        gate.wait(120)
        broker.members.membership_ended(user, "left", actor=SIGN_IN)

    threads = [threading.Thread(target=f, args=(u,)) for u in users for f in (start, end)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(got) == set(users)
    assert [known.user for known in broker.members.former_members()] == users
    see_to_all(broker)
    started = {user: lease for user, lease in got.items() if isinstance(lease, Lease)}
    for user in started:
        assert len(told(broker, user, NoticeKind.SESSION_ENDS)) == 1
    clock.forward(minutes=30)
    see_to_all(broker)
    assert {x.server.user for x in broker.due_sessions().stop} == set(started)
    for lease in started.values():
        broker.release(lease.id, reason="stopped")
