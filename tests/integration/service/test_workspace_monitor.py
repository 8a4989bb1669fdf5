"""How the service measures members' workspaces. Real: directories, both databases. The
engine is a script: it says how large volumes are, or nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.engines.docker import DockerEngine
from gpuspawner.service import workspace_monitor
from gpuspawner.service.workspace_monitor import WorkspaceDuty
from gpuspawner.services import Services
from tests.support.brokers import Clock, Make
from tests.support.rounds import SITE, ScriptedHub, make_tick, told
from tests.support.telling import until


@pytest.fixture
def services(make: Make) -> Services:
    return make(**SITE)


class ScriptedEngine:
    """One answer of the Docker Engine: how large each volume is."""

    def __init__(self) -> None:
        self.sizes = {"work-bert": 7, "somebody-elses": 9}
        self.is_away = True

    def df(self) -> dict[str, Any]:
        if self.is_away:
            raise ConnectionError("nobody listens")
        sizes = self.sizes.items()
        return {"Volumes": [{"Name": n, "UsageData": {"Size": size}} for n, size in sizes]}


def duty_of(services: Services, engine: ScriptedEngine) -> WorkspaceDuty:
    return WorkspaceDuty(make_tick(services, ScriptedHub()), DockerEngine(lambda: engine))


async def test_directories_are_measured_while_the_engine_is_away(
    services: Services, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "anna").mkdir()
    (tmp_path / "anna" / "large").write_bytes(os.urandom(1 << 20))
    storage, engine = services.storage, ScriptedEngine()
    for source, user in ((f"{tmp_path}/anna", "anna"), (f"{tmp_path}/gone", "carl")):
        storage.use_workspace(source, user, None)
    storage.use_workspace("work-bert", "bert", None)
    storage.use_workspace("work-dora", "dora", None)
    duty = duty_of(services, engine)
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
    monkeypatch.setattr(workspace_monitor, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(workspace_monitor, "MOST_BUSY", 0)
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
    duty = duty_of(services, ScriptedEngine())
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
