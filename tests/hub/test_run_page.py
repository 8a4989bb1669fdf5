"""A run's log, files and page. Real: hub, proxy, accounting service, a Docker Engine, containers of
our base image, papermill, nbconvert, Chromium."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser, Page

from gpuspawner.runs.files import RECORD_SECONDS
from tests.hub.test_runs import CATALOG, CONFIG, ended, in_state, run_of, submit, workspace
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.hub import ADMIN
from tests.support.pages import WIDE, add_cookies, look_over_page
from tests.support.processes import free_port, wait_for

QUOTA = """
c.GPUDockerSpawner.workspace_quota = lambda spawner: (5 << 20) * ("full" in spawner.user.name)
service_constants["gpuspawner.runs.files.LOCK_SECONDS"] = 30  # an engine that hangs is seen to
"""


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[GPUHub]:
    config = CONFIG.format(port=free_port(), folder=folder) + QUOTA
    catalog = CATALOG.format(registry=free_port())
    with GPUHub(folder / "hub", engine, config, catalog=catalog) as hub:
        yield hub
    engine.clean()


def command(program: str) -> list[str]:
    return ["python3", "-u", "-c", program]


def log_of(hub: GPUHub, user: str, run_id: str, query: str = "", **kwargs: Any) -> Any:
    return hub.call(user, "GET", f"runs/{run_id}/log{query}", **kwargs)


def page_of(hub: GPUHub, browser: Browser, user: str, run_id: str) -> Page:
    page = browser.new_context(viewport=WIDE).new_page()
    add_cookies(page, hub, user)
    page.goto(f"{hub.url}/services/gpu/runs/{run_id}")
    return page


WAITS = """
import os, time
print('first')
while not os.path.exists('go'): time.sleep(0.1)
print('last')
"""


def test_log_is_read_in_parts_and_followed_to_the_end(
    hub: GPUHub, member: str, folder: Path
) -> None:
    run_id = submit(hub, member, command=command(WAITS))["id"]
    wait_for(lambda: log_of(hub, member, run_id).text == "first\n", "its first line", timeout=90)
    part = log_of(hub, member, run_id, "?offset=2")
    assert (part.text, part.headers["X-Next-Offset"]) == ("rst\n", "6")
    assert part.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert log_of(hub, member, run_id, "?offset=-3").text == "st\n"
    assert log_of(hub, member, run_id, "?offset=6").headers["X-Next-Offset"] == "6"
    hub.browser_of("member7")
    for path in ("/log", "/files", "/files/run.log"):
        assert hub.call("member7", "GET", f"runs/{run_id}{path}").status_code == 404
    for bad in ("x", "", "1.5", "9" * 30):
        refused = log_of(hub, member, run_id, f"?offset={bad}")
        assert (refused.status_code, refused.json()["error"]) == (400, "invalid_request")

    token = {"Authorization": f"token {hub.user_token(member)}"}
    api = f"{hub.url}/hub/api/gpuspawner/runs/{run_id}/log"
    followed = [
        log_of(hub, member, run_id, "?follow=1", stream=True),
        requests.get(f"{api}?follow=1", headers=token, stream=True, timeout=120),
    ]
    lines = [answer.iter_lines() for answer in followed]
    assert [next(each) for each in lines] == [b"first"] * 2
    (workspace(folder, member) / "go").touch()
    assert [b"".join(each) for each in lines] == [b"last"] * 2
    ended(hub, member, run_id)
    whole = requests.get(api, headers=token, timeout=60)
    assert whole.text == log_of(hub, member, run_id).text == "first\nlast\n"
    assert "X-Next-Offset" not in whole.headers, "nothing more will come"


def test_follower_that_went_away_is_not_counted(hub: GPUHub, member: str, folder: Path) -> None:
    run_id = submit(hub, member, command=command(WAITS))["id"]
    wait_for(lambda: log_of(hub, member, run_id).text == "first\n", "its first line", timeout=90)
    answers = [log_of(hub, member, run_id, "?follow=1", stream=True) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4
    fifth = log_of(hub, member, run_id, "?follow=1", stream=True)
    assert (fifth.status_code, fifth.json()["error"]) == (429, "limit")
    for answer in answers:
        answer.close()

    def is_free() -> bool:
        again = log_of(hub, member, run_id, "?follow=1", stream=True)
        again.close()
        return bool(again.status_code == 200)

    wait_for(is_free, "the end of the streams")
    (workspace(folder, member) / "go").touch()
    ended(hub, member, run_id)


def test_artifacts_are_listed_and_downloaded(hub: GPUHub, member: str, folder: Path) -> None:
    program = (
        "import os; os.chdir(os.environ['GPUSPAWNER_RUN_FOLDER']); os.mkdir('out')\n"
        "open('out/a model é.pt', 'wb').write(bytes(range(256)) * 20_000)\n"
        "os.symlink('/etc/passwd', 'link'); open('.hidden', 'w')"
    )
    run = ended(hub, member, submit(hub, member, command=command(program))["id"])
    assert run["state"] == "done", run
    listed = hub.call(member, "GET", f"runs/{run['id']}/files").json()["files"]
    assert listed == [
        {"path": "run.json", "size": listed[0]["size"]},
        {"path": "run.log", "size": 0},
        {"path": "out/a model é.pt", "size": 256 * 20_000},
    ]
    answer = hub.call(member, "GET", f"runs/{run['id']}/files/out/a%20model%20%C3%A9.pt")
    assert answer.content == bytes(range(256)) * 20_000
    told = answer.headers["Content-Disposition"]
    assert told == "attachment; filename*=UTF-8''a%20model%20%C3%A9.pt"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in answer.headers["Content-Security-Policy"]
    for path in ("link", "out", "missing", "..%2F..%2Fother", "%00"):
        refused = hub.call(member, "GET", f"runs/{run['id']}/files/{path}")
        assert refused.status_code == 404, path
        assert refused.json()["message"].endswith((".",)), refused.text
    hub.browser_of(ADMIN)
    assert hub.call(ADMIN, "GET", f"runs/{run['id']}/files").json()["files"] == listed
    containers = hub.engine.client.containers(all=True, filters={"label": "gpuspawner.files"})
    source = str(workspace(folder, member))
    mounts = [some for some in containers if some["Mounts"][0]["Source"] == source]
    assert len(mounts) <= 1, "the download's own is gone"


def notebook(*cells: str) -> str:
    made: list[dict[str, Any]] = [
        {
            "cell_type": "code",
            "source": source,
            "metadata": {"tags": ["parameters"]} if source.startswith("seed") else {},
            "outputs": [],
            "execution_count": None,
        }
        for source in cells
    ]
    kernel = {"name": "python3", "display_name": "Python", "language": "python"}
    return json.dumps(
        {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    )


EVIL = """
from IPython.display import HTML, display
display(HTML('''
<b id="shown">shown</b>
<script>
document.getElementById("shown").textContent = "script ran";
parent.document.title = "taken"; fetch("/hub/api/user"); top.location = "/hub/logout";
</script>
<img src="/hub/logout" onerror="document.title='taken'"><img src=x onerror="parent.evil = 1">
<a id="away" href="/hub/logout" target="_top">click</a>
<form action="/services/gpu/payer" method="post"><input name="account" value="x">
<button id="send">send</button></form>
<iframe src="/hub/home"></iframe><meta http-equiv="refresh" content="0;url=/hub/logout">
<svg onload="parent.evil = 2"></svg><link rel="stylesheet" href="/hub/static/css/style.min.css">
'''))
"""


def test_notebook_is_followed_and_its_output_is_kept_apart(
    hub: GPUHub, member: str, folder: Path, browser: Browser
) -> None:
    hub.browser_of(member)
    files = workspace(folder, member)
    # The first run makes the workspace, as its user's.
    ended(hub, member, submit(hub, member, command=["true"])["id"])
    waits = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.1)"
    (files / "study.ipynb").write_text(notebook("seed = 1", "print('seed', seed)", EVIL, waits))
    run = submit(hub, member, notebook="study.ipynb", parameters={"seed": 7}, title="Study")

    def progress() -> tuple[int, int]:
        told = run_of(hub, member, run["id"])
        return told["cell"], told["cells"]

    wait_for(lambda: progress() == (5, 5), "its last cell, with that of the parameters", timeout=90)
    assert hub.call(member, "GET", "runs").json()["runs"][0]["cell"] is None
    page = page_of(hub, browser, member, run["id"])
    assert page.locator("[data-progress]").inner_text().strip() == "cell 5 of 5"
    assert "Executing Cell 5" in page.locator("[data-log]").inner_text()
    frame = page.frame_locator("iframe.output")
    assert "seed 7" in frame.locator("body").inner_text()
    assert frame.locator("#shown").inner_text() == "shown"

    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    frame.locator("#away").click()
    frame.locator("#send").click()
    page.wait_for_timeout(1500)
    assert [url for url in asked if "/log" not in url and f"api/runs/{run['id']}" not in url] == []
    assert page.title() != "taken" and page.evaluate("window.evil") is None
    inner = page.frames[1]
    assert inner.evaluate("[self.origin, location.pathname]")[0] == "null"

    alone = page.context.new_page()
    answer = alone.goto(f"{hub.url}/services/gpu/runs/{run['id']}/output")
    assert answer is not None and answer.headers["content-security-policy"].startswith("sandbox;")
    assert alone.evaluate("self.origin") == "null"
    assert alone.locator("#shown").inner_text() == "shown"
    assert alone.url.endswith("/output"), "nothing led it away"
    alone.close()

    found = look_over_page(page, "runs/notebook-runs")
    page.set_viewport_size(WIDE)
    list_page = page.context.new_page()
    list_page.goto(f"{hub.url}/services/gpu/runs")
    assert "cell 5 of 5" in list_page.locator("tbody").inner_text()
    found += look_over_page(list_page, "runs/list")
    list_page.close()
    (files / "go").touch()
    page.wait_for_selector("section[data-state=done]")
    found += look_over_page(page, "runs/notebook-done")
    with page.expect_download() as told:
        page.get_by_role("link", name="output.ipynb").click()
    assert "seed 7" in Path(told.value.path()).read_text()
    assert found == []


def test_run_is_run_again_with_other_parameters(
    hub: GPUHub, member: str, folder: Path, browser: Browser
) -> None:
    hub.browser_of(member)
    files = workspace(folder, member)
    ended(hub, member, submit(hub, member, command=["true"])["id"])
    (files / "study.ipynb").write_text(notebook("seed = 1", "print('seed', seed)"))
    sent = {"notebook": "study.ipynb", "parameters": {"seed": [1, "x"]}, "title": "Study"}
    first = ended(hub, member, submit(hub, member, options={"gpus": 0}, **sent)["id"])
    assert first["state"] == "done", first
    (files / "study.ipynb").write_text("edited meanwhile")

    page = page_of(hub, browser, member, first["id"])
    again = page.locator("form[action$='/again']")
    assert again.get_by_label("seed").input_value() == '[1, "x"]'
    for field, bad, sentence in (
        ("GPUs", "-1", "write a whole number"),
        ("GPUs", "64", "GPUs"),
        ("Hours", "soon", "write hours, such as 1.5"),
        ("Another parameter", "a b", "is not a valid parameter name"),
        ("Another parameter", "seed", "is given twice"),
    ):
        page.goto(f"{hub.url}/services/gpu/runs/{first['id']}")
        again.get_by_label(field).fill(bad)
        again.get_by_role("button").click()
        if bad == "64":  # only the hub knows that
            page.get_by_role("button", name="Submit run").click()
        assert sentence in page.locator("[role=alert]").inner_text()
        assert again.get_by_label(field).input_value() == bad, "as it was typed"
    page.goto(f"{hub.url}/services/gpu/runs/{first['id']}")
    again.get_by_label("seed").fill("5")
    again.get_by_label("Another parameter").fill("extra")
    again.get_by_label("Its value").fill("text")
    again.get_by_role("button").click()
    assert page.locator("h1").inner_text() == "Run Study again?"
    assert look_over_page(page, "runs/again") == []
    page.get_by_role("button", name="Submit run").click()
    page.wait_for_url("**/runs/study-*")
    second = ended(hub, member, page.url.rpartition("/")[2])
    assert second["state"] == "done", second
    assert second["parameters"] == {"seed": 5, "extra": "text"}
    assert second["folder"] != first["folder"] and second["id"] != first["id"]
    output = (files / second["folder"] / "output.ipynb").read_text()
    assert '"seed 5\\n"' in output, "of the snapshot, not of what it is now"
    kept = (files / first["folder"] / "output.ipynb").read_text()
    assert "\"seed [1, 'x']\\n\"" in kept

    hub.browser_of(ADMIN)
    theirs = page_of(hub, browser, ADMIN, first["id"])
    assert theirs.locator("form[action$='/again']").count() == 0
    assert member in theirs.locator("dl").inner_text()


def test_command_is_run_again_with_other_arguments(
    hub: GPUHub, member: str, browser: Browser
) -> None:
    first = ended(hub, member, submit(hub, member, command=["echo", "it's", "a b"])["id"])
    page = page_of(hub, browser, member, first["id"])
    field = page.get_by_label("Command")
    assert field.input_value() == """echo 'it'"'"'s' 'a b'"""
    field.fill("echo 'a b")
    page.get_by_role("button", name="Run again").click()
    assert "a quotation mark is not closed" in page.locator("[role=alert]").inner_text()
    field.fill("echo 'c d' <b>")
    page.get_by_role("button", name="Run again").click()
    page.get_by_role("button", name="Submit run").click()
    page.wait_for_url("**/runs/echo-*")
    page.wait_for_selector("section[data-state=done]")
    assert page.locator("[data-log]").inner_text() == "c d <b>\n"
    second = run_of(hub, member, page.url.rpartition("/")[2])
    assert second["command"] == ["echo", "c d", "<b>"]


def test_live_log_grows_on_the_page(
    hub: GPUHub, member: str, folder: Path, browser: Browser
) -> None:
    """And nothing that is printed is taken for HTML."""
    program = WAITS.replace("'last'", "'\\x1b[31m<b>10 %\\r<b>last\\x1b[0m'")
    run_id = submit(hub, member, command=command(program + "\nwhile True: time.sleep(1)"))["id"]
    in_state(hub, member, run_id, "running")
    page = page_of(hub, browser, member, run_id)
    log = page.locator("[data-log]")
    wait_for(lambda: log.inner_text() == "first\n", "its first line")
    (workspace(folder, member) / "go").touch()
    wait_for(lambda: log.inner_text() == "first\n<b>last\n", "its last line")
    page.reload()
    assert log.inner_text() == "first\n<b>last\n"
    assert look_over_page(page, "runs/command-runs") == []
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Stop run").click()
    run = ended(hub, member, run_id)
    assert run["state"] == "stopped"


def test_each_trouble_is_a_sentence(
    hub: GPUHub, member: str, folder: Path, browser: Browser
) -> None:
    """Not started, no output, a workspace that is gone, an engine that is away."""
    holders = [submit(hub, member, command=command("import time; time.sleep(600)")) for _ in (1, 2)]
    for run in holders:
        in_state(hub, member, run["id"], "running")
    waits = submit(hub, member, command=["true"], title="Waits")["id"]
    in_state(hub, member, waits, "waiting")
    page = page_of(hub, browser, member, waits)
    text = page.locator("main").inner_text()
    assert "Number 1 of 1 in the queue" in text and "Expected start" in text
    assert "It has not started yet: there is no output." in text
    assert look_over_page(page, "runs/waits") == []
    assert log_of(hub, member, waits).text == ""
    refused = hub.call(member, "GET", f"runs/{waits}/files")
    assert (refused.status_code, refused.json()["error"]) == (404, "no_files")
    for run in holders:
        hub.call(member, "DELETE", f"runs/{run['id']}").raise_for_status()
    last = ended(hub, member, waits)
    page.goto(f"{hub.url}/services/gpu/runs/{waits}")
    assert "It printed nothing." in page.locator("main").inner_text()

    hub.engine.kill9()
    try:
        page.reload()
        assert "The container engine is not responding." in page.locator("main").inner_text()
        assert log_of(hub, member, waits).status_code == 503
    finally:
        hub.engine.start()
        hub.engine.set_devices(hub.devices)
    gone = workspace(folder, member)
    wait_for(lambda: hub.open_leases(member) == [], "the end of all")
    shutil.rmtree(gone)
    time.sleep(2.5)  # what it recorded is remembered for two seconds
    hub.engine.remove_containers()
    page.reload()
    assert "its workspace is gone." in page.locator("main").inner_text()
    assert page.get_by_role("link", name="receipt").count() == 1, "all else is there"
    assert not gone.exists() and last["state"] == "done"
    assert log_of(hub, member, waits).status_code == 404


def test_engine_that_hangs_delays_nothing_else(hub: GPUHub, member: str, folder: Path) -> None:
    hub.browser_of(member)
    ended(hub, member, submit(hub, member, command=["true"])["id"])
    waits = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.1)"
    (workspace(folder, member) / "study.ipynb").write_text(notebook("seed = 1", waits))
    run_id = submit(hub, member, notebook="study.ipynb")["id"]
    wait_for(lambda: run_of(hub, member, run_id)["cell"] == 2, "its last cell", timeout=90)
    time.sleep(RECORD_SECONDS)
    with ThreadPoolExecutor(4) as threads, hub.engine.hung():
        asked = [threads.submit(log_of, hub, member, run_id) for _ in range(4)]
        told = run_of(hub, member, run_id)
        assert (told["state"], told["cell"]) == ("running", None)
        assert hub.call(member, "GET", "me").ok
        assert not any(each.done() for each in asked), "who asks the engine still waits for it"
        assert [each.result().status_code for each in asked] == [503] * 4
    assert run_of(hub, member, run_id)["state"] == "running"
    (workspace(folder, member) / "go").touch()
    assert ended(hub, member, run_id)["state"] == "done"


def test_full_workspace_refuses_a_run_in_words_until_there_is_room(
    hub: GPUHub, member: str, folder: Path, browser: Browser
) -> None:
    files = workspace(folder, member)
    files.mkdir(exist_ok=True)
    (files / "large").write_bytes(bytes(6_000_000))
    run = ended(hub, member, submit(hub, member, command=["true"])["id"])
    sentence = "Your files use 5.7 MB of 5.0 MB. To free space, start without a GPU"
    assert run["state"] == "failed" and run["reason"].startswith(sentence)
    assert hub.leases(member) == [] and float(run["charged"]) == 0
    page = page_of(hub, browser, member, run["id"])
    assert sentence in page.locator("section[data-run]").inner_text()
    assert [path.name for path in files.iterdir()] == ["large"], "nothing is lost or added"
    assert (files / "large").read_bytes() == bytes(6_000_000)
    (files / "large").unlink()
    page.get_by_role("button", name="Run again").click()
    page.get_by_role("button", name="Submit run").click()
    page.wait_for_url(lambda url: "/runs/true-" in url and run["id"] not in url)
    assert ended(hub, member, page.url.rpartition("/")[2])["state"] == "done"


WRITES = """
import os, pathlib, time
open('checkpoint', 'wb').write(bytes(1 << 20))
print('saved', flush=True)
log = pathlib.Path(os.environ['GPUSPAWNER_RUN_FOLDER'], 'run.log')
while not log.stat().st_size:  # another process writes it
    time.sleep(0.01)
open('model', 'wb').write(bytes(20 << 20))
"""


def test_run_that_fills_its_workspace_fails_with_what_was_saved(
    hub: GPUHub, member: str, folder: Path, browser: Browser
) -> None:
    """A small file system stands for the quota: a write ends in the middle."""
    files = workspace(folder, member)
    files.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(files)]
    subprocess.run(mount, check=True)
    try:
        run = ended(hub, member, submit(hub, member, command=command(WRITES))["id"])
        assert (run["state"], run["exit_status"]) == ("failed", 1)
        last = "Its last line: OSError: [Errno 28] No space left on device"
        assert run["reason"].endswith(last)
        page = page_of(hub, browser, member, run["id"])
        assert last in page.locator("section[data-run]").inner_text()
        assert page.locator("[data-log]").inner_text().startswith("saved\n")
        assert (files / "checkpoint").read_bytes() == bytes(1 << 20)
        [lease] = hub.leases(member)
        assert lease.end_reason == "exit code 1" and hub.taken() == {}
    finally:
        subprocess.run(["umount", "--lazy", str(files)], check=True)
