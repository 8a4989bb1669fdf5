"""The specification of the job that holds devices for a ticket. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from ..core.errors import TooMuchAsked
from ..core.units import format_memory
from ..devices.models import Device
from ..devices.refusals import no_share_ever
from ..devices.suitability import suitable
from ..leases.models import Request, Sharing
from ..queue.models import Ticket
from .cluster import Cluster, Node, NodeDevice
from .config import MEGABYTE, allocatable_megabytes
from .jobs import HOLDER
from .programs import JobSpec

STARTING = 20
"""Minutes that a job gets beyond the session, which begins when its server responds."""

PRIORITY_A_POINT = 1000
"""The value of an admin's point in Slurm's priorities.

A hundredth of the fair share's weight in the files that ``gpuspawner slurm config`` writes.
"""

BEHIND_ALL = 2_000_000_000
"""Nearly the largest nice value that Slurm accepts."""


@dataclass(frozen=True, slots=True)
class JobResources:
    """What a server needs beside devices."""

    memory_bytes: int = 0
    """0: an equal share of a node's memory for each device."""
    cpus: float = 0.0
    """0: an equal share of a node's CPUs for each device."""


def resources_of(
    *,
    mem_guarantee: int | None,
    mem_limit: int | None,
    cpu_guarantee: float | None,
    cpu_limit: float | None,
    in_job: bool,
) -> JobResources:
    """Return what a job asks for, from what its server is guaranteed and its limits.

    That is the guarantee, or else the limit. ``in_job``: the server's container is in the job's
    cgroup, where it never gets more than the job. Then it is the larger of both, so that the
    container can use all that its limit allows.
    """

    def choose(guarantee: float | None, limit: float | None) -> float:
        return max(guarantee or 0, limit or 0) if in_job else guarantee or limit or 0

    return JobResources(int(choose(mem_guarantee, mem_limit)), choose(cpu_guarantee, cpu_limit))


def devices_of(cluster: Cluster) -> tuple[Device, ...]:
    """Return the devices of all nodes, with as many slots as they have shards."""
    devices = [(node, device) for node in cluster.nodes for device in node.devices]
    return tuple(
        Device(
            uuid=device.uuid,
            index=index,
            model=device.model,
            memory_bytes=device.memory_bytes,
            slots=node.slots_of(device),
        )
        for index, (node, device) in enumerate(devices)
    )


def able(request: Request, cluster: Cluster) -> frozenset[str]:
    """Return the nodes that a request's job may run on. Raises TooMuchAsked if there are none."""
    return frozenset(node.name for node in _wanted(request, cluster).nodes)


def of(
    ticket: Ticket,
    cluster: Cluster,
    *,
    user: str = "",
    account: str = "",
    lacking: Collection[str] = (),
    resources: JobResources | None = None,
) -> JobSpec:
    """Return the job of a ticket.

    The only free text in it is the comment, which is JSON. ``lacking``: suitable nodes that must
    not be chosen. Raises TooMuchAsked for what no node has.
    """
    request = ticket.request
    wanted = _wanted(request, cluster)
    cpus, megabytes = _room(wanted, resources or JobResources())
    return JobSpec(
        name=f"{HOLDER}{ticket.id}",
        comment=json.dumps({"server": str(ticket.server), "kind": ticket.server.kind.value}),
        partition=cluster.partition,
        cpus=cpus,
        megabytes=megabytes,
        gres=wanted.gres,
        minutes=None if ticket.seconds is None else minutes(ticket.seconds),
        excluded=tuple(excluded(request, cluster, lacking)),
        nice=nice_of(ticket),
        user=user,
        account=account,
    )


def excluded(request: Request, cluster: Cluster, lacking: Collection[str]) -> list[str]:
    """Return the sorted nodes that Slurm must not choose. Raises TooMuchAsked."""
    return sorted({*_wanted(request, cluster).excluded, *lacking})


def nice_of(ticket: Ticket) -> int:
    """Return the nice value of a ticket's job, relative to everybody's."""
    return -round(ticket.boost * PRIORITY_A_POINT) + (BEHIND_ALL if ticket.last else 0)


def minutes(seconds: int) -> int:
    """Return the time limit of a job for a session of this many seconds."""
    return math.ceil(seconds / 60) + STARTING


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What a job asks Slurm for. Every device that Slurm may give it suits the request."""

    kind: str
    """``gpu`` or ``shard``."""
    count: int
    """How many devices, or how many shards of one device."""
    type: str = ""
    """Slurm's only type for it; empty if any suits."""
    excluded: tuple[str, ...] = ()
    """The nodes with unsuitable devices that Slurm could choose."""
    nodes: tuple[Node, ...]
    """The nodes that have it."""

    @property
    def gres(self) -> str:
        """The value of ``--gres``: ``gpu:a100:2`` or ``shard:3``."""
        return ":".join([self.kind, *([self.type] if self.type else []), str(self.count)])

    def part_of(self, node: Node) -> float:
        """Return the part of a node's CPUs and memory that is an equal share for the job."""
        part = self.count / len(node.devices)
        if self.kind == "gpu":
            return part
        return part / max(node.slots_of(d) for d in node.devices if self.type in ("", d.gres))


def _wanted(request: Request, cluster: Cluster) -> _Wanted:
    """Return what a request's job asks for. Raises TooMuchAsked for what no node has."""
    devices = devices_of(cluster)
    matching = suitable(request, devices)
    kind, amount = "gpu", request.devices
    if request.sharing is Sharing.SLOT:
        if not matching or request.devices > 1:
            raise no_share_ever(request, list(devices), matching)
        kind, (amount, matching) = "shard", _alike_in_shards(request, matching)
    fitting = {device.uuid for device in matching}
    nodes = [node for node in cluster.nodes if _offered(request, node)]
    counts = {node.name: _suited(node, fitting) for node in nodes}
    most = max((max(count.values(), default=0) for count in counts.values()), default=0)
    if most < request.devices:
        raise _too_many(request, most)
    # Devices of one server are of one model, and Slurm may choose among the others.
    good = {
        node.name
        for node in nodes
        if sum(counts[node.name].values()) == len(_offered(request, node))
        and (request.devices == 1 or len(counts[node.name]) == 1)
    }
    type_, bad = "", [node.name for node in nodes if node.name not in good]
    types = {each for count in counts.values() for each in count}
    is_one_there = any(sum(counts[name].values()) >= request.devices for name in good)
    if bad and (len(types) == 1 or not is_one_there):
        # For nodes of several models: the most frequent one.
        type_ = max(sorted(types), key=lambda each: max(count[each] for count in counts.values()))
        offering = [n for n in nodes if any(d.gres == type_ for d in _offered(request, n))]
        bad = [node.name for node in offering if not counts[node.name][type_]]

    def has_enough(node: Node) -> bool:
        count = counts[node.name]
        return (count[type_] if type_ else max(count.values(), default=0)) >= request.devices

    return _Wanted(
        kind=kind,
        count=amount,
        type=type_,
        excluded=tuple(bad),
        nodes=tuple(n for n in nodes if n.name not in bad and has_enough(n)),
    )


def _alike_in_shards(request: Request, matching: Collection[Device]) -> tuple[int, list[Device]]:
    """Return a number of shards, and the devices that come to the memory with so many.

    Slurm takes one number for all devices. That which most of them need has the shortest queue; of
    several such numbers, it is the least.
    """
    needed = Counter(device.slots_for(request.memory_bytes) for device in matching)
    count = max(sorted(needed), key=lambda each: needed[each])
    return count, [d for d in matching if d.slots_for(request.memory_bytes) == count]


def _offered(request: Request, node: Node) -> list[NodeDevice]:
    """Return the devices of a node that Slurm has for such a request, whatever their model."""
    if request.sharing is Sharing.WHOLE:
        return list(node.devices)
    return [device for device in node.devices if node.slots_of(device) > 1]


def _room(wanted: _Wanted, needs: JobResources) -> tuple[int, int]:
    """Return the CPUs and megabytes of a job. Raises TooMuchAsked."""
    nodes = wanted.nodes
    _require_room(needs, nodes)
    cpus = math.ceil(needs.cpus) or int(min(n.cpus * wanted.part_of(n) for n in nodes))
    megabytes = math.ceil(needs.memory_bytes / MEGABYTE) or int(
        min(_megabytes(node) * wanted.part_of(node) for node in nodes)
    )
    return max(1, cpus), max(1, megabytes)


def _require_room(needs: JobResources, nodes: Collection[Node]) -> None:
    """Raise TooMuchAsked if none of the nodes has the memory, or the CPUs, of a job."""
    memory = max(map(allocatable_megabytes, nodes)) * MEGABYTE
    cpus = max(node.cpus for node in nodes)
    if needs.memory_bytes > memory:
        asked, most = f"{format_memory(needs.memory_bytes)} of memory", format_memory(memory)
    elif needs.cpus > cpus:
        asked, most = f"{needs.cpus:g} CPUs", f"{cpus}"
    else:
        return
    raise TooMuchAsked(
        f"This environment needs {asked}, and no suitable machine has more than {most}. Choose "
        "another, or ask your admin to change it."
    )


def _suited(node: Node, fitting: Collection[str]) -> Counter[str]:
    return Counter(device.gres for device in node.devices if device.uuid in fitting)


def _too_many(request: Request, most: int) -> TooMuchAsked:
    what = "GPUs"
    if request.model:
        what += f" of model {request.model}"
    if request.memory_bytes:
        what += f" with {format_memory(request.memory_bytes)}"
    if not most:
        return TooMuchAsked(f"No machine has {what}. Choose another.", asked=request.devices)
    return TooMuchAsked(
        f"You asked for {request.devices} {what} for one server, but no machine has more than "
        f"{most}. Ask for {most} at most.",
        asked=request.devices,
        most=most,
    )


def _megabytes(node: Node) -> float:
    """Return how much memory of a node is divided equally among its devices."""
    return node.memory_bytes / MEGABYTE * 0.9
