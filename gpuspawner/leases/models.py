"""Servers, requests and leases as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from fractions import Fraction
from typing import Any, NamedTuple

from ..core.units import DeviceCount
from .host_resources import HostAmount

RUN_PREFIX = "run:"
"""How the name of a run begins where servers are named; JupyterHub 6 allows no colon in those."""

YIELD_SECONDS = 120.0
"""Seconds within which preemptible runs yield their devices to others."""


class LeaseKind(str, Enum):
    """What a ticket or a lease is for."""

    SERVER = "server"
    """A server of the Hub's, which its member works in."""
    RUN = "run"
    """A notebook or a command that runs by itself; the Hub knows no server of it."""


@dataclass(frozen=True, slots=True)
class ServerRef:
    """One server of one member, as JupyterHub names it (``""`` is the default server).

    A run has a name of its own in the place of the server's: :meth:`of_run`.
    """

    user: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.user}/{self.name}" if self.name else self.user

    @classmethod
    def of_run(cls, user: str, run_id: str) -> ServerRef:
        """Return the name under which a run has its ticket and its lease."""
        return cls(user, RUN_PREFIX + run_id)

    @property
    def run_id(self) -> str:
        """The id of the run; empty for a server."""
        return self.name.removeprefix(RUN_PREFIX) if self.name.startswith(RUN_PREFIX) else ""

    @property
    def kind(self) -> LeaseKind:
        """Whether this is a server of the Hub's or a run."""
        return LeaseKind.RUN if self.run_id else LeaseKind.SERVER


SHARE = "share"
"""What a member writes in place of a number of devices, to ask for a share of one."""


class Sharing(str, Enum):
    """How much of each device a request asks for."""

    WHOLE = "whole"
    """The device alone: all slots of a shared one."""
    SLOT = "slot"
    """A share of a shared device: as many of its slots as come to the memory that is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a member asks for, after validation."""

    devices: int = 0
    environment: str = ""
    model: str | None = None
    """Part of a model's name, compared case-insensitively, such as ``A100``. None means any."""
    models: tuple[str, ...] = ()
    """Models that the environment supports, each as above; empty means any."""
    memory_bytes: int = 0
    """Minimum memory of each device, or of the share of one."""
    smallest: bool = False
    """True to take the smallest free devices that fit: the member asked for an amount of memory."""
    min_driver: str = ""
    """The oldest driver that the environment supports; empty means any."""
    min_cuda: str = ""
    """The oldest CUDA version that the driver must support; empty means any."""
    sharing: Sharing = Sharing.WHOLE
    groups: tuple[str, ...] = ()
    """Those of its member's groups that devices are reserved for, in order."""
    preemptible: bool = False
    """True to get also what others reserved and lend. Set only where devices are reserved."""
    host_memory_bytes: int = 0
    """Memory of the host that is guaranteed to the server."""
    host_milli_cpus: int = 0
    """Thousandths of a CPU core that are guaranteed to it."""

    @property
    def host(self) -> HostAmount:
        """What is guaranteed to the server of the host's memory and CPU."""
        return HostAmount(self.host_memory_bytes, self.host_milli_cpus)


NO_SLOT = -1
"""The number of a slot that no device has: where it is taken, the device is closed."""


class Slot(NamedTuple):
    """A slot on a device."""

    uuid: str
    slot: int = 0

    @classmethod
    def closure(cls, uuid: str) -> Slot:
        """Return what is taken while all slots of a device are closed to a request."""
        return cls(uuid, NO_SLOT)

    @property
    def text(self) -> str:
        """The slot as one string, ``UUID:slot``, for code that builds very large sets."""
        return f"{self.uuid}:{self.slot}"

    @classmethod
    def from_text(cls, text: str) -> Slot:
        """Parse the slot from :attr:`text`."""
        uuid, _, slot = text.rpartition(":")
        return cls(uuid, int(slot))


@dataclass(frozen=True, slots=True)
class LeasedDevice:
    """What is leased of a device, and its properties at the time of the grant, for receipts."""

    uuid: str
    slot: int
    """The first slot that the lease holds."""
    index: int
    model: str
    memory_bytes: int
    """Memory of the whole device."""
    slots: int = 1
    """How many slots the device has: 1 if it is not shared."""
    held_slots: int = 1
    """How many of them the lease holds."""
    part: DeviceCount = 1
    """How much of a GPU the device is: 1, or such as 1/7 for a MIG instance."""

    @property
    def is_shared(self) -> bool:
        """True if other leases may be on the device at the same time."""
        return self.held_slots < self.slots

    @property
    def share(self) -> DeviceCount:
        """How much of the device the lease holds: 1, or such as 1/4."""
        return Fraction(self.held_slots, self.slots) if self.is_shared else 1

    @property
    def equivalent(self) -> DeviceCount:
        """How much of a GPU the lease holds: 1/7 for a MIG instance, 1/4 for one of four slots."""
        return self.part * self.share

    @property
    def share_bytes(self) -> int:
        """The device's memory, divided equally among its slots."""
        return self.memory_bytes * self.held_slots // self.slots


class LeaseState(str, Enum):
    """A lease's state, from the grant to the proven end of its server."""

    GRANTED = "granted"
    """Written to disk; the server is not known to be up. Costs nothing."""
    RUNNING = "running"
    """The server responded or was adopted; it is charged from ``started_at``."""
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
    """``docker`` or ``local``: the engine that can prove that the server is gone."""
    engine_ref: str = ""
    """The engine's identifier of the server: container id, or ``pid:start time``."""
    engine_id: str = ""
    """The engine instance that runs the server (:meth:`DockerEngine.identity`); empty if unknown.

    That another engine does not know the server proves nothing.
    """
    granted_at: datetime
    started_at: datetime | None = None
    """When the engine started the server; None until the server responded or was adopted."""
    answered_at: datetime | None = None
    """When the server responded or was adopted: the session begins then."""
    seen_at: datetime | None = None
    """When the engine last proved the server alive."""
    ended_at: datetime | None = None
    end_reason: str = ""
    warned_at: datetime | None = None
    """When the member was first warned that their credits had run out."""
    group: str = ""
    """The group whose share and limits the lease counts against, besides the member's own."""
    seconds: int | None = None
    """Session length, from when the server responds; None if it has no end."""
    extended: int = 0
    """Seconds by which the session was extended."""
    told_minutes: float | None = None
    """The last warning given before the session's end, in minutes left."""
    ticket_id: str | None = None
    """The ticket that the lease was granted for, if the member had to wait."""
    claim_seconds: int | None = None
    """How long the server waits for its member to connect; None if they need not connect."""
    claimed_at: datetime | None = None
    """When the member connected."""
    outcome: str = ""
    """Why the lease is to end or has ended, as one word; ``""`` if the member stopped the server.

    The accounting service stops an open lease that has an outcome.

    * ``no_show``: nobody connected.
    * ``session_end``: its time was over.
    * ``admin``: an admin stopped it.
    * ``member``: its member stopped it, and it is a run: nobody asks the Hub to stop those.
    * ``lost``: it went down with its hub before its member came, whose ticket waits again.
    * ``failed``: its start failed, and it cost nothing.
    * ``credits``: its account ran dry.
    * ``member_gone``: its member lost their membership.
    * ``idle``: its GPUs were idle.
    * ``restart``: it restarts with the same devices.
    * ``disk``: it wrote too much into its own container.
    * ``preempted``: it is preemptible, and its devices went to a start that is not.
    """
    when_dry: str = "stop"
    """What happens when the account runs dry, fixed at the grant.

    ``stop`` after a grace period, let the ``session`` end, or continue into an ``overdraft``.
    """
    overdraft: int = 0
    """Microcredits by which the lease may take its account below zero."""
    waived: int = 0
    """Microcredits owed at the end but never charged, because they exceeded the overdraft."""
    refunded: int = 0
    """Microcredits that an admin refunded; ``charged`` is already reduced by them."""
    told_dry: float | None = None
    """The last warning of low credits that was given, in minutes left."""
    preemptible: bool = False
    """True if it yields its devices to every start that is not preemptible."""
    yields_at: datetime | None = None
    """When it is stopped because others get its devices; None if it need not yield."""
    host_memory_bytes: int = 0
    """Memory of the host that is reserved for it until it ends."""
    host_milli_cpus: int = 0
    """Thousandths of a CPU core that are reserved for it until it ends."""

    @property
    def host(self) -> HostAmount:
        """What is reserved for it of the host's memory and CPU."""
        return HostAmount(self.host_memory_bytes, self.host_milli_cpus)

    @property
    def up_since(self) -> datetime | None:
        """When the member could first use the server; None before that."""
        return self.answered_at or self.started_at

    @property
    def length(self) -> timedelta | None:
        """The requested session length; None if it has no end."""
        return None if self.seconds is None else timedelta(seconds=self.seconds)

    @property
    def ends_at(self) -> datetime | None:
        """The end of the session, or the earliest possible end before the server responds."""
        if self.seconds is None:
            return None
        start = self.up_since or self.granted_at
        return start + timedelta(seconds=self.seconds + self.extended)

    @property
    def claim_by(self) -> datetime | None:
        """The deadline for the member to connect; None if they need not or already did."""
        if self.claim_seconds is None or self.claimed_at or not self.up_since:
            return None
        return self.up_since + timedelta(seconds=self.claim_seconds)

    @property
    def uuids(self) -> tuple[str, ...]:
        """The UUIDs of the leased devices."""
        return tuple(d.uuid for d in self.devices)

    @property
    def device_count(self) -> DeviceCount:
        """How many devices it holds: a MIG instance is one, and one of four slots is 1/4."""
        return sum(device.share for device in self.devices)

    @property
    def device_equivalents(self) -> DeviceCount:
        """How many GPUs it holds: a MIG instance counts as its part, and so does a slot."""
        return sum(device.equivalent for device in self.devices)

    @property
    def held(self) -> int:
        """Microcredits still set aside: the hold less what was charged; 0 once ended."""
        return 0 if self.state is LeaseState.ENDED else max(0, self.hold - self.charged)


class EndReason(str, Enum):
    """Why a session ends by itself."""

    TIME = "time"
    """Its time limit is reached."""
    CREDITS = "credits"
    """Its account has run dry."""
    MEMBERSHIP = "membership"
    """Its member is no member any more."""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """When a session ends by itself, and why."""

    at: datetime
    reason: EndReason


def first_end(
    limit: datetime | None, credits: datetime | None, membership: datetime | None = None
) -> SessionEnd | None:
    """Return the earliest of a session's ends; None if there is none."""
    ends = zip((limit, credits, membership), EndReason, strict=True)
    known = [SessionEnd(at, reason) for at, reason in ends if at]
    return min(known, key=lambda end: end.at, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A server found on an engine that carries a lease's id."""

    lease_id: str
    ref: str
    """The engine's identifier of the server: container id, or ``pid:start time``."""
    server: ServerRef
    alive: bool
    created_at: datetime | None = None
    started_at: datetime | None = None
    """When it was started, if the engine knows. All times here are by the engine's wall clock."""
    ended_at: datetime | None = None
    """When it exited, if the engine knows."""
    detail: str = ""
    """Exit code or similar, for the log."""
    exit_code: int | None = None
    """The exit status of its program, if it has ended and the engine knows."""
    out_of_memory: bool = False
    """True if it has ended, and the system ended a program in it because memory was used up."""
    unknown: str = ""
    """Why it is unknown if the lease's server is gone, in words; then ``alive`` is True."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The conditions of a request other than its devices."""

    groups: frozenset[str] = frozenset()
    """The member's groups; one of them may provide weight, priority and limits."""
    seconds: int | None = None
    """Session length; None if it has no end."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The member's choices, used to start the server after a restart of the hub."""
    wait: bool = False
    """True to wait in the queue if no device is free."""
    account: str = ""
    """The account that pays; empty for the member's usual one."""
    shown_at: datetime | None = None
    """When a form showed the price; an immediate start costs no more than that price."""
    since: datetime | None = None
    """The wait counts from here; None: from now."""
    preemptible: bool = False
    """True to get only what nobody else can use now, for less, and to yield it to others."""
