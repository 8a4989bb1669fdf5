"""Who comes first, and who is killed in between. Real: processes, SQLite, PostgreSQL, SIGKILL."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.services import Services
from tests.support import racers
from tests.support.brokers import acquire, books, open_services, problems
from tests.support.parts import each_database
from tests.support.tier import Rounds

pytestmark = each_database


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    """Services of this process on the database that the others race for."""
    services = open_services(database_url)
    yield services
    services.store.close()


def kinds(answers: Iterable[str]) -> Counter[str]:
    """How often each kind of answer came."""
    return Counter(answer.partition(":")[0] for answer in answers)


def test_200_simultaneous_requests_for_4_gpus_get_4_leases(
    services: Services, database_url: str
) -> None:
    hubs = [(racers.many_ask, database_url, f"hub{number}", 50) for number in range(4)]
    assert kinds(chain(*racers.together(*hubs))) == {"lease": 4, "NoDeviceFree": 196}
    leases = services.leases.open_leases()
    assert len({uuid for lease in leases for uuid in lease.uuids}) == len(leases) == 4
    assert len(services.ledger.accounts()) == 4, "who was refused left no trace"
    assert problems(services.store) == []


LOSER = "NoDeviceFree: The only GPU is in use."
PRICE = {"opening_grant": 1, "gpu_rates": {"*": 6}, "hold_minutes": 10}
"""What an account has covers the hold of one server."""


@pytest.mark.parametrize(
    ("servers", "settings", "answers"),
    [
        ([("anna", ""), ("bert", "")], {"device_source": "simulated:1xT4"}, ["lease", LOSER]),
        ([("anna", "lab")] * 3, {}, ["lease", *["ServerHasLease"] * 2]),
        ([("anna", "one"), ("anna", "two")], PRICE, ["lease", "NoCredits"]),
    ],
    ids=["members and the only GPU", "starts of one server", "servers and their credits"],
)
def test_one_of_several_simultaneous_starts_gets_the_lease(
    services: Services,
    database_url: str,
    servers: list[tuple[str, str]],
    settings: dict[str, Any],
    answers: list[str],
) -> None:
    """In each round all ask at once; whoever got the lease gives it back."""
    each = [
        (racers.one_asks_again_and_again, database_url, user, name, 6, settings)
        for user, name in servers
    ]
    for got in zip(*racers.together(*each), strict=True):
        ordered = sorted(got, key=lambda answer: answer != "lease")
        assert all(map(str.startswith, ordered, answers)), got
    assert services.leases.open_leases() == [] and len(services.leases.of_account(None)) == 6
    if settings is PRICE:
        assert services.ledger.member("anna").balance == MICRO
    assert problems(services.store) == []


def test_concurrent_grants_charges_and_releases_add_up(
    services: Services, database_url: str
) -> None:
    began = time.time()
    fast = racers.fast_services(database_url, began)
    fast.leases.confirm(acquire(fast, "anna", server="steady").id)
    lives = [(racers.lives_of_a_server, database_url, began, "anna", f"{n}", 10) for n in range(3)]
    ticks = [(racers.charges, database_url, began, 12)] * 2
    *costs, some, others = racers.together(*lives, *ticks)

    assert some + others >= 12, "there was something to charge all the time"
    assert all(len(own) == 10 for own in costs), "there is a device for each"
    (steady,) = fast.leases.open_leases()
    steady = fast.leases.release(steady.id, ended_at=fast.clock(), reason="stopped")
    anna = services.ledger.member("anna")
    assert anna.balance == 10_000 * MICRO - sum(chain(*costs)) - steady.charged
    assert anna.held == 0
    assert problems(services.store) == []


def test_killed_writer_leaves_the_database_consistent(
    services: Services, database_url: str, rounds: Rounds, chance: random.Random
) -> None:
    """Nothing is half-written, nobody waits for the dead, and the books are right."""
    began = time.time()
    open_at_death = 0
    for number in range(rounds(200)):
        user = f"user{number % 3}"
        victim = racers.Victim(racers.work_until_killed, database_url, began, user)
        for _ in range(1 + chance.randrange(3)):  # on a slow machine too there is what can break
            victim.wait_round()
        time.sleep(chance.uniform(0, 0.1))
        victim.kill()

        ended = services.leases.of_account(None, limit=100_000)
        failed = {lease.id for lease in ended if lease.end_reason == racers.FAILED}
        assert problems(services.store, failed) == []
        open_leases = services.leases.open_leases()
        open_at_death += bool(open_leases)
        assert all(len(lease.devices) == 2 for lease in open_leases)
        # The dead keep nobody out: who waits for a lock is refused in the end.
        assert services.ledger.grant("member:user0", 1, actor="admin", reason="gift")
    assert open_at_death, "some died with leases"
    transfers = {row.transfer_id for row in books(services.store).postings}
    assert len(transfers) > rounds(200) * 3, "there was work that could break"
