"""Devices that are not empty, and the service that finds sick ones. Real: SQLite, samples
of simulated devices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuspawner.core.errors import NoDeviceFree
from gpuspawner.devices.source import SamplingSource
from gpuspawner.monitoring import health_service
from gpuspawner.service.device_monitor import HealthDuty, Sampling, health_duty
from gpuspawner.service.hub_client import HubClient
from gpuspawner.service.worker import Tick
from gpuspawner.services import Services
from tests.support.brokers import (
    Clock,
    Make,
    acquire,
    broken_invariants,
    open_services,
    running,
    states,
)
from tests.support.processes import PATIENCE
from tests.support.sickness import RATE, told, trail, uuids


@pytest.fixture
def services(make: Make) -> Iterator[Services]:
    yield (services := make(**RATE))
    assert broken_invariants(services) == {}


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Say in JSON what the simulated devices show."""
    script = tmp_path / "script.json"
    monkeypatch.setenv("GPUSPAWNER_SIMULATION", str(script))
    return script.write_text


# Something of nobody's.


def test_leaking_device_is_quarantined_until_it_is_empty(
    services: Services, clock: Clock, show: Callable[[str], object]
) -> None:
    lease = running(services, "ada")
    show('{"0": {"processes": [[4711, "python3"]]}, "1": {"held_bytes": 6442450944}}')
    clock.forward(minutes=1)
    assert states(services) == ["leased", "occupied"]
    services.leases.release(lease.id, ended_at=services.clock(), reason="stopped")
    with pytest.raises(NoDeviceFree, match="2 are used by programs outside the hub"):
        acquire(services, "bob")  # at once: the very look that grants sees it
    assert services.leaks.judge_leaks() == []  # what ran may take a moment to end
    clock.forward(seconds=30)
    first, _ = services.leaks.judge_leaks()
    assert first.reason == "python3 (pid 4711), not from any server of this hub"
    details = [view.detail for view in services.monitoring.overview().devices]
    assert details == [
        "used without a lease by python3 (pid 4711); in quarantine",
        "6.0 GB of its memory are in use, but by no visible process; in quarantine",
    ]
    show('{"1": {"held_bytes": 6442450944}}')
    clock.forward(seconds=30)
    assert states(services)[0] == "drained"  # until it is lifted, whoever looks
    assert services.leaks.judge_leaks() == []
    assert states(services) == ["free", "occupied"]
    quarantine, undrain = ("leak", "quarantine"), ("leak", "undrain")
    assert [line[:2] for line in trail(services)] == [quarantine, quarantine, undrain]


def test_quarantine_does_not_override_an_admin_drain(
    services: Services, clock: Clock, show: Callable[[str], object]
) -> None:
    show('{"0": {"held_bytes": 6442450944}}')
    services.leaks.judge_leaks()
    clock.forward(seconds=30)
    assert len(services.leaks.judge_leaks()) == 1
    assert services.devices.drain("0", actor="root", reason="I look at it")
    show('{"0": {"error": "It fell off the bus."}}')
    clock.forward(seconds=30)
    assert (services.leaks.judge_leaks(), states(services)) == ([], ["unknown", "free"])
    show("{}")
    clock.forward(seconds=30)
    assert (services.leaks.judge_leaks(), states(services)) == ([], ["drained", "free"])
    assert services.devices.closures()[uuids(services)[0]].actor == "root"


# The service: real samples of simulated devices, whose faults are scripted.


async def test_service_drains_probes_and_returns_sick_devices(
    database_url: str, show: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_service, "QUIET_MINUTES", 0.005)
    services = open_services(database_url, **RATE)
    source = services.watch.source
    assert isinstance(source, SamplingSource)
    sampler = source.sampler()
    sampling = Sampling(sampler, services.clock, 0.05, logging.getLogger("test"))
    tick = Tick(services, HubClient("http://127.0.0.1:1", "none"), {}, logging.getLogger("test"))
    duty = health_duty(tick, sampling, sampler)
    lease = running(services, "ada")
    sampling.start()
    try:
        show('{"0": {"xids": [31]}}')  # a member's program made a mistake
        await until(duty, lambda: 31 in seen_xids(sampling))
        assert states(services) == ["leased", "free"]
        show('{"0": {"xids": [79], "probe": "It computes wrongly."}}')
        await until(duty, lambda: states(services) == ["draining", "free"])
        assert "Xid 79: it lost power, NVLink or the bus" in told(services, "ada")[0]
        services.leases.release(lease.id, reason="stopped")
        await until(duty, lambda: "failed: It computes wrongly" in [x[2] for x in trail(services)])
        assert states(services) == ["drained", "free"]
        show("{}")
        await until(duty, lambda: states(services) == ["free", "free"])
    finally:
        await duty.close()
        sampling.stop()
        services.store.close()


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
