"""When somebody else decides whose turn it is: what the broker asks them, and what they say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from ..model import Inventory, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Where a ticket stands with the scheduler that it was handed to."""

    ticket_id: str
    uuids: tuple[str, ...] = ()
    """The devices that it got; none while it waits."""
    since: datetime | None = None
    """Since when it has them."""
    over: str = ""
    """Why it will never have any, or has none any more, as a sentence; empty while it waits or
    has them."""
    again: bool = False
    """Whether it may be handed over once more: its end had nothing to do with it."""
    ended_at: datetime | None = None
    """When it had them last."""
    place: int = 0
    """1 is next; 0 for one that does not wait."""
    of: int = 0
    """How many wait."""
    score: float = 0.0
    """What the order goes by; greater goes first."""
    why: str = ""
    """What it waits for beside devices, in words; empty when that is all."""
    start: datetime | None = None
    """When it is expected to start."""


class Delegate(Protocol):
    """A scheduler beside ours, to which requests for devices are handed. Its methods block."""

    @property
    def engine(self) -> str:
        """The engine whose servers get what it gives out."""

    @property
    def name(self) -> str:
        """Of the devices that it gives out, in the store."""

    def observe(self, now: datetime) -> Inventory:
        """The devices that it gives out, as :class:`gpuspawner.devices.base.DeviceSource`."""

    def submit(self, ticket: Ticket) -> None:
        """Hand a ticket over; a second time changes nothing. Raises Refused for what it will
        never have, and Unavailable when nobody answers: then it may have been handed over."""

    def turns(self, age: float = 1.0) -> Mapping[str, Turn]:
        """Every ticket that was handed over and not forgotten yet, by id; at most so many seconds
        old, and in the long run asked for less than once a second. Raises Unavailable."""

    def soon(self) -> float:
        """Seconds until :meth:`turns` may say something new: less than a second when it was told
        something of late."""

    def is_missing(self, ticket: Ticket) -> bool:
        """Whether a ticket that :meth:`turns` did not name was lost, and not only handed over
        since."""

    def cancel(self, ticket_id: str) -> None:
        """Take a ticket back, and what it got with it; the server on it is gone. From then on
        :meth:`turns` names no devices of it. Doing it twice changes nothing. Raises
        Unavailable."""

    def decline(self, ticket_id: str) -> None:
        """Give back what a ticket got, and let it be handed over once more. From then on
        :meth:`turns` names no devices of it until it got others. Raises Unavailable."""

    def extend(self, ticket_id: str, seconds: int) -> None:
        """Let it have its devices for so many seconds in all. Raises Refused or Unavailable."""

    def why_not_yet(self, ticket: Ticket) -> str:
        """Why :meth:`submit` cannot hand a ticket over just now, in words; empty when nobody
        knows of a reason."""

    def tend(self, waiting: Collection[Ticket], *, paused: bool) -> None:
        """Bring the order in line with what admins decided of these tickets, and give out nothing
        while granting is paused. Goes by the last :meth:`turns`. Raises Unavailable."""

    def machine_of(self, uuid: str) -> str:
        """The name of the machine that a device is in; empty for one that nobody knows."""

    def on_machine(self, uuid: str) -> tuple[str, ...]:
        """All devices of the machine that a device is in: they are closed together."""

    def drained(self) -> frozenset[str]:
        """The devices of all machines that are closed there, by whomever, as it said last."""

    def close(self, uuid: str, reason: str) -> None:
        """Give out nothing more of a device's machine; one that is closed there stays as it is.
        Raises Refused or Unavailable."""

    def keep_closed(self, closed: Mapping[str, str]) -> list[str]:
        """The same for all these devices, each with the reason, where it is not so; those of the
        machines that were closed now. Cheap when nothing changed. What is refused, or nobody
        answers to, is tried again the next time, and not given to who is handed over meanwhile."""

    def reopen(self, uuid: str) -> None:
        """Give out again what :meth:`close` closed. Raises Refused, also for a machine that was
        closed by somebody else, or Unavailable."""
