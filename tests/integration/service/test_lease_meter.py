"""Idle GPUs of members who share one. Real: SQLite and PostgreSQL, processes, pynvml; a stand-in is
the driver's library, which says what each process does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest

from gpuspawner.engines.base import ProcessOwners
from gpuspawner.leases.models import Lease, Sharing
from gpuspawner.monitoring.models import Rollups
from gpuspawner.service.lease_meter import LeaseMeter
from gpuspawner.services import Services
from tests.support.brokers import Clock, Make, running
from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.machine import Machine, as_sample
from tests.support.nvml.shared_device import SHARED, SharedDevice
from tests.support.parts import each_database

pytestmark = each_database

POLICY = {"*": {"mode": "enforce", "first_minutes": 2, "countdown_minutes": 1}}
STEP = 10
"""Seconds between two samples."""


class MeteredDevice(SharedDevice):
    """A shared GPU whose use is measured, and the members who share it."""

    def __init__(self, services: Services, machine: Machine) -> None:
        super().__init__(services, machine)
        self.meter = LeaseMeter()
        self.rollups = Rollups()
        self.microseconds = 0
        machine.now = services.clock()
        machine.tell(f"watch {self.gpu.uuid}")

    def member(self, name: str) -> Lease:
        lease = running(self.services, name, sharing=Sharing.SLOT)
        self.start_program(name, lease)
        leases = self.services.leases.open_leases()
        self.meter.follow(leases, ProcessOwners(leases))
        return lease

    def minutes(self, count: int, use: int, **did: int) -> list[str]:
        """So many minutes pass in which the GPU and each member's program do so much.

        Returns who is warned and who is stopped.
        """
        found = []
        for _ in range(count):
            for _ in range(60 // STEP):
                self.microseconds += STEP * 1_000_000
                worked = [
                    (self.programs[name].pid, percent, percent // 2, self.microseconds)
                    for name, percent in did.items()
                ]
                self.machine.has(replace(self.gpu, use=(use, use // 2), worked=worked))
                self.sample()
            held = self.services.idle.holding_gpus()
            output = {lease.server: None for lease in held}
            events = self.services.idle.judge_idle(output)
            found += [f"{each.lease.server.user}: {each.event}" for each in events]
        return found

    def sample(self) -> None:
        samples = [as_sample(fields) for fields in self.machine.sample(STEP)]
        of_leases = self.meter.divide(samples)
        done = self.rollups.add([*samples, *of_leases])
        self.services.monitoring.remember_use(done)
        Clock.of(self.services).forward(seconds=STEP)


@pytest.fixture
def device(make: Make, nvml_machine: Machine) -> Iterator[MeteredDevice]:
    with MeteredDevice(make(**SHARED, when_idle=POLICY), nvml_machine.begin()) as device:
        yield device


def test_busy_neighbour_keeps_no_idle_server(device: MeteredDevice) -> None:
    device.member("ada"), device.member("bob")
    assert device.minutes(6, 90, ada=90, bob=0) == ["bob: warn", "bob: stop"]


def test_working_server_is_kept_beside_idle_ones(device: MeteredDevice) -> None:
    ada = device.member("ada")
    device.member("bob"), device.member("eve")
    found = device.minutes(8, 45, ada=30, bob=15, eve=0)
    assert found == ["eve: warn", "eve: stop"]
    use = device.services.monitoring.session_use(ada)[device.gpu.uuid]
    assert (use.lease_id, use.use) == (ada.id, pytest.approx(30, abs=1))


@pytest.mark.parametrize("answer", [nvml.NOT_SUPPORTED, nvml.UNKNOWN, nvml.FUNCTION_NOT_FOUND])
def test_without_figures_the_whole_device_counts(device: MeteredDevice, answer: int) -> None:
    device.gpu.fails = {"nvmlDeviceGetProcessUtilization": answer}
    ada, _ = device.member("ada"), device.member("bob")
    assert device.minutes(6, 90, ada=90, bob=0) == []
    assert device.minutes(30, 0, ada=0, bob=0) == [], "the work of each counts for both"
    assert not any(it.measured for it in device.services.monitoring.session_use(ada).values())


def test_figures_that_fail_now_and_then_stop_nobody_who_works(device: MeteredDevice) -> None:
    device.member("ada"), device.member("bob")
    for number in range(12):
        failing = {"nvmlDeviceGetProcessUtilization": nvml.UNKNOWN} if number % 2 else {}
        device.gpu.fails = failing
        found = device.minutes(1, 60, ada=60, bob=0)
        assert not any(each.startswith("ada") for each in found)


def test_device_that_works_without_a_process_is_nobody_s_idleness(device: MeteredDevice) -> None:
    device.member("ada"), device.member("bob")
    assert device.minutes(8, 70) == []


def test_member_alone_is_measured_by_the_device(device: MeteredDevice) -> None:
    ada = device.member("ada")
    device.machine.tell("watch")
    assert device.minutes(6, 50) == []
    clock = device.services.clock
    (found,) = device.services.monitoring.worked_between(ada.granted_at, clock())
    quarter = timedelta(minutes=6).total_seconds() / 4
    assert found.held == pytest.approx(quarter)
    assert found.busy == found.measured == pytest.approx(quarter, abs=20)


def test_reports_count_a_share_of_what_each_did(device: MeteredDevice) -> None:
    ada, bob = device.member("ada"), device.member("bob")
    device.minutes(4, 50, ada=50, bob=0)
    device.services.settings.idle.policy = {}
    device.minutes(58, 50, ada=50, bob=0)
    services = device.services
    for keep in (timedelta(days=1), timedelta(0)):
        services.monitoring.tidy_use(keep, timedelta(days=9))
        report = services.monitoring.worked_between(ada.granted_at, services.clock())
        of = {each.lease_id: each for each in report}
        assert of[ada.id].held == pytest.approx(15 * 62)
        assert of[ada.id].busy == of[ada.id].measured == of[bob.id].measured
        assert of[ada.id].busy >= 0.9 * of[ada.id].held
        assert of[bob.id].busy == 0
