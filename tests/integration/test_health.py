"""Sick devices, from what is found to drain, warning, refund, probe and return. Real: both
databases, services that race and are killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import ConfigError, NoDeviceFree
from gpuspawner.db import schema as db_schema
from gpuspawner.devices.repository import SickLease
from gpuspawner.services import Broker
from tests.support import racers, sickness
from tests.support.brokers import Clock, acquire, credits_of, open_broker, problems, running, states
from tests.support.processes import wait_for
from tests.support.sickness import RATE, clock, find, told, trail, uuids
from tests.support.tier import Rounds


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    broker = open_broker(database_url, Clock(), **RATE)
    yield broker
    assert problems(broker.store) == []
    assert not any(finding.problem for finding in broker.audit()[0])
    broker.store.close()


def test_from_the_fault_to_the_return(broker: Broker) -> None:
    lease = running(broker, "ada")
    uuid = lease.uuids[0]
    clock(broker).forward(minutes=20)
    broker.ledger.charge_all()
    assert find(broker, uuid, "lost", lasting=True, ago=60) == "sick"
    assert find(broker, uuid, "lost", lasting=True) == ""
    (body,) = told(broker, "ada")
    assert "GPU 0 (T4) is not well since 12:19" in body and "it is lost" in body
    assert "up to 13:19 (UTC), comes back when it has stopped" in body
    (mine,) = broker.health.sick_of("ada")
    assert (mine.lease.id, mine.device.uuid, broker.health.sick_of("bob")) == (lease.id, uuid, [])
    assert states(broker) == ["draining", "free"]

    clock(broker).forward(minutes=10)  # they go on for a while, and then stop
    assert broker.health.settle_sick() == 0
    broker.release(lease.id, ended_at=clock(broker)(), reason="stopped")
    assert credits_of(broker, "ada") == 970
    assert (broker.health.settle_sick(), broker.health.settle_sick()) == (1, 0)
    assert credits_of(broker, "ada") == 981
    assert broker.lease(lease.id).refunded == 11_000_000
    assert states(broker) == ["drained", "free"]
    running(broker, "bob")
    with pytest.raises(NoDeviceFree):
        acquire(broker, "cleo")

    assert find(broker, uuid) == "probe"
    assert broker.health.probed(uuid, "It computes wrongly.")
    assert find(broker, uuid) == ""
    clock(broker).forward(minutes=10)
    assert find(broker, uuid) == "probe"
    assert broker.health.probed(uuid)
    assert not broker.health.probed(uuid)
    assert acquire(broker, "cleo").uuids == (uuid,)
    assert trail(broker) == [
        ("health", "drain", "it is lost"),
        ("health", "refund", "11.00 credits to member:ada: a GPU was sick: it is lost"),
        ("health", "probe", "failed: It computes wrongly."),
        ("health", "undrain", "the probe passed"),
    ]
    assert broker.health.device_states()[uuid].state.verdict == "watch"


def test_it_is_not_probed_while_somebody_has_it(broker: Broker) -> None:
    lease = running(broker, "ada")
    find(broker, lease.uuids[0], "ecc")
    clock(broker).forward(hours=5)
    assert find(broker, lease.uuids[0]) == ""
    broker.release(lease.id, reason="stopped")
    assert find(broker, lease.uuids[0]) == "probe"


def test_what_is_watched_is_given_out(broker: Broker) -> None:
    uuid = uuids(broker)[0]
    assert find(broker, uuid, "slowed", lasting=True) == "watch"
    assert find(broker, uuid, "xid program") == ""
    assert states(broker) == ["free", "free"]
    clock(broker).forward(hours=2)
    assert find(broker, uuid) == "fine"
    assert trail(broker) == []


@pytest.mark.parametrize(
    ("rule", "minutes", "back"),
    [("since_fault", 60, 10), ("since_fault", 4, 4), ("session", 60, 30), ("none", 60, 0)],
)
def test_what_comes_back(database_url: str, rule: str, minutes: int, back: int) -> None:
    settings = RATE | {"sick_refund": rule, "sick_refund_minutes": minutes}
    broker = open_broker(database_url, Clock(), **settings)
    lease = running(broker, "ada")
    clock(broker).forward(minutes=20)
    find(broker, lease.uuids[0], "xid link")
    assert ("comes back" in told(broker, "ada")[0]) is bool(back)
    clock(broker).forward(minutes=10)
    broker.release(lease.id, ended_at=clock(broker)(), reason="stopped")
    broker.health.settle_sick()
    assert credits_of(broker, "ada") == 970 + back
    assert problems(broker.store) == []
    broker.store.close()


def test_no_more_comes_back_than_is_left(broker: Broker) -> None:
    lease = running(broker, "ada")
    clock(broker).forward(minutes=20)
    find(broker, lease.uuids[0], "xid link", ago=900)
    broker.release(lease.id, ended_at=clock(broker)(), reason="stopped")
    broker.ledger.refund(lease.id, 12_000_000, actor="root", reason="sorry")
    broker.health.settle_sick()
    assert credits_of(broker, "ada") == 1000
    assert broker.lease(lease.id).outcome == "refunded"


def test_who_stopped_just_before_it_was_noticed_is_told_too(broker: Broker) -> None:
    lease = running(broker, "ada")
    clock(broker).forward(minutes=20)
    broker.release(lease.id, ended_at=clock(broker)(), reason="stopped")
    clock(broker).forward(seconds=5)
    find(broker, lease.uuids[0], "xid link", ago=65)
    assert len(told(broker, "ada")) == 1
    broker.health.settle_sick()
    assert credits_of(broker, "ada") == 981


def test_what_an_admin_drains_or_takes_back_stays_so(broker: Broker) -> None:
    uuid = uuids(broker)[0]
    find(broker, uuid, "remap pending", lasting=True)
    assert broker.devices.undrain("0", actor="root", reason="it will do")
    assert find(broker, uuid, "remap pending", lasting=True) == ""
    assert states(broker) == ["free", "free"]
    assert find(broker, uuid, "ecc") == "sick"
    assert broker.devices.drain("0", actor="root", reason="to be replaced")
    clock(broker).forward(minutes=10)
    assert find(broker, uuid) == "probe"
    broker.health.probed(uuid)
    assert states(broker) == ["drained", "free"]
    assert broker.closures()[uuid].actor == "root"


def test_a_device_that_comes_and_goes_waits_for_an_admin(broker: Broker) -> None:
    uuid = uuids(broker)[0]
    for minutes in (10, 20, 40):
        assert find(broker, uuid, "lost") == "sick"
        clock(broker).forward(minutes=minutes)
        if find(broker, uuid) == "probe":
            broker.health.probed(uuid)
    assert broker.closures()[uuid].reason == "it is lost; it fell sick 3 times within a day"
    clock(broker).forward(days=30)
    assert find(broker, uuid) == ""


def test_mistakes_are_said_at_the_start(database_url: str) -> None:
    with pytest.raises(ConfigError, match=r"c.GPUHealth.actions: 'hot' is to 'fry'"):
        open_broker(database_url, when_sick={"hot": "fry"})


def test_several_services_tell_and_give_back_once(broker: Broker, database_url: str) -> None:
    """As when one is started while the one before still ends."""
    now = clock(broker)()
    clock(broker).now = now - timedelta(minutes=20)
    lease = running(broker, "ada")
    clock(broker).now = now
    others = [open_broker(database_url, Clock(now), **RATE) for _ in range(4)]
    gate = threading.Barrier(len(others))

    def work(other: Broker) -> str:
        gate.wait(120)
        return find(other, lease.uuids[0], "ecc", ago=300)

    def end(other: Broker) -> int:
        gate.wait(120)
        return other.health.settle_sick()

    with ThreadPoolExecutor(len(others)) as pool:
        assert sorted(pool.map(work, others)) == ["", "", "", "sick"]
        broker.release(lease.id, ended_at=now, reason="stopped")
        assert sum(pool.map(end, others)) >= 1
    for other in others:
        other.store.close()
    assert (credits_of(broker, "ada"), len(told(broker, "ada"))) == (985, 1)
    assert [what for _, what, _ in trail(broker)] == ["drain", "refund"]


def test_services_killed_in_the_midst_of_it_do_all_or_nothing(
    broker: Broker, database_url: str, rounds: Rounds, chance: random.Random
) -> None:
    uuid = uuids(broker)[0]
    broker.ledger.open_account("ada")
    broker.ledger.grant("member:ada", 10**12, actor="root", reason="for many sessions")
    for life in range(1, 1 + rounds(60)):
        ready, theirs = racers.FORKSERVER.Pipe()
        began = Clock(clock(broker)() + timedelta(days=life * 10_000))
        work = sickness.fall_sick_and_recover
        victim = racers.FORKSERVER.Process(
            target=work, args=(theirs, database_url, began), daemon=True
        )
        victim.start()
        assert ready.poll(60) and ready.recv() == "ready"
        wait_for(partial(sick_leases, broker), "the first that falls sick", interval=0.02)
        time.sleep(chance.uniform(0.0, 0.3))
        os.kill(victim.pid or 0, signal.SIGKILL)
        victim.join(timeout=120)
        known = broker.health.device_states().get(uuid)
        sick = known is not None and known.state.verdict == "sick"
        assert sick == (uuid in broker.closures())
        assert len(told(broker, "ada")) == len(sick_leases(broker))
    for lease in broker.open_leases():
        broker.release(lease.id, reason="stopped")
    broker.health.settle_sick()
    found = sick_leases(broker)
    for each in found:
        assert broker.lease(each.lease_id).refunded == each.refunded
        assert each.refunded in (0, 5_000_000)  # killed before the end was proved, or after


def sick_leases(broker: Broker) -> list[SickLease]:
    """All that ever were."""
    with broker.store.read() as connection:
        rows = connection.execute(sa.select(db_schema.sick_leases)).mappings()
        return [SickLease(**row) for row in rows]
