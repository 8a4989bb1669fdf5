"""What the sampler of NVMLDevices reports, and what follows for a device that is lost."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuspawner.monitoring.health import SymptomWindow
from gpuspawner.monitoring.health_service import FoundSymptoms
from gpuspawner.monitoring.models import Sample
from tests.support.brokers import Clock, Make
from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.machine import Machine, statuses
from tests.support.nvml.nvml_library import GIB, gpus, mig_gpu
from tests.support.sickness import RATE

READINGS = [
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceRegisterEvents",
    "nvmlDeviceGetMigMode",
]


def by_uuid(samples: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert isinstance(samples, list), samples
    return {sample["uuid"]: sample for sample in samples}


def test_healthy_gpu_is_sampled_with_every_reading(machine: Machine) -> None:
    (gpu,) = gpus(1)
    gpu.use, gpu.used_bytes, gpu.milliwatts, gpu.celsius = (87, 40), 30 * GIB, 251_000, 66
    gpu.clocks, gpu.throttle, gpu.ecc_errors = (1290, 1593), 0x24, 3
    gpu.lanes, gpu.limits = (8, 16), (300_000, 400_000)
    gpu.compute = [(os.getpid(), 29 * GIB)]
    assert machine.has(gpu).sample() == [
        {
            "uuid": gpu.uuid,
            "index": 0,
            "lease_id": "",
            "at": str(machine.now),
            "use": 87,
            "memory_activity": 40,
            "used_bytes": 30 * GIB,
            "total_bytes": 80 * GIB,
            "milliwatts": 251_000,
            "celsius": 66,
            "sm_mhz": 1290,
            "memory_mhz": 1593,
            "throttle": 0x24,
            "ecc_errors": 3,
            "xids": [],
            "listed_at": 1.0,
            "processes": [
                {
                    "pid": os.getpid(),
                    "used_memory_bytes": 29 * GIB,
                    "kind": "compute",
                    "name": Path("/proc/self/comm").read_text().strip(),
                }
            ],
            "process_use": None,
            "condition": {
                "remap_pending": False,
                "remap_failed": False,
                "pages_pending": None,  # as on an H100, which replaces rows instead
                "link_width": 8,
                "link_most": 16,
                "limit_milliwatts": 300_000,
                "usual_milliwatts": 400_000,
            },
            "error": "",
            "silent": "",
            "resting": False,
        }
    ]


def test_device_condition_is_read_once_a_minute(machine: Machine) -> None:
    (gpu,) = gpus(1)
    assert machine.has(gpu).sample()[0]["condition"]["remap_pending"] is False
    gpu.remapped, gpu.pages_pending = (4, 2, 1, 0), 1
    assert machine.has(gpu).sample(58)[0]["condition"]["remap_pending"] is False
    found = machine.sample(2)[0]["condition"]
    assert found["remap_pending"] and found["pages_pending"] and not found["remap_failed"]


def test_implausible_readings_are_discarded(machine: Machine) -> None:
    gpu, other = gpus(2)
    gpu.lanes, gpu.limits = (4_000_000_000, 0), (0, 4_294_967_295)
    failing = ("nvmlDeviceGetRemappedRows", "nvmlDeviceGetRetiredPagesPendingStatus")
    gpu.pages_pending = other.pages_pending = 0
    gpu.fails = {failing[0]: nvml.UNKNOWN, failing[1]: nvml.NOT_SUPPORTED}
    seen = by_uuid(machine.has(gpu, other).sample())
    assert set(seen[gpu.uuid]["condition"].values()) == {None}
    assert seen[gpu.uuid]["error"] == ""
    assert None not in seen[other.uuid]["condition"].values()

    machine.begin()
    machine.has(replace(gpu, use=(4_000_000_000, 3)), replace(other, celsius=65535))
    seen = by_uuid(machine.sample())
    assert "Its use makes no sense: 4000000000" in seen[gpu.uuid]["error"]
    assert (seen[other.uuid]["celsius"], seen[other.uuid]["error"]) == (None, "")


def test_process_lists_are_read_in_turn_once_a_minute(machine: Machine) -> None:
    fleet = gpus(3)
    machine.has(*fleet)
    for listed in (1, 2, 3):
        samples = machine.sample()
        assert [s["processes"] is not None for s in samples] == [n < listed for n in range(3)]
    machine.has(*[replace(gpu, compute=[(7, GIB)]) for gpu in fleet])
    for _ in range(57):
        samples = machine.sample()
        assert [s["processes"] for s in samples] == [[], [], []]
    for listed in (1, 2, 3):
        samples = machine.sample()
        assert [bool(s["processes"]) for s in samples] == [n < listed for n in range(3)]


def test_what_each_process_does_is_read_of_watched_devices_only(machine: Machine) -> None:
    gpu, other = gpus(2)
    other.fails = {"nvmlDeviceGetProcessUtilization": nvml.GPU_IS_LOST}
    machine.tell(f"watch {gpu.uuid}")

    def uses(**fields: Any) -> Any:
        samples = by_uuid(machine.has(replace(gpu, **fields), other).sample())
        assert (samples[other.uuid]["process_use"], samples[other.uuid]["error"]) == (None, "")
        assert samples[gpu.uuid]["error"] == ""
        return samples[gpu.uuid]["process_use"]

    old = [(7, 90, 20, 1_000), (8, 50, 10, 2_000)]
    assert uses(worked=old) is None, "who knows when that was"
    assert uses(worked=old) == []
    new = [*old, (9, 30, 5, 3_000), (7, 10, 2, 3_000), (7, 21, 3, 3_200), (5, 0, 0, 3_000)]
    assert uses(worked=new) == [
        {"pid": 7, "use": 16, "memory_activity": 2},
        {"pid": 9, "use": 30, "memory_activity": 5},
    ]
    assert uses(worked=[*new, (9, 4_000_000, 0, 4_000)]) is None
    assert uses(fails={"nvmlDeviceGetProcessUtilization": nvml.NOT_SUPPORTED}) is None
    assert uses(fails={"nvmlDeviceGetProcessUtilization": nvml.UNKNOWN}) is None
    assert uses(worked=[*new, (9, 40, 0, 5_000)]) == [{"pid": 9, "use": 40, "memory_activity": 0}]
    assert uses(mig=False) == []
    machine.tell("watch")
    assert uses(worked=[*new, (9, 40, 0, 6_000)]) is None


def test_mig_instance_has_memory_and_processes_but_no_use(machine: Machine) -> None:
    gpu = mig_gpu(0, 3)
    gpu.instances[0].used_bytes, gpu.instances[0].compute = 2 * GIB, [(9, 2 * GIB)]
    gpu.celsius, gpu.milliwatts = 51, 200_000
    machine.has(gpu)
    for _ in range(3):
        machine.sample()
    first, second = machine.sample()
    assert [first["uuid"], second["uuid"]] == [part.uuid for part in gpu.instances]
    assert first["use"] is second["use"] is first["milliwatts"] is None
    assert (first["used_bytes"], second["used_bytes"]) == (2 * GIB, 0)
    assert (len(first["processes"]), second["processes"]) == (1, [])
    assert (first["celsius"], second["celsius"]) == (51, 51)


def hopper(**counted: tuple[float, float, float, float]) -> nvml.GPU:
    """A GPU with counters, and two instances."""
    gpu = mig_gpu(0, 3, gpm=True)
    for name, part in zip(("first", "second"), gpu.instances, strict=True):
        part.gpu_instance, part.counted = part.slot + 7, counted.get(name, (0, 0, 0, 1))
    return gpu


def uses(machine: Machine, gpu: nvml.GPU) -> list[tuple[Any, Any]]:
    samples = machine.has(gpu).sample()
    assert not any(sample["error"] for sample in samples)
    return [(sample["use"], sample["memory_activity"]) for sample in samples]


UNKNOWN = [(None, None)] * 2


def test_use_of_mig_instances_is_known_since_hopper(machine: Machine) -> None:
    assert uses(machine, hopper()) == UNKNOWN, "it takes two samples"
    counted = {"first": (6.0, 4.0, 1.0, 11.0), "second": (0.0, 0.0, 0.0, 11.0)}
    assert uses(machine, hopper(**counted)) == [(60, 10), (0, 0)]
    counted = {"first": (6.0, 4.0, 1.0, 21.0), "second": (9.96, 9.0, 2.0, 21.0)}
    assert uses(machine, hopper(**counted)) == [(0, 0), (100, 20)]
    assert nvml.samples_held(machine.fleet) == 4, "two of each, however long it is measured"


def test_multiprocessors_count_where_the_engine_is_not_reported(machine: Machine) -> None:
    counted = {"first": (-1.0, 0.0, 0.0, 1.0), "second": (0.0, 0.0, -1.0, 1.0)}
    uses(machine, hopper(**counted))
    counted = {"first": (-1.0, 3.0, 0.0, 11.0), "second": (5.0, 4.0, -1.0, 11.0)}
    assert uses(machine, hopper(**counted)) == [(30, 0), (50, None)]


def test_without_counters_the_use_of_an_instance_stays_unknown(machine: Machine) -> None:
    ampere = replace(hopper(), gpm=False)
    for answer in (None, nvml.NOT_SUPPORTED, nvml.FUNCTION_NOT_FOUND):
        ampere.fails = {"nvmlGpmQueryDeviceSupport": answer} if answer else {}
        machine.begin()
        assert [uses(machine, ampere) for _ in range(3)] == [UNKNOWN] * 3


def test_devices_on_one_gpu_instance_cannot_be_told_apart(machine: Machine) -> None:
    for second in range(3):
        gpu = hopper(first=(second, 0, 0, second), second=(0, 0, 0, second))
        gpu.instances[1].gpu_instance = gpu.instances[0].gpu_instance
        assert uses(machine, gpu) == UNKNOWN


def test_failing_counters_cost_a_figure_and_no_sample(machine: Machine) -> None:
    for number, call in enumerate(("nvmlGpmMigSampleGet", "nvmlGpmMetricsGet")):
        at = 100.0 * number
        uses(machine, hopper(first=(at, 0, 0, at), second=(at, 0, 0, at)))
        gpu = hopper(first=(at, 0, 0, at + 1), second=(at, 0, 0, at + 1))
        machine.has(gpu, fails={call: nvml.UNKNOWN})
        samples = machine.sample()
        assert [(each["use"], each["error"]) for each in samples] == [(None, "")] * 2
        for later in (2, 3):
            found = uses(
                machine, hopper(first=(at, 0, 0, at + later), second=(at, 0, 0, at + later))
            )
        assert found == [(0, 0)] * 2
    assert nvml.samples_held(machine.fleet) == 4


def test_samples_of_counters_are_freed_with_their_instance(machine: Machine) -> None:
    gpu = hopper()
    for second in range(3):
        uses(machine, hopper(first=(0, 0, 0, second), second=(0, 0, 0, second)))
    gpu.instances = gpu.instances[:1]
    machine.has(gpu).sample()
    assert nvml.samples_held(machine.fleet) == 2


def test_samples_of_counters_are_freed_before_nvml_is_closed(machine: Machine) -> None:
    for second in range(3):
        uses(machine, hopper(first=(0, 0, 0, second), second=(0, 0, 0, second)))
    machine.tell("release")
    assert nvml.times_open(machine.fleet) == nvml.samples_held(machine.fleet) == 0
    assert uses(machine, hopper()) == UNKNOWN, "it begins anew"
    assert nvml.samples_held(machine.fleet) == 2


def test_xid_errors_are_reported_once_each(machine: Machine) -> None:
    first, second = gpus(2)
    first.xids = [(1, 31)]
    machine.has(first, second)
    assert [s["xids"] for s in machine.sample()] == [[], []]  # it was before we listened
    first.xids, second.xids = [(1, 31), (2, 13), (3, 79)], [(1, 48)]
    assert [s["xids"] for s in machine.has(first, second).sample()] == [[13, 79], [48]]
    assert [s["xids"] for s in machine.sample()] == [[], []]


def test_unsupported_readings_stay_empty(machine: Machine) -> None:
    first, second = gpus(2)
    first.use = second.use = (50, 20)
    machine.tell(f"watch {first.uuid} {second.uuid}")
    for call in READINGS:
        machine.has(replace(first, fails={call: nvml.NOT_SUPPORTED}), second).sample(60)
        seen = by_uuid(machine.sample(60))
        assert [seen[gpu.uuid]["error"] for gpu in (first, second)] == ["", ""], call
        assert None not in seen[second.uuid].values()
        missing = {name for name, value in seen[first.uuid].items() if value is None}
        assert len(missing) <= 2, call
    assert missing == set()  # the last was MIG, which few devices support


def test_old_driver_still_reports_use(machine: Machine) -> None:
    (gpu,) = gpus(1)
    gpu.use, gpu.xids = (50, 20), [(1, 79)]
    machine.has(gpu, fails=dict.fromkeys(READINGS[1:], nvml.FUNCTION_NOT_FOUND))
    (sample,) = machine.sample()
    assert (sample["use"], sample["used_bytes"], sample["error"]) == (50, None, "")
    machine.begin().has(gpu, fails={"nvmlEventSetCreate": nvml.FUNCTION_NOT_FOUND})
    assert [(s["use"], s["xids"], s["error"]) for s in machine.sample()] == [(50, [], "")]


def test_lost_gpu_hides_no_other_and_recovers(machine: Machine) -> None:
    first, second = gpus(2)
    machine.has(first, second).sample()
    for call in ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", *READINGS[:2]):
        machine.has(replace(first, fails={call: nvml.GPU_IS_LOST}), replace(second, use=(9, 9)))
        seen = by_uuid(machine.sample())
        assert "The GPU is lost, it fell off the bus" in seen[first.uuid]["error"], call
        assert (seen[second.uuid]["use"], seen[second.uuid]["error"]) == (9, "")
        assert [sample["error"] for sample in machine.has(first, second).sample()] == ["", ""], call


def test_device_returning_at_another_index_keeps_its_uuid(machine: Machine) -> None:
    first, second = gpus(2)
    first.use, second.use = (11, 0), (22, 0)
    machine.has(first, second).sample()
    seen = by_uuid(machine.has(second).sample())
    assert seen[first.uuid]["error"] == "NVML no longer lists it."
    assert (seen[second.uuid]["use"], seen[second.uuid]["index"]) == (22, 0)
    seen = by_uuid(machine.has(second, first).sample())
    assert (seen[first.uuid]["use"], seen[first.uuid]["index"], seen[first.uuid]["error"]) == (
        *(11, 1),
        "",
    )
    assert seen[second.uuid]["use"] == 22


def test_sampler_reopens_a_driver_that_was_missing_or_closed(machine: Machine) -> None:
    assert "driver is not loaded" in str(machine.sample())
    (gpu,) = gpus(1)
    assert len(by_uuid(machine.has(gpu).sample())) == 1
    machine.tell("close")
    assert [sample["error"] for sample in machine.sample()] == [""]
    assert statuses(machine.look()) == {gpu.uuid: "ok"}
    assert nvml.times_open(machine.fleet) == 1


def test_lost_device_is_sick_also_under_a_new_index(
    machine: Machine, make: Make, clock: Clock
) -> None:
    """From the samples to the verdict; nonsense of one reading is nothing."""
    services = make(**RATE)
    signs: dict[str, SymptomWindow] = {}

    def look(seconds: int) -> dict[str, str]:
        for _ in range(seconds):
            for sample in machine.sample():
                fields = {"uuid", "index", "celsius", "ecc_errors", "error"}
                values = {name: value for name, value in sample.items() if name in fields}
                values["xids"] = tuple(sample["xids"])
                its = signs.setdefault(sample["uuid"], SymptomWindow())
                its.add([Sample(at=machine.now, **values)])
        found = {uuid: FoundSymptoms(its.look(), its.going_on) for uuid, its in signs.items()}
        for its in signs.values():
            its.judged()
        return {change.uuid: change.event for change in services.health.judge_health(found)}

    first, second = gpus(2)
    machine.has(first, second)
    assert look(3) == {}
    machine.has(replace(first, use=(4_000_000, 0)), second)  # nonsense
    assert look(5) == {}
    machine.has(first, replace(second, fails={"nvmlDeviceGetMemoryInfo": nvml.GPU_IS_LOST}))
    assert look(40) == {second.uuid: "sick"}
    machine.has(second, first)  # it is back, and first now
    assert look(5) == {}
    clock.forward(minutes=10)
    assert look(3) == {second.uuid: "probe"}
