"""jupyter-scheduler's pages, whose jobs are runs and whose schedules are the hub's. Real: hub,
proxy, accounting service, a Docker Engine, our base image with jupyter-scheduler, Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser, Page, expect

from gpuspawner.client import Client
from tests.support.browser import screenshot
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.images import SCHEDULER
from tests.support.notebooks import new_notebook
from tests.support.pages import PHONE, WIDE, add_cookies
from tests.support.processes import free_port, wait_for

CATALOG = f"""
environments:
  - slug: base
    display_name: Base
    image: {SCHEDULER}
    default: true
    devices: {{default: 1, max: 2}}
    hours: {{max: 8}}
  - slug: other
    display_name: Other
    image: {SCHEDULER}
    devices: {{default: 0, max: 1}}
"""

CONFIG = """
c.GPUDockerSpawner.workspace = "{folder}/work-{{raw_username}}"
c.GPURates.by_model = {{"*": 4}}
c.GPUCredits.opening_grant = 50
c.GPUCredits.hold_minutes = 1
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""

NOTEBOOK = new_notebook(
    parameters="seed = 1",
    work="import os\nprint('seed', seed, os.environ['GPUSPAWNER_GPU_COUNT'])",
)


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[GPUHub]:
    images.ensure_images(engine, [SCHEDULER])
    config = CONFIG.format(port=free_port(), folder=folder)
    with GPUHub(folder / "hub", engine, config, catalog=CATALOG) as hub:
        yield hub
    engine.clean()


def client_of(hub: GPUHub, user: str) -> Client:
    hub.browser_of(user)
    return Client(f"{hub.url}/services/gpu/api", hub.user_token(user))


def jupyter(hub: GPUHub, user: str, method: str, path: str, **body: Any) -> requests.Response:
    """Ask jupyter-scheduler in the member's session, as its pages do."""
    return requests.request(
        method,
        f"{hub.url}/user/{user}/scheduler/{path}",
        headers={"Authorization": f"token {hub.user_token(user)}"},
        json=body or None,
        timeout=60,
    )


def open_notebook(hub: GPUHub, browser: Browser, user: str, folder: Path) -> Page:
    """Start the member's server, and open a notebook of theirs in JupyterLab."""
    hub.browser_of(user)
    hub.spawn_and_wait(user, {"environment": "base", "gpus": 0, "hours": 3})
    notebook = folder / f"work-{user}" / "night.ipynb"
    notebook.write_text(json.dumps(NOTEBOOK))
    notebook.chmod(0o666)
    page = browser.new_context(viewport=WIDE).new_page()
    add_cookies(page, hub, user)
    page.goto(f"{hub.url}/user/{user}/lab/tree/night.ipynb")
    expect(page.locator(".jp-NotebookPanel .cm-content").first).to_contain_text("seed = 1")
    page.locator('[data-jp-item-name="create-job"]').click()
    # What is typed before the environments are there is lost.
    expect(page.get_by_text("base", exact=True)).to_be_visible()
    return page


def test_job_from_jupyterlab_is_a_run_and_its_output_can_be_opened(
    hub: GPUHub, browser: Browser, member: str, folder: Path
) -> None:
    page = open_notebook(hub, browser, member, folder)
    page.get_by_label("Job name").fill("night job")
    expect(page.get_by_text("Compute type").first).to_be_visible()
    screenshot(page, "scheduler-create")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_text("night job").first).to_be_visible()

    [run] = list(client_of(hub, member).runs.list())
    done = client_of(hub, member).runs.wait(run.id, timeout=120, every=0.5)
    assert (done.state, done.title, done.options["gpus"]) == ("done", "night job", 1)
    assert done.notebook == f"{done.folder}/input.ipynb"
    page.get_by_role("button", name="Reload").first.click()
    expect(page.get_by_text("Completed").first).to_be_visible()
    screenshot(page, "scheduler-jobs")

    told = jupyter(hub, member, "GET", f"jobs/{run.id}").json()
    assert told["status"] == "COMPLETED" and told["downloaded"]
    output, _ = told["job_files"]
    contents = f"{hub.url}/user/{member}/files/{output['file_path']}"
    token = {"Authorization": f"token {hub.user_token(member)}"}
    assert "seed 1 1" in requests.get(contents, headers=token, timeout=30).text


def test_schedule_starts_runs_while_no_server_of_its_member_runs(
    hub: GPUHub, browser: Browser, member: str, folder: Path
) -> None:
    page = open_notebook(hub, browser, member, folder)
    page.get_by_label("Run on a schedule").check()
    page.get_by_label(re.compile("^Job (definition )?name")).fill("each minute")
    page.get_by_label("Interval").click()
    page.get_by_role("option", name="Custom schedule").click()
    page.get_by_label("cron expression").fill("* * * * *")
    screenshot(page, "scheduler-schedule")
    page.get_by_role("button", name="Create", exact=True).click()
    client = client_of(hub, member)
    [schedule] = wait_for(lambda: client.schedules.list(), "the schedule")
    assert (schedule.title, schedule.cron, schedule.paused) == ("each minute", "* * * * *", False)
    assert schedule.notebook.startswith("runs/schedules/")
    expect(page.get_by_text("each minute").first).to_be_visible()
    screenshot(page, "scheduler-definitions")
    page.context.close()

    hub.stop_server(member)
    run = wait_for(lambda: next(client.runs.list(), None), "the first run", timeout=90)
    done = client.runs.wait(run.id, timeout=120, every=0.5)
    assert (done.state, done.title) == ("done", "each minute")
    assert hub.server(member) is None
    paused = client.schedules.pause(schedule.id)
    assert paused.next_at is None and done.id in [each.run for each in paused.times]
    client.schedules.resume(schedule.id)

    for size, name in ((WIDE, "desk"), (PHONE, "phone")):
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport=size, color_scheme=scheme)
            page = context.new_page()
            add_cookies(page, hub, member)
            page.goto(f"{hub.url}/services/gpu/runs")
            expect(page.get_by_role("group", name="Schedules")).to_contain_text("Every minute")
            screenshot(page, f"runs-schedules-{name}-{scheme}")
            if (name, scheme) == ("desk", "light"):
                page.get_by_role("button", name="Pause each minute").click()
                expect(page.get_by_text("The schedule was paused")).to_be_visible()
                page.get_by_role("button", name="Resume each minute").click()
                expect(page.get_by_text("The schedule was resumed")).to_be_visible()
            context.close()
    client.schedules.delete(schedule.id)
    assert client.schedules.list() == ()


def test_jobs_and_definitions_by_the_api_of_jupyter_scheduler(
    hub: GPUHub, member: str, folder: Path
) -> None:
    hub.browser_of(member)
    hub.spawn_and_wait(member, {"environment": "base", "gpus": 0, "hours": 3})
    notebook = folder / f"work-{member}" / "night.ipynb"
    notebook.write_text(json.dumps(NOTEBOOK))
    notebook.chmod(0o666)

    def ask(method: str, path: str, **body: Any) -> Any:
        answer = jupyter(hub, member, method, path, **body)
        assert answer.ok, answer.text
        return answer.json() if answer.content else None

    environments = ask("GET", "runtime_environments")
    assert [each["name"] for each in environments] == ["base", "other"]
    assert environments[0]["compute_types"][-1] == "2 GPUs"
    assert environments[1]["default_compute_type"] == "0 GPUs"
    features = ask("GET", "config")["supported_features"]
    assert features["parameters"] and not features["tags"]

    job = {"input_uri": "night.ipynb", "runtime_environment_name": "base", "name": "one"}
    for wrong, words in (
        ({"tags": ["a"]}, "has no tags"),
        ({"output_formats": ["html"]}, "leave out html"),
        ({"input_uri": "none.ipynb"}, "does not exist"),
        ({"runtime_environment_name": "none"}, "none"),
        ({"compute_type": "9 GPUs"}, "2 or fewer"),
    ):
        answer = jupyter(hub, member, "POST", "jobs", **{**job, **wrong})
        assert answer.status_code == 500 and words in answer.json()["message"], answer.text
    assert ask("GET", "jobs")["jobs"] == []

    sent = {**job, "parameters": {"seed": "7"}, "compute_type": "0 GPUs", "idempotency_token": "k"}
    first = ask("POST", "jobs", **sent)["job_id"]
    assert ask("POST", "jobs", **sent)["job_id"] == first
    client = client_of(hub, member)
    done = client.runs.wait(first, timeout=120, every=0.5)
    assert done.state == "done" and done.parameters == {"seed": 7} and done.options["gpus"] == 0
    work = folder / f"work-{member}"
    assert '"seed 7 0\\n"' in (work / done.folder / "output.ipynb").read_text()
    told = ask("GET", f"jobs/{first}")
    assert (told["status"], told["parameters"]) == ("COMPLETED", {"seed": "7"})
    assert (told["runtime_environment_name"], told["compute_type"]) == ("base", "0 GPUs")

    definition = {**job, "name": "nightly", "schedule": "30 2 * * *", "timezone": "Europe/Vienna"}
    answer = jupyter(hub, member, "POST", "job_definitions", **{**definition, "schedule": "soon"})
    assert "not a cron expression" in answer.json()["message"]
    made = ask("POST", "job_definitions", **definition)["job_definition_id"]
    [listed] = ask("GET", "job_definitions")["job_definitions"]
    assert (listed["schedule"], listed["timezone"], listed["active"]) == (
        *("30 2 * * *", "Europe/Vienna"),
        True,
    )
    changes = {"active": False, "schedule": "0 3 * * *", "input_uri": "night.ipynb"}
    ask("PATCH", f"job_definitions/{made}", **changes)
    told = ask("GET", f"job_definitions/{made}")
    assert (told["schedule"], told["active"]) == ("0 3 * * *", False)
    now = ask("POST", f"job_definitions/{made}/jobs", parameters={})["job_id"]
    assert ask("GET", f"jobs?job_definition_id={made}")["jobs"][0]["job_id"] == now
    jupyter(hub, member, "PATCH", f"jobs/{now}", status="STOPPED").raise_for_status()
    ended = client.runs.wait(now, timeout=120, every=0.5)
    assert ended.state in ("stopped", "done")
    ask("DELETE", f"jobs/{now}")
    assert [each["job_id"] for each in ask("GET", "jobs")["jobs"]] == [first]
    assert ask("GET", "jobs/count?status=completed")["count"] == 1
    ask("DELETE", f"job_definitions/{made}")
    assert ask("GET", "job_definitions")["job_definitions"] == []

    # A session reaches the schedules of its own member alone.
    hub.browser_of("member7")
    theirs = client_of(hub, "member7").schedules.create("0 0 1 1 *", ["true"])
    assert jupyter(hub, member, "GET", f"job_definitions/{theirs.id}").status_code == 500
    hub.stop_server(member)
