"""Services on a real database, with simulated devices and a clock that the test sets."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.engines.local import LEASE_VARIABLE
from gpuspawner.leases.models import Lease
from gpuspawner.services import Services
from tests.support import rounds
from tests.support.brokers import Clock, Make, open_services, problems
from tests.support.nvml import nvml_library as nvml
from tests.support.rounds import ScriptedHub

# Grafana's own classes need Python 3.11.
collect_ignore = ["monitoring/test_dashboards.py"] if sys.version_info < (3, 11) else []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def hubs_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sentences name times in the hub's own zone: here UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def failed() -> set[str]:
    """The ids of leases whose start failed, for the checks at the end: they owe nothing."""
    return set()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for NVML, compiled."""
    return nvml.build_nvml_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def make(database_url: str, clock: Clock, failed: set[str]) -> Iterator[Make]:
    """Open brokers on one database; at the end everything in it must hold."""
    opened: list[Services] = []

    def make(**settings: Any) -> Services:
        opened.append(open_services(database_url, **{"clock": clock, **settings}))
        return opened[-1]

    yield make
    assert opened
    assert problems(opened[0].store, failed=failed) == []
    opened[0].store.close()  # brokers on one database share it


@pytest.fixture
def fresh(new_file: Callable[[], str]) -> Iterator[Callable[..., Services]]:
    """Open services on a store of their own, for each example of a property; closes the last."""
    opened: list[Services] = []

    def make(**settings: Any) -> Services:
        while opened:
            opened.pop().store.close()
        opened.append(rounds.open_services(new_file(), Clock(), opening_grant=1000, **settings))
        return opened[0]

    yield make
    for services in opened:
        services.store.close()


@pytest.fixture
def services(make: Make) -> Services:
    """Four A100s at 4 credits an hour; members get 100 credits; 10 minutes are held."""
    return make(gpu_rates={"A100": 4, "T4": "0.5"})


@pytest.fixture
def server() -> Iterator[Callable[[Lease], subprocess.Popen[bytes]]]:
    """Start a process that bears a lease, as GPULocalSpawner does."""
    started: list[subprocess.Popen[bytes]] = []

    def start(lease: Lease) -> subprocess.Popen[bytes]:
        environment = {
            LEASE_VARIABLE: lease.id,
            "JUPYTERHUB_USER": lease.server.user,
            "JUPYTERHUB_SERVER_NAME": lease.server.name,
        }
        process = subprocess.Popen(
            ["cat"],
            env=os.environ | environment,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdin and process.stdout
        process.stdin.write(b"up\n")
        process.stdin.flush()
        # While a process begins a program, /proc shows neither its command nor its environment.
        assert process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
async def hub() -> AsyncIterator[ScriptedHub]:
    """A Hub that is a script, on a port of this machine."""
    async with ScriptedHub().serving() as hub:
        yield hub
