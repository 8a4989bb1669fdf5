"""Recurring refills. Real: SQLite and PostgreSQL, threads; simulated: devices and the clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpuspawner.core.errors import InvalidRequest, LedgerError, UnknownRefill
from gpuspawner.core.units import MICRO
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.ledger.refills import Mode, Refill
from gpuspawner.services import Broker
from tests.support.brokers import T0, Clock, credits_of, problems, running

Make = Callable[..., Broker]


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


@pytest.fixture
def broker(make: Make) -> Broker:
    """Anna and bert begin with nothing; a GPU costs one credit an hour."""
    broker = make(gpu_rates={"*": 1}, opening_grant=0)
    broker.ledger.open_account("anna")
    broker.ledger.open_account("bert")
    return broker


def refill(broker: Broker, rule: str = "FREQ=DAILY", credits: float = 10, **more: Any) -> Refill:
    more.setdefault("audience", ["everybody"])
    if "BYHOUR" not in rule:
        more.setdefault("starts_at", broker.clock() + timedelta(days=1))
    amount = round(credits * MICRO)
    return broker.refills.add_refill(
        broker.refills.plan_refill(rule, amount=amount, actor="root", reason="term", **more)
    )


def catch_up(broker: Broker, members: dict[str, list[str]] | None = None) -> int:
    """As the service does: every occurrence that has come; how many were given."""
    given = 0
    while due := broker.refills.due_refills():
        for one in due:
            given += broker.refills.give_refill(one.id, members) is not None
    return given


def balances(broker: Broker) -> dict[str, float]:
    return {account.name: account.balance / MICRO for account in broker.ledger.accounts()}


def test_an_occurrence_is_given_when_it_has_come(broker: Broker, clock: Clock) -> None:
    made = refill(broker)
    assert made.next_at == T0 + timedelta(days=1) and broker.refills.all_refills() == [made]
    assert catch_up(broker) == 0 and broker.refills.give_refill(made.id) is None
    clock.forward(days=1)
    assert catch_up(broker) == 1 and catch_up(broker) == 0
    assert balances(broker) == {"member:anna": 10, "member:bert": 10}
    line = broker.ledger.statement("member:anna")[0]
    assert (line.kind, line.reason, line.actor) == ("grant", "term", "accounting")
    (run,) = broker.refills.refill_runs(made.id)
    assert (run.occurrence, run.at, run.accounts, run.total) == (clock.now,) * 2 + (2, 20 * MICRO)
    assert [change.action for change in broker.trail()] == ["refill", "refill_add"]


def test_a_service_that_was_down_gives_each_occurrence_once(broker: Broker, clock: Clock) -> None:
    made = refill(broker, "FREQ=DAILY;BYHOUR=0,6,12,18", 1)
    clock.forward(days=1, minutes=1)
    assert catch_up(broker) == 5 and catch_up(broker) == 0
    assert credits_of(broker) == 5
    occurrences = [run.occurrence for run in broker.refills.refill_runs(made.id)]
    assert occurrences == [T0 + timedelta(hours=hour) for hour in (24, 18, 12, 6, 0)]
    assert {run.at for run in broker.refills.refill_runs(made.id)} == {clock.now}


def test_two_services_at_once_give_once(broker: Broker, clock: Clock) -> None:
    refill(broker, credits=1)
    refill(broker, credits=2, mode=Mode.TOP_UP, audience=["member:bert"])
    clock.forward(days=3)
    gate, given = threading.Barrier(4), []

    def serve() -> None:
        gate.wait(120)
        given.append(catch_up(broker))

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sum(given) == 6 and len(given) == 4
    # Bert is topped up before, between or after: never above what both give together.
    assert credits_of(broker, "anna") == 3 and 3 <= credits_of(broker, "bert") <= 5
    assert problems(broker.store) == []


def test_the_clock_goes_back_a_day_and_on_again(broker: Broker, clock: Clock) -> None:
    refill(broker)
    clock.forward(days=1)
    assert catch_up(broker) == 1
    clock.forward(days=-1)
    assert catch_up(broker) == 0
    clock.forward(days=1, hours=12)
    assert catch_up(broker) == 0 and credits_of(broker) == 10
    clock.forward(hours=12)
    assert catch_up(broker) == 1 and credits_of(broker) == 20


def test_the_clock_goes_ahead_a_day_and_back_again(broker: Broker, clock: Clock) -> None:
    refill(broker)
    clock.forward(days=2)
    assert catch_up(broker) == 2
    clock.forward(days=-1)
    assert catch_up(broker) == 0
    clock.forward(days=1)
    assert catch_up(broker) == 0 and credits_of(broker) == 20


def test_a_day_of_23_hours_has_one_occurrence(make: Make, clock: Clock) -> None:
    clock.now = datetime(2027, 3, 26, 12, tzinfo=timezone.utc)
    broker = make(opening_grant=0)
    broker.ledger.open_account("anna")
    rule = "FREQ=DAILY;BYHOUR=2;BYMINUTE=30"
    made = refill(broker, rule, 1, zone="Europe/Vienna")
    for _ in range(4 * 24):
        clock.forward(hours=1)
        catch_up(broker)
    moments = [
        f"{run.occurrence:%d %H:%M}" for run in reversed(broker.refills.refill_runs(made.id))
    ]
    assert moments == ["27 01:30", "28 01:30", "29 00:30", "30 00:30"]
    assert credits_of(broker) == 4


def test_the_beginning_is_the_first_occurrence_if_the_rule_allows_it(
    broker: Broker, clock: Clock
) -> None:
    clock.forward(seconds=20.5)
    amount = {"amount": MICRO, "audience": ["everybody"], "actor": "root", "reason": "term"}
    first = broker.refills.add_refill(broker.refills.plan_refill("FREQ=DAILY;COUNT=2", **amount))
    assert first.next_at == T0 + timedelta(minutes=1)
    monday = broker.refills.add_refill(broker.refills.plan_refill("FREQ=WEEKLY;BYDAY=MO", **amount))
    assert monday.next_at == T0 + timedelta(days=2, minutes=1)
    clock.forward(minutes=1)
    assert catch_up(broker) == 1
    clock.forward(days=1)
    assert catch_up(broker) == 1 and credits_of(broker) == 2


def test_the_same_key_makes_it_once(broker: Broker) -> None:
    made = refill(broker, key="term-1")
    assert refill(broker, key="term-1").id == made.id and len(broker.refills.all_refills()) == 1
    with pytest.raises(InvalidRequest, match="with the same key, and is another one"):
        refill(broker, key="term-1", credits=11)
    with pytest.raises(InvalidRequest, match="another one"):
        refill(broker, key="term-1", zone="Europe/Vienna")
    broker.refills.end_refill(made.id, actor="root")
    assert refill(broker, key="term-1").ended_at is not None, "what was ended stays so"
    assert refill(broker, key="term-2").id != made.id
    assert [change.action for change in broker.trail()] == [
        "refill_add",
        "refill_end",
        "refill_add",
    ]


def test_eight_make_it_with_one_key_at_once(broker: Broker) -> None:
    gate, made = threading.Barrier(8), []

    def run() -> None:
        gate.wait(120)
        made.append(refill(broker, key="term-1").id)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 8 and len(set(made)) == 1
    assert len(broker.refills.all_refills()) == 1 and len(broker.trail()) == 1


# How much.


def test_a_balance_is_topped_up_to_the_amount(broker: Broker, clock: Clock) -> None:
    broker.ledger.grant("member:anna", 7 * MICRO, actor="root", reason="before")
    broker.ledger.grant("member:bert", 50 * MICRO, actor="root", reason="before")
    made = refill(broker, mode=Mode.TOP_UP)
    clock.forward(days=1)
    assert catch_up(broker) == 1
    assert balances(broker) == {"member:anna": 10, "member:bert": 50}
    (run,) = broker.refills.refill_runs(made.id)
    assert (run.accounts, run.total) == (1, 3 * MICRO)


def test_a_debt_is_filled_up_too(broker: Broker, clock: Clock) -> None:
    broker.ledger.grant("member:anna", -2 * MICRO, actor="root", reason="before")
    refill(broker, mode=Mode.TOP_UP, audience=["member:anna"])
    clock.forward(days=1)
    catch_up(broker)
    assert balances(broker) == {"member:anna": 10, "member:bert": 0}


def test_nothing_is_brought_above_the_cap(broker: Broker, clock: Clock) -> None:
    refill(broker, cap=25 * MICRO)
    clock.forward(days=5)
    assert catch_up(broker) == 5
    assert balances(broker) == {"member:anna": 25, "member:bert": 25}


def test_credits_of_a_refill_can_end(broker: Broker, clock: Clock) -> None:
    refill(broker, "FREQ=DAILY;COUNT=2", keep=timedelta(days=1))
    clock.forward(days=1)
    catch_up(broker)
    ((lot, left),) = broker.ledger.lots_of("member:anna")
    assert (lot.ends_at, left) == (T0 + timedelta(days=2), 10 * MICRO)
    clock.forward(days=1)
    catch_up(broker)
    assert credits_of(broker) == 10, "what the first one gave has ended"


def test_what_comes_late_could_be_spent_in_time(broker: Broker, clock: Clock) -> None:
    """The service was down for days: who worked meanwhile has what they would have had."""
    broker.ledger.grant("member:anna", 30 * MICRO, actor="root", reason="before")
    refill(broker, "FREQ=DAILY;COUNT=3", 10, keep=timedelta(days=1))
    clock.forward(hours=23)
    lease = running(broker, "anna")
    clock.forward(hours=5)
    broker.release(lease.id, ended_at=clock.now, reason="stopped")
    clock.forward(days=4)
    assert catch_up(broker) == 3
    broker.ledger.end_lots()
    # Of the five hours one was before the first refill, which paid for the other four.
    assert credits_of(broker) == 29 and credits_of(broker, "bert") == 0


# For whom.


def test_groups_and_lists(broker: Broker, clock: Clock) -> None:
    broker.ledger.open_account("eva")
    now = clock.now
    broker.store.run(lambda c: ledger_repository.open_account(c, "group:lab", now), write=True)
    made = refill(broker, audience=["members:course", "group:lab", "member:eva"])
    assert made.groups == ("course",)
    clock.forward(days=1)
    assert catch_up(broker, {"course": ["anna", "eva", "nobody"]}) == 1
    assert balances(broker) == {
        "group:lab": 10,
        "member:anna": 10,
        "member:bert": 0,
        "member:eva": 10,
    }


def test_who_came_after_an_occurrence_gets_the_next(broker: Broker, clock: Clock) -> None:
    refill(broker)
    clock.forward(days=1, hours=1)
    broker.ledger.open_account("late")
    assert catch_up(broker) == 1 and credits_of(broker, "late") == 0
    clock.forward(days=1)
    assert catch_up(broker) == 1 and credits_of(broker, "late") == 10


def test_a_preview_changes_nothing(broker: Broker, clock: Clock) -> None:
    made = refill(broker, "FREQ=WEEKLY;BYDAY=MO", mode=Mode.TOP_UP, audience=["members:course"])
    broker.ledger.grant("member:anna", 4 * MICRO, actor="root", reason="before")
    moments, gifts = broker.refills.preview_refill(made, {"course": ["anna", "bert"]}, count=2)
    assert [f"{moment:%a %d}" for moment in moments] == ["Mon 03", "Mon 10"]
    assert [(account.name, gift) for account, gift in gifts] == [
        ("member:anna", 6 * MICRO),
        ("member:bert", 10 * MICRO),
    ]
    assert credits_of(broker) == 4 and broker.refills.all_refills() == [made]


# Ends, and what is refused.


def test_a_refill_that_was_ended_gives_nothing(broker: Broker, clock: Clock) -> None:
    made = refill(broker)
    clock.forward(days=1)
    ended = broker.refills.end_refill(made.id, actor="eva", reason="term over")
    assert ended.ended_at == clock.now and broker.refills.all_refills() == []
    assert catch_up(broker) == 0 and broker.refills.give_refill(made.id) is None
    assert broker.refills.all_refills(ended=True) == [ended]
    with pytest.raises(InvalidRequest, match="ended already"):
        broker.refills.end_refill(made.id, actor="eva")
    assert broker.trail()[0].actor == "eva" and "term over" in broker.trail()[0].detail


def test_the_last_occurrence_ends_a_refill(broker: Broker, clock: Clock) -> None:
    made = refill(broker, "FREQ=DAILY;COUNT=3")
    clock.forward(days=30)
    assert catch_up(broker) == 3
    assert broker.refills.refill(made.id[:4]).next_at is None
    assert broker.refills.preview_refill(broker.refills.refill(made.id)) == ([], [])


def test_a_refill_that_is_not_there(broker: Broker) -> None:
    for name in ("", "zzz"):
        with pytest.raises(UnknownRefill, match="`gpuspawner refills` lists them"):
            broker.refills.refill(name)
    with pytest.raises(UnknownRefill):
        broker.refills.give_refill("zzz")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rule": "FREQ=SECONDLY"}, "comes too often"),
        ({"rule": "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30"}, "never comes"),
        (
            {"rule": "FREQ=DAILY;COUNT=3", "starts_at": T0 - timedelta(days=9)},
            "no occurrence that is still to come",
        ),
        ({"zone": "Nowhere/Else"}, "Nowhere/Else"),
        ({"credits": 0}, "gives nothing"),
        ({"credits": -5}, "gives nothing"),
        ({"cap": 0}, "cap of 0.00 credits is not above 0"),
        ({"cap": 5 * MICRO, "mode": Mode.TOP_UP}, "cap of 5.00 credits is not above the amount"),
        ({"keep": timedelta(0)}, "longer than nothing"),
        ({"keep": timedelta(days=5000)}, "up to 3660 days"),
        ({"audience": []}, "Say who gets it"),
        ({"audience": ["everyone"]}, "'everyone' names nobody"),
        ({"audience": ["members:"]}, "'members:' names nobody"),
        ({"audience": ["system:grants"]}, "names nobody"),
        ({"audience": ["member:ann"]}, "no account 'member:ann'"),
        ({"reason": " "}, "reason is missing"),
    ],
)
def test_a_refill_that_makes_no_sense_is_refused(
    broker: Broker, wrong: dict[str, Any], words: str
) -> None:
    values = {"rule": "FREQ=DAILY", "credits": 10, "audience": ["everybody"], "reason": "x"}
    values |= wrong
    amount = values.pop("credits") * MICRO
    with pytest.raises(InvalidRequest, match=words):
        broker.refills.add_refill(
            broker.refills.plan_refill(values.pop("rule"), amount=amount, actor="root", **values)
        )
    assert broker.refills.all_refills() == [] and broker.trail() == []


def test_too_much_for_one_account_gives_nothing_to_anybody(broker: Broker, clock: Clock) -> None:
    made = refill(broker, credits=2**61 / MICRO, audience=["everybody"])
    clock.forward(days=1)
    assert catch_up(broker) == 1
    clock.forward(days=2)
    with pytest.raises(LedgerError, match="more than an account can hold"):
        catch_up(broker)
    assert len(broker.refills.refill_runs(made.id)) >= 1 and problems(broker.store) == []
