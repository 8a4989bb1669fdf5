"""What devices did, remembered. Real: both databases; the sampling thread in a process of its own,
through pynvml, whose library is a stand-in."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.devices.simulated import SimulatedDevices
from gpuspawner.devices.source import Sampled
from gpuspawner.leases.models import Lease, LeasedDevice, LeaseState
from gpuspawner.monitoring.models import HOUR, MINUTE, DeviceUse
from gpuspawner.service.device_monitor import SamplesUse
from gpuspawner.service.hub_client import HubClient
from gpuspawner.service.sampler import MOST_MINUTES, Sampling
from gpuspawner.service.worker import Tick
from gpuspawner.services import Broker, utcnow
from tests.support.brokers import T0, Clock, open_broker
from tests.support.leases import lease_of
from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.nvml_library import gpus
from tests.support.processes import wait_for

KEEP = (timedelta(days=14), timedelta(days=400))


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    broker = open_broker(database_url, Clock())
    yield broker
    broker.store.close()


def minute(number: int, uuid: str = "GPU-a", **fields: Any) -> DeviceUse:
    """The minute that begins so many after T0."""
    made: dict[str, Any] = {"samples": 60, "known": 60, "busy": 30, "measured": 60, "use_sum": 3000}
    since = T0 + timedelta(minutes=number)
    return DeviceUse(uuid=uuid, since=since, seconds=MINUTE, **(made | fields))


def clock(broker: Broker) -> Clock:
    assert isinstance(broker.clock, Clock)
    return broker.clock


def test_a_minute_comes_back_as_it_was(broker: Broker) -> None:
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
    broker.monitoring.remember_use([full, minute(0, "GPU-b", celsius_max=None)])
    first, second = broker.monitoring.use_between(T0, T0 + timedelta(minutes=1))
    assert first == full
    assert (second.uuid, second.celsius_max, second.xids) == ("GPU-b", None, ())
    assert broker.monitoring.use_between(T0, T0 + timedelta(minutes=1), uuids=["GPU-b"]) == [second]
    assert broker.monitoring.use_between(T0 + timedelta(minutes=1), T0 + timedelta(hours=1)) == []


def test_a_minute_that_comes_twice_has_both(broker: Broker) -> None:
    """The clock was set back, or the service was started anew within the minute."""
    broker.monitoring.remember_use(
        [minute(0, samples=20, known=20, busy=20, measured=20, use_sum=2000)]
    )
    broker.monitoring.remember_use(
        [minute(0, samples=30, known=30, busy=0, measured=30, use_sum=0)]
    )
    (found,) = broker.monitoring.use_between(T0, T0 + timedelta(minutes=1))
    assert (found.samples, found.busy, found.use) == (50, 20, 40.0)


def test_what_a_device_does_now_is_its_last_minute_and_no_old_one(broker: Broker) -> None:
    broker.monitoring.remember_use([minute(0, use_sum=0), minute(1), minute(1, "GPU-b")])
    clock(broker).forward(minutes=2)
    assert {u: m.use for u, m in broker.monitoring.use_now().items()} == {
        "GPU-a": 50.0,
        "GPU-b": 50.0,
    }
    clock(broker).forward(minutes=10)
    assert broker.monitoring.use_now() == {}


def session(broker: Broker, begins: float, length: float) -> Lease:
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


def test_a_session_is_told_by_whole_minutes_of_its_own_devices(broker: Broker) -> None:
    broker.monitoring.remember_use(
        [minute(n, use_sum=60 * n, use_max=n, memory_max=n) for n in range(9)]
    )
    broker.monitoring.remember_use([minute(n, "GPU-b", use_max=99) for n in range(9)])
    found = broker.monitoring.session_use(session(broker, 1.5, 5.5))  # of which 2 to 6 are whole
    assert list(found) == ["GPU-a"]
    assert (found["GPU-a"].use, found["GPU-a"].use_max, found["GPU-a"].memory_max) == (4.0, 6, 6)
    assert broker.monitoring.session_use(session(broker, 20, 5)) == {}
    assert broker.monitoring.session_use(replace(session(broker, 0, 9), started_at=None)) == {}


def test_a_long_session_is_told_by_its_hours_and_so_is_one_of_long_ago(broker: Broker) -> None:
    broker.monitoring.remember_use([minute(n, use_max=n) for n in range(10 * 60)])
    clock(broker).forward(hours=10)
    broker.monitoring.tidy_use(*KEEP)
    found = broker.monitoring.session_use(session(broker, 30, 8 * 60))[
        "GPU-a"
    ]  # 1:00 to 8:00 are whole hours
    assert (found.seconds, found.samples, found.use_max) == (HOUR, 7 * 3600, 8 * 60 - 1)
    clock(broker).forward(days=20)
    broker.monitoring.tidy_use(*KEEP)  # the minutes are forgotten now
    found = broker.monitoring.session_use(session(broker, 60, 60))["GPU-a"]
    assert (found.seconds, found.samples, found.use_max) == (HOUR, 3600, 119)


def test_hours_are_made_of_minutes_and_outlive_them(broker: Broker) -> None:
    broker.monitoring.remember_use([minute(n, busy=n % 2, memory_max=n) for n in range(150)])
    clock(broker).forward(minutes=150)
    for _ in range(2):  # a second time is nothing
        broker.monitoring.tidy_use(*KEEP)
        hours = broker.monitoring.use_between(T0, T0 + timedelta(hours=9), seconds=HOUR)
        assert [(h.since, h.samples, h.busy, h.memory_max) for h in hours] == [
            (T0, 3600, 30, 59),
            (T0 + timedelta(hours=1), 3600, 30, 119),
        ]
    broker.monitoring.remember_use([minute(7, samples=5, known=5, busy=5)])  # one that was late
    broker.monitoring.tidy_use(*KEEP)
    hours = broker.monitoring.use_between(T0, T0 + timedelta(hours=1), seconds=HOUR)
    assert [(h.samples, h.busy) for h in hours] == [(3605, 35)]
    clock(broker).forward(days=15)
    broker.monitoring.tidy_use(*KEEP)
    assert broker.monitoring.use_between(T0, clock(broker)()) == []
    assert [
        h.samples for h in broker.monitoring.use_between(T0, clock(broker)(), seconds=HOUR)
    ] == [
        *(3605, 3600),
        1800,
    ]
    clock(broker).forward(days=400)
    broker.monitoring.tidy_use(*KEEP)
    assert broker.monitoring.use_between(T0, clock(broker)(), seconds=HOUR) == []


async def test_a_store_that_is_away_costs_no_minute(tmp_path: Path) -> None:
    file = tmp_path / "gpuspawner.sqlite"
    broker = open_broker(f"sqlite:///{file}", device_source="simulated:1xT4")
    broker.monitoring.remember_use([])
    minutes = (T0 + timedelta(minutes=n) for n in itertools.count())
    source = broker.watch.source
    assert isinstance(source, Sampled)
    sampler = source.sampler()
    sampling = Sampling(sampler, lambda: next(minutes), 0.02, broker.log)
    tick = Tick(
        broker, HubClient("http://127.0.0.1:1", "no token"), {}, logging.getLogger("service")
    )
    duty = SamplesUse()
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
        sampling.stop()
    await duty._write(tick, sampling)
    assert sampling.complete() == []
    written = broker.monitoring.use_between(T0, T0 + timedelta(days=9))
    assert [minute.since for minute in written] == [
        T0 + timedelta(minutes=n) for n in range(len(written))
    ]
    assert len(written) > len(kept)
    broker.store.close()


def test_what_waits_for_a_store_has_a_bound() -> None:
    devices = SimulatedDevices("1xT4")
    sampling = Sampling(devices.sampler(), utcnow, 1.0, logging.getLogger("service"))
    sampling._complete.extend(minute(n) for n in range(MOST_MINUTES + 10))
    assert len(sampling.complete()) == MOST_MINUTES
    assert sampling.complete()[-1] == minute(MOST_MINUTES + 9)  # the oldest are given up


# The thread.

CHILD = """
import json, logging, sys
from gpuspawner.service.sampler import Sampling
from gpuspawner.services import utcnow
from gpuspawner.devices.nvml import NVMLDevices

sampling = Sampling(NVMLDevices().sampler(), utcnow, 0.05, logging.getLogger())
sampling.silent_after = 1.0
sampling.start()
for line in sys.stdin:
    if line == "stop\\n":
        sampling.stop()
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


def test_the_thread_samples_and_a_driver_that_hangs_is_said(tmp_path: Path) -> None:
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
