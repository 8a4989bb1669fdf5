"""Sick devices, from what is found to drain, warning, refund, probe and return. Real: both
databases, services that race and are killed, samples of simulated devices, pynvml."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from gpuspawner.accounting.health import HealthDuty, ProbesDevices
from gpuspawner.accounting.hub import Hub
from gpuspawner.accounting.sampling import Sampling
from gpuspawner.accounting.tick import Tick
from gpuspawner.broker import Broker
from gpuspawner.broker.health import Found
from gpuspawner.devices.base import Sampled
from gpuspawner.errors import ConfigError, NoDeviceFree
from gpuspawner.model import NoticeKind
from gpuspawner.store import schema_health
from gpuspawner.store.health import SickLease
from gpuspawner.telemetry import Sample
from gpuspawner.telemetry.symptoms import Signs, Symptom
from tests.support import racers, sickness
from tests.support.brokers import Clock, acquire, credits_of, open_broker, problems, running, states
from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.machine import Machine
from tests.support.nvml.nvml_library import gpus
from tests.support.processes import wait_for
from tests.support.soak import rounds

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
    return [n.body for n in broker.notices_of(user, 10_000) if n.kind is NoticeKind.GPU_SICK]


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
    (mine,) = broker.sick_of("ada")
    assert (mine.lease.id, mine.device.uuid, broker.sick_of("bob")) == (lease.id, uuid, [])
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


def test_several_services_tell_and_give_back_once(broker: Broker, database_url: str) -> None:
    """As when one is started while the one before still ends."""
    now = clock(broker)()
    clock(broker).now = now - timedelta(minutes=20)
    lease = running(broker, "ada")
    clock(broker).now = now
    others = [open_broker(database_url, Clock(now), **RATE) for _ in range(4)]
    gate = threading.Barrier(len(others))

    def work(other: Broker) -> str:
        gate.wait(60)
        return find(other, lease.uuids[0], "ecc", ago=300)

    def end(other: Broker) -> int:
        gate.wait(60)
        return other.settle_sick()

    with ThreadPoolExecutor(len(others)) as pool:
        assert sorted(pool.map(work, others)) == ["", "", "", "sick"]
        broker.release(lease.id, ended_at=now, reason="stopped")
        assert sum(pool.map(end, others)) >= 1
    for other in others:
        other.store.close()
    assert (credits_of(broker, "ada"), len(told(broker, "ada"))) == (985, 1)
    assert [what for _, what, _ in trail(broker)] == ["drain", "refund"]


@pytest.mark.soak
def test_services_killed_in_the_midst_of_it_do_all_or_nothing(
    broker: Broker, database_url: str
) -> None:
    racers.FORKSERVER.set_forkserver_preload(["tests.support.sickness"])
    chance = random.Random(database_url.partition(":")[0])
    uuid = uuids(broker)[0]
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
        victim.join(timeout=30)
        known = broker.health().get(uuid)
        sick = known is not None and known.state.verdict == "sick"
        assert sick == (uuid in broker.closures())
        assert len(told(broker, "ada")) == len(sick_leases(broker))
    for lease in broker.open_leases():
        broker.release(lease.id, reason="stopped")
    broker.settle_sick()
    found = sick_leases(broker)
    for each in found:
        assert broker.lease(each.lease_id).refunded == each.refunded
        assert each.refunded in (0, 5_000_000)  # killed before the end was proved, or after


def sick_leases(broker: Broker) -> list[SickLease]:
    """All that ever were."""
    with broker.store.read() as connection:
        rows = connection.execute(sa.select(schema_health.sick_leases)).mappings()
        return [SickLease(**row) for row in rows]


# Something of nobody's.


def test_what_holds_a_free_gpu_keeps_it_out_until_it_is_gone(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.json"
    monkeypatch.setenv("GPUSPAWNER_SIMULATION", str(script))
    lease = running(broker, "ada")
    script.write_text('{"0": {"processes": [[4711, "python3"]]}, "1": {"held_bytes": 6442450944}}')
    clock(broker).forward(minutes=1)
    assert states(broker) == ["leased", "occupied"]
    broker.release(lease.id, ended_at=clock(broker)(), reason="stopped")
    with pytest.raises(NoDeviceFree, match="2 are used by programs outside the hub"):
        acquire(broker, "bob")  # at once: the very look that grants sees it
    assert broker.judge_leaks() == []  # what ran may take a moment to end
    clock(broker).forward(seconds=30)
    first, _ = broker.judge_leaks()
    assert first.reason == "python3 (pid 4711) of no server of this hub"
    details = [view.detail for view in broker.overview().devices]
    assert details == [
        "used without a lease by python3 (pid 4711); in quarantine",
        "6.0 GB of its memory are held, and by no process in sight; in quarantine",
    ]
    script.write_text('{"1": {"held_bytes": 6442450944}}')
    clock(broker).forward(seconds=30)
    assert states(broker)[0] == "drained"  # until it is lifted, whoever looks
    assert broker.judge_leaks() == []
    assert states(broker) == ["free", "occupied"]
    assert [(who, what) for who, what, _ in trail(broker)] == [
        ("leak", "quarantine"),
        ("leak", "quarantine"),
        ("leak", "undrain"),
    ]


def test_a_quarantine_is_no_drain_of_an_admin_s(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.json"
    monkeypatch.setenv("GPUSPAWNER_SIMULATION", str(script))
    script.write_text('{"0": {"held_bytes": 6442450944}}')
    broker.judge_leaks()
    clock(broker).forward(seconds=30)
    assert len(broker.judge_leaks()) == 1
    assert broker.drain("0", actor="root", reason="I look at it")
    script.write_text('{"0": {"error": "It fell off the bus."}}')
    clock(broker).forward(seconds=30)
    assert (broker.judge_leaks(), states(broker)) == ([], ["unknown", "free"])
    script.unlink()
    clock(broker).forward(seconds=30)
    assert (broker.judge_leaks(), states(broker)) == ([], ["drained", "free"])
    assert broker.closures()[uuids(broker)[0]].actor == "root"


# The service: real samples of simulated devices, whose faults are scripted.


async def test_the_service_finds_drains_probes_and_returns(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.json"
    monkeypatch.setenv("GPUSPAWNER_SIMULATION", str(script))
    broker = open_broker(database_url, sick_quiet_minutes=0.005, **RATE)
    source = broker.watch.source
    assert isinstance(source, Sampled)
    sampler = source.sampler()
    sampling = Sampling(sampler, broker.clock, 0.05, logging.getLogger("test"))
    tick = Tick(broker, Hub("http://127.0.0.1:1", "none"), {}, logging.getLogger("test"))
    service = ProbesDevices()
    duty = service.health_duty(tick, sampling, sampler)
    lease = running(broker, "ada")
    sampling.start()
    try:
        script.write_text('{"0": {"xids": [31]}}')  # a member's program made a mistake
        await until(duty, lambda: 31 in seen_xids(sampling))
        assert states(broker) == ["leased", "free"]
        script.write_text('{"0": {"xids": [79], "probe": "It computes wrongly."}}')
        await until(duty, lambda: states(broker) == ["draining", "free"])
        assert "Xid 79: it lost power, NVLink or the bus" in told(broker, "ada")[0]
        broker.release(lease.id, reason="stopped")
        await until(duty, lambda: "failed: It computes wrongly" in [x[2] for x in trail(broker)])
        assert states(broker) == ["drained", "free"]
        script.write_text("{}")
        await until(duty, lambda: states(broker) == ["free", "free"])
    finally:
        await duty.close()
        sampling.stop()
        broker.store.close()


async def until(duty: HealthDuty, condition: Callable[[], bool]) -> None:
    """Rounds until it is so."""
    for _ in range(600):
        await duty.round()
        if condition():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("It never came.")


def seen_xids(sampling: Sampling) -> set[int]:
    return {xid for some in sampling.recent().values() for each in some for xid in each.xids}


def test_a_lost_gpu_that_comes_back_under_another_index_is_the_same(
    broker: Broker, tmp_path: Path
) -> None:
    """Through pynvml, whose library is a stand-in: what falls off the bus is sick, and nonsense of
    one reading is nothing."""
    machine = Machine(nvml.build_nvml_library(tmp_path), tmp_path / "fleet")
    signs: dict[str, Signs] = {}

    def look(seconds: int) -> dict[str, str]:
        for _ in range(seconds):
            for sample in machine.sample():
                fields = {"uuid", "index", "celsius", "ecc_errors", "error"}
                values = {name: value for name, value in sample.items() if name in fields}
                values["xids"] = tuple(sample["xids"])
                its = signs.setdefault(sample["uuid"], Signs())
                its.add([Sample(at=machine.now, **values)])
        found = {uuid: Found(its.take(), its.going_on) for uuid, its in signs.items()}
        return {change.uuid: change.event for change in broker.judge_health(found)}

    first, second = gpus(2)
    try:
        machine.has(first, second)
        assert look(3) == {}
        machine.has(replace(first, use=(4_000_000, 0)), second)  # nonsense
        assert look(5) == {}
        machine.has(first, replace(second, fails={"nvmlDeviceGetMemoryInfo": nvml.GPU_IS_LOST}))
        assert look(40) == {second.uuid: "sick"}
        machine.has(second, first)  # it is back, and first now
        assert look(5) == {}
        clock(broker).forward(minutes=10)
        assert look(3) == {second.uuid: "probe"}
    finally:
        machine.end()
