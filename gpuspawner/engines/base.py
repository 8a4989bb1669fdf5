"""The interface of engines, the labels of containers, and the owners of processes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..leases.models import Lease, Sighting
from .files import MountedWorkspace
from .local import LEASE_VARIABLE
from .resource_use import ReportedUse, ResourceUse

LABEL_LEASE = "gpuspawner.lease"
LABEL_MEMBER = "gpuspawner.member"
LABEL_SERVER = "gpuspawner.server"
LABEL_ENVIRONMENT = "gpuspawner.environment"
LABEL_DISK = "gpuspawner.disk_limit"
LABELS = (LABEL_LEASE, LABEL_MEMBER, LABEL_SERVER, LABEL_ENVIRONMENT, LABEL_DISK)


@runtime_checkable
class EngineWithHistory(Protocol):
    """An engine that knows more about open leases than what carries the lease's id."""

    def removed(self, leases: Iterable[Lease], found: Iterable[Sighting]) -> list[Sighting]:
        """Return what happened to the servers of open leases without a living one in ``found``.

        Read ``leases`` before the sightings. Blocks. Raises EngineUnavailable.
        """


@runtime_checkable
class EngineWithLogs(Protocol):
    """An engine that keeps what its servers and runs print."""

    def last_line(self, ref: str) -> str:
        """Return the last line that was printed; empty if nothing was, or the engine kept none.

        Blocks. Raises EngineUnavailable.
        """


@runtime_checkable
class EngineWithLimits(Protocol):
    """An engine that knows how much memory its servers and runs may use."""

    def memory_limit(self, ref: str) -> int | None:
        """Return the limit in bytes; None if the server has no limit or no longer exists.

        Blocks. Raises EngineUnavailable.
        """


@runtime_checkable
class EngineWithUse(Protocol):
    """An engine that knows what its servers and runs use of CPU, memory, disk and network."""

    def resource_use(self, ref: str) -> ResourceUse | None:
        """Return what one uses now; None if it is not running.

        Blocks. Raises EngineUnavailable.
        """

    def reported_use(self, ref: str) -> ReportedUse | None:
        """Return what the program of a run that has ended reported; None if it did not.

        Blocks. Raises EngineUnavailable.
        """


@runtime_checkable
class EngineWithJobs(Protocol):
    """An engine with a job of a scheduler for each container, which may outlive it.

    An exited container whose job goes on is seen alive, since its devices are not free, and with
    its exit status.
    """

    def end_job(self, sighting: Sighting) -> None:
        """End the job of an exited container, whose status is known: it may be removed by that.

        Blocks. Raises EngineUnavailable.
        """


@runtime_checkable
class EngineWithSignals(Protocol):
    """An engine that can send signals to its servers and runs."""

    def signal(self, ref: str, name: str) -> None:
        """Send a signal such as ``SIGUSR1``; one that has ended gets none.

        Blocks. Raises EngineUnavailable.
        """


class Engine(Protocol):
    """An engine that runs servers and can prove that one is gone."""

    @property
    def name(self) -> str:
        """The name stored in a lease: ``docker`` or ``local``."""

    def sightings(self) -> list[Sighting]:
        """Return every server that carries a lease's id, alive or exited.

        Blocks. A server that is created and not yet started counts as alive: only an exit is an
        end. Raises EngineUnavailable if the engine is not responding.
        """

    def end(self, sighting: Sighting) -> None:
        """End a server without an owner. Raises EngineUnavailable."""


@runtime_checkable
class EngineWithFiles(Engine, Protocol):
    """An engine that can read the workspaces of its servers and runs."""

    def mount_workspace(self, source: str) -> MountedWorkspace:
        """Return a directory or volume, readable until it is closed.

        Blocks. Raises NoRunFiles or EngineUnavailable.
        """

    def remove_leftovers(self) -> None:
        """Remove what a killed process left of such mounts. Raises EngineUnavailable."""


_CONTAINER = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_MARK = f"{LEASE_VARIABLE}=".encode()


def container_in(cgroup: str) -> str:
    """Return the id of the innermost container in a process's ``cgroup`` file; empty if none.

    For all drivers and versions of cgroups.
    """
    found = [ids[-1] for line in cgroup.splitlines() if (ids := _CONTAINER.findall(line))]
    return found[0] if found else ""


def _lease_in(environ: Path) -> str:
    try:
        for item in environ.read_bytes().split(b"\0"):
            if item.startswith(_MARK):
                return item[len(_MARK) :].decode(errors="replace")
    except OSError:
        pass  # another user's
    return ""


class ProcessOwners:
    """Finds the open lease of a process."""

    def __init__(self, leases: Iterable[Lease] = (), proc: Path = Path("/proc")) -> None:
        leases = list(leases)
        self._by_container = {lease.engine_ref: lease for lease in leases if lease.engine_ref}
        self._by_id = {lease.id: lease for lease in leases}
        self._proc = proc

    def lease_of(self, pid: int) -> Lease | None:
        """Return the lease that a process belongs to; None if it has none or has ended.

        The container goes before the process's environment, which its member could change.
        """
        process = self._proc / str(pid)
        try:
            groups = (process / "cgroup").read_text(errors="replace")
        except OSError:
            return None
        lease = self._by_container.get(container_in(groups))
        return lease or self._by_id.get(_lease_in(process / "environ"))

    def exists(self, pid: int) -> bool:
        """Return True if there is a process with this id."""
        return (self._proc / str(pid)).exists()

    def pids(self) -> dict[str, list[int]]:
        """Return all processes of this host that belong to an open lease, by lease id.

        Reads all of ``/proc``: for simulated devices, which have no driver to ask.
        """
        found: dict[str, list[int]] = {}
        for entry in self._proc.iterdir():
            if entry.name.isdigit() and (lease := self.lease_of(int(entry.name))):
                found.setdefault(lease.id, []).append(int(entry.name))
        return found
