"""Real: the command as a process, Docker Engine, containers, SQLite. Simulated: the devices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.db.engine import Store
from gpuspawner.engines.base import LABEL_LEASE, LABEL_MEMBER, LABEL_SERVER
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef
from gpuspawner.services import Services
from tests.support.brokers import make_services
from tests.support.engine import PrivateEngine
from tests.support.preloaded import PRELOADED
from tests.support.processes import REPO, wait_for

CONFIG = """
c = get_config()
c.JupyterHub.spawner_class = "gpuspawner.spawners.docker.GPUDockerSpawner"
c.DockerSpawner.client_kwargs = {{"base_url": {engine!r}}}
c.GPUDockerSpawner.image = "an-image"
c.GPUDatabase.url = {database!r}
c.GPUDevices.source = "simulated:2xT4"
"""


@pytest.fixture
def services(clean_engine: PrivateEngine, tmp_path: Path) -> Iterator[Services]:
    database = f"sqlite:///{tmp_path}/hub.sqlite"
    text = CONFIG.format(engine=clean_engine.url, database=database)
    (tmp_path / "jupyterhub_config.py").write_text(text)
    services = make_services(database_url=database, device_source="simulated:2xT4")
    services.ledger.open_account("ada")
    yield services
    Store.open(database).close()


def start(engine: PrivateEngine, image: str, services: Services) -> Lease:
    """A lease, and a container that carries its id."""
    lease = services.leases.grant(ServerRef("ada"), Request(devices=1), engine="docker")
    labels = {LABEL_LEASE: lease.id, LABEL_MEMBER: "ada", LABEL_SERVER: ""}
    container = engine.client.create_container(image, ["sleep", "600"], labels=labels)["Id"]
    engine.client.start(container)
    return services.leases.confirm(lease.id, container)


def release(folder: Path, lease: Lease, *more: str) -> tuple[int, str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "TZ": "UTC"}
    done = PRELOADED.run(["release", lease.id, "--yes", *more], folder, environment, answer="")
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def settled(
    services: Services, lease: Lease, folder: Path, after: datetime, before: datetime
) -> str:
    """What the command says that settles a lease whose server ended between these times."""
    code, said = release(folder, lease)
    ended = services.leases.get(lease.id)
    assert (code, ended.state) == (0, LeaseState.ENDED), said
    assert ended.ended_at is not None and after <= ended.ended_at <= before
    return said


def test_release_keeps_a_running_server_and_settles_it_at_its_exit(
    clean_engine: PrivateEngine, images: Any, services: Services, tmp_path: Path
) -> None:
    lease = start(clean_engine, images.INSTANT, services)
    code, said = release(tmp_path, lease)
    assert (code, services.leases.get(lease.id).state) == (1, LeaseState.RUNNING)
    assert f"its container {lease.engine_ref[:12]} is alive" in said

    killed = services.clock()
    clean_engine.client.kill(lease.engine_ref)
    clean_engine.client.wait(lease.engine_ref)
    said = settled(services, lease, tmp_path, killed, services.clock())
    assert "exited at" in said
    assert "(exit code 137)" in said


def test_release_settles_a_removed_container_at_its_removal(
    clean_engine: PrivateEngine, images: Any, services: Services, tmp_path: Path
) -> None:
    lease = start(clean_engine, images.INSTANT, services)
    before = services.clock()
    clean_engine.client.remove_container(lease.engine_ref, force=True)
    removed = services.clock()
    wait_for(lambda: services.clock() - removed > timedelta(seconds=1), "some time to pass")
    assert "its container is gone, ended at" in settled(services, lease, tmp_path, before, removed)


def test_release_keeps_a_lease_before_its_container_exists(
    services: Services, tmp_path: Path
) -> None:
    lease = services.leases.grant(ServerRef("ada"), Request(devices=1), engine="docker")
    code, said = release(tmp_path, lease)
    assert (code, services.leases.get(lease.id).state) == (1, LeaseState.GRANTED)
    assert "an image is pulled" in said


def test_release_requires_the_original_engine(
    clean_engine: PrivateEngine, images: Any, services: Services, tmp_path: Path
) -> None:
    lease = start(clean_engine, images.INSTANT, services)
    clean_engine.client.remove_container(lease.engine_ref, force=True)
    services.leases.note_engine(lease.id, "an engine that is not this one")
    code, said = release(tmp_path, lease)
    assert (code, services.leases.get(lease.id).state) == (1, LeaseState.RUNNING)
    assert "another Docker Engine answers" in said
