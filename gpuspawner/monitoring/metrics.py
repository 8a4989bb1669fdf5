"""Metrics for Prometheus: devices, leases, credits, the queue and what containers use.

The labels ``gpu``, ``UUID`` and ``modelName`` are those of NVIDIA's dcgm-exporter, so that its
series and ours can be joined; ``group`` is the lease's group. What containers use is by
``environment``: by member or session there would be more series than Prometheus can keep.

All figures come from the store, so they are right after a restart of any part. What grows for years
is read from totals.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from tornado import web

from ..core.errors import NotAllowed
from ..core.scopes import READ_METRICS
from ..core.units import MICRO
from ..devices.closures import GRANTING, HEALTH, LEAK, Closure, kept_for
from ..devices.models import Device
from ..devices.repository import StoredHealth
from ..leases.host_resources import UNLIMITED
from ..leases.models import Lease, LeaseState
from ..ledger import rules as ledger_rules
from ..ledger.totals import SystemTotals, TotalUse
from ..services import Services
from ..web.base import Duty, ServiceHandler
from .health import FINE, SICK, WATCH
from .models import DeviceUse

_CONTAINERS = (
    ("cpu_seconds", "Seconds of CPU time that containers used"),
    ("disk_read_bytes", "Bytes that containers read from disks"),
    ("disk_written_bytes", "Bytes that containers wrote to disks"),
    ("network_received_bytes", "Bytes that containers received from networks"),
    ("network_sent_bytes", "Bytes that containers sent to networks"),
    ("memory_kills", "How often the system ended a program because memory was used up"),
)
"""The figures of EnvironmentUse, and what they are."""
VERDICTS = (FINE, WATCH, SICK)
LABELS = ("gpu", "UUID", "modelName", "group")

_GAUGES: tuple[tuple[str, str, Callable[[DeviceUse], float | None]], ...] = (
    (
        "use_percent",
        "Percent of the last minute in which kernels ran; absent for a MIG instance before Hopper",
        lambda minute: minute.use,
    ),
    (
        "busy_ratio",
        "Share of the last minute in which the GPU worked, as far as that is known",
        lambda minute: minute.busy / minute.known if minute.known else None,
    ),
    (
        "memory_used_bytes",
        "Most bytes of memory in use at once in the last minute",
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
        "Compute processes without a lease in the last minute",
        lambda minute: minute.strangers if minute.known else None,
    ),
    (
        "answers",
        "1 if the GPU answered throughout the last minute, else 0",
        lambda minute: float(not minute.error),
    ),
)


def of_devices(
    devices: Iterable[Device], minutes: Mapping[str, DeviceUse], leases: Collection[Lease]
) -> Iterator[Metric]:
    """Yield every gauge of every sampled device."""
    groups = {uuid: lease.group for lease in leases for uuid in lease.uuids}
    found = [
        ([*_labels(device), groups.get(device.uuid, "")], minutes[device.uuid])
        for device in devices
        if device.uuid in minutes
    ]
    for name, what, read in _GAUGES:
        values = ((labels, read(minute)) for labels, minute in found)
        known = [(labels, value) for labels, value in values if value is not None]
        yield _gauges(f"device_{name}", what, LABELS, known)
    yield _gauges(
        "device_xid",
        "Errors (Xid) that the driver reported in the last minute",
        (*LABELS, "xid"),
        (([*labels, str(xid)], 1) for labels, minute in found for xid in minute.xids),
    )


def of_health(devices: Iterable[Device], known: Mapping[str, StoredHealth]) -> Iterator[Metric]:
    """Yield the health of each device that was ever judged, and the causes of sick ones."""
    found = [(_labels(it), known[it.uuid].state) for it in devices if it.uuid in known]
    yield _gauges(
        "device_health",
        "0: fine, 1: on watch, 2: sick, so that it gets no new leases",
        LABELS[:3],
        ((labels, VERDICTS.index(state.verdict)) for labels, state in found),
    )
    yield _gauges(
        "device_sick",
        "1 for each sick GPU, by cause",
        (*LABELS[:3], "cause"),
        (([*labels, state.cause], 1) for labels, state in found if state.verdict == SICK),
    )
    yield _gauges(
        "device_falls",
        "How often it fell sick, each time within a day of the one before",
        LABELS[:3],
        ((labels, state.falls) for labels, state in found),
    )


def of_drains(closed: Mapping[str, Closure]) -> Metric:
    """Return how many devices get no new leases, by reason."""
    actors = Counter(
        each.actor if each.actor in (HEALTH, LEAK) else "admin"
        for uuid, each in closed.items()
        if uuid != GRANTING and kept_for(each) is None
    )
    what = "GPUs that get no new leases, by reason"
    counts = (([reason], actors[reason]) for reason in (HEALTH, LEAK, "admin"))
    return _gauges("devices_drained", what, ["reason"], counts)


def _labels(device: Device) -> list[str]:
    return [str(device.index), device.uuid, device.model]


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    what: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    family = kind(f"gpuspawner_{name}", what, labels=labels)
    for named, value in values:
        family.add_metric(named, value)
    return family


_gauges, _counters = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)


NO_SCOPE = (
    f"The metrics are for admins and for users with the scope {READ_METRICS}: give a role with it "
    "to the service that reads them."
)


@dataclass(eq=False)
class HubCollector(Collector):
    """All metrics of one site. Blocks: use :meth:`gpuspawner.services.Services.run`."""

    services: Services
    rounds: Mapping[str, int] = field(default_factory=dict)
    """Finished rounds of each of the service's duties, by name."""
    duties: Mapping[str, Duty] = field(default_factory=dict)
    """The state of each of the service's duties, by name."""

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format. Raises StoreUnavailable."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        text: bytes = generate_latest(registry)
        return text

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector queries nothing."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, read now."""
        now = self.services.clock()
        moved, used, opened = self.services.reports.until_now()
        yield from self._credits(moved, opened)
        yield from self._leases(used, opened)
        yield self._use(used, opened, now)
        yield from self._jobs()
        yield from self._devices(opened)
        yield from self._containers()
        yield from self._host()
        yield from self._line(used.waits, now)
        yield _gauge(
            "charge_lag_seconds",
            "Longest time for which a running lease has not been charged",
            max((_uncharged(lease, now) for lease in opened), default=0.0),
        )
        yield _gauge(
            "clock_step_seconds",
            "By how much the wall clock was set without the service's times following it",
            self.services.time.step.total_seconds(),
        )
        yield from self._duties()

    def _duties(self) -> Iterator[Metric]:
        yield _counters(
            "duty_rounds",
            "Finished rounds of each duty of the accounting service since it started",
            ["duty"],
            (([_label(duty)], count) for duty, count in sorted(self.rounds.items())),
        )
        duties = [([_label(name)], duty) for name, duty in sorted(self.duties.items())]
        yield _gauges(
            "duty_running",
            "1 while a duty of the accounting service runs, 0 between a failure and its restart",
            ["duty"],
            ((labels, float(duty.is_running)) for labels, duty in duties),
        )
        yield _counters(
            "duty_failures",
            "Failures of each duty of the accounting service, after which it was started again",
            ["duty"],
            ((labels, duty.failures) for labels, duty in duties),
        )

    def _credits(self, moved: SystemTotals, opened: Collection[Lease]) -> Iterator[Metric]:
        for name, what, total in (
            ("granted", "Credits that were given to members and groups", moved.granted),
            ("taken", "Credits that admins took back, or that expired", moved.taken),
            ("charged", "Credits that GPU time cost, before refunds", moved.charged),
            ("refunded", "Credits that came back for GPU time", moved.refunded),
        ):
            yield CounterMetricFamily(f"gpuspawner_credits_{name}", what, total / MICRO)
        held = sum(lease.held for lease in opened)
        yield _gauge("credits_held", "Credits on hold for open leases", held / MICRO)
        yield _gauge("credits_balance", "Credits on all accounts together", moved.left / MICRO)

    def _leases(self, used: TotalUse, opened: Collection[Lease]) -> Iterator[Metric]:
        states = Counter(lease.state for lease in opened)
        counts = (([x.value], states[x]) for x in (LeaseState.GRANTED, LeaseState.RUNNING))
        yield _gauges("leases", "Open leases", ["state"], counts)
        ended = (([outcome or "stopped"], count) for outcome, count in sorted(used.ended.items()))
        what = "Leases that ended, by outcome"
        yield _counters("leases_ended", what, ["outcome"], ended)

    def _use(self, used: TotalUse, opened: Collection[Lease], now: datetime) -> Metric:
        seconds = defaultdict(float, used.seconds)
        for lease in opened:
            lasted = (now - lease.started_at).total_seconds() if lease.started_at else 0.0
            for device in lease.devices if lease.started_at else ():
                seconds[device.model, lease.group] += max(0.0, lasted) * float(device.equivalent)
        what, labels = "Seconds of leased GPUs", ["model", "group"]
        return _counters("gpu_seconds", what, labels, sorted(seconds.items()))

    def _jobs(self) -> Iterator[Metric]:
        found = sorted(self.services.reports.use_of_all_jobs().items())
        if not found:  # as without a cluster
            return
        yield _counters(
            "batch_gpu_seconds",
            "GPU-seconds of batch jobs of the cluster, as far as they were read",
            ["model"],
            (([model], used.seconds) for model, used in found),
        )
        yield _counters(
            "batch_jobs",
            "Batch jobs of the cluster that had a GPU",
            ["model"],
            (([model], used.jobs) for model, used in found),
        )

    def _devices(self, opened: Collection[Lease]) -> Iterator[Metric]:
        overview = self.services.monitoring.overview()
        counts = Counter((view.device.model, view.state) for view in overview.devices)
        what, labels = "GPUs by state", ["model", "state"]
        yield _gauges("devices", what, labels, sorted(counts.items()))
        yield _gauge("devices_seen", "1 when the GPUs can be seen", not overview.error)
        devices = [view.device for view in overview.devices]
        yield from of_devices(devices, self.services.monitoring.use_now(), opened)
        yield from of_health(devices, self.services.health.device_states())
        yield of_drains(self.services.devices.closures())

    def _containers(self) -> Iterator[Metric]:
        used = self.services.resources.use_of_environments()
        memory = self.services.resources.memory_in_use()
        yield _gauges(
            "container_memory_bytes",
            "Bytes of memory in use by containers when they were last measured",
            ["environment"],
            (([name], size) for name, size in sorted(memory.items())),
        )
        for figure, what in _CONTAINERS:
            counts = (([name], getattr(each, figure)) for name, each in sorted(used.items()))
            yield _counters(f"container_{figure}", what, ["environment"], counts)

    def _host(self) -> Iterator[Metric]:
        budget = self.services.leases.budget
        if budget is None:
            return
        reserved, total = self.services.leases.host_reserved(), budget.total
        what = "of this machine that open leases and restarts have reserved"
        yield _gauge("host_memory_reserved_bytes", f"Bytes of memory {what}", reserved.memory_bytes)
        yield _gauge("host_cpus_reserved", f"CPU cores {what}", reserved.milli_cpus / 1000)
        what = "that leases may reserve together"
        if total.memory_bytes != UNLIMITED:
            yield _gauge("host_memory_budget_bytes", f"Bytes of memory {what}", total.memory_bytes)
        if total.milli_cpus != UNLIMITED:
            yield _gauge("host_cpus_budget", f"CPU cores {what}", total.milli_cpus / 1000)

    def _line(self, waits: Sequence[float], now: datetime) -> Iterator[Metric]:
        waiting = self.services.queue.waiting()
        yield _gauge("queue_length", "Tickets that wait", len(waiting))
        oldest = max((now - ticket.created_at for ticket in waiting), default=timedelta())
        yield _gauge(
            "queue_oldest_seconds",
            "How long the oldest ticket in the queue has waited",
            max(0.0, oldest.total_seconds()),
        )
        parts = (0.5, 0.9, 1.0) if waits else ()
        yield _gauges(
            "queue_wait_seconds",
            "How long the tickets granted in the last 24 hours had waited",
            ["quantile"],
            (([f"{part:g}"], waits[round(part * (len(waits) - 1))]) for part in parts),
        )


def _label(duty: str) -> str:
    """Return a duty's name as a label: ``idle_gpus``."""
    return duty.lower().replace("'", "").replace(" ", "_")


def _uncharged(lease: Lease, now: datetime) -> float:
    """Return how many seconds of a running lease are not charged yet; 0 if its account is dry."""
    if lease.rate <= 0 or lease.warned_at is not None:
        return 0.0
    return ledger_rules.charge_due(lease, now) * 3600 / lease.rate


def _gauge(name: str, what: str, value: float) -> Metric:
    family: Metric = GaugeMetricFamily(f"gpuspawner_{name}", what, value)
    return family


class MetricsHandler(ServiceHandler):
    """``metrics``, for Prometheus."""

    for_services = True

    def get_login_url(self) -> str:
        """Refuse with 403 instead of redirecting to a login page."""
        raise web.HTTPError(403) from NotAllowed(NO_SCOPE)

    @web.authenticated
    async def get(self) -> None:
        """Return all metrics of the site."""
        if not self.reach(READ_METRICS).everybody:
            raise web.HTTPError(403) from NotAllowed(NO_SCOPE)
        site: HubCollector = self.application.settings.setdefault(
            "metrics", HubCollector(self.services, self.context.rounds, self.context.duties)
        )
        text = await self.read(site.text)
        self.set_header("Content-Type", CONTENT_TYPE_LATEST)
        self.finish(text)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer an error as plain text."""
        _, sentence = self.sentence(status_code, **kwargs)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{sentence}\n")


HANDLERS = [("metrics", MetricsHandler)]
