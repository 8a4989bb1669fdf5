"""The cluster, and reports of use and of utilization, as JSON."""

from __future__ import annotations

from datetime import date
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from ..leases.host_resources import UNLIMITED, HostAmount, HostSnapshot
from ..web.schemas import (
    Amount,
    Answer,
    Count,
    DatedAnswer,
    Instant,
    Number,
    amount,
    described,
    told,
)

WholeSeconds = Annotated[Count, BeforeValidator(int)]

GPUHours = Annotated[
    int,
    PlainSerializer(lambda micros: amount(micros // 3600)),
    described("Hours of one GPU, rounded down.", pattern=r"^[0-9]+\.[0-9]{6}$"),
]
"""Microseconds of one GPU."""

# The cluster.


class ClusterDeviceAnswer(Answer):
    """A device and what it does, as far as this reader may know."""

    uuid: str = told("device.uuid")
    index: int = told("device.index")
    model: str = told("device.model")
    memory_bytes: Count = told("device.memory_bytes")
    state: str = told("view.state")
    slots: Count = told("device.slots", description="1 if it is not shared.")
    free_slots: Count = told("view.free_slots", description="How many could be granted now.")
    reserved_for: tuple[str, ...] = told(
        "device.reserved_for", description="The groups it is kept for; empty if it is open to all."
    )
    lent: bool = told("device.lent", description="Whether preemptible runs of others may use it.")
    mine: bool
    user: str | None
    server: str | None
    since: Instant | None
    use_percent: Number | None = told("doing.use")
    busy: bool | None = told("doing.busy")
    memory_used_bytes: Count | None = told("doing.used_bytes")
    temperature_celsius: int | None = told("doing.celsius")
    power_watts: Number | None = told("doing.watts")
    health: str
    note: str


class HostAmountAnswer(Answer):
    """Memory and CPU cores; null for what has no budget."""

    memory_bytes: Count | None
    cpus: Number | None


class HostAnswer(Answer):
    """The memory and CPU cores of the hub's machine that servers share."""

    budget: HostAmountAnswer = Field(description="For all servers together.")
    reserved: HostAmountAnswer = Field(description="What servers and runs are guaranteed.")
    left: HostAmountAnswer = Field(description="What a start with a GPU may still have.")
    left_without_gpu: HostAmountAnswer = Field(
        description="What a start without a GPU may still have: less, if free GPUs keep some."
    )

    @classmethod
    def of_snapshot(cls, host: HostSnapshot) -> HostAnswer:
        """Return the answer about a budget."""
        total = host.budget.total

        def of(amount: HostAmount) -> HostAmountAnswer:
            return HostAmountAnswer(
                memory_bytes=None if total.memory_bytes == UNLIMITED else amount.memory_bytes,
                cpus=None if total.milli_cpus == UNLIMITED else amount.milli_cpus / 1000,
            )

        return cls(
            budget=of(total),
            reserved=of(host.reserved),
            left=of(host.left(has_devices=True)),
            left_without_gpu=of(host.left(has_devices=False)),
        )


class ClusterAnswer(DatedAnswer):
    seen: bool
    total: Count
    free: Count
    waiting: Count
    host: HostAnswer | None = Field(description="null without a budget of memory or CPU cores.")
    devices: tuple[ClusterDeviceAnswer, ...]


# Reports.


class NamedAnswer(Answer):
    name: str


class ReportAnswer(Answer):
    """A report of some days of the hub's own zone, both counted."""

    by: str
    first_day: date = told("first")
    last_day: date = told("last")


class JobUseAnswer(Answer):
    gpu_seconds: Count
    gpu_hours: GPUHours = told("micros")
    credits: Amount = told("cost")
    jobs: Count = told("sessions")


class ResourceSumAnswer(Answer):
    """Of the sessions that started in the period, from start to end; null if not measured."""

    cpu_seconds: Number | None
    memory_peak_bytes: Count | None = Field(description="The most that one session used.")


class UseAnswer(Answer):
    gpu_seconds: Count = told("use.gpu_seconds")
    gpu_hours: GPUHours = told("use.micros")
    credits: Amount = told("use.cost")
    sessions: Count = told("use.sessions")
    batch: JobUseAnswer
    resources: ResourceSumAnswer


class NamedUseAnswer(UseAnswer, NamedAnswer):
    """One row of the report: its name and its use."""


class UsageAnswer(ReportAnswer):
    start: Instant = told("start", name="from")
    end: Instant = told("end", name="to")
    as_of: Instant
    rows: tuple[NamedUseAnswer, ...]
    total: UseAnswer


class UtilizationAnswer(Answer):
    """How much of what was held was used, as far as that was measured."""

    sessions: Count
    held_gpu_seconds: WholeSeconds = told("held")
    measured_gpu_seconds: WholeSeconds = told("measured")
    used_gpu_seconds: WholeSeconds = told("busy")
    rested_gpu_seconds: WholeSeconds = told("rested")


class NamedUtilizationAnswer(UtilizationAnswer, NamedAnswer):
    """One row of the report: its name, and how much of the held GPU time was used."""


class RestedSessionAnswer(Answer):
    """A session, and how its GPUs were used."""

    lease: str = told("lease_id")
    user: str = told("server.user")
    server: str = told("server.name")
    group: str
    model: str
    devices: Count
    started_at: Instant = told("since")
    ended_at: Instant | None = told("until")
    held_gpu_seconds: WholeSeconds = told("held")
    measured_gpu_seconds: WholeSeconds = told("measured")
    used_gpu_seconds: WholeSeconds = told("busy")
    rested_gpu_seconds: WholeSeconds = told("rested")


class JobTimeAnswer(Answer):
    held_gpu_seconds: Count


class UsedAnswer(ReportAnswer):
    """Report how much of the held GPU time was used, and the sessions that were idle most."""

    as_of: Instant
    rows: tuple[NamedUtilizationAnswer, ...]
    total: UtilizationAnswer
    batch: JobTimeAnswer
    most_rested: tuple[RestedSessionAnswer, ...] = told("sessions")
