"""Real: Slurm, and two nodes with a network and an engine each, of which one is off until it is
needed. Stand-in: the GPUs, and who switches a machine on."""

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
from tests.support.processes import wait_for
from tests.support.slurm_hub import described
from tests.support.slurm_power import PoweredCluster


@pytest.fixture(scope="module")
def powered(clusters: None) -> Iterator[PoweredCluster]:
    with PoweredCluster() as cluster:
        yield cluster


def test_powered_off_and_drained_nodes_are_described(
    powered: PoweredCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
