"""Runs on a cluster: a job that holds the devices, and the container of the program beside it.
Real: Slurm with two nodes, a Docker Engine on each, JupyterHub, proxy, accounting service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from gpuspawner.leases.models import Lease, LeaseState
from tests.support.engine import PrivateEngine
from tests.support.images import BASE
from tests.support.processes import wait_for
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_hub import SlurmHub

ENVIRONMENTS = f"""  - slug: base
    display_name: Base
    image: {BASE}
    devices: {{default: 1, max: 8}}
"""


@pytest.fixture
def member(request: pytest.FixtureRequest) -> str:
    """A member, who is a Linux user, too, that no other test has."""
    return "u" + re.sub("[^a-z0-9]", "", request.node.name.removeprefix("test_"))[-24:]


SLEEP = "import time; print('on', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def hub(
    hubs: None,
    shared_cluster: SlurmCluster,
    engine: PrivateEngine,
    images: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SlurmHub]:
    shared_cluster.load_images(engine, BASE)
    folder = tmp_path_factory.mktemp("runs")
    folder.chmod(0o755)
    config = f'c.GPUDockerSpawner.workspace = "{folder}/work-{{raw_username}}"'
    with SlurmHub(folder / "hub", shared_cluster, config, environments=ENVIRONMENTS) as hub:
        yield hub


def submit(hub: SlurmHub, user: str, program: str, **fields: Any) -> str:
    hub.make_user(user)
    hub.browser_of(user)
    body = {"command": ["python3", "-c", program], "options": {"environment": "base"}, **fields}
    answer = hub.call(user, "POST", "runs", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def in_state(hub: SlurmHub, user: str, run_id: str, *states: str) -> dict[str, Any]:
    def there() -> dict[str, Any]:
        run = dict(hub.call(user, "GET", f"runs/{run_id}").json())
        return run if run["state"] in states else {}

    return wait_for(there, f"a run that is {' or '.join(states)}", timeout=60)


def lease_of(hub: SlurmHub, run_id: str) -> Lease:
    (lease,) = [x for x in hub.services.leases.of_account(None) if x.server.run_id == run_id]
    return lease


@pytest.mark.parametrize(("status", "state"), [(0, "done"), (3, "failed")])
def test_run_ends_with_its_program(hub: SlurmHub, member: str, status: int, state: str) -> None:
    run_id = submit(
        hub, member, f"import sys, time; time.sleep(2); print('the end'); sys.exit({status})"
    )
    run = in_state(hub, member, run_id, "done", "failed", "stopped")
    assert (run["state"], run["exit_status"]) == (state, status)
    assert run["reason"].endswith("" if state == "done" else "Its last line: the end")
    [used] = hub.services.resources.totals_of([lease_of(hub, run_id).id]).values()
    assert used.cpu_seconds and used.memory_peak_bytes
    log = hub.call(member, "GET", f"runs/{run_id}/log")
    assert (log.status_code, log.text) == (200, "the end\n")
    lease = lease_of(hub, run_id)
    assert lease.state is LeaseState.ENDED and lease.charged
    which = ("-o", "Comment,State", f"--name=gpuspawner-{lease.ticket_id}")

    def comment() -> str:
        """Slurm's database knows it, as the job's end, a little later."""
        said = hub.cluster.run("sacct", "-X", "-n", "-P", *which).strip()
        found, _, state = said.rpartition("|")
        return found if state.startswith(("COMPLETED", "CANCELLED")) else ""

    told = json.loads(wait_for(comment, "the job's end in Slurm's database"))
    assert told == {"server": f"{member}/run:{run_id}", "kind": "run"}


def test_run_is_stopped_with_its_job(hub: SlurmHub, member: str) -> None:
    run_id = submit(hub, member, SLEEP)
    in_state(hub, member, run_id, "running")
    assert hub.cluster.holder(lease_of(hub, run_id).ticket_id) == "RUNNING"
    hub.call(member, "DELETE", f"runs/{run_id}").raise_for_status()
    run = in_state(hub, member, run_id, "done", "failed", "stopped")
    assert (run["state"], run["reason"]) == ("stopped", "Its member stopped it.")
    wait_for(lambda: not hub.cluster.run("squeue", "-h", f"--user={member}"), "the job's end")
    assert [c for node in hub.cluster.nodes for c in hub.containers(node)] == []


def test_run_whose_job_was_cancelled_begins_again(hub: SlurmHub, member: str) -> None:
    program = f"import os; os.environ['GPUSPAWNER_RESTARTS'] == '1' and os._exit(0); {SLEEP}"
    run_id = submit(hub, member, program, requeue=True)
    in_state(hub, member, run_id, "running")
    job = hub.cluster.holder(lease_of(hub, run_id).ticket_id, "%A")
    hub.cluster.run("scancel", job)
    run = in_state(hub, member, run_id, "done", "failed", "stopped")
    assert (run["state"], run["restarts"]) == ("done", 1)


def test_preemptible_run_is_refused_in_words(hub: SlurmHub, member: str) -> None:
    hub.make_user(member)
    hub.browser_of(member)
    body = {"command": ["true"], "options": {"environment": "base"}, "preemptible": True}
    answer = hub.call(member, "POST", "runs", json=body)
    assert answer.status_code == 400
    assert "it knows no preemptible runs" in answer.json()["message"]
    asked = {"options": body["options"], "preemptible": True}
    quote = hub.call(member, "POST", "runs/-/quote", json=asked).json()
    assert quote["refusal"] == answer.json()["message"]
    assert (quote["preemptible_share"], quote["at_once"]) == (None, False)
