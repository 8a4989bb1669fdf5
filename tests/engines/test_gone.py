"""What proves a container gone, and what does not. Real: Docker Engines, containers, SQLite.
Simulated: the devices of the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from docker.types import DeviceRequest

from gpuspawner.core.errors import AnotherEngine, EngineUnavailable
from gpuspawner.db.engine import Store
from gpuspawner.engines.base import LABEL_LEASE, LABEL_MEMBER, LABEL_SERVER
from gpuspawner.engines.docker import DockerEngine
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef
from gpuspawner.leases.reconciliation import Action, Unknown
from gpuspawner.services import Services
from tests.support.brokers import make_services
from tests.support.engine import PrivateEngine, open_engine
from tests.support.gate import Gate
from tests.support.images import EXITS
from tests.support.processes import wait_for

ADA = ServerRef("ada")
FLEET = "simulated:1xT4"


@pytest.fixture
def services(clean_engine: PrivateEngine, new_file: Callable[[], str]) -> Iterator[Services]:
    """A store with one device, which the engine's stand-in hook has too."""
    services = make_services(database_url=new_file(), device_source=FLEET)
    clean_engine.set_devices(device.uuid for device in services.devices.look().devices)
    services.ledger.open_account("ada")
    services.leases.engine_ids["docker"] = open_engine(clean_engine.url).identity()
    yield services
    Store.open(services.settings.database.url).close()


def container(engine: PrivateEngine, image: str, lease: Lease, **more: Any) -> str:
    """Start a container of this lease with its devices; its id."""
    asked = DeviceRequest(device_ids=list(more.pop("devices", lease.uuids)), capabilities=[["gpu"]])
    labels = more.pop("labels", None)
    if labels is None:
        labels = {LABEL_LEASE: lease.id, LABEL_MEMBER: "ada", LABEL_SERVER: ""}
    restart = more.pop("restart", None)
    host = engine.client.create_host_config(device_requests=[asked], restart_policy=restart)
    command = more.pop("command", ["sleep", "600"])
    made = engine.client.create_container(
        image, command, labels=labels, host_config=host, stop_signal="SIGKILL", **more
    )
    engine.client.start(made["Id"])
    return str(made["Id"])


@pytest.fixture
def lease(clean_engine: PrivateEngine, images: Any, services: Services) -> Lease:
    """A running one; its container is called ``jupyter-ada``."""
    granted = services.leases.grant(ADA, Request(devices=1), engine="docker")
    made = container(clean_engine, images.INSTANT, granted, name="jupyter-ada")
    return services.leases.confirm(granted.id, made)


def reconcile(services: Services, engine: DockerEngine) -> list[Action]:
    """One comparison, after the Hub has let go of every server."""
    leases = services.leases.open_leases()
    found = engine.sightings()
    found += engine.removed(leases, found)
    return services.leases.reconcile({"docker": found}, {}, grace_seconds=0)


def is_free(services: Services) -> bool:
    return not services.leases.open_leases()


def test_renamed_or_paused_container_holds_its_lease(
    clean_engine: PrivateEngine, services: Services, lease: Lease
) -> None:
    engine = open_engine(clean_engine.url)
    clean_engine.client.rename(lease.engine_ref, "something-else")
    assert [each["Id"] for each in engine.holders(lease, "jupyter-ada")] == [lease.engine_ref]
    reconcile(services, engine)
    assert not is_free(services), "it has another name"
    clean_engine.client.pause(lease.engine_ref)
    reconcile(services, engine)
    assert not is_free(services), "it is paused"
    clean_engine.client.remove_container(lease.engine_ref, force=True)
    reconcile(services, engine)
    assert is_free(services)


def test_unlabeled_container_with_the_device_holds_the_lease(
    clean_engine: PrivateEngine, images: Any, services: Services, lease: Lease
) -> None:
    """Somebody made the container anew by hand: neither label nor id are the lease's."""
    engine = open_engine(clean_engine.url)
    clean_engine.client.remove_container(lease.engine_ref, force=True)
    made = container(clean_engine, images.INSTANT, lease, labels={}, name="by-hand")
    [action] = reconcile(services, engine)
    assert isinstance(action, Unknown) and action.is_stuck
    assert "the container by-hand" in action.reason
    assert not is_free(services)
    assert engine.inspect(made) is not None, "it is not ours to end"
    clean_engine.client.remove_container(made, force=True)
    reconcile(services, engine)
    assert is_free(services)


def test_container_older_than_the_grant_holds_nothing(
    clean_engine: PrivateEngine, images: Any, services: Services
) -> None:
    """An admin's own, such as one that watches the GPU for good."""
    before = services.leases.grant(ADA, Request(devices=1), engine="docker")
    container(clean_engine, images.INSTANT, before, labels={}, name="watches")
    services.leases.release(before.id, reason="it was never started")
    lease = services.leases.grant(ADA, Request(devices=1), engine="docker")
    assert open_engine(clean_engine.url).holders(lease) == []


def test_another_engine_cannot_end_a_lease(
    clean_engine: PrivateEngine, cdi_engine: PrivateEngine, services: Services, lease: Lease
) -> None:
    """A container of the same name there proves nothing, whether it ended or never started."""
    other, client = open_engine(cdi_engine.url), cdi_engine.client
    assert other.identity() != lease.engine_id != ""
    made = client.create_container(EXITS, name="jupyter-ada")["Id"]
    try:
        with pytest.raises(AnotherEngine):
            other.holders(lease, "jupyter-ada")
        client.start(made)
        client.wait(made)
        with pytest.raises(AnotherEngine):
            other.holders(lease, "jupyter-ada")
    finally:
        client.remove_container(made, force=True)
    [action] = reconcile(services, other)
    assert isinstance(action, Unknown) and action.is_stuck
    assert "another engine answers" in action.reason and lease.id in action.reason
    assert services.leases.get(lease.id).state is LeaseState.RUNNING
    assert open_engine(clean_engine.url).holders(lease, "jupyter-ada")
    clean_engine.client.remove_container(lease.engine_ref, force=True)
    reconcile(services, open_engine(clean_engine.url))
    assert is_free(services)


def test_another_engine_cannot_end_an_interrupted_start(
    clean_engine: PrivateEngine, services: Services
) -> None:
    granted = services.leases.grant(ADA, Request(devices=1), engine="docker")
    services.leases.note_engine(granted.id, "an engine that is not this one")
    [action] = reconcile(services, open_engine(clean_engine.url))
    assert isinstance(action, Unknown) and action.is_stuck


def test_auto_restarting_container_holds_its_lease(
    clean_engine: PrivateEngine, images: Any, services: Services
) -> None:
    granted = services.leases.grant(ADA, Request(devices=1), engine="docker")
    restarts = {"Name": "always"}
    made = container(
        clean_engine, EXITS, granted, restart=restarts, name="jupyter-ada", command=None
    )
    services.leases.confirm(granted.id, made)
    client = clean_engine.client
    wait_for(lambda: client.inspect_container(made)["RestartCount"] >= 2, "two restarts")
    engine = open_engine(clean_engine.url)
    for _ in range(5):
        reconcile(services, engine)
        assert not is_free(services)


def test_lost_engine_connection_does_not_prove_containers_gone(
    clean_engine: PrivateEngine, lease: Lease
) -> None:
    with Gate(clean_engine.url) as gate:
        engine = open_engine(gate.url)
        assert engine.holders(lease)
        gate.shut()
        for ask in (engine.sightings, engine.identity, lambda: engine.removed([lease], [])):
            with pytest.raises(EngineUnavailable):
                ask()
        gate.open()
        assert engine.holders(lease)
