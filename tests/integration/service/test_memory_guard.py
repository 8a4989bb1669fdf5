"""Programs that take more than their share of a shared device. Real: SQLite and PostgreSQL,
processes and their ends, pynvml; a stand-in is the driver's library, which says what they use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from gpuspawner.core.errors import StoreUnavailable
from gpuspawner.leases.models import Lease, Request, ServerRef, Sharing
from gpuspawner.monitoring.models import Sample
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.service import memory_guard
from gpuspawner.service.memory_guard import MemoryGuard
from gpuspawner.services import Services
from gpuspawner.sharing import memory_service
from gpuspawner.sharing.memory_rules import END_SECONDS, TELL_SECONDS
from tests.support.brokers import Make
from tests.support.nvml.machine import Machine, as_sample
from tests.support.nvml.nvml_library import GIB
from tests.support.nvml.shared_device import SHARED, SharedDevice
from tests.support.parts import each_database
from tests.support.rounds import ScriptedHub, make_tick

pytestmark = each_database

WithoutStore = Callable[[ModuleType, str], AbstractContextManager[None]]


class GuardedDevice(SharedDevice):
    """A shared GPU that the guard watches, and the memory that programs use of it."""

    def __init__(self, services: Services, machine: Machine) -> None:
        super().__init__(services, machine)
        self.used: dict[str, int] = {}
        self.samples: list[Sample] = []
        self.watched: frozenset[str] = frozenset()
        self.guard = MemoryGuard(make_tick(services, ScriptedHub()), self, self.recent)

    def sample(self, *_: Any) -> tuple[Sample, ...]:
        """What a sampler's thread does; here each look takes one."""
        self.machine.tell(f"watch {' '.join(self.watched)}")
        compute = [
            (program.pid, self.used[name])
            for name, program in self.programs.items()
            if program.poll() is None
        ]
        used = max(sum(size for _, size in compute), 0)
        self.machine.has(replace(self.gpu, compute=compute, used_bytes=used))
        return tuple(as_sample(fields) for fields in self.machine.sample(self.seconds))

    def recent(self) -> dict[str, list[Sample]]:
        return {self.gpu.uuid: self.samples[-1:]}

    def lease(self, user: str) -> Lease:
        request = Request(devices=1, sharing=Sharing.SLOT, model="A100")
        lease = self.services.leases.grant(ServerRef(user), request, engine="local")
        return self.services.leases.confirm(lease.id)

    def start(self, name: str, lease: Lease, gigabytes: int, *arguments: str) -> None:
        self.start_program(name, lease, *arguments)
        self.used[name] = gigabytes * GIB

    async def look(self, seconds: float) -> None:
        """Let the guard judge a sample that is taken so many seconds later."""
        self.seconds = seconds
        self.guard.follow(self.services.leases.open_leases())
        self.samples += self.sample()
        await self.guard.round()

    def ended(self, name: str) -> int:
        """The exit status of a program that was told to end."""
        return self.programs[name].wait(timeout=60)

    def is_running(self, name: str) -> bool:
        return self.programs[name].poll() is None

    def titles(self, user: str) -> list[str]:
        notices = self.services.notifications.notices_of(user)
        assert all(notice.kind is NoticeKind.GPU_MEMORY for notice in notices)
        return [notice.title for notice in notices]

    def ends(self) -> list[str]:
        """What the audit log says about ended programs."""
        trail = self.services.audit.trail()
        return [each.detail for each in trail if each.action == "end_process"]


@pytest.fixture
def device(make: Make, nvml_machine: Machine) -> Iterator[GuardedDevice]:
    with GuardedDevice(make(**SHARED), nvml_machine.begin()) as device:
        yield device


@pytest.fixture
def without_store(monkeypatch: pytest.MonkeyPatch) -> WithoutStore:
    """Returns a block in which a function that writes to the store fails."""

    @contextmanager
    def block(module: ModuleType, function: str) -> Iterator[None]:
        def cannot(*_: object, **fields: object) -> None:
            raise StoreUnavailable

        with monkeypatch.context() as failing:
            failing.setattr(module, function, cannot)
            yield

    return block


async def test_program_over_its_share_is_told_and_then_ended(device: GuardedDevice) -> None:
    ada, bob = device.lease("ada"), device.lease("bob")
    device.start("ada", ada, 30)
    device.start("small", ada, 1)
    device.start("bob", bob, 19)
    await device.look(1)
    await device.look(TELL_SECONDS)
    [told] = device.services.notifications.notices_of("ada")
    assert told.title == "Your server uses more than its share of a GPU"
    assert "It uses 31.0 GB of GPU memory. Its share is 20.0 GB, and 1 other shares" in told.body
    await device.look(TELL_SECONDS)
    assert device.is_running("ada") and len(device.titles("ada")) == 1
    await device.look(END_SECONDS - 2 * TELL_SECONDS)
    assert device.ended("ada") == -15
    await device.look(END_SECONDS)
    assert device.is_running("small") and device.is_running("bob")
    newest = device.services.notifications.notices_of("ada")[0]
    assert newest.title == "A program of your server was ended: it used too much GPU memory"
    assert "after 60 seconds. The server continues" in newest.body
    assert not device.titles("bob")
    [noted] = [each for each in device.services.audit.trail() if each.action == "end_process"]
    assert noted.subject == device.gpu.uuid and f"lease {ada.id}" in noted.detail


async def test_full_device_ends_the_program_at_once(device: GuardedDevice) -> None:
    ada, bob = device.lease("ada"), device.lease("bob")
    device.start("ada", ada, 59, "stubborn")
    device.start("bob", bob, 18)
    await device.look(1)
    assert device.ended("ada") == -9
    assert device.is_running("bob")


async def test_program_that_ignores_the_first_signal_gets_another(device: GuardedDevice) -> None:
    ada, _ = device.lease("ada"), device.lease("bob")
    device.start("ada", ada, 30, "stubborn")
    await device.look(1)
    await device.look(END_SECONDS)
    assert device.is_running("ada")
    await device.look(6)
    assert device.ended("ada") == -9
    assert len(device.titles("ada")) == 1, "told once that it was ended"


async def test_member_alone_and_unknown_memory_are_left_alone(device: GuardedDevice) -> None:
    ada = device.lease("ada")
    device.start("ada", ada, 79)
    for _ in range(3):
        await device.look(END_SECONDS)
    assert device.is_running("ada") and not device.titles("ada")
    bob = device.lease("bob")
    device.start("bob", bob, 0)
    device.used |= {"ada": 10 * GIB, "bob": -1}
    for _ in range(3):
        await device.look(END_SECONDS)
    assert device.is_running("bob") and not device.titles("bob")


async def test_process_that_is_no_more_the_lease_s_is_not_ended(device: GuardedDevice) -> None:
    ada, _ = device.lease("ada"), device.lease("bob")
    device.start("ada", ada, 30)
    await device.look(1)
    device.programs["ada"].kill()
    device.programs["ada"].wait()
    device.guard.follow(device.services.leases.open_leases())
    await device.look(END_SECONDS)
    assert not device.titles("ada"), "nothing was ended, so nothing is told"


async def test_signal_that_could_not_be_sent_is_no_first_signal(
    device: GuardedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, _ = device.lease("ada"), device.lease("bob")
    device.start("ada", ada, 30)
    await device.look(1)
    with monkeypatch.context() as forbidden:

        def may_not(*_: object) -> bool:
            raise PermissionError

        forbidden.setattr(memory_guard, "send_signal", may_not)
        await device.look(END_SECONDS)
        assert device.is_running("ada") and not device.titles("ada") and not device.ends()
    await device.look(6)
    assert device.ended("ada") == -15, "asked politely first"
    assert len(device.titles("ada")) == len(device.ends()) == 1


async def test_end_is_recorded_at_once_or_later_and_only_once(
    device: GuardedDevice, without_store: WithoutStore
) -> None:
    ada, _ = device.lease("ada"), device.lease("bob")
    device.start("ada", ada, 30)
    await device.look(1)
    with without_store(memory_service.audit_log, "note"):
        await device.look(END_SECONDS)
        assert device.ended("ada") == -15
        await device.look(6)
        assert not device.titles("ada"), "notice and record are one transaction"
    await device.look(6)
    await device.look(6)
    assert len(device.titles("ada")) == len(device.ends()) == 1


async def test_member_is_told_later_if_the_database_was_away(
    device: GuardedDevice, without_store: WithoutStore
) -> None:
    ada, _ = device.lease("ada"), device.lease("bob")
    device.start("ada", ada, 30)
    await device.look(1)
    with without_store(memory_service.notifications_repository, "add"):
        await device.look(TELL_SECONDS)
    await device.look(6)
    await device.look(6)
    assert device.titles("ada") == ["Your server uses more than its share of a GPU"]


async def test_program_that_left_the_device_is_forgotten(device: GuardedDevice) -> None:
    ada, _ = device.lease("ada"), device.lease("bob")
    device.start("ada", ada, 30, "stubborn")
    await device.look(1)
    await device.look(END_SECONDS)
    assert len(device.ends()) == 1
    program = device.programs.pop("ada")
    await device.look(6)
    device.programs["ada"] = program
    await device.look(6)
    await device.look(END_SECONDS)
    assert device.is_running("ada") and len(device.ends()) == 2, "asked politely once more"
