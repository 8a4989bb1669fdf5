"""Files of runs, read through the engine. Real: a Docker Engine, its containers, volumes,
directories with what a member may put there, services, SQLite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.core.errors import (
    EngineUnavailable,
    GPUSpawnerError,
    NoRunFile,
    NoRunFiles,
    TooManyStreams,
    WorkspaceBusy,
)
from gpuspawner.engines import files as engine_files
from gpuspawner.engines.docker import DockerEngine
from gpuspawner.engines.files import LABEL_FILES, MountedWorkspace
from gpuspawner.runs import files as run_files
from gpuspawner.runs.files import MOST_STREAMS_EACH, RunFiles
from gpuspawner.runs.models import FollowedRun, Run, RunRecord, Work
from gpuspawner.storage.service import StorageService
from tests.support.brokers import open_services
from tests.support.engine import PrivateEngine
from tests.support.images import INSTANT
from tests.support.leases import lease_of

NOW = datetime(2026, 11, 28, tzinfo=timezone.utc)
FOLDER = "runs/2026-11-28-120000-train"


@dataclass
class Scene:
    """A run of Ada's in a directory of this machine, and what reads its files."""

    engine: PrivateEngine
    workspace: Path
    run: FollowedRun
    storage: StorageService
    reader: RunFiles

    @property
    def folder(self) -> Path:
        """The run's folder, on this machine."""
        return self.workspace / FOLDER

    def read(self, name: str, start: int = 0, most: int = 1 << 20) -> bytes:
        """A part of a file."""
        return self.reader.part(self.run, name, start, most).data

    def refusal(self, name: str, run: FollowedRun | None = None) -> str:
        """Why a file is not read."""
        with pytest.raises((NoRunFile, NoRunFiles)) as refused:
            self.reader.part(run or self.run, name, 0, 100)
        return refused.value.message

    def mounts(self) -> list[dict[str, Any]]:
        """The containers through which files are read."""
        found: list[dict[str, Any]] = self.engine.client.containers(
            all=True, filters={"label": LABEL_FILES}
        )
        return found


def run_of(user: str) -> FollowedRun:
    run = Run(id="train-0a1b", user=user, title="train", work=Work(folder=FOLDER), created_at=NOW)
    return FollowedRun(run, lease_of(user, engine="docker", server=run.server))


@pytest.fixture
def scene(clean_engine: PrivateEngine, tmp_path: Path) -> Iterator[Scene]:
    workspace = tmp_path / "work"
    (workspace / FOLDER).mkdir(parents=True)
    hours = count()
    services = open_services(
        f"sqlite:///{tmp_path}/files.sqlite", lambda: NOW + timedelta(hours=next(hours))
    )
    services.storage.use_workspace(str(workspace), "ada", None)
    engine = DockerEngine(lambda: clean_engine.client)
    reader = RunFiles(services.storage, {"docker": engine})
    yield Scene(clean_engine, workspace, run_of("ada"), services.storage, reader)
    reader._close(0)
    services.store.close()


def test_parts_of_a_file_are_read_from_both_ends(scene: Scene) -> None:
    (scene.folder / "run.log").write_bytes(b"0123456789" * 300_000)
    assert scene.read("run.log", 12, 5) == b"23456"
    part = scene.reader.part(scene.run, "run.log", -7, 100)
    assert (part.data, part.start, part.size, part.end) == (
        b"3456789",
        2_999_993,
        3_000_000,
        part.size,
    )
    assert scene.read("run.log", 0, 4_000_000) == b"0123456789" * 300_000
    assert scene.read("run.log", 9_999_999) == b""
    with (scene.folder / "run.log").open("ab") as log:
        log.write(b"more")
    assert scene.read("run.log", 3_000_000) == b"more", "as it grows"
    assert len(scene.mounts()) == 1, "one container for all"


def test_volume_is_read_and_never_created(scene: Scene) -> None:
    client, engine = scene.engine.client, scene.engine
    client.create_volume("work-ada")
    script = f"mkdir -p /w/{FOLDER}; echo here > /w/{FOLDER}/run.log"
    assert engine.run(INSTANT, ["sh", "-c", script], binds=["work-ada:/w"])[0] == 0
    scene.storage.use_workspace("work-ada", "ada", None)
    assert scene.read("run.log") == b"here\n"
    scene.storage.use_workspace("work-gone", "bob", None)
    assert scene.refusal("run.log", run_of("bob")) == (
        "The files of this run cannot be shown: its workspace is gone."
    )
    names = [some["Name"] for some in client.volumes()["Volumes"]]
    assert "work-gone" not in names


def test_gone_directory_is_told_and_not_created(scene: Scene, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    scene.storage.use_workspace(str(gone), "bob", None)
    assert scene.refusal("run.log", run_of("bob")).endswith("its workspace is gone.")
    assert not gone.exists()
    assert scene.mounts() == []


def test_symlinks_lead_nowhere_outside(scene: Scene, tmp_path: Path) -> None:
    """Neither as the file, nor as the run's folder, nor further up."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "run.log").write_text("the host's")
    own = f"root:{Path('/etc/shadow').read_bytes()[:40]!r}" if os.access("/etc/shadow", 4) else ""
    for target in (secret / "run.log", Path("/etc/shadow"), Path("../../../../secret/run.log")):
        (scene.folder / "run.log").symlink_to(target)
        said = scene.refusal("run.log")
        assert "not a regular file" in said or "There is no file" in said
        (scene.folder / "run.log").unlink()
    for depth in (scene.folder, scene.folder.parent):
        for target in (secret, Path("../../../secret"), Path("/etc"), Path("/proc/self")):
            kept = depth.with_name("kept")
            depth.rename(kept)
            depth.symlink_to(target)
            for name in ("run.log", "shadow", "environ", "2026-11-28-120000-train/run.log"):
                try:
                    found = scene.read(name)
                except GPUSpawnerError:
                    continue
                assert b"the host's" not in found and (not own or own.encode() not in found)
            depth.unlink()
            kept.rename(depth)


def test_only_regular_files_are_read(scene: Scene) -> None:
    (scene.folder / "deep").mkdir()
    os.mkfifo(scene.folder / "pipe")
    (scene.folder / "link").symlink_to("run.log")
    (scene.folder / "run.log").write_text("here")
    for name in ("deep", "pipe", "link"):
        assert scene.refusal(name).endswith(f"{name} is not a regular file.")
    for name in ("", "..", "../other/run.log", "/etc/passwd", "a//b", "./run.log", "a\0b", "a\nb"):
        assert scene.refusal(name).startswith("There is no file ")
    assert (
        scene.refusal("missing.txt") == "There is no file 'missing.txt' in the folder of this run."
    )


def test_run_elsewhere_or_not_started_is_told(scene: Scene) -> None:
    waits = replace(scene.run, lease=None)
    with pytest.raises(NoRunFiles, match="it has not started yet"):
        scene.reader.part(waits, "run.log", 0, 10)
    assert scene.reader.log(waits, 0, 10).data == b""
    said = scene.refusal("run.log", run_of("bob"))
    assert said.endswith("this hub has no workspace of its member.")
    scene.storage.claim_workspace(str(scene.workspace), "an admin moves it")
    with pytest.raises(WorkspaceBusy, match="an admin moves it"):
        scene.read("run.log")


def test_older_workspace_is_looked_into(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (scene.folder / "run.log").write_text("here")
    scene.storage.use_workspace(str(tmp_path / "new"), "ada", None)
    assert scene.read("run.log") == b"here"


def test_log_is_empty_until_the_run_ended_without_one(scene: Scene) -> None:
    assert scene.reader.log(scene.run, 0, 10).size == 0
    ended = replace(scene.run, run=replace(scene.run.run, outcome="failed"))
    with pytest.raises(NoRunFile):
        scene.reader.log(ended, 0, 10)


def test_record_of_a_member_is_not_trusted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "RECORD_SECONDS", 0.0)
    record = scene.folder / "run.json"
    assert scene.reader.record(scene.run) == RunRecord()
    for text, expected in (
        ('{"cell": 2, "cells": 3, "files": [{"path": "a/b", "size": 4}]}', (2, 3, {"a/b": 4})),
        ('{"cell": 4, "cells": 3}', (None, None, {})),
        ('{"cell": true, "cells": 3}', (None, None, {})),
        ('{"cell": 1e3, "cells": "3", "files": {"path": "x"}}', (None, None, {})),
        ('{"files": [{"path": "../x", "size": 1}, {"path": 5}, 5]}', (None, None, {})),
        ('{"files": [{"path": "y", "size": -1}, {"size": 1}]}', (None, None, {})),
        ("[" * 100_000, (None, None, {})),
        ('{"cell": ' + "9" * 10_000 + "}", (None, None, {})),
        ("\xff\xfe", (None, None, {})),
        ("5", (None, None, {})),
    ):
        record.write_text(text, encoding="latin-1")
        assert scene.reader.record(scene.run) == RunRecord(*expected), text[:100]
    with record.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(NoRunFiles, match="open it in your workspace"):
        scene.reader.record(scene.run)


def test_slow_download_delays_nobody(scene: Scene) -> None:
    """The engine holds a container while a file of it is read; none else waits for it."""
    client = scene.engine.client
    (scene.folder / "model.pt").write_bytes(os.urandom(64 << 20))
    (scene.folder / "run.log").write_text("here")
    binds = client.create_host_config(binds=[f"{scene.workspace}:/w"])
    made = client.create_container(INSTANT, ["sleep", "600"], host_config=binds)
    client.start(made["Id"])
    sent = scene.reader.send(scene.run, "model.pt")
    assert sent.size == 64 << 20
    first = sent.read()
    assert scene.read("run.log") == b"here"
    client.stop(made["Id"], timeout=0)
    received = len(first)
    while data := sent.read():
        received += len(data)
    assert received == sent.size
    sent.close()
    assert len(scene.mounts()) == 1, "that of the log"


def test_removed_container_is_made_again_and_leftovers_go(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scene.folder / "run.log").write_text("here")
    assert scene.read("run.log") == b"here"
    [mount] = scene.mounts()
    scene.engine.client.remove_container(mount["Id"])
    assert scene.read("run.log") == b"here"
    engine = DockerEngine(lambda: scene.engine.client)
    engine.remove_leftovers()
    assert len(scene.mounts()) == 1, "it is in use"
    monkeypatch.setattr(engine_files, "LEFTOVER_AFTER", -1)
    engine.remove_leftovers()
    assert scene.mounts() == []


def test_idle_mount_is_removed(scene: Scene) -> None:
    (scene.folder / "run.log").write_text("here")
    scene.read("run.log")
    scene.reader._close(60.0)
    assert len(scene.mounts()) == 1
    scene.reader._close(0.0)
    assert scene.mounts() == []


def test_engine_that_is_away_is_told(scene: Scene) -> None:
    (scene.folder / "run.log").write_text("here")
    scene.read("run.log")
    scene.engine.kill9()
    try:
        with pytest.raises(EngineUnavailable):
            scene.read("run.log")
    finally:
        scene.engine.start()
    assert scene.read("run.log") == b"here"


def test_streams_of_a_member_are_counted(scene: Scene) -> None:
    open_ones = [scene.reader.stream("ada") for _ in range(MOST_STREAMS_EACH)]
    for one in open_ones:
        one.__enter__()
    with pytest.raises(TooManyStreams), scene.reader.stream("ada"):
        raise AssertionError("it began")
    with scene.reader.stream("bob"):
        pass
    for one in open_ones:
        one.__exit__(None, None, None)
    with scene.reader.stream("ada"):
        pass


def test_mount_is_read_only(scene: Scene) -> None:
    mount = MountedWorkspace(scene.engine.client, str(scene.workspace))
    [container] = scene.mounts()
    inspected = scene.engine.client.inspect_container(container["Id"])
    assert [(each["Destination"], each["RW"]) for each in inspected["Mounts"]] == [
        ("/workspace", False)
    ]
    assert not inspected["State"]["StartedAt"].startswith("20"), "nothing of the image runs"
    mount.close()
