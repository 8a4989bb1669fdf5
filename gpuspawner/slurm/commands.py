"""Slurm's programs, called with argument vectors: no shell sees what a member wrote."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar

from ..errors import SlurmRefused, SlurmUnavailable
from .controller import SCRIPT, Holder, minutes_of

_AWAY = (
    "unable to contact slurm controller",
    "unable to establish configuration source",
    "connection refused",
    "connection timed out",
    "socket timed out",
    "problem talking to the database",
    "zero bytes were transmitted",
    "unexpected message received",
    "munge",
    "authentication",
    "resource temporarily unavailable",
)
"""Parts of what the programs say when nobody can answer, in lower case. None of it is an answer:
a job that could not be asked for may live."""

_PREFIX = re.compile(r"^(?:\w+: )?(?:(?:fatal|error): )?(?:Batch job submission failed: )?")


@dataclass(frozen=True, slots=True)
class Slurm:
    """Slurm as its programs reach it: controller and database. Every call blocks: use a
    thread."""

    notes: ClassVar[str] = "admin_comment"
    owner_writes_notes: ClassVar[bool] = False

    conf: str = ""
    """Path of slurm.conf; empty for Slurm's own default place."""
    seconds: float = 20.0
    """How long a program may take; Slurm's own patience for a lost controller is a part of it."""
    folder: str = ""
    """Where the programs are, if they are not on PATH."""
    environment: dict[str, str] = field(default_factory=dict)
    """More variables for the programs."""

    def run(self, program: str, *words: str, script: str = "") -> str:
        """What a program such as ``squeue`` prints, given ``script`` on its standard input.

        Raises SlurmUnavailable when nobody answers, and SlurmRefused with Slurm's own words when
        the answer is no.
        """
        path = os.path.join(self.folder, program) if self.folder else program
        try:
            done = subprocess.run(
                [path, *words],
                input=script,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.seconds,
                env=self._environment(),
                check=False,
            )
        except FileNotFoundError:
            why = f"the program {program} is not on this machine (install slurm-client)"
            raise SlurmUnavailable(why=why) from None
        except subprocess.TimeoutExpired:
            why = f"{program} did not answer within {self.seconds:g} seconds"
            raise SlurmUnavailable(why=why) from None
        except OSError as error:
            raise SlurmUnavailable(why=f"{program} cannot be run ({error.strerror})") from None
        if done.returncode:
            raise _error(program, done.stderr or done.stdout, done.returncode)
        return done.stdout

    # The controller; see :class:`gpuspawner.slurm.controller.Controller`.

    def jobs(self) -> str:
        return self.run("squeue", "--json")

    def nodes(self) -> str:
        return self.run("sinfo", "--json")

    def longest(self, partition: str) -> float:
        told = self.run("sinfo", "--noheader", f"--partition={partition}", "--format=%l")
        return min(map(minutes_of, told.split()), default=math.inf)

    def submit(self, holder: Holder) -> None:
        self.run("sbatch", *words(holder), script=SCRIPT)

    def cancel(self, *jobs: int) -> None:
        self.run("scancel", "--quiet", *map(str, jobs))

    def cancel_named(self, name: str) -> None:
        self.run("scancel", "--quiet", f"--name={name}")

    def change(
        self,
        job: int,
        *,
        minutes: int | None = None,
        priority: int | None = None,
        nice: int | None = None,
        excluded: Collection[str] | None = None,
    ) -> None:
        nodes = None if excluded is None else ",".join(excluded)
        told = {"TimeLimit": minutes, "Priority": priority, "Nice": nice, "ExcNodeList": nodes}
        changes = [f"{key}={value}" for key, value in told.items() if value is not None]
        self.run("scontrol", "update", f"JobId={job}", *changes)

    def hold(self, jobs: Collection[int], note: str | None = None) -> None:
        if note is None:
            self.run("scontrol", "hold", _listed(jobs))
        else:
            words = f"JobId={_listed(jobs)}", "Priority=0", f"AdminComment={note}"
            self.run("scontrol", "update", *words)

    def note(self, jobs: Collection[int], note: str) -> None:
        self.run("scontrol", "update", f"JobId={_listed(jobs)}", f"AdminComment={note}")

    def release(self, jobs: Collection[int]) -> None:
        self.run("scontrol", "release", _listed(jobs))

    def close(self, node: str, reason: str) -> None:
        self.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def reopen(self, node: str) -> None:
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def _environment(self) -> dict[str, str]:
        """No setting of whoever started us reaches the programs: SBATCH_* and the like are
        options too."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH_", "SQUEUE_", "SACCT_", "SCONTROL", "SINFO_"))
            or name == "SLURM_CONF"
        }
        if self.conf:
            kept["SLURM_CONF"] = self.conf
        return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "TZ": "UTC"} | self.environment


def words(holder: Holder) -> list[str]:
    """What ``sbatch`` is told of a job."""
    told = [
        "--parsable",
        "--no-requeue",
        f"--job-name={holder.name}",
        f"--comment={holder.comment}",
        f"--partition={holder.partition}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={holder.cpus}",
        f"--mem={holder.megabytes}M",
        f"--gres={holder.gres}",
        "--output=/dev/null",
        "--error=/dev/null",
        "--chdir=/",
        "--export=NONE",
    ]
    if holder.minutes is not None:
        told.append(f"--time={holder.minutes}")
    if holder.excluded:
        told.append("--exclude=" + ",".join(holder.excluded))
    if holder.nice:
        told.append(f"--nice={holder.nice}")
    if holder.user:
        told.append(f"--uid={holder.user}")
    if holder.account:
        told.append(f"--account={holder.account}")
    return told


def _listed(jobs: Collection[int]) -> str:
    return ",".join(map(str, sorted(jobs)))


def is_away(said: str) -> bool:
    """Whether these words of Slurm's are no answer of it."""
    return any(part in said.lower() for part in _AWAY)


def _error(program: str, said: str, status: int) -> SlurmUnavailable | SlurmRefused:
    lines = [_PREFIX.sub("", line).strip() for line in said.splitlines() if line.strip()]
    why = "; ".join(dict.fromkeys(lines)) or f"{program} ended with status {status}"
    if is_away(said):
        return SlurmUnavailable(why=why[:300])
    return SlurmRefused(why=why[:300].rstrip("."))
