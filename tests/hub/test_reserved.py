"""A GPU that is reserved for a group. Real here: JupyterHub, its groups, proxy, accounting service,
local servers, Chromium; the GPUs are simulated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.support.gpu_hub import message_of, simulated_uuids
from tests.support.hub import ADMIN
from tests.support.pages import (
    WIDE,
    add_cookies,
    look_over,
    look_over_in_the_dark,
    sign_in,
    words,
)
from tests.support.paying_hub import FLEET, PayingHub, command

RESERVED = simulated_uuids(FLEET.partition(":")[2])[0]

CONFIG = f"""
c.JupyterHub.load_groups = {{"vision-lab": {{"users": ["ada"]}}, "others": {{"users": ["bob"]}}}}
c.GPUDevices.reserved = {{
    {RESERVED!r}: {{"groups": ["vision-lab"], "others": "preemptible"}}
}}
c.GPURates.by_model = {{"*": 4}}
c.GPUCredits.opening_grant = 1000
c.GPUSpawnerMixin.gpu_limit = 4
"""

NOTE = "reserved for vision-lab, lent to preemptible runs"


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    """Two A100, of which one is reserved for Ada's group, and a T4."""
    with PayingHub(folder / "hub", CONFIG) as hub:
        yield hub


def test_form_shows_each_member_what_they_may_use(hub: PayingHub, browser: Browser) -> None:
    for user, available in (("ada", "2 of 2, 1 reserved for vision-lab"), ("bob", "1 of 1")):
        page = browser.new_page(viewport=WIDE)
        add_cookies(page, hub, user)
        page.goto(f"{hub.url}/hub/spawn/{user}")
        (row,) = page.locator("tr:has-text('A100-80GB')").all_inner_texts()
        assert available in row and ("reserved" in row) == (user == "ada")
        look_over(page, f"reserved-form-{user}")
        if user == "ada":
            look_over_in_the_dark(page, "reserved-form-ada")
        page.close()


def test_pages_and_commands_mark_the_device(hub: PayingHub, browser: Browser) -> None:
    page = browser.new_page(viewport=WIDE)
    sign_in(page, hub, "bob", "cluster")
    assert NOTE in page.locator(".tile").first.inner_text()
    look_over(page, "reserved-cluster")
    look_over_in_the_dark(page, "reserved-cluster")
    page.close()
    assert NOTE in words(hub.page(ADMIN, "devices"))
    for path in ("devices", "cluster"):
        devices = hub.json("bob", path).json()["devices"]
        told = [(each["reserved_for"], each["lent"]) for each in devices]
        assert told == [(["vision-lab"], True), ([], False), ([], False)]
    assert NOTE in command(hub, "devices")
    plain = json.loads(command(hub, "devices", "--json"))
    assert [each["reserved_for"] for each in plain["devices"]] == [["vision-lab"], [], []]
    assert plain["models"][0]["reserved"] == "1 reserved for vision-lab"


def test_others_get_what_is_not_reserved(hub: PayingHub) -> None:
    answer = hub.spawn("bob", {"gpus": 2, "gpu_model": "A100"})
    assert answer.status_code == 400
    assert message_of(answer) == (
        "You asked for 2 GPUs. This hub has 2 GPUs that are not reserved for others, but only 1 "
        "A100. Ask for 1 at most."
    )
    bob = hub.start_server("bob", gpus=1, gpu_model="A100")
    ada = hub.start_server("ada", gpus=1)
    assert RESERVED not in bob.uuids and ada.uuids == (RESERVED,)
    for user in ("ada", "bob"):
        hub.stop_server(user)


def test_card_and_form_say_for_whom_gpus_are_reserved(
    hubs: None, folder: Path, browser: Browser
) -> None:
    (folder / "catalog.yaml").write_text(
        """
environments:
  - {slug: files, image: none, default: true, devices: {max: 0}}
  - {slug: torch, image: none, models: [A100]}
""",
        encoding="utf-8",
    )
    config = f"""
c.GPULocalSpawner.catalog = "{folder}/catalog.yaml"
c.JupyterHub.load_groups = {{"vision-lab": {{"users": ["ada"]}}}}
c.GPUDevices.reserved = {{"A100": ["vision-lab"]}}
"""
    says = "All A100 GPUs here are reserved for vision-lab."
    with PayingHub(folder / "cards", config) as hub:
        # On a page with the form, the second is in what its script shows.
        for path, times in (("spawn", 2), ("environments", 1), ("environments/torch", 2)):
            assert words(hub.open_page("bob", f"/hub/{path}")).count(says) == times, path
            assert says not in words(hub.open_page("ada", f"/hub/{path}")), path
        page = browser.new_page(viewport=WIDE)
        add_cookies(page, hub, "bob")
        page.goto(f"{hub.url}/hub/spawn/bob")
        page.locator("[name=environment][value=torch]").check()
        assert page.locator("#gpuspawner-summary").inner_text() == f"Cannot start. {says}"
        look_over(page, "reserved-for-others")
        page.close()
        answer = hub.spawn("bob", {"environment": "torch", "gpus": 1})
        assert (answer.status_code, message_of(answer)) == (400, says)
