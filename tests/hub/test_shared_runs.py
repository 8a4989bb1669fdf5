"""Sweeps, schedules and runs on shares of a GPU, and by memory. Real: hub, proxy, accounting
service, a Docker Engine, containers of our base image; the GPUs are simulated."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.client import Client, RequestRefused
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.images import BASE
from tests.support.processes import free_port, wait_for

CATALOG = f"""
environments:
  - {{slug: base, image: {BASE}, default: true, sharing: any, hours: {{max: 8}}}}
"""

CONFIG = """
c.GPUDevices.shared_devices = {{"T4": 4}}
c.GPUDockerSpawner.workspace = "{folder}/work-{{raw_username}}"
c.GPURates.by_model = {{"*": 60}}
c.GPUCredits.hold_minutes = 1
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""

FLEET = "1xA100-80GB,2xT4"
"""A whole GPU, and two with four slots each."""
SHARE = [
    "python3",
    "-c",
    "import os, time; time.sleep(2); print(os.environ['GPUSPAWNER_GPU_SHARE'])",
]


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[GPUHub]:
    config = CONFIG.format(port=free_port(), folder=folder)
    with GPUHub(folder / "hub", engine, config, fleet=FLEET, catalog=CATALOG) as hub:
        yield hub
    engine.clean()


def client_of(hub: GPUHub, user: str) -> Client:
    hub.browser_of(user)  # the first visit opens the account
    return Client(f"{hub.url}/services/gpu/api", hub.user_token(user))


def lease_of(hub: GPUHub, user: str, run_id: str) -> Lease:
    (found,) = [lease for lease in hub.leases(user) if lease.server.run_id == run_id]
    return found


def log_of(folder: Path, user: str, of_run: str) -> str:
    return (folder / f"work-{user}" / of_run / "run.log").read_text()


def test_sweep_runs_on_a_share_of_each_gpu_at_once(hub: GPUHub, member: str, folder: Path) -> None:
    client = client_of(hub, member)
    options = {"gpus": "share", "hours": 1}
    sets, numbered = [{"n": number} for number in range(4)], [*SHARE, "{n}"]
    quote = client.sweeps.quote(numbered, sets=sets, options=options)
    assert (quote.runs, quote.rate_per_hour, quote.most) == (4, 15, 60)
    sweep = client.sweeps.submit(numbered, sets=sets, options=options, title="Shares")
    most = 0

    def all_done() -> bool:
        nonlocal most
        leases = hub.open_leases(member)
        uuids = [uuid for lease in leases for uuid in lease.uuids]
        assert len(set(uuids)) == len(uuids), "a member has one slot of a GPU at most"
        most = max(most, len(leases))
        return client.sweeps.get(sweep.id).states == {"done": 4}

    wait_for(all_done, "the end of the sweep", timeout=180)
    assert most <= 2, "there are two shared GPUs"
    found = client.sweeps.get(sweep.id)
    for run in found.runs:
        (device,) = lease_of(hub, member, run.id).devices
        assert (device.model, device.slots, device.held_slots) == ("T4", 4, 1)
        assert log_of(folder, member, run.folder).strip() == "0.25"
    charged = sum(lease_of(hub, member, run.id).charged for run in found.runs)
    assert found.charged == Decimal(charged) / MICRO
    assert hub.taken() == {}


def test_schedule_runs_on_a_share(hub: GPUHub, member: str, folder: Path) -> None:
    client = client_of(hub, member)
    made = client.schedules.create("0 3 * * *", SHARE, options={"gpus": "share"}, title="Nightly")
    assert made.options == {"gpus": "share"}
    run = client.runs.wait(client.schedules.run_now(made.id).id)
    assert (run.state, run.options["gpus"]) == ("done", "share")
    lease = lease_of(hub, member, run.id)
    assert [device.held_slots for device in lease.devices] == [1]
    assert lease.rate == 15 * MICRO, "a quarter of the rate"
    assert log_of(folder, member, run.folder).strip() == "0.25"
    for options, words in (
        (
            {"gpus": "share", "gpu_memory": 16},
            "The largest share of a GPU has 12 GB: ask for less.",
        ),
        ({"gpu_memory": 100}, "The most is 80 GB: ask for less."),
    ):
        with pytest.raises(RequestRefused, match=words):
            client.schedules.create("0 3 * * *", SHARE, options=options)
    client.schedules.delete(made.id)


def test_run_by_memory_gets_the_smallest_that_fits(hub: GPUHub, member: str, folder: Path) -> None:
    client = client_of(hub, member)
    for memory, model in ((10, "T4"), (20, "A100-80GB")):
        options = {"gpus": 1, "gpu_memory": memory}
        quote = client.runs.quote(options=options)
        assert quote.options["gpu_memory"] == memory and quote.at_once
        run = client.runs.wait(client.runs.submit(["true"], options=options).id)
        assert run.state == "done"
        (device,) = lease_of(hub, member, run.id).devices
        assert (device.model, device.held_slots) == (model, device.slots), "the whole device"
    share = {"gpus": "share", "gpu_memory": 8}
    told = client.runs.quote(options=share)
    assert (told.what, told.price) == ("2/4 of T4 (about 8 GB)", "30.00 credits an hour")
    run = client.runs.wait(client.runs.submit(SHARE, options=share).id)
    lease = lease_of(hub, member, run.id)
    assert [(device.slots, device.held_slots) for device in lease.devices] == [(4, 2)]
    assert (lease.rate, log_of(folder, member, run.folder).strip()) == (30 * MICRO, "0.5")
    sets = [{"n": 1}, {"n": 2}]
    with pytest.raises(RequestRefused, match="The most is 80 GB: ask for less"):
        client.sweeps.submit(["echo", "{n}"], sets=sets, options={"gpu_memory": 100})
    for options in ({"gpu_memory": 0}, {"gpu_memory": "much"}):
        with pytest.raises(RequestRefused, match="must be a whole number of GB from 1"):
            client.runs.submit(["true"], options=options)
