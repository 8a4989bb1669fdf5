"""The dialog "Finish without me" as a member sees it. Real: Chromium, JupyterLab with our
extensions, files; who answers in the hub's place answers what the test says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.axe import troubles
from tests.support.browser import complaints_of_ours, screenshot
from tests.support.lab_server import StandInHub, lab_server
from tests.support.notebooks import new_notebook
from tests.support.pages import DRAWN, PHONE, WIDE
from tests.support.processes import wait_for

pytestmark = pytest.mark.usefixtures("processes")

NOW = datetime.now(timezone.utc)

QUOTE: dict[str, Any] = {
    "options": {"environment": "base", "gpus": 1, "hours": 2, "shown_at": NOW.isoformat()},
    "environment": "base",
    "environment_name": "JupyterLab with PyTorch",
    "gpus": 1,
    "most_gpus": 2,
    "cpu_variant": True,
    "models": ["A100-80GB", "T4"],
    "hours": 2.0,
    "most_hours": 24.0,
    "account": "member:ada",
    "accounts": [
        {"account": "member:ada", "available": "42.500000"},
        {"account": "group:vision", "available": "120.000000"},
    ],
    "what": "1 GPU",
    "price": "1.00 to 4.00 credits an hour",
    "total": "2.00 to 8.00 credits",
    "lasts": "",
    "refusal": "",
    "preemptible": False,
    "preemptible_share": 0.5,
    "at_once": True,
    "place": None,
    "estimate": None,
    "planned": None,
    "latest": None,
}

WAITS = {
    "at_once": False,
    "place": 3,
    "estimate": {
        "low": (NOW + timedelta(minutes=20)).isoformat(),
        "likely": (NOW + timedelta(minutes=30)).isoformat(),
        "high": (NOW + timedelta(minutes=50)).isoformat(),
    },
    "latest": (NOW + timedelta(minutes=90)).isoformat(),
}

SESSION = {
    "as_of": NOW.isoformat(),
    "page": "/services/gpu/",
    "lease": {
        "environment": "base",
        "rate_per_hour": "4.000000",
        "cost": "1.000000",
        "ends_at": None,
        "end": None,
    },
    "account": {"account": "member:ada", "balance": "42.500000"},
    "devices": [],
    "warnings": [],
}

NOTEBOOK = new_notebook(parameters="seed = 1\nname = 'birds'", work="print(seed)")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("home") / "work"
    found.mkdir()
    return found


@pytest.fixture(scope="module")
def url(stand_in: StandInHub, work: Path) -> Iterator[str]:
    environment = stand_in.environment(
        GPUSPAWNER_ENVIRONMENT="base",
        GPUSPAWNER_WORKSPACE=str(work),
        GPUSPAWNER_READY_KERNEL="0",
    )
    with lab_server(work, environment, "--LabApp.expose_app_in_browser=True") as url:
        yield url


@pytest.fixture
def hub(stand_in: StandInHub, work: Path) -> StandInHub:
    run = {"id": "night-0a1b2c3d", "state": "waiting", "folder": "runs/night"}
    stand_in.answers = {
        "quote": (200, QUOTE),
        "runs": (200, run),
        "now": (200, SESSION),
        "end": (200, {}),
    }
    stand_in.asked.clear()
    (work / "runs" / "night").mkdir(parents=True, exist_ok=True)
    (work / "night.ipynb").unlink(missing_ok=True)
    (work / "night.ipynb").write_text(json.dumps(NOTEBOOK))
    return stand_in


@pytest.fixture
def page(browser: Browser, hub: StandInHub, url: str) -> Page:
    """JupyterLab with the notebook open, and what gpuspawner says of the session."""
    page = browser.new_context(viewport=WIDE).new_page()
    page.goto(f"{url}/lab/tree/night.ipynb?reset")
    expect(page.locator(".jp-NotebookPanel .cm-content").first).to_contain_text("seed = 1")
    expect(page.locator(".gpuspawner-item")).to_be_visible()
    return page


def edit(page: Page, source: str) -> None:
    """Change the first cell; nothing saves it."""
    page.locator(".jp-NotebookPanel .cm-content").first.fill(source)


def press(page: Page) -> Locator:
    """The dialog after a click on the button in the notebook's toolbar."""
    page.locator(".jp-NotebookPanel-toolbar").get_by_role("button", name="Finish").click()
    return page.locator(".gpuspawner-finish .jp-Dialog-content")


def submit(dialog: Locator) -> None:
    button = dialog.get_by_role("button", name="Submit")
    expect(button).to_have_attribute("aria-disabled", "false")
    button.click()


THEME = "theme => jupyterapp.commands.execute('apputils:change-theme', {theme})"


def keep(page: Page, name: str) -> None:
    """Pictures in the light, in the dark and on a phone; nothing is wider than that."""
    for theme in ("Dark", "Light"):
        page.evaluate(THEME, f"JupyterLab {theme}")
        expect(page.locator("body")).to_have_attribute("data-jp-theme-name", f"JupyterLab {theme}")
        page.evaluate(DRAWN)
        assert troubles(page, within=".jp-Dialog-content") == []
        screenshot(page, f"finish-{name}-{theme.lower()}")
    page.set_viewport_size(PHONE)
    page.evaluate(DRAWN)
    box = page.locator(".jp-Dialog-content").bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
    screenshot(page, f"finish-{name}-phone")
    page.set_viewport_size(WIDE)


def test_notebook_becomes_a_run_with_what_was_chosen(
    page: Page, hub: StandInHub, work: Path
) -> None:
    errors = complaints_of_ours(page)
    edit(page, "seed = 2\nname = 'birds'")
    dialog = press(page)
    expect(dialog).to_contain_text("runs from the top in a fresh kernel")
    expect(dialog).to_contain_text("memory of this kernel is not carried over")
    expect(dialog).to_contain_text("JupyterLab with PyTorch")
    expect(dialog).to_contain_text(
        "1 GPU: 1.00 to 4.00 credits an hour, 2.00 to 8.00 credits for 2 h 0 min."
    )
    expect(dialog).to_contain_text("Starts now.")
    expect(dialog.get_by_label("Paid by")).to_contain_text("your account, 42.50 credits")
    expect(dialog.get_by_label("seed")).to_have_value("2")
    assert "seed = 2" in (work / "night.ipynb").read_text(), "it was saved"
    keep(page, "dialog")

    # Another choice has another price, and another start.
    hub.answers["quote"] = (200, {**QUOTE, **WAITS, "price": "8.00 credits an hour"})
    dialog.get_by_label("GPUs").select_option("2")
    expect(dialog).to_contain_text("8.00 credits an hour")
    expect(dialog).to_contain_text("It would be number 3 in the queue. Expected start: about ")
    expect(dialog).to_contain_text("(8 of 10 starts), by ")
    dialog.get_by_label("GPU model").select_option("T4")
    dialog.get_by_label("Time limit in hours").fill("3.5")
    dialog.get_by_label("Paid by").select_option("group:vision")
    dialog.get_by_label("seed").fill("7")
    keep(page, "waits")
    expect(dialog.get_by_role("button", name="Submit")).to_have_attribute("aria-disabled", "false")

    # Refused: the sentence, and nothing is lost.
    hub.answers["runs"] = (409, {"message": "You already have 100 runs that wait or run."})
    submit(dialog)
    expect(dialog.get_by_role("alert")).to_have_text("You already have 100 runs that wait or run.")
    expect(dialog.get_by_role("alert")).to_be_in_viewport(ratio=1)
    expect(dialog.get_by_label("seed")).to_have_value("7")
    keep(page, "refused")
    assert [path.name for path in (work / "runs").iterdir()] == ["night"]

    hub.answers["runs"] = (200, {"id": "night-0a1b2c3d", "folder": "runs/night"})
    submit(dialog)
    told = page.locator(".jp-Dialog-content", has_text="The run is submitted")
    expect(told).to_contain_text("night-0a1b2c3d starts by itself.")
    expect(told.get_by_role("link", name="page Runs")).to_have_attribute(
        "href", "/services/gpu/runs"
    )
    keep(page, "accepted")
    first, second = hub.sent("runs")
    assert first["key"] == second["key"] and first["notebook"] != second["notebook"]
    assert second["parameters"] == {"seed": 7} and second["directory"] == ""
    assert second["options"] == {
        **QUOTE["options"],
        "gpus": 2,
        "gpu_model": "T4",
        "hours": "3.5",
        "account": "group:vision",
    }
    copied = json.loads((work / second["notebook"]).read_text())
    assert copied["cells"][0]["source"] in (
        "seed = 2\nname = 'birds'",
        ["seed = 2\n", "name = 'birds'"],
    )
    assert (second["preemptible"], second["requeue"]) == (False, False)
    assert hub.sent("end") == [], "nobody asked for that"

    told.get_by_role("link", name="runs/night").click()
    expect(page.locator(".jp-FileBrowser-crumbs")).to_contain_text("night")
    assert errors == [], errors


def test_preemptible_run_is_priced_and_explained(page: Page, hub: StandInHub) -> None:
    dialog = press(page)
    preemptible = dialog.get_by_label("preemptible, for 50 % of the price")
    expect(preemptible).not_to_be_checked()
    expect(preemptible).to_have_accessible_description(
        "It only gets GPUs that nobody else can use. When somebody needs them, it is stopped, and "
        "begins again from the top when GPUs are idle."
    )
    cheap = {**QUOTE, "preemptible": True, "price": "0.50 to 2.00 credits an hour"}
    hub.answers["quote"] = (200, {**cheap, "total": "", "at_once": False})
    preemptible.check()
    expect(dialog).to_contain_text("1 GPU: 0.50 to 2.00 credits an hour.")
    expect(dialog).to_contain_text("Starts when GPUs are idle. It has no place in the queue.")
    keep(page, "preemptible")
    dialog.get_by_label("begin again from the top if the hub interrupts it").check()
    submit(dialog)
    expect(page.locator(".jp-Dialog-content", has_text="The run is submitted")).to_be_visible()
    assert [x.get("preemptible") for x in hub.sent("quote")] == [None, True]
    [sent] = hub.sent("runs")
    assert (sent["preemptible"], sent["requeue"]) == (True, True)


@pytest.mark.parametrize("share", [0.0, 0.125, 1.0, None])
def test_share_of_the_price_is_in_words(page: Page, hub: StandInHub, share: float | None) -> None:
    hub.answers["quote"] = (200, {**QUOTE, "preemptible_share": share})
    dialog = press(page)
    expect(dialog.get_by_label("Time limit in hours")).to_have_value("2")
    if share is None:
        expect(dialog.get_by_label("preemptible")).to_be_hidden()
        return
    told = {0.0: ", free of charge", 0.125: ", for 12.5 % of the price", 1.0: ""}[share]
    expect(dialog.locator(".gpuspawner-check").first).to_have_text(f"preemptible{told}")


def test_run_without_a_gpu_is_never_preemptible(page: Page, hub: StandInHub) -> None:
    dialog = press(page)
    preemptible = dialog.get_by_label("preemptible")
    preemptible.check()
    wait_for(lambda: hub.sent("quote")[-1].get("preemptible"), "the question for its price")
    dialog.get_by_label("GPUs").select_option("0")
    expect(preemptible).to_be_hidden()
    submit(dialog)
    expect(page.locator(".jp-Dialog-content", has_text="The run is submitted")).to_be_visible()
    assert hub.sent("quote")[-1]["preemptible"] is False
    assert hub.sent("runs")[0]["preemptible"] is False


def test_server_stops_only_after_the_run_is_accepted(page: Page, hub: StandInHub) -> None:
    dialog = press(page)
    dialog.get_by_label("and stop this server").check()
    hub.answers["runs"] = (409, {"message": "Your membership has ended."})
    submit(dialog)
    expect(dialog.get_by_role("alert")).to_have_text("Your membership has ended.")
    assert hub.sent("end") == []
    hub.answers["runs"] = (200, {"id": "night-0a1b2c3d", "folder": "runs/night"})
    submit(dialog)
    page.wait_for_url("**/services/gpu/runs")
    paths = [path.rpartition("/")[2] for method, path, *_ in hub.asked if method == "POST"]
    assert paths[-2:] == ["runs", "end"]


def test_server_that_does_not_stop_is_told(page: Page, hub: StandInHub) -> None:
    hub.answers["end"] = (503, {"message": "The Hub is not responding."})
    dialog = press(page)
    dialog.get_by_label("and stop this server").check()
    submit(dialog)
    told = page.locator(".jp-Dialog-content", has_text="The run is submitted")
    expect(told).to_contain_text("This server still runs. The Hub is not responding.")


@pytest.mark.parametrize(
    "answer",
    [
        (409, {"message": "This hub runs no notebooks or commands without a session."}),
        (503, {"message": "The GPU service is not responding."}),
    ],
)
def test_hub_that_takes_no_runs_says_why(
    page: Page, hub: StandInHub, answer: tuple[int, dict[str, str]]
) -> None:
    hub.answers["quote"] = answer
    dialog = press(page)
    expect(dialog.get_by_role("alert")).to_have_text(answer[1]["message"])
    button = dialog.get_by_role("button", name="Submit")
    expect(button).to_have_attribute("aria-disabled", "true")
    button.click(force=True)
    expect(dialog.get_by_label("GPUs")).to_be_hidden()
    keep(page, f"none-{answer[0]}")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    assert hub.sent("runs") == []


def test_refused_choice_can_be_changed(page: Page, hub: StandInHub) -> None:
    poor = "Your balance of 0.10 credits does not pay for the start."
    hub.answers["quote"] = (200, {**QUOTE, "refusal": poor})
    dialog = press(page)
    expect(dialog.get_by_role("alert")).to_have_text(poor)
    hub.answers["quote"] = (400, {"message": "Write 24 or less."})
    dialog.get_by_label("Time limit in hours").fill("99")
    expect(dialog.get_by_role("alert")).to_have_text("Write 24 or less.")
    hub.answers["quote"] = (200, QUOTE)
    dialog.get_by_label("Time limit in hours").fill("9")
    button = dialog.get_by_role("button", name="Submit")
    expect(button).to_have_attribute("aria-disabled", "false")
    expect(dialog.get_by_role("alert")).to_be_hidden()
    dialog.get_by_label("Time limit in hours").press("Enter")
    expect(page.locator(".jp-Dialog-content", has_text="The run is submitted")).to_be_visible()


def test_changes_of_a_read_only_notebook_are_not_lost(
    page: Page, hub: StandInHub, work: Path, url: str
) -> None:
    page.route(re.compile(r"/api/contents/night\.ipynb\?"), read_only)
    page.goto(f"{url}/lab/tree/night.ipynb?reset")
    expect(page.locator(".jp-NotebookPanel .cm-content").first).to_contain_text("seed = 1")
    dialog = press(page)
    expect(dialog.get_by_label("seed")).to_have_value("1")
    dialog.get_by_role("button", name="Cancel").click()
    hub.asked.clear()
    edit(page, "seed = 3")
    dialog = press(page)
    expect(dialog.get_by_role("alert")).to_contain_text("This notebook is read-only")
    assert "seed = 3" not in (work / "night.ipynb").read_text() and hub.sent("quote") == []


def read_only(route: Any) -> None:
    """As the server answers for a file that its user may not write; here that is root."""
    answer = route.fetch()
    route.fulfill(response=answer, json={**answer.json(), "writable": False})


def test_notebook_that_cannot_be_saved_is_not_submitted(page: Page, hub: StandInHub) -> None:
    """JupyterLab itself says why."""

    def fail(route: Any) -> None:
        if route.request.method == "PUT":
            route.fulfill(status=500, json={"message": "No space left on device"})
        else:
            route.continue_()

    page.route(re.compile(r"/api/contents/night\.ipynb"), fail)
    edit(page, "seed = 4")
    page.get_by_role("button", name="Finish without me").click()
    expect(page.locator(".jp-Dialog")).to_contain_text("No space left on device")
    expect(page.locator(".gpuspawner-finish")).to_have_count(0)
    assert hub.sent("quote") == []


def test_command_is_in_the_menus_and_the_palette(page: Page, hub: StandInHub) -> None:
    page.get_by_role("menuitem", name="Run", exact=True).click()
    item = page.locator('.lm-Menu [data-command="gpuspawner:finish"]')
    expect(item).to_have_text(re.compile("Finish without me"))
    page.keyboard.press("Escape")
    page.locator(".jp-NotebookPanel .cm-content").first.click(button="right")
    expect(item).to_be_visible()
    page.keyboard.press("Escape")
    page.evaluate("jupyterapp.commands.execute('apputils:activate-command-palette')")
    page.locator(".lm-CommandPalette-input:visible").fill("Finish without me")
    page.locator('.lm-CommandPalette-item[data-command="gpuspawner:finish"]').click()
    expect(page.locator(".gpuspawner-finish")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".gpuspawner-finish")).to_have_count(0)
    wait_for(lambda: hub.sent("quote"), "that it asked")
