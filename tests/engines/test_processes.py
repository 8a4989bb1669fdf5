"""One process in a container is ended, and the container's log says why. Real: Docker Engine,
containers, processes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gpuspawner.engines.docker import DockerEngine
from gpuspawner.engines.processes import pid_inside, send_signal
from tests.support.engine import PrivateEngine, open_engine
from tests.support.processes import wait_for

PROGRAM = 'sleep 600 & echo "started"; wait; echo "the program has ended"; exec sleep 600'


@pytest.fixture
def container(clean_engine: PrivateEngine, images: Any) -> str:
    """A container of a user who is not root, whose program waits for another one."""
    made = clean_engine.client.create_container(
        images.INSTANT, ["/bin/sh", "-c", PROGRAM], entrypoint=[], user="1000", stop_signal="KILL"
    )
    clean_engine.client.start(made["Id"])
    return str(made["Id"])


def logs(engine: PrivateEngine, ref: str) -> str:
    return str(engine.client.logs(ref).decode())


def sleeper(engine: PrivateEngine, ref: str) -> int:
    """The id of the container's second process on this host."""

    def sleeping() -> list[int]:
        top = engine.client.top(ref, "-eo pid,comm")
        return [int(pid) for pid, name in top["Processes"] if name == "sleep"]

    [pid] = wait_for(sleeping, "the second process")
    return pid


def test_one_process_is_ended_and_the_log_says_so(
    clean_engine: PrivateEngine, container: str
) -> None:
    engine = open_engine(clean_engine.url)
    pid = sleeper(clean_engine, container)
    inside = pid_inside(pid)
    assert inside and inside != pid
    engine.write_log(container, "it used 30.0 GB; its share is 20 GB, 'as told'")
    line = "it used 30.0 GB; its share is 20 GB, 'as told'\n"
    wait_for(lambda: line in logs(clean_engine, container), "the line in the log")
    assert engine.end_process(container, inside, "SIGTERM")
    wait_for(lambda: "the program has ended" in logs(clean_engine, container), "its end")
    assert engine.inspect(container)["State"]["Running"]
    assert not engine.end_process(container, inside, "SIGTERM"), "it is gone"
    clean_engine.client.kill(container)
    wait_for(lambda: not engine.inspect(container)["State"]["Running"], "the container's end")
    assert not engine.end_process(container, 1, "SIGKILL")
    engine.write_log(container, "nobody reads this")
    assert not DockerEngine(lambda: clean_engine.client).end_process("none-such", 1, "SIGKILL")


def test_signal_reaches_no_other_process(clean_engine: PrivateEngine, container: str) -> None:
    pid = sleeper(clean_engine, container)
    asked: list[int] = []
    assert not send_signal(pid, lambda known: bool(asked.append(known)), "SIGKILL")
    assert asked == [pid] and os.path.exists(f"/proc/{pid}")
    assert send_signal(pid, lambda known: True, "SIGKILL")
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "its end")
    assert not send_signal(pid, lambda known: True, "SIGKILL")
    assert pid_inside(pid) is None
