"""Members wait for memory of the host. Real: hub, proxy, accounting service, SQLite, Chromium;
servers are local, and the GPUs simulated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from gpuspawner.leases.host_resources import HostAmount
from tests.support.hub import ADMIN
from tests.support.pages import add_cookies, look_over, look_over_in_the_dark, words
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for
from tests.support.tickets import CONFIG, ticket_of

GB = 2**30
CATALOG = """
environments:
  - {slug: base, image: none, default: true}
  - {slug: cpu, image: none, devices: {max: 0}, mem_guarantee: 4G, mem_limit: 8G}
  - {slug: torch, image: none, mem_guarantee: 4G, cpu_guarantee: 2}
  - {slug: huge, image: none, mem_guarantee: 9G}
"""


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    """Six GB of memory for all servers together."""
    (folder / "catalog.yaml").write_text(CATALOG, encoding="utf-8")
    config = f"""{CONFIG}
c.GPULocalSpawner.catalog = "{folder}/catalog.yaml"
c.GPUHost.memory = "7G"
c.GPUHost.system_memory = "1G"
c.GPUHost.cpus = 16
c.GPUHost.cpus_per_free_gpu = 1
c.JupyterHub.load_groups = {{"heavy": {{"users": ["fay"]}}}}
c.GPULocalSpawner.group_overrides = {{
    "heavy": {{"groups": ["heavy"], "spawner_override": {{"mem_guarantee": "3G"}}}}
}}
"""
    with PayingHub(folder / "hub", config) as hub:
        yield hub


def test_server_without_a_gpu_waits_for_memory(hub: PayingHub, browser: Browser) -> None:
    lease = hub.start_server("ada", environment="torch", gpus=1)
    assert lease.host == HostAmount(4 * GB, 2000)
    assert hub.spawn("bob", {"environment": "cpu"}).status_code == 202
    ticket = wait_for(partial(ticket_of, hub, "bob"), "bob's ticket", timeout=10)
    assert ticket.request.devices == 0
    assert hub.start_server("cleo", gpus=0).host == HostAmount(), "nothing is guaranteed to her"

    page = browser.new_context().new_page()
    add_cookies(page, hub, "bob")
    page.goto(f"{hub.url}/hub/spawn-pending/bob")
    expect(page.get_by_role("heading", name="Waiting for memory or CPU cores")).to_be_visible()
    expect(page.locator("#gs-card")).to_contain_text("4.0 GB of memory (2.0 GB free)")
    expect(page.get_by_role("button", name="Start without a GPU")).to_be_hidden()
    look_over(page, "waits-for-memory")
    look_over_in_the_dark(page, "waits-for-memory")

    cluster = words(hub.page(ADMIN, "cluster"))
    assert "4.0 GB of 6.0 GB of memory and 2 of 15 CPU cores reserved, 1 in the queue" in cluster
    assert "4.0 GB of memory (2.0 GB free)" in words(hub.page(ADMIN, "queue"))
    assert hub.json("bob", "cluster").json()["host"] == {
        "budget": {"memory_bytes": 6 * GB, "cpus": 15},
        "reserved": {"memory_bytes": 4 * GB, "cpus": 2},
        "left": {"memory_bytes": 2 * GB, "cpus": 13},
        "left_without_gpu": {"memory_bytes": 2 * GB, "cpus": 11},
    }
    form = hub.open_page("dee", "/hub/spawn").text
    assert "4.0 GB of memory guaranteed" in form
    assert "waits for 4.0 GB of memory (2.0 GB free)" in form

    hub.stop_server("ada")
    hub.wait_server("bob")
    got = hub.lease_of("bob")
    assert got is not None and (got.devices, got.host) == ((), HostAmount(4 * GB))
    for user in ("bob", "cleo"):
        hub.stop_server(user)


def test_more_than_the_machine_has_is_refused_at_once(hub: PayingHub) -> None:
    hub.spawn("eve", {"environment": "huge", "gpus": 1})
    sentence = "guarantees its server 9.0 GB of memory, but this machine has 6.0 GB of memory"
    assert sentence in hub.failure("eve")
    assert hub.lease_of("eve") is None and ticket_of(hub, "eve") is None


def test_form_counts_what_a_group_is_guaranteed(hub: PayingHub) -> None:
    hub.start_server("ada", environment="torch", gpus=1)
    waits = "waits for 3.0 GB of memory (2.0 GB free)"
    assert waits in hub.open_page("fay", "/hub/spawn").text
    assert waits not in hub.open_page("gus", "/hub/spawn").text
    assert hub.spawn("fay", {"environment": "base", "gpus": 1}).status_code == 202
    wait_for(partial(ticket_of, hub, "fay"), "fay's ticket", timeout=10)
    hub.stop_server("ada")
    hub.wait_server("fay")
    got = hub.lease_of("fay")
    assert got is not None and got.host == HostAmount(3 * GB)
    hub.stop_server("fay")


def test_pages_and_starts_count_the_usual_guarantee(hubs: None, folder: Path) -> None:
    """Environments that guarantee nothing have the spawner's own guarantee, up to their limits."""
    catalog = """
environments:
  - {slug: torch, image: none, default: true}
  - {slug: small, image: none, devices: {max: 0}, mem_limit: 1G}
"""
    (folder / "usual.yaml").write_text(catalog, encoding="utf-8")
    config = f"""{CONFIG}
c.GPULocalSpawner.catalog = "{folder}/usual.yaml"
c.GPULocalSpawner.mem_guarantee = "4G"
c.GPUHost.memory = "7G"
c.GPUHost.system_memory = "1G"
"""
    with PayingHub(folder / "usual", config) as hub:
        assert hub.start_server("ada", gpus=1).host == HostAmount(4 * GB)
        waits = "waits for 4.0 GB of memory (2.0 GB free)"
        for path in ("spawn", "environments", "environments/torch"):
            text = hub.open_page("bob", f"/hub/{path}").text
            assert waits in text, path
            assert "4.0 GB of memory guaranteed" in text, path
        form = hub.open_page("bob", "/hub/spawn").text
        assert "You would wait in the queue for 4.0 GB of memory" in form
        assert "1.0 GB of memory guaranteed" in form, "up to the environment's limit"
        assert hub.start_server("cleo", environment="small").host == HostAmount(GB)
        assert hub.spawn("bob", {"environment": "torch", "gpus": 1}).status_code == 202
        wait_for(partial(ticket_of, hub, "bob"), "bob's ticket", timeout=10)
