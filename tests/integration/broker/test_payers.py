"""Who pays. Real: SQLite and PostgreSQL; simulated: devices and the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpuspawner.core.errors import CannotExtend, NoCredits, NotAllowed, UnknownAccount
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.support.brokers import Clock, credits_of

ANNA, BERT = ServerRef("anna"), ServerRef("bert")
COURSE = "group:course"
ONE = Request(devices=1, environment="pytorch")
Make = Callable[..., Broker]


def changes(broker: Broker) -> list[tuple[str, str, str]]:
    """Who changed who pays for whom, the newest first."""
    found = [change for change in broker.trail() if change.action == "payer"]
    return [(change.actor, change.subject, change.detail) for change in found]


def terms(account: str = "", groups: frozenset[str] = frozenset({"course"}), **kw: Any) -> Terms:
    return Terms(account=account, groups=groups, **kw)


def give(broker: Broker, account: str = COURSE, credits: int = 50) -> None:
    now = broker.clock()
    broker.store.run(lambda c: ledger_repository.open_account(c, account, now), write=True)
    broker.ledger.grant(account, credits * MICRO, actor="root", reason="budget")


def ask(broker: Broker, server: ServerRef = ANNA, asked: Terms | None = None) -> Lease:
    lease = broker.ask(server, ONE, engine="docker", terms=asked or terms())
    assert isinstance(lease, Lease)
    return lease


def test_the_account_that_a_member_names_pays(broker: Broker, clock: Clock) -> None:
    give(broker)
    lease = ask(broker, ANNA, terms(COURSE))
    assert lease.account == COURSE and broker.ledger.account(COURSE).held > 0
    broker.confirm(lease.id)
    clock.forward(hours=2)
    broker.ledger.charge_all()
    assert (
        broker.ledger.account(COURSE).balance == 42 * MICRO
        and broker.ledger.member("anna").balance == 0
    )
    broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert broker.ledger.account(COURSE).balance == 42 * MICRO
    assert ask(broker).account == "member:anna", "without a word, their own"


@pytest.mark.parametrize(
    "asked", ["group:other", "member:bert", "group:", "system:grants", "group:Course", "course"]
)
def test_nobody_draws_on_an_account_of_others(broker: Broker, asked: str) -> None:
    give(broker, "group:other")
    broker.ledger.open_account("bert")
    before = broker.ledger.accounts()
    for way in (broker.ask, broker.acquire):
        with pytest.raises(NotAllowed, match=r"field 'account' names .* may not draw on") as caught:
            way(ANNA, ONE, engine="docker", terms=terms(asked))
        assert "member:anna or group:course" in caught.value.message
        assert caught.value.fields["field"] == "account"
    assert broker.ledger.accounts() == before and broker.open_leases() == []


def test_a_group_without_credits_is_no_group_with_a_debt(broker: Broker) -> None:
    """An account is opened by an admin, not by whoever names it."""
    with pytest.raises(NotAllowed, match="has no credits yet: an admin gives it some"):
        ask(broker, ANNA, terms(COURSE))
    assert [account.name for account in broker.ledger.accounts()] == []


def test_a_groups_budget_is_its_balance(broker: Broker, clock: Clock) -> None:
    give(broker, credits=1)
    first = ask(broker, ANNA, terms(COURSE))
    with pytest.raises(NoCredits, match=r"The group course's balance of 0\.33 credits"):
        ask(broker, BERT, terms(COURSE))
    broker.release(first.id, ended_at=clock.now, reason="stopped", failed=True)
    assert ask(broker, BERT, terms(COURSE)).account == COURSE


def test_a_server_without_a_gpu_needs_nobodys_budget(broker: Broker) -> None:
    give(broker)
    broker.ledger.keep_payer("anna", COURSE, actor="anna", groups=["course"])
    lease = broker.acquire(ANNA, Request(environment="plain"), engine="docker", terms=terms())
    assert lease.account == "member:anna"


# What a member keeps.


def test_a_member_keeps_a_usual_payer(broker: Broker) -> None:
    give(broker)
    broker.ledger.keep_payer("anna", COURSE, actor="anna", groups=["course", "lab"])
    payers = broker.ledger.payers("anna", ["course", "lab"])
    assert [account.name for account in payers.accounts] == ["member:anna", COURSE]
    assert (
        payers.usual == COURSE and broker.ledger.payers("bert", ["course"]).usual == "member:bert"
    )
    lease = ask(broker)
    assert lease.account == COURSE
    broker.release(lease.id, reason="stopped", failed=True)
    assert ask(broker, ANNA, terms("member:anna")).account == "member:anna"
    assert changes(broker) == [], "what members choose for themselves is no admin's change"


def test_who_left_the_group_pays_for_themselves(broker: Broker) -> None:
    give(broker)
    broker.ledger.keep_payer("anna", COURSE, actor="anna", groups=["course"])
    assert ask(broker, ANNA, terms(groups=frozenset({"lab"}))).account == "member:anna"
    assert broker.ledger.payers("anna", ["lab"]).usual == "member:anna"


def test_an_admin_sets_who_pays_and_it_is_in_the_trail(broker: Broker) -> None:
    give(broker)
    broker.ledger.keep_payer("anna", COURSE, actor="cli:root")
    broker.ledger.keep_payer("anna", COURSE, actor="cli:root")
    assert ask(broker).account == COURSE
    broker.ledger.keep_payer("anna", "member:anna", actor="cli:root")
    assert broker.ledger.payers("anna", ["course"]).usual == "member:anna"
    assert changes(broker) == [
        ("cli:root", "member:anna", "member:anna pays for them"),
        ("cli:root", "member:anna", f"{COURSE} pays for them"),
    ]


@pytest.mark.parametrize(
    ("account", "groups", "error"),
    [
        ("member:bert", None, NotAllowed),
        ("system:grants", None, NotAllowed),
        ("group:nowhere", None, UnknownAccount),
        (COURSE, ["lab"], NotAllowed),
    ],
)
def test_a_payer_that_cannot_be_is_not_kept(
    broker: Broker, account: str, groups: list[str] | None, error: type[Exception]
) -> None:
    give(broker)
    broker.ledger.open_account("bert")
    with pytest.raises(error):
        broker.ledger.keep_payer("anna", account, actor="root", groups=groups)
    assert broker.ledger.payers("anna", ["course"]).usual == "member:anna"
    assert changes(broker) == []


# In line.


def wait(broker: Broker, server: ServerRef, account: str) -> Ticket:
    asked = terms(account, wait=True, options={"account": account})
    ticket = broker.ask(server, ONE, engine="docker", terms=asked)
    assert isinstance(ticket, Ticket)
    return ticket


def test_a_ticket_says_who_pays_and_another_payer_keeps_the_place(make: Make, clock: Clock) -> None:
    broker = make(device_source="simulated:1xA100-80GB")
    give(broker)
    first = ask(broker, ServerRef("zoe"))
    ticket = wait(broker, ANNA, COURSE)
    clock.forward(minutes=1)
    wait(broker, BERT, "")
    assert ticket.account == COURSE
    again = wait(broker, ANNA, "member:anna")
    assert (again.id, again.account) == (ticket.id, "member:anna")
    assert broker.ticket(ticket.id).options == {"account": "member:anna"}
    again = wait(broker, ANNA, COURSE)
    broker.release(first.id, reason="stopped", failed=True)
    assert broker.turns(frozenset({ticket.id})) == [ticket.id]
    assert broker.start_ticket(ticket.id).account == COURSE


def test_a_payer_without_credits_takes_no_place(make: Make) -> None:
    broker = make(device_source="simulated:1xA100-80GB", opening_grant=1)
    give(broker)
    ask(broker, ServerRef("zoe"))
    ticket = wait(broker, ANNA, COURSE)
    poor = make(device_source="simulated:1xA100-80GB", opening_grant=0)
    with pytest.raises(NoCredits, match=r"Your balance of 0\.00 credits"):
        wait(poor, ANNA, "member:anna")
    assert broker.ticket(ticket.id).account == COURSE


# Whole sessions on hold.


def test_a_whole_session_can_be_set_aside(make: Make, clock: Clock) -> None:
    broker = make(gpu_rates={"*": 4}, opening_grant=20, hold_session=True)
    with pytest.raises(NoCredits, match=r"whole session of 6 h \(24.00\) must be there"):
        ask(broker, ANNA, terms(seconds=6 * 3600))
    lease = ask(broker, ANNA, terms(seconds=4 * 3600))
    assert broker.ledger.member("anna").held == 16 * MICRO
    broker.confirm(lease.id)
    clock.forward(hours=1)
    broker.ledger.charge_all()
    assert broker.ledger.member("anna").held == 12 * MICRO
    broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert broker.ledger.member("anna").held == 0 and credits_of(broker) == 16


def test_a_session_without_an_end_holds_the_minutes(make: Make) -> None:
    broker = make(gpu_rates={"*": 6}, hold_session=True)
    ask(broker)
    assert broker.ledger.member("anna").held == MICRO


def test_what_waits_must_be_paid_whole_too(make: Make) -> None:
    broker = make(device_source="simulated:1xA100-80GB", hold_session=True, opening_grant=5)
    ask(broker, BERT)
    asked = terms(seconds=6 * 3600, wait=True)
    with pytest.raises(NoCredits, match="whole session of 6 h"):
        broker.ask(ANNA, ONE, engine="docker", terms=asked)


def test_a_longer_session_holds_more_or_is_refused(make: Make, clock: Clock) -> None:
    broker = make(gpu_rates={"*": 4}, opening_grant=20, hold_session=True)
    lease = ask(broker, ANNA, terms(seconds=4 * 3600))
    broker.confirm(lease.id)
    clock.forward(hours=1)
    broker.ledger.charge_all()
    longer = broker.extend(lease.id, actor="anna")
    assert longer.ends_at == clock.now.replace(hour=17)
    assert (
        broker.ledger.member("anna").held == 16 * MICRO
        and broker.ledger.member("anna").available == 0
    )
    clock.forward(hours=1)
    broker.ledger.charge_all()
    with pytest.raises(CannotExtend, match=r"member:anna needs 4\.00 credits more, and has 0\.00"):
        broker.extend(lease.id, actor="anna")
    assert broker.lease(lease.id).ends_at == longer.ends_at
    assert broker.lease(lease.id).state is LeaseState.RUNNING
