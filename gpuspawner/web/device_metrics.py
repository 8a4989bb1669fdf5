"""The metrics of single GPUs: what each did in the last minute.

The labels ``gpu``, ``UUID`` and ``modelName`` are those of NVIDIA's dcgm-exporter, so that its
series and ours can be joined; ``group`` is that of the lease.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from ..model import Device, Lease
from ..store.closures import GRANTING, HEALTH, LEAK, Closure, kept_for
from ..store.health import Known
from ..telemetry import DeviceUse
from ..telemetry.health import FINE, SICK, WATCH

VERDICTS = (FINE, WATCH, SICK)
LABELS = ("gpu", "UUID", "modelName", "group")

_GAUGES: tuple[tuple[str, str, Callable[[DeviceUse], float | None]], ...] = (
    (
        "use_percent",
        "Percent of the last minute in which kernels ran; none of a MIG instance",
        lambda minute: minute.use,
    ),
    (
        "busy_ratio",
        "Part of the last minute, as far as it is known, in which the GPU worked",
        lambda minute: minute.busy / minute.known if minute.known else None,
    ),
    (
        "memory_used_bytes",
        "Bytes of memory in use at most in the last minute",
        lambda minute: minute.memory_max if minute.known else None,
    ),
    ("power_watts", "Mean power in the last minute", lambda minute: minute.watts),
    (
        "temperature_celsius",
        "Highest temperature in the last minute",
        lambda minute: minute.celsius_max,
    ),
    (
        "strangers",
        "Compute processes of no lease in the last minute",
        lambda minute: minute.strangers if minute.known else None,
    ),
    (
        "answers",
        "0 when the GPU did not answer throughout the last minute",
        lambda minute: float(not minute.error),
    ),
)


def of_devices(
    devices: Iterable[Device], minutes: Mapping[str, DeviceUse], leases: Collection[Lease]
) -> Iterator[Metric]:
    """Every gauge of every device that is sampled."""
    groups = {uuid: lease.group for lease in leases for uuid in lease.uuids}
    found = [(device, minutes[device.uuid]) for device in devices if device.uuid in minutes]
    for name, what, read in _GAUGES:
        family = GaugeMetricFamily(f"gpuspawner_device_{name}", what, labels=LABELS)
        for device, minute in found:
            if (value := read(minute)) is not None:
                family.add_metric(_labels(device, groups), value)
        yield family
    family = GaugeMetricFamily(
        "gpuspawner_device_xid",
        "Errors (Xid) that the driver reported in the last minute",
        labels=(*LABELS, "xid"),
    )
    for device, minute in found:
        for xid in minute.xids:
            family.add_metric([*_labels(device, groups), str(xid)], 1)
    yield family


def of_health(devices: Iterable[Device], known: Mapping[str, Known]) -> Iterator[Metric]:
    """How each device is that was ever judged, and what sick ones are sick with."""
    verdicts = GaugeMetricFamily(
        "gpuspawner_device_health",
        "0: fine, 1: on watch, 2: sick, and given to nobody new",
        labels=LABELS[:3],
    )
    causes = GaugeMetricFamily(
        "gpuspawner_device_sick", "1: sick, and for which cause", labels=(*LABELS[:3], "cause")
    )
    falls = GaugeMetricFamily(
        "gpuspawner_device_falls",
        "How often it fell sick, each time within a day of the one before",
        labels=LABELS[:3],
    )
    for device in devices:
        if device.uuid not in known:
            continue
        state, labels = known[device.uuid].state, _labels(device, {})[:3]
        verdicts.add_metric(labels, VERDICTS.index(state.verdict))
        falls.add_metric(labels, state.falls)
        if state.verdict == SICK:
            causes.add_metric([*labels, state.cause], 1)
    yield from (verdicts, causes, falls)


def of_drains(closed: Mapping[str, Closure]) -> Metric:
    """How many devices are given to nobody new, by why."""
    family = GaugeMetricFamily(
        "gpuspawner_devices_drained", "GPUs that are given to nobody new, by why", labels=["reason"]
    )
    actors = Counter(
        each.actor if each.actor in (HEALTH, LEAK) else "admin"
        for uuid, each in closed.items()
        if uuid != GRANTING and kept_for(each) is None
    )
    for reason in (HEALTH, LEAK, "admin"):
        family.add_metric([reason], actors[reason])
    return family


def _labels(device: Device, groups: Mapping[str, str]) -> list[str]:
    return [str(device.index), device.uuid, device.model, groups.get(device.uuid, "")]
