"""A service that is killed while it gives refills. Real: processes, SIGKILL, both databases."""

from __future__ import annotations

import random
import subprocess
import sys
from datetime import datetime, timedelta, timezone

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.services import Broker
from tests.support.brokers import Clock, open_broker, problems
from tests.support.processes import REPO
from tests.support.tier import Rounds

T0 = datetime(2027, 3, 1, 12, tzinfo=timezone.utc)
MEMBERS, DAYS = 12, 40

SERVICE = """
import sys
from datetime import datetime
from tests.support.brokers import make_broker
now = datetime.fromisoformat(sys.argv[2])
broker = make_broker(database_url=sys.argv[1], device_source="simulated:1xT4", clock=lambda: now)
print("ready", flush=True)
while due := broker.refills.due_refills():
    for refill in due:
        broker.refills.give_refill(refill.id)
    broker.ledger.end_lots()
broker.ledger.end_lots()
print("done", flush=True)
"""


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


def test_each_occurrence_is_given_once_whenever_it_is_killed(
    database_url: str, rounds: Rounds, chance: random.Random
) -> None:
    clock = Clock(T0)
    broker = open_broker(database_url, clock, opening_grant=0)
    for number in range(MEMBERS):
        broker.ledger.open_account(f"user{number}")
    add = broker.refills.add_refill(broker.refills.plan_refill("FREQ=DAILY", **_refill(T0, 3)))
    ends = broker.refills.add_refill(
        broker.refills.plan_refill(
            "FREQ=DAILY;INTERVAL=2", **_refill(T0, 1), keep=timedelta(days=1)
        )
    )
    clock.forward(days=DAYS)
    for _ in range(rounds(60)):
        if _serve(database_url, clock, chance.uniform(0.0, 0.25)):
            break
    assert _serve(database_url, clock, 60.0)
    assert _given(broker, add.id) == DAYS + 1
    assert _given(broker, ends.id) == DAYS // 2 + 1
    for number in range(MEMBERS):
        # The newest of those that end has not ended yet.
        assert broker.ledger.member(f"user{number}").balance == ((DAYS + 1) * 3 + 1) * MICRO
    assert problems(broker.store) == []
    broker.store.close()


def _refill(start: datetime, credits: int) -> dict[str, object]:
    who = {"audience": ["everybody"], "actor": "root", "reason": "term"}
    return {"amount": credits * MICRO, "starts_at": start, **who}


def _given(broker: Broker, refill_id: str) -> int:
    return len(broker.refills.refill_runs(refill_id, 1000))


def _serve(url: str, clock: Clock, seconds: float) -> bool:
    """Run a service for so long from when it is ready, then kill it. Whether it was done."""
    service = subprocess.Popen(
        [sys.executable, "-c", SERVICE, url, clock.now.isoformat()],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert service.stdout is not None and service.stdout.readline() == "ready\n"
    try:
        service.wait(seconds)
    except subprocess.TimeoutExpired:
        service.kill()
    said = service.communicate(timeout=120)[0]
    assert service.returncode in (0, -9), said
    return service.returncode == 0
