"""The commands that show, change and simulate the queue, and that drain devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from ..cli.command import command, group
from ..cli.config import Settings
from ..cli.output import actor, count, local, note, show, table, utc
from ..cli.parameters import (
    LINES,
    POINTS,
    POSITION,
    argument,
    flag,
    limit_option,
    option,
    reason_option,
    required_reason_option,
)
from ..core.errors import CannotDrain, InvalidRequest, TicketEnded, UnknownTicket
from ..db.engine import Store
from ..devices import repository as devices_repository
from ..devices.closures import GRANTING, Closure
from ..devices.models import Device, Inventory
from ..devices.placement import leasable
from ..devices.snapshots import InventoryCache
from ..services import Services
from . import replay
from .kinds import kind_of, open_kind, pool_of
from .models import Priority, RankedTicket, Ticket
from .rank import QueuePosition, ScoreDifference, TicketComparison, compare
from .replay import (
    ANY,
    ReplayFigures,
    ReplayTarget,
    TraceError,
    TraceJob,
    figures,
    read_trace,
    replay_trace,
)


class ListedDevices:
    """The devices as the store lists them, independent of what this process can see."""

    def __init__(self, store: Store) -> None:
        self.name = store.run(devices_repository.source_of)
        self._store = store

    def observe(self, now: datetime) -> Inventory:
        """Return the devices as the hub last stored them, without links (only for placement)."""
        known = self._store.run(
            lambda connection: devices_repository.load_devices(connection, self.name)
        )
        return Inventory(devices=known, observed_at=now, source=self.name)


class ReadOnlyInventory(InventoryCache):
    """An inventory cache that writes nothing: the device table belongs to the hub."""

    def _save(self, inventory: Inventory) -> None:
        return


def queue_services(settings: Settings) -> Services:
    """Open the services on the hub's database, to read and change the queue.

    Raises StoreUnavailable if there is no database yet.
    """
    services = settings.open_services()
    glance = ReadOnlyInventory(
        ListedDevices(services.store),
        services.store,
        timedelta(seconds=services.settings.devices.refresh_seconds),
    )
    services.watch = services.devices.inventory = services.health.inventory = glance
    return services


InLine = tuple[Ticket, RankedTicket, QueuePosition]

device_argument = argument("device_name", "DEVICE", "the GPU's index or UUID")
ticket_argument = argument(
    "ticket_name",
    "TICKET",
    "the ticket's id or a unique prefix of it, or its server (MEMBER or MEMBER/SERVER)",
)


@group()
@option(
    "--why",
    "A B",
    "explain why one of two tickets (or their servers) goes before the other",
    nargs=2,
)
def queue(settings: Settings, why: tuple[str, str] | None) -> None:
    """List the queue, or explain why one ticket goes before another."""
    services = queue_services(settings)
    line = services.positions.order()
    if why:
        one, other = (_in_line(services, line, name) for name in why)
        if one is other:
            raise InvalidRequest("Both are the same ticket: name two.", field="why")
        tickets = {ranked.id: ticket for ticket, ranked, _ in (one, other)}
        found = compare(one[1], other[1])
        show(_plain_comparison(found), _compared(found, tickets))
        return
    paused = services.devices.closures().get(GRANTING)
    value = {
        "as_of": utc(services.clock()),
        "paused": plain_closure(paused) if paused else None,
        "tickets": [plain(*entry) for entry in line],
    }
    show(value, _text(line, paused, services.clock()))


@queue.command()
@ticket_argument
@argument(
    "position",
    "POSITION",
    "1 is next; 'back' returns the ticket to the order by score",
    type=POSITION,
)
@reason_option
def move(settings: Settings, ticket_name: str, position: int, reason: str) -> None:
    """Move a ticket to a fixed position, ahead of the order by score."""
    services, ticket = _find(settings, ticket_name)
    moved = services.queue.move(ticket.id, position or None, actor=actor(), reason=reason)
    where = f"is moved to position {position}" if position else "is back in the order"
    _show_change(services, moved, where)


@queue.command()
@ticket_argument
@argument(
    "points",
    "POINTS",
    "points to add, such as 5 or -2.5; they replace an earlier boost",
    type=POINTS,
)
@reason_option
def boost(settings: Settings, ticket_name: str, points: float, reason: str) -> None:
    """Add points to a ticket's score (0 removes them)."""
    services, ticket = _find(settings, ticket_name)
    boosted = services.queue.boost(ticket.id, points, actor=actor(), reason=reason)
    what = f"has a boost of {boosted.boost:+g} points" if boosted.boost else "no longer has a boost"
    _show_change(services, boosted, what)


@queue.command()
@ticket_argument
@required_reason_option
def cancel(settings: Settings, ticket_name: str, reason: str) -> None:
    """Remove a ticket from the queue; its member is told why."""
    services, ticket = _find(settings, ticket_name)
    ended = services.queue.cancel(ticket.id, actor=actor(), reason=reason)
    value = {"id": ended.id, "outcome": ended.outcome, "end_reason": ended.end_reason}
    show(value, f"Ticket {ended.id} of {ended.server} is cancelled.")


def plain(ticket: Ticket, ranked: RankedTicket, standing: QueuePosition) -> dict[str, Any]:
    """Return a waiting ticket as plain values, for scripts."""
    request = ticket.request
    estimate = {
        name: utc(datetime.fromtimestamp(at, timezone.utc))
        for name, at in (asdict(standing.estimate) if standing.estimate else {}).items()
    }
    return {
        "id": ticket.id,
        "place": ranked.place,
        "member": ticket.server.user,
        "server": ticket.server.name,
        "group": ticket.group,
        "devices": request.devices,
        "sharing": request.sharing.value,
        "model": request.model,
        "memory_bytes": request.memory_bytes,
        "environment": request.environment,
        "seconds": ticket.seconds,
        "waits_for": standing.why,
        "since": utc(ticket.created_at),
        "planned": utc(standing.planned),
        "latest": utc(standing.latest),
        "estimate": estimate or None,
        "priority": Priority(ticket.priority).name.lower(),
        "boost": ticket.boost,
        "position": ticket.position,
        "last": ticket.last,
        "score": ranked.score,
        "parts": [asdict(part) for part in ranked.parts],
    }


def plain_closure(closure: Closure) -> dict[str, Any]:
    """Return a pause or a drain as plain values, for scripts."""
    return {"since": utc(closure.at), "actor": closure.actor, "reason": closure.reason}


# Finding tickets.


def _find(settings: Settings, name: str) -> tuple[Services, Ticket]:
    services = queue_services(settings)
    return services, _in_line(services, services.positions.order(), name)[0]


def _in_line(services: Services, line: list[InLine], name: str) -> InLine:
    """Return the ticket with this id or server, or the only one whose id starts with the name."""
    exact = [entry for entry in line if name in (entry[0].id, str(entry[0].server))]
    found = exact or [entry for entry in line if name and entry[0].id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(entry[0].id for entry in found[:5])
        raise UnknownTicket(f"Several tickets begin with {name!r}: {some}.", ticket=name)
    try:
        ended = services.queue.ticket(name)
    except UnknownTicket:
        sentence = (
            f"No ticket {name!r} waits in the queue. List those that do with: gpuspawner queue"
        )
        raise UnknownTicket(sentence, ticket=name) from None
    why = ended.end_reason.rstrip(".")
    raise TicketEnded(
        f"Ticket {ended.id} of {ended.server} is no longer waiting "
        f"({ended.outcome or 'waiting'}: {why}). Nothing was changed."
    )


# Output.


def _text(line: list[InLine], paused: Closure | None, now: datetime) -> str:
    lines = []
    if line:
        headers = ("PLACE", "TICKET", "SERVER", "GROUP", "WAITS FOR", "SINCE", "START", "SCORE")
        rows = [_queue_row(*entry, now) for entry in line]
        lines += [table(headers, rows, right=("PLACE", "SCORE")), ""]
    verb = "waits" if len(line) == 1 else "wait"
    lines.append(f"{count(len(line), 'ticket')} {verb}" if line else "Nobody waits in the queue.")
    if paused:
        since = f"Granting is paused by {paused.actor} since {local(paused.at)}"
        lines.append(since + _because(paused))
    return "\n".join(lines)


def _because(closure: Closure) -> str:
    return f": {closure.reason}" if closure.reason else ""


def _queue_row(
    ticket: Ticket, ranked: RankedTicket, standing: QueuePosition, now: datetime
) -> list[str]:
    return [
        str(ranked.place),
        ticket.id,
        str(ticket.server),
        ticket.group or "-",
        standing.why,
        local(ticket.created_at),
        standing.start(now) or "-",
        _points(ranked.score),
    ]


def _compared(found: TicketComparison, tickets: dict[str, Ticket]) -> str:
    first, second = found.first, found.second
    ahead, behind = str(tickets[first.id].server), str(tickets[second.id].server)
    lines = [
        f"{ahead} (ticket {first.id}, place {first.place}) goes before "
        f"{behind} (ticket {second.id}, place {second.place}).",
        "",
    ]
    headers = ("PART", "FIRST", "SECOND", "DIFFERENCE", "WHY FIRST", "WHY SECOND")
    rows = [_difference(difference) for difference in found.differences]
    scores = (_points(first.score), _points(second.score))
    rows.append(("score", *scores, _ahead(found.points), "", ""))
    lines.append(table(headers, rows, right=headers[1:4]))
    if _points(found.points) == "0.00":
        lines += ["", "Their scores are practically equal: the earlier request goes first."]
    return "\n".join(lines)


def _difference(difference: ScoreDifference) -> tuple[str, ...]:
    first, second = difference.first, difference.second
    return (
        difference.name,
        _points(first.points) if first else "-",
        _points(second.points) if second else "-",
        _ahead(difference.points),
        first.why if first else "-",
        second.why if second else "-",
    )


def _points(points: float) -> str:
    """Format with two decimals, and without a minus before a zero."""
    return f"{round(points, 2) + 0.0:.2f}"


def _ahead(points: float) -> str:
    return f"{round(points, 2) + 0.0:+.2f}"


def _plain_comparison(found: TicketComparison) -> dict[str, Any]:
    return {
        "first": found.first.id,
        "second": found.second.id,
        "points": found.points,
        "differences": [
            {
                "name": difference.name,
                "points": difference.points,
                "first": asdict(difference.first) if difference.first else None,
                "second": asdict(difference.second) if difference.second else None,
            }
            for difference in found.differences
        ],
    }


def _show_change(services: Services, ticket: Ticket, what: str) -> None:
    standing = services.positions.standings().get(ticket.id)
    place = standing.place if standing else 0  # it may have got its turn meanwhile
    value = {"id": ticket.id, "place": place, "boost": ticket.boost, "position": ticket.position}
    where = f"it is number {place} in the queue now" if place else "it is no longer waiting"
    text = f"Ticket {ticket.id} of {ticket.server} {what}: {where}."
    show(value, text)


@command()
@reason_option
def pause(settings: Settings, reason: str) -> None:
    """Grant no devices until ``resume``."""
    services = queue_services(settings)
    done = services.devices.pause(actor=actor(), reason=reason)
    closure = services.devices.closures().get(GRANTING)
    text = "Granting is paused: running servers continue, and tickets keep their places."
    if not done and closure:
        text = f"Nothing changed: {closure.actor} paused granting at {local(closure.at)}"
        text += _because(closure)
    value = {"changed": done, "paused": plain_closure(closure) if closure else None}
    show(value, text)


@command()
@reason_option
def resume(settings: Settings, reason: str) -> None:
    """Grant devices again."""
    services = queue_services(settings)
    done = services.devices.resume(actor=actor(), reason=reason)
    text = "Nothing changed: granting was not paused."
    if done:
        text = (
            f"Granting is resumed: {count(len(services.queue.waiting()), 'ticket')} in the queue."
        )
    show({"changed": done, "paused": None}, text)


@command()
@device_argument
@reason_option
@flag("--anyway", "also if waiting members could then start later than they were told")
def drain(settings: Settings, device_name: str, reason: str, anyway: bool) -> None:
    """Take a device out of service; its session goes on to its end."""
    services = queue_services(settings)
    device = services.devices.find_device(device_name)
    try:
        done = services.drains.drain(device.uuid, actor=actor(), reason=reason, anyway=anyway)
    except CannotDrain as refusal:
        raise CannotDrain(refusal.message.removesuffix(".") + " (--anyway).") from None
    closure = services.devices.closures().get(device.uuid)
    text = f"{_named(device)} is drained: no new session starts on it."
    if not done and closure:
        text = f"Nothing changed: {closure.actor} drained {_named(device)} at {local(closure.at)}."
    if done:
        text += _with_it(services, device)
    server = _server_on(services, device)
    if server:
        text += f" The session of {server} on it continues until it ends."
    value = {"changed": done, "drained": plain_closure(closure) if closure else None}
    show({"uuid": device.uuid, "server": server, **value}, text)


@command()
@device_argument
@reason_option
def undrain(settings: Settings, device_name: str, reason: str) -> None:
    """Return a drained device to service."""
    services = queue_services(settings)
    done = services.devices.undrain(device_name, actor=actor(), reason=reason)
    text = f"Device {device_name} is back in service."
    if machine := done and services.machines.machine_of(
        services.devices.find_device(device_name).uuid
    ):
        text = f"The whole machine {machine} is back in service."
    if not done:
        text = f"Nothing changed: device {device_name} was not drained."
    show({"changed": done, "drained": None}, text)


@command()
@limit_option
def trail(settings: Settings, limit: int) -> None:
    """Show who changed what, newest first."""
    changes = settings.open_services().audit.trail(limit)
    headers = ("TIME", "WHO", "WHAT", "ON", "DETAIL")
    rows = [(local(c.at), c.actor, c.action, c.subject, c.detail) for c in changes]
    text = table(headers, rows) if changes else "Nobody has changed anything yet."
    names = ("actor", "action", "subject", "detail")
    value = [{"at": utc(c.at), **{name: getattr(c, name) for name in names}} for c in changes]
    show(value, text)
    if len(changes) == limit:
        note(f"These are the newest {count(len(changes), 'line')}; --limit shows more.")


def _named(device: Device) -> str:
    return f"Device {device.index} ({device.model}, {device.uuid})"


def _with_it(services: Services, device: Device) -> str:
    """Describe what was drained with the device; empty if it was drained alone."""
    if not (machine := services.machines.machine_of(device.uuid)):
        return ""
    beside = len(services.machines.on_machine(device.uuid)) - 1
    others = f" and {count(beside, 'other device')} with it" if beside else ""
    return f" The whole machine {machine} is drained{others}: a GPU of it cannot be by itself."


def _server_on(services: Services, device: Device) -> str | None:
    servers = (str(x.server) for x in services.leases.open_leases() if device.uuid in x.uuids)
    return next(servers, None)


HEADERS = ("POLICY", "MEAN", "P50", "P95", "LONGEST", "WORST GROUP", "SLOWDOWN", "USED", "FAIRNESS")


@command()
@option("--days", "N", "replay the last N days of this site (default: 30)", type=LINES, default=30)
@option("--trace", "FILE", "replay the sessions of a CSV file instead (.csv or .csv.gz)")
@option("--gpus", "N", "replay on N identical GPUs (default: this hub's GPUs)", type=LINES)
@option("--policy", "NAME", "replay only this policy; can be repeated", multiple=True)
def simulate(
    settings: Settings, days: int, trace: str | None, gpus: int | None, policy: Sequence[str]
) -> None:
    """Replay past sessions under the hub's own policy and alternative ones."""
    names = _names(policy)
    if OURS in names:
        settings.require_configuration("how the hub orders its queue")
    if trace:
        jobs, devices = _of_trace(trace, gpus, settings)
    else:
        jobs, devices = _of_store(settings.open_services(), days, gpus)
    found: dict[str, tuple[ReplayFigures, int]] = {}
    for name in names:
        player: ReplayTarget
        if name == OURS:
            player = scheduler = settings.scheduler()
            scheduler.set_capacity(devices)
        else:
            player = replay.make(name, jobs)
        replayed = replay_trace(jobs, devices, player, replay.wakes(name))
        found[name] = figures(replayed), replayed.refused
    value = {
        "devices": dict(devices),
        "jobs": len(jobs),
        "policies": {
            name: {**asdict(some), "refused": refused} for name, (some, refused) in found.items()
        },
    }
    text = table(
        HEADERS, [_simulate_row(name, some) for name, (some, _) in found.items()], HEADERS[1:]
    )
    refused = max((number for _, number in found.values()), default=0)
    about = f"{count(len(jobs), 'session')} on {count(sum(devices.values()), 'GPU')}"
    about += f", {refused} of them wider than that" if refused else ""
    show(value, f"{text}\n\nWaits in hours; {about}.")


OURS = "gpuspawner"
"""The hub's own scheduler, with its configured settings."""


def _names(chosen: Sequence[str]) -> list[str]:
    names = [OURS, *replay.NAMES]
    if unknown := [name for name in chosen if name not in names]:
        sentence = f"There is no policy {unknown[0]!r}; there are {', '.join(names)}."
        raise InvalidRequest(sentence, field="policy")
    return list(chosen or names)


def _of_trace(
    path: str, gpus: int | None, settings: Settings
) -> tuple[Sequence[TraceJob], Mapping[str, int]]:
    """Return the jobs of a CSV file, and identical GPUs."""
    try:
        jobs = read_trace(Path(path))
    except TraceError as error:
        raise InvalidRequest(str(error), field="trace") from None
    return jobs, {ANY: gpus or max(1, _devices(settings.open_services()).total())}


def _of_store(
    services: Services, days: int, gpus: int | None
) -> tuple[Sequence[TraceJob], Mapping[str, int]]:
    """Return the site's own sessions, and its own devices or ``gpus`` identical ones."""
    devices: Mapping[str, int] = {ANY: gpus} if gpus else _devices(services)
    jobs = []
    for asked_at, lease in services.queue.asked_for(services.clock() - timedelta(days=days)):
        started, ended = lease.started_at or lease.granted_at, lease.ended_at or lease.granted_at
        held = {pool_of(kind_of(device)) for device in lease.devices}
        alike = frozenset(kind for kind in devices if pool_of(open_kind(kind)) in held)
        kinds = frozenset({ANY}) if gpus else alike
        if not kinds:
            continue  # these devices do not exist any more
        jobs.append(
            TraceJob(
                asked_at=asked_at.timestamp(),
                duration=max(0.0, (ended - started).total_seconds()),
                devices=lease.device_count,
                member=lease.server.user,
                group=lease.group,
                kinds=kinds,
                seconds=float(lease.seconds) if lease.seconds is not None else None,
            )
        )
    if not jobs:
        raise InvalidRequest(
            f"No session with GPUs ended in the last {days} days: there is nothing to replay. "
            "Take more --days, or a --trace.",
            field="days",
        )
    note(f"The sessions of the last {days} days, as they were requested.")
    return jobs, devices


def _devices(services: Services) -> Counter[str]:
    return Counter(kind_of(d) for d in services.devices.look().devices if leasable(d) is None)


def _simulate_row(name: str, some: ReplayFigures) -> tuple[Any, ...]:
    hours = (some.mean, some.p50, some.p95, some.longest, some.worst_group)
    numbers = [f"{value:.2f}" for value in hours]
    ratios = [f"{some.slowdown:.1f}", f"{some.utilisation:.0%}", f"{some.fairness:.3f}"]
    return (name, *numbers, *ratios)
