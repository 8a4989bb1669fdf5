"""Real: Slurm and its power saving, two nodes of which one is off until it is needed, JupyterHub,
accounting service. Stand-in: the GPUs, and who switches a machine on.

How its words for nodes are read is in tests/unit/slurm/test_nodes.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime

import pytest

from gpuspawner.devices.models import Device, DeviceStatus
from gpuspawner.services import utcnow
from gpuspawner.slurm import scheduler, telemetry
from gpuspawner.slurm.programs import Slurm
from gpuspawner.slurm.scheduler import SlurmDelegate
from tests.support.browser import open_browser, screenshot
from tests.support.hub import ADMIN
from tests.support.pages import sign_in
from tests.support.processes import wait_for
from tests.support.slurm_hub import SlurmHub, described
from tests.support.slurm_node import Node
from tests.support.slurm_power import PoweredCluster


@pytest.fixture(scope="module")
def powered(clusters: None) -> Iterator[PoweredCluster]:
    with PoweredCluster() as cluster:
        yield cluster


@pytest.fixture
def hub(
    hubs: None,
    browsers: None,
    powered: PoweredCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SlurmHub]:
    folder = tmp_path_factory.mktemp("spare") / "hub"
    # None answers: on one machine because it is off, and on the other there is none.
    samplers = {node.name: f"https://{node.address}:9401" for node in powered.nodes}
    with SlurmHub(folder, powered, samplers=samplers) as hub:
        yield hub


def test_powered_off_and_drained_nodes_are_described(
    soak: None,
    powered: PoweredCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No sampler runs on any: of the one that is off, nobody is to expect it."""
    monkeypatch.setattr(scheduler, "NODES_EVERY", 0.5)
    monkeypatch.setattr(telemetry, "SILENT_AFTER", 1.0)
    caplog.set_level(logging.INFO)
    (on, _), (spare,) = (node.devices for node in powered.nodes)
    urls = {node.name: f"https://{node.address}:9401" for node in powered.nodes}
    delegate = SlurmDelegate(described(powered, samplers=urls), Slurm(conf=str(powered.conf)))

    def seen(uuid: str) -> Device:
        return next(d for d in delegate.observe(utcnow()).devices if d.uuid == uuid)

    def says(uuid: str, status: DeviceStatus, reason: str) -> None:
        wait_for(lambda: (seen(uuid).status, seen(uuid).reason) == (status, reason), reason)

    says(spare.uuid, DeviceStatus.OK, "off (power saving)")
    says(on.uuid, DeviceStatus.OK, "")
    sampler = delegate.sampler()
    told: dict[str, tuple[bool, str]] = {}

    def silent() -> bool:
        found = sampler.sample(datetime.now().astimezone(), 0.0)
        told.update((sample.uuid, (sample.resting, sample.silent)) for sample in found)
        return {on.uuid, spare.uuid} <= told.keys()

    wait_for(silent, "both to be silent", interval=0.2)
    name, other = powered.nodes[1].name, powered.nodes[0].name
    assert told[spare.uuid] == (True, f"the machine {name} is off (power saving)")
    resting, why = told[on.uuid]
    assert not resting and why.startswith(
        f"the machine {other} does not report the use of its GPUs"
    )
    assert name not in caplog.text, "nothing is wrong with it"
    assert other in caplog.text

    powered.run("scontrol", "update", f"nodename={other}", "state=drain", "reason=a new fan")
    says(on.uuid, DeviceStatus.DRAINED, "drained by root: a new fan")
    powered.run("scontrol", "update", f"nodename={name}", "state=drain", "reason=it's loud")
    says(spare.uuid, DeviceStatus.DRAINED, "drained by root: it's loud")
    told.clear()
    wait_for(silent, "both to be silent", interval=0.2)
    assert (told[spare.uuid][0], told[on.uuid][0]) == (True, False)
    for node in powered.nodes:
        powered.run("scontrol", "update", f"nodename={node.name}", "state=resume")
    says(spare.uuid, DeviceStatus.OK, "off (power saving)")
    says(on.uuid, DeviceStatus.OK, "")

    monkeypatch.setattr(powered, "delivers", False)  # also a failure ends that
    powered.user("ann")
    job = powered.hold("ann", "--gres=gpu:h100:1")
    says(spare.uuid, DeviceStatus.OK, "being switched on")
    powered.run("scancel", str(job))
    powered.delivers = True
    says(spare.uuid, DeviceStatus.OK, "off (power saving)")


def test_queue_powers_on_a_node_and_survives_its_failure(
    soak: None, hub: SlurmHub, powered: PoweredCluster
) -> None:
    (spare,) = powered.spare
    says_calmly_that_it_is_off(hub, spare, powered.nodes[0])
    hub.begin("ann", gpus=2)
    powered.delivers = False
    ticket = hub.queue_up("bob", gpus=1)

    def why(words: str) -> bool:
        standing = hub.services.positions.standings().get(ticket.id)
        return bool(standing and words in standing.why)

    wait_for(lambda: why("is being switched on"), "bob to be told")

    def gave_up() -> bool:
        return powered.node_state(spare).startswith("down")

    wait_for(gave_up, "Slurm to give the machine up", timeout=60, interval=0.5)
    jobs = ("squeue", "-h", "-t", "pending", "-o", "%j")
    wait_for(lambda: ticket.id in powered.run(*jobs), "bob's ticket to be in the queue again")
    assert hub.services.queue.ticket(ticket.id).outcome == ""
    assert [lease.server.user for lease in hub.services.leases.open_leases()] == ["ann"]

    powered.delivers = True
    powered.run("scontrol", "update", f"nodename={spare.name}", "state=power_down_force")

    def repaired() -> bool:
        state = powered.node_state(spare)
        if state == "down~":  # given up a moment later than it was switched off
            powered.run("scontrol", "update", f"nodename={spare.name}", "state=resume")
        return not state.startswith("down")

    wait_for(repaired, "the machine to be there for jobs", timeout=60, interval=0.5)
    lease = hub.wait_lease("bob", timeout=90)
    assert lease.ticket_id == ticket.id and hub.node_of(lease) is spare
    hub.stop_server("bob")
    wait_for(lambda: powered.node_state(spare) == "idle~", "the machine to be off", timeout=60)
    hub.stop_server("ann")


def says_calmly_that_it_is_off(hub: SlurmHub, spare: Node, other: Node) -> None:
    with open_browser() as browser:
        seen_by = (
            (ADMIN, 1280, "does not report the use of its GPUs"),
            ("ann", 390, "no measurements from its machine"),
        )
        for user, width, why in seen_by:
            page = browser.new_page(viewport={"width": width, "height": 900})
            sign_in(page, hub, user, "cluster")
            tile, silent = (
                page.locator(f".tile[data-uuid='{node.devices[0].uuid}']")
                for node in (spare, other)
            )
            silent.locator(".wrong", has_text=why).wait_for(timeout=90_000)
            tile.locator(".quiet", has_text="off (power saving)").wait_for(timeout=90_000)
            assert tile.locator(".state").inner_text() == "free"
            assert tile.locator(".wrong").inner_text() == ""
            screenshot(page, f"cluster-off-{width}")
            page.close()
