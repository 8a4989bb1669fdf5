"""What members write: into the layer of their container, and into workspaces with quotas. Real:
Docker Engines, two of them in a kernel of their own, on XFS with project quotas and on btrfs;
containers that write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import docker
import pytest

from gpuspawner.engines.base import LABEL_LEASE
from gpuspawner.engines.disk_usage import check_disk, limited, refusal, storage_of, written_bytes
from gpuspawner.engines.preflight import CheckFinding, Status
from gpuspawner.engines.resource_use import read_stats
from gpuspawner.spawners.container import ContainerSettings, DiskLimit, build
from tests.engines.test_spawner_calls import spawner_on
from tests.support.engine import PrivateEngine
from tests.support.images import SILENT
from tests.support.leases import lease_of
from tests.support.uml import run_on_xfs

MB = 2**20
LIMIT = 20 * MB


@pytest.fixture(scope="module")
def told(engines: None, processes: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What :mod:`tests.support.disk_scenes` found: by storage driver, and ``quotas``."""
    return run_on_xfs("tests.support.disk_scenes", tmp_path_factory.mktemp("xfs"))


async def disk_limit(spawner: Any, image: str) -> DiskLimit | None:
    """The limit that a start of this image gets."""
    limit = int(spawner.disk_limit)
    found: DiskLimit | None = await spawner.abilities.disk_limit(spawner.calls, image, limit)
    return found


async def started(engine: PrivateEngine, tmp_path: Path, user: str = "ada") -> str:
    """A container with the limit that the spawner finds for it, which does nothing."""
    spawner = spawner_on(engine, tmp_path, disk_limit="20M")
    disk = await disk_limit(spawner, SILENT)
    settings = ContainerSettings(injection="none", environment={}, disk=disk)
    lease = lease_of(user, id=f"lease-{user}")
    create = {"image": SILENT, "command": ["sleep", "1000"], "host_config": {}}
    made = engine.client.create_container(**build(create, lease, settings))
    engine.client.start(made["Id"])
    return str(made["Id"])


def write(engine: PrivateEngine, container: str, megabytes: int) -> str:
    """What ``dd`` says that writes so much into a container; nothing when it all went in."""
    words = ["dd", "if=/dev/zero", "of=/tmp/large", "bs=1M", f"count={megabytes}", "status=none"]
    made = engine.client.exec_create(container, [*words, "conv=fsync"], user="0")
    said: str = engine.client.exec_start(made["Id"]).decode()
    return said


def check(engine: PrivateEngine, limit: int = LIMIT, image: str = SILENT) -> CheckFinding:
    return check_disk(engine.client, image, limit, is_local=True, why="nobody tried.")


@pytest.mark.parametrize(
    ("driver", "where", "full"),
    [("overlay2", "overlay2 on xfs", "No space left"), ("btrfs", "btrfs", "quota exceeded")],
)
def test_engine_with_quotas_limits_each_container(
    told: Any, driver: str, where: str, full: str
) -> None:
    found = told[driver]
    assert found["may"] and found["refusal"] == ""
    assert full in found["hog"]
    written, verdict = found["hog judged"]
    assert 18 * MB <= written <= 25 * MB
    assert verdict == "near", "and not over, whatever the rounding"
    # With btrfs the image below counts: it is no part of what a member may write.
    assert found["image"] > LIMIT
    assert found["option"] >= LIMIT + (found["image"] if driver == "btrfs" else 0)
    may = "A server may write 20 MB into its own container"
    assert found["check"] == f"{may}; the engine itself refuses more ({where})"
    assert found["untried"] == f"{may}; whether the engine keeps that is not known: nobody tried."


def test_xfs_enforces_the_quotas_of_workspaces(told: Any) -> None:
    """What is asserted is in :mod:`tests.support.quota_scenes`, which runs in that kernel."""
    assert told["quotas"] == ""


def test_engine_with_quotas_limits_each_scratch_directory(told: Any) -> None:
    found = told["overlay2"]["scratch"]
    assert found["refusal"] == ""
    assert "No space left" in found["hog"] and "10+0 records out" in found["neighbour"]
    said = "Each session has a scratch directory of 20 MB; the engine itself refuses more."
    assert found["check"] == said
    assert found["left"] == []


def test_full_container_does_not_affect_its_neighbor(told: Any) -> None:
    assert "10+0 records out" in told["overlay2"]["neighbour"]
    assert told["overlay2"]["neighbour judged"] == [10 * MB, ""]


async def test_enforceable_disk_limit_is_passed_to_the_engine(
    clean_engine: PrivateEngine, images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuspawner.spawners.container.may_enforce", lambda info: True)
    monkeypatch.setattr("gpuspawner.spawners.container.refusal", lambda *args: "")
    spawner = spawner_on(clean_engine, tmp_path, disk_limit="20M")
    assert await disk_limit(spawner, SILENT) == DiskLimit(LIMIT, LIMIT)


async def test_engine_without_quotas_only_measures_containers(
    clean_engine: PrivateEngine, images: Any, tmp_path: Path
) -> None:
    info = clean_engine.client.info()
    assert await disk_limit(spawner_on(clean_engine, tmp_path), SILENT) == DiskLimit(10 * 2**30)
    assert await disk_limit(spawner_on(clean_engine, tmp_path, disk_limit=0), SILENT) is None
    container = await started(clean_engine, tmp_path)
    assert write(clean_engine, container, 30) == ""
    [found] = limited(clean_engine.client)
    written = written_bytes(clean_engine.client, container)
    assert written is not None and found.container_id == container
    assert (found.lease_id, found.is_enforced) == ("lease-ada", False)
    assert (written // MB, found.judge(written)) == (30, "over")
    clean_engine.client.kill(container)
    assert limited(clean_engine.client) == []
    assert written_bytes(clean_engine.client, container) is None

    said = check(clean_engine)
    assert said.status is Status.OK
    assert said.text == (
        "A server may write 20 MB into its own container; the accounting service stops one that "
        f"wrote more, for the engine does not limit it ({storage_of(info)})"
    )
    assert "XFS mounted with pquota" in said.remedy
    none = check(clean_engine, 0)
    assert none.status is Status.UNCHECKED and "disk_limit is 0" in none.text
    huge = check(clean_engine, 2**60)
    assert huge.status is Status.FAIL
    assert huge.text.startswith("The engine's disk has ") and "docker system df" in huge.remedy


def test_disk_limit_refusal_is_reported_without_leftovers(
    clean_engine: PrivateEngine, images: Any
) -> None:
    said = refusal(clean_engine.client, images.SILENT, LIMIT)
    assert "storage-opt" in said
    assert clean_engine.client.containers(all=True) == []
    with pytest.raises(docker.errors.ImageNotFound):
        refusal(clean_engine.client, "gpuspawner/nowhere:1", LIMIT)


async def test_refused_disk_limit_is_remembered_and_not_enforced(
    clean_engine: PrivateEngine,
    images: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that says that it is on XFS, which was mounted without quotas."""
    monkeypatch.setattr("gpuspawner.spawners.container.may_enforce", lambda info: True)
    spawner = spawner_on(clean_engine, tmp_path, disk_limit="20M")
    asked: list[str] = []
    call = spawner.calls.call

    async def counted(method: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(method)
        return await call(method, *args, **kwargs)

    spawner.calls.call = counted
    for _ in range(2):
        assert await disk_limit(spawner, SILENT) == DiskLimit(LIMIT)
    assert asked == ["info"], "it is remembered"
    assert clean_engine.client.containers(all=True, filters={"label": LABEL_LEASE}) == []


def test_use_of_a_container_is_read_from_cgroups_v2(told: Any) -> None:
    """This machine's own are of version 1."""
    answer = told["overlay2"]["neighbour used"]
    assert "cache" not in answer["memory_stats"]["stats"], "a figure of version 1"
    use = read_stats(answer)
    assert use is not None and use.read_at is not None
    assert use.disk_written_bytes is not None and use.disk_written_bytes >= 10 * MB
    assert use.disk_read_bytes is not None
    assert use.cpu_seconds is not None
    # What it wrote is in the cache, which is not counted.
    assert answer["memory_stats"]["usage"] > 10 * MB
    assert use.memory_bytes is not None and 0 < use.memory_bytes < 5 * MB
    assert use.memory_limit_bytes == answer["memory_stats"]["limit"]
    assert (use.memory_highest_bytes, use.network_received_bytes) == (None, None)
