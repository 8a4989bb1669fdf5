"""Slurm's own commands, as an admin of the tests' cluster types them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support import processes
from tests.support.processes import as_root, wait_for
from tests.support.slurm_daemons import program
from tests.support.slurm_files import CGROUPS
from tests.support.slurm_node import Node
from tests.support.slurm_users import Users

READY = ("idle", "mixed", "allocated", "reserved")
SLEEPS = "#!/bin/sh\nexec sleep infinity\n"


class SlurmClient:
    """Who asks a cluster, and gives it jobs."""

    conf: Path
    """For ``SLURM_CONF``."""
    nodes: Sequence[Node]
    users: Users

    def run(self, *command: str, text: str = "", check: bool = True) -> str:
        """One command as root, ``text`` as its input: what it printed, on either stream."""
        variables = [f"SLURM_CONF={self.conf}", "LC_ALL=C", f"PATH={processes.system_path()}"]
        done = subprocess.run(
            as_root(["env", *variables, program(command[0]), *command[1:]]),
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=120,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def user(self, name: str, account: str = "lab", *qos: str) -> str:
        """A Linux user in that account, which is their default from now on (both made if they are
        not there)."""
        self.users.make(name)
        words = f"add account {account} fairshare=1\n"
        words += f"add user {name} account={account} qos={','.join(('normal', *qos))}\n"
        words += f"modify user where name={name} set defaultaccount={account}\n"
        if qos:  # it may be there already, with fewer
            where = f"user where name={name} account={account}"
            words += f"modify {where} set qos+={','.join(qos)}\n"
        # It ends with 1 when one of the two was there before.
        said = self.run("sacctmgr", "-i", "-Q", text=words, check=False)
        if not self.run("sacctmgr", "-n", "-P", "show", "assoc", f"user={name}"):
            raise RuntimeError(f"{name} was not added to {account}:\n{said}")
        return name

    def hold(self, user: str, *options: str, script: str = SLEEPS) -> int:
        """Submit a job that sleeps; its number."""
        words = ["--parsable", f"--uid={user}", "--output=/dev/null", "--chdir=/", "--no-requeue"]
        said = self.run("sbatch", *words, "-c1", "--mem=100", *options, text=script)
        return int(said.split(";")[0])

    def holder(self, ticket_id: str | None, what: str = "%T") -> str:
        """What ``squeue`` says of a ticket's job that waits or runs; empty without one."""
        return self.run("squeue", "-h", f"--name=gpuspawner-{ticket_id}", "-o", what).strip()

    def state(self, job: int) -> str:
        """The job's state, while Slurm's controller remembers it."""
        return self.run("squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T").strip()

    def wait_state(self, job: int, *wanted: str, timeout: float = 30) -> str:
        """Until the job has one of these states; which."""

        def look() -> str:
            found = self.state(job)
            return found if found in wanted else ""

        what = f"job {job} to be {' or '.join(wanted)}"
        return wait_for(look, what, timeout=timeout, interval=0.1)

    def group(self, job: int) -> str:
        """The control group of a running job: a container's ``cgroup_parent``."""
        root = CGROUPS / "memory" if (CGROUPS / "memory").is_dir() else CGROUPS

        def look() -> list[Path]:
            return list(root.rglob(f"job_{job}/step_batch"))

        return f"/{wait_for(look, f'the control group of job {job}')[0].relative_to(root)}"

    def node_states(self) -> dict[str, str]:
        """By name, with their flags: ``idle``, ``down*``, ``drained``."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines)

    def node_state(self, node: Node) -> str:
        """The same of one node."""
        return self.node_states()[node.name]

    def wait_nodes(self, *nodes: Node, timeout: float = 30) -> None:
        """Until these nodes (all but the spare ones) take jobs."""
        wanted = nodes or tuple(n for n in self.nodes if not n.machine.spare)

        def look() -> bool:
            states = self.node_states()
            return all(states[n.name] in READY for n in wanted)

        wait_for(look, "nodes to be ready", timeout=timeout, interval=0.1)
