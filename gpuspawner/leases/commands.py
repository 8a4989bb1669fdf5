"""The commands ``gpuspawner leases``, ``extend``, ``stop`` and ``release``.

A device is free only when its server is proven gone. ``release`` therefore asks the engine first,
and the admin must insist (--force) where the engine has no proof.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import Enum
from typing import Any

from ..cli.command import command
from ..cli.config import Settings
from ..cli.output import (
    actor,
    confirmed,
    count,
    credits,
    default_actor,
    exact,
    local,
    note,
    price,
    show,
    table,
    utc,
)
from ..cli.parameters import LINES, argument, flag, option, required_reason_option, yes_option
from ..core.errors import AnotherEngine, EngineUnavailable, GPUSpawnerError, Refused, UnknownLease
from ..core.processes import process_ref
from ..engines.docker import DockerEngine, belongs_to, is_alive, sighting_of
from ..engines.local import LocalEngine
from ..ledger import rules as ledger_rules
from ..queue.commands import queue_services
from ..services import Services
from ..web import view_models
from ..web.view_models import LeaseFigures
from .models import EndReason, Lease, LeaseState, ServerRef, Sighting

lease_argument = argument("lease_id", "LEASE", "the lease's id, or a unique prefix of it")


@command()
@flag("--all", "include leases that have ended", "with_ended")
@option("--member", "NAME", "show only this member's leases")
@option("--limit", "N", "with --all: show the newest N (default: 50)", type=LINES, default=50)
def leases(settings: Settings, with_ended: bool, member: str | None, limit: int) -> None:
    """List the open leases, or all of them."""
    services = settings.open_services()
    if with_ended:
        # All of a member's: a group's account may have paid for some.
        found = services.leases.of_account(None, limit if member is None else _EVERY)
    else:
        found = services.leases.open_leases()
    if member is not None:
        found = [lease for lease in found if lease.server.user == member]
    if with_ended:
        found = found[:limit]
    figures = view_models.lease_figures(services, found, services.clock())
    value = [{**plain(some.lease), **_plain_figures(some)} for some in figures]
    show(value, _text(figures, with_ended, member, limit))


_EVERY = 2**31 - 1

WHY = {
    EndReason.TIME: "time limit",
    EndReason.CREDITS: "credits run out",
    EndReason.MEMBERSHIP: "membership ends",
}
"""Why a session ends by itself, in the table."""


def devices_of(lease: Lease) -> str:
    """Format the devices of a lease for people: ``2x A100 (0, 1)``, ``1/4 of a T4 (2)``."""
    if not lease.devices:
        return "no GPU"
    models = sorted({device.model for device in lease.devices})
    indices = ", ".join(str(device.index) for device in lease.devices)
    count = lease.device_count
    times = f"{count}x" if count >= 1 else f"{count} of a"
    return f"{times} {', '.join(models)} ({indices})"


def plain(lease: Lease) -> dict[str, Any]:
    """Return a lease as plain values, for scripts."""
    return {
        "id": lease.id,
        "member": lease.server.user,
        "server": lease.server.name,
        "account": lease.account,
        "environment": lease.environment,
        "devices": [asdict(device) | {"part": str(device.part)} for device in lease.devices],
        "state": lease.state.value,
        "rate": exact(lease.rate),
        "hold": exact(lease.hold),
        "held": exact(lease.held),
        "charged": exact(lease.charged),
        "engine": lease.engine,
        "engine_ref": lease.engine_ref,
        "granted_at": utc(lease.granted_at),
        "started_at": utc(lease.started_at),
        "seen_at": utc(lease.seen_at),
        "warned_at": utc(lease.warned_at),
        "when_dry": lease.when_dry,
        "overdraft": exact(lease.overdraft),
        "waived": exact(lease.waived),
        "group": lease.group,
        "ends_at": utc(lease.ends_at),
        "claim_by": utc(lease.claim_by),
        "outcome": lease.outcome,
        "ended_at": utc(lease.ended_at),
        "end_reason": lease.end_reason,
    }


def _plain_figures(some: LeaseFigures) -> dict[str, Any]:
    """Return what depends on the time: the cost until now, and the end of a running session."""
    end = some.end
    told = {"at": utc(end.at), "reason": end.reason.value} if end else None
    return {"cost": exact(some.cost), "end": told}


def _text(found: Sequence[LeaseFigures], with_ended: bool, member: str | None, limit: int) -> str:
    whose = f" of {member}" if member is not None else ""
    if not found:
        return f"No {'' if with_ended else 'open '}leases{whose}."
    headers = ["LEASE", "SERVER", "ENVIRONMENT", "DEVICES", "STATE", "GRANTED", "STARTED"]
    headers += ["CREDITS/H", "COST"]
    headers += ["ENDED", "WHY"] if with_ended else ["ENDS"]
    rows = [_row(some, with_ended) for some in found]
    kind = "lease" if with_ended else "open lease"
    text = table(headers, rows, right=("CREDITS/H", "COST"))
    text += f"\n\n{count(len(found), kind)}{whose}"
    if with_ended and len(found) == limit:
        text += f" (the newest; --limit shows more than {limit})"
    return text


def _row(some: LeaseFigures, ended: bool) -> list[str]:
    lease, end = some.lease, some.end
    row = [
        lease.id,
        str(lease.server),
        lease.environment or "-",
        devices_of(lease),
        "warned" if lease.warned_at and lease.state is LeaseState.RUNNING else lease.state.value,
        local(lease.granted_at),
        local(lease.started_at),
        price(lease.rate),
        credits(some.cost),
    ]
    if ended:
        return [*row, local(lease.ended_at), lease.end_reason]
    return [*row, f"{local(end.at)} ({WHY[end.reason]})" if end else "-"]


class EngineState(str, Enum):
    """The state of a lease's server according to its engine."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ReleaseProof:
    """The engine's answer, with an explanation and the end of the server if it is known."""

    fate: EngineState
    text: str
    ended_at: datetime | None = None


@command()
@lease_argument
@yes_option
@flag("--force", "release it even if its server is alive or cannot be checked")
def release(settings: Settings, lease_id: str, yes: bool, force: bool) -> None:
    """Show what will happen, ask, and release the lease."""
    services = settings.open_services()
    lease = find_lease(services, lease_id)
    if lease.state is LeaseState.ENDED:
        raise Refused(f"Lease {lease.id} ended already, at {local(lease.ended_at)}: nothing to do.")
    proof = ask_engine(lease, settings, services)
    note(_intent(lease, proof, services.clock()))
    if proof.fate is not EngineState.GONE and not force:
        raise Refused(_refusal(lease, proof))
    if not yes and not confirmed("Free it?"):
        raise Refused("Nothing was changed.")
    ended = services.leases.release(
        lease.id,
        ended_at=proof.ended_at,
        stopped_at=services.clock() if proof.fate is EngineState.ALIVE else None,
        reason=f"released by hand by {default_actor()} ({proof.fate.value})",
    )
    text = f"Lease {ended.id} ended: {credits(ended.charged)} credits charged in total."
    show({**plain(ended), "server_was": proof.fate.value}, text)


def find_lease(services: Services, text: str) -> Lease:
    """Return the lease with this id, or the only open lease whose id starts with it."""
    try:
        return services.leases.get(text)
    except UnknownLease:
        begin_so = [x for x in services.leases.open_leases() if text and x.id.startswith(text)]
    if len(begin_so) == 1:
        return begin_so[0]
    if begin_so:
        some = ", ".join(lease.id for lease in begin_so[:5])
        raise UnknownLease(f"Several open leases begin with {text!r}: {some}.", lease=text)
    raise UnknownLease(
        f"There is no lease {text!r}. List the open ones with: gpuspawner leases", lease=text
    )


def ask_engine(lease: Lease, settings: Settings, services: Services) -> ReleaseProof:
    """Ask the engine if the lease's server is alive, gone or unknown."""
    if lease.engine == "docker":
        return _ask_docker(lease, settings, services)
    if lease.engine == "local":
        return _ask_local(lease)
    return _unknown(f"this command cannot ask the engine {lease.engine!r}.")


def _unknown(text: str) -> ReleaseProof:
    return ReleaseProof(EngineState.UNKNOWN, text)


def _ask_docker(lease: Lease, settings: Settings, services: Services) -> ReleaseProof:
    from ..cli.hub import engine_client  # imports JupyterHub: slow, and needed here only

    try:
        connect = engine_client(settings.config)
    except GPUSpawnerError as error:
        return _unknown(f"the spawner's configuration does not load: {error.message}")
    engine = DockerEngine(connect, lambda: services.time.stamp_error)
    try:
        holders = engine.holders(lease)
    except AnotherEngine:
        return _unknown("another Docker Engine answers than the one it was started on.")
    except EngineUnavailable:
        return _unknown("the Docker Engine is not responding.")
    if foreign := [each for each in holders if is_alive(each) and not belongs_to(each, lease)]:
        name = foreign[0]["Name"].lstrip("/")
        return _unknown(f"the container {name}, of no lease, was given one of its GPUs.")
    found = _first([sighting_of(each) for each in holders])
    died = engine.died_at(lease.engine_ref) if found is None and lease.engine_ref else None
    return _judged(lease, found, "container", died)


def _ask_local(lease: Lease) -> ReleaseProof:
    found = _first([s for s in LocalEngine().sightings() if s.lease_id == lease.id])
    if found is None and lease.engine_ref:
        pid = lease.engine_ref.partition(":")[0]
        if pid.isdigit() and process_ref(int(pid)) == lease.engine_ref:
            return ReleaseProof(EngineState.ALIVE, f"its process {pid} runs.")
    elif found is None and os.geteuid() != 0:
        return _unknown("other users' processes can be seen as root only.")
    return _judged(lease, found, "process")


def _first(mine: Sequence[Sighting]) -> Sighting | None:
    """Return the first sighting that is alive, else the first one."""
    return next((s for s in mine if s.alive), mine[0] if mine else None)


def _judged(
    lease: Lease, found: Sighting | None, noun: str, died: datetime | None = None
) -> ReleaseProof:
    if found is not None and found.alive:
        return ReleaseProof(EngineState.ALIVE, f"its {noun} {found.ref[:12]} is alive.")
    if found is not None:
        when = f" at {local(found.ended_at)}" if found.ended_at else ""
        text = f"its {noun} exited{when} ({found.detail})."
        return ReleaseProof(EngineState.GONE, text, found.ended_at)
    if lease.state is LeaseState.GRANTED and not lease.engine_ref:
        return _unknown(f"it has no {noun} yet: the start may be under way (an image is pulled).")
    when = f", ended at {local(died)}" if died else ""
    return ReleaseProof(EngineState.GONE, f"its {noun} is gone{when}.", died)


def _intent(lease: Lease, proof: ReleaseProof, now: datetime) -> str:
    until = now if proof.fate is EngineState.ALIVE else proof.ended_at
    until = until or lease.seen_at or lease.started_at or lease.granted_at
    total = ledger_rules.owed(lease.rate, lease.started_at, until)
    started = f"running since {local(lease.started_at)}" if lease.started_at else "never started"
    frees = f"frees {devices_of(lease)} for others and " if lease.devices else ""
    costs = f"charges {lease.account} {credits(total)} credits in all, up to {local(until)} "
    costs += f"({credits(lease.charged)} of them are charged already)"
    lines = [
        f"Lease {lease.id} of {lease.server}: {devices_of(lease)}, {started}.",
        f"The engine ({lease.engine or 'not known'}) says: {proof.text}",
        f"Releasing it {frees}{costs if lease.started_at else 'costs nothing'}.",
    ]
    if proof.fate is EngineState.ALIVE:
        lines.append(
            "Its server would keep using the devices until the accounting service ends it, "
            "which it does when a server has no open lease."
        )
    elif proof.fate is EngineState.UNKNOWN and lease.devices:
        lines.append(
            "If its server lives after all, the next member's server shares the devices with it."
        )
    return "\n".join(lines)


def _refusal(lease: Lease, proof: ReleaseProof) -> str:
    if proof.fate is EngineState.ALIVE:
        return (
            f"Lease {lease.id} was not released: its server is alive. Stop it on the hub's admin "
            "page, which releases the lease automatically, or use --force."
        )
    return (
        f"Lease {lease.id} was not released: whether its server is gone is unknown, because "
        f"{proof.text} Try again once that is known, or use --force."
    )


@command()
@lease_argument
def extend(settings: Settings, lease_id: str) -> None:
    """Restart a session's time limit, unless a waiting ticket would start later."""
    services = queue_services(settings)
    lease = find_lease(services, lease_id)
    extended = services.extensions.extend(lease.id, actor=actor())
    if extended.seconds is None:
        text = f"Lease {lease.id} of {lease.server} has no end: nothing changed."
    else:
        ends = view_models.session_ends(services, [extended], services.clock())
        end = ends.get(extended.id)
        why = "" if end is None or end.reason is EndReason.TIME else f" ({WHY[end.reason]})"
        at = end.at if end else extended.ends_at
        text = f"The session of {lease.server} ends at {local(at)}{why}."
    show(plain(extended), text)


@command()
@argument(
    "server",
    "SERVER",
    "the server (MEMBER or MEMBER/SERVER), or its lease's id or a unique prefix of it",
)
@required_reason_option
def stop(settings: Settings, server: str, reason: str) -> None:
    """Order the stop of a server; the accounting service carries it out."""
    services = settings.open_services()
    lease = _lease_of(services, server)
    ordered = services.sessions.stop(lease.id, actor=actor(), reason=reason)
    text = (
        f"Lease {ordered.id} of {ordered.server} is to end: the accounting service asks the Hub "
        "to stop the server until it is gone. Its member is told why, and keeps the files."
    )
    show(plain(ordered), text)


def _lease_of(services: Services, text: str) -> Lease:
    """Return the open lease of a server, or the lease with an id. Raises UnknownLease."""
    user, _, name = text.partition("/")
    if lease := services.leases.of_server(ServerRef(user, name)):
        return lease
    try:
        return find_lease(services, text)
    except UnknownLease as error:
        others = [str(x.server) for x in services.leases.open_leases() if x.server.user == user]
        if not others:
            raise
        running = f"{user} has {', '.join(others)}"
        raise UnknownLease(f"{error.message}. {running}.", lease=text) from None
