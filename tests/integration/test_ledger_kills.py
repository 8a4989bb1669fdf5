"""Killed at a thousand random points of grant, hold, tick, settlement and refund.

Real: processes, SQLite, PostgreSQL, SIGKILL. Nothing is lost, nothing doubled, and the totals
are exact against what the leases' own rows say.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from gpuspawner.services import Broker
from tests.support import racers, spending
from tests.support.brokers import problems
from tests.support.processes import wait_for
from tests.support.tier import Rounds

USERS = ("anna", "bert")
LOOKS = 10
"""How often in between the books are looked at."""


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    broker = spending.spender(database_url, time.time())
    broker.ledger.open_account("nobody")  # the tables are there before the first victim is
    yield broker
    broker.store.close()


def start(
    url: str, began: float, user: str, life: int, journal: Path
) -> tuple[ForkServerProcess, Connection]:
    """One who spends; it says when it begins."""
    ready, theirs = racers.FORKSERVER.Pipe()
    victim = racers.FORKSERVER.Process(
        target=spending.spend_until_killed,
        args=(theirs, url, began, user, life, str(journal)),
        daemon=True,
    )
    victim.start()
    return victim, ready


def written(journal: Path, before: int, lines: int) -> bool:
    """Whether so many lines came since the journal had ``before`` bytes."""
    return not lines or (journal.exists() and journal.read_bytes()[before:].count(b"\n") >= lines)


def test_killed_among_grants_holds_ticks_settlements_and_refunds(
    broker: Broker, database_url: str, tmp_path: Path, rounds: Rounds, chance: random.Random
) -> None:
    kills = rounds(1000)
    began = time.time()
    journal = tmp_path / "journal"
    for life in range(kills // len(USERS)):
        before = journal.stat().st_size if journal.exists() else 0
        victims = [start(database_url, began, user, life, journal) for user in USERS]
        for victim, ready in victims:
            assert ready.poll(60) and ready.recv() == "working"
            # Some are killed in their first steps, others after a few rounds.
            wait_for(partial(written, journal, before, chance.randrange(5)), "work", interval=0.002)
            time.sleep(chance.uniform(0, 0.03))
            assert victim.pid is not None and victim.is_alive()
            os.kill(victim.pid, signal.SIGKILL)
        for victim, ready in victims:
            victim.join(timeout=120)
            ready.close()
        if life % max(1, kills // len(USERS) // LOOKS) == 0:
            said = spending.acknowledged(journal)
            assert spending.lost_or_doubled(database_url, said["gift"], said["ended"]) == []
            assert problems(broker.store) == []

    for leftover in broker.open_leases():
        broker.release(leftover.id, reason="its hub was killed")
    said = spending.acknowledged(journal)
    assert spending.lost_or_doubled(database_url, said["gift"], said["ended"]) == []
    findings, rows = broker.audit()
    assert [finding.problem for finding in findings if finding.problem] == []
    assert problems(broker.store) == []
    assert rows["leases"] > len(said["ended"]) > kills // 4, "there was work that could break"
    kinds = broker.store.run(
        lambda c: set(c.exec_driver_sql("SELECT DISTINCT kind FROM transfers").scalars())
    )
    assert kinds == {"grant", "charge", "refund"}
