"""Real: Docker Engine, images, PostgreSQL, JupyterHub with its proxy. Stand-in: the GPU.

What the other tests take for granted of these parts is proved here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import docker.errors
import pytest
import requests
import sqlalchemy
from docker.types import DeviceRequest

from tests.support.engine import DEVICES, PrivateEngine
from tests.support.hub import HubProcess
from tests.support.images import INSTANT
from tests.support.processes import command_of

LIST = ["sh", "-c", "ls /dev/nvidia* 2>/dev/null; nvidia-smi -L 2>/dev/null; true"]


# The engine and its hook.


def test_device_request_gives_exactly_the_requested_devices(
    clean_engine: PrivateEngine, images: Any
) -> None:
    code, printed = clean_engine.run(images.INSTANT, LIST, [DEVICES[3], DEVICES[1]])
    assert code == 0
    assert printed.splitlines() == [
        "/dev/nvidia1",
        "/dev/nvidia3",
        f"GPU 0: Simulated GPU (UUID: {DEVICES[3]})",
        f"GPU 1: Simulated GPU (UUID: {DEVICES[1]})",
    ]


@pytest.mark.parametrize("wanted", ["void", "none", ""])
def test_container_without_a_request_has_no_device(
    clean_engine: PrivateEngine, images: Any, wanted: str
) -> None:
    visible = {"NVIDIA_VISIBLE_DEVICES": wanted}
    assert clean_engine.run(images.INSTANT, LIST, environment=visible) == (0, "")
    in_its_runtime = clean_engine.run(images.INSTANT, LIST, environment=visible, runtime="nvidia")
    assert in_its_runtime == (0, "")


def test_nvidia_runtime_follows_the_visible_devices_variable(
    clean_engine: PrivateEngine, images: Any
) -> None:
    visible = {"NVIDIA_VISIBLE_DEVICES": DEVICES[2]}
    _, printed = clean_engine.run(images.INSTANT, LIST, environment=visible, runtime="nvidia")
    assert printed.splitlines()[0] == "/dev/nvidia2"
    _, plain = clean_engine.run(images.INSTANT, LIST, environment=visible)
    assert plain == "", "the plain runtime has no hook, and so no device"


def test_containers_end_on_engine_restart_but_survive_its_kill(
    clean_engine: PrivateEngine, images: Any
) -> None:
    def start() -> str:
        made = clean_engine.client.create_container(images.SILENT)["Id"]
        clean_engine.client.start(made)
        return str(made)

    def state(container: str) -> dict[str, Any]:
        found: dict[str, Any] = clean_engine.client.inspect_container(container)["State"]
        return found

    first = start()
    clean_engine.restart()
    assert state(first)["Running"] is False
    second = start()
    pid = state(second)["Pid"]
    clean_engine.kill9()
    assert Path(f"/proc/{pid}").exists(), "the container lives on without its daemon"
    with pytest.raises(requests.ConnectionError):
        clean_engine.client.inspect_container(second)
    clean_engine.start()
    assert state(second)["Running"] is False


def test_second_engine_runs_separately_and_cleans_up(engines: None, engine: PrivateEngine) -> None:
    with PrivateEngine() as other:
        assert other.url != engine.url
        assert other.gateway != engine.gateway
        other.client.create_volume("left-behind")
        other.clean()
        assert not other.client.volumes()["Volumes"]
        interface = Path("/sys/class/net", other.bridge)
        assert interface.exists()
    assert not interface.exists()
    assert engine.client.ping()


def test_cdi_gives_exactly_the_named_devices(cdi_engine: PrivateEngine) -> None:
    def named(*uuids: str) -> DeviceRequest:
        names = [f"nvidia.com/gpu={uuid}" for uuid in uuids]
        return DeviceRequest(driver="cdi", device_ids=names)

    _, printed = cdi_engine.run(INSTANT, LIST, device_requests=[named(DEVICES[3], DEVICES[1])])
    assert printed.splitlines() == [
        "/dev/nvidia1",
        "/dev/nvidia3",
        f"GPU 0: Simulated GPU (UUID: {DEVICES[1]})",
        f"GPU 1: Simulated GPU (UUID: {DEVICES[3]})",
    ]
    assert cdi_engine.run(INSTANT, LIST) == (0, "")
    with pytest.raises(docker.errors.APIError, match="unresolvable CDI devices"):
        cdi_engine.run(INSTANT, LIST, device_requests=[named("GPU-nowhere")])
    # The same engine knows the hook's device requests too.
    _, printed = cdi_engine.run(INSTANT, LIST, [DEVICES[2]])
    assert printed.startswith("/dev/nvidia2\n")


# The database server.


def test_postgres_separates_databases_and_survives_a_halt(postgres: Any) -> None:
    first, second = (
        sqlalchemy.create_engine(postgres.fresh_database(), pool_pre_ping=True) for _ in range(2)
    )
    with first.begin() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE noted (n int)"))
        connection.execute(sqlalchemy.text("INSERT INTO noted VALUES (7)"))
    assert sqlalchemy.inspect(second).get_table_names() == []
    postgres.halt()
    with pytest.raises(sqlalchemy.exc.OperationalError), first.connect():
        pass
    postgres.start()
    with first.connect() as connection:
        assert connection.execute(sqlalchemy.text("SELECT n FROM noted")).scalar_one() == 7
    first.dispose()
    second.dispose()


# The hub.


def test_stopped_hub_leaves_no_processes(hub_factory: Any) -> None:
    hub: HubProcess = hub_factory()
    assert hub.login("ann").get(f"{hub.url}/hub/home", timeout=120).status_code == 200
    with pytest.raises(PermissionError, match="ann was not signed in: 403"):
        hub.login("ann", "not the password")
    assert hub.api("GET", "users/ann").json()["admin"] is False
    hub.kill9()
    assert list(hub.children_left()), "the proxy lives on"
    hub.stop()
    assert list(hub.children_left()) == []


def test_hub_kill_spares_services_unless_requested(hub_factory: Any) -> None:
    config = """
c.JupyterHub.services = [{"name": "sleeper", "command": ["sleep", "600"]}]
"""
    hub: HubProcess = hub_factory(config)

    def sleepers() -> int:
        return sum(command_of(p) == ["sleep", "600"] for p in hub.children_left())

    assert sleepers() == 1
    hub.kill9()
    assert sleepers() == 1
    hub.start()
    assert sleepers() == 2, "a restarted hub knows nothing of the service that lives on"
    hub.kill9(services=True)
    assert sleepers() == 1
    hub.stop()
    assert sleepers() == 0
