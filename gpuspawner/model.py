"""The nouns of gpuspawner as frozen values. Nothing here does I/O or reads a clock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

MICRO = 1_000_000
"""Microcredits in one credit. All amounts are whole microcredits."""


class DeviceStatus(str, Enum):
    """What the device source last saw, before any lease is considered."""

    OK = "ok"
    UNKNOWN = "unknown"
    """Not answering, or gone since the last look. Never free."""
    DRAINED = "drained"
    """Whoever gives out its machine gives out nothing more of it; what is on it goes on."""
    PARENT = "parent"
    """A GPU in MIG mode: its instances are leased, never the GPU itself."""


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on a device, as the host sees it."""

    pid: int
    used_memory_bytes: int | None = None
    kind: str = "compute"
    """``compute`` or ``graphics``; only a compute process occupies a device."""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU or MIG instance. The UUID names it; the index is for people to read."""

    uuid: str
    index: int
    model: str
    memory_bytes: int
    pci_bus_id: str = ""
    parent_uuid: str | None = None
    compute_mode: str = "default"
    """``default``, ``exclusive_process`` or ``prohibited``."""
    slots: int = 1
    status: DeviceStatus = DeviceStatus.OK
    reason: str = ""
    """Why the status is not ``ok``, in words; of one that is, what else is to be known of it, such
    as that its machine is off until it is needed."""
    processes: tuple[DeviceProcess, ...] = ()
    held_bytes: int = 0
    """Memory that is held though no process is listed that could hold it, roughly; what a driver
    takes for itself is 0."""

    @property
    def compute_processes(self) -> tuple[DeviceProcess, ...]:
        """The processes that count as use of the device."""
        return tuple(p for p in self.processes if p.kind == "compute")

    @property
    def empty(self) -> bool:
        """Whether nothing of anybody's is on it."""
        return not self.held_bytes and not self.compute_processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a device source saw in one look at the machine."""

    devices: tuple[Device, ...]
    observed_at: datetime
    source: str = "nvml"
    """``nvml`` or ``simulated``."""
    driver_version: str = ""
    cuda_version: str = ""
    links: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Closeness of two devices, keyed by their UUIDs in sorted order. Greater is closer;
    a pair that is absent counts as 0. See :mod:`gpuspawner.devices.base` for the scale."""
    error: str = ""
    """Why nothing could be seen (NVML lost). Empty when the look succeeded."""


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


class Place(NamedTuple):
    """A slot on a device."""

    uuid: str
    slot: int = 0

    @property
    def text(self) -> str:
        """As one word, for whoever makes sets of very many: ``UUID:slot``."""
        return f"{self.uuid}:{self.slot}"

    @classmethod
    def from_text(cls, text: str) -> Place:
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
class Ticket:
    """A request that waits. It keeps its place across restarts of everything."""

    id: str
    server: ServerRef
    request: Request
    options: Mapping[str, object] = field(default_factory=dict)
    """The member's choices, to start the server with after a restart of the hub."""
    engine: str = ""
    account: str = ""
    group: str = ""
    seconds: int | None = None
    """Session length that was asked for; None when there is no end."""
    priority: int = 0
    boost: float = 0.0
    position: int | None = None
    last: bool = False
    """Behind everybody else, after a second no-show."""
    version: int = 1
    """Grows with every change by whomever; so that a process sees what another one changed."""
    created_at: datetime
    ended_at: datetime | None = None
    outcome: str = ""
    """Empty while it waits; then ``granted``, ``cancelled``, ``expired``, ``refused``,
    ``replaced`` or ``member_gone``."""
    end_reason: str = ""
    lease_id: str | None = None
    when_dry: str = "stop"
    """As in :class:`Lease`, and so the next."""
    overdraft: int = 0


class NoticeKind(str, Enum):
    """What a member can be told of."""

    TURN = "turn"
    """Your server starts: it was your turn."""
    TICKET_ENDED = "ticket_ended"
    """Your place in line is gone, and why."""
    SESSION_ENDS = "session_ends"
    """Your session ends soon."""
    STOPPED = "stopped"
    """Your server was stopped, and why."""
    CREDITS_LOW = "credits_low"
    """Your credits run low."""
    GPU_SICK = "gpu_sick"
    """A GPU of your server is sick."""
    DISK_LOW = "disk_low"
    """Your server has little room left in its own container."""
    TEST = "test"
    """A message that the member asked for, to try the channels; nothing to choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that a member is told, once for each ``key``."""

    key: str
    user: str
    kind: NoticeKind
    title: str
    body: str
    at: datetime
    id: int = 0
    sent_at: datetime | None = None
    tries: int = 0
    error: str = ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Whose credits. ``balance`` is the sum of the account's postings."""

    name: str
    """``member:NAME``, ``group:NAME`` or ``system:NAME``."""
    balance: int = 0
    held: int = 0
    """Set aside by open leases."""

    @property
    def available(self) -> int:
        return self.balance - self.held


def member_account(user: str) -> str:
    """The account name of a member."""
    return f"member:{user}"


_WORD = re.compile(r"[a-z]{2,}(?=\d)|[a-z0-9]+")


@lru_cache(maxsize=1024)
def model_words(model: str) -> tuple[str, ...]:
    """A model's name as words: split at anything but letters and digits, and before the
    number of a series (RTX4090 is RTX 4090), but not inside a model such as A100 or 80GB."""
    return tuple(_WORD.findall(model.lower()))


def model_matches(pattern: str, model: str) -> bool:
    """Whether each word of ``pattern`` is a word of the model's name, compared without case.

    ``a100`` and ``A100-80GB`` match ``NVIDIA A100-SXM4-80GB``; ``RTX4090`` matches
    ``NVIDIA GeForce RTX 4090``. Parts of words do not count: ``A10`` is no A100 and ``L40``
    no L40S.
    """
    return set(model_words(pattern)) <= set(model_words(model))


def parse_credits(text: str | int | float) -> int:
    """``"12.5"`` to whole microcredits.

    Raises ValueError when the text is no decimal number or has more than six decimals.
    """
    try:
        micro = Decimal(str(text).strip()) * MICRO
        whole = int(micro)
    except (ArithmeticError, ValueError):
        raise ValueError(f"{text!r} is not an amount of credits: write it like 12.5") from None
    if whole != micro:
        raise ValueError(f"{text!r} has more than six decimals")
    return whole


def format_credits(micro: int, places: int = 2) -> str:
    """Whole microcredits to a decimal string, rounded down to ``places`` decimals (0 to 6)."""
    step = 10 ** (6 - places)
    units = micro // step
    sign, units = ("-", -units) if units < 0 else ("", units)
    if not places:
        return f"{sign}{units}"
    return f"{sign}{units // 10**places}.{units % 10**places:0{places}d}"
