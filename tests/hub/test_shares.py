"""Members who share a GPU. Real here: JupyterHub, proxy, accounting service, local servers,
Chromium; the GPUs are simulated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from gpuspawner.leases.models import Lease
from gpuspawner.web.schemas import instant
from tests.support.gpu_hub import message_of
from tests.support.hub import NAVIGATION
from tests.support.pages import (
    WIDE,
    add_cookies,
    look_over,
    look_over_in_the_dark,
    sign_in,
    words,
)
from tests.support.paying_hub import PayingHub
from tests.support.processes import environment_of

CONFIG = """
c.GPUDevices.shared_devices = {"T4": 4}
c.GPURates.by_model = {"*": 4}
c.GPUCredits.opening_grant = 1000
c.GPUSpawnerMixin.catalog = "catalog.yaml"
"""

CATALOG = """
environments:
  - slug: either
    display_name: Notebooks
    image: none
    default: true
    sharing: any
    environment: {XLA_PYTHON_CLIENT_MEM_FRACTION: "0.10"}
  - slug: course
    display_name: Course
    image: none
    sharing: slot
  - slug: whole
    display_name: Training
    image: none
"""

SHARE = "1/4 of T4, about 4 GB"
FITS = """select => {
    const pen = document.createElement("canvas").getContext("2d");
    const style = getComputedStyle(select);
    pen.font = style.font;
    const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
    const width = pen.measureText(select.selectedOptions[0].text).width;
    return width + padding <= select.clientWidth;
}"""
"""True if the choice of a select field is not cut off."""
NOTE = "shared with up to 3 others, not isolated"


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    """Two A100 that are whole and a T4 of four slots, on which Ada and Bob have a slot each."""
    hub = PayingHub(folder / "hub", CONFIG)
    (hub.folder / "catalog.yaml").write_text(CATALOG)
    with hub:
        hub.start_server("ada", environment="either", gpus="share")
        hub.start_server("bob", environment="course")
        yield hub


def lease_of(hub: PayingHub, user: str) -> Lease:
    found = hub.lease_of(user)
    assert found is not None
    return found


def variables(hub: PayingHub, user: str) -> dict[str, str]:
    """The environment of a member's server."""
    seen = map(environment_of, hub.children_left())
    return next(each for each in seen if each.get("JUPYTERHUB_USER") == user)


def test_two_members_have_a_slot_each_of_the_same_device(hub: PayingHub) -> None:
    (ada,), (bob,) = (lease_of(hub, user).devices for user in ("ada", "bob"))
    assert ada.uuid == bob.uuid
    assert {ada.slot, bob.slot} == {0, 1}
    assert (ada.slots, ada.held_slots) == (4, 1)
    assert lease_of(hub, "ada").rate == 1_000_000, "a quarter of the rate"

    of_ada, of_bob = variables(hub, "ada"), variables(hub, "bob")
    assert of_ada["NVIDIA_VISIBLE_DEVICES"] == of_bob["NVIDIA_VISIBLE_DEVICES"] == ada.uuid
    assert of_bob["GPUSPAWNER_GPU_SHARE"] == "0.25"
    assert of_bob["GPUSPAWNER_GPU_MEMORY"] == str(ada.memory_bytes // 4)
    assert of_bob["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.225"
    assert of_bob["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert of_ada["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.10", "as the catalog says"


def test_server_with_a_whole_device_has_no_share_in_its_environment(hub: PayingHub) -> None:
    hub.start_server("cleo", environment="whole", gpu_model="A100")
    found = variables(hub, "cleo")
    assert "GPUSPAWNER_GPU_SHARE" not in found
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in found
    hub.stop_server("cleo")


def test_share_is_refused_where_the_environment_has_none(hub: PayingHub) -> None:
    answer = hub.spawn("dan", {"environment": "whole", "gpus": "share"})
    assert answer.status_code == 400
    assert "Training needs whole GPUs, not a share of one. Ask for 1 or more." in message_of(answer)
    answer = hub.spawn("dan", {"environment": "course", "gpus": 1})
    assert "Course runs on a share of a GPU, not on whole ones." in message_of(answer)


def test_form_offers_a_share_with_its_price_and_its_limits(
    hub: PayingHub, browser: Browser
) -> None:
    page = browser.new_page(viewport=WIDE)
    add_cookies(page, hub, "eve")
    page.goto(f"{hub.url}/hub/spawn/eve")
    assert "2 of 3 GPUs free, and 2 of 4 shares." in page.inner_text(".gpuspawner-form")
    note = page.locator("#gpuspawner-share")
    assert not note.is_visible()
    page.select_option("#gpus", "share")
    assert note.inner_text() == (f"A share is {NOTE}: nothing keeps others from using the memory.")
    summary = page.inner_text("#gpuspawner-summary")
    assert "1/4 of T4 (about 4 GB)" in summary
    assert "1.00 credits an hour" in summary
    assert page.locator("#gpus").evaluate(FITS), "the choice can be read"
    look_over(page, "shares-form")
    look_over_in_the_dark(page, "shares-form")
    page.check("#environment-whole")
    assert page.input_value("#gpus") != "share"
    assert not note.is_visible()
    page.check("#environment-course")
    assert "1/4 of T4" in page.inner_text("#gpuspawner-summary")
    page.close()


def test_form_offers_amounts_of_memory_where_gpus_differ(hub: PayingHub, browser: Browser) -> None:
    page = browser.new_page(viewport=WIDE)
    add_cookies(page, hub, "eve")
    page.goto(f"{hub.url}/hub/spawn/eve?opt-environment=either&opt-gpus=1&opt-gpu_memory=20")
    memory = page.locator("#gpu_memory")
    offered = memory.locator("option:not([hidden])")

    def of_sizes(*sizes: int) -> list[str]:
        return ["Any amount", *(f"At least {size} GB" for size in sizes)]

    assert offered.all_inner_texts() == of_sizes(16, 20, 80)
    assert memory.input_value() == "20", "as the link says"
    summary = page.locator("#gpuspawner-summary")
    assert summary.inner_text().startswith("A100-80GB, "), "the T4 has less"
    assert "Starts now." in summary.inner_text()
    look_over(page, "memory-form")
    look_over_in_the_dark(page, "memory-form")
    page.select_option("#gpus", "share")
    assert (offered.all_inner_texts(), memory.input_value()) == (of_sizes(4, 8, 12), "")
    page.select_option("#gpus", "1")
    assert memory.input_value() == "20", "it comes back"
    page.select_option("#gpu_memory", "16")
    assert summary.inner_text().startswith("1 GPU, "), "each of them has as much"
    page.select_option("#gpu_model", "T4")
    assert not memory.is_visible(), "all T4 have the same"
    page.close()


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("opt-gpu_memory=90", "This hub has no GPU with 90 GB. The most is 80 GB: ask for less."),
        ("opt-gpus=share&opt-gpu_memory=16", "The largest share of a GPU has 12 GB: ask for less."),
        ("opt-gpu_memory=0", "must be a whole number of GB from 1, such as 10, not "),
        ("opt-gpu_memory=-8", "must be a whole number of GB from 1, such as 10, not "),
        ("opt-gpu_memory=10GB", "must be a whole number of GB from 1, such as 10, not "),
    ],
)
def test_impossible_amount_of_memory_is_refused_above_the_form(
    hub: PayingHub, browser: Browser, choice: str, words: str
) -> None:
    page = browser.new_page(viewport=WIDE)
    add_cookies(page, hub, "eve")
    page.goto(f"{hub.url}/hub/spawn/eve?opt-environment=either&{choice}")
    assert words in page.inner_text("body")
    page.close()


def test_server_by_memory_gets_the_smallest_device_that_fits(hub: PayingHub) -> None:
    hub.start_server("fay", environment="either", gpus=1, gpu_memory=20)
    (device,) = lease_of(hub, "fay").devices
    assert device.model == "A100-80GB"
    hub.stop_server("fay")
    hub.start_server("fay", environment="either", gpus="share", gpu_memory=4)
    (device,) = lease_of(hub, "fay").devices
    assert (device.model, device.held_slots) == ("T4", 1)
    hub.stop_server("fay")


def open_cluster(browser: Browser, hub: PayingHub, user: str) -> Page:
    page = browser.new_page(viewport=WIDE)
    sign_in(page, hub, user, "cluster")
    return page


def test_cluster_page_has_a_segment_for_each_slot(hub: PayingHub, browser: Browser) -> None:
    page = open_cluster(browser, hub, "ada")
    page.wait_for_selector("#live:has-text('Live.')")
    shared = page.locator(".tile:has(.slots)")
    assert shared.count() == 1
    assert "2 of 4 slots in use" in shared.inner_text()
    assert "4.00 credits an hour, 1.00 a slot" in shared.inner_text()
    assert shared.locator(".slot").count() == 4
    assert shared.locator(".slot.taken").count() == 2
    assert shared.locator(".slot.own").count() == 1
    look_over(page, "shares-cluster")
    look_over_in_the_dark(page, "shares-cluster")

    hub.start_server("fay", environment="course")
    page.wait_for_selector(".tile:has-text('3 of 4 slots in use')")
    assert shared.locator(".slot.taken").count() == 3
    hub.stop_server("fay")
    page.wait_for_selector(".tile:has-text('2 of 4 slots in use')")
    page.close()

    (device,) = (each for each in hub.json("ada", "cluster").json()["devices"] if each["slots"] > 1)
    assert (device["slots"], device["free_slots"], device["mine"]) == (4, 2, True)


def test_session_and_receipt_say_what_a_share_is(hub: PayingHub, browser: Browser) -> None:
    lease = lease_of(hub, "ada")
    for path in ("", f"leases/{lease.id}"):
        assert f"{SHARE}, {NOTE}" in words(hub.page("ada", path)), path
    (device,) = hub.json("ada", f"leases/{lease.id}/now").json()["devices"]
    assert (device["slots"], device["held_slots"]) == (4, 1)
    assert device["sharing"] == f"{SHARE}, {NOTE}"
    page = browser.new_page(viewport=WIDE)
    sign_in(page, hub, "ada", "")
    look_over(page, "shares-session")
    look_over_in_the_dark(page, "shares-session")
    sign_in(page, hub, "ada", f"leases/{lease.id}")
    look_over(page, "shares-receipt")
    page.close()


def test_share_by_memory_has_as_many_slots_as_it_needs(hub: PayingHub, browser: Browser) -> None:
    half, shared = "2/4 of T4, about 8 GB", "shared with up to 2 others, not isolated"
    page = browser.new_page(viewport=WIDE)
    add_cookies(page, hub, "fay")
    page.goto(f"{hub.url}/hub/spawn/fay?opt-environment=either&opt-gpus=share&opt-gpu_memory=8")
    summary = page.locator("#gpuspawner-summary")
    assert summary.inner_text().startswith("2/4 of T4 (about 8 GB), ")
    assert "2.00 credits an hour" in summary.inner_text()
    assert "Starts now." in summary.inner_text()
    assert page.locator("#gpus option:checked").inner_text() == "2/4 of T4 (about 8 GB)"
    assert page.locator("#gpuspawner-share").inner_text().startswith(f"A share is {shared}: ")
    look_over(page, "shares-form-by-memory")
    look_over_in_the_dark(page, "shares-form-by-memory")
    page.select_option("#gpu_memory", "12")
    assert summary.inner_text().startswith("3/4 of T4 (about 12 GB), ")
    assert "Not enough are free now." in summary.inner_text(), "two of the four slots are"
    page.select_option("#gpu_memory", "8")
    page.get_by_role("button", name="Start").click()
    page.wait_for_url("**/user/fay/**")
    page.close()

    lease = lease_of(hub, "fay")
    (device,) = lease.devices
    assert (device.held_slots, lease.rate) == (2, 2_000_000)
    assert variables(hub, "fay")["GPUSPAWNER_GPU_MEMORY"] == str(device.memory_bytes // 2)
    for path in ("", f"leases/{lease.id}"):
        assert f"{half}, {shared}" in words(hub.page("fay", path)), path
    page = open_cluster(browser, hub, "fay")
    page.wait_for_selector("#live:has-text('Live.')")
    tile = page.locator(".tile:has(.slots)")
    assert "4 of 4 slots in use" in tile.inner_text()
    assert (tile.locator(".slot.taken").count(), tile.locator(".slot.own").count()) == (4, 2)
    assert tile.locator("[data-text=who]").inner_text() == "yours (2 slots)"
    started = tile.locator("[data-text=since]").get_attribute("data-at")
    assert started == instant(lease.started_at), "its own start, not that of the first lease"
    look_over(page, "shares-cluster-by-memory")
    look_over_in_the_dark(page, "shares-cluster-by-memory")
    sign_in(page, hub, "fay", f"leases/{lease.id}")
    look_over(page, "shares-receipt-by-memory")
    page.close()
    assert "fay (2 slots)" in words(hub.page("admin", "cluster"))
    hub.stop_server("fay")


def test_catalog_page_prices_the_share(hub: PayingHub) -> None:
    answer = hub.browser_of("eve").get(
        f"{hub.url}/hub/environments", headers=NAVIGATION, timeout=60
    )
    assert "a share of a GPU" in answer.text
    assert "1 GPU or a share of one" in answer.text
    assert "1.00 credits an hour for a share" in answer.text
    page = hub.browser_of("eve").get(
        f"{hub.url}/hub/environments/course", headers=NAVIGATION, timeout=60
    )
    assert "<dd>a share of a GPU, or none</dd>" in page.text
