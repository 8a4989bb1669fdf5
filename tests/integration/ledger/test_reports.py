"""Statements, receipts and reports of use against what the store holds, row by row. Real: both
databases, services whose clock the test sets."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import NoDeviceFree, UnknownAccount, UnknownLease
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.ledger import reports, totals
from gpuspawner.ledger.models import member_account
from gpuspawner.ledger.rules import owed
from gpuspawner.ledger.usage import Kind, LeaseUse
from gpuspawner.services import Services
from tests.support.brokers import Clock, Make, broken_invariants, open_services, running
from tests.support.parts import each_database

DAY = timedelta(days=1)
WEEK = timedelta(weeks=1)
MONDAY = datetime(2025, 3, 3, tzinfo=timezone.utc)


@pytest.fixture
def clock() -> Clock:
    return Clock(MONDAY)


FLEET: dict[str, Any] = {
    "device_source": "simulated:3xT4,3xA100-80GB",
    "gpu_rates": {"*": "0.333333", "A100": "3.7"},
    "opening_grant": 50_000,
    "refresh_seconds": 0,
}
"""Three T4 and three A100 with rates that leave rests of a microcredit."""


@pytest.fixture
def services(make: Make) -> Services:
    return make(**FLEET)


@pytest.fixture(scope="module")
def histories() -> dict[str, tuple[str, datetime]]:
    """By the kind of database: where three weeks are written, and when they end."""
    return {}


@pytest.fixture
def past(
    request: pytest.FixtureRequest,
    database_url: str,
    migrated_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
    make: Make,
    clock: Clock,
    histories: dict[str, tuple[str, datetime]],
) -> Services:
    """Three weeks of sessions of three members, some across a Monday, one still open."""
    kind = sa.make_url(database_url).get_backend_name()
    server = request.getfixturevalue("postgres") if kind == "postgresql" else None
    if kind not in histories:
        file = shutil.copy(migrated_file, tmp_path_factory.mktemp("history"))
        url = server.migrated_database() if server else f"sqlite:///{file}"
        histories[kind] = url, write_history(url)
    url, clock.now = histories[kind]
    if server:
        server.replace(database_url, url)
    else:
        shutil.copy(url.removeprefix("sqlite:///"), database_url.removeprefix("sqlite:///"))
    return make(**FLEET)


def write_history(url: str) -> datetime:
    """Let three weeks go by on an empty database; when they end."""
    clock, chance = Clock(MONDAY), random.Random(7)
    services = open_services(url, clock, **FLEET)
    opened: dict[tuple[str, str], Lease] = {}
    for step in range(120):
        clock.forward(minutes=chance.randint(1, 500), seconds=chance.random() * 60)
        who = (chance.choice(["ada", "bob", "cleo"]), chance.choice(["", "two"]))
        if who in opened:
            services.leases.release(opened.pop(who).id, ended_at=clock(), reason="stopped")
        elif len(opened) < 5:
            gpus, model = chance.choice([(0, None), (1, None), (1, "A100"), (2, "T4")])
            with suppress(NoDeviceFree):  # it is asked for again later
                opened[who] = running(services, who[0], gpus, who[1], model=model)
        if chance.random() < 0.7:
            services.ledger.charge_all()
        if step % 15 == 0:
            services.ledger.grant(member_account(who[0]), MICRO, actor="kim", reason=f"step {step}")
    for some in list(opened)[1:]:
        services.leases.release(opened.pop(some).id, ended_at=clock(), reason="stopped")
    clock.forward(hours=3)
    services.ledger.charge_all()
    clock.forward(minutes=20)
    services.store.close()
    return clock.now


def pages(
    ask: Callable[..., Any],
    begin: Any = None,
    cursor: str = "before",
    entries: str = "entries",
    following: str = "older",
) -> list[Any]:
    """Every entry, page after page; the names are those of the parameter and of a page's fields."""
    found, start = [], begin
    while True:
        page = ask(**{cursor: start})
        found += getattr(page, entries)
        start = getattr(page, following)
        if start is None:
            return found


def two_items(past: Services, lease_id: str, after: int) -> reports.ReceiptItems:
    return past.reports.receipt(lease_id, after, 2).items


@each_database
def test_statement_pages_match_the_whole_statement(past: Services) -> None:
    for user, limit in product(("ada", "bob", "cleo"), (7, 1000)):
        account = member_account(user)
        whole = past.ledger.statement(account, 10_000)
        assert len(whole) > 10
        assert pages(partial(past.reports.statement_page, account, limit=limit)) == [*whole]
        balance = past.ledger.account(account).balance
        for line in whole:
            assert line.balance == balance
            balance -= line.amount
        assert balance == 0
    account = member_account("ada")
    first = past.reports.statement_page(account, None, 5)
    second = past.reports.statement_page(account, first.older, 5)
    past.ledger.grant(account, MICRO, actor="kim", reason="meanwhile")
    assert past.reports.statement_page(account, first.older, 5) == second


@each_database
def test_folded_statement_pages_add_up_to_the_balance(
    past: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = member_account("ada")
    single = pages(partial(past.reports.statement_page, account, limit=100))
    for limit, (most_read, at_first) in product((3, 50), [(5, 200), (5000, 2), (5000, 200)]):
        monkeypatch.setattr(reports, "MOST_READ", most_read)
        monkeypatch.setattr(reports, "AT_FIRST", at_first)
        found = pages(partial(past.reports.folded_page, account, past.time(), limit=limit))
        assert sum(entry.count for entry in found) == len(single)
        (own, *_) = past.ledger.payers("ada", ()).accounts
        balance = own.balance
        assert balance < past.ledger.account(account).balance  # something is due
        for entry in found:
            assert entry.balance == balance
            balance -= entry.amount
        assert balance == 0
        of_lease: Counter[str | None] = Counter()
        for entry in found:
            of_lease[entry.lease_id] += entry.amount
            assert not entry.parts or sum(part.amount for part in entry.parts) == entry.amount
        for entry in single:
            of_lease[entry.lease_id] -= entry.amount
        due = past.ledger.account(account).balance - own.balance
        assert sorted(of_lease.values()) == [-due] + [0] * (len(of_lease) - 1)
        if (limit, most_read) == (50, 5000):
            assert len(found) < len(single) / 2


@each_database
def test_receipt_lists_every_item_of_a_lease(past: Services) -> None:
    for lease in past.leases.of_account(member_account("ada"), 100):
        whole = past.reports.receipt(lease.id, limit=10_000)
        assert whole.lease == lease
        assert whole.items.total == lease.charged == -sum(e.amount for e in whole.items.entries)
        assert whole.items.count == len(whole.items.entries)
        found = pages(partial(two_items, past, lease.id), 0, "after", following="newer")
        assert tuple(found) == whole.items.entries
        assert not found or found[-1].balance == lease.charged
        moments = [entry.at for entry in found]
        assert moments == sorted(moments)


def test_reports_reject_unknown_names_and_find_transfers(past: Services) -> None:
    with pytest.raises(UnknownAccount, match="member:nobody"):
        past.reports.statement_page("member:nobody")
    with pytest.raises(UnknownLease):
        past.reports.receipt("nothing")
    entry = past.reports.statement_page(member_account("ada")).entries[0]
    transfer = past.ledger.transfer(entry.transfer)
    assert transfer.amount_for(member_account("ada")) == entry.amount
    assert transfer.at == entry.at
    assert past.reports.reversal_of(transfer.id) is None
    reversal = past.ledger.reverse(transfer.id, actor="kim", reason="by mistake")
    assert past.reports.reversal_of(transfer.id) == reversal


@each_database
def test_accounts_are_found_by_part_of_their_name(services: Services) -> None:
    names = ["Ada", "a_da", "a%da", "bob", "adam", "mar%y"]
    for name in names:
        services.ledger.open_account(name)

    def found(text: str, **more: Any) -> list[str]:
        return [
            a.name.removeprefix("member:")
            for a in services.reports.find_accounts(text, **more).found
        ]

    assert sorted(found("")) == sorted(names)
    assert sorted(found("ADA")) == ["Ada", "adam"]
    assert found("%") == sorted(["a%da", "mar%y"])
    assert found("a_d") == ["a_da"]
    assert found("nobody") == found("system") == []
    assert found("", among=["member:bob", "group:x", "system:grants"]) == ["bob"]
    find = partial(services.reports.find_accounts, "", limit=2)
    seen = pages(find, "", "after", "found", "following")
    assert [each.name for each in seen] == [each.name for each in services.ledger.accounts()]


@each_database
def test_leases_are_paged_by_member_and_account_and_searched(past: Services) -> None:
    every = past.leases.of_account(None, 10_000)
    for wanted in ({}, {"user": "ada"}, {"account": "member:bob"}):
        find = partial(past.reports.find_leases, **wanted, limit=7)
        found = [lease.id for lease in pages(find, entries="found")]
        mine = [
            lease
            for lease in every
            if lease.server.user == wanted.get("user", lease.server.user)
            and lease.account == wanted.get("account", lease.account)
        ]
        assert len(found) > 14
        assert sorted(found) == sorted(lease.id for lease in mine)
        moments = {lease.id: lease.granted_at for lease in mine}
        assert [moments[name] for name in found] == sorted(moments.values(), reverse=True)
    with pytest.raises(UnknownLease):
        past.reports.find_leases(before="nothing")

    def texts(lease: Lease) -> list[str]:
        return [lease.server.user, lease.server.name, lease.account, lease.environment]

    for text in ("ada", "MEMBER:B", "%", "a_d", "nobody"):
        find = partial(past.reports.find_leases, text=text, limit=20)
        named = {lease.id for lease in pages(find, entries="found")}
        assert named == {
            x.id for x in every if any(text.lower() in part.lower() for part in texts(x))
        }
        assert bool(named) is (text not in ("%", "a_d", "nobody"))


@each_database
def test_audit_trail_can_be_searched_and_paged(services: Services) -> None:
    for number in range(5):
        services.devices.pause(actor="kim", reason=f"Fan {number}")
        services.devices.resume(actor="lee")
    whole = services.reports.find_changes(limit=100)
    assert len(whole.changes) == 10
    assert whole.older is None
    first = services.reports.find_changes(limit=4)
    rest = services.reports.find_changes(before=first.older, limit=100)
    assert first.changes + rest.changes == whole.changes
    assert [change.detail for change in services.reports.find_changes("fan 3").changes] == ["Fan 3"]
    assert {change.actor for change in services.reports.find_changes("LEE").changes} == {"lee"}


def by_hand(
    leases: list[Lease], start: datetime, end: datetime, now: datetime
) -> dict[str, dict[str, LeaseUse]]:
    """By each name of a kind."""
    found: dict[str, dict[str, LeaseUse]] = {name: {} for name in Kind._fields}
    for lease in leases:
        began, ended = lease.started_at, lease.ended_at or now
        if not began or began >= end or ended <= start:
            continue
        since, until = max(start, began), min(end, ended)
        cost = owed(lease.rate, began, until) - owed(lease.rate, began, since)
        micros = len(lease.devices) * ((until - since) // timedelta(microseconds=1))
        models = sorted({device.model for device in lease.devices})
        model = models[0] if len(models) == 1 else ("several models" if models else "")
        kind = Kind(lease.server.user, lease.group, lease.account, lease.environment, model)
        use = LeaseUse(micros, cost, int(start <= began))
        for name, sums in found.items() if any(use) else ():
            key = getattr(kind, name)
            sums[key] = sums.get(key, LeaseUse()).plus(use)
    return found


BOUNDS = {
    "utc": [MONDAY + n * WEEK for n in range(6)],
    "east": [MONDAY + n * WEEK - timedelta(hours=5, minutes=45) for n in range(6)],
    "west": [MONDAY + n * WEEK + timedelta(hours=8) for n in range(6)],
    "within a day": [MONDAY + DAY + timedelta(minutes=457 * n) for n in range(6)],
    "a month": [MONDAY + n * 31 * DAY - timedelta(hours=1) for n in range(-1, 3)],
}


@each_database
def test_reported_use_is_the_sum_of_the_leases(past: Services, clock: Clock) -> None:
    """Whatever has been added up of it, and in whatever zone the days begin."""
    leases = past.leases.of_account(None, 10_000)
    assert any(lease.state is not LeaseState.ENDED for lease in leases)
    expected = {
        zone: [by_hand(leases, *both, clock()) for both in pairwise(bounds)]
        for zone, bounds in BOUNDS.items()
    }
    for portion in (0, 7, 1000):
        past.store.run(partial(totals.add_up, most=portion), write=True)
        for zone, bounds in BOUNDS.items():
            for name in Kind._fields:
                by_name = [each[name] for each in expected[zone]]
                assert past.reports.use_by(bounds, name) == by_name
    everything = by_hand(leases, MONDAY, clock(), clock())
    assert len(everything["user"]) == 3
    assert set(everything["model"]) >= {"", "T4", "A100-80GB"}
    account = member_account("bob")
    for bounds in BOUNDS.values():
        mine = past.reports.use_of_account(account, bounds)
        for use, (start, end) in zip(mine, pairwise(bounds), strict=True):
            assert use == by_hand(leases, start, end, clock())["account"].get(account, LeaseUse())


def test_long_session_counts_toward_each_of_its_days(services: Services, clock: Clock) -> None:
    """Of five weeks; it ends long after the day that is asked for."""
    clock.now = MONDAY + timedelta(hours=23)
    long = running(services, "ada", 2, model="A100")
    short = running(services, "bob", model="T4")
    clock.forward(hours=1)  # to the midnight itself
    services.leases.release(short.id, ended_at=clock(), reason="stopped")
    nothing = running(services, "cleo", model="T4")
    services.leases.release(nothing.id, ended_at=clock(), reason="stopped at once")
    clock.forward(days=35)
    services.leases.release(long.id, ended_at=clock(), reason="stopped")
    clock.forward(days=1)
    while services.reports.add_up():
        pass
    leases = [
        lease for lease in services.leases.of_account(None, 10) if lease.server.user != "cleo"
    ]
    for hours in (0, 23):
        bounds = [MONDAY + n * DAY + timedelta(hours=hours) for n in range(40)]
        for found, (start, end) in zip(
            services.reports.use_by(bounds, "user"), pairwise(bounds), strict=True
        ):
            empty = found.pop("cleo", LeaseUse())
            assert found == by_hand(leases, start, end, clock())["user"]
            assert empty == LeaseUse(sessions=int(start <= clock.now - 36 * DAY < end))


def test_refunded_session_is_added_up_again(past: Services) -> None:
    bounds = [MONDAY + n * WEEK for n in range(4)]
    while past.reports.add_up():
        pass
    before = past.reports.use_by(bounds, "user")
    paid = next(x for x in past.leases.of_account(None, 500)[::-1] if x.charged and x.ended_at)
    past.ledger.refund(paid.id, actor="kim", reason="a sick GPU")
    after = past.reports.use_by(bounds, "user")
    user = paid.server.user
    gone = sum(week[user].cost for week in before) - sum(week[user].cost for week in after)
    assert gone == paid.charged
    assert past.reports.add_up() == 1
    assert past.reports.use_by(bounds, "user") == after
    assert broken_invariants(past) == {}


def test_session_end_in_the_past_lowers_reported_use(services: Services, clock: Clock) -> None:
    clock.forward(hours=1)
    lease = running(services, "ada", model="A100")
    clock.now = MONDAY + 8 * DAY
    (before,) = services.reports.use_by([MONDAY, MONDAY + WEEK], "user")
    services.leases.release(lease.id, ended_at=MONDAY + 2 * DAY, reason="it had ended long before")
    for _ in range(2):
        (after,) = services.reports.use_by([MONDAY, MONDAY + WEEK], "user")
        assert sum(use.cost for use in after.values()) < sum(use.cost for use in before.values())
        services.reports.add_up()


def test_missing_totals_are_added_up_before_the_answer(
    past: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade of a site of years, nobody reads all its leases for one page."""
    bounds = [MONDAY, MONDAY + 4 * WEEK]
    expected = past.reports.use_by(bounds, "user")
    monkeypatch.setattr("gpuspawner.ledger.reports.MOST_LEFT", 5)
    assert past.store.run(lambda c: totals.left(c, 1000)) > 5
    assert past.reports.use_by(bounds, "user") == expected
    assert past.store.run(lambda c: totals.left(c, 1000)) == 0
