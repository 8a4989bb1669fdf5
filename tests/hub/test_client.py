"""The Python client, in a program of its own and in a session, and the page that shows it. Real:
hub, proxy, accounting service, a Docker Engine, containers of our base image."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.client import Client, RequestRefused
from tests.support import doc_blocks, steps
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.images import BASE
from tests.support.processes import free_port

CATALOG = f"""
environments:
  - {{slug: base, image: {BASE}, default: true, devices: {{default: 1, max: 2}}, hours: {{max: 8}}}}
"""

CONFIG = """
c.GPUDockerSpawner.workspace = "{folder}/work-{{raw_username}}"
c.GPURates.by_model = {{"*": 60}}
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[GPUHub]:
    config = CONFIG.format(port=free_port(), folder=folder)
    with GPUHub(folder / "hub", engine, config, catalog=CATALOG) as hub:
        yield hub
    engine.clean()


def test_blocks_of_the_page_work(
    hub: GPUHub, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.browser_of("ada")
    files = folder / "work-ada"
    files.mkdir(exist_ok=True)
    notebook = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    (files / "analysis.ipynb").write_text(json.dumps(notebook))
    words = {
        "https://hub.example/services/gpu/api": f"{hub.url}/services/gpu/api",
        "your-token": hub.user_token("ada"),
    }
    blocks = [x.text for x in doc_blocks.blocks_in(steps.PYTHON) if x.language == "python"]
    text = "\n".join(blocks)
    for word, typed in words.items():
        assert word in text
        text = text.replace(word, typed)
    names: dict[str, Any] = {}
    exec(compile(text, str(steps.PYTHON), "exec"), names)
    printed = capfd.readouterr().out
    assert "done 0 " in printed and names["run"].id in printed
    assert "\n400 limit " in printed, printed
    assert names["ended"].lease in {session.id for session in names["client"].sessions.list()}


def test_program_submits_once_stops_and_lists(hub: GPUHub, member: str) -> None:
    hub.browser_of(member)
    client = Client(f"{hub.url}/services/gpu/api", hub.user_token(member))
    command = ["python3", "-c", "import time; time.sleep(600)"]
    run = client.runs.submit(command, title="Long", options={"gpus": 1, "hours": 2}, key="k")
    assert (run.title, run.command, run.exit_status) == ("Long", tuple(command), None)
    assert client.runs.submit(command, key="k").id == run.id
    assert client.runs.submit(["true"], key="other").id != run.id
    assert [x.id for x in client.runs.list(page=1)][1:] == [run.id]
    with pytest.raises(TimeoutError):
        client.runs.wait(run.id, timeout=0.1, every=0.1)
    client.runs.stop(run.id)
    ended = client.runs.wait(run.id)
    assert (ended.state, ended.reason) == ("stopped", "Its member stopped it.")
    assert client.runs.get(run.id) == ended
    with pytest.raises(RequestRefused, match="Only a notebook") as refused:
        client.runs.submit(["true"], parameters={"x": 1})
    assert (refused.value.status, refused.value.reason) == (400, "invalid_request")


def test_quotes_say_what_runs_would_cost(hub: GPUHub, member: str) -> None:
    hub.browser_of(member)
    client = Client(f"{hub.url}/services/gpu/api", hub.user_token(member))
    options = {"gpus": 2, "hours": 2}
    found = client.runs.quote(options=options)
    assert (found.environment, found.gpus, found.hours) == ("base", 2, 2)
    assert (found.price, found.total) == ("120.00 credits an hour", "240.00 credits")
    assert not found.preemptible
    cheap = client.runs.quote(options=options, preemptible=True)
    assert (cheap.price, cheap.total) == ("60.00 credits an hour", "120.00 credits")
    assert cheap.preemptible and cheap.preemptible_share == 0.5 and cheap.place is None
    sets = [{"n": 1}, {"n": 2}, {"n": 3}]
    sweep = client.sweeps.quote(["echo", "{n}"], sets=sets, options=options, at_most=1)
    assert (sweep.runs, sweep.seconds, sweep.rate_per_hour, sweep.most) == (3, 7200, 120, 720)
    half = client.sweeps.quote(["echo", "{n}"], sets=sets, options=options, preemptible=True)
    assert (half.rate_per_hour, half.most) == (60, 360)
    with pytest.raises(RequestRefused, match="Ask for 2 or fewer"):
        client.runs.quote(options={"gpus": 3})
    with pytest.raises(RequestRefused, match="Ask for 2 or fewer"):
        client.sweeps.quote(["echo", "{n}"], sets=sets, options={"gpus": 3})
    assert list(client.runs.list()) == []


def test_sweep_is_stopped_and_submitted_again(hub: GPUHub, member: str) -> None:
    hub.browser_of(member)
    client = Client(f"{hub.url}/services/gpu/api", hub.user_token(member))
    command = ["python3", "-c", "import time; {n} or time.sleep(600); exit(1)"]
    sweep = client.sweeps.submit(command, sets=[{"n": 1}, {"n": 0}], at_most=1, key="k")
    assert client.sweeps.submit(["true"], sets=[{}], key="k").id == sweep.id
    assert client.runs.wait(sweep.runs[0].id).exit_status == 1
    client.sweeps.stop(sweep.id)
    client.runs.wait(sweep.runs[1].id)
    assert client.sweeps.get(sweep.id).states == {"failed": 1, "stopped": 1}
    again = client.sweeps.again(sweep.id)
    assert [run.command for run in again.runs] == [sweep.runs[0].command]
    client.runs.wait(again.runs[0].id)


def test_schedule_is_made_once_changed_run_now_and_deleted(hub: GPUHub, member: str) -> None:
    hub.browser_of(member)
    client = Client(f"{hub.url}/services/gpu/api", hub.user_token(member))
    made = client.schedules.create(
        "30 7 * * 1-5", ["true"], zone="Europe/Vienna", options={"gpus": 0}, key="k"
    )
    assert (made.title, made.paused, made.refusal, made.times) == ("true", False, "", ())
    assert made.next_at is not None and made.options == {"gpus": 0}
    assert client.schedules.create("0 0 * * *", ["false"], key="k") == made
    for cron, options, words in (
        ("soon", {}, "is not a cron expression"),
        ("0 0 * * *", {"gpus": 99}, "99"),
        ("0 0 * * *", {"environment": "none"}, "none"),
    ):
        with pytest.raises(RequestRefused, match=words):
            client.schedules.create(cron, ["true"], options=options)
    changed = client.schedules.change(made.id, title="nightly", cron="0 3 * * *")
    assert (changed.title, changed.cron) == ("nightly", "0 3 * * *")
    assert changed.next_at != made.next_at
    assert client.schedules.pause(made.id).next_at is None
    run = client.schedules.run_now(made.id, key="now")
    assert client.schedules.run_now(made.id, key="now").id == run.id
    assert client.runs.wait(run.id).title == "nightly"
    [listed] = client.schedules.list()
    assert [each.run for each in listed.times] == [run.id] and listed.paused
    assert client.schedules.resume(made.id).next_at is not None
    other = Client(f"{hub.url}/services/gpu/api", hub.user_token("admin"))
    assert made.id in [each.id for each in other.schedules.list(everybody=True)]
    with pytest.raises(RequestRefused, match="There is no schedule"):
        other.schedules.run_now(made.id)
    client.schedules.delete(made.id)
    with pytest.raises(RequestRefused) as refused:
        client.schedules.get(made.id)
    assert (refused.value.status, refused.value.reason) == (404, "unknown_schedule")


def test_session_uses_its_own_token_for_runs_and_itself(
    hub: GPUHub, member: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.browser_of(member)
    hub.spawn_and_wait(member, {"environment": "base", "gpus": 1})
    ref = hub.container_of(member)
    for name in ("JUPYTERHUB_API_URL", "JUPYTERHUB_API_TOKEN"):
        code, value = hub.engine.execute(ref, ("printenv", name))
        assert code == 0
        monkeypatch.setenv(name, value.strip())
    client = Client()
    (environment,) = client.catalog.environments()
    assert (environment.environment, environment.max_gpus) == ("base", 2)
    run = client.runs.submit(["true"], options={"environment": environment.environment})
    assert client.runs.wait(run.id).exit_status == 0
    assert [x.id for x in client.runs.list()] == [run.id]
    with pytest.raises(RequestRefused) as refused:
        client.me()
    assert refused.value.status == 404
    (lease,) = [x for x in hub.leases(member) if not x.server.run_id]
    assert client.sessions.end(lease.id).id == lease.id
