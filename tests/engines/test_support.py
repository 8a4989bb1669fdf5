"""Real: Docker Engine, images, PostgreSQL, JupyterHub with its proxy, Chromium. Stand-in: the GPU.

The other tests lean on these parts, so each is proved here by itself.
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
from tests.support.processes import command_of, wait_for

LIST = ["sh", "-c", "ls /dev/nvidia* 2>/dev/null; nvidia-smi -L 2>/dev/null; true"]


def docker_config(engine: PrivateEngine, image: str) -> str:
    """A stock DockerSpawner on this engine."""
    return f"""
c.JupyterHub.spawner_class = "docker"
c.JupyterHub.cleanup_servers = False
c.DockerSpawner.client_kwargs = {{"base_url": {engine.url!r}}}
c.DockerSpawner.image = {image!r}
c.DockerSpawner.remove = True
"""


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


def test_unknown_device_prevents_the_container_start(
    clean_engine: PrivateEngine, images: Any
) -> None:
    with pytest.raises(docker.errors.APIError, match="GPU-nowhere: unknown device"):
        clean_engine.run(images.INSTANT, LIST, ["GPU-nowhere"])


def test_engine_devices_can_be_replaced(clean_engine: PrivateEngine, images: Any) -> None:
    clean_engine.set_devices(["GPU-other"], model="T4")
    _, printed = clean_engine.run(images.INSTANT, LIST, ["GPU-other"])
    assert printed.splitlines() == ["/dev/nvidia0", "GPU 0: T4 (UUID: GPU-other)"]
    with pytest.raises(docker.errors.APIError, match="unknown device"):
        clean_engine.run(images.INSTANT, LIST, [DEVICES[0]])


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
    from tests.support.images import INSTANT

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


# The images that stand for broken environments.


def test_failing_image_exits_with_its_message(clean_engine: PrivateEngine, images: Any) -> None:
    code, printed = clean_engine.run(images.EXITS, None)
    assert (code, "made to fail" in printed) == (3, True)


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


def test_empty_database_url_has_no_tables(empty_database_url: str) -> None:
    database = sqlalchemy.create_engine(empty_database_url)
    assert sqlalchemy.inspect(database).get_table_names() == []
    assert database.dialect.name in empty_database_url
    database.dispose()


def test_database_url_has_tables_without_rows(database_url: str) -> None:
    database = sqlalchemy.create_engine(database_url)
    with database.connect() as connection:
        tables = sqlalchemy.inspect(connection).get_table_names()
        assert "leases" in tables
        for table in set(tables) - {"gpuspawner_version"}:
            counted = sqlalchemy.select(sqlalchemy.func.count()).select_from(
                sqlalchemy.table(table)
            )
            assert connection.execute(counted).scalar() == 0, table
    database.dispose()


# The hub.


def test_stock_hub_runs_code_in_a_container(
    clean_engine: PrivateEngine, images: Any, hub_factory: Any
) -> None:
    config = docker_config(clean_engine, images.BASE)
    hub: HubProcess = hub_factory(config, hub_ip=clean_engine.gateway)
    assert hub.spawn("ann").status_code in (201, 202)
    hub.wait_server("ann")
    assert hub.progress("ann")[-1]["ready"] is True
    assert hub.kernel_run("ann", "import os; os.environ['JUPYTERHUB_USER']") == "'ann'"
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        hub.kernel_run("ann", "1 / 0")
    hub.stop_server("ann")
    # The hub is content with a removal that has begun.
    wait_for(lambda: not clean_engine.client.containers(all=True), "the container's removal")


def test_servers_outlive_a_killed_hub(
    clean_engine: PrivateEngine, images: Any, hub_factory: Any
) -> None:
    config = docker_config(clean_engine, images.INSTANT)
    hub: HubProcess = hub_factory(config, hub_ip=clean_engine.gateway, external_proxy=True)
    hub.spawn("ann")
    hub.wait_server("ann")
    assert "NVIDIA_VISIBLE_DEVICES=void" in hub.get("ann", "env").text
    hub.kill9()
    assert requests.get(f"{hub.url}/user/ann/env", timeout=120).status_code == 200
    assert requests.get(f"{hub.url}/hub/home", timeout=120).status_code == 503
    hub.start()
    found = hub.server("ann")
    assert found and found["ready"]


def test_failed_spawn_reports_its_reason(
    clean_engine: PrivateEngine, images: Any, hub_factory: Any
) -> None:
    config = docker_config(clean_engine, images.EXITS)
    hub: HubProcess = hub_factory(config, hub_ip=clean_engine.gateway)
    hub.spawn("ann")
    with pytest.raises(RuntimeError, match="ann's server did not start: Spawn failed"):
        hub.wait_server("ann")


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


# The browser.


def test_browser_shows_the_login_page(hub_factory: Any, browser: Any) -> None:
    from tests.support.browser import screenshot

    hub: HubProcess = hub_factory()
    page = browser.new_page()
    page.goto(f"{hub.url}/hub/login")
    assert page.get_by_label("Username:").is_visible()
    picture = screenshot(page, "support login page")
    assert picture.read_bytes().startswith(b"\x89PNG")
