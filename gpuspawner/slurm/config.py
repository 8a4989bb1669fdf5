"""Slurm's configuration files from a cluster: pure builders of what nodes have in /etc/slurm."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import yaml

from .cluster import Cluster, Node, NodeDevice

TESTED = ("22.05.8",)
"""The versions of Slurm that the tests run."""

MEMORY_PART = 97
"""Percent of a node's memory that Slurm allocates. The rest is for the system.

So a new kernel that leaves a little less does not put the node out of service.
"""

MEGABYTE = 2**20

GPU_BILLING = 10_000
"""What a whole GPU adds to a job's billing; a shard adds its part of it.

Slurm rounds a job's billing down. This is large enough that a limit of one GPU lets no shard in
beyond those of one GPU.
"""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What a site can choose besides its nodes."""

    controller: str
    """The host of slurmctld and slurmdbd, as printed by ``hostname -s``."""
    address: str = ""
    """Its address for the nodes; empty if its name is enough."""
    longest_hours: int = 168
    """The longest time limit of a job; half an hour is added, for servers that start slowly."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Settings of slurm.conf to add, or to replace ours."""


def is_tested(version: str) -> bool:
    """Return True if a version of Slurm, such as ``22.05.11``, is of a tested series.

    Others are refused, because their output differs.
    """
    return _series(version) in map(_series, TESTED)


def _series(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


_SLURM_CONF = """\
# Who decides, and how the daemons know each other.
ClusterName={name}
SlurmctldHost={host}
SlurmUser=slurm
AuthType=auth/munge
AuthInfo=socket=/run/munge/munge.socket.2
CredType=cred/munge
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log

# Devices, cores and memory are given out one by one. Containers join their job's control
# group, so that the job's limits are theirs.
GresTypes=gpu,shard
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
MpiDefault=none

# No container outlives its job: the epilog removes it before the devices go to the next.
# A node whose epilog fails is drained; a node whose prolog fails takes no job.
Epilog=/etc/slurm/gpuspawner-epilog
Prolog=/etc/slurm/gpuspawner-prolog
KillWait=10

# The order: fair share before age, and a QOS may preempt another.
PriorityType=priority/multifactor
PriorityDecayHalfLife=7-0
PriorityCalcPeriod=1
PriorityMaxAge=1-0
PriorityWeightFairshare=100000
PriorityWeightAge=1000
PriorityWeightQOS=10000
PreemptType=preempt/qos
PreemptMode=CANCEL
EnforcePartLimits=ALL
SchedulerParameters=bf_interval=5,bf_continue,sched_interval=5,sched_min_interval=200000,batch_sched_delay=0,nohold_on_prolog_fail

# Who used what: credits are audited against it.
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={accounting}
AccountingStoragePass=/run/munge/munge.socket.2
AccountingStorageTRES={tres}
AccountingStorageEnforce=associations,limits,qos
AccountingStoreFlags=job_comment
JobAcctGatherType=jobacct_gather/cgroup
JobAcctGatherFrequency=30
MinJobAge=300

# A lost node is noticed in about 20 seconds; one that comes back takes work again.
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=5
TCPTimeout=2
InactiveLimit=0
ReturnToService=2
"""


def slurm_conf(cluster: Cluster, options: SlurmOptions) -> str:
    """Return ``slurm.conf``, the same for every node."""
    types = sorted({d.gres for node in cluster.nodes for d in node.devices if d.gres})
    shared = sorted({name for node in cluster.nodes for name in node.shards})
    usual = _SLURM_CONF.format(
        name=cluster.name,
        host=options.controller + (f"({options.address})" if options.address else ""),
        accounting=options.address or options.controller,
        tres=",".join([*_tres("gres/gpu", types), *_tres("gres/shard", shared)]),
    )
    more = {key.lower(): f"{key}={value}" for key, value in options.more.items()}
    lines: list[str] = []
    for line in usual.splitlines():
        key = line.partition("=")[0]
        replaced = more.pop(key.lower(), "").partition("=")[2]
        lines.append(f"{key}={replaced}" if replaced else line)
    if more:
        lines += ["", "# This site's own.", *more.values()]
    lines += ["", "# The nodes."]
    lines += [_node_line(node) for node in cluster.nodes]
    hours = options.longest_hours
    names = ",".join(node.name for node in cluster.nodes)
    lines.append(
        f"PartitionName={cluster.partition} Nodes={names} Default=YES State=UP"
        f" MaxTime={hours // 24}-{hours % 24:02}:30:00 DefMemPerCPU=1024"
        f" TRESBillingWeights={_billing(cluster)}"
    )
    return "\n".join(lines) + "\n"


def _tres(kind: str, types: Iterable[str]) -> list[str]:
    return [kind, *(f"{kind}:{name}" for name in types)]


def _billing(cluster: Cluster) -> str:
    """Return what a job counts as for fair share and limits: its GPUs, a shard as its part.

    A shard whose type the job does not name counts as the smallest one. For one that is named,
    Slurm adds both weights.
    """
    sizes: dict[str, set[int]] = {}
    for node in cluster.nodes:
        for name, shards in node.shards.items():
            sizes.setdefault(name, set()).add(shards)
    most = cluster.most_shards
    weights = [f"GRES/gpu={GPU_BILLING}", f"GRES/shard={GPU_BILLING / most:.2f}"]
    for name, counts in sorted(sizes.items()):
        if more := GPU_BILLING / max(counts) - GPU_BILLING / most:
            weights.append(f"GRES/shard:{name}={more:.2f}")
    return ",".join(weights)


def _node_line(node: Node) -> str:
    gres = [f"gpu:{name}:{count}" for name, count in counts(node).items()]
    # With types, though gres.conf implies them: a controller of Slurm 22.05 that starts while there
    # are jobs with shards knows of no type else, and refuses every job that names one.
    shards: Counter[str] = Counter()
    for device in shared_devices(node):
        shards[device.gres] += node.slots_of(device)
    gres += [f"shard:{name}:{count}" for name, count in shards.items()]
    words = [f"NodeName={node.name}", f"NodeAddr={node.address}", f"CPUs={node.cpus}"]
    words += [node.layout] if node.layout else []
    words += [f"RealMemory={allocatable_megabytes(node)}"]
    words += [f"Gres={','.join(gres)}"] if gres else []
    words += [f"Feature={','.join(counts(node))}"] if node.devices else []
    return " ".join([*words, "State=UNKNOWN"])


def allocatable_megabytes(node: Node) -> int:
    """Return how much of a node's memory Slurm allocates to jobs, in megabytes."""
    return node.memory_bytes * MEMORY_PART // 100 // MEGABYTE


def counts(node: Node) -> Counter[str]:
    """Return how many devices a node has of each type, in the order of its devices."""
    return Counter(device.gres for device in node.devices)


def shared_devices(node: Node) -> list[NodeDevice]:
    """Return the devices of a node that have shards."""
    return [device for device in node.devices if node.slots_of(device) > 1]


def gres_conf(cluster: Cluster) -> str:
    """Return ``gres.conf``: the devices of every node, in the order of Slurm's indices."""
    lines = ["AutoDetect=off"]
    for node in cluster.nodes:
        name = f"NodeName={node.name}"
        lines += [f"{name} Name=gpu Type={d.gres} File={d.file}" for d in node.devices]
        lines += [
            f"{name} Name=shard Type={d.gres} Count={node.slots_of(d)} File={d.file}"
            for d in shared_devices(node)
        ]
    return "\n".join(lines) + "\n"


def cgroup_conf() -> str:
    """Return ``cgroup.conf``."""
    return """\
ConstrainCores=yes
ConstrainRAMSpace=yes
# Docker gives each container its devices, and no others. A control group whose devices Slurm has
# closed refuses what runc does in it, and no container could start in the job's group.
ConstrainDevices=no
"""


def slurmdbd_conf(options: SlurmOptions) -> str:
    """Return ``slurmdbd.conf``, only for the controller: owned by slurm, mode 600.

    It contains no password: the database is on the same host, and identifies the user by the
    socket.
    """
    return f"""\
AuthType=auth/munge
AuthInfo=socket=/run/munge/munge.socket.2
DbdHost={options.controller}
SlurmUser=slurm
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm_acct_db
LogFile=/var/log/slurm/slurmdbd.log
PidFile=/run/slurmdbd.pid
"""


def cluster_yaml(cluster: Cluster) -> str:
    """Return ``cluster.yaml`` for :func:`~gpuspawner.slurm.cluster.read_cluster`."""
    top: dict[str, Any] = {"name": cluster.name, "partition": cluster.partition}
    if cluster.hub_address:
        top["hub_address"] = cluster.hub_address
    if cluster.slurm_conf:
        top["slurm_conf"] = cluster.slurm_conf
    top["nodes"] = {node.name: _node_yaml(node) for node in cluster.nodes}
    return yaml.safe_dump(top, sort_keys=False, allow_unicode=True, width=100)


def _node_yaml(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = {"address": node.address, "engine": node.engine}
    if node.tls:
        found["tls"] = asdict(node.tls)
    if node.sampler:
        found["sampler"] = node.sampler
    found |= {"cpus": node.cpus, "memory": node.memory_bytes}
    if node.layout:
        found["layout"] = node.layout
    if node.shards:
        found["shards"] = dict(node.shards)
    found["devices"] = [
        {
            "uuid": device.uuid,
            "model": device.model,
            "memory": device.memory_bytes,
            "file": device.file,
            "gres": device.gres,
        }
        for device in node.devices
    ]
    return found
