"""Recurring refills. Real: SQLite and PostgreSQL, threads; simulated: devices and the clock."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gpuspawner.core.errors import InvalidRequest, LedgerError, UnknownRefill
from gpuspawner.core.units import MICRO
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.ledger.refills import Mode, Refill
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, Make, credits_of, problems, running
from tests.support.parts import each_database
from tests.support.threads import at_once


@pytest.fixture
def services(make: Make) -> Services:
    """Anna and bert begin with nothing; a GPU costs one credit an hour."""
    services = make(gpu_rates={"*": 1}, opening_grant=0)
    services.ledger.open_account("anna")
    services.ledger.open_account("bert")
    return services


def refill(
    services: Services, rule: str = "FREQ=DAILY", credits: float = 10, **more: Any
) -> Refill:
    more = {"audience": ["everybody"], "actor": "root", "reason": "term", **more}
    if "BYHOUR" not in rule:
        more.setdefault("starts_at", services.clock() + timedelta(days=1))
    plan = services.refills.plan_refill(rule, amount=round(credits * MICRO), **more)
    return services.refills.add_refill(plan)


def catch_up(services: Services, members: dict[str, list[str]] | None = None) -> int:
    """As the service does: every occurrence that has come; how many were given."""
    given = 0
    while due := services.refills.due_refills():
        for one in due:
            given += services.refills.give_refill(one.id, members) is not None
    return given


def balances(services: Services) -> dict[str, float]:
    return {account.name: account.balance / MICRO for account in services.ledger.accounts()}


def test_refill_is_given_when_it_is_due(services: Services, clock: Clock) -> None:
    made = refill(services)
    assert made.next_at == T0 + timedelta(days=1) and services.refills.all_refills() == [made]
    assert catch_up(services) == 0 and services.refills.give_refill(made.id) is None
    clock.forward(days=1)
    assert catch_up(services) == 1 and catch_up(services) == 0
    assert balances(services) == {"member:anna": 10, "member:bert": 10}
    line = services.ledger.statement("member:anna")[0]
    assert (line.kind, line.reason, line.actor) == ("grant", "term", "accounting")
    (run,) = services.refills.refill_runs(made.id)
    assert (run.occurrence, run.at, run.accounts, run.total) == (clock.now,) * 2 + (2, 20 * MICRO)
    assert [change.action for change in services.audit.trail()] == ["refill", "refill_add"]


def test_missed_refills_are_each_given_once(services: Services, clock: Clock) -> None:
    made = refill(services, "FREQ=DAILY;BYHOUR=0,6,12,18;COUNT=5", 1)
    clock.forward(days=1, minutes=1)
    assert catch_up(services) == 5 and catch_up(services) == 0
    assert credits_of(services) == 5
    occurrences = [run.occurrence for run in services.refills.refill_runs(made.id)]
    assert occurrences == [T0 + timedelta(hours=hour) for hour in (24, 18, 12, 6, 0)]
    assert {run.at for run in services.refills.refill_runs(made.id)} == {clock.now}
    over = services.refills.refill(made.id[:4])
    assert over.next_at is None and services.refills.preview_refill(over) == ([], [])


@each_database
def test_concurrent_services_give_each_refill_once(services: Services, clock: Clock) -> None:
    refill(services, credits=1)
    refill(services, credits=2, mode=Mode.TOP_UP, audience=["member:bert"])
    clock.forward(days=3)
    assert sum(at_once(4, lambda number: catch_up(services))) == 6
    # Bert is topped up before, between or after: never above what both give together.
    assert credits_of(services, "anna") == 3 and 3 <= credits_of(services, "bert") <= 5
    assert problems(services.store) == []


@pytest.mark.parametrize(
    ("steps", "given"),
    [([1, -1, 1.5, 0.5], [1, 0, 0, 1]), ([2, -1, 1], [2, 0, 0])],
    ids=["back a day and on", "ahead a day and back"],
)
def test_clock_changes_never_repeat_a_refill(
    services: Services, clock: Clock, steps: list[float], given: list[int]
) -> None:
    refill(services)
    for days, count in zip(steps, given, strict=True):
        clock.forward(days=days)
        assert catch_up(services) == count
    assert credits_of(services) == 10 * sum(given)


def test_first_refill_is_at_the_start_if_allowed(services: Services, clock: Clock) -> None:
    clock.forward(seconds=20.5)
    first = refill(services, "FREQ=DAILY;COUNT=2", 1, starts_at=None)
    assert first.next_at == T0 + timedelta(minutes=1)
    monday = refill(services, "FREQ=WEEKLY;BYDAY=MO", 1, starts_at=None)
    assert monday.next_at == T0 + timedelta(days=2, minutes=1)
    clock.forward(minutes=1)
    assert catch_up(services) == 1
    clock.forward(days=1)
    assert catch_up(services) == 1 and credits_of(services) == 2


def test_refill_with_the_same_key_is_created_once(services: Services) -> None:
    made = refill(services, key="term-1")
    assert refill(services, key="term-1").id == made.id and len(services.refills.all_refills()) == 1
    with pytest.raises(InvalidRequest, match="with the same key, and is another one"):
        refill(services, key="term-1", credits=11)
    with pytest.raises(InvalidRequest, match="another one"):
        refill(services, key="term-1", zone="Europe/Vienna")
    services.refills.end_refill(made.id, actor="root")
    assert refill(services, key="term-1").ended_at is not None, "what was ended stays so"
    assert refill(services, key="term-2").id != made.id
    assert [change.action for change in services.audit.trail()] == [
        "refill_add",
        "refill_end",
        "refill_add",
    ]


@each_database
def test_concurrent_creation_with_one_key_makes_one_refill(services: Services) -> None:
    assert len(set(at_once(8, lambda number: refill(services, key="term-1").id))) == 1
    assert len(services.refills.all_refills()) == 1 and len(services.audit.trail()) == 1


# How much.


@pytest.mark.parametrize(
    ("before", "days", "settings", "after"),
    [
        ((7, 50), 1, {"mode": Mode.TOP_UP}, (10, 50)),
        ((-2, 0), 1, {"mode": Mode.TOP_UP}, (10, 10)),
        ((0, 0), 5, {"cap": 25 * MICRO}, (25, 25)),
    ],
    ids=["topped up", "a debt is topped up too", "up to the cap"],
)
def test_refill_amount_depends_on_the_balance(
    services: Services,
    clock: Clock,
    before: tuple[int, int],
    days: int,
    settings: dict[str, Any],
    after: tuple[int, int],
) -> None:
    for user, credits in zip(("anna", "bert"), before, strict=True):
        if credits:
            account = f"member:{user}"
            services.ledger.grant(account, credits * MICRO, actor="root", reason="before")
    made = refill(services, **settings)
    clock.forward(days=days)
    assert catch_up(services) == days
    assert balances(services) == dict(zip(("member:anna", "member:bert"), after, strict=True))
    runs = services.refills.refill_runs(made.id)
    assert sum(run.total for run in runs) == (sum(after) - sum(before)) * MICRO


def test_refilled_credits_can_expire(services: Services, clock: Clock) -> None:
    refill(services, "FREQ=DAILY;COUNT=2", keep=timedelta(days=1))
    clock.forward(days=1)
    catch_up(services)
    ((lot, left),) = services.ledger.lots_of("member:anna")
    assert (lot.ends_at, left) == (T0 + timedelta(days=2), 10 * MICRO)
    clock.forward(days=1)
    catch_up(services)
    assert credits_of(services) == 10, "what the first one gave has ended"


def test_late_refill_pays_for_earlier_use(services: Services, clock: Clock) -> None:
    """The service was down for days: who worked meanwhile has what they would have had."""
    services.ledger.grant("member:anna", 30 * MICRO, actor="root", reason="before")
    refill(services, "FREQ=DAILY;COUNT=3", 10, keep=timedelta(days=1))
    clock.forward(hours=23)
    lease = running(services, "anna")
    clock.forward(hours=5)
    services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    clock.forward(days=4)
    assert catch_up(services) == 3
    services.ledger.end_lots()
    # Of the five hours one was before the first refill, which paid for the other four.
    assert credits_of(services) == 29 and credits_of(services, "bert") == 0


# For whom.


def test_refill_reaches_group_members_and_listed_accounts(services: Services, clock: Clock) -> None:
    services.ledger.open_account("eva")
    now = clock.now
    services.store.run(lambda c: ledger_repository.open_account(c, "group:lab", now), write=True)
    made = refill(services, audience=["members:course", "group:lab", "member:eva"])
    assert made.groups == ("course",)
    clock.forward(days=1)
    assert catch_up(services, {"course": ["anna", "eva", "nobody"]}) == 1
    assert balances(services) == {
        "group:lab": 10,
        "member:anna": 10,
        "member:bert": 0,
        "member:eva": 10,
    }


def test_account_opened_after_a_refill_gets_the_next(services: Services, clock: Clock) -> None:
    refill(services)
    clock.forward(days=1, hours=1)
    services.ledger.open_account("late")
    assert catch_up(services) == 1 and credits_of(services, "late") == 0
    clock.forward(days=1)
    assert catch_up(services) == 1 and credits_of(services, "late") == 10


def test_refill_preview_changes_nothing(services: Services) -> None:
    made = refill(services, "FREQ=WEEKLY;BYDAY=MO", mode=Mode.TOP_UP, audience=["members:course"])
    services.ledger.grant("member:anna", 4 * MICRO, actor="root", reason="before")
    moments, gifts = services.refills.preview_refill(made, {"course": ["anna", "bert"]}, count=2)
    assert [f"{moment:%a %d}" for moment in moments] == ["Mon 03", "Mon 10"]
    assert [(account.name, gift) for account, gift in gifts] == [
        ("member:anna", 6 * MICRO),
        ("member:bert", 10 * MICRO),
    ]
    assert credits_of(services) == 4 and services.refills.all_refills() == [made]


# Ends, and what is refused.


def test_ended_or_unknown_refill_gives_nothing(services: Services, clock: Clock) -> None:
    made = refill(services)
    clock.forward(days=1)
    ended = services.refills.end_refill(made.id, actor="eva", reason="term over")
    assert ended.ended_at == clock.now and services.refills.all_refills() == []
    assert catch_up(services) == 0 and services.refills.give_refill(made.id) is None
    assert services.refills.all_refills(ended=True) == [ended]
    with pytest.raises(InvalidRequest, match="ended already"):
        services.refills.end_refill(made.id, actor="eva")
    change = services.audit.trail()[0]
    assert change.actor == "eva" and "term over" in change.detail
    for name in ("", "zzz"):
        with pytest.raises(UnknownRefill, match="`gpuspawner refills` lists them"):
            services.refills.refill(name)
    with pytest.raises(UnknownRefill):
        services.refills.give_refill("zzz")


def test_invalid_refill_is_rejected(services: Services) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rule": "FREQ=SECONDLY"}, "comes too often"),
        ({"rule": "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30"}, "never occurs"),
        (
            {"rule": "FREQ=DAILY;COUNT=3", "starts_at": T0 - timedelta(days=9)},
            "has no future occurrence",
        ),
        ({"zone": "Nowhere/Else"}, "Nowhere/Else"),
        ({"credits": 0}, "grants nothing"),
        ({"credits": -5}, "grants nothing"),
        ({"cap": 0}, "cap of 0.00 credits is not above 0"),
        ({"cap": 5 * MICRO, "mode": Mode.TOP_UP}, "cap of 5.00 credits is not above the amount"),
        ({"keep": timedelta(0)}, "more than 0"),
        ({"keep": timedelta(days=5000)}, "up to 3660 days"),
        ({"audience": []}, "Say who gets it"),
        ({"audience": ["everyone"]}, "'everyone' is not an audience"),
        ({"audience": ["members:"]}, "'members:' is not an audience"),
        ({"audience": ["system:grants"]}, "is not an audience"),
        ({"audience": ["member:ann"]}, "no account 'member:ann'"),
        ({"reason": " "}, "reason is missing"),
    ]
    for fields, words in cases:
        with pytest.raises(InvalidRequest, match=words):
            refill(services, **fields)
    assert services.refills.all_refills() == [] and services.audit.trail() == []


def test_refill_beyond_the_account_limit_fails(services: Services, clock: Clock) -> None:
    made = refill(services, credits=2**61 / MICRO, audience=["everybody"])
    clock.forward(days=1)
    assert catch_up(services) == 1
    clock.forward(days=2)
    with pytest.raises(LedgerError, match="more than an account can hold"):
        catch_up(services)
    assert len(services.refills.refill_runs(made.id)) >= 1 and problems(services.store) == []
