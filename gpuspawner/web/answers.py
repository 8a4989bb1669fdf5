"""Answers of the REST API that several capabilities share or that combine several of them."""

from __future__ import annotations

from ..leases.models import LeaseState
from .schemas import Amount, Answer, Count, DatedAnswer, Instant, Seconds, told


class LeasedAnswer(Answer):
    uuid: str
    index: int
    model: str
    memory_bytes: Count


class LeaseAnswer(Answer):
    """A lease, and what it cost so far."""

    id: str = told("lease.id")
    user: str = told("lease.server.user")
    server: str = told("lease.server.name")
    account: str = told("lease.account")
    environment: str = told("lease.environment")
    state: LeaseState = told("lease.state")
    devices: tuple[LeasedAnswer, ...] = told("lease.devices")
    rate_per_hour: Amount = told("lease.rate")
    cost: Amount
    granted_at: Instant = told("lease.granted_at")
    started_at: Instant | None = told("lease.started_at")
    ended_at: Instant | None = told("lease.ended_at")
    end_reason: str = told("lease.end_reason")
    warned_at: Instant | None = told("lease.warned_at")
    stops_at: Instant | None
    ends_at: Instant | None = told("lease.ends_at")
    claim_by: Instant | None = told("lease.claim_by")
    group: str = told("lease.group")
    outcome: str = told("lease.outcome")
    charged: Amount = told("lease.charged")
    refunded: Amount = told("lease.refunded")
    waived: Amount = told("lease.waived")


class FundsAnswer(Answer):
    account: str = told("account.name")
    balance: Amount = told("account.balance")
    held: Amount = told("account.held")
    available: Amount = told("account.available")
    rate_per_hour: Amount = told("rate")
    lasts_seconds: Seconds | None = told("lasts")
    runs_dry_at: Instant | None = told("dry_at")


class EntryAnswer(Answer):
    """A line of a statement."""

    id: int
    transfer: str
    at: Instant
    kind: str
    actor: str
    reason: str
    amount: Amount
    balance: Amount
    lease: str | None = told("lease_id")


class ChangeAnswer(Answer):
    at: Instant
    actor: str
    action: str
    subject: str
    detail: str


class LeasesAnswer(DatedAnswer):
    leases: tuple[LeaseAnswer, ...]
    next: str | None


class MeAnswer(Answer):
    """All that is a member's own."""

    name: str
    admin: bool
    as_of: Instant
    account: FundsAnswer
    running: tuple[LeaseAnswer, ...]
    statement: tuple[EntryAnswer, ...]


class DeviceAnswer(Answer):
    """A device as everybody may see it."""

    uuid: str = told("view.device.uuid")
    index: int = told("view.device.index")
    model: str = told("view.device.model")
    memory_bytes: Count = told("view.device.memory_bytes")
    machine: str = told("view.machine")
    state: str = told("view.state")
    rate_per_hour: Amount = told("rate")
    mine: bool


class FullDeviceAnswer(DeviceAnswer):
    """A device as admins see it."""

    detail: str
    lease: str | None = told("view.lease_id")
    user: str | None = told("lease.server.user", None)


class DevicesAnswer(Answer):
    """All devices, and what can be said of their driver."""

    source: str
    seen: bool
    error: str
    driver_version: str
    cuda_version: str
    total: Count
    free: Count
    devices: tuple[FullDeviceAnswer | DeviceAnswer, ...]
