"""A server that fills its own container. Real: hub, proxy, accounting service, a Docker Engine,
containers that write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpuspawner.leases.models import LeaseState
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.services import Broker
from tests.support.brokers import make_broker
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub, assert_in_words
from tests.support.processes import free_port, wait_for

CONFIG = """
c.GPUDockerSpawner.disk_limit = "60M"
c.GPUDockerSpawner.workspace = "disk-{username}"
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:%d")
"""


@pytest.fixture(scope="module")
def hub(
    hubs: None, engine: PrivateEngine, images: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GPUHub]:
    folder = tmp_path_factory.mktemp("disk") / "hub"
    with GPUHub(folder, engine, CONFIG % free_port()) as hub:
        yield hub
    engine.clean()


@pytest.fixture
def broker(hub: GPUHub) -> Iterator[Broker]:
    broker = make_broker(database_url=hub.database_url, device_source="simulated:2xA100-80GB")
    yield broker
    broker.store.close()


def write(hub: GPUHub, user: str, file: str, megabytes: int) -> None:
    [container] = [c for c in hub.containers() if c["Labels"]["gpuspawner.member"] == user]
    words = ["dd", "if=/dev/zero", f"of={file}", "bs=1M", f"count={megabytes}", "conv=fsync"]
    client = hub.engine.client
    client.exec_start(client.exec_create(container["Id"], words, user="0")["Id"])


def test_a_server_over_its_limit_is_stopped_and_no_other(hub: GPUHub, broker: Broker) -> None:
    for user, environment in (("ada", "instant"), ("bob", "cpu")):
        assert hub.spawn(user, {"environment": environment}).ok
        hub.wait_server(user)

    def told(user: str) -> dict[NoticeKind, str]:
        return {n.kind: f"{n.title}. {n.body}" for n in broker.notifications.notices_of(user)}

    [lease] = hub.open_leases("bob")
    assert lease.devices == (), "who has no GPU has a limit as well"
    write(hub, "bob", "/home/jovyan/work/large", 100)  # his workspace is no part of it
    write(hub, "bob", "/tmp/large", 50)
    warned = wait_for(lambda: told("bob").get(NoticeKind.DISK_LOW), "the warning", timeout=30)
    assert "wrote 50 MB of 60 MB into its own container" in warned
    assert "beyond 60 MB, it is stopped. Write large files to /home/jovyan/work" in warned
    assert hub.open_leases("bob") == [lease] or not hub.open_leases("bob")[0].outcome

    write(hub, "bob", "/tmp/larger", 30)
    wait_for(lambda: not hub.open_leases("bob"), "the end of who wrote too much", timeout=60)
    ended = broker.lease(lease.id)
    assert (ended.outcome, ended.state) == ("disk", LeaseState.ENDED)
    assert ended.end_reason == "it wrote 80 MB into its own container, and may write 60 MB"
    assert told("bob").keys() == {NoticeKind.DISK_LOW, NoticeKind.STOPPED}, "each once"
    assert len(broker.notifications.notices_of("bob")) == 2
    said = told("bob")[NoticeKind.STOPPED]
    assert said.startswith("Your server is stopped: it filled its own container. It wrote 80 MB")
    assert "What is in /home/jovyan/work is kept" in said and "ask your admin" in said
    for text in (said, warned):
        assert "disk_limit" not in text
        assert_in_words(text)
    wait_for(lambda: len(hub.containers()) == 1, "the room that it gives back", timeout=30)

    # Her server goes on, and his starts again, with what he had in his workspace.
    [hers] = hub.open_leases("ada")
    assert hers.state is LeaseState.RUNNING and not hers.outcome and told("ada") == {}
    assert hub.get("ada", "devices").ok
    assert hub.spawn("bob", {"environment": "cpu"}).ok
    hub.wait_server("bob")
    engine = hub.engine.client
    [his] = [c for c in hub.containers() if c["Labels"]["gpuspawner.member"] == "bob"]
    made = engine.exec_create(his["Id"], ["du", "-m", "/home/jovyan/work/large"])
    assert engine.exec_start(made["Id"]).decode().split()[0] in ("100", "101")
    assert "Traceback" not in hub.log_text()
