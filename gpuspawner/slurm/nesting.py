"""What a job changes in the container that runs beside it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .cluster import Node
from .engine import LABEL_JOB
from .jobs import Job

CGROUP_V1 = "/slurm_{node}/uid_{uid}/job_{job}/step_batch"
"""Where Debian's slurmd keeps a job's batch step, under each controller of cgroup v1."""


def nest(create: Mapping[str, Any], job: Job, node: Node, cgroup: str) -> dict[str, Any]:
    """The keyword arguments of ``create_container`` for a container of this job on this node.

    ``cgroup`` is the template of its parent, empty for the engine's own: inside of it the job's
    limits hold for the container too. The port is published where the hub reaches the node.
    """
    nested = dict(create)
    nested["labels"] = {**dict(create.get("labels") or {}), LABEL_JOB: str(job.id)}
    host = dict(create.get("host_config") or {})
    if cgroup:
        host["CgroupParent"] = cgroup.format(node=node.name, uid=job.uid, job=job.id)
    host["PortBindings"] = {
        port: [{**binding, "HostIp": node.address} for binding in bindings]
        for port, bindings in (host.get("PortBindings") or {}).items()
    }
    nested["host_config"] = host
    return nested
