"""A cluster on the files that ``gpuspawner slurm config`` writes, as an admin would run it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from gpuspawner.cli.app import main
from gpuspawner.slurm.cluster import Cluster, read_cluster
from gpuspawner.slurm.cluster import NodeDevice as Described
from gpuspawner.slurm.cluster_commands import HostInventory
from tests.support import processes
from tests.support.slurm_cluster import A100, H100, SCRIPTS, SlurmCluster
from tests.support.slurm_node import Node


class ConfiguredCluster(SlurmCluster):
    """Two nodes; the second device of the first is of another model than the first one.

    ``shards``: which are shared, as ``--shards`` takes it.
    """

    def __init__(self, *shards: str) -> None:
        super().__init__((A100, H100))
        self.shards = shards

    @property
    def file(self) -> Path:
        """``cluster.yaml``."""
        return self.directory / "etc/cluster.yaml"

    def described(self) -> Cluster:
        """The cluster as that file has it."""
        return read_cluster(self.file)

    def write(self, *more: str) -> int:
        """Run ``gpuspawner slurm config`` for these nodes; its exit status."""
        hosts = [f"{n.address}={self._inventory(n)}" for n in self.nodes]
        settings = [f"--set={name}={value}" for name, value in self._places().items()]
        controller = f"{self.places.controller}={self.places.address}"
        words = ["--out", str(self.conf.parent), "--controller", controller]
        words += ["--name", self.cluster_name, *(f"--shards={each}" for each in self.shards)]
        words += ["--tls", str(self._certificates), *settings, *more]
        return main(["slurm", "config", *words, *hosts])

    @property
    def _certificates(self) -> Path:
        return self.directory / "certificates"

    def _make_certificates(self) -> None:
        """By the script that sites get; each engine has its own, and this machine's for tests."""
        hub = self._certificates
        processes.run([SCRIPTS / "certificates", hub, *(n.address for n in self.nodes)])
        for node in self.nodes:
            own = hub / node.address
            for name in ("cert.pem", "key.pem"):
                shutil.copy(hub / name, own)
            node.engine.tls = own

    def _plan_nodes(self) -> None:
        super()._plan_nodes()
        engine = self.nodes[0].engine
        one, two = engine.devices
        other = replace(two, model=H100.model, memory_bytes=H100.memory_bytes)
        engine.devices = (one, other)
        self._make_certificates()

    def _inventory(self, node: Node) -> Path:
        """What the node would have said if it were a machine."""
        found = HostInventory(
            hostname=node.name,
            cpus=8,
            memory_bytes=4 * 2**30,
            slurm="22.05.8",
            engine="20.10.24",
            devices=tuple(
                Described(d.uuid, d.model, d.memory_bytes, str(d.file)) for d in node.devices
            ),
        )
        path = self.directory / "etc" / f"{node.name}.json"
        path.write_text(json.dumps(asdict(found)))
        return path

    def _places(self) -> dict[str, object]:
        """What is elsewhere than on an admin's machines."""
        p, f = self.places, self.directory
        return {
            "SlurmctldPort": p.controller_port,
            "AuthInfo": f"socket={p.munge}",
            "AccountingStoragePass": p.munge,
            "AccountingStoragePort": p.accounting_port,
            "StateSaveLocation": f / "state",
            "SlurmdSpoolDir": f / "spool/%n",
            "SlurmctldPidFile": f / "state/slurmctld.pid",
            "SlurmdPidFile": f / "spool/%n.pid",
            "SlurmctldLogFile": f / "state/slurmctld.log",
            "SlurmdLogFile": f / "spool/%n.log",
            "Epilog": f / "bin/epilog",
            "Prolog": f / "bin/prolog",
            "MailProg": "/bin/true",
            "SlurmdParameters": "config_overrides",  # this machine has fewer CPUs
        }

    def _write_conf(self) -> None:
        """Also slurmdbd.conf, which the tests' own replaces: another port, and a password."""
        if self.write():
            raise RuntimeError("gpuspawner slurm config wrote nothing")
