"""A whole Slurm for tests: munge, MariaDB, slurmdbd, slurmctld, and nodes with Docker Engines.

Real: all of these from Debian's packages, a network for each node, the control groups. Stand-in:
the GPUs (device files that nothing answers, and the hook of :mod:`tests.support.engine`).

Everything is gone after :meth:`SlurmCluster.stop` but the images in the engines' cache, and
whatever a killed run left behind is cleared away by the next start.
"""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from tests.support import parts, processes, slurm_daemons, slurm_files
from tests.support.engine import PrivateEngine
from tests.support.processes import LIVE, as_root, free_port, take_slot, wait_for
from tests.support.slurm_client import READY, SlurmClient
from tests.support.slurm_daemons import Daemon, file_of, folder_of, on_machine, program
from tests.support.slurm_files import Machine, Places
from tests.support.slurm_images import import_quick_images
from tests.support.slurm_node import (
    Network,
    Node,
    NodeDevice,
    NodeEngine,
    ip,
    remove_groups,
    share_images,
)
from tests.support.slurm_users import Users
from tests.support.tls import make_certificates

DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "slurmstepd")
SLOTS = 16
"""How many clusters one machine can run at once."""
GIB = 2**30


@dataclass(frozen=True)
class NodePlan:
    """A node to make. ``spare``: off until Slurm's power saving asks for it."""

    model: str = "NVIDIA A100-SXM4-40GB"
    gres: str = "a100"
    devices: int = 2
    memory_bytes: int = 40 * GIB
    spare: bool = False


A100 = NodePlan()
H100 = NodePlan("NVIDIA H100 80GB HBM3", "h100", 1, 80 * GIB)

SCRIPTS = processes.REPO / "hub_config/slurm"
SCRIPT = """#!/bin/sh
# As root on the node, around a job: what sites have, with the engine and the Slurm of this node.
here=FOLDER/nodes/$SLURMD_NODENAME
if [ -e "$here/WHICH-fails" ]; then
    echo "made to fail by a test" >&2
    exit 1
fi
DOCKER_HOST=unix://$here/docker.sock SLURM_CONF=FOLDER/etc/slurm.conf OURS
status=$?
while [ -e "$here/WHICH-waits" ]; do sleep 0.1; done
exit $status
"""


class SlurmCluster(SlurmClient):
    """``with SlurmCluster() as cluster``: a Slurm of our own; its clients want ``SLURM_CONF``.

    ``settings`` adds to slurm.conf or replaces what is in it.
    """

    def __init__(
        self,
        plans: Sequence[NodePlan] = (A100, H100),
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.plans = tuple(plans)
        self.settings = dict(settings or {})
        self.name = "slurm"
        self.nodes: tuple[Node, ...] = ()
        self.users = Users()
        self._lock: IO[str] | None = None
        self._first_job = 1
        self._daemons: dict[str, Daemon] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Where things are.

    @property
    def address(self) -> str:
        """This machine's address as nodes and their containers see it: a hub's ``hub_ip``."""
        return f"10.233.{self.slot}.1"

    @property
    def spare(self) -> tuple[Node, ...]:
        """The nodes that Slurm's power saving has to bring up."""
        return tuple(n for n in self.nodes if n.machine.spare)

    # Starting and ending.

    def start(self) -> None:
        """Bring everything up, nodes and database side by side."""
        parts.require("slurm")
        self.slot, self.directory, self._lock = take_slot("gpuspawner-slurm", SLOTS)
        self.cluster_name = f"lab{self.slot}"
        self.conf = self.directory / "etc/slurm.conf"
        # The kernel ends a daemon with the thread that started it: these live as long as we.
        self._threads = ThreadPoolExecutor(8)
        self._clear()
        LIVE.append(self)
        for name in ("etc", "log", "bin", "spool", "nodes"):
            (self.directory / name).mkdir()
        self._plan_nodes()
        self._make_network()
        self._write_files()
        engines = [self._threads.submit(_start_engine, node.engine) for node in self.nodes]
        accounting = self._threads.submit(self._start_accounting)
        for each in (*engines, accounting):
            each.result()
        self._start_slurm()

    def stop(self) -> None:
        """End all of it and give the slot back."""
        if self in LIVE:
            LIVE.remove(self)
        if self._lock is None:
            return
        for daemon in reversed(self._daemons.values()):
            daemon.end(signal.SIGKILL)  # no longer needed; and nothing asks it to wait for jobs
        self._daemons.clear()
        list(self._threads.map(lambda node: node.engine.stop(), self.nodes))
        self._threads.shutdown()
        self._clear()
        self.users.remove_all()
        self._lock.close()
        self._lock = None

    # What tests do with it.

    def cut(self, node: Node) -> None:
        """Take the node's cable out. What runs on it goes on."""
        ip("link", "set", node.engine.network.link, "down")

    def heal(self, node: Node) -> None:
        """Put it back in."""
        ip("link", "set", node.engine.network.link, "up")

    def kill(self, daemon: str) -> None:
        """SIGKILL ``slurmctld``, ``slurmdbd``, ``mariadbd`` or ``munged``."""
        self._daemons[daemon].end(signal.SIGKILL)

    def restart(self, daemon: str) -> None:
        """Start it again; a running one ends first, as by an admin."""
        self._daemons[daemon].end()
        self._start(daemon)

    def reconfigure(self, **settings: object) -> None:
        """Replace these settings of slurm.conf while everything runs."""
        self._write_settings(settings)
        self.run("scontrol", "reconfigure")

    def save(self, user: str) -> None:
        """Wait until the controller has written down what happened so far: what happens in its
        last seconds is lost when it is killed."""
        word = f"last-word-{secrets.token_hex(4)}"  # those of before are in the file, too
        self.hold(user, "--hold", f"--job-name={word}")
        look = as_root(["grep", "-q", word, str(self.directory / "state/job_state")])
        wait_for(lambda: subprocess.run(look, check=False).returncode == 0, "it to be saved")
        self.run("scancel", f"--name={word}")

    def fail_epilog(self, node: Node) -> None:
        """From now on the node's epilog fails, which drains the node."""
        self._trap(node).touch()

    @contextmanager
    def epilog_waits(self, node: Node) -> Iterator[None]:
        """Meanwhile the epilog has done its work and does not end, so that no job of it ends."""
        mark = node.engine.directory / "epilog-waits"
        mark.touch()
        try:
            yield
        finally:
            mark.unlink()

    def mend_epilog(self, node: Node) -> None:
        """It works again; the node still has to be resumed."""
        self._trap(node).unlink(missing_ok=True)
        self.run("scontrol", "update", f"nodename={node.name}", "state=resume", check=False)

    def load_images(self, source: PrivateEngine, *tags: str) -> None:
        """Give every node the images of another engine; quick when they have them.

        What is in :mod:`tests.support.slurm_images` they have anyway.
        """
        share_images(source, tags, [node.engine for node in self.nodes])

    def mend(self) -> None:
        """Every part runs, is connected, and takes jobs again."""
        for node in self.nodes:
            self.heal(node)
            self._trap(node).unlink(missing_ok=True)
        for name, daemon in self._daemons.items():
            spare = any(name == f"slurmd of {node.name}" for node in self.spare)
            if not daemon.running and not spare:
                self._start(name)
        states = self.node_states()
        for node in self.nodes:
            if not node.machine.spare and states[node.name] not in READY:
                self.run("scontrol", "update", f"nodename={node.name}", "state=resume", check=False)
        self.wait_nodes(timeout=60)

    def clean(self) -> None:
        """No job, no container: as it was before a test."""
        self.mend()
        if jobs := self.run("squeue", "-h", "-o", "%i").split():
            self.run("scancel", *jobs, check=False)
            wait_for(lambda: not self.run("squeue", "-h", "-o", "%i"), "all jobs to end")
        for node in self.nodes:
            node.engine.clean()

    def log_text(self) -> str:
        """The last lines of every daemon."""
        return "\n".join(f"--- {d.name}\n{d.log_text()}" for d in self._daemons.values())

    # Below here: how.

    def _plan_nodes(self) -> None:
        bridge, made = f"gpss{self.slot}", []
        tls = self.directory / "tls"
        for i, plan in enumerate(self.plans):
            name, address = f"gpu{self.slot}{chr(ord('a') + i)}", f"10.233.{self.slot}.{11 + i}"
            home = self.directory / "nodes" / name
            home.mkdir()
            files = tuple(home / f"nvidia{n}" for n in range(plan.devices))
            for n, file in enumerate(files):  # NVIDIA's number, which nothing answers here
                processes.run(as_root(["mknod", "-m", "666", str(file), "c", "195", str(n)]))
            machine = Machine(name, address, plan.gres, files, plan.spare)
            network = Network(f"gpuspawner-{name}", f"{bridge}n{i}", bridge, address)
            place = self.slot * 16 + i
            devices = tuple(
                NodeDevice(
                    f"GPU-{place:08x}-5eed-4000-8000-{n:012x}", plan.model, plan.memory_bytes, f
                )
                for n, f in enumerate(files)
            )
            engine = NodeEngine(machine, devices, network, home, place, self.address, tls)
            made.append(Node(name, address, engine, machine))
        self.nodes = tuple(made)
        make_certificates(tls, [node.address for node in self.nodes])

    def _make_network(self) -> None:
        bridge = f"gpss{self.slot}"
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{self.address}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for node in self.nodes:
            node.engine.network.make(node.engine.containers, self.address)

    def _write_files(self) -> None:
        f = self.directory
        ports = [free_port() for _ in range(3)]
        self.places = Places(f, f"head{self.slot}", self.address, *ports)
        folder_of("slurm", f / "state")
        self._password = secrets.token_hex(12)
        self._write_conf()
        accounting = slurm_files.slurmdbd_conf(self.places, self._password).encode()
        file_of("slurm", f / "etc/slurmdbd.conf", accounting, "0600")
        for name in ("prolog", "epilog"):
            script = SCRIPT.replace("FOLDER", str(f)).replace("WHICH", name)
            path = f / "bin" / name
            path.write_text(script.replace("OURS", str(SCRIPTS / f"gpuspawner-{name}")))
            path.chmod(0o755)

    def _write_conf(self) -> None:
        machines = [node.machine for node in self.nodes]
        etc = self.conf.parent
        self.conf.write_text(
            slurm_files.slurm_conf(self.cluster_name, self.places, machines, self.settings)
        )
        (etc / "gres.conf").write_text(slurm_files.gres_conf(machines))
        (etc / "cgroup.conf").write_text(slurm_files.cgroup_conf())

    def _start_accounting(self) -> None:
        f = self.directory
        self._daemons["munged"] = slurm_daemons.munge(f)
        self._daemons["mariadbd"] = slurm_daemons.mariadb(
            f, self.places.database_port, self._password
        )
        self._daemons["slurmdbd"] = self._slurm("slurmdbd", self.places.controller, "-D")
        self._daemons["slurmdbd"].start(self._accounts_answer)
        commands = f"add cluster {self.cluster_name}\n"
        commands += "add qos high priority=100 preempt=normal\n"
        self.run("sacctmgr", "-i", "-Q", text=commands)

    def _start_slurm(self) -> None:
        controller = self._slurm("slurmctld", self.places.controller, "-D")
        self._daemons["slurmctld"] = controller
        controller.start(self._controller_answers)
        for node in self.nodes:
            (self.directory / "spool" / node.name).mkdir()
            # Switched on, it says that it has booted just now: this machine has not.
            booted = ["-b"] if node.machine.spare else []
            daemon = self._slurm("slurmd", node.name, "-D", *booted, "-N", node.name)
            daemon.command = node.engine.network.around(daemon.command)
            self._daemons[f"slurmd of {node.name}"] = daemon
            if not node.machine.spare:
                daemon.start()
        self.wait_nodes()

    def _slurm(self, name: str, machine: str, *options: str) -> Daemon:
        variables = [f"SLURM_CONF={self.conf}", "LC_ALL=C", f"PATH={processes.system_path()}"]
        words: list[str] = [program(name), *options]
        if name != "slurmd":
            words = slurm_daemons.as_user("slurm", words)
        command = on_machine(machine, ["env", *variables, *words])
        return Daemon(name, command, self.directory / f"log/{name}-{machine}")

    def _write_settings(self, settings: Mapping[str, object]) -> None:
        text = self.conf.read_text()
        for key, value in settings.items():
            text = re.sub(rf"(?m)^{key}=.*\n", "", text)
            text = f"{key}={value}\n{text}"
        self.conf.write_text(text)

    def _start(self, name: str) -> None:
        """From a thread that lives as long as we."""
        if name == "slurmctld":
            # Killed, it forgets its newest jobs and gives their numbers again. Nodes do not run a
            # job of a number that they have seen killed of late.
            self._first_job += 1000
            self._write_settings({"FirstJobId": self._first_job})
        answers = {"slurmctld": self._controller_answers, "slurmdbd": self._accounts_answer}
        self._threads.submit(self._daemons[name].start, answers.get(name)).result()

    def _accounts_answer(self) -> bool:
        return "Cluster" in self.run("sacctmgr", "show", "cluster", check=False)

    def _controller_answers(self) -> bool:
        return "UP" in self.run("scontrol", "ping", check=False)

    def _trap(self, node: Node) -> Path:
        return node.engine.directory / "epilog-fails"

    def _clear(self) -> None:
        """End and remove what is there of this slot, ours or a killed run's."""
        prefix = f"gpu{self.slot}"
        for process in psutil.process_iter(["name", "cmdline", "environ"]):
            if self._is_ours(process):
                processes.signal_pid(process.pid, signal.SIGKILL)
        for path in Path("/run/netns").glob(f"gpuspawner-{prefix}[a-z]"):
            name = path.name.removeprefix("gpuspawner-")
            Network(path.name, f"gpss{self.slot}n{ord(name[-1]) - ord('a')}", "", "").remove()
            remove_groups(name)
        ip("link", "del", f"gpss{self.slot}", check=False)
        for point in _mounts_below(self.directory):
            subprocess.run(as_root(["umount", "-l", point]), check=False)
        left = [str(path) for path in self.directory.iterdir() if path.name != "lock"]
        if left:
            processes.run(as_root(["rm", "-rf", *left]))

    def _is_ours(self, process: psutil.Process) -> bool:
        """A daemon of this slot: its command or its environment names a file of ours.

        Nothing else is: a person's shell may name them, too.
        """
        if process.info["name"] not in DAEMONS:
            return False
        conf = (process.info["environ"] or {}).get("SLURM_CONF", "")
        words = [*(process.info["cmdline"] or []), conf]
        return any(f"{self.directory}/" in word for word in words)


def _start_engine(engine: NodeEngine) -> None:
    engine.start()
    import_quick_images(engine)


def _mounts_below(folder: Path) -> Iterable[str]:
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return (p for m in sorted(mounts, reverse=True) if (p := m.split()[1]).startswith(f"{folder}/"))
