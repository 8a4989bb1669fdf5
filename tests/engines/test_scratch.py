"""Scratch directories: volumes that an engine creates and deletes with a container. Real: a Docker
Engine. That an engine on XFS limits them is tested in test_disk.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from gpuspawner.engines.preflight import Status
from gpuspawner.engines.scratch import (
    LABEL_SCRATCH,
    README,
    Scratch,
    archive_of,
    check_scratch,
    refusal,
    remove_unused,
)
from gpuspawner.spawners.container import ContainerSettings, build
from tests.engines.test_spawner_calls import spawner_on
from tests.support.engine import PrivateEngine
from tests.support.images import SILENT
from tests.support.leases import lease_of

MB = 2**20


def scratch_volumes(engine: PrivateEngine) -> dict[str, str]:
    """The lease's id of each scratch volume, by the volume's name."""
    listed = engine.client.volumes(filters={"label": LABEL_SCRATCH})["Volumes"] or []
    return {each["Name"]: each["Labels"][LABEL_SCRATCH] for each in listed}


def created(engine: PrivateEngine, user: str = "ada") -> str:
    """A container with an open scratch directory, which was not started."""
    scratch = Scratch("/scratch", 20 * MB, is_enforced=False)
    settings = ContainerSettings(injection="none", environment={}, scratch=scratch)
    create = {"image": SILENT, "command": ["sleep", "1000"], "host_config": {}}
    lease = lease_of(user, id=f"lease-{user}")
    container = str(engine.client.create_container(**build(create, lease, settings))["Id"])
    assert engine.client.put_archive(container, *archive_of("/scratch", "/home/jovyan/work"))
    return container


def test_each_user_of_a_container_can_write_into_its_scratch(
    clean_engine: PrivateEngine, images: Any
) -> None:
    container = created(clean_engine)
    clean_engine.client.start(container)
    code, said = clean_engine.execute(container, ["cat", f"/scratch/{README}"])
    assert code == 0 and "is deleted when this session or run ends" in said
    assert "Keep what you need in /home/jovyan/work." in said
    write = ["sh", "-c", "mkdir /scratch/own && echo kept > /scratch/own/file"]
    assert clean_engine.execute(container, write, user="4321")[0] == 0
    assert list(scratch_volumes(clean_engine).values()) == ["lease-ada"]


def test_scratch_is_deleted_with_its_container(clean_engine: PrivateEngine, images: Any) -> None:
    container = created(clean_engine)
    clean_engine.client.start(container)
    clean_engine.client.kill(container)
    clean_engine.client.remove_container(container, v=True)
    assert scratch_volumes(clean_engine) == {}


def test_only_scratch_without_a_container_is_unused(
    clean_engine: PrivateEngine, images: Any
) -> None:
    """Other unused volumes stay, and so does the scratch of a container that never ran."""
    clean_engine.client.create_volume("somebody-elses")
    left = created(clean_engine, "ada")
    created(clean_engine, "bob")
    clean_engine.client.remove_container(left)
    assert sorted(scratch_volumes(clean_engine).values()) == ["lease-ada", "lease-bob"]
    assert remove_unused(clean_engine.client) == ["lease-ada"]
    assert list(scratch_volumes(clean_engine).values()) == ["lease-bob"]
    assert remove_unused(clean_engine.client) == []
    assert clean_engine.client.inspect_volume("somebody-elses")


def test_check_reports_scratch_that_nothing_limits(
    clean_engine: PrivateEngine, images: Any
) -> None:
    check = partial(check_scratch, clean_engine.client, is_local=True, is_removed=True)
    assert check(0) is None
    found = check(20 * MB)
    assert found is not None and found.status is Status.FAIL
    may = "Each session has a scratch directory of 20 MB, but nothing keeps a session from writing"
    assert found.text.startswith(may) and "quota" in found.text
    assert "XFS mounted with pquota" in found.remedy
    kept = check_scratch(clean_engine.client, MB, is_local=True, is_removed=False)
    assert kept is not None and kept.status is Status.FAIL and "remove = True" in kept.remedy
    huge = check(2**60)
    assert huge is not None and huge.text.startswith("The engine's disk has ")
    assert clean_engine.client.volumes()["Volumes"] in (None, [])


async def test_engine_without_quotas_gets_no_size(
    clean_engine: PrivateEngine,
    images: Any,
    tmp_path: Path,
) -> None:
    """It refuses a container with one, and members' servers must start all the same."""
    spawner = spawner_on(clean_engine, tmp_path)
    for _ in range(2):
        found = await spawner.abilities.scratch(spawner.calls, "/scratch", MB)
        assert found == Scratch("/scratch", MB, is_enforced=False)
    assert refusal(clean_engine.client, MB)
