"""Calls of Slurm: its programs, and combined calls."""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..core.errors import SlurmRefused, SlurmUnavailable

LOG = logging.getLogger(__name__)

PATIENCE, AWAY_PATIENCE = 5.0, 1.0
"""Seconds to wait for Slurm's answer; and if it is optional, or the last one was missing.

A hub has few threads for everything that its members want.
"""


class SingleFlight:
    """Queries in one thread, while any number of callers wait for it, none of them for long."""

    def __init__(self, ask: Callable[[], None]) -> None:
        """Create it; ``ask`` stores the answer itself, and also that there was none."""
        self._ask = ask
        self._news = threading.Condition()
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """For how long the query has been running; 0 if it is not."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def wait(self, is_due: Callable[[], bool], patience: float) -> bool:
        """Start the query if it is due, and wait for it.

        Returns False if it is still running this many seconds after its start.
        """
        with self._news:
            if not is_due():
                return True
            if self._since is None:
                # First: if no thread can be started now, the next call tries again.
                threading.Thread(target=self._run, name="gpuspawner-asker", daemon=True).start()
                self._since = time.monotonic()
            began = self._since
            while self._since == began:
                left = began + patience - time.monotonic()
                if left <= 0:
                    return False
                self._news.wait(left)
            return True

    def _run(self) -> None:
        try:
            self._ask()
        except Exception:  # a bug of ours: the next call queries again
            LOG.exception("A query of Slurm failed")
        finally:
            with self._news:
                self._since = None
                self._news.notify_all()


T = TypeVar("T")
R = TypeVar("R")


class _Call(Generic[T, R]):
    def __init__(self) -> None:
        self.wanted: list[T] = []
        self.result: Future[R] = Future()


class CallBatcher(Generic[T, R]):
    """Combines what several threads want into one call at a time."""

    def __init__(self, tell: Callable[[list[T]], R]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._next: _Call[T, R] = _Call()

    def tell(self, *wanted: T) -> R:
        """Return the result of the shared call, or raise its error. Blocks."""
        with self._lock:
            call = self._next
            call.wanted += wanted
        with self._one_at_a_time:
            if not call.result.done():  # this caller is the first of those that share it
                self._do(call)
        return call.result.result()

    def _do(self, call: _Call[T, R]) -> None:
        with self._lock:
            self._next = _Call()
        try:
            call.result.set_result(self._tell(call.wanted))
        except Exception as error:  # for everybody who waits for it
            call.result.set_exception(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job to submit that only holds what Slurm allocates."""

    name: str
    comment: str
    """JSON."""
    partition: str
    cpus: int
    megabytes: int
    gres: str
    """Kind, type if it must be one, and number: ``gpu:a100:2``."""
    minutes: int | None = None
    """Its time limit; None leaves it to the partition."""
    excluded: tuple[str, ...] = ()
    """Nodes that it must not run on."""
    nice: int = 0
    user: str = ""
    """The job's user; empty for the submitting one."""
    account: str = ""
    """The account that it counts against; empty for the user's default."""


SCRIPT = "#!/bin/sh\nexec sleep infinity\n"
"""The whole job: the server runs beside it, in its cgroup, and the epilog removes that."""


def minutes_of(limit: str) -> float:
    """Parse Slurm's time limit, such as ``1-02:30:00``; infinite if there is none."""
    days, _, rest = limit.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in (*parts, days or "0")):
        return math.inf
    seconds = sum(int(part) * 60**power for power, part in enumerate(reversed(parts)))
    return int(days or 0) * 24 * 60 + seconds / 60


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
"""Parts of the programs' messages when nobody can answer, in lower case.

None of it is an answer: a job that could not be queried may be alive.
"""

_PREFIX = re.compile(r"^(?:\w+: )?(?:(?:fatal|error): )?(?:Batch job submission failed: )?")


@dataclass(frozen=True, slots=True)
class Slurm:
    """Slurm through its programs: controller and database. Every call blocks: use a thread.

    Calls raise SlurmUnavailable if nobody answers, and SlurmRefused with Slurm's own words if the
    answer is no.
    """

    conf: str = ""
    """Path of slurm.conf; empty for Slurm's default path."""
    seconds: float = 20.0
    """Timeout of a program, including Slurm's own wait for a lost controller."""
    folder: str = ""
    """The folder of the programs, if they are not on PATH."""

    def run(self, program: str, *words: str, script: str = "") -> str:
        """Return the output of a program such as ``squeue``, given ``script`` on standard input."""
        try:
            done = subprocess.run(
                [os.path.join(self.folder, program), *words],
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
            why = f"{program} did not respond within {self.seconds:g} seconds"
            raise SlurmUnavailable(why=why) from None
        except OSError as error:
            raise SlurmUnavailable(why=f"{program} cannot be run ({error.strerror})") from None
        if done.returncode:
            raise _error(program, done.stderr or done.stdout, done.returncode)
        return done.stdout

    # The controller.

    def jobs(self) -> str:
        """Return everybody's jobs, including recently ended ones, as the JSON of ``squeue``."""
        return self.run("squeue", "--json")

    def nodes(self) -> str:
        """Return all nodes, as the JSON of ``sinfo``."""
        return self.run("sinfo", "--json")

    def longest(self, partition: str) -> float:
        """Return the longest time limit of a job there in minutes; infinite if there is none."""
        told = self.run("sinfo", "--noheader", f"--partition={partition}", "--format=%l")
        return min(map(minutes_of, told.split()), default=math.inf)

    def submit(self, holder: JobSpec) -> None:
        """Submit a job.

        After SlurmUnavailable it may exist all the same: look for its name.
        """
        self.run("sbatch", *words(holder), script=SCRIPT)

    def cancel(self, *jobs: int) -> None:
        """End jobs, waiting or not.

        Jobs that are already over are refused after the others were ended.
        """
        self.run("scancel", "--quiet", *map(str, jobs))

    def cancel_named(self, name: str) -> None:
        """End every job with this name, waiting or not."""
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
        """Change a job's time limit, priority, nice value, or excluded nodes."""
        nodes = None if excluded is None else ",".join(excluded)
        told = {"TimeLimit": minutes, "Priority": priority, "Nice": nice, "ExcNodeList": nodes}
        changes = [f"{key}={value}" for key, value in told.items() if value is not None]
        self.run("scontrol", "update", f"JobId={job}", *changes)

    def hold(self, jobs: Collection[int], note: str | None = None) -> None:
        """Let none of these jobs start until released; optionally write an admin's comment."""
        numbers = listed(jobs)
        if note is None:
            self.run("scontrol", "hold", numbers)
        else:
            self.run("scontrol", "update", f"JobId={numbers}", "Priority=0", f"AdminComment={note}")

    def note(self, jobs: Collection[int], note: str) -> None:
        """Write an admin's comment for these jobs, replacing the previous one."""
        self.run("scontrol", "update", f"JobId={listed(jobs)}", f"AdminComment={note}")

    def release(self, jobs: Collection[int]) -> None:
        """Let them start, in the normal order."""
        self.run("scontrol", "release", listed(jobs))

    def close(self, node: str, reason: str) -> None:
        """Start no more jobs on a node; running ones continue."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def reopen(self, node: str) -> None:
        """Resume a drained node."""
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def _environment(self) -> dict[str, str]:
        """Return the environment without Slurm's own variables: SBATCH_* etc. are options."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH_", "SQUEUE_", "SACCT_", "SCONTROL", "SINFO_"))
            or name == "SLURM_CONF"
        }
        if self.conf:
            kept["SLURM_CONF"] = self.conf
        return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "TZ": "UTC"}


def words(holder: JobSpec) -> list[str]:
    """Return the arguments of ``sbatch`` for a job."""
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
    optional = {
        "time": holder.minutes,
        "exclude": ",".join(holder.excluded),
        "nice": holder.nice,
        "uid": holder.user,
        "account": holder.account,
    }
    return told + [f"--{name}={value}" for name, value in optional.items() if value]


def listed(jobs: Collection[int]) -> str:
    """Return the numbers of jobs as Slurm takes them."""
    return ",".join(map(str, sorted(jobs)))


def _error(program: str, said: str, status: int) -> SlurmUnavailable | SlurmRefused:
    lines = [_PREFIX.sub("", line).strip() for line in said.splitlines() if line.strip()]
    why = "; ".join(dict.fromkeys(lines)) or f"{program} ended with status {status}"
    if any(part in said.lower() for part in _AWAY):
        return SlurmUnavailable(why=why[:300])
    return SlurmRefused(why=why[:300].rstrip("."))
