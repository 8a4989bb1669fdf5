"""Runs: commands with a lease and without a server. Real: hub, proxy, accounting service, a Docker
Engine, containers of our base image."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.db.schema import OPEN_TICKET, tickets
from gpuspawner.notifications import repository as notifications_repository
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub, assert_in_words
from tests.support.images import BASE
from tests.support.lab import LAB
from tests.support.preloaded import PRELOADED, PYTHONPATH
from tests.support.processes import die_with_us, free_port, wait_for

CATALOG = f"""
environments:
  - slug: base
    display_name: Base
    image: {BASE}
    default: true
    devices: {{{{default: 1, max: 2}}}}
  - slug: gone
    display_name: Gone
    image: gpuspawner/gone:test
    devices: {{{{default: 1, max: 2}}}}
  - slug: slow
    display_name: Slow
    image: 127.0.0.1:{{registry}}/slow:1
    devices: {{{{default: 1, max: 2}}}}
"""

CONFIG = """
c.GPUDockerSpawner.workspace = "{folder}/work-{{raw_username}}"
c.GPURates.by_model = {{"*": 60}}
c.GPUCredits.grace_seconds = 30
def hook(spawner):
    if "failing-hook" in spawner.user.name:
        raise RuntimeError("the licence server is down")
    if "failed-start" in spawner.user.name:
        spawner.extra_host_config = {{"Runtime": "no-such-runtime"}}
c.Spawner.pre_spawn_hook = hook
service_constants["gpuspawner.service.app.FORMER_MEMBERS_SECONDS"] = 1
service_constants["gpuspawner.service.duties.MEMBER_GONE_SECONDS"] = 30
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""

SLEEP = ["python3", "-c", "import time; print('here', flush=True); time.sleep(600)"]


@pytest.fixture(scope="module")
def hub(
    hubs: None, engine: PrivateEngine, images: Any, silent_registry: int, folder: Path
) -> Iterator[GPUHub]:
    config = CONFIG.format(port=free_port(), folder=folder)
    catalog = CATALOG.format(registry=silent_registry)
    with GPUHub(folder / "hub", engine, config, catalog=catalog) as hub:
        yield hub
    engine.clean()


def submit(hub: GPUHub, user: str, **body: Any) -> dict[str, Any]:
    hub.browser_of(user)  # the first visit opens the account
    answer = hub.call(user, "POST", "runs", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def run_of(hub: GPUHub, user: str, run_id: str) -> dict[str, Any]:
    return dict(hub.call(user, "GET", f"runs/{run_id}").json())


def in_state(hub: GPUHub, user: str, run_id: str, *states: str) -> dict[str, Any]:
    def there() -> list[dict[str, Any]]:
        run = run_of(hub, user, run_id)
        return [run] if run.get("state") in states else []

    (run,) = wait_for(there, f"a run that is {' or '.join(states)}", timeout=90)
    return run


def ended(hub: GPUHub, user: str, run_id: str) -> dict[str, Any]:
    return in_state(hub, user, run_id, "done", "failed", "stopped")


def assert_all_given_back(hub: GPUHub) -> None:
    wait_for(lambda: hub.containers() == [], "the end of the containers")
    assert hub.taken() == {}


def workspace(folder: Path, user: str) -> Path:
    return folder / f"work-{user}"


def wait_ready(folder: Path, user: str, run: dict[str, Any]) -> Path:
    """Wait until the program of a run says that it is ready; its log."""
    log = workspace(folder, user) / run["folder"] / "run.log"
    wait_for(lambda: log.exists() and "ready" in log.read_text(), "the program", timeout=90)
    return log


def preempted(hub: GPUHub, user: str, run_id: str) -> dict[str, Any]:
    """The run, once it is written down that it has yielded its GPU and waits again: that may be
    later than the start of who got the GPU."""

    def there() -> list[dict[str, Any]]:
        run = run_of(hub, user, run_id)
        return [run] if run["preemptions"] else []

    (run,) = wait_for(there, "its preemption to be noted")
    return run


def test_command_runs_with_its_gpu_and_gives_it_back(
    hub: GPUHub, member: str, folder: Path
) -> None:
    program = "import os, json; print(json.dumps(dict(os.environ)))"
    run = submit(hub, member, command=["python3", "-c", program], title="Train it")
    assert run["id"].startswith("train-it-")
    run = ended(hub, member, run["id"])
    assert (run["state"], run["exit_status"], run["reason"]) == ("done", 0, "")
    (lease,) = hub.leases(member)
    assert lease.end_reason == "exit code 0" and lease.server.run_id == run["id"]
    assert_all_given_back(hub)

    files = workspace(folder, member) / run["folder"]
    environment = json.loads((files / "run.log").read_text())
    assert environment["NVIDIA_VISIBLE_DEVICES"] == lease.uuids[0]
    assert not [name for name in environment if name.startswith("JUPYTERHUB_")], "opens nothing"
    assert json.loads((files / "run.json").read_text())["exit_status"] == 0


def test_failed_program_is_told(hub: GPUHub, member: str) -> None:
    program = "import sys; print('\\x1b[31mno <data>\\x1b[0m\\n'); sys.exit(3)"
    run = submit(hub, member, command=["python3", "-c", program])
    run = ended(hub, member, run["id"])
    assert (run["state"], run["exit_status"]) == ("failed", 3)
    assert run["reason"].endswith("exit status 3. Its last line: [31mno <data>[0m")
    (notice,) = hub.call(member, "GET", "notices").json()["notices"]
    assert notice["title"] == "Your run python3 failed"
    assert "no <data>" in notice["body"] and run["folder"] in notice["body"]


def test_program_that_is_not_there_is_told(hub: GPUHub, member: str, folder: Path) -> None:
    run = ended(hub, member, submit(hub, member, command=["no-such-program"])["id"])
    assert (run["state"], run["exit_status"]) == ("failed", 127)
    log = (workspace(folder, member) / run["folder"] / "run.log").read_text()
    assert log == "no-such-program cannot start: No such file or directory\n"


def test_missing_image_is_told(hub: GPUHub, member: str) -> None:
    run = submit(hub, member, command=["true"], options={"environment": "gone"})
    run = ended(hub, member, run["id"])
    assert run["state"] == "failed"
    assert_in_words(run["reason"])
    assert "image" in run["reason"]
    (lease,) = hub.leases(member)
    assert lease.charged == 0
    assert_all_given_back(hub)


def test_failed_start_speaks_of_the_run(hub: GPUHub, member: str) -> None:
    run = ended(hub, member, submit(hub, member, command=["true"])["id"])
    assert run["state"] == "failed"
    assert run["reason"].startswith("The run did not start: ")
    assert run["reason"].endswith(". Nothing was charged.")
    assert_all_given_back(hub)


def test_failing_hook_of_the_admin_frees_the_gpu(hub: GPUHub, member: str) -> None:
    run = ended(hub, member, submit(hub, member, command=["true"])["id"])
    assert run["state"] == "failed" and "licence" not in run["reason"]
    assert "(tell your admin)" in run["reason"]
    (lease,) = hub.leases(member)
    assert lease.charged == 0 and hub.taken() == {}, "at once, not at the next comparison"


def test_running_run_is_stopped_by_its_member(hub: GPUHub, member: str, folder: Path) -> None:
    program = (
        "import time\ntry: print('ready', flush=True); time.sleep(600)\n"
        "except KeyboardInterrupt: open('saved', 'w').write('yes')"
    )
    run = submit(hub, member, command=["python3", "-c", program])
    wait_ready(folder, member, run)
    in_state(hub, member, run["id"], "running")
    hub.browser_of("member7")
    stranger = hub.call("member7", "DELETE", f"runs/{run['id']}")
    assert stranger.status_code == 404
    stopped = hub.call(member, "DELETE", f"runs/{run['id']}")
    assert stopped.status_code == 200, stopped.text
    run = ended(hub, member, run["id"])
    assert (run["state"], run["reason"]) == ("stopped", "Its member stopped it.")
    assert (workspace(folder, member) / "saved").read_text() == "yes", "it got SIGINT first"
    assert_all_given_back(hub)


@pytest.mark.parametrize("end", ["killed", "restarted"])
def test_waiting_run_outlives_the_hub_and_starts_in_its_turn(
    hub: GPUHub, member: str, end: str
) -> None:
    holders = [submit(hub, member, command=SLEEP)["id"] for _ in hub.devices]
    for run_id in holders:
        in_state(hub, member, run_id, "running")
    waits = submit(hub, member, command=["true"])["id"]
    in_state(hub, member, waits, "waiting")
    if end == "killed":
        hub.kill9()
        hub.start()
    else:
        hub.restart()
    assert run_of(hub, member, waits)["state"] == "waiting"
    assert {run_of(hub, member, run_id)["state"] for run_id in holders} == {"running"}
    hub.call(member, "DELETE", f"runs/{holders[0]}").raise_for_status()
    assert ended(hub, member, waits)["state"] == "done"
    for run_id in holders[1:]:
        hub.call(member, "DELETE", f"runs/{run_id}").raise_for_status()
    for run_id in holders:
        run = ended(hub, member, run_id)
        assert run["state"] == "stopped"
    assert_all_given_back(hub)
    leases = [lease.server.run_id for lease in hub.leases(member)]
    assert sorted(x for x in leases if x in (*holders, waits)) == sorted((*holders, waits))


def test_interrupted_run_begins_again_if_it_may(hub: GPUHub, member: str) -> None:
    program = "import os, time; os.environ['GPUSPAWNER_RESTARTS'] == '0' and time.sleep(600)"
    command = ["python3", "-c", program]
    runs = {may: submit(hub, member, command=command, requeue=may)["id"] for may in (True, False)}
    for run_id in runs.values():
        in_state(hub, member, run_id, "running")
    for container in hub.containers():
        hub.engine.client.stop(container["Id"], timeout=10)
    again, over = (ended(hub, member, runs[may]) for may in (True, False))
    assert (again["state"], again["restarts"], again["exit_status"]) == ("done", 1, 0)
    assert (over["state"], over["restarts"]) == ("failed", 0)
    assert over["reason"].startswith("It was interrupted: ")
    assert len(hub.leases(member)) == 3
    assert_all_given_back(hub)


def test_preemptible_run_yields_to_a_session_and_goes_on(
    hub: GPUHub, member: str, folder: Path
) -> None:
    program = (
        "import os, signal, sys, time\n"
        "if os.environ['GPUSPAWNER_RESTARTS'] == '1': print(open('saved').read()); sys.exit(0)\n"
        "def save(*_): open('saved', 'w').write('epoch 3'); sys.exit(75)\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    command = ["python3", "-c", program]
    holders = [submit(hub, member, command=SLEEP)["id"] for _ in hub.devices[1:]]
    for run_id in holders:
        in_state(hub, member, run_id, "running")
    run = submit(hub, member, command=command, preemptible=True)
    in_state(hub, member, run["id"], "running")
    log = wait_ready(folder, member, run)

    hub.spawn_and_wait("member7", {"environment": "base", "gpus": 1})
    waiting = preempted(hub, member, run["id"])
    assert (waiting["state"], waiting["preemptions"]) == ("waiting", 1)
    hub.stop_server("member7")
    run = ended(hub, member, run["id"])
    assert (run["state"], run["restarts"], run["exit_status"]) == ("done", 0, 0)
    assert log.read_text() == "ready\nepoch 3\n"
    leases = [lease for lease in hub.leases(member) if lease.server.run_id == run["id"]]
    assert [(lease.preemptible, lease.rate) for lease in leases] == [(True, 30 * 10**6)] * 2
    for run_id in holders:
        hub.call(member, "DELETE", f"runs/{run_id}").raise_for_status()
        ended(hub, member, run_id)
    assert_all_given_back(hub)


def test_preemptible_run_yields_while_its_image_is_pulled(hub: GPUHub, member: str) -> None:
    """It has no program that could save anything, and a pull may take hours."""
    holders = [submit(hub, member, command=SLEEP)["id"] for _ in hub.devices[1:]]
    for run_id in holders:
        in_state(hub, member, run_id, "running")
    options = {"environment": "slow"}
    run_id = submit(hub, member, command=["true"], preemptible=True, options=options)["id"]
    in_state(hub, member, run_id, "starting")
    hub.spawn_and_wait("member7", {"environment": "base", "gpus": 1})
    run = preempted(hub, member, run_id)
    assert (run["state"], run["preemptions"], run["restarts"]) == ("waiting", 1, 0)
    hub.stop_server("member7")
    in_state(hub, member, run_id, "starting")
    hub.call(member, "DELETE", f"runs/{run_id}").raise_for_status()
    run = ended(hub, member, run_id)
    assert (run["state"], run["reason"]) == ("stopped", "Its member stopped it.")
    for run_id in holders:
        hub.call(member, "DELETE", f"runs/{run_id}").raise_for_status()
        ended(hub, member, run_id)
    assert_all_given_back(hub)
    assert not [lease for lease in hub.leases(member) if lease.preemptible and lease.charged]


def test_program_is_warned_before_its_credits_end(hub: GPUHub, member: str, folder: Path) -> None:
    program = (
        "import signal, sys, time\n"
        "def save(*_): print('saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    run = submit(hub, member, command=["python3", "-c", program])
    log = wait_ready(folder, member, run)
    left = hub.balance(member) / 10**6 - 1  # a minute of credits, and the grace period
    body = {"amount": f"-{left:.2f}", "reason": "the term is over"}
    hub.call("admin", "POST", f"accounts/member:{member}/grants", json=body).raise_for_status()
    run = ended(hub, member, run["id"])
    assert (run["state"], run["exit_status"]) == ("done", 0)
    assert log.read_text() == "ready\nsaved\n"
    assert_all_given_back(hub)


def test_run_whose_engine_died_begins_again(hub: GPUHub, member: str) -> None:
    program = "import os, time; os.environ['GPUSPAWNER_RESTARTS'] == '0' and time.sleep(600)"
    run = submit(hub, member, command=["python3", "-c", program], requeue=True)
    in_state(hub, member, run["id"], "running")
    hub.engine.kill9()
    time.sleep(3)
    assert run_of(hub, member, run["id"])["state"] == "running", "unknown is not gone"
    hub.engine.start()
    hub.engine.set_devices(hub.devices)
    run = ended(hub, member, run["id"])
    assert (run["state"], run["restarts"], run["exit_status"]) == ("done", 1, 0)
    assert_all_given_back(hub)


def go_on(files: Path) -> None:
    """Let a program go on that waits for a file in its member's workspace."""
    wait_for(files.is_dir, "the workspace")
    (files / "go").touch()


@pytest.mark.parametrize("moment", ["submitted", "starting", "running", "ending"])
def test_run_ends_once_though_hub_and_service_are_killed(
    hub: GPUHub, member: str, folder: Path, moment: str
) -> None:
    program = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.1)"
    run_id = submit(hub, member, command=["python3", "-c", program])["id"]
    if moment == "starting":
        wait_for(lambda: hub.engine.client.containers() != [], "the container", interval=0.01)
    elif moment != "submitted":
        in_state(hub, member, run_id, "running")
    if moment == "ending":
        go_on(workspace(folder, member))
        wait_for(lambda: hub.engine.client.containers() == [], "the end of the program")
    hub.kill9(services=True)
    hub.start()
    go_on(workspace(folder, member))
    run = ended(hub, member, run_id)
    assert (run["state"], run["exit_status"]) == ("done", 0)
    charged = [lease for lease in hub.leases(member) if lease.charged]
    assert len(charged) == 1, "charged once"
    assert_all_given_back(hub)


def test_runs_of_a_renamed_member_go_on(hub: GPUHub, member: str, folder: Path) -> None:
    """Those that wait keep their place until their records have the new name."""
    new = "ada-of-the-runs"
    holders = [submit(hub, member, command=SLEEP)["id"] for _ in hub.devices]
    for run_id in holders:
        in_state(hub, member, run_id, "running")
    waits = submit(hub, member, command=["true"])["id"]
    in_state(hub, member, waits, "waiting")
    wait_for(lambda: ticket_of(hub, waits), "its ticket")
    hub.api("PATCH", f"users/{member}", json={"name": new}).raise_for_status()
    given_up = f"Run {waits} of {member} gives up its start"
    wait_for(lambda: given_up in hub.log_text(), "the hub to see the new name")
    assert run_of(hub, "admin", waits)["state"] == "waiting"
    arguments = ["members", "rename", member, new, "--yes"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": PYTHONPATH, "HOME": str(hub.folder)}
    done = PRELOADED.run(arguments, hub.folder, environment, answer="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert run_of(hub, new, waits)["state"] == "waiting"
    hub.call(new, "DELETE", f"runs/{holders[0]}").raise_for_status()
    assert ended(hub, new, waits)["state"] == "done"
    assert (workspace(folder, new) / run_of(hub, new, waits)["folder"] / "run.log").exists()
    for run_id in holders[1:]:
        assert run_of(hub, new, run_id)["state"] == "running"
        hub.call(new, "DELETE", f"runs/{run_id}").raise_for_status()
    for run_id in holders:
        assert ended(hub, new, run_id)["reason"] == "Its member stopped it."
    assert_all_given_back(hub)
    assert len(hub.leases(new)) == len(holders) + 1


def ticket_of(hub: GPUHub, run_id: str) -> str:
    """The number of a run's open ticket; empty without one."""
    its = OPEN_TICKET & (tickets.c.server_name == f"run:{run_id}")
    with hub._database.connect() as connection:
        return str(connection.execute(sa.select(tickets.c.id).where(its)).scalar() or "")


def test_runs_of_a_removed_member_end(hub: GPUHub, member: str) -> None:
    holders = [submit(hub, member, command=SLEEP)["id"] for _ in hub.devices]
    for run_id in holders:
        in_state(hub, member, run_id, "running")
    waits = submit(hub, member, command=SLEEP)["id"]
    assert hub.api("DELETE", f"users/{member}").status_code == 204
    for run_id in (waits, *holders):
        run = ended(hub, "admin", run_id)
        assert run["reason"] in ("The member was removed at the Hub.", "The member was removed.")
    assert_all_given_back(hub)
    leases = hub.leases(member)
    assert sorted(lease.server.run_id for lease in leases) == sorted(holders)
    assert all(lease.charged for lease in leases)
    title = "Your run python3 was stopped"
    with hub._database.connect() as connection:
        told = [notice.title for notice in notifications_repository.of_user(connection, member)]
    assert told.count(title) == len(holders), told


def test_bad_submissions_are_refused_in_words(hub: GPUHub, member: str) -> None:
    hub.browser_of(member)
    for body, words in (
        ({}, "Send a command or a notebook"),
        ({"command": ["a"], "notebook": "b.ipynb"}, "Send a command or a notebook"),
        ({"command": ["a"], "parameters": {"x": 1}}, "Only a notebook has parameters"),
        ({"notebook": "../other/b.ipynb"}, "is a path in your workspace"),
        ({"command": "a"}, "is a list of texts"),
        ({"command": ["a"], "options": {"gpus": 64}}, "GPUs"),
        ({"command": ["a"], "options": {"environment": "no-such"}}, "no-such"),
        ({"command": ["a"], "options": {"image": "evil"}}, "image"),
        ({"command": ["a"], "devices": ["GPU-1"]}, "devices"),
    ):
        answer = hub.call(member, "POST", "runs", json=body)
        assert answer.status_code == 400 and words in answer.json()["message"], answer.text
    assert hub.call(member, "GET", "runs").json()["runs"] == []


def test_same_key_submits_once(hub: GPUHub, member: str) -> None:
    first, again = (submit(hub, member, command=["true"], key="night") for _ in range(2))
    assert first["id"] == again["id"]
    ended(hub, member, first["id"])
    assert len(hub.leases(member)) == 1


NOTEBOOK = {
    "cells": [
        {
            "cell_type": "code",
            "source": source,
            "metadata": {"tags": ["parameters"]} if source == "seed = 1" else {},
            "outputs": [],
            "execution_count": None,
        }
        for source in ("seed = 1", "print('seed', seed)", "1 / 0")
    ],
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python", "language": "python"}},
    "nbformat": 4,
    "nbformat_minor": 4,
}


def test_notebook_runs_from_a_copy_with_its_parameters(
    hub: GPUHub, member: str, folder: Path
) -> None:
    hub.browser_of(member)
    hub.spawn_and_wait(member, {"environment": "base", "gpus": 0})
    ref, files = hub.container_of(member), workspace(folder, member)
    (files / "study.ipynb").write_text(json.dumps(NOTEBOOK))
    code, said = hub.engine.execute(ref, ("gpuspawner-run", "study.ipynb", "--gpus", "64"))
    assert code == 1 and "Ask for 2 or fewer" in said
    assert list((files / "runs").iterdir()) == [], "a refused run leaves no copy"
    words = ("gpuspawner-run", "study.ipynb", "--gpus", "1", "-p", "seed", "7")
    code, said = hub.engine.execute(ref, words)
    assert code == 0, said
    (files / "study.ipynb").write_text("edited meanwhile")
    hub.stop_server(member)
    run = ended(hub, member, said.split()[0])
    assert (run["state"], run["exit_status"]) == ("failed", 1)
    assert run["reason"].endswith("Its last line: cell 4: ZeroDivisionError: division by zero")
    output = (files / run["folder"] / "output.ipynb").read_text()
    assert '"seed 7\\n"' in output
    assert "ZeroDivisionError" in (files / run["folder"] / "run.log").read_text()


def test_terminal_of_a_session_submits_follows_and_stops(hub: GPUHub, member: str) -> None:
    """With the session's own token, which reaches the runs of its member alone."""
    others = submit(hub, "member7", command=["true"])["id"]
    ended(hub, "member7", others)
    hub.spawn_and_wait(member, {"environment": "base", "gpus": 1})
    ref = hub.container_of(member)

    def run(*words: str, status: int = 0) -> str:
        code, output = hub.engine.execute(ref, words)
        assert code == status, output
        return output

    run("sh", "-c", "echo 'print(input.__name__, flush=True); raise SystemExit(4)' > job.py")
    said = run("gpuspawner-run", "job.py", "--gpus", "1", "--hours", "1", "--title", "Night job")
    name = said.split()[0]
    assert name.startswith("night-job-")
    run("gpuspawner-run", "wait", name, status=4)
    assert run("gpuspawner-run", "logs", "-f", name) == "input"
    assert name in run("gpuspawner-run", "list") and others not in run("gpuspawner-run", "list")
    assert "no run" in run("gpuspawner-run", "stop", others, status=1)
    assert "no file" in run("gpuspawner-run", "missing.py", status=1)
    hub.stop_server(member)


def test_terminal_submits_once_to_a_hub_that_is_started_again(
    hub: GPUHub, member: str, folder: Path
) -> None:
    hub.browser_of(member)
    files = workspace(folder, member)
    files.mkdir(exist_ok=True)
    environment = {
        "JUPYTERHUB_API_URL": f"http://{hub.hub_ip}:{hub.hub_port}/hub/api",
        "JUPYTERHUB_API_TOKEN": hub.user_token(member),
        "GPUSPAWNER_WORKSPACE": str(files),
    }

    def terminal(*words: str) -> subprocess.Popen[str]:
        command = die_with_us([sys.executable, str(LAB / "gpuspawner_run.py"), *words])
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=files, env=environment, stdout=pipe, stderr=pipe, text=True
        )

    hub.kill9(services=True)
    submission = terminal("true", "--gpus", "0", "--title", "Patient")
    assert submission.stderr is not None
    assert "Trying again for 2 minutes" in submission.stderr.readline()
    out, said = terminal("list").communicate(timeout=60)
    assert (out, said) == ("", "gpuspawner-run: the hub does not respond; try again in a moment\n")
    hub.start()
    out, said = submission.communicate(timeout=120)
    assert submission.returncode == 0 and "is submitted" in out, said
    [run] = hub.call(member, "GET", "runs").json()["runs"]
    assert out.startswith(run["id"]) and ended(hub, member, run["id"])["state"] == "done"
