"""Runs: commands with a lease and without a server. Real: hub, proxy, accounting service, a Docker
Engine, containers of our base image."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.images import BASE
from tests.support.processes import free_port, wait_for

CATALOG = f"""
environments:
  - slug: base
    display_name: Base
    image: {BASE}
    default: true
    devices: {{default: 1, max: 2}}
"""

CONFIG = """
c.GPUDockerSpawner.workspace = "runs-{{username}}"
c.GPURates.by_model = {{"*": 60}}
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[GPUHub]:
    config = CONFIG.format(port=free_port())
    with GPUHub(folder / "hub", engine, config, catalog=CATALOG) as hub:
        yield hub
    engine.clean()


def submit(hub: GPUHub, user: str, **body: Any) -> dict[str, Any]:
    hub.browser_of(user)  # the first visit opens the account
    answer = hub.call(user, "POST", "runs", json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def run_of(hub: GPUHub, user: str, run_id: str) -> dict[str, Any]:
    return dict(hub.call(user, "GET", f"runs/{run_id}").json())


def ended(hub: GPUHub, user: str, run_id: str) -> dict[str, Any]:
    def over() -> list[dict[str, Any]]:
        run = run_of(hub, user, run_id)
        return [run] if run["state"] in ("done", "failed", "stopped") else []

    (run,) = wait_for(over, "the end of the run", timeout=90)
    return run


def test_command_runs_with_its_gpu_and_gives_it_back(hub: GPUHub, member: str) -> None:
    program = "import os; print(os.environ['NVIDIA_VISIBLE_DEVICES']); print(sorted(os.environ))"
    run = submit(hub, member, command=["python3", "-c", program])
    run = ended(hub, member, run["id"])
    assert (run["state"], run["exit_status"], run["reason"]) == ("done", 0, "")
    (lease,) = hub.leases(member)
    assert lease.end_reason == "exit code 0"
    assert hub.taken() == {}
    assert hub.containers() == []
