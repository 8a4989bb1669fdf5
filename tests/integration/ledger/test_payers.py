"""Who pays. Real: SQLite; simulated: devices and the clock."""

from __future__ import annotations

from typing import Any

import pytest

from gpuspawner.core.errors import CannotExtend, NoCredits, NotAllowed, UnknownAccount
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef, Terms
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from tests.support.brokers import Clock, Make, credits_of

ANNA, BERT = ServerRef("anna"), ServerRef("bert")
COURSE = "group:course"
ONE = Request(devices=1, environment="pytorch")


def changes(services: Services) -> list[tuple[str, str, str]]:
    """Who changed who pays for whom, the newest first."""
    found = [change for change in services.audit.trail() if change.action == "payer"]
    return [(change.actor, change.subject, change.detail) for change in found]


def terms(account: str = "", groups: frozenset[str] = frozenset({"course"}), **kw: Any) -> Terms:
    return Terms(account=account, groups=groups, **kw)


def give(services: Services, account: str = COURSE, credits: int = 50) -> None:
    now = services.clock()
    services.store.run(lambda c: ledger_repository.open_account(c, account, now), write=True)
    services.ledger.grant(account, credits * MICRO, actor="root", reason="budget")


def ask(services: Services, server: ServerRef = ANNA, asked: Terms | None = None) -> Lease:
    lease = services.queue.ask(server, ONE, engine="docker", terms=asked or terms())
    assert isinstance(lease, Lease)
    return lease


def test_requested_account_pays_for_the_lease(services: Services, clock: Clock) -> None:
    give(services)
    lease = ask(services, ANNA, terms(COURSE))
    assert lease.account == COURSE and services.ledger.account(COURSE).held > 0
    services.leases.confirm(lease.id)
    clock.forward(hours=2)
    services.ledger.charge_all()
    assert (
        services.ledger.account(COURSE).balance == 42 * MICRO
        and services.ledger.member("anna").balance == 0
    )
    services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert services.ledger.account(COURSE).balance == 42 * MICRO
    assert ask(services).account == "member:anna", "without a word, their own"


def test_account_of_others_or_without_credits_cannot_pay(services: Services) -> None:
    give(services, "group:other")
    services.ledger.open_account("bert")
    before = services.ledger.accounts()
    for asked in (
        "group:other",
        "member:bert",
        "group:",
        "system:grants",
        "group:Course",
        "course",
    ):
        for way in (services.queue.ask, services.leases.grant):
            with pytest.raises(NotAllowed, match=r"field 'account' names .* cannot use") as caught:
                way(ANNA, ONE, engine="docker", terms=terms(asked))
            assert "member:anna or group:course" in caught.value.message
            assert caught.value.fields["field"] == "account"
    # An account is opened by an admin, not by whoever names it.
    with pytest.raises(NotAllowed, match="has no credits yet; an admin can grant some"):
        ask(services, ANNA, terms(COURSE))
    assert services.ledger.accounts() == before and services.leases.open_leases() == []


def test_group_balance_limits_the_leases_it_pays(services: Services, clock: Clock) -> None:
    give(services, credits=1)
    first = ask(services, ANNA, terms(COURSE))
    with pytest.raises(NoCredits, match=r"The group course's balance of 0\.33 credits"):
        ask(services, BERT, terms(COURSE))
    services.leases.release(first.id, ended_at=clock.now, reason="stopped", failed=True)
    assert ask(services, BERT, terms(COURSE)).account == COURSE


# What a member keeps.


def test_member_can_choose_a_usual_paying_account(services: Services) -> None:
    give(services)
    services.ledger.keep_payer("anna", COURSE, actor="anna", groups=["course", "lab"])
    payers = services.ledger.payers("anna", ["course", "lab"])
    assert [account.name for account in payers.accounts] == ["member:anna", COURSE]
    assert payers.usual == COURSE
    assert services.ledger.payers("bert", ["course"]).usual == "member:bert"
    lease = ask(services)
    assert lease.account == COURSE
    services.leases.release(lease.id, reason="stopped", failed=True)
    lease = ask(services, ANNA, terms(groups=frozenset({"lab"})))
    assert lease.account == "member:anna", "who left the group pays for themselves"
    assert services.ledger.payers("anna", ["lab"]).usual == "member:anna"
    services.leases.release(lease.id, reason="stopped", failed=True)
    plain = Request(environment="plain")
    for asked, request in ((terms("member:anna"), ONE), (terms(), plain)):  # the latter is free
        lease = services.leases.grant(ANNA, request, engine="docker", terms=asked)
        assert lease.account == "member:anna"
        services.leases.release(lease.id, reason="stopped", failed=True)
    assert changes(services) == [], "what members choose for themselves is no admin's change"


def test_paying_account_set_by_an_admin_is_checked_and_audited(services: Services) -> None:
    give(services)
    services.ledger.open_account("bert")
    for account, groups, error in (
        ("member:bert", None, NotAllowed),
        ("system:grants", None, NotAllowed),
        ("group:nowhere", None, UnknownAccount),
        (COURSE, ["lab"], NotAllowed),
    ):
        with pytest.raises(error):
            services.ledger.keep_payer("anna", account, actor="root", groups=groups)
    assert services.ledger.payers("anna", ["course"]).usual == "member:anna"
    assert changes(services) == []
    services.ledger.keep_payer("anna", COURSE, actor="cli:root")
    services.ledger.keep_payer("anna", COURSE, actor="cli:root")
    assert ask(services).account == COURSE
    services.ledger.keep_payer("anna", "member:anna", actor="cli:root")
    assert services.ledger.payers("anna", ["course"]).usual == "member:anna"
    assert changes(services) == [
        ("cli:root", "member:anna", "member:anna pays for them"),
        ("cli:root", "member:anna", f"{COURSE} pays for them"),
    ]


# In line.


def wait(services: Services, server: ServerRef, account: str) -> Ticket:
    asked = terms(account, wait=True, options={"account": account})
    ticket = services.queue.ask(server, ONE, engine="docker", terms=asked)
    assert isinstance(ticket, Ticket)
    return ticket


def test_changed_paying_account_keeps_the_queue_position(make: Make, clock: Clock) -> None:
    services = make(device_source="simulated:1xA100-80GB")
    give(services)
    first = ask(services, ServerRef("zoe"))
    ticket = wait(services, ANNA, COURSE)
    clock.forward(minutes=1)
    wait(services, BERT, "")
    assert ticket.account == COURSE
    again = wait(services, ANNA, "member:anna")
    assert (again.id, again.account) == (ticket.id, "member:anna")
    assert services.queue.ticket(ticket.id).options == {"account": "member:anna"}
    again = wait(services, ANNA, COURSE)
    services.leases.release(first.id, reason="stopped", failed=True)
    assert services.queue.turns(frozenset({ticket.id})) == [ticket.id]
    assert services.queue.start_ticket(ticket.id).account == COURSE


def test_account_without_credits_cannot_take_over_a_ticket(make: Make) -> None:
    services = make(device_source="simulated:1xA100-80GB", opening_grant=1)
    give(services)
    ask(services, ServerRef("zoe"))
    ticket = wait(services, ANNA, COURSE)
    poor = make(device_source="simulated:1xA100-80GB", opening_grant=0)
    with pytest.raises(NoCredits, match=r"Your balance of 0\.00 credits"):
        wait(poor, ANNA, "member:anna")
    assert services.queue.ticket(ticket.id).account == COURSE


# Whole sessions on hold.


def test_whole_session_and_its_extension_can_be_put_on_hold(make: Make, clock: Clock) -> None:
    services = make(gpu_rates={"*": 4}, opening_grant=20, hold_session=True)
    with pytest.raises(NoCredits, match=r"whole session of 6 h \(24.00\) must be there"):
        ask(services, ANNA, terms(seconds=6 * 3600))
    endless = ask(services, BERT)
    assert services.ledger.member("bert").held == endless.hold == 666_667, "ten minutes"
    services.leases.release(endless.id, reason="stopped", failed=True)
    lease = ask(services, ANNA, terms(seconds=4 * 3600))
    assert services.ledger.member("anna").held == 16 * MICRO
    services.leases.confirm(lease.id)
    clock.forward(hours=1)
    services.ledger.charge_all()
    assert services.ledger.member("anna").held == 12 * MICRO
    longer = services.extensions.extend(lease.id, actor="anna")
    assert longer.ends_at == clock.now.replace(hour=17)
    own = services.ledger.member("anna")
    assert (own.held, own.available) == (16 * MICRO, 0)
    clock.forward(hours=1)
    services.ledger.charge_all()
    with pytest.raises(CannotExtend, match=r"member:anna needs 4\.00 credits more, and has 0\.00"):
        services.extensions.extend(lease.id, actor="anna")
    now = services.leases.get(lease.id)
    assert (now.ends_at, now.state) == (longer.ends_at, LeaseState.RUNNING)
    services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert services.ledger.member("anna").held == 0 and credits_of(services) == 12


def test_ticket_needs_credits_for_the_whole_session(make: Make) -> None:
    services = make(device_source="simulated:1xA100-80GB", hold_session=True, opening_grant=5)
    ask(services, BERT)
    asked = terms(seconds=6 * 3600, wait=True)
    with pytest.raises(NoCredits, match="whole session of 6 h"):
        services.queue.ask(ANNA, ONE, engine="docker", terms=asked)
