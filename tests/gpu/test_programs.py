"""Real: the GPU, its driver, and programs that compute on it: what the hub sees of them, and what
one does to another.

Last passed on an NVIDIA H200, driver 580.159.04, CUDA 13.0, on 2026-11-27 at 26eb697d.
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
from gpuspawner.devices.source import DeviceSource, SamplingSource
from gpuspawner.engines.device_probe import probe_by_process
from gpuspawner.monitoring.idle import Activity, IdlePolicy, begin, judge
from gpuspawner.service.device_monitor import Sampling
from tests.support.cuda import Program
from tests.support.placements import free_slots
from tests.support.processes import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("processes")]

GIB = 2**30


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
