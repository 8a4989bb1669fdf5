"""Totals of what has ended, against the leases and postings that they are of. Real: both databases,
threads that add up, refund and end leases at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import pytest
import sqlalchemy as sa

from gpuspawner.db.schema import leases
from gpuspawner.db.schema import totals as rows_of_totals
from gpuspawner.ledger import totals
from gpuspawner.ledger.usage import Kind, LeaseUse
from gpuspawner.services import Services
from tests.support.brokers import Clock, acquire, broken_invariants, open_services, running
from tests.support.parts import each_database

NEW_YEAR = datetime(2024, 12, 31, 22, 30, tzinfo=timezone.utc)


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    """Twelve sessions around the end of a year; the last one goes on."""
    clock = Clock(NEW_YEAR)
    services = open_services(
        database_url,
        clock,
        device_source="simulated:3xT4,3xA100-80GB",
        gpu_rates={"*": "0.333333", "A100": "3.7"},
        opening_grant=50_000,
        refresh_seconds=0,
    )
    failed = acquire(services, "dora")
    services.leases.release(failed.id, reason="its start failed", failed=True)
    for number in range(11):
        lease = running(services, f"user{number % 3}", 1 + number % 2, model="A100")
        clock.forward(minutes=37, seconds=number / 7)
        services.leases.release(lease.id, ended_at=clock(), reason="stopped")
    running(services, "user0", 1, model="T4")
    clock.forward(minutes=5)
    services.ledger.charge_all()
    yield services
    services.store.close()


def ever(services: Services) -> dict[str, dict[str, LeaseUse]]:
    """What was used in ten years, by each name of a kind."""
    bounds = [NEW_YEAR - timedelta(days=999), NEW_YEAR + timedelta(days=2999)]
    return {name: services.reports.use_by(bounds, name)[0] for name in Kind._fields}


@each_database
def test_totals_grow_in_portions_without_changing_reports(services: Services) -> None:
    expected, told = ever(services), services.reports.until_now()
    steps = []
    while step := services.store.run(lambda c: totals.add_up(c, 5), write=True):
        steps.append(step)
        assert ever(services) == expected
        assert services.reports.until_now() == told
        assert broken_invariants(services) == {}
    assert steps == [5, 5, 2]
    with services.store.read() as connection:
        days = sa.select(rows_of_totals.c.since).where(rows_of_totals.c.span == "month").distinct()
        months = sorted(at.month for at in connection.execute(days).scalars())
    assert months == [1, 12]


@each_database
def test_credit_totals_are_added_up_in_portions(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(totals, "POSTINGS_AT_ONCE", 7)
    told = services.reports.until_now()
    assert told[0].charged > 0 < told[0].refunded + told[0].granted
    steps = 0
    while services.reports.add_up() == totals.LEASES_AT_ONCE:
        steps += 1
        assert services.reports.until_now() == told
    assert steps > 3
    assert broken_invariants(services) == {}
    running(services, "user1", model="A100")
    services.ledger.grant("member:user1", -5, actor="kim", reason="taken back")
    assert services.reports.until_now()[0].taken == 5
    services.reports.add_up()
    assert services.reports.until_now()[0] == told[0]._replace(taken=5, left=told[0].left - 5)


def test_audit_names_a_wrong_total(services: Services) -> None:
    services.reports.add_up()
    assert broken_invariants(services) == {}
    for by in (*Kind._fields, totals.OUTCOME, totals.MODEL_AND_GROUP):
        of_it = rows_of_totals.c.by == by
        column = rows_of_totals.c["sessions" if by == totals.OUTCOME else "micros"]
        more = sa.update(rows_of_totals).where(of_it).values({column: column + 1})
        for wrong in (more, sa.delete(rows_of_totals).where(of_it)):
            with services.store.write_engine.connect() as connection, connection.begin() as change:
                connection.execute(wrong)
                found = list(totals.check_use(connection))
                change.rollback()
            assert found
            assert all(sentence.startswith(f"The total by {by} of ") for sentence in found)

    # A lease and a sum of credits, changed behind the totals.
    query = sa.update(leases).where(leases.c.user == "user1").values(group="lab")
    services.store.run(lambda c: c.execute(query), write=True)
    assert "The total by group of " in broken_invariants(services)["totals of use"]
    credits = sa.text("UPDATE moved SET came = came + 7 WHERE account = 'system:usage'")
    services.store.run(lambda c: c.execute(credits), write=True)
    assert (
        "The totals of system:usage say that " in broken_invariants(services)["totals of credits"]
    )


@each_database
def test_concurrent_updates_count_each_lease_once_in_totals(services: Services) -> None:
    """Whoever comes first: each lease is in the totals once, as it is in the end."""
    clock = Clock.of(services)
    paid = [
        lease.id
        for lease in services.leases.of_account(None, 100)
        if lease.ended_at and lease.charged
    ]

    def add_up(_: int) -> int:
        return sum(services.store.run(lambda c: totals.add_up(c, 2), write=True) for _ in range(9))

    def refund(lease_id: str) -> None:
        services.ledger.refund(lease_id, actor="kim", reason="a sick GPU")

    def end(number: int) -> None:
        lease = running(services, f"new{number}", model="A100")
        services.leases.release(lease.id, ended_at=clock(), reason="stopped")

    with ThreadPoolExecutor(6) as pool:
        work = [pool.submit(add_up, n) for n in range(3)]
        work += [pool.submit(refund, lease_id) for lease_id in paid]
        work += [pool.submit(end, n) for n in range(3)]  # as many as there are A100s
        for each in work:
            each.result(timeout=60)
    while services.reports.add_up():
        pass
    assert broken_invariants(services) == {}
    expected: dict[str, int] = {}
    for lease in services.leases.of_account(None, 100):
        if lease.started_at:
            expected[lease.account] = expected.get(lease.account, 0) + lease.charged
    used = ever(services)["account"]
    assert {name: use.cost for name, use in used.items()} == expected
    assert sum(use.sessions for use in used.values()) == 11 + 1 + 3
