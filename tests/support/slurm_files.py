"""The files that the tests' Slurm reads: what an admin would write, with waits cut short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CPUS = 16
"""Of each node, whatever this machine has: jobs of tests mostly sleep."""
MEMORY = 4000
"""Megabytes of each node."""
SHARDS = 4
"""Of each device."""
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """What a node is to Slurm."""

    name: str
    address: str
    gres: str
    """Slurm's word for its model of GPU."""
    files: tuple[Path, ...]
    """The device files, in the order of their indices."""
    spare: bool = False
    """Off until Slurm's power saving asks for it."""


@dataclass(frozen=True)
class Places:
    """Where the cluster's parts are."""

    folder: Path
    controller: str
    """The name of the machine that slurmctld and slurmdbd believe to be on."""
    address: str
    controller_port: int
    database_port: int
    accounting_port: int

    @property
    def munge(self) -> Path:
        return self.folder / "munge/socket"


def slurm_conf(
    name: str, places: Places, machines: Sequence[Machine], more: Mapping[str, object]
) -> str:
    """``slurm.conf``; ``more`` adds settings or replaces them."""
    f = places.folder
    settings: dict[str, object] = {
        "ClusterName": name,
        "SlurmctldHost": f"{places.controller}({places.address})",
        "SlurmctldPort": places.controller_port,
        "SlurmUser": "slurm",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={places.munge}",
        "CredType": "cred/munge",
        "StateSaveLocation": f / "state",
        "SlurmdSpoolDir": f / "spool/%n",
        "SlurmctldPidFile": f / "state/slurmctld.pid",
        "SlurmdPidFile": f / "spool/%n.pid",
        "ProctrackType": "proctrack/cgroup",
        "TaskPlugin": "task/cgroup",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "SlurmdParameters": "config_overrides",
        "GresTypes": "gpu,shard",
        "MpiDefault": "none",
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": places.address,
        "AccountingStoragePort": places.accounting_port,
        "AccountingStoragePass": places.munge,
        "AccountingStorageTRES": "gres/gpu,gres/shard",
        "AccountingStorageEnforce": "associations,limits,qos",
        "EnforcePartLimits": "ALL",
        "AccountingStoreFlags": "job_comment",
        "JobAcctGatherType": "jobacct_gather/cgroup",
        "JobAcctGatherFrequency": 30,
        "PriorityType": "priority/multifactor",
        "PriorityDecayHalfLife": "00:10:00",
        "PriorityCalcPeriod": 1,
        "PriorityWeightFairshare": 100000,
        "PriorityWeightAge": 1000,
        "PriorityWeightQOS": 10000,
        # What anybody used counts from the next whole minute on, and until then it is nothing:
        # this is there at once, for points to be taken from.
        "PriorityWeightPartition": 100000,
        "PreemptType": "preempt/qos",
        "PreemptMode": "CANCEL",
        "SchedulerParameters": "bf_interval=1,sched_interval=2,sched_min_interval=200000,"
        "batch_sched_delay=0,defer_batch_sched_delay=0",
        "LaunchParameters": "disable_send_gids",
        "Prolog": f / "bin/prolog",
        "Epilog": f / "bin/epilog",
        "MailProg": "/bin/true",
        # A lost node is seen in 18 s; one that is only slow for a while is not lost.
        "SlurmdTimeout": 10,
        "MessageTimeout": 5,
        "TCPTimeout": 2,
        "SlurmctldTimeout": 10,
        "KillWait": 2,
        "InactiveLimit": 0,
        "MinJobAge": 300,
        "ReturnToService": 2,
        **more,
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    for m in machines:
        gpus, shards = len(m.files), len(m.files) * SHARDS
        lines.append(
            f"NodeName={m.name} NodeAddr={m.address} CPUs={CPUS} RealMemory={MEMORY}"
            f" Gres=gpu:{m.gres}:{gpus},shard:{m.gres}:{shards} Feature={m.gres}"
            f" State={'CLOUD' if m.spare else 'UNKNOWN'}"
        )
    names = ",".join(m.name for m in machines)
    lines.append(
        f"PartitionName=gpu Nodes={names} Default=YES MaxTime=1-0 DefaultTime=10:00"
        " DefMemPerCPU=100 PriorityJobFactor=1"
        " TRESBillingWeights=GRES/gpu=100,GRES/shard=25 State=UP"
    )
    return "\n".join(lines) + "\n"


def gres_conf(machines: Sequence[Machine]) -> str:
    """``gres.conf``: each device by its file, and its shards."""
    lines = []
    for m in machines:
        for file in m.files:
            lines.append(f"NodeName={m.name} Name=gpu Type={m.gres} File={file}")
        for file in m.files:
            lines.append(f"NodeName={m.name} Name=shard Type={m.gres} Count={SHARDS} File={file}")
    return "\n".join(lines) + "\n"


def cgroup_conf() -> str:
    """``cgroup.conf`` for the control groups that this machine has.

    Containers join their job's group, which limits their memory. The devices are Docker's: a
    group whose devices Slurm closed refuses what runc does in it. Nodes have more CPUs for Slurm
    than this machine, so they are not pinned.
    """
    unified = (CGROUPS / "cgroup.controllers").exists()
    lines = (
        ["CgroupPlugin=cgroup/v2", "IgnoreSystemd=yes"] if unified else ["CgroupPlugin=cgroup/v1"]
    )
    lines += [
        f"CgroupMountpoint={CGROUPS}",
        "ConstrainCores=no",
        "ConstrainRAMSpace=yes",
        "ConstrainDevices=no",
    ]
    return "\n".join(lines) + "\n"


def slurmdbd_conf(places: Places, password: str) -> str:
    """``slurmdbd.conf``, which only its own user may read."""
    settings = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={places.munge}",
        "DbdHost": places.controller,
        "DbdAddr": places.address,
        "DbdPort": places.accounting_port,
        "SlurmUser": "slurm",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "127.0.0.1",
        "StoragePort": places.database_port,
        "StorageUser": "slurm",
        "StoragePass": password,
        "StorageLoc": "slurm_accounting",
        "PidFile": places.folder / "state/slurmdbd.pid",
    }
    return "\n".join(f"{key}={value}" for key, value in settings.items()) + "\n"
