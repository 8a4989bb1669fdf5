"""What devices did, remembered, and how much of what was held worked. Real: both databases; the
sampling thread in a process of its own, through pynvml, whose library is a stand-in."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.devices.simulated import SimulatedDevices
from gpuspawner.devices.source import SamplingSource
from gpuspawner.leases.models import Lease, LeasedDevice, LeaseState, Sharing
from gpuspawner.monitoring.metrics import HubCollector
from gpuspawner.monitoring.models import HOUR, MINUTE, DeviceUse
from gpuspawner.monitoring.repository import LeaseUtilization
from gpuspawner.monitoring.service import MonitoringService
from gpuspawner.service.device_monitor import MOST_MINUTES, GPUSampler, Sampling
from gpuspawner.service.hub_client import HubClient
from gpuspawner.service.worker import Tick
from gpuspawner.services import Services, utcnow
from tests.support.brokers import T0, Clock, Make, acquire, open_services, running
from tests.support.in_step import InStep
from tests.support.leases import lease_of
from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.nvml_library import gpus
from tests.support.parts import each_database
from tests.support.processes import wait_for

KEEP = (timedelta(days=14), timedelta(days=400))


@pytest.fixture
def services(make: Make) -> Services:
    return make(opening_grant=1000, gpu_rates={"*": 1})


@pytest.fixture
def monitoring(services: Services) -> MonitoringService:
    return services.monitoring


def minute(number: int, uuid: str = "GPU-a", **fields: Any) -> DeviceUse:
    """The minute that begins so many after T0."""
    made: dict[str, Any] = {"samples": 60, "known": 60, "busy": 30, "measured": 60, "use_sum": 3000}
    since = T0 + timedelta(minutes=number)
    return DeviceUse(uuid=uuid, since=since, seconds=MINUTE, **(made | fields))


@each_database
def test_stored_minute_is_read_back_or_merged_with_itself(monitoring: MonitoringService) -> None:
    full = minute(
        *(0, "GPU-a"),
        use_max=97,
        memory_max=2**40,
        powered=60,
        milliwatts_sum=60 * 700_000,
        celsius_max=81,
        sm_mhz_max=1980,
        throttle=0x64,
        ecc_errors=2,
        xids=(13, 79),
        processes=3,
        strangers=1,
        error="The GPU is lost.",
    )
    monitoring.remember_use([full, minute(0, "GPU-b", celsius_max=None)])
    first, second = monitoring.use_between(T0, T0 + timedelta(minutes=1))
    assert first == full
    assert (second.uuid, second.celsius_max, second.xids) == ("GPU-b", None, ())
    of_one = monitoring.use_between(T0, T0 + timedelta(minutes=1), uuids=["GPU-b"])
    assert of_one == [second]
    # The clock was set back, or the service was started anew within the minute.
    monitoring.remember_use([minute(1, samples=20, known=20, busy=20, measured=20, use_sum=2000)])
    monitoring.remember_use([minute(1, samples=30, known=30, busy=0, measured=30, use_sum=0)])
    (found,) = monitoring.use_between(T0 + timedelta(minutes=1), T0 + timedelta(hours=1))
    assert (found.samples, found.busy, found.use) == (50, 20, 40.0)


def test_current_use_is_the_latest_recent_minute(
    monitoring: MonitoringService, clock: Clock
) -> None:
    monitoring.remember_use([minute(0, use_sum=0), minute(1), minute(1, "GPU-b")])
    clock.forward(minutes=2)
    now = {uuid: minute.use for uuid, minute in monitoring.use_now().items()}
    assert now == {"GPU-a": 50.0, "GPU-b": 50.0}
    clock.forward(minutes=10)
    assert monitoring.use_now() == {}


def session(begins: float, length: float) -> Lease:
    """One of GPU-a that began and ended so many minutes after T0, and that length later."""
    start = T0 + timedelta(minutes=begins)
    place = LeasedDevice(uuid="GPU-a", slot=0, index=0, model="T4", memory_bytes=2**34)
    return lease_of(
        "ada",
        state=LeaseState.ENDED,
        granted_at=start,
        started_at=start,
        ended_at=start + timedelta(minutes=length),
        devices=(place,),
    )


def test_session_use_is_of_whole_minutes_or_hours_of_own_devices(
    monitoring: MonitoringService, clock: Clock
) -> None:
    monitoring.remember_use(
        [minute(n, use_sum=60 * n, use_max=n, memory_max=n) for n in range(600)]
    )
    monitoring.remember_use([minute(n, "GPU-b", use_max=999) for n in range(9)])
    clock.forward(hours=10)
    monitoring.tidy_use(*KEEP)
    found = monitoring.session_use(session(1.5, 5.5))  # of which 2 to 6 are whole
    assert list(found) == ["GPU-a"]
    assert (found["GPU-a"].use, found["GPU-a"].use_max, found["GPU-a"].memory_max) == (4.0, 6, 6)
    assert monitoring.session_use(session(700, 5)) == {}
    assert monitoring.session_use(replace(session(0, 9), started_at=None)) == {}
    long = monitoring.session_use(session(30, 8 * 60))["GPU-a"]  # 1:00 to 8:00 are whole hours
    assert (long.seconds, long.samples, long.memory_max) == (HOUR, 7 * 3600, 8 * 60 - 1)
    clock.forward(days=20)
    monitoring.tidy_use(*KEEP)  # the minutes are forgotten now
    old = monitoring.session_use(session(60, 60))["GPU-a"]
    assert (old.seconds, old.samples, old.memory_max) == (HOUR, 3600, 119)


@each_database
def test_hourly_use_is_aggregated_and_outlives_minutes(
    monitoring: MonitoringService, clock: Clock
) -> None:
    monitoring.remember_use([minute(n, busy=n % 2, memory_max=n) for n in range(150)])
    clock.forward(minutes=150)
    for _ in range(2):  # a second time is nothing
        monitoring.tidy_use(*KEEP)
        hours = monitoring.use_between(T0, T0 + timedelta(hours=9), seconds=HOUR)
        assert [(h.since, h.samples, h.busy, h.memory_max) for h in hours] == [
            (T0, 3600, 30, 59),
            (T0 + timedelta(hours=1), 3600, 30, 119),
        ]
    monitoring.remember_use([minute(7, samples=5, known=5, busy=5)])  # one that was late
    monitoring.tidy_use(*KEEP)
    hours = monitoring.use_between(T0, T0 + timedelta(hours=1), seconds=HOUR)
    assert [(h.samples, h.busy) for h in hours] == [(3605, 35)]
    clock.forward(days=15)
    monitoring.tidy_use(*KEEP)
    assert monitoring.use_between(T0, clock.now) == []
    hours = monitoring.use_between(T0, clock.now, seconds=HOUR)
    assert [h.samples for h in hours] == [3605, 3600, 1800]
    clock.forward(days=400)
    monitoring.tidy_use(*KEEP)
    assert monitoring.use_between(T0, clock.now, seconds=HOUR) == []


async def test_unavailable_store_loses_no_minutes(migrated_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "gpuspawner.sqlite"
    shutil.copy(migrated_file, file)
    services = open_services(f"sqlite:///{file}", device_source="simulated:1xT4")
    services.monitoring.remember_use([])
    minutes = (T0 + timedelta(minutes=n) for n in itertools.count())
    source = services.watch.source
    assert isinstance(source, SamplingSource)
    sampler = source.sampler()
    sampling = Sampling(sampler, lambda: next(minutes), 0.02, services.log)
    tick = Tick(
        services, HubClient("http://127.0.0.1:1", "no token"), {}, logging.getLogger("service")
    )
    duty = GPUSampler()
    sampling.start()
    try:
        file.rename(tmp_path / "away")
        wait_for(lambda: len(sampling.complete()) > 3, "complete minutes")
        await duty._write(tick, sampling)
        kept = sampling.complete()
        assert len(kept) > 3
        (tmp_path / "away").rename(file)
        await duty._write(tick, sampling)
        assert not set(map(id, kept)) & set(map(id, sampling.complete()))
    finally:
        sampling.stop(60)
    await duty._write(tick, sampling)
    assert sampling.complete() == []
    written = services.monitoring.use_between(T0, T0 + timedelta(days=9))
    assert [(each.since - T0) / timedelta(minutes=1) for each in written] == [*range(len(written))]
    assert len(written) > len(kept)
    services.store.close()


def test_unwritten_minutes_are_bounded() -> None:
    devices = SimulatedDevices("1xT4")
    sampling = Sampling(devices.sampler(), utcnow, 1.0, logging.getLogger("service"))
    sampling._complete.extend(minute(n) for n in range(MOST_MINUTES + 10))
    assert len(sampling.complete()) == MOST_MINUTES
    assert sampling.complete()[-1] == minute(MOST_MINUTES + 9)  # the oldest are given up


def test_program_in_step_with_the_samples_is_seen_at_work_and_at_rest() -> None:
    device = InStep(0.05)
    sampling = Sampling(device, utcnow, 0.05, logging.getLogger("service"))
    sampling.start()
    wait_for(device.is_over, "forty samples")
    assert {*device.uses} == {0, 100}


CHILD = """
import json, logging, sys
from gpuspawner.service import device_monitor
from gpuspawner.service.device_monitor import Sampling
from gpuspawner.services import utcnow
from gpuspawner.devices.nvml import NVMLDevices

device_monitor.KEPT_SECONDS = 10**6  # all that this test can take
sampling = Sampling(NVMLDevices().sampler(), utcnow, 0.05, logging.getLogger())
sampling.silent_after = 1.0
sampling.start()
for line in sys.stdin:
    if line == "stop\\n":
        sampling.stop(60)
    samples = {uuid: [each.use for each in some] for uuid, some in sampling.recent().items()}
    minutes = [[use.uuid, use.samples, use.use_sum] for use in sampling.complete()]
    print(json.dumps([samples, minutes, sampling.trouble()]), flush=True)
"""


class Child:
    """A process that samples the stand-in's fleet twenty times a second."""

    def __init__(self, library: Path, fleet: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env=os.environ | nvml.environment(library, fleet),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, word: str = "look") -> tuple[dict[str, list[Any]], list[list[Any]], str]:
        """What was sampled, the minutes that are complete, and what is wrong."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        samples, minutes, trouble = json.loads(self.process.stdout.readline())
        return samples, minutes, trouble

    def until(self, seen: Callable[[dict[str, list[Any]], str], object], what: str) -> None:
        def look() -> bool:
            samples, _, trouble = self.tell()
            return bool(seen(samples, trouble))

        wait_for(look, what)


def test_hanging_driver_is_reported_while_sampling_continues(tmp_path: Path) -> None:
    library = nvml.build_nvml_library(tmp_path / "lib")
    fleet = tmp_path / "fleet"
    first, second = (replace(gpu, use=(40, 0)) for gpu in gpus(2))
    nvml.write_fleet(fleet, [first, second])
    child = Child(library, fleet)
    try:
        child.until(lambda seen, trouble: len(seen.get(second.uuid, ())) > 3, "samples")
        hangs = replace(second, delays={"nvmlDeviceGetUtilizationRates": 3_000})
        nvml.write_fleet(fleet, [first, hangs])
        child.until(lambda seen, trouble: "has not answered" in trouble, "a word on the hanging")
        before = len(child.tell()[0][first.uuid])
        nvml.write_fleet(fleet, [first, replace(second, use=(90, 0))])
        child.until(
            lambda seen, trouble: not trouble and seen[second.uuid][-1] == 90, "an answer again"
        )
        assert len(child.tell()[0][first.uuid]) > before
        samples, minutes, _ = child.tell("stop")
        for uuid, some in samples.items():  # what was sampled is in a minute, to the last
            assert sum(count for of, count, _ in minutes if of == uuid) >= len(some)
        assert child.tell()[0] == samples
    finally:
        assert child.process.stdin
        child.process.stdin.close()
        child.process.wait(timeout=120)


AN_HOUR = timedelta(hours=1)


def work(
    services: Services, uuid: str, first: int, last: int, share: float, known: int = 60
) -> None:
    """Minutes from the first to the last after T0 in which a GPU worked in this part of them."""
    counts = {"known": known, "busy": round(known * share), "measured": 0, "use_sum": 0}
    services.monitoring.remember_use([minute(n, uuid, **counts) for n in range(first, last)])


def worked(
    services: Services, since: timedelta = timedelta(), until: timedelta = 24 * AN_HOUR
) -> dict:
    found = services.monitoring.worked_between(T0 + since, T0 + until)
    return {some.server.user: some for some in found}


def seconds(some: LeaseUtilization) -> tuple[int, int, int]:
    return round(some.held), round(some.measured), round(some.busy)


@each_database
def test_each_minute_counts_for_the_lease_holder(services: Services, clock: Clock) -> None:
    ada = running(services, "ada", 1)
    gpu = ada.uuids[0]
    clock.forward(minutes=30)
    services.leases.release(ada.id, ended_at=clock.now, reason="stopped")
    others = running(services, "bob", 4)
    clock.forward(minutes=60)
    work(services, gpu, 0, 30, 1.0)
    work(services, gpu, 30, 90, 0.25)
    for uuid in set(others.uuids) - {gpu}:
        work(services, uuid, 30, 60, 0.0, known=0)  # it did not tell
    found = worked(services)
    assert seconds(found["ada"]) == (1800, 1800, 1800)
    assert seconds(found["bob"]) == (4 * 3600, 3600, 900)
    assert found["bob"].rested == 2700
    assert (found["bob"].devices, found["bob"].until, found["bob"].model) == (4, None, "A100-80GB")
    # A part of the time: what was before and after is not counted.
    part = worked(services, timedelta(minutes=20), timedelta(minutes=40))
    assert seconds(part["ada"]) == (600, 600, 600)
    assert seconds(part["bob"]) == (2400, 600, 150)
    assert worked(services, 3 * AN_HOUR) == {}


@each_database
def test_hourly_use_replaces_deleted_minutes_in_reports(services: Services, clock: Clock) -> None:
    ada = running(services, "ada", 1)
    gpu = ada.uuids[0]
    clock.forward(hours=2, minutes=10)
    services.leases.release(ada.id, ended_at=clock.now, reason="stopped")
    bob = running(services, "bob", 1)
    clock.forward(hours=1, minutes=50)
    services.leases.release(bob.id, ended_at=clock.now, reason="stopped")
    clock.forward(hours=20)
    work(services, gpu, 0, 130, 0.5)
    work(services, gpu, 130, 240, 0.1)
    exact = worked(services)
    services.monitoring.tidy_use(timedelta(days=14), timedelta(days=400))
    assert worked(services) == exact, "hours beside minutes are counted once"
    services.monitoring.tidy_use(timedelta(hours=23.5), timedelta(days=400))
    assert worked(services) == exact, "an hour of which half the minutes are gone, then minutes"
    services.monitoring.tidy_use(timedelta(hours=1), timedelta(days=400))
    rough = worked(services)
    assert seconds(exact["ada"]) == (7800, 7800, 3900)
    # The third hour was Bob's for the most part, and the greater part of Ada's is told.
    assert seconds(rough["ada"]) == (7800, 7200, 3600)
    assert rough["bob"].measured == min(2 * 3600, exact["bob"].held)
    assert rough["bob"].busy == pytest.approx(600 + 360)
    rough_sum, exact_sum = (found["ada"].busy + found["bob"].busy for found in (rough, exact))
    assert rough_sum == pytest.approx(exact_sum)


def test_unmeasured_time_counts_as_neither_busy_nor_idle(services: Services, clock: Clock) -> None:
    running(services, "ada", 2)
    running(services, "cpu", 0)
    acquire(services, "never up", 1)
    clock.forward(hours=1)
    found = worked(services)
    assert set(found) == {"ada"}, "neither who has no GPU, nor whose server never started"
    assert seconds(found["ada"]) == (7200, 0, 0)
    assert found["ada"].rested == 0


@each_database
def test_slot_holds_its_part_of_the_time_and_is_not_measured(make: Make, clock: Clock) -> None:
    services = make(opening_grant=1000, device_source="simulated:2xT4", shared_devices={"T4": 3})
    slot = running(services, "anna", sharing=Sharing.SLOT)
    whole = running(services, "bert")
    assert slot.uuids != whole.uuids
    clock.forward(hours=1)
    uuids = (*slot.uuids, *whole.uuids)
    services.monitoring.remember_use([minute(n, uuid) for n in range(60) for uuid in uuids])
    found = {x.lease_id: x for x in services.monitoring.worked_between(T0, clock.now)}
    assert seconds(found[slot.id]) == (1200, 0, 0), "others may have worked there"
    assert seconds(found[whole.id]) == (3600, 3600, 1800)
    services.leases.release(slot.id, ended_at=clock.forward(seconds=7), reason="stopped")
    bounds = [T0, T0 + timedelta(seconds=1000), clock.now]
    parts = services.reports.use_by(bounds, "user")
    assert sum(part["anna"].micros for part in parts) == 3607 * 1_000_000 // 3
    assert parts[0]["anna"].gpu_seconds == 333 and parts[0]["bert"].gpu_seconds == 1000
    metrics = HubCollector(services).collect()
    used = next(metric for metric in metrics if metric.name == "gpuspawner_gpu_seconds")
    total = next(sample.value for sample in used.samples)
    assert total == pytest.approx(3607 + 3607 / 3)
