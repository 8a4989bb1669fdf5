"""The pages of docs that start and end servers by requests, as a script sends them. Real:
JupyterHub, proxy, accounting service, local servers, Bash, curl."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuspawner.leases.models import LeaseState
from tests.support import steps
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for
from tests.support.tickets import CONFIG, ticket_of

CATALOG = """
environments:
  - {slug: pytorch, image: none, hours: {default: 4, max: 8}, devices: {default: 1, max: 3}}
"""


@pytest.fixture(scope="module")
def hub(quick_hub: None, folder: Path) -> Iterator[PayingHub]:
    (folder / "catalog.yaml").write_text(CATALOG, encoding="utf-8")
    config = f'{CONFIG}\nc.GPULocalSpawner.catalog = "{folder}/catalog.yaml"\n'
    with PayingHub(folder / "hub", config) as hub:
        hub.api("POST", "users/ada")
        yield hub


def run(hub: PayingHub, *blocks: str, **variables: str) -> str:
    """Type blocks in a terminal, with a token in the place of the page's."""
    script = "\n".join([steps.CURL, *blocks]).replace("https://hub.example", hub.url)
    token = hub.user_token("ada")
    done = subprocess.run(
        ["bash", "-ec", script.replace("your-token", token)],
        env={"PATH": os.environ["PATH"], "TOKEN": token, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_script_starts_reads_and_ends_sessions_as_its_page_says(hub: PayingHub) -> None:
    names, life, read, ids = (block.text for block in steps.typed_in(steps.SCRIPT))
    said = run(hub, names, life)
    assert '"ready": true' in said
    wait_for(lambda: hub.server("ada") is None, "the end of her server")
    assert '"balance"' in run(hub, names, read)

    hub.start_server("bob", gpus=2, gpu_model="A100")
    lease = hub.start_server("ada", gpus=1, gpu_model="T4")
    hub.spawn("ada", {"gpus": 1, "gpu_model": "A100"}, "second")
    ticket = wait_for(lambda: ticket_of(hub, "ada"), "her ticket")
    run(hub, names, ids, LEASE=lease.id, TICKET=ticket.id)
    assert hub.wait_end(lease).state is LeaseState.ENDED
    assert hub.services.queue.waiting() == []


def test_request_of_the_reference_starts_a_server(hub: PayingHub) -> None:
    (request,) = (block.text for block in steps.typed_in(steps.REQUEST))
    run(hub, request)
    hub.wait_server("ada")
    lease = hub.lease_of("ada")
    assert lease and lease.environment == "pytorch" and len(lease.devices) == 1
    hub.stop_server("ada")
