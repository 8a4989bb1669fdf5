"""Devices that are not empty, and the service that finds sick ones. Real: both databases, samples
of simulated devices, pynvml, whose library is a stand-in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuspawner.core.errors import NoDeviceFree
from gpuspawner.devices.source import Sampled
from gpuspawner.monitoring.health import Signs
from gpuspawner.monitoring.health_service import FoundSymptoms
from gpuspawner.monitoring.models import Sample
from gpuspawner.service.health_monitor import HealthDuty, ProbesDevices
from gpuspawner.service.hub_client import HubClient
from gpuspawner.service.sampler import Sampling
from gpuspawner.service.worker import Tick
from gpuspawner.services import Broker
from tests.support.brokers import Clock, acquire, open_broker, problems, running, states
from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.machine import Machine
from tests.support.nvml.nvml_library import gpus
from tests.support.processes import PATIENCE
from tests.support.sickness import RATE, clock, told, trail, uuids


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    broker = open_broker(database_url, Clock(), **RATE)
    yield broker
    assert problems(broker.store) == []
    assert not any(finding.problem for finding in broker.audit()[0])
    broker.store.close()


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
    assert broker.leaks.judge_leaks() == []  # what ran may take a moment to end
    clock(broker).forward(seconds=30)
    first, _ = broker.leaks.judge_leaks()
    assert first.reason == "python3 (pid 4711) of no server of this hub"
    details = [view.detail for view in broker.overview().devices]
    assert details == [
        "used without a lease by python3 (pid 4711); in quarantine",
        "6.0 GB of its memory are held, and by no process in sight; in quarantine",
    ]
    script.write_text('{"1": {"held_bytes": 6442450944}}')
    clock(broker).forward(seconds=30)
    assert states(broker)[0] == "drained"  # until it is lifted, whoever looks
    assert broker.leaks.judge_leaks() == []
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
    broker.leaks.judge_leaks()
    clock(broker).forward(seconds=30)
    assert len(broker.leaks.judge_leaks()) == 1
    assert broker.devices.drain("0", actor="root", reason="I look at it")
    script.write_text('{"0": {"error": "It fell off the bus."}}')
    clock(broker).forward(seconds=30)
    assert (broker.leaks.judge_leaks(), states(broker)) == ([], ["unknown", "free"])
    script.unlink()
    clock(broker).forward(seconds=30)
    assert (broker.leaks.judge_leaks(), states(broker)) == ([], ["drained", "free"])
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
    tick = Tick(broker, HubClient("http://127.0.0.1:1", "none"), {}, logging.getLogger("test"))
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
    """Rounds until it is so; the samples come from a thread of their own."""

    async def go_on() -> None:
        await duty.round()
        while not condition():
            await asyncio.sleep(0.02)
            await duty.round()

    await asyncio.wait_for(go_on(), 60 * PATIENCE)


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
        found = {uuid: FoundSymptoms(its.take(), its.going_on) for uuid, its in signs.items()}
        return {change.uuid: change.event for change in broker.health.judge_health(found)}

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
