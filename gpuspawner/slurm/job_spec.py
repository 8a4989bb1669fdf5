"""The specification of the job that holds devices for a ticket. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection

from ..core.errors import TooMuchAsked
from ..devices.models import Device
from ..devices.placement import format_memory, suitable
from ..leases.models import Request
from ..queue.models import Ticket
from .cluster import Cluster, Node
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


def devices_of(cluster: Cluster) -> tuple[Device, ...]:
    """Return the devices of all nodes."""
    devices = [device for node in cluster.nodes for device in node.devices]
    slots = max(1, cluster.shards)
    return tuple(
        Device(uuid=d.uuid, index=i, model=d.model, memory_bytes=d.memory_bytes, slots=slots)
        for i, d in enumerate(devices)
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
) -> JobSpec:
    """Return the job of a ticket.

    The only free text in it is the comment, which is JSON. ``lacking``: suitable nodes that must
    not be chosen. Raises TooMuchAsked for what no node has.
    """
    request = ticket.request
    kind, types, without = _wanted(request, cluster)
    some = [node for node in cluster.nodes if node.name not in without and node.devices]
    share = request.devices / max(1, cluster.shards)
    return JobSpec(
        name=f"{HOLDER}{ticket.id}",
        comment=json.dumps({"server": str(ticket.server), "kind": ticket.server.kind.value}),
        partition=cluster.partition,
        cpus=max(1, int(share * min(node.cpus / len(node.devices) for node in some))),
        megabytes=max(1, int(share * min(_megabytes(node) for node in some))),
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
    fitting = {device.uuid for device in suitable(request, devices_of(cluster))}
    if cluster.shards and request.devices > 1:
        raise TooMuchAsked(
            "GPUs are shared on this cluster, and a server gets one slot. Ask for 1 GPU.",
            asked=request.devices,
            most=1,
        )
    kind = "shard" if cluster.shards else "gpu"
    nodes = [node for node in cluster.nodes if node.devices]
    counts = {node.name: _suited(node, fitting) for node in nodes}
    most = max((max(count.values(), default=0) for count in counts.values()), default=0)
    if most < request.devices:
        raise _too_many(request, most)
    types = {each for count in counts.values() for each in count}
    # Devices of one server are of one model, and Slurm may choose among the others.
    good = {
        node.name
        for node in nodes
        if sum(counts[node.name].values()) == len(node.devices)
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
    """Return what Slurm allocates at most for one device's share of memory."""
    return node.memory_bytes / 2**20 * 0.9 / len(node.devices)
