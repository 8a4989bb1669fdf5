"""Servers, requests and leases as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ServerRef:
    """One server of one member, as JupyterHub names it (``""`` is the default server)."""

    user: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.user}/{self.name}" if self.name else self.user


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a member asks for, after validation."""

    devices: int = 0
    environment: str = ""
    model: str | None = None
    """Part of a model's name, compared without case, such as ``A100``. None is any."""
    models: tuple[str, ...] = ()
    """Models that the environment runs on, each as above; empty is any."""
    memory_bytes: int = 0
    """Least memory of each device."""
    min_driver: str = ""
    """The oldest driver that the environment runs on; empty is any."""
    min_cuda: str = ""
    """The oldest CUDA version that the driver must offer; empty is any."""


class Slot(NamedTuple):
    """A slot on a device."""

    uuid: str
    slot: int = 0

    @property
    def text(self) -> str:
        """As one word, for whoever makes sets of very many: ``UUID:slot``."""
        return f"{self.uuid}:{self.slot}"

    @classmethod
    def from_text(cls, text: str) -> Slot:
        """The place that :attr:`text` names."""
        uuid, _, slot = text.rpartition(":")
        return cls(uuid, int(slot))


@dataclass(frozen=True, slots=True)
class LeasedDevice:
    """A place and what its device was when it was granted (kept for receipts)."""

    uuid: str
    slot: int
    index: int
    model: str
    memory_bytes: int


class LeaseState(str, Enum):
    """From grant to the proven end of the server."""

    GRANTED = "granted"
    """On disk; the server is not known to be up. Costs nothing."""
    RUNNING = "running"
    """The server answered or was adopted; it is charged from ``started_at``."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Devices granted to one server. A CPU-only server has a lease with no devices."""

    id: str
    server: ServerRef
    account: str
    environment: str
    devices: tuple[LeasedDevice, ...]
    rate: int
    """Microcredits per hour for the whole lease, fixed at the grant."""
    hold: int
    """Microcredits set aside at the grant."""
    charged: int = 0
    """Microcredits charged so far."""
    state: LeaseState = LeaseState.GRANTED
    engine: str = ""
    """``docker`` or ``local``: who can prove that the server is gone."""
    engine_ref: str = ""
    """The engine's own name for the server: container id, or ``pid:start time``."""
    engine_id: str = ""
    """Which engine runs the server (:meth:`DockerEngine.identity`); empty when not known. That
    another engine has no such server proves nothing."""
    granted_at: datetime
    started_at: datetime | None = None
    """When the engine started the server; None until it answered or was adopted."""
    answered_at: datetime | None = None
    """When it answered or was adopted: its session begins then."""
    seen_at: datetime | None = None
    """When the engine last proved the server alive."""
    ended_at: datetime | None = None
    end_reason: str = ""
    warned_at: datetime | None = None
    """When the member was first warned that the credits ran out."""
    group: str = ""
    """Whose share and limits it counts on beside the member's own."""
    seconds: int | None = None
    """Session length, from when the server answers; None when there is no end."""
    extended: int = 0
    """Seconds that were added to the session since."""
    told_minutes: float | None = None
    """The last warning of the session's end that was given, in minutes left."""
    ticket_id: str | None = None
    """The ticket that waited for it, if it had to."""
    claim_seconds: int | None = None
    """How long the server waits for its member to connect; None when it need not."""
    claimed_at: datetime | None = None
    """When the member connected."""
    outcome: str = ""
    """Why it is to end or has ended, in a word: ``""`` for as the member asked, ``no_show``,
    ``session_end``, ``admin``. One that is open still is stopped by the accounting service.
    ``lost``: it went down with its hub before its member came, whose ticket waits again.
    ``failed``: its start failed, and it cost nothing. ``credits``: its account ran dry.
    ``member_gone``: its member is none any more. ``idle``: its GPUs rested. ``restart``: it
    starts again with the same devices. ``disk``: it wrote too much into its own container."""
    when_dry: str = "stop"
    """What becomes of it when its account runs dry, fixed at the grant: ``stop`` after a grace,
    let its ``session`` end, or go on into an ``overdraft``."""
    overdraft: int = 0
    """Microcredits by which it may take its account below zero."""
    waived: int = 0
    """Microcredits that it owed at its end and that were not charged: beyond the overdraft."""
    refunded: int = 0
    """Microcredits of what was charged that an admin gave back; ``charged`` is less by them."""
    told_dry: float | None = None
    """The last warning that the credits run low which was given, in minutes left."""

    @property
    def up_since(self) -> datetime | None:
        """When the member could use the server; None before that."""
        return self.answered_at or self.started_at

    @property
    def length(self) -> timedelta | None:
        """The session length that was asked for; None when there is no end."""
        return None if self.seconds is None else timedelta(seconds=self.seconds)

    @property
    def ends_at(self) -> datetime | None:
        """The end of the session; before the server answers, the earliest that it can be."""
        if self.seconds is None:
            return None
        start = self.up_since or self.granted_at
        return start + timedelta(seconds=self.seconds + self.extended)

    @property
    def claim_by(self) -> datetime | None:
        """Until when the member must connect; None when they need not, or did."""
        if self.claim_seconds is None or self.claimed_at or not self.up_since:
            return None
        return self.up_since + timedelta(seconds=self.claim_seconds)

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(d.uuid for d in self.devices)

    @property
    def held(self) -> int:
        """Microcredits still set aside: the hold less what was charged, none once ended."""
        return 0 if self.state is LeaseState.ENDED else max(0, self.hold - self.charged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A server that an engine knows of and that carries a lease's id."""

    lease_id: str
    ref: str
    """The engine's own name for it: container id, or ``pid:start time``."""
    server: ServerRef
    alive: bool
    created_at: datetime | None = None
    started_at: datetime | None = None
    """When it was started, if the engine knows. These times are of the engine's wall clock."""
    ended_at: datetime | None = None
    """When it exited, if the engine knows."""
    detail: str = ""
    """Exit code or the like, for the log."""
    unknown: str = ""
    """Why nobody can say whether the lease's server is gone, in words; then ``alive`` is True."""
