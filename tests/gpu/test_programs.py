"""Real: the GPU, its driver, and programs that compute on it: what the hub sees of them, and what
one does to another.

Last passed on an NVIDIA H200, driver 580.159.04, CUDA 13.0, on 2026-11-27 at 26eb697d, without the
last three.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pynvml
import pytest

from gpuspawner.devices.discovery import open_source
from gpuspawner.devices.models import Device, Inventory
from gpuspawner.devices.source import DeviceSource, SamplerOfProcesses, SamplingSource
from gpuspawner.engines.device_probe import probe_by_process
from gpuspawner.monitoring.idle import Activity, IdlePolicy, begin, judge
from gpuspawner.service.device_monitor import Sampling
from tests.support.cuda import Program
from tests.support.placements import free_slots
from tests.support.processes import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("processes")]

GIB = 2**30

METRICS = (pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL, pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL)


def look(source: DeviceSource) -> Inventory:
    return source.observe(datetime.now(timezone.utc))


def find(inventory: Inventory, uuid: str) -> Device:
    (found,) = (d for d in inventory.devices if d.uuid == uuid)
    return found


@pytest.fixture(scope="module")
def source() -> DeviceSource:
    return open_source("nvml")


@pytest.fixture
def uuid(source: DeviceSource) -> str:
    """A whole GPU that nobody uses. One whose program has just ended is busy for a moment."""

    def free() -> list[str]:
        inventory = look(source)
        assert not inventory.error
        return [
            slot.uuid
            for slot in free_slots(inventory.devices)
            if find(inventory, slot.uuid).parent_uuid is None
        ]

    return wait_for(free, "a free GPU")[0]


@pytest.fixture
def program(uuid: str) -> Iterator[Program]:
    with Program({"CUDA_VISIBLE_DEVICES": uuid}) as program:
        yield program


@pytest.fixture
def neighbour(uuid: str) -> Iterator[Program]:
    with Program({"CUDA_VISIBLE_DEVICES": uuid}) as program:
        yield program


def test_cuda_shows_exactly_the_visible_device(uuid: str, program: Program) -> None:
    assert program.tell("uuids") == [uuid]


def test_cuda_shows_nothing_where_no_device_is_visible(uuid: str) -> None:
    with Program({"CUDA_VISIBLE_DEVICES": ""}) as program:
        assert program.tell("uuids") == []


def test_program_of_nobody_occupies_a_device_within_a_look(
    source: DeviceSource, uuid: str, program: Program
) -> None:
    program.tell("open")
    seen = look(source)
    device = find(seen, uuid)
    print(device)
    assert [p.pid for p in device.compute_processes] == [program.pid]
    assert device.processes[0].name
    assert not device.empty
    assert uuid not in {slot.uuid for slot in free_slots(seen.devices)}
    program.end()
    wait_for(lambda: find(look(source), uuid).empty, "the device to be free again")


def test_memory_is_attributed_to_each_of_two_programs(
    source: DeviceSource, uuid: str, program: Program, neighbour: Program
) -> None:
    for each, size in ((program, 1), (neighbour, 3)):
        each.tell("open")
        each.tell("hold", size * GIB)
    held = {p.pid: p.used_memory_bytes for p in find(look(source), uuid).compute_processes}
    print(held)
    assert held.keys() == {program.pid, neighbour.pid}
    for each, size in ((program, 1), (neighbour, 3)):
        used = held[each.pid]
        assert used is not None and size * GIB <= used < (size + 1) * GIB


def test_use_decides_what_becomes_of_an_idle_server(
    source: DeviceSource, uuid: str, program: Program
) -> None:
    assert isinstance(source, SamplingSource)
    program.tell("open")

    def use_while(busy: float, rest: float) -> float:
        """The mean use over ten samples, from the second on."""
        sampler = source.sampler()
        sampling = Sampling(sampler, lambda: datetime.now(timezone.utc), 1.0, logging.getLogger())
        program.send("repeat", busy, rest, 13.0)
        time.sleep(1)  # what the driver says is of what was before
        sampling.start()
        program.read()
        sampling.stop()
        uses = [sample.use for sample in sampling.recent()[uuid]]
        print(busy, rest, uses)
        known = [use for use in uses if use is not None]
        assert len(known) == len(uses) >= 10
        return sum(known) / len(known)

    policy = IdlePolicy(mode="enforce", first_minutes=2, countdown_minutes=2)

    def is_stopped(use: float) -> bool:
        state, now = begin(policy), datetime(2026, 3, 1, tzinfo=timezone.utc)
        for _ in range(10):
            now += timedelta(minutes=1)
            verdict = judge(policy, state, Activity(60.0, use, 60.0 if use else 0.0), now)
            state = verdict.state
            if verdict.event == "stop":
                return True
        return False

    # In step with the samples of a second, unless these are taken by chance.
    busy, bursty, idle = use_while(0.5, 0.0), use_while(0.3, 0.7), use_while(0.0, 0.1)
    assert busy >= 90
    assert 5 <= bursty < 90
    assert idle == 0
    assert [is_stopped(use) for use in (busy, bursty, idle)] == [False, False, True]


def test_illegal_address_ends_only_the_program_that_used_it(
    uuid: str, program: Program, neighbour: Program
) -> None:
    for each in (program, neighbour):
        each.tell("open")
        each.tell("hold", 2**28)
        each.tell("fill", 7)
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        program.tell("illegal")
    with pytest.raises(RuntimeError):
        program.tell("spin", 0.01)
    neighbour.tell("spin", 0.1)
    assert neighbour.tell("differing", 7) == 0
    with Program({"CUDA_VISIBLE_DEVICES": uuid}) as later:
        later.tell("open")
        later.tell("spin", 0.01)


def test_illegal_address_is_reported_as_an_error_of_a_program(
    source: DeviceSource, uuid: str, program: Program
) -> None:
    assert isinstance(source, SamplingSource)
    sampler = source.sampler()
    sampler.sample(datetime.now(timezone.utc), 0.0)
    program.tell("open")
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        program.tell("illegal")

    def reported() -> tuple[int, ...]:
        samples = sampler.sample(datetime.now(timezone.utc), 0.0)
        return next(s.xids for s in samples if s.uuid == uuid)

    xids = wait_for(reported, "the error")
    print(xids)
    assert set(xids) <= {13, 31, 43}


def test_probe_passes_beside_a_busy_program(uuid: str, program: Program) -> None:
    program.tell("open")
    program.tell("hold", GIB)
    program.send("repeat", 0.2, 0.05, 10.0)
    found = probe_by_process(uuid)
    print(found)
    assert found.failure == ""
    program.read()


def test_process_utilization_names_the_program_that_computes(
    source: DeviceSource, uuid: str, program: Program, neighbour: Program
) -> None:
    look(source)  # opens NVML
    for each in (program, neighbour):
        each.tell("open")
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    since = int(time.time() * 1e6)
    program.tell("repeat", 0.5, 0.0, 3.0)
    found = pynvml.nvmlDeviceGetProcessUtilization(handle, since)
    uses = {u.pid: u.smUtil for u in found}
    print(uses, os.getpid())
    assert uses[program.pid] > 50
    assert uses.get(neighbour.pid, 0) < 10  # it loaded its kernels just before


def test_sampler_measures_each_of_two_programs(
    source: DeviceSource, uuid: str, program: Program, neighbour: Program
) -> None:
    assert isinstance(source, SamplingSource)
    sampler = source.sampler()
    assert isinstance(sampler, SamplerOfProcesses)
    sampler.watched = frozenset([uuid])
    for each in (program, neighbour):
        each.tell("open")
    program.send("repeat", 0.5, 0.0, 12.0)
    neighbour.send("repeat", 0.1, 0.4, 12.0)
    began, found = time.monotonic(), []
    while time.monotonic() - began < 10:
        samples = sampler.sample(datetime.now(timezone.utc), time.monotonic())
        found.append(next(s.process_use for s in samples if s.uuid == uuid))
        time.sleep(1)  # the driver measures in real time
    for each in (program, neighbour):
        each.read()
    print(found)
    assert found[0] is None, "who knows when that was"
    known = [{each.pid: each.use for each in some} for some in found[3:] if some is not None]
    assert len(known) >= 5, "the figures come"
    mine, theirs = (
        sum(uses.get(each.pid, 0) for uses in known) / len(known) for each in (program, neighbour)
    )
    assert set().union(*known) <= {program.pid, neighbour.pid}
    assert 5 < theirs < mine <= 100


def test_performance_counters_show_whether_a_device_works(
    source: DeviceSource, uuid: str, program: Program
) -> None:
    look(source)  # opens NVML
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    is_hopper = pynvml.nvmlDeviceGetCudaComputeCapability(handle) >= (9, 0)
    assert bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice) == is_hopper
    program.tell("open")
    samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]

    def figures(busy: float) -> list[float]:
        pynvml.nvmlGpmSampleGet(handle, samples[0])
        program.tell("repeat", busy, 0.1, 2.0)
        pynvml.nvmlGpmSampleGet(handle, samples[1])
        asked = pynvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(METRICS)
        asked.sample1, asked.sample2 = samples
        for number, metric in enumerate(METRICS):
            asked.metrics[number].metricId = metric
        pynvml.nvmlGpmMetricsGet(asked)
        return [asked.metrics[number].value for number in range(len(METRICS))]

    if is_hopper:
        working, resting = figures(0.5), figures(0.0)
        print(working, resting)
        assert 50 < working[0] <= 100 and resting[0] < 10
    for sample in samples:
        pynvml.nvmlGpmSampleFree(sample)


def test_instances_of_hopper_have_a_use(source: DeviceSource) -> None:
    assert isinstance(source, SamplingSource)
    sampler = source.sampler()
    instances = {d.uuid for d in look(source).devices if d.parent_uuid is not None}
    for seconds in range(3):
        samples = sampler.sample(datetime.now(timezone.utc), float(seconds))
        time.sleep(1)  # the driver counts in real time
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    is_hopper = any(pynvml.nvmlDeviceGetCudaComputeCapability(each) >= (9, 0) for each in handles)
    uses = {sample.uuid: sample.use for sample in samples if sample.uuid in instances}
    print(uses)
    assert not is_hopper or None not in uses.values()
