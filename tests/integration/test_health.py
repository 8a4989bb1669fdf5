"""Sick devices, from what is found to drain, warning, refund, probe and return. Real: both
databases, and processes that are killed or race."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from gpuspawner.broker import Broker
from gpuspawner.broker.health import Found
from gpuspawner.errors import ConfigError, NoDeviceFree
from gpuspawner.model import Lease, NoticeKind
from gpuspawner.telemetry.symptoms import Symptom
from tests.support.brokers import Clock, acquire, credits_of, open_broker, problems, running, states

RATE = {"gpu_rates": {"*": 60}, "opening_grant": 1000, "device_source": "simulated:2xT4"}
"""A credit a minute."""


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    broker = open_broker(database_url, Clock(), **RATE)
    yield broker
    assert problems(broker.store) == []
    assert not any(finding.problem for finding in broker.audit()[0])
    broker.store.close()


def clock(broker: Broker) -> Clock:
    assert isinstance(broker.clock, Clock)
    return broker.clock


def uuids(broker: Broker) -> list[str]:
    return [device.uuid for device in broker.look().devices]


def find(broker: Broker, uuid: str, *causes: str, lasting: bool = False, ago: float = 0) -> str:
    """Find these of a device, which began so many seconds ago; what became of it."""
    at = clock(broker)() - timedelta(seconds=ago)
    symptoms = tuple(Symptom(cause, f"it is {cause}", at, lasting) for cause in causes)
    going_on = frozenset(causes if lasting else ())
    return " ".join(each.event for each in broker.judge_health({uuid: Found(symptoms, going_on)}))


def told(broker: Broker, user: str) -> list[str]:
    return [n.body for n in broker.notices_of(user) if n.kind is NoticeKind.GPU_SICK]


def trail(broker: Broker) -> list[tuple[str, str, str]]:
    return [(each.actor, each.action, each.detail) for each in reversed(broker.trail())]


def test_from_the_fault_to_the_return(broker: Broker) -> None:
    lease = running(broker, "ada")
    uuid = lease.uuids[0]
    clock(broker).forward(minutes=20)
    broker.charge_all()
    assert find(broker, uuid, "lost", lasting=True, ago=60) == "sick"
    assert find(broker, uuid, "lost", lasting=True) == ""
    (body,) = told(broker, "ada")
    assert "GPU 0 (T4) is not well since 12:19" in body and "it is lost" in body
    assert "up to 13:19 (UTC), comes back when it has stopped" in body
    assert broker.sick_leases()[lease.id].uuid == uuid
    assert states(broker) == ["draining", "free"]

    clock(broker).forward(minutes=10)  # they go on for a while, and then stop
    assert broker.settle_sick() == 0
    broker.release(lease.id, ended_at=clock(broker)(), reason="stopped")
    assert credits_of(broker, "ada") == 970
    assert (broker.settle_sick(), broker.settle_sick()) == (1, 0)
    assert credits_of(broker, "ada") == 981
    assert broker.lease(lease.id).refunded == 11_000_000
    assert states(broker) == ["drained", "free"]
    running(broker, "bob")
    with pytest.raises(NoDeviceFree):
        acquire(broker, "cleo")

    assert find(broker, uuid) == "probe"
    assert broker.probed(uuid, "It computes wrongly.")
    assert find(broker, uuid) == ""
    clock(broker).forward(minutes=10)
    assert find(broker, uuid) == "probe"
    assert broker.probed(uuid)
    assert not broker.probed(uuid)
    assert acquire(broker, "cleo").uuids == (uuid,)
    assert trail(broker) == [
        ("health", "drain", "it is lost"),
        ("health", "refund", "11.00 credits to member:ada: a GPU was sick: it is lost"),
        ("health", "probe", "failed: It computes wrongly."),
        ("health", "undrain", "the probe passed"),
    ]
    assert broker.health()[uuid].state.verdict == "watch"


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
    broker.settle_sick()
    assert credits_of(broker, "ada") == 970 + back
    assert problems(broker.store) == []
    broker.store.close()


def test_no_more_comes_back_than_is_left(broker: Broker) -> None:
    lease = running(broker, "ada")
    clock(broker).forward(minutes=20)
    find(broker, lease.uuids[0], "xid link", ago=900)
    broker.release(lease.id, ended_at=clock(broker)(), reason="stopped")
    broker.refund(lease.id, 12_000_000, actor="root", reason="sorry")
    broker.settle_sick()
    assert credits_of(broker, "ada") == 1000
    assert broker.lease(lease.id).outcome == "refunded"


def test_who_stopped_just_before_it_was_noticed_is_told_too(broker: Broker) -> None:
    lease = running(broker, "ada")
    clock(broker).forward(minutes=20)
    broker.release(lease.id, ended_at=clock(broker)(), reason="stopped")
    clock(broker).forward(seconds=5)
    find(broker, lease.uuids[0], "xid link", ago=65)
    assert len(told(broker, "ada")) == 1
    broker.settle_sick()
    assert credits_of(broker, "ada") == 981


def test_what_an_admin_drains_or_takes_back_stays_so(broker: Broker) -> None:
    uuid = uuids(broker)[0]
    find(broker, uuid, "remap pending", lasting=True)
    assert broker.undrain("0", actor="root", reason="it will do")
    assert find(broker, uuid, "remap pending", lasting=True) == ""
    assert states(broker) == ["free", "free"]
    assert find(broker, uuid, "ecc") == "sick"
    assert broker.drain("0", actor="root", reason="to be replaced")
    clock(broker).forward(minutes=10)
    assert find(broker, uuid) == "probe"
    broker.probed(uuid)
    assert states(broker) == ["drained", "free"]
    assert broker.closures()[uuid].actor == "root"


def test_a_device_that_comes_and_goes_waits_for_an_admin(broker: Broker) -> None:
    uuid = uuids(broker)[0]
    for minutes in (10, 20, 40):
        assert find(broker, uuid, "lost") == "sick"
        clock(broker).forward(minutes=minutes)
        if find(broker, uuid) == "probe":
            broker.probed(uuid)
    assert broker.closures()[uuid].reason == "it is lost; it fell sick 3 times within a day"
    clock(broker).forward(days=30)
    assert find(broker, uuid) == ""


def test_mistakes_are_said_at_the_start(database_url: str) -> None:
    with pytest.raises(ConfigError, match=r"c.Broker.when_sick: 'hot' is to 'fry'"):
        open_broker(database_url, when_sick={"hot": "fry"})


def _settle(url: str, gate: Any, said: Any) -> None:
    """In a process of its own: judge the same find, and settle, together with the others."""
    broker = open_broker(url, Clock(), **RATE)
    gate.wait(60)
    try:
        find(broker, uuids(broker)[0], "xid link")
        broker.settle_sick()
        said.put("")
    except Exception as error:
        said.put(repr(error))
    finally:
        broker.store.close()


def test_several_services_tell_and_give_back_once(broker: Broker, database_url: str) -> None:
    """As when one is started while the one before still ends."""
    now = clock(broker)()
    clock(broker).now = now - timedelta(minutes=20)
    first, second = running(broker, "ada"), running(broker, "bob")
    clock(broker).now = now
    for lease in (first, second):
        find(broker, lease.uuids[0], "ecc", ago=300)
        broker.release(lease.id, ended_at=now, reason="stopped")
    spawn = multiprocessing.get_context("spawn")
    gate, said = spawn.Barrier(3), spawn.Queue()
    workers = [spawn.Process(target=_settle, args=(database_url, gate, said)) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert [said.get(timeout=90) for _ in workers] == [""] * 3
    for worker in workers:
        worker.join(timeout=30)
    assert [credits_of(broker, user) for user in ("ada", "bob")] == [985, 985]
    assert [len(told(broker, user)) for user in ("ada", "bob")] == [1, 1]


class Killed(BaseException):
    """The end of a process, as code meets it."""


@pytest.mark.parametrize("step", ["_note", "_warning"])
def test_who_is_killed_has_done_all_or_nothing(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    lease: Lease = running(broker, "ada")

    def die(*arguments: Any, **values: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(broker, step, die)
        with pytest.raises(Killed):
            find(broker, lease.uuids[0], "ecc")
    assert (broker.health(), broker.closures(), told(broker, "ada")) == ({}, {}, [])
    assert find(broker, lease.uuids[0], "ecc") == "sick"
    assert len(told(broker, "ada")) == 1
