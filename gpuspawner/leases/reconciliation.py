"""Rules for when the store, the engines and the Hub disagree. Pure.

Whatever crashed in between, each round compares the open leases with what the engines run and what
the Hub reports. Only an engine proves an end: if an engine does not respond, its leases stay as
they are, because unknown is never free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from .models import Lease, LeaseKind, LeaseState, ServerRef, Sighting


class HubState(str, Enum):
    """The state of a server according to the Hub."""

    READY = "ready"
    PENDING = "pending"
    """Starting or stopping, or a run that the Hub is about to start: leave it alone."""


@dataclass(frozen=True, slots=True)
class Confirm:
    """The server is up, but that was not recorded yet."""

    lease: Lease
    ref: str
    started_at: datetime | None = None
    """When the engine started it, by the wall clock; None if unknown."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The server is proven alive."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Release:
    """The server is proven gone."""

    lease: Lease
    ended_at: datetime | None
    """None if unknown: charge up to when it was last seen alive."""
    reason: str
    lost: bool = False
    """True if nothing of it was ever created: the hub went down before its start."""


@dataclass(frozen=True, slots=True)
class Remove:
    """A server without an owner: end it. Unless it has exited, it occupies devices."""

    engine: str
    sighting: Sighting
    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """The server's state is unknown; the lease stays."""

    lease: Lease
    reason: str
    is_stuck: bool = False
    """True if that will not change until an admin acts."""


Action = Confirm | Seen | Release | Remove | Unknown


def plan(
    leases: Iterable[Lease],
    sightings: Mapping[str, Sequence[Sighting] | None],
    servers: Mapping[ServerRef, HubState] | None,
    now: datetime,
    grace: timedelta,
    skew: timedelta = timedelta(),
) -> list[Action]:
    """Plan an action for each lease, then for servers without an open lease.

    Args:
        leases: The open leases.
        sightings: What each engine runs, by the engine's name; None if it did not respond.
        servers: The Hub's servers, and the runs that it is about to start; None if the Hub did not
            respond.
        now: The current time.
        grace: Nothing younger than this is ended only because the Hub does not list it: a spawn
            may be in progress.
        skew: Wall clock less ``now``. An engine's times are by the wall clock, from before or after
            it was set.
    """
    latest = now + min(skew, timedelta())
    actions: list[Action] = []
    open_ids = set()
    for lease in leases:
        open_ids.add(lease.id)
        actions.append(_of_lease(lease, sightings, servers, now, grace))
    for engine, found in sightings.items():
        for sighting in found or ():
            old = sighting.created_at is None or latest - sighting.created_at >= grace
            # A server's container may be kept for its next start; a run has none.
            is_left = sighting.alive or sighting.server.kind is LeaseKind.RUN
            if is_left and sighting.lease_id not in open_ids and old:
                actions.append(Remove(engine, sighting, "its lease has ended"))
    return actions


def _of_lease(
    lease: Lease,
    sightings: Mapping[str, Sequence[Sighting] | None],
    servers: Mapping[ServerRef, HubState] | None,
    now: datetime,
    grace: timedelta,
) -> Action:
    found = sightings.get(lease.engine)
    if found is None:
        return Unknown(lease, f"the engine {lease.engine!r} did not respond")
    mine = [s for s in found if s.lease_id == lease.id]
    alive = next((s for s in mine if s.alive and not s.unknown), None)
    unknown = next((s.unknown for s in mine if s.unknown), "")
    hub = servers.get(lease.server) if servers is not None else None
    young = now - lease.granted_at < grace
    is_run = lease.server.kind is LeaseKind.RUN

    if alive:
        if servers is None or hub is HubState.PENDING:
            return Seen(lease)
        if hub is HubState.READY or (is_run and alive.started_at):
            confirmed = lease.state is LeaseState.RUNNING
            return Seen(lease) if confirmed else Confirm(lease, alive.ref, alive.started_at)
        if young:
            return Unknown(lease, "its server is on its way")
        return Remove(lease.engine, alive, "the Hub no longer knows its server")
    if unknown:
        return Unknown(lease, unknown, is_stuck=True)
    if is_run and any(sighting.exit_code is not None for sighting in mine):
        return Unknown(lease, "its run is settled with the exit status")
    coming = servers is None or hub is HubState.PENDING or young
    if lease.state is LeaseState.GRANTED and not mine and coming:
        return Unknown(lease, "its server is on its way")  # an image may still be pulled
    ended = max((s.ended_at for s in mine if s.ended_at), default=None)
    seen_at = lease.seen_at or lease.granted_at
    if ended is None and hub is not None and not mine and now - seen_at < grace:
        return Unknown(lease, "the Hub knows when its server ended")
    detail = next((s.detail for s in mine if s.detail), "")
    reason = f"the server exited ({detail})" if detail else "the server was gone"
    return Release(lease, ended, reason, lost=lease.state is LeaseState.GRANTED and not mine)
