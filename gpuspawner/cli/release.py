"""``gpuspawner release``: free a lease by hand, when nothing else did.

A device is free when its server is proved gone. So the engine is asked first, and what it
cannot prove an admin has to insist on.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from ..broker import Broker
from ..engines import DockerEngine, Engine, LocalEngine
from ..engines.docker import belongs_to, is_alive, sighting_of
from ..engines.local import process_ref
from ..errors import AnotherEngine, EngineUnavailable, GPUSpawnerError, Refused, UnknownLease
from ..ledger import rules
from ..model import Lease, LeaseState, Sighting
from .config import Settings
from .credits import default_actor
from .leases import devices_of, plain
from .output import confirmed, credits, local, note, show


class Fate(str, Enum):
    """What the engine says of a lease's server."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Proof:
    """What the engine says, in words too, and when the server ended if that is known."""

    fate: Fate
    text: str
    ended_at: datetime | None = None


def release(arguments: argparse.Namespace, settings: Settings) -> int:
    """Say what will happen, ask, and free the lease."""
    broker = settings.open_broker()
    lease = find_lease(broker, arguments.lease)
    if lease.state is LeaseState.ENDED:
        raise Refused(f"Lease {lease.id} ended already, at {local(lease.ended_at)}: nothing to do.")
    proof = ask_engine(lease, settings, broker)
    note(_intent(lease, proof, broker.clock()))
    if proof.fate is not Fate.GONE and not arguments.force:
        raise Refused(_refusal(lease, proof))
    if not arguments.yes and not confirmed("Free it?"):
        raise Refused("Nothing was changed.")
    ended = broker.release(
        lease.id,
        ended_at=proof.ended_at,
        stopped_at=broker.clock() if proof.fate is Fate.ALIVE else None,
        reason=f"released by hand by {default_actor()} ({proof.fate.value})",
    )
    text = f"Lease {ended.id} ended: {credits(ended.charged)} credits charged in all."
    show(arguments.json, {**plain(ended), "server_was": proof.fate.value}, text)
    return 0


def find_lease(broker: Broker, text: str) -> Lease:
    """The lease with this id, or the one open lease whose id begins so."""
    try:
        return broker.lease(text)
    except UnknownLease:
        begin_so = [x for x in broker.open_leases() if text and x.id.startswith(text)]
    if len(begin_so) == 1:
        return begin_so[0]
    if begin_so:
        some = ", ".join(lease.id for lease in begin_so[:5])
        raise UnknownLease(f"Several open leases begin with {text!r}: {some}.", lease=text)
    raise UnknownLease(
        f"There is no lease {text!r}. List the open ones with: gpuspawner leases", lease=text
    )


def ask_engine(lease: Lease, settings: Settings, broker: Broker) -> Proof:
    """Whether the lease's server is alive, gone or unknown."""
    if lease.engine == "docker":
        return _ask_docker(lease, settings, broker)
    if lease.engine == "local":
        return _ask_local(lease)
    return Proof(Fate.UNKNOWN, f"this command cannot ask the engine {lease.engine!r}.")


def _ask_docker(lease: Lease, settings: Settings, broker: Broker) -> Proof:
    from .hub import engine_client  # imports JupyterHub: slow, and needed here only

    try:
        connect = engine_client(settings.config)
    except GPUSpawnerError as error:
        return Proof(Fate.UNKNOWN, f"the spawner's configuration does not load: {error.message}")
    engine = DockerEngine(connect, lambda: broker.stamp_error)
    try:
        holders = engine.holders(lease)
    except AnotherEngine:
        return Proof(Fate.UNKNOWN, "another Docker Engine answers than the one it was started on.")
    except EngineUnavailable:
        return Proof(Fate.UNKNOWN, "the Docker Engine does not answer.")
    if foreign := [each for each in holders if is_alive(each) and not belongs_to(each, lease)]:
        name = foreign[0]["Name"].lstrip("/")
        return Proof(Fate.UNKNOWN, f"the container {name}, of no lease, was given one of its GPUs.")
    found = _first([sighting_of(each) for each in holders])
    if found is None and lease.engine_ref:
        died = engine.died_at(lease.engine_ref)
        return _judged(lease, found, "container", died)
    return _judged(lease, found, "container")


def _ask_local(lease: Lease) -> Proof:
    found = _mine(LocalEngine(), lease)
    if found is None and lease.engine_ref:
        if process_ref(_pid(lease.engine_ref)) == lease.engine_ref:
            return Proof(Fate.ALIVE, f"its process {_pid(lease.engine_ref)} runs.")
    elif found is None and os.geteuid() != 0:
        return Proof(Fate.UNKNOWN, "other users' processes can be seen as root only.")
    return _judged(lease, found, "process")


def _mine(engine: Engine, lease: Lease) -> Sighting | None:
    """What the engine knows of the lease's server: alive before exited."""
    return _first([s for s in engine.sightings() if s.lease_id == lease.id])


def _first(mine: Sequence[Sighting]) -> Sighting | None:
    """One that is alive before those that have ended."""
    return next((s for s in mine if s.alive), mine[0] if mine else None)


def _judged(lease: Lease, found: Sighting | None, noun: str, died: datetime | None = None) -> Proof:
    if found is not None and found.alive:
        return Proof(Fate.ALIVE, f"its {noun} {found.ref[:12]} is alive.")
    if found is not None:
        when = f" at {local(found.ended_at)}" if found.ended_at else ""
        return Proof(Fate.GONE, f"its {noun} exited{when} ({found.detail}).", found.ended_at)
    if lease.state is LeaseState.GRANTED and not lease.engine_ref:
        return Proof(
            Fate.UNKNOWN, f"it has no {noun} yet: the start may be under way (an image is pulled)."
        )
    when = f", ended at {local(died)}" if died else ""
    return Proof(Fate.GONE, f"its {noun} is gone{when}.", died)


def _intent(lease: Lease, proof: Proof, now: datetime) -> str:
    until = now if proof.fate is Fate.ALIVE else proof.ended_at
    until = until or lease.seen_at or lease.started_at or lease.granted_at
    total = rules.owed(lease.rate, lease.started_at, until)
    started = f"running since {local(lease.started_at)}" if lease.started_at else "never started"
    frees = f"frees {devices_of(lease)} for others and " if lease.devices else ""
    costs = f"charges {lease.account} {credits(total)} credits in all, up to {local(until)} "
    costs += f"({credits(lease.charged)} of them are charged already)"
    lines = [
        f"Lease {lease.id} of {lease.server}: {devices_of(lease)}, {started}.",
        f"The engine ({lease.engine or 'not known'}) says: {proof.text}",
        f"Releasing it {frees}{costs if lease.started_at else 'costs nothing'}.",
    ]
    if proof.fate is Fate.ALIVE:
        lines.append(
            "Its server would go on using the devices until the accounting service ends it, "
            "which it does when a server has no open lease."
        )
    elif proof.fate is Fate.UNKNOWN and lease.devices:
        lines.append(
            "If its server lives after all, the next member's server shares the devices with it."
        )
    return "\n".join(lines)


def _refusal(lease: Lease, proof: Proof) -> str:
    if proof.fate is Fate.ALIVE:
        return (
            f"Lease {lease.id} was not released: its server is alive. Stop it on the hub's admin "
            "page, which releases the lease by itself, or insist with --force."
        )
    return (
        f"Lease {lease.id} was not released: whether its server is gone is unknown, because "
        f"{proof.text} Try again when that can be told, or insist with --force."
    )


def _pid(ref: str) -> int:
    pid = ref.partition(":")[0]
    return int(pid) if pid.isdigit() else 0
