"""What the service does about servers that fill their own container, and how it measures
workspaces. Real: SQLite and, in a soak, PostgreSQL; directories. The engine is a script: it says
how large containers and volumes are, or nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.engines.disk_usage import label_of
from gpuspawner.engines.docker import DockerEngine
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.service import disk_monitor
from gpuspawner.service.disk_monitor import DiskDuty, WorkspaceDuty
from gpuspawner.service.machines import HERE, Machines
from gpuspawner.services import Services
from gpuspawner.storage.repository import Workspace
from tests.support.brokers import Clock, Make
from tests.support.rounds import SITE, ScriptedHub, make_tick, told
from tests.support.telling import until

GB = 2**30
WORK = {"Destination": "/home/jovyan/work", "Name": "gpuspawner-work", "RW": True}


@pytest.fixture
def services(make: Make) -> Services:
    """Two A100 at 4 credits an hour and a T4 at 1; everybody has 1,000 credits."""
    return make(**{**SITE, "opening_grant": 1000})


class ScriptedEngine:
    """Three answers of the Docker Engine: what runs, how large each of it is, where it lies."""

    def __init__(self) -> None:
        self.containers_of: dict[str, dict[str, Any]] = {}
        self.sizes: dict[str, float] = {}
        """Gigabytes, by container."""
        self.root = "/nowhere"
        self.hangs: dict[str, threading.Event] = {}
        self.measured: list[str] = []
        self.is_away = False

    def has(self, lease: Lease, gigabytes: float, *, is_enforced: bool = False) -> None:
        labels = {"gpuspawner.lease": lease.id, "gpuspawner.disk_limit": label_of(GB, is_enforced)}
        ref = f"container-{lease.id}"
        self.containers_of[ref] = {"Id": ref, "Labels": labels, "Mounts": [WORK]}
        self.sizes[ref] = gigabytes

    def info(self) -> dict[str, str]:
        return {"DockerRootDir": self.root}

    def containers(self, filters: dict[str, Any], size: bool = False) -> list[dict[str, Any]]:
        if self.is_away:
            raise ConnectionError("nobody listens")
        if not size:
            return list(self.containers_of.values())
        ref = filters["id"]
        self.measured.append(ref)
        if ref in self.hangs:
            self.hangs[ref].wait(60)
        return [self.containers_of[ref] | {"SizeRw": int(self.sizes[ref] * GB)}]


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    yield engine
    for event in engine.hangs.values():
        event.set()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round measures."""
    monkeypatch.setattr(disk_monitor, "is_due", lambda *args: True)


def duty_of(services: Services, engine: ScriptedEngine) -> DiskDuty:
    docker: Any = engine
    here = Machines({HERE: DockerEngine(lambda: docker)}, lambda lease: HERE)
    return DiskDuty(make_tick(services, ScriptedHub()), here)


def server(services: Services, user: str, devices: int = 0) -> Lease:
    lease = services.leases.grant(ServerRef(user), Request(devices=devices), engine="docker")
    return services.leases.confirm(lease.id, f"container-{lease.id}")


async def test_container_is_warned_near_limit_and_stopped_above_it(
    services: Services, engine: ScriptedEngine, now: None
) -> None:
    ada, bob, carl = server(services, "ada", 1), server(services, "bob"), server(services, "carl")
    engine.has(ada, 0.5)
    engine.has(bob, 0.9)
    engine.has(carl, 5, is_enforced=True)
    for _ in range(2):  # and a service that was started anew tells nothing twice
        duty = duty_of(services, engine)
        await duty.round()
        await duty.round()
    notices_of = services.notifications.notices_of
    assert notices_of("ada") == []
    [watched], [enforced] = notices_of("bob"), notices_of("carl")
    assert watched.kind is enforced.kind is NoticeKind.DISK_LOW
    assert watched.body == (
        "Its container uses 922 MB of 1 GB: installed packages, caches and /tmp. If it grows "
        "beyond 1 GB, it is stopped. Write large files to /home/jovyan/work, or ask your admin "
        "for more space."
    )
    assert "its programs get “No space left on device”" in enforced.body
    assert "stopped" not in enforced.title + enforced.body

    engine.sizes[f"container-{bob.id}"] = 1.5
    await duty.round()
    ordered = services.leases.get(bob.id)
    assert ordered.outcome == "disk"
    assert ordered.end_reason == "it wrote 1.5 GB into its own container, and may write 1 GB"
    assert [lease.id for lease in services.sessions.due_sessions().stop] == [bob.id]
    assert notices_of("bob")[0].kind is NoticeKind.STOPPED
    asked = len(engine.measured)
    await duty.round()
    assert engine.measured[asked:].count(f"container-{bob.id}") == 0, "it ends already"
    assert len(notices_of("bob")) == 2
    assert not services.leases.get(ada.id).outcome and not services.leases.get(carl.id).outcome


async def test_slow_disk_check_does_not_delay_other_containers(
    services: Services, engine: ScriptedEngine, now: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_monitor, "ROUND_SECONDS", 0.2)
    slow, fast = server(services, "ada"), server(services, "bob")
    engine.has(slow, 2)
    engine.has(fast, 0.1)
    ref = f"container-{slow.id}"
    engine.hangs[ref] = threading.Event()
    duty = duty_of(services, engine)
    await duty.round()
    engine.sizes[f"container-{fast.id}"] = 2
    while not services.leases.get(fast.id).outcome:
        await duty.round()
    assert services.leases.get(fast.id).outcome == "disk"
    assert not services.leases.get(slow.id).outcome
    assert engine.measured.count(ref) == 1, "and it is not asked for twice at a time"
    engine.hangs[ref].set()
    while not services.leases.get(slow.id).outcome:
        await asyncio.sleep(0.01)


async def test_engine_outage_and_low_disk_space_are_logged(
    services: Services,
    engine: ScriptedEngine,
    now: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lease = server(services, "ada")
    engine.has(lease, 0.1)
    duty = duty_of(services, engine)
    with caplog.at_level(logging.INFO):
        engine.is_away = True
        await duty.round()
        await duty.round()
        engine.is_away = False
        await duty.round()
        monkeypatch.setattr(disk_monitor, "room", lambda folder: (4 * GB, 100 * GB))
        await duty.round()
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Disk of")]
    assert len(said) == 3 and "all is well again" in said[1]
    assert said[2] == (
        "Disk of this machine: less than 5% of 100 GB is free; the largest containers: ada "
        "(102 MB). Make room there"
    )


async def test_engine_without_servers_is_not_queried(
    services: Services, engine: ScriptedEngine
) -> None:
    """Where servers are local processes there may be none at all."""
    engine.is_away = True
    nowhere = Machines({HERE: DockerEngine(lambda: 1 / 0)}, lambda lease: "")
    duty = DiskDuty(make_tick(services, ScriptedHub()), nowhere)
    server(services, "ada")
    await duty.round()
    assert engine.measured == []


# Workspaces.


class VolumeEngine:
    """One answer of the Docker Engine: how large each volume is."""

    def __init__(self) -> None:
        self.sizes = {"work-bert": 7, "somebody-elses": 9}
        self.is_away = True

    def df(self) -> dict[str, Any]:
        if self.is_away:
            raise ConnectionError("nobody listens")
        sizes = self.sizes.items()
        return {"Volumes": [{"Name": n, "UsageData": {"Size": size}} for n, size in sizes]}


def workspace_duty(services: Services, engine: VolumeEngine) -> WorkspaceDuty:
    return WorkspaceDuty(make_tick(services, ScriptedHub()), DockerEngine(lambda: engine))


async def test_directories_are_measured_while_the_engine_is_away(
    services: Services, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "anna").mkdir()
    (tmp_path / "anna" / "large").write_bytes(os.urandom(1 << 20))
    storage, engine = services.storage, VolumeEngine()
    for source, user in ((f"{tmp_path}/anna", "anna"), (f"{tmp_path}/gone", "carl")):
        storage.use_workspace(source, user, None)
    storage.use_workspace("work-bert", "bert", None)
    storage.use_workspace("work-dora", "dora", None)
    duty = workspace_duty(services, engine)
    for _ in range(2):
        await duty.round()
    anna = storage.sizes[f"{tmp_path}/anna"].used
    assert anna is not None and 1 << 20 <= anna < (1 << 20) + 65536
    assert storage.sizes[f"{tmp_path}/gone"].used is None
    assert [some.source for some in storage.unmeasured()] == ["work-bert", "work-dora"]
    engine.is_away = False
    await duty.round()
    assert storage.sizes["work-bert"].used == 7 and storage.sizes["work-dora"].used is None
    assert storage.unmeasured() == []
    [away] = told(caplog.records)
    assert away.startswith("Sizes of volumes: The container engine is not responding.")


@pytest.fixture
def answered() -> Iterator[threading.Event]:
    """Set at the end of a test, for threads that wait for it."""
    event = threading.Event()
    yield event
    event.set()


async def test_hanging_file_system_does_not_delay_other_workspaces(
    services: Services,
    clock: Clock,
    answered: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(disk_monitor, "MOST_BUSY", 0)
    storage = services.storage
    for name in ("anna", "bert"):
        (tmp_path / name).mkdir()
        storage.use_workspace(f"{tmp_path}/{name}", name, None)
    use_of = storage.use_of

    asked: list[str] = []

    def hang(source: str, *args: Any) -> Any:
        asked.append(Path(source).name)
        if source.endswith("anna"):
            answered.wait(60)
        return use_of(source, *args)

    monkeypatch.setattr(storage, "use_of", hang)
    duty = workspace_duty(services, VolumeEngine())
    measure = duty._measure

    async def measure_patiently(some: Workspace) -> None:
        hangs = some.source.endswith("anna") and not answered.is_set()
        monkeypatch.setattr(disk_monitor, "WORKSPACE_PATIENCE_SECONDS", 0.05 if hangs else 60)
        await measure(some)

    monkeypatch.setattr(duty, "_measure", measure_patiently)
    await duty.round()
    assert storage.sizes[f"{tmp_path}/anna"] == (None, clock.now)
    assert storage.sizes[f"{tmp_path}/bert"].used is not None
    assert told(caplog.records) == [f"Size of {tmp_path}/anna: its file system is not responding"]

    clock.forward(days=2)
    await duty.round()
    assert asked == ["anna", "bert", "bert"], "the thread that hangs is the only one"
    answered.set()
    await until(lambda: not duty._under_way, "the file system to answer")
    await duty.round()
    assert storage.sizes[f"{tmp_path}/anna"].used is not None
