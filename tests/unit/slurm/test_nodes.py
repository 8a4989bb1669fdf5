"""States of nodes in sinfo --json of Slurm 22.05.8. tests/slurm/test_spare.py runs the real one."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest

from gpuspawner.core.errors import SlurmRefused
from gpuspawner.devices.models import DeviceStatus
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.queue.models import Ticket
from gpuspawner.services import utcnow
from gpuspawner.slurm.cluster import Cluster, Node, NodeDevice
from gpuspawner.slurm.jobs import BAD_CONSTRAINTS, HOLDER, WAITS, SlurmJob
from gpuspawner.slurm.programs import Slurm, listed
from gpuspawner.slurm.scheduler import SlurmDelegate

ENGINE = "unix:///run/docker.sock"
DEVICE = NodeDevice("GPU-1", "Tesla T4", 15 * 2**30)
CLUSTER = Cluster(
    name="lab", nodes=(Node(name="m1", address="10.0.0.1", engine=ENGINE, devices=(DEVICE,)),)
)
OFF = "off (power saving)"


class FakeSlurm(Slurm):
    """Returns ``said`` as its nodes."""

    said = ""

    def nodes(self) -> str:
        return self.said


def delegate(monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, Any], **more: Any) -> SlurmDelegate:
    monkeypatch.setattr(FakeSlurm, "said", json.dumps({"errors": [], "nodes": nodes} | more))
    return SlurmDelegate(CLUSTER, FakeSlurm())


@pytest.mark.parametrize(
    ("state", "reason", "status", "why", "resting"),
    [
        ("idle", "", DeviceStatus.OK, "", ""),
        ("idle CLOUD POWERED_DOWN NOT_RESPONDING", "", DeviceStatus.OK, OFF, OFF),
        ("mixed CLOUD POWERING_UP", "", DeviceStatus.OK, *["being switched on"] * 2),
        ("idle DRAIN", "a fan", DeviceStatus.DRAINED, "drained by root: a fan", ""),
        ("idle DRAIN", "gpuspawner: a fan", DeviceStatus.DRAINED, "drained: a fan", ""),
        ("idle CLOUD DRAIN POWERED_DOWN", "loud", DeviceStatus.DRAINED,
         "drained by root: loud", OFF),
        ("down NOT_RESPONDING", "lost", DeviceStatus.UNKNOWN,
         "the machine m1 gets no work: down and not responding (lost)", ""),
        ("down CLOUD POWERED_DOWN", "ResumeTimeout reached", DeviceStatus.UNKNOWN,
         "the machine m1 gets no work: down (ResumeTimeout reached)", ""),
    ],
)  # fmt: skip
def test_node_state_becomes_the_status_of_its_devices(
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    reason: str,
    status: DeviceStatus,
    why: str,
    resting: str,
) -> None:
    word, *flags = state.split()
    told = {"name": "m1", "state": word, "state_flags": flags, "reason": reason}
    nodes = delegate(monkeypatch, told | {"reason_set_by_user": "root" if reason else None})
    (device,) = nodes.observe(utcnow()).devices
    assert (device.uuid, device.status, device.reason) == ("GPU-1", status, why)
    assert nodes.resting("m1") == resting
    assert nodes.drained() == ({"GPU-1"} if "DRAIN" in state else set())


def test_unknown_node_or_invalid_answer_frees_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    (device,) = delegate(monkeypatch).observe(utcnow()).devices
    assert device.status is DeviceStatus.UNKNOWN and "Slurm does not know it" in device.reason
    for answer in ({"errors": ["no controller"]}, {"nodes": [{"name": "m1"}]}, {"nodes": None}):
        seen = delegate(monkeypatch, **answer).observe(utcnow())
        assert seen.devices == () and seen.error


@pytest.mark.parametrize(
    ("reported", "is_released", "calls"),
    [(False, True, []), (True, True, ["release 7"]), (True, False, ["release 7", "end 7"])],
)
def test_job_that_slurm_gave_up_is_released_once_its_machine_has_reported(
    monkeypatch: pytest.MonkeyPatch, reported: bool, is_released: bool, calls: list[str]
) -> None:
    """A hub that may not release jobs ends it, and its ticket gets another one."""
    told = {"name": "m1", "state": "idle", "state_flags": [], "slurmd_start_time": int(reported)}
    one = delegate(monkeypatch, told)
    ticket = Ticket(
        id="t1", server=ServerRef("ada"), request=Request(devices=1), created_at=utcnow()
    )
    job = SlurmJob(id=7, name=f"{HOLDER}{ticket.id}", uid=0, state=WAITS, reason=BAD_CONSTRAINTS)
    one._jobs = {ticket.id: job}
    done: list[str] = []

    def release(slurm: Slurm, jobs: Collection[int]) -> None:
        done.append(f"release {listed(jobs)}")
        if not is_released:
            raise SlurmRefused(why="Access/permission denied")

    monkeypatch.setattr(FakeSlurm, "release", release)
    monkeypatch.setattr(FakeSlurm, "note", lambda *_: None)
    monkeypatch.setattr(FakeSlurm, "cancel", lambda _, job: done.append(f"end {job}"))
    one._began = float("inf")  # each time, Slurm was asked since
    for _ in range(2):
        one.tend([ticket], paused=False)
    assert done == calls
