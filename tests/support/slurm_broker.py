"""Services of a hub whose GPUs a cluster's Slurm gives out, without the hub."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from gpuspawner.leases.models import Request, ServerRef, Sharing, Terms
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from gpuspawner.slurm.cluster import Cluster
from gpuspawner.slurm.config import cluster_yaml
from tests.support import processes
from tests.support.brokers import make_services, migrated_bytes
from tests.support.processes import wait_for
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_daemons import program
from tests.support.slurm_hub import described


def opened(
    folder: Path, cluster: SlurmCluster, *, shards: int = 0, nodes: Cluster | None = None,
    **config: Any,
) -> Services:  # fmt: skip
    """A hub's services; one of the same folder is the same hub, started anew.

    ``nodes``: the cluster as the hub has it, if not as usual.
    """
    folder.mkdir(exist_ok=True)
    file = folder / "cluster.yaml"
    file.write_text(cluster_yaml(nodes or described(cluster, shards)), encoding="utf-8")
    database = folder / "gpuspawner.sqlite"
    if not database.exists():
        database.write_bytes(migrated_bytes())
    return make_services(database_url=f"sqlite:///{database}", cluster=str(file), **config)


def asked(
    services: Services, user: str, server: str = "", *, devices: int = 1, model: str = "",
    sharing: Sharing = Sharing.WHOLE, memory_bytes: int = 0, **terms: Any,
) -> Ticket:  # fmt: skip
    """A member asks for GPUs, or a share of one, and waits for them."""
    request = Request(devices=devices, model=model, sharing=sharing, memory_bytes=memory_bytes)
    waits = Terms(wait=True, **terms)
    got = services.queue.ask(ServerRef(user, server), request, engine="slurm", terms=waits)
    assert isinstance(got, Ticket)
    return got


def until(services: Services, tickets: list[Ticket], done: Callable[[list[str]], Any]) -> Any:
    """Rounds of the hub's, whose spawns wait with these tickets, until there is something in what
    this says of their turns."""
    present = frozenset(ticket.id for ticket in tickets)
    return wait_for(lambda: done(services.queue.turns(present)), "a turn", timeout=60, interval=0.3)


@contextmanager
def frozen(cluster: SlurmCluster, name: str) -> Iterator[None]:
    """One of the cluster's daemons hangs: it takes questions, and answers none."""
    pids = [
        process.pid
        for process in psutil.process_iter(["name", "environ"])
        if process.info["name"] == name
        and (process.info["environ"] or {}).get("SLURM_CONF") == str(cluster.conf)
    ]
    assert pids, f"there is no {name}"
    for pid in pids:
        processes.signal_pid(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            processes.signal_pid(pid, signal.SIGCONT)


def squeue_without_device(folder: Path) -> str:
    """A PATH on which ``squeue --json`` says of the first job of ours that runs that it got no
    device; its number is then in the file ``none`` in the folder."""
    folder.mkdir()
    script = f"""#!{sys.executable}
import json, pathlib, subprocess, sys
said = subprocess.run([{program("squeue")!r}, *sys.argv[1:]], stdout=subprocess.PIPE).stdout
none = pathlib.Path({str(folder / "none")!r})
if "--json" in sys.argv:
    found = json.loads(said)
    for job in found["jobs"]:
        if job["job_state"] == "RUNNING" and job["name"].startswith("gpuspawner-"):
            if not none.exists():
                none.write_text(str(job["job_id"]))
            if none.read_text() == str(job["job_id"]):
                job["gres_detail"] = ["gpu:a100:0(IDX:)"]
    said = json.dumps(found).encode()
sys.stdout.buffer.write(said)
"""
    path = folder / "squeue"
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def hanging_sacctmgr(folder: Path, change: int) -> str:
    """A PATH on which ``sacctmgr`` makes all changes before this one, counted from 1, which hangs
    while there is the file ``hangs`` in the folder, and then is not made."""
    folder.mkdir()
    changes, hangs = (shlex.quote(str(folder / name)) for name in ("changes", "hangs"))
    script = f"""#!/bin/sh
if [ "$1" = -i ]; then
    echo >> {changes}
    if [ "$(wc -l < {changes})" -ge {change} ]; then
        touch {hangs}
        while [ -e {hangs} ]; do sleep 0.1; done
        exit 1
    fi
fi
exec {shlex.quote(program("sacctmgr"))} "$@"
"""
    path = folder / "sacctmgr"
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)
    return f"{folder}:{processes.system_path()}"


def weak_programs(folder: Path, user: str, words: str) -> str:
    """A PATH on which ``scontrol`` has no admin's rights where these words, a pattern of the
    shell's, are among what it is told; a file ``strong`` in the folder gives them back."""
    folder.mkdir()
    scontrol = shlex.quote(program("scontrol"))
    script = f"""#!/bin/sh
echo "$*" >> {folder}/told
case "$*" in
{words}) [ -e {folder}/strong ] || exec setpriv --reuid={user} --clear-groups {scontrol} "$@" ;;
esac
exec {scontrol} "$@"
"""
    path = folder / "scontrol"
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
