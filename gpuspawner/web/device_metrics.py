"""The metrics of single GPUs: what each did in the last minute.

The labels ``gpu``, ``UUID`` and ``modelName`` are those of NVIDIA's dcgm-exporter, so that its
series and ours can be joined; ``group`` is that of the lease.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from ..model import Device, Lease
from ..telemetry import DeviceUse

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


def _labels(device: Device, groups: Mapping[str, str]) -> list[str]:
    return [str(device.index), device.uuid, device.model, groups.get(device.uuid, "")]
