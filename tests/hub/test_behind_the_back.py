"""Servers that end without the hub. Real: hub, proxy, Docker Engine and its events, SQLite."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from docker.errors import APIError, NotFound
from docker.types import DeviceRequest

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.ledger.rules import owed
from tests.support.engine import PrivateEngine
from tests.support.gate import Gate
from tests.support.gpu_hub import GPUHub
from tests.support.images import INSTANT
from tests.support.page_text import text_of
from tests.support.polls import COUNTED, wait_polls
from tests.support.processes import wait_for

GRANT = 100_000
POLL = 1
"""Seconds between two looks of the hub at a server."""
EXACT = timedelta(seconds=0.25)
"""How long after the engine's own word an end may be; far less than a look takes to come."""

CONFIG = f"""
c.GPURates.by_model = {{"*": 3600}}  # a credit a second
c.GPUCredits.opening_grant = {GRANT}
c.Spawner.poll_interval = {POLL}
c.JupyterHub.allow_named_servers = True
"""


STARTED_AGAIN = """
import pathlib

class StartedAgain(Counted):
    async def remove_object(self):
        by_hand = pathlib.Path("start-again")
        if by_hand.exists():
            by_hand.unlink()
            self.client.start(self.container_id)
        await super().remove_object()

c.JupyterHub.spawner_class = StartedAgain
"""
"""Starts a container by hand between its end and its removal, where the test says so."""


@pytest.fixture(scope="module")
def hub(
    hubs: None, engine: PrivateEngine, images: Any, gate: Gate, folder: Path
) -> Iterator[GPUHub]:
    """One device, so that the next member gets it only when it is really free."""
    config = CONFIG + COUNTED + STARTED_AGAIN
    with GPUHub(folder / "hub", engine, config, fleet="1xT4", docker_host=gate.url) as hub:
        yield hub
    engine.clean()


def started(hub: GPUHub, member: str) -> tuple[Lease, str]:
    """Start a server on the only device and return its lease and its container's id.

    Each test leaves the device free.
    """
    hub.spawn_and_wait(member, {"gpus": 1})
    [lease] = hub.open_leases()
    [container] = hub.containers()
    assert lease.engine_ref == container["Id"]
    return lease, container["Id"]


def now() -> datetime:
    return datetime.now(timezone.utc)


def died_at(engine: PrivateEngine, container: str, since: datetime) -> datetime:
    """When the engine said that a container died: soon after it did, later on a busy machine."""
    events = engine.client.events(
        since=since - timedelta(seconds=5),
        until=now() + timedelta(seconds=1),
        filters={"container": container, "event": ["die"]},
        decode=True,
    )
    [event] = list(events)
    return datetime.fromtimestamp(event["timeNano"] / 1e9, tz=timezone.utc)


def assert_settled(hub: GPUHub, lease: Lease, lived: datetime, died: datetime) -> Lease:
    """Stopped for the hub, released for everybody, and paid up to the proven end, which is after
    it ``lived`` and not after it ``died``."""
    member = lease.server.user
    wait_for(lambda: hub.server(member) is None, "the hub to show it stopped", timeout=10)
    wait_for(lambda: not hub.open_leases(member), "the release", timeout=10)
    [ended] = hub.leases(member)
    assert ended.id == lease.id and ended.state is LeaseState.ENDED
    assert ended.ended_at is not None and ended.started_at is not None
    assert lived <= ended.ended_at, "not paid up to when it died"
    assert ended.ended_at <= died + EXACT, "paid up to when it was noticed, not when it died"
    assert ended.charged == owed(ended.rate, ended.started_at, ended.ended_at)
    assert hub.balance(member) == GRANT * MICRO - ended.charged
    assert not hub.containers()
    return ended


ENDS: dict[str, Callable[[PrivateEngine, str], Any]] = {
    "killed": lambda engine, container: engine.client.kill(container),
    "removed": lambda engine, container: engine.client.remove_container(container, force=True),
}


@pytest.mark.parametrize("how", ENDS)
def test_server_ended_by_hand_is_settled(
    hub: GPUHub, engine: PrivateEngine, member: str, how: str
) -> None:
    lease, container = started(hub, member)
    lived = now()
    ENDS[how](engine, container)
    wait_for(lambda: hub.server(member) is None, "the hub to show it stopped", timeout=POLL + 4)
    ended = assert_settled(hub, lease, lived, died_at(engine, container, lease.granted_at))
    if how == "killed":
        assert "exit code 137" in ended.end_reason
    home = hub.open_page(member, "/hub/home")
    assert home.ok and "Start My Server" in text_of(home.text)


def test_server_removed_during_outage_is_settled(
    hub: GPUHub, engine: PrivateEngine, gate: Gate, member: str
) -> None:
    """However late it is noticed, what is paid ends with the server."""
    lease, container = started(hub, member)
    gate.shut()
    lived = now()
    try:
        engine.client.remove_container(container, force=True)
        wait_polls(hub, member, 2)
        assert hub.server(member) is not None, "not being able to see is not an end"
        assert [open_lease.id for open_lease in hub.open_leases()] == [lease.id]
        answer = hub.spawn(f"{member}-other", {"gpus": 1, "wait": "no"})
        assert answer.status_code == 409, "unknown is never free"
    finally:
        gate.open()
    assert_settled(hub, lease, lived, died_at(engine, container, lease.granted_at))


def test_outage_and_new_name_end_no_session(
    hub: GPUHub, engine: PrivateEngine, gate: Gate, member: str
) -> None:
    """A container's name is not what a server is known by."""
    lease, container = started(hub, member)
    engine.client.rename(container, "renamed-by-hand")
    gate.shut()
    try:
        wait_polls(hub, member, 2)
        assert hub.get(member, "env").ok, "the server goes on, and is reached"
    finally:
        gate.open()
    wait_polls(hub, member, 2)
    assert [c["Id"] for c in hub.containers()] == [container]
    assert [open_lease.id for open_lease in hub.open_leases()] == [lease.id]
    assert hub.server(member) is not None and hub.get(member, "env").ok
    lived = now()
    hub.stop_server(member)
    assert_settled(hub, lease, lived, died_at(engine, container, lease.granted_at))


@pytest.fixture()
def foreign(engine: PrivateEngine) -> Iterator[str]:
    """A container of nobody's lease that runs and was given no device, as a hub's own under
    compose."""
    made = engine.client.create_container(INSTANT, ["sleep", "600"], stop_signal="SIGKILL")
    engine.client.start(made["Id"])
    yield made["Id"]
    engine.client.remove_container(made["Id"], force=True)


@pytest.mark.parametrize("removed", [False, True], ids=["stopped", "removed"])
def test_engine_identity_is_checked_only_without_the_container(
    hub: GPUHub, engine: PrivateEngine, gate: Gate, member: str, removed: bool, foreign: str
) -> None:
    """No other engine has a container of this id; but any other has no such container either."""
    _, container = started(hub, member)
    gate.asked.clear()  # before the removal: the hub may notice it at once
    if removed:
        engine.client.remove_container(container, force=True)
    hub.stop_server(member)
    wait_for(lambda: not hub.open_leases(member), "the release")
    asked = {request.partition("?")[0].rpartition("/")[2] for request in gate.asked}
    assert ("info" in asked) is removed
    assert removed or container in asked
    assert any(foreign in path for path in gate.asked), "it is looked at before the release"


def test_device_release_waits_for_restarted_container(
    hub: GPUHub, engine: PrivateEngine, member: str
) -> None:
    """The engine does not remove it then, and that it had ended before proves nothing."""
    lease, _ = started(hub, member)
    (hub.folder / "start-again").touch()
    hub.stop_server(member)
    wait_for(lambda: not hub.open_leases(member), "the release")
    assert not engine.client.containers(), "the device was free before its container ended"
    assert not (hub.folder / "start-again").exists()
    [ended] = hub.leases(member)
    assert ended.id == lease.id and ended.ended_at is not None


@cache
def many_files(count: int) -> bytes:
    """An archive of so many empty files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number in range(count):
            archive.addfile(tarfile.TarInfo(f"file-{number}"))
    return packed.getvalue()


def fill(engine: PrivateEngine, container: str, files: int = 12_000) -> None:
    """Write so many files into a container that the engine needs long to delete them."""
    engine.client.put_archive(container, "/tmp", many_files(files))


def caught_in_deletion(hub: GPUHub, engine: PrivateEngine, member: str) -> str:
    """Stop a server; return its container, which the engine is deleting.

    A machine that holds this process up for long gets more files to delete.
    """
    for files in (12_000, 40_000, 120_000):
        _, container = started(hub, member)
        fill(engine, container, files)
        hub.api("DELETE", f"users/{member}/server").raise_for_status()
        wait_for(lambda: not hub.open_leases(member), "the release")
        with suppress(NotFound):
            assert engine.client.inspect_container(container)["State"]["Dead"]
            return container
        wait_for(lambda: hub.server(member) is None, "the hub to let go of it")
    raise AssertionError("the engine deleted each container before it could be killed")


def assert_cannot_start(engine: PrivateEngine, container: str) -> None:
    with pytest.raises(APIError) as refused:
        engine.client.start(container)
    assert refused.value.status_code in (404, 409), refused.value


def test_engine_killed_during_deletion_starts_no_container(
    hub: GPUHub, engine: PrivateEngine, member: str
) -> None:
    """The next member may have the device before the engine has deleted the container.

    The engine leaves it dead then, until the next start of its server deletes it.
    """
    container = caught_in_deletion(hub, engine, member)
    engine.kill9()
    engine.start()
    assert_cannot_start(engine, container)
    hub.spawn_and_wait(member, {"gpus": 1})
    assert engine.client.containers(all=True, quiet=True) == [{"Id": hub.containers()[0]["Id"]}]
    hub.stop_server(member)


@pytest.mark.parametrize("removed", [False, True], ids=["stopped", "named-and-removed"])
def test_server_starts_again_while_its_container_is_deleted(
    hub: GPUHub, engine: PrivateEngine, member: str, removed: bool
) -> None:
    """A stop does not wait for it, the next start of the server does.

    Nobody can start the old container meanwhile. A named server that was removed gets another
    spawner, which knows nothing of the first.
    """
    name = "two" if removed else ""
    hub.spawn_and_wait(member, {"gpus": 1}, name)
    [earlier] = hub.containers()
    fill(engine, earlier["Id"])
    path = f"users/{member}/servers/two" if removed else f"users/{member}/server"
    hub.api("DELETE", path, json={"remove": removed}).raise_for_status()
    wait_for(lambda: not hub.open_leases(member), "the release")
    wait_for(lambda: hub.server(member, name) is None, "the hub to let go of it")
    assert_cannot_start(engine, earlier["Id"])
    hub.spawn_and_wait(member, {"gpus": 1}, name)
    assert engine.client.containers(all=True, quiet=True) == [{"Id": hub.containers()[0]["Id"]}]
    hub.stop_server(member, name)
    wait_for(lambda: not engine.client.containers(all=True), "the deletion after a plain stop")


def test_stop_waits_for_a_foreign_container_with_the_device(
    hub: GPUHub, engine: PrivateEngine, member: str
) -> None:
    """Somebody gave the lease's device to a container of their own, which the hub does not end."""
    lease, _ = started(hub, member)
    asked = DeviceRequest(device_ids=list(lease.uuids), capabilities=[["gpu"]])
    host = engine.client.create_host_config(device_requests=[asked])
    theirs = engine.client.create_container(
        INSTANT, ["sleep", "600"], host_config=host, stop_signal="SIGKILL"
    )
    engine.client.start(theirs["Id"])
    try:
        hub.api("DELETE", f"users/{member}/server").raise_for_status()
        wait_for(lambda: hub.server(member) is None, "the hub to let go of it")
        wait_for(lambda: [c["Id"] for c in engine.client.containers()] == [theirs["Id"]], "its end")
        assert [open_lease.id for open_lease in hub.open_leases()] == [lease.id]
        answer = hub.spawn(f"{member}-other", {"gpus": 1, "wait": "no"})
        assert answer.status_code == 409, "another container has the device"
        assert engine.client.containers(quiet=True) == [{"Id": theirs["Id"]}]
    finally:
        engine.client.remove_container(theirs["Id"], force=True)
    hub.spawn_and_wait(member, {"gpus": 1})
    newest, older = hub.leases(member)
    assert older.id == lease.id and older.state is LeaseState.ENDED
    assert newest.state is LeaseState.RUNNING
    hub.stop_server(member)


def test_stop_ends_a_recreated_container(
    hub: GPUHub, engine: PrivateEngine, gate: Gate, member: str
) -> None:
    """An admin's tool replaced the container, and its label is lost."""
    lease, container = started(hub, member)
    name = hub.containers()[0]["Names"][0].lstrip("/")
    gate.shut()  # or the hub may look just when there is none, and settle
    engine.client.remove_container(container, force=True)
    asked = DeviceRequest(device_ids=list(lease.uuids), capabilities=[["gpu"]])
    host = engine.client.create_host_config(device_requests=[asked])
    anew = engine.client.create_container(
        INSTANT, ["sleep", "600"], name=name, host_config=host, stop_signal="SIGKILL"
    )
    engine.client.start(anew["Id"])
    gate.open()
    hub.stop_server(member)
    wait_for(lambda: not hub.open_leases(member), "the release")
    assert not engine.client.containers(), "the device was free before its container ended"


def test_failed_stop_is_charged_until_the_real_end(
    hub: GPUHub, engine: PrivateEngine, gate: Gate, member: str
) -> None:
    """The member stops while the engine is not responding: it costs until it has really ended, and
    not until the engine's answer to the stop. The next start of this server ends it first, under
    whatever name it finds it."""
    lease, container = started(hub, member)
    gate.shut()
    try:
        hub.api("DELETE", f"users/{member}/server").raise_for_status()
        wait_for(lambda: hub.server(member) is None, "the hub to let go of it")
        assert hub.taken(), "unknown is never free"
        engine.client.rename(container, "renamed-by-hand")
    finally:
        gate.open()
    lived = now()
    answer = hub.spawn(f"{member}-other", {"gpus": 1, "wait": "no"})
    assert answer.status_code == 409, "its container runs"
    assert [c["State"] for c in hub.containers()] == ["running"]
    gate.late = 2 * EXACT.total_seconds()
    try:
        hub.spawn_and_wait(member, {"gpus": 1})
    finally:
        gate.late = 0.0
    assert [c["Id"] for c in hub.containers()] != [container]
    newest, older = hub.leases(member)
    died = died_at(engine, container, lease.granted_at)
    assert older.id == lease.id and older.ended_at is not None and older.started_at is not None
    assert lived <= older.ended_at <= died + EXACT
    assert older.charged == owed(older.rate, older.started_at, older.ended_at)
    assert newest.state is LeaseState.RUNNING
    hub.stop_server(member)


def test_engine_restart_settles_its_sessions(
    hub: GPUHub, engine: PrivateEngine, gate: Gate, member: str
) -> None:
    lease, _ = started(hub, member)
    gate.shut()  # so that the hub learns of it late
    try:
        lived = now()
        engine.restart()  # it ends its containers, and forgets its events
        died = now()
        wait_polls(hub, member)
    finally:
        gate.open()
    ended = assert_settled(hub, lease, lived, died)
    assert "exit" in ended.end_reason


def test_session_outlives_engine_until_its_restart(
    hub: GPUHub, engine: PrivateEngine, member: str
) -> None:
    """Without live-restore the engine ends what it finds when it comes back."""
    lease, _ = started(hub, member)
    engine.kill9()
    try:
        wait_polls(hub, member, 2)
        assert hub.get(member, "env").ok, "the server outlives the engine"
        assert hub.open_leases(member)
    finally:
        lived = now()
        engine.start()
        died = now()
    assert_settled(hub, lease, lived, died)
