"""What sessions used of CPU, memory, disk and network: on receipts, in reports and as JSON. Real:
everything of ours, SQLite, HTTP, Chromium. Stand-ins: simulated devices, a clock that stands still,
a small HTTP server for the Hub."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser

from gpuspawner.client import Client
from gpuspawner.engines.resource_use import MemoryKill, ResourceUse
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.monitoring.resource_service import ContainerSample
from tests.golden.scenario import start
from tests.golden.site import ADMIN, Site
from tests.support.browser import screenshot
from tests.support.pages import ACROSS, SIZES, words
from tests.support.service_process import token_of

GB = 2**30
USE = ResourceUse(
    cpu_seconds=5400.0,
    memory_bytes=20 * GB,
    memory_limit_bytes=32 * GB,
    disk_read_bytes=3 * GB,
    disk_written_bytes=GB // 2,
    network_received_bytes=1536,
    network_sent_bytes=12,
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with Site(folder, migrated_file, "simulated:2xA100-80GB,1xT4") as site:
        for user in ("ada", "bob", ADMIN):
            site.services.members.membership_returned(user, actor="sign-in")
            site.services.ledger.open_account(user)
        yield site


@pytest.fixture(scope="module")
def measured(site: Site) -> Lease:
    """A session of Ada's, whose memory was used up once, and then was no longer."""
    services, clock = site.services, site.clock
    lease = start(services, clock, "ada", environment="torch", model="A100")
    services.resources.record([ContainerSample(lease.id, "a", USE)])
    clock.forward(seconds=30)
    now = ResourceUse(cpu_seconds=5400.0, memory_bytes=GB, memory_limit_bytes=32 * GB)
    services.resources.record([ContainerSample(lease.id, "a", now)])
    services.resources.note_kills(lease.id, [MemoryKill(lease.id, "a", 1)], limit_bytes=32 * GB)
    return lease


@pytest.fixture(scope="module")
def barely(site: Site) -> Lease:
    """A session of Bob's without a GPU, of which little is known."""
    request = Request(environment="torch")
    lease = site.services.leases.grant(ServerRef("bob"), request, engine="docker")
    lease = site.services.leases.confirm(lease.id, "container-bob")
    site.services.resources.record([ContainerSample(lease.id, "b", ResourceUse(cpu_seconds=36))])
    return lease


def ask(site: Site, user: str, path: str) -> requests.Response:
    headers = {"Authorization": f"token {token_of(user)}"}
    return requests.get(site.service_url() + path, headers=headers, timeout=60)


def test_receipt_shows_what_a_session_used(site: Site, measured: Lease, barely: Lease) -> None:
    page = words(ask(site, "ada", f"leases/{measured.id}"))
    assert (
        "CPU, memory, disk and network CPU time 1:30:00 Peak memory 20.0 GB of 32.0 GB "
        "Disk 3.0 GB read, 512.0 MB written Network 1.5 kB received, 12 bytes sent "
        "Out of memory the system ended a program"
    ) in page
    page = words(ask(site, "bob", f"leases/{barely.id}"))
    assert (
        "CPU time 0:00:36 Peak memory not known Disk not known Network not known One hour"
    ) in page
    assert "Out of memory" not in page


def test_receipt_without_measurements_shows_nothing_of_them(site: Site) -> None:
    lease = start(site.services, site.clock, "bob", "other", environment="torch", model="T4")
    assert "Peak memory" not in words(ask(site, "bob", f"leases/{lease.id}"))
    (found,) = ask(site, "bob", "api/leases?limit=1").json()["leases"]
    assert (found["id"], found["usage"]) == (lease.id, None)


def test_client_reads_what_a_session_used(site: Site, measured: Lease) -> None:
    told = ask(site, "ada", f"api/leases/{measured.id}/now").json()["lease"]["usage"]
    assert told == {
        "cpu_seconds": 5400.0,
        "memory_bytes": GB,
        "memory_peak_bytes": 20 * GB,
        "memory_limit_bytes": 32 * GB,
        "disk_read_bytes": 3 * GB,
        "disk_written_bytes": GB // 2,
        "network_received_bytes": 1536,
        "network_sent_bytes": 12,
        "memory_kills": 1,
        "sampled_at": told["sampled_at"],
    }
    client = Client(site.service_url() + "api", token_of("ada"))
    usage = next(each for each in client.sessions.list() if each.id == measured.id).usage
    assert usage is not None and usage.sampled_at is not None
    assert (usage.cpu_seconds, usage.memory_peak_bytes, usage.memory_kills) == (5400, 20 * GB, 1)


@pytest.mark.parametrize(
    ("by", "name"),
    [
        ("member", "ada"),
        ("account", "member:ada"),
        ("model", "A100-80GB"),
        ("environment", "torch"),
        ("group", ""),
        ("week", None),
    ],
)
def test_report_adds_up_cpu_time_and_peak_memory(
    site: Site, measured: Lease, barely: Lease, by: str, name: str | None
) -> None:
    report = ask(site, ADMIN, f"api/usage?by={by}").json()
    assert report["total"]["resources"] == {"cpu_seconds": 5436.0, "memory_peak_bytes": 20 * GB}
    row = next(row for row in report["rows"] if name in (None, row["name"]) and row["sessions"])
    alone = by in ("member", "account", "model")
    seconds = 5400.0 if alone else 5436.0
    assert row["resources"] == {"cpu_seconds": seconds, "memory_peak_bytes": 20 * GB}
    table = list(csv.DictReader(io.StringIO(ask(site, ADMIN, f"usage.csv?by={by}").text)))
    [line] = [line for line in table if line[by] == row["name"]]
    assert (line["cpu_seconds"], line["memory_peak_bytes"]) == (str(seconds), str(20 * GB))
    page = words(ask(site, ADMIN, f"usage?by={by}"))
    assert "CPU hours Peak memory" in page
    assert ("1.50 20.0 GB" if alone else "1.51 20.0 GB") in page


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_with_use_fit_every_screen(
    site: Site, measured: Lease, browser: Browser, size: str, scheme: Any
) -> None:
    context = browser.new_context(viewport=SIZES[size], color_scheme=scheme)
    cookies = site.session(ADMIN).cookies
    at = {"domain": "127.0.0.1"}
    context.add_cookies(
        [{"name": c.name, "value": str(c.value), "path": c.path, **at} for c in cookies]
    )
    page = context.new_page()
    for name, path in (("receipt", f"leases/{measured.id}"), ("usage", "usage?by=member")):
        page.goto(site.service_url() + path)
        screenshot(page, f"resources-{name}-{size}-{scheme}")
        assert page.evaluate(ACROSS) == 0
    context.close()
