"""The button "Finish without me", and the quote before it. Real: hub, proxy, accounting service, a
Docker Engine, containers of our base image with JupyterLab, Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from gpuspawner.core.units import MICRO
from tests.support.browser import screenshot
from tests.support.engine import PrivateEngine
from tests.support.notebook_hub import NotebookHub
from tests.support.notebooks import new_notebook
from tests.support.processes import wait_for

NOTEBOOK = new_notebook(
    parameters="seed = 1",
    work="import os\nprint('seed', seed, os.environ['GPUSPAWNER_GPU_COUNT'])",
)


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[NotebookHub]:
    with NotebookHub(folder, engine) as hub:
        yield hub
    engine.clean()


def quote(hub: NotebookHub, user: str, status: int = 200, **body: Any) -> dict[str, Any]:
    hub.browser_of(user)
    answer = hub.call(user, "POST", "runs/-/quote", json=body)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


def ended(hub: NotebookHub, user: str, run_id: str) -> dict[str, Any]:
    def there() -> dict[str, Any]:
        run: dict[str, Any] = hub.call(user, "GET", f"runs/{run_id}").json()
        return run if run["ended_at"] else {}

    return wait_for(there, "the end of the run", timeout=90)


def test_quote_says_what_the_start_form_says(hub: NotebookHub, member: str) -> None:
    told = quote(hub, member)
    account = f"member:{member}"
    assert (told["environment"], told["environment_name"]) == ("base", "Base")
    assert (told["gpus"], told["hours"], told["most_hours"]) == (1, 8, 8)
    assert told["price"] == "4.00 credits an hour" and told["total"] == "32.00 credits"
    assert told["account"] == account
    assert told["accounts"] == [{"account": account, "available": "50.000000"}]
    assert told["at_once"] and told["place"] is None and not told["refusal"]

    form = hub.open_page(member, "/hub/spawn").text
    assert told["models"] == ["A100-80GB"]
    assert told["price"] in form and "32.00 credits" in form and "A100-80GB" in form
    two = quote(hub, member, options={"gpus": 2, "hours": 7})
    assert (two["price"], two["total"]) == ("8.00 credits an hour", "56.00 credits")
    assert two["lasts"] == "6 h 15 min", "the credits end it before"
    none = quote(hub, member, options={"gpus": 0})
    assert (none["price"], none["total"], none["hours"]) == ("free of charge", "", None)
    for options, words in (
        ({"gpus": 3}, "Ask for 2 or fewer"),
        ({"hours": 9}, "Write 8 or less"),
        ({"environment": "no-such"}, "no-such"),
        ({"image": "evil"}, "image"),
    ):
        assert words in quote(hub, member, 400, options=options)["message"]
    told = quote(hub, member, 403, options={"account": "group:others"})
    assert "group:others" in told["message"]
    assert hub.leases(member) == [] and hub.call(member, "GET", "runs").json()["runs"] == []


def test_quote_of_a_preemptible_run_has_its_lower_price(hub: NotebookHub, member: str) -> None:
    ordinary = quote(hub, member, options={"hours": 2})
    assert (ordinary["preemptible"], ordinary["preemptible_share"]) == (False, 0.5)
    assert (ordinary["price"], ordinary["total"]) == ("4.00 credits an hour", "8.00 credits")
    told = quote(hub, member, options={"hours": 2}, preemptible=True)
    assert (told["price"], told["total"]) == ("2.00 credits an hour", "4.00 credits")
    assert told["preemptible"] and told["at_once"] and not told["refusal"]
    long = quote(hub, member, options={"hours": 8, "gpus": 2}, preemptible=True)
    assert (long["price"], long["lasts"]) == ("4.00 credits an hour", "")
    none = quote(hub, member, options={"gpus": 0}, preemptible=True)
    assert "Only a run with a GPU can be preemptible" in none["refusal"]


def test_quote_of_who_would_wait_has_a_position(hub: NotebookHub, member: str) -> None:
    hub.browser_of(member)
    holders = [
        hub.call(
            member,
            "POST",
            "runs",
            json={"command": ["sleep", "600"], "options": {"hours": 1, "gpus": 1}},
        ).json()["id"]
        for _ in range(len(hub.devices) + 1)
    ]

    def waits() -> dict[str, Any]:
        told = quote(hub, member, options={"gpus": 1, "hours": 1})
        return told if told["place"] == 2 else {}

    told = wait_for(waits, "that one waits before this one")
    assert not told["at_once"] and told["latest"] and told["planned"]
    beside = quote(hub, member, options={"gpus": 1, "hours": 1}, preemptible=True)
    assert (beside["at_once"], beside["place"], beside["latest"]) == (False, None, None)
    for run in holders:
        hub.call(member, "DELETE", f"runs/{run}").raise_for_status()
    for run in holders:
        ended(hub, member, run)
    wait_for(lambda: hub.containers() == [] and hub.taken() == {}, "the end of the containers")


def test_who_cannot_pay_reads_it_in_the_quote(hub: NotebookHub, member: str) -> None:
    hub.browser_of(member)
    taken = {"amount": "-50", "reason": "test", "key": f"all-{member}"}
    path = f"accounts/member:{member}/grants"
    assert hub.call("admin", "POST", path, json=taken).ok
    told = quote(hub, member)
    assert "Your balance" in told["refusal"]
    assert quote(hub, member, options={"gpus": 0})["refusal"] == ""


def test_button_in_jupyterlab_finishes_a_notebook_and_stops_the_server(
    hub: NotebookHub, browser: Browser, member: str
) -> None:
    hub.browser_of(member)
    hub.spawn_and_wait(member, {"environment": "base", "gpus": 1, "hours": 3})
    hub.put_notebook(member, "night.ipynb", NOTEBOOK)
    [lease] = hub.open_leases(member)
    hub.browser_of("member7")
    quote(hub, "member7", 404, lease=lease.id)

    page = hub.open_notebook(browser, member, "night.ipynb")
    page.get_by_role("button", name="Finish without me").click()
    dialog = page.locator(".gpuspawner-finish .jp-Dialog-content")
    expect(dialog.get_by_label("Time limit in hours")).to_have_value("3")
    expect(dialog).to_contain_text("4.00 credits an hour, 12.00 credits for 3 h 0 min.")
    expect(dialog).to_contain_text("Starts now.")
    dialog.get_by_label("GPUs").select_option("0")
    expect(dialog).to_contain_text("free of charge.")
    dialog.get_by_label("GPUs").select_option("1")
    dialog.get_by_label("Time limit in hours").fill("1")
    expect(dialog).to_contain_text("4.00 credits for 1 h 0 min.")
    dialog.get_by_label("preemptible, for 50 % of the price").check()
    expect(dialog).to_contain_text("2.00 credits an hour, 2.00 credits for 1 h 0 min.")
    dialog.get_by_label("begin again from the top").check()
    dialog.get_by_label("seed").fill("7")
    dialog.get_by_label("and stop this server").check()
    screenshot(page, "finish-hub")
    dialog.get_by_role("button", name="Submit").click()
    page.wait_for_url(f"{hub.url}/services/gpu/runs")
    expect(page.locator("main")).to_contain_text("night")

    [run] = hub.call(member, "GET", "runs").json()["runs"]
    wait_for(lambda: not [x for x in hub.open_leases(member) if x.id == lease.id], "the end")
    run = ended(hub, member, run["id"])
    assert (run["state"], run["exit_status"], run["reason"]) == ("done", 0, "")
    assert run["preemptible"] and run["requeue"]
    assert run["notebook"] == f"{run['folder']}/input.ipynb" and run["parameters"] == {"seed": 7}
    output = (hub.workspace(member) / run["folder"] / "output.ipynb").read_text()
    assert '"seed 7 1\\n"' in output
    assert len(hub.leases(member)) == 2 and hub.balance(member) < 50 * MICRO
