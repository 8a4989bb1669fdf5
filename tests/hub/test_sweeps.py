"""Sweeps: many runs submitted at once, a few of them begun. Real: hub, proxy, accounting service, a
Docker Engine, containers of our base image, Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from gpuspawner.core.units import MICRO
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.hub import ADMIN
from tests.support.images import BASE
from tests.support.pages import WIDE, add_cookies, look_over_page
from tests.support.processes import free_port, wait_for

CATALOG = f"""
environments:
  - {{slug: base, image: {BASE}, default: true, devices: {{default: 1, max: 2}}, hours: {{max: 8}}}}
"""

CONFIG = """
c.GPUDockerSpawner.workspace = "{folder}/work-{{raw_username}}"
c.GPURates.by_model = {{"*": 60}}
c.GPUCredits.hold_minutes = 1
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[GPUHub]:
    config = CONFIG.format(port=free_port(), folder=folder)
    with GPUHub(folder / "hub", engine, config, catalog=CATALOG) as hub:
        yield hub
    engine.clean()


def call(hub: GPUHub, user: str, method: str, path: str, **body: Any) -> dict[str, Any]:
    answer = hub.call(user, method, path, json=body or None)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def all_ended(hub: GPUHub, user: str) -> bool:
    return all(run["ended_at"] for run in call(hub, user, "GET", "runs")["runs"])


def program(code: str) -> list[str]:
    return ["python3", "-c", f"import sys, time; n = int(sys.argv[1]); {code}", "{n}"]


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"n": number} for number in range(count)]


def test_killed_hub_starts_no_more_than_at_most_and_all_end_once(hub: GPUHub, member: str) -> None:
    hub.browser_of(member)
    sent = {"command": program("time.sleep(3)"), "sets": numbered(5), "at_most": 1, "key": "k"}
    sweep = call(hub, member, "POST", "sweeps", **sent, title="Night")
    assert sweep["id"].startswith("night-") and len(sweep["runs"]) == 5
    path = f"sweeps/{sweep['id']}"
    seen: set[str] = set()

    def begun() -> int:
        runs = call(hub, member, "GET", path)["runs"]
        active = [run["id"] for run in runs if run["state"] in ("starting", "running")]
        assert len(active) <= 1 and len(hub.containers()) <= 1
        seen.update(active)
        return len(seen)

    wait_for(lambda: begun() >= 2, "the second run", timeout=90)
    hub.kill9(services=True)
    hub.start()
    assert call(hub, member, "POST", "sweeps", **sent)["id"] == sweep["id"]
    wait_for(lambda: begun() and all_ended(hub, member), "the end", timeout=120)
    found = call(hub, member, "GET", path)
    assert found["states"] == {"done": 5}
    # A kill between grant and container costs nothing, and the run gets another lease.
    charged = [lease for lease in hub.leases(member) if lease.charged]
    told = [(x.server.run_id, x.granted_at, x.started_at, x.end_reason) for x in charged]
    assert sorted(run_id for run_id, *_ in told) == [run["id"] for run in found["runs"]], told
    assert Decimal(found["charged"]) * MICRO == sum(lease.charged for lease in charged)
    assert hub.taken() == {}


def test_stop_ends_all_and_failed_ones_are_submitted_again(hub: GPUHub, member: str) -> None:
    hub.browser_of(member)
    code = program("n == 1 and time.sleep(600); sys.exit(n == 0)")
    sweep = call(hub, member, "POST", "sweeps", command=code, sets=numbered(4), at_most=2)
    path = f"sweeps/{sweep['id']}"

    def states() -> dict[str, int]:
        return dict(call(hub, member, "GET", path)["states"])

    wait_for(lambda: states() == {"failed": 1, "running": 1, "done": 2}, "three ends", timeout=90)
    hub.browser_of("member7")
    for method, what in (("GET", path), ("DELETE", path), ("POST", f"{path}/again")):
        assert hub.call("member7", method, what, json={}).status_code == 404
    call(hub, member, "DELETE", path)
    wait_for(lambda: states() == {"failed": 1, "stopped": 1, "done": 2}, "its stop", timeout=60)
    again = call(hub, member, "POST", f"{path}/again", key="again")
    assert again["id"] != sweep["id"] and again["at_most"] == 2
    (run,) = again["runs"]
    assert run["command"][-1] == "0" and run["title"].endswith(" n=0")
    assert run["folder"] not in {run["folder"] for run in sweep["runs"]}
    assert call(hub, member, "POST", f"{path}/again", key="again")["id"] == again["id"]
    wait_for(lambda: all_ended(hub, member), "the end", timeout=60)
    done = call(hub, member, "POST", "sweeps", command=["true"], sets=[{}])
    wait_for(lambda: all_ended(hub, member), "the end", timeout=60)
    refused = hub.call(member, "POST", f"sweeps/{done['id']}/again", json={})
    assert (refused.status_code, refused.json()["error"]) == (409, "nothing_failed")


def test_page_shows_a_sweep_stops_it_and_submits_what_failed_again(
    hub: GPUHub, member: str, browser: Browser
) -> None:
    hub.browser_of(member)
    code = program("n == 1 and time.sleep(600); sys.exit(n == 0)")
    sent = {"command": code, "sets": numbered(4), "at_most": 2, "options": {"hours": 2}}
    sweep = call(hub, member, "POST", "sweeps", **sent, title="Study")
    path = f"sweeps/{sweep['id']}"

    def states() -> dict[str, int]:
        return dict(call(hub, member, "GET", path)["states"])

    wait_for(lambda: states() == {"failed": 1, "running": 1, "done": 2}, "three ends", timeout=90)
    page = browser.new_context(viewport=WIDE).new_page()
    add_cookies(page, hub, member)
    page.goto(f"{hub.url}/services/gpu/runs")
    page.get_by_role("link", name="Sweep of 4 runs").click()
    page.wait_for_url(f"**/runs/{path}")
    assert page.locator("h1").inner_text() == f"study sweep {sweep['id']}"
    grid = page.get_by_role("list", name="State of each run")
    links = grid.get_by_role("link").all()
    told = [link.text_content() for link in links]
    assert told == ["1: failed", "2: running", "3: done", "4: done"]
    runs = [f"/services/gpu/runs/{run['id']}" for run in sweep["runs"]]
    assert [link.get_attribute("href") for link in links] == runs
    facts = page.locator("dl").inner_text()
    assert "4, at most 2 at once" in facts and "credits so far" in facts
    # What has ended is charged for seconds, and one run may take its two hours.
    (most,) = re.findall(r"([0-9.]+) credits, if each run takes all of its time", facts)
    assert 120 <= float(most) < 125
    assert look_over_page(page, "runs/sweep") == []
    page.get_by_role("button", name="Stop all").click()
    assert page.locator("h1").inner_text() == f"Stop all runs of {sweep['id']}?"
    page.get_by_role("button", name="Stop all runs").click()
    page.wait_for_url("**?stopped=1")
    wait_for(lambda: states() == {"failed": 1, "stopped": 1, "done": 2}, "its stop", timeout=60)
    page.goto(f"{hub.url}/services/gpu/runs/{path}")
    assert page.get_by_role("button", name="Stop all").count() == 0
    page.get_by_role("button", name="Failed ones again").click()
    assert page.locator("h1").inner_text() == f"Run what failed of {sweep['id']} again?"
    assert "Study n=0" in page.locator("dl").inner_text()
    assert look_over_page(page, "runs/sweep-again") == []
    page.get_by_role("button", name="Submit runs").click()
    page.wait_for_url(lambda url: "/runs/sweeps/study-" in url and sweep["id"] not in url)
    again = call(hub, member, "GET", f"sweeps/{page.url.rpartition('/')[2]}")
    assert [run["title"] for run in again["runs"]] == ["Study n=0"] and again["at_most"] == 2
    wait_for(lambda: all_ended(hub, member), "the end", timeout=60)
    hub.browser_of(ADMIN)
    theirs = browser.new_context(viewport=WIDE).new_page()
    add_cookies(theirs, hub, ADMIN)
    theirs.goto(f"{hub.url}/services/gpu/runs/{path}")
    assert member in theirs.locator("dl").inner_text()
    assert theirs.get_by_role("button", name="Failed ones again").count() == 0


def test_bad_sweeps_are_refused_in_words_and_nothing_is_saved(hub: GPUHub, member: str) -> None:
    hub.browser_of(member)
    sets = numbered(2)
    for body, words in (
        ({"command": ["a", "{n}"], "sets": []}, "list of 1 to 100 objects"),
        ({"command": ["a", "{n}"], "sets": [1]}, "is an object"),
        ({"command": ["a"], "sets": sets}, "is or has {n}"),
        ({"command": ["a", "{n}"], "sets": sets, "at_most": 0}, "whole number from 1"),
        ({"sets": sets}, "Send a command or a notebook"),
        ({"command": ["{n}"], "sets": sets, "options": {"gpus": 64}}, "GPUs"),
        ({"command": ["{n}"], "sets": sets, "options": {"image": "evil"}}, "image"),
    ):
        for path in ("sweeps", "sweeps/-/quote"):
            answer = hub.call(member, "POST", path, json=body)
            assert answer.status_code == 400 and words in answer.json()["message"], answer.text
    assert call(hub, member, "GET", "runs")["runs"] == []
    call(hub, member, "POST", "runs", command=["true"], key="single")
    answer = hub.call(member, "POST", "sweeps", json={**sent_of(sets), "key": "single"})
    assert answer.status_code == 400 and "is not a sweep" in answer.json()["message"]


def sent_of(sets: list[dict[str, Any]]) -> dict[str, Any]:
    return {"command": ["echo", "{n}"], "sets": sets}


def test_terminal_tells_the_price_and_submits_a_sweep(
    hub: GPUHub, member: str, folder: Path
) -> None:
    hub.browser_of(member)
    hub.spawn_and_wait(member, {"environment": "base", "gpus": 0})
    ref, files = hub.container_of(member), folder / f"work-{member}"
    (files / "train.py").write_text("import sys; print(sys.argv[1:])")
    (files / "runs.csv").write_text("seed,name\n1,one\n2,two\n")
    cell = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "outputs": []}
    cells = [{**cell, "source": "seed = 0", "execution_count": None}]
    kernel = {"name": "python3", "display_name": "Python", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}}
    (files / "study.ipynb").write_text(json.dumps({**notebook, "nbformat": 4, "nbformat_minor": 4}))

    def run(*words: str, status: int = 0) -> str:
        code, output = hub.engine.execute(ref, ("gpuspawner-run", *words))
        assert code == status, output
        return output

    lists = ("-p", "lr", "[0.1, 0.01]", "-p", "seed", "[1, 2, 3]", "-p", "tag", "x")
    words = ("train.py", "--gpus", "1", "--hours", "2", "--at-most", "2", "--sweep", *lists)
    rest = ("--", "--lr={lr}", "{seed}", "{tag}")
    said = run(*words, *rest, status=1)
    assert "6 runs, at most 2 at once. If each takes its 2 hours, they cost 720 credits" in said
    assert "up to 60 an hour each. 2 must be available" in said and "--yes" in said
    assert call(hub, member, "GET", "runs")["runs"] == []
    said = run(*words, "--yes", *rest)
    name = said.splitlines()[-1].split()[0]
    wait_for(lambda: all_ended(hub, member), "the end", timeout=120)
    shown = run("sweep", name)
    assert shown.count(" done ") == 6 and "train lr=0.01 seed=3" in shown
    assert "6 done. Charged: " in shown
    runs = call(hub, member, "GET", f"sweeps/{name}")["runs"]
    logs = [(files / run["folder"] / "run.log").read_text().strip() for run in runs]
    pairs = [(lr, seed) for lr in ("0.1", "0.01") for seed in "123"]
    assert logs == [str([f"--lr={lr}", seed, "x"]) for lr, seed in pairs]

    said = run("study.ipynb", "--sweep-csv", "runs.csv", "-p", "name", '"z"', "--yes")
    name = said.splitlines()[-1].split()[0]
    wait_for(lambda: all_ended(hub, member), "the end", timeout=120)
    runs = call(hub, member, "GET", f"sweeps/{name}")["runs"]
    assert [run["parameters"] for run in runs] == [
        {"name": "one", "seed": 1},
        {"name": "two", "seed": 2},
    ]
    for run_ in runs:
        output = (files / run_["folder"] / "output.ipynb").read_text()
        assert f"seed = {run_['parameters']['seed']}" in output
    assert "nothing to submit again" in run("sweep", name, "--again", status=1)
    assert "list of values" in run("train.py", "--sweep", "-p", "lr", "1", status=1)
    assert "for a sweep" in run("train.py", "--at-most", "2", status=1)
    hub.stop_server(member)
