"""Each part killed before and after each step of a run. Real: hub, proxy, accounting service, a
Docker Engine, containers of our base image.

A soak kills every part at every step; otherwise a sample does, from the run's seed."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa

from gpuspawner.core.units import MICRO
from gpuspawner.db.engine import Store
from gpuspawner.db.schema import OPEN_TICKET, tickets
from gpuspawner.leases.models import Lease
from tests.support import tier
from tests.support.brokers import problems
from tests.support.engine import PrivateEngine
from tests.support.fault_points import FaultPoint
from tests.support.gpu_hub import GPUHub
from tests.support.images import BASE
from tests.support.notebooks import new_notebook
from tests.support.processes import free_port, wait_for

CATALOG = f"""
environments:
  - {{slug: base, image: {BASE}, default: true, devices: {{default: 1, max: 2}}}}
"""

CONFIG = """
c.GPUDockerSpawner.workspace = "{folder}/work-{{raw_username}}"
c.GPURates.by_model = {{"*": 3600}}  # a credit a second
c.GPUCredits.opening_grant = 1_000_000
c.Accounting.reconcile_seconds = 1
from tests.support import halting
halting.FOLDER = "{folder}"
service_constants["tests.support.halting.FOLDER"] = "{folder}"
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""

UP = "JupyterHub is now running"

STEPS = (
    *("submit", "save", "grant", "create", "start", "confirm"),
    *("end", "release", "removal", "settle"),
)
MOMENTS = [f"{side} {step}" for step in STEPS for side in ("before", "after")]
PARTS = ("hub", "service", "hub and service", "engine")
CELLS = [f"{side}-{number}" for number in (1, 2) for side in ("begin", "end")]
"""The moments within a notebook: its cells wait there."""

MATRIX = [(moment, part) for moment in MOMENTS for part in PARTS]
MATRIX += [(cell, part) for cell in CELLS for part in (*PARTS, "container")]
SAMPLE = MATRIX if tier.SOAK else tier.chance("kills of runs").sample(MATRIX, 7)

PROGRAM = "import time; open('executions', 'a').write('x'); time.sleep(1)"

WAIT = """
import os, time
def wait(name):
    if os.path.exists("halt-" + name):
        open("at-" + name, "w").close()
    while os.path.exists("halt-" + name):
        time.sleep(0.02)
wait("begin-{n}")
if {n} == 1: open("executions", "a").write("x")
print("cell {n}", flush=True)
wait("end-{n}")
"""

NOTEBOOK = new_notebook(**{f"cell-{n}": WAIT.replace("{n}", str(n)) for n in (1, 2, 3)})

PRINTED = [f"cell {n}\n" for n in (1, 2, 3)]


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[GPUHub]:
    config = CONFIG.format(port=free_port(), folder=folder)
    with GPUHub(folder / "hub", engine, config, catalog=CATALOG, external_proxy=True) as hub:
        yield hub
    engine.clean()


@pytest.fixture
def point(folder: Path) -> Iterator[FaultPoint]:
    point = FaultPoint(folder)
    yield point
    point.let_go()


class Submission(threading.Thread):
    """A member's client: it submits with a key, again until it has an answer."""

    def __init__(self, hub: GPUHub, member: str, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        hub.browser_of(member)  # the first visit opens the account
        self.token = hub.user_token(member)
        self.url = f"{hub.url}/services/gpu/api/{path}"
        self.body = {**body, "key": member}
        self.answer: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        wait_for(self._ask, "an answer", timeout=60)

    def _ask(self) -> bool:
        headers = {"Authorization": f"token {self.token}"}
        try:
            answer = requests.post(self.url, headers=headers, json=self.body, timeout=30)
        except requests.RequestException:
            return False
        if answer.status_code == 200:
            self.answer = answer.json()
        return bool(self.answer)


def kill(part: str, hub: GPUHub, engine: PrivateEngine, point: FaultPoint) -> None:
    """Kill a part on the spot, let the others go on, and start it as its own supervisor does."""
    if part == "service":
        hub.kill_services()
        point.let_go()
    elif part == "engine":
        engine.kill9()
        point.let_go()
        engine.start()
    elif part == "container":
        [container] = hub.containers()
        engine.client.kill(container["Id"])
    else:
        before = hub.log_text().count(UP)
        hub.kill9(services=part == "hub and service")
        point.let_go()
        hub.start()
        # JupyterHub ends if a service of it dies before it is up itself.
        wait_for(lambda: hub.log_text().count(UP) > before, "the hub to be up with its service")


def ended_runs(hub: GPUHub, member: str, client: Submission, count: int) -> list[dict[str, Any]]:
    """The member's runs, once all of them have ended."""
    headers = {"Authorization": f"token {client.token}"}

    def ended() -> list[dict[str, Any]]:
        url = f"{hub.url}/services/gpu/api/runs"
        try:
            answer = requests.get(url, headers=headers, timeout=30)
        except requests.RequestException:
            return []
        # While a part is not back, the proxy answers with a page.
        found = answer.json()["runs"] if answer.status_code == 200 else []
        return found if found and all(run["ended_at"] for run in found) else []

    runs = wait_for(ended, "the end of the runs", timeout=60)
    assert len(runs) == count
    return runs


def orphans(hub: GPUHub) -> list[str]:
    """What is left although no run goes on."""
    with hub._database.connect() as connection:
        waiting = connection.execute(sa.select(tickets.c.id).where(OPEN_TICKET)).scalars().all()
    left = [f"container {each['Id'][:12]} ({each['State']})" for each in hub.containers()]
    left += [f"lease {lease.id}" for lease in hub.open_leases()]
    left += [f"device {place}" for place in hub.taken()]
    return left + [f"ticket {ticket}" for ticket in waiting]


def assert_nothing_is_left(hub: GPUHub) -> None:
    try:
        wait_for(lambda: not orphans(hub), "order", timeout=20, interval=0.2)
    except TimeoutError:
        pytest.fail("; ".join(orphans(hub)))
    store = Store(hub.database_url)
    assert problems(store) == []
    store.close()


def charged_leases(hub: GPUHub, member: str) -> list[Lease]:
    """Those that cost something: each its own time, which no two of one run share."""
    found = sorted((x for x in hub.leases(member) if x.charged), key=lambda x: x.granted_at)
    for lease in found:
        assert lease.started_at and lease.ended_at
        seconds = (lease.ended_at - lease.started_at).total_seconds()
        assert lease.charged / MICRO == pytest.approx(seconds, abs=1e-5)
    for one, following in pairwise(sorted(found, key=lambda x: x.server.name)):
        if one.server == following.server:
            assert one.ended_at and one.ended_at <= following.granted_at
    return found


@pytest.mark.parametrize(("moment", "part"), SAMPLE)
def test_run_ends_once_and_is_charged_once(
    hub: GPUHub,
    engine: PrivateEngine,
    point: FaultPoint,
    member: str,
    folder: Path,
    moment: str,
    part: str,
) -> None:
    files = folder / f"work-{member}"
    body: dict[str, Any] = {"command": ["python3", "-c", PROGRAM], "requeue": True}
    if moment in CELLS:
        hub.browser_of(member)
        files.mkdir(exist_ok=True)
        (files / "study.ipynb").write_text(json.dumps(NOTEBOOK))
        (files / f"halt-{moment}").touch()
        for path in (files, *files.iterdir()):
            path.chmod(0o777)
        body = {"notebook": "study.ipynb", "requeue": part != "container"}
    else:
        point.arm(moment)
    client = Submission(hub, member, "runs", body)
    if moment in CELLS:
        wait_for(lambda: (files / f"at-{moment}").exists(), "the cell", timeout=60)
        [running] = hub.containers()
        before = outputs(files, client)
        kill(part, hub, engine, point)
        assert before == PRINTED[: int(moment[-1]) - 1]
        if part != "engine":  # after whose end it begins again
            assert outputs(files, client) == before, "what was saved stays"
        if part not in ("engine", "container"):
            assert [each["Id"] for each in hub.containers()] == [running["Id"]], "it goes on"
        (files / f"halt-{moment}").unlink()
    else:
        point.wait()
        kill(part, hub, engine, point)
    client.join(timeout=240)
    [run] = ended_runs(hub, member, client, 1)
    assert run["id"] == client.answer["id"], "the same key is the same run"
    assert_nothing_is_left(hub)

    executions = (files / "executions").read_text() if (files / "executions").exists() else ""
    charged = charged_leases(hub, member)
    if part == "container":
        assert (run["state"], run["exit_status"]) == ("failed", 137)
        assert len(charged) == 1
    else:
        assert (run["state"], run["exit_status"], run["reason"]) == ("done", 0, "")
        was_interrupted = part == "engine" and run["restarts"]
        most = 2 if was_interrupted else 1
        assert 1 <= len(executions) <= most and len(executions) <= len(charged) <= most
        if moment in CELLS:
            assert outputs(files, client) == PRINTED
    ends = re.findall(rf"Run {run['id']} of {member}: (?!submitted|stopped)\w+", hub.log_text())
    assert len(ends) <= 1, ends
    notices = hub.call(member, "GET", "notices").json()["notices"]
    assert len(notices) == 1, notices


def outputs(files: Path, client: Submission) -> list[str]:
    """What the cells of the output notebook printed, as far as it was saved."""
    client.join(timeout=120)
    saved = json.loads((files / client.answer["folder"] / "output.ipynb").read_text())
    return ["".join(out["text"]) for cell in saved["cells"] for out in cell["outputs"]]


@pytest.mark.parametrize(
    ("moment", "part"),
    [
        ("before save", "hub and service"),
        ("after save", "hub"),
        ("after save", "service"),
        ("after save", "hub and service"),
    ],
)
def test_sweep_is_saved_once(
    hub: GPUHub, engine: PrivateEngine, point: FaultPoint, member: str, moment: str, part: str
) -> None:
    """All of it or nothing, and its runs end once."""
    command = ["python3", "-c", "import time; time.sleep(0.5)"]
    point.arm(moment)
    client = Submission(hub, member, "sweeps", {"command": command, "sets": [{}, {}]})
    point.wait()
    kill(part, hub, engine, point)
    client.join(timeout=240)
    runs = ended_runs(hub, member, client, 2)
    assert [run["state"] for run in runs] == ["done", "done"]
    assert {run["id"] for run in runs} == {run["id"] for run in client.answer["runs"]}
    assert_nothing_is_left(hub)
    assert len(charged_leases(hub, member)) == 2
