"""The price on the form is the price paid. Real here: JupyterHub, proxy, accounting service,
Chromium, the command line; servers are local."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta

import pytest
from playwright.sync_api import Browser, Page

from gpuspawner.cli.app import main
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState, ServerRef
from gpuspawner.ledger.rules import owed
from tests.support.gpu_hub import text_of
from tests.support.pages import WIDE, look_over, send_sign_in
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

CATALOG = """
environments:
  - slug: torch
    display_name: PyTorch
    description: Deep learning.
    image: x
    default: true
    devices: {default: 1, max: 2}
  - slug: course
    display_name: Course
    description: For the course on Mondays.
    image: x
    devices: {default: 1, max: 1}
  - slug: plain
    display_name: No GPU
    description: For everything else.
    image: x
    devices: {max: 0}
"""


@pytest.fixture(scope="module")
def hub(hubs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PayingHub]:
    """An A100 costs 60 an hour and a T4 6, in the course a third."""
    folder = tmp_path_factory.mktemp("prices")
    catalog = folder / "catalog.yaml"
    catalog.write_text(CATALOG)
    config = f"""
c.GPUSpawnerMixin.catalog = {str(catalog)!r}
c.GPUCredits.opening_grant = 120
c.GPUCredits.hold_minutes = 1
c.GPURates.by_model = {{"A100": 60, "T4": 6}}
c.GPURates.special = [
    {{"environment": "course", "model": "A100", "rate": 20}},
    {{"environment": "course", "model": "T4", "rate": 2}},
]
"""
    with PayingHub(folder / "hub", config) as hub:
        yield hub


def shown(page: Page) -> str:
    return page.inner_text("#gpuspawner-price")


def test_price_shown_is_the_price_paid(hub: PayingHub, browser: Browser) -> None:
    page = browser.new_context(viewport=WIDE).new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{hub.url}/hub/spawn")
    send_sign_in(page, "ada")
    page.wait_for_selector("#gpuspawner-price")
    page.check("#environment-torch")
    page.select_option("#gpus", "2")
    page.select_option("#gpu_model", "A100-80GB")
    assert shown(page) == "2 GPUs: 120.00 credits an hour. Your balance lasts 1 h."
    page.check("#environment-course")
    assert shown(page) == "Course allows 1 GPU."
    page.select_option("#gpus", "")
    assert shown(page) == "1 GPU: 20.00 credits an hour. Your balance lasts 6 h."
    look_over(page, "form-prices")
    page.check("#environment-plain")
    assert shown(page) == "Without a GPU: free of charge."
    page.check("#environment-course")
    page.click("[type=submit]")
    lease = wait_for(lambda: running(hub, "ada"), "the server", timeout=30)
    assert errors == []
    assert lease.rate == 20 * MICRO

    # An admin's change is for new servers: on the form at once, and not for who runs.
    url = ["--database", hub.database_url]
    assert main(["rates", "set", "A100", "30", "--environment", "course", *url]) == 0
    text = page_text(hub, "bob")
    assert "A100-80GB in PyTorch 2 of 2 60.00" not in text, "one is taken"
    assert re.search(r"A100-80GB in Course 1 of 2 30\.00 4 h", text), text
    theirs = hub.start_server("bob", environment="course", gpus=1, gpu_model="A100")
    assert theirs.rate == 30 * MICRO
    for mine, rate in ((lease, 20), (theirs, 30)):
        hub.stop_server(mine.server.user)
        settled = hub.wait_end(mine)
        assert settled.ended_at
        assert settled.charged == owed(rate * MICRO, settled.started_at, settled.ended_at)


def test_price_table_includes_future_rates_and_expiry(hub: PayingHub) -> None:
    url = ["--database", hub.database_url]
    assert main(["rates", "set", "T4", "1", "--from", "2100-01-01", *url]) == 0
    text = page_text(hub, "cleo")
    assert "start before 00:00 on 1 January" in text.replace("01:00", "00:00"), text
    assert "A server keeps the price that it starts with, day and night" in text
    assert re.search(r"T4, 16 GB in PyTorch 1 of 1 6\.00 20 h", text), text
    assert re.search(r"T4, 16 GB in Course 1 of 1 2\.00 2 d 12 h", text), text

    # Credits that end count while they are there: of these 63 for the T4, all for an A100.
    until = hub.services.clock() + timedelta(hours=10, minutes=30)
    gift = 120 * MICRO
    hub.services.ledger.grant("member:cleo", gift, actor="admin", reason="a gift", until=until)
    text = page_text(hub, "cleo")
    assert re.search(r"T4, 16 GB in PyTorch 1 of 1 6\.00 1 d 6 h", text), text
    assert re.search(r"A100-80GB in PyTorch 2 of 2 60\.00 4 h", text), text
    told = hub.open_page("cleo", "/hub/spawn").text
    assert "1 GPU: 6.00 credits an hour. Your balance lasts 1 d 6 h." in told, "with JavaScript"


def page_text(hub: PayingHub, user: str) -> str:
    """The form's words, as they come from the hub."""
    return text_of(hub.open_page(user, "/hub/spawn").text)


def running(hub: PayingHub, user: str) -> Lease | None:
    lease = hub.services.leases.of_server(ServerRef(user))
    return lease if lease and lease.state is LeaseState.RUNNING else None
