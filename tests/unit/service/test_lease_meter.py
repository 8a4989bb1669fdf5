"""What each lease on a shared device does: rules with made-up processes, nothing is real."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.devices.models import DeviceProcess
from gpuspawner.engines.base import ProcessOwners
from gpuspawner.leases.models import Lease, LeasedDevice
from gpuspawner.leases.views import recent_of
from gpuspawner.monitoring.models import ProcessUse, Sample
from gpuspawner.service.lease_meter import CONTRADICTED, LeaseMeter
from tests.support.leases import lease_of

GIB = 2**30
AT = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


class Processes(ProcessOwners):
    """Processes that are there, and whose they are; "" is of no lease."""

    def __init__(self, leases: list[Lease], of: dict[int, str]) -> None:
        super().__init__(leases)
        self.of = of

    def lease_of(self, pid: int) -> Lease | None:
        return self._by_id.get(self.of.get(pid, ""))

    def exists(self, pid: int) -> bool:
        return pid in self.of


def shared(user: str, slots: int = 4, uuid: str = "GPU-a") -> Lease:
    device = LeasedDevice(uuid=uuid, slot=0, index=0, model="A100", memory_bytes=80, slots=slots)
    return replace(lease_of(user), id=user, devices=(device,))


def sampled(*did: tuple[int, int], **fields: Any) -> Sample:
    """A sample in which these processes did so much."""
    made = tuple(ProcessUse(pid, use) for pid, use in did)
    fields = {"use": min(100, sum(use for _, use in did)), "process_use": made} | fields
    return Sample(uuid="GPU-a", index=0, at=AT, total_bytes=80 * GIB, **fields)


def meter_of(of: dict[int, str], *leases: Lease) -> LeaseMeter:
    meter = LeaseMeter()
    meter.follow(leases, Processes(list(leases), of))
    return meter


def uses(meter: LeaseMeter, *samples: Sample) -> dict[str, int | None]:
    found = meter.divide(samples)
    assert all(each.uuid == "GPU-a" and each.at == AT for each in found)
    return {each.lease_id: each.use for each in found}


def test_each_lease_has_the_use_of_its_own_processes() -> None:
    meter = meter_of({1: "ada", 2: "ada", 3: "bob", 9: ""}, *map(shared, ("ada", "bob", "eve")))
    found = uses(meter, sampled((1, 30), (2, 20), (3, 10), (9, 40)))
    assert found == {"ada": 50, "bob": 10, "eve": 0}
    assert uses(meter, sampled()) == {"ada": 0, "bob": 0, "eve": 0}
    assert uses(meter, sampled((1, 90), (2, 90)))["ada"] == 100


def test_memory_and_processes_are_those_of_the_lease() -> None:
    listed = (DeviceProcess(1, 5 * GIB), DeviceProcess(2, 3 * GIB), DeviceProcess(3, None))
    meter = meter_of({1: "ada", 2: "ada", 3: "bob"}, shared("ada"), shared("bob"))
    ada, bob = meter.divide([sampled((1, 30), processes=listed, listed_at=1.0)])
    assert (ada.used_bytes, ada.processes) == (8 * GIB, listed[:2])
    assert (bob.used_bytes, bob.processes, bob.busy) == (None, listed[2:], False)


def test_lease_alone_on_its_device_does_all_of_it() -> None:
    meter = meter_of({}, shared("ada"), shared("bob", slots=1))
    (sample,) = meter.divide([sampled(use=70, process_use=None, xids=(13,), ecc_errors=3)])
    assert (sample.lease_id, sample.use) == ("ada", 70)
    assert (sample.xids, sample.ecc_errors) == ((), None), "these are counted once per device"


@pytest.mark.parametrize(
    "fields", [{"process_use": None}, {"error": "it is lost"}, {"process_use": None, "use": 0}]
)
def test_without_figures_nothing_is_known_of_any_lease(fields: dict[str, Any]) -> None:
    meter = meter_of({1: "ada"}, shared("ada"), shared("bob"))
    blank = Sample(uuid="GPU-a", index=0, at=AT, **fields) if "error" in fields else None
    for sample in meter.divide([blank or sampled((1, 50), **fields)]):
        assert sample.busy is None


def test_work_of_a_process_that_is_gone_leaves_others_unknown() -> None:
    of = {1: "ada", 2: "bob"}
    meter = meter_of(of, *map(shared, ("ada", "bob", "eve")))
    assert uses(meter, sampled((1, 20), (7, 60))) == {"ada": 20, "bob": None, "eve": None}
    assert uses(meter, sampled((2, 30))) == {"ada": 0, "bob": 30, "eve": 0}
    del of[2]
    assert uses(meter, sampled((2, 30))) == {"ada": 0, "bob": 30, "eve": 0}, "seen before its end"
    assert uses(meter, sampled()) == {"ada": 0, "bob": 0, "eve": 0}
    assert uses(meter, sampled((2, 30)))["ada"] is None, "that may be another one by now"


def test_figures_that_the_device_contradicts_are_not_believed() -> None:
    meter = meter_of({1: "ada"}, shared("ada"), shared("bob"))
    found = [uses(meter, sampled(use=80))["bob"] for _ in range(CONTRADICTED + 3)]
    assert found == [0] * CONTRADICTED + [None] * 3
    assert uses(meter, sampled((1, 80))) == {"ada": 80, "bob": 0}
    assert uses(meter, sampled(use=80))["bob"] == 0


def test_lease_that_has_ended_has_no_samples() -> None:
    meter = meter_of({1: "ada"}, shared("ada"), shared("bob"))
    assert set(uses(meter, sampled((1, 50)))) == {"ada", "bob"}
    meter.follow([], ProcessOwners())
    assert uses(meter, sampled((1, 50))) == {}


PEOPLE = ("ada", "bob", "eve")
PIDS = st.integers(1, 8)


@given(
    of=st.dictionaries(PIDS, st.sampled_from((*PEOPLE, ""))),
    did=st.dictionaries(PIDS, st.integers(0, 100)),
)
def test_nobody_has_the_work_of_another(of: dict[int, str], did: dict[int, int]) -> None:
    found = uses(meter_of(of, *map(shared, PEOPLE)), sampled(*did.items()))
    gone = any(use and pid not in of for pid, use in did.items())
    for name in PEOPLE:
        own = min(100, sum(use for pid, use in did.items() if of.get(pid) == name))
        assert found[name] == (None if gone and not own else own)


def test_member_is_shown_their_own_work_of_a_shared_device() -> None:
    whole, own = sampled((1, 70)), sampled((1, 30))
    context = SimpleNamespace(
        recent=lambda: {"GPU-a": [whole], "GPU-b": [whole]},
        recent_of_leases=lambda: {("GPU-a", "ada"): [own]},
    )

    def seen(lease: Lease) -> dict[str, list[Sample]]:
        return {uuid: list(some) for uuid, some in recent_of(cast(Any, context), lease).items()}

    assert seen(shared("ada")) == {"GPU-a": [own]}
    assert seen(shared("bob")) == {"GPU-a": []}, "not a neighbour's work in place of unknown"
    assert seen(shared("ada", slots=1)) == {"GPU-a": [whole]}
