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
from ..devices.refusals import no_slot_ever
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
    """Return the nodes with suitable devices. Raises TooMuchAsked if there are none."""
    _, types, without = _wanted(request, cluster)
    fitting = {device.uuid for device in suitable(request, devices_of(cluster))}

    def most(node: Node) -> int:
        count = _suited(node, fitting)
        return max((count[each] for each in types or count), default=0)

    nodes = (node for node in cluster.nodes if node.name not in without)
    return frozenset(node.name for node in nodes if most(node) >= request.devices)


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
    kind, types, _ = _wanted(request, cluster)
    nodes = [cluster.node(name) for name in able(request, cluster)]
    cpus, megabytes = _room(request, nodes, resources or JobResources())
    return JobSpec(
        name=f"{HOLDER}{ticket.id}",
        comment=json.dumps({"server": str(ticket.server), "kind": ticket.server.kind.value}),
        partition=cluster.partition,
        cpus=cpus,
        megabytes=megabytes,
        gres=":".join([kind, *types, str(request.devices)]),
        minutes=None if ticket.seconds is None else minutes(ticket.seconds),
        excluded=tuple(excluded(request, cluster, lacking)),
        nice=nice_of(ticket),
        user=user,
        account=account,
    )


def excluded(request: Request, cluster: Cluster, lacking: Collection[str]) -> list[str]:
    """Return the sorted nodes that Slurm must not choose. Raises TooMuchAsked."""
    return sorted({*_wanted(request, cluster)[2], *lacking})


def nice_of(ticket: Ticket) -> int:
    """Return the nice value of a ticket's job, relative to everybody's."""
    return -round(ticket.boost * PRIORITY_A_POINT) + (BEHIND_ALL if ticket.last else 0)


def minutes(seconds: int) -> int:
    """Return the time limit of a job for a session of this many seconds."""
    return math.ceil(seconds / 60) + STARTING


def _wanted(request: Request, cluster: Cluster) -> tuple[str, list[str], Collection[str]]:
    """Return the kind of gres, its type if it must be one, and the unsuitable nodes."""
    devices = devices_of(cluster)
    fitting = {device.uuid for device in suitable(request, devices)}
    is_slot = request.sharing is Sharing.SLOT
    if is_slot and (not fitting or request.devices > 1):
        matching = [device for device in devices if device.uuid in fitting]
        raise no_slot_ever(request, list(devices), matching)
    kind = "shard" if is_slot else "gpu"
    nodes = [node for node in cluster.nodes if _offered(request, node)]
    counts = {node.name: _suited(node, fitting) for node in nodes}
    most = max((max(count.values(), default=0) for count in counts.values()), default=0)
    if most < request.devices:
        raise _too_many(request, most)
    types = {each for count in counts.values() for each in count}
    # Devices of one server are of one model, and Slurm may choose among the others.
    good = {
        node.name
        for node in nodes
        if sum(counts[node.name].values()) == len(_offered(request, node))
        and (request.devices == 1 or len(counts[node.name]) == 1)
    }
    if len(good) == len(nodes):
        return kind, [], ()
    if len(types) == 1:
        return kind, sorted(types), ()
    if any(sum(counts[name].values()) >= request.devices for name in good):
        return kind, [], [node.name for node in nodes if node.name not in good]
    # For nodes of several models: the most frequent one.
    best = max(sorted(types), key=lambda each: max(count[each] for count in counts.values()))
    return kind, [best], ()


def _offered(request: Request, node: Node) -> list[NodeDevice]:
    """Return the devices of a node that Slurm has for such a request, whatever their model."""
    if request.sharing is Sharing.WHOLE:
        return list(node.devices)
    return [device for device in node.devices if node.slots_of(device) > 1]


def _part(request: Request, node: Node) -> float:
    """Return the part of a node that is a request's equal share of its CPUs and memory."""
    part = request.devices / len(node.devices)
    if request.sharing is Sharing.WHOLE:
        return part
    return part / max(node.slots_of(device) for device in node.devices)


def _room(request: Request, nodes: Collection[Node], needs: JobResources) -> tuple[int, int]:
    """Return the CPUs and megabytes of a job on any of these nodes. Raises TooMuchAsked."""
    _require_room(needs, nodes)
    cpus = math.ceil(needs.cpus) or int(min(n.cpus * _part(request, n) for n in nodes))
    megabytes = math.ceil(needs.memory_bytes / MEGABYTE) or int(
        min(_megabytes(node) * _part(request, node) for node in nodes)
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
