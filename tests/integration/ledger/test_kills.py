"""Killed at hundreds of random points of grant, hold, tick, settlement and refund, and while
refills are given.

Real: processes, SQLite, PostgreSQL, SIGKILL. Nothing is lost, nothing doubled, and the totals
are exact against what the leases' own rows say.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.services import Services
from tests.support import racers, spending
from tests.support.brokers import Clock, broken_invariants, open_services, problems
from tests.support.parts import each_database
from tests.support.processes import PATIENCE, wait_for
from tests.support.tier import Rounds

USERS = ("anna", "bert")
LOOKS = 10
"""How often in between the books are looked at."""


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    services = spending.spender(database_url, time.time())
    services.ledger.open_account("nobody")  # the tables are there before the first victim is
    yield services
    services.store.close()


def written(journal: Path, before: int, lines: int) -> bool:
    """Whether so many lines came since the journal had ``before`` bytes."""
    return not lines or (journal.exists() and journal.read_bytes()[before:].count(b"\n") >= lines)


@each_database
def test_killed_services_lose_or_double_no_transfer(
    services: Services, database_url: str, tmp_path: Path, rounds: Rounds, chance: random.Random
) -> None:
    kills = rounds(600) // 2  # half on each kind of database
    began = time.time()
    journal = tmp_path / "journal"
    for life in range(kills // len(USERS)):
        before = journal.stat().st_size if journal.exists() else 0
        work = spending.spend_until_killed
        victims = [
            racers.Victim(work, database_url, began, user, life, str(journal)) for user in USERS
        ]
        for victim in victims:
            victim.wait_round()
            # Some are killed in their first steps, others after a few rounds.
            wait_for(partial(written, journal, before, chance.randrange(5)), "work", interval=0.002)
            time.sleep(chance.uniform(0, 0.03))
            victim.kill()
        if life % max(1, kills // len(USERS) // LOOKS) == 0:
            said = spending.acknowledged(journal)
            assert spending.lost_or_doubled(database_url, said["gift"], said["ended"]) == []
            assert problems(services.store) == []

    for leftover in services.leases.open_leases():
        services.leases.release(leftover.id, reason="its hub was killed")
    said = spending.acknowledged(journal)
    assert spending.lost_or_doubled(database_url, said["gift"], said["ended"]) == []
    _, rows = services.audit.check()
    assert broken_invariants(services) == {}
    assert problems(services.store) == []
    assert rows["leases"] > len(said["ended"]) > kills // 4, "there was work that could break"
    kinds = services.store.run(
        lambda c: set(c.exec_driver_sql("SELECT DISTINCT kind FROM transfers").scalars())
    )
    assert kinds == {"grant", "charge", "refund"}


T0 = datetime(2027, 3, 1, 12, tzinfo=timezone.utc)
MEMBERS, DAYS = 12, 40


def test_refill_is_given_once_whenever_the_service_is_killed(
    database_url: str, rounds: Rounds, chance: random.Random
) -> None:
    clock = Clock(T0)
    services = open_services(database_url, clock, opening_grant=0)
    for number in range(MEMBERS):
        services.ledger.open_account(f"user{number}")
    add = services.refills.add_refill(services.refills.plan_refill("FREQ=DAILY", **_refill(T0, 3)))
    ends = services.refills.add_refill(
        services.refills.plan_refill(
            "FREQ=DAILY;INTERVAL=2", **_refill(T0, 1), keep=timedelta(days=1)
        )
    )
    clock.forward(days=DAYS)
    for _ in range(rounds(60)):
        if _serve(database_url, clock, chance.uniform(0.0, 0.25)):
            break
    assert _serve(database_url, clock, 60.0 * PATIENCE)
    assert _given(services, add.id) == DAYS + 1
    assert _given(services, ends.id) == DAYS // 2 + 1
    for number in range(MEMBERS):
        # The newest of those that end has not ended yet.
        assert services.ledger.member(f"user{number}").balance == ((DAYS + 1) * 3 + 1) * MICRO
    assert problems(services.store) == []
    services.store.close()


def _refill(start: datetime, credits: int) -> dict[str, object]:
    who = {"audience": ["everybody"], "actor": "root", "reason": "term"}
    return {"amount": credits * MICRO, "starts_at": start, **who}


def _given(services: Services, refill_id: str) -> int:
    return len(services.refills.refill_runs(refill_id, 1000))


def _serve(url: str, clock: Clock, seconds: float) -> bool:
    """Run a service for so long from when it is ready, then kill it. Whether it was done."""
    ours, theirs = racers.FORKSERVER.Pipe()
    service = racers.FORKSERVER.Process(
        target=spending.give_refills, args=(theirs, url, clock.now), daemon=True
    )
    service.start()
    assert ours.poll(60) and ours.recv() == "ready"
    service.join(seconds)
    service.kill()
    service.join(timeout=120)
    assert service.exitcode in (0, -signal.SIGKILL)
    return service.exitcode == 0
