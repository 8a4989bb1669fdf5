"""The interface of engines, the labels of containers, and who owns a process."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..leases.models import Lease, Sighting
from .local import LEASE_VARIABLE

LABEL_LEASE = "gpuspawner.lease"
LABEL_MEMBER = "gpuspawner.member"
LABEL_SERVER = "gpuspawner.server"
LABEL_ENVIRONMENT = "gpuspawner.environment"
LABEL_DISK = "gpuspawner.disk_limit"
LABELS = (LABEL_LEASE, LABEL_MEMBER, LABEL_SERVER, LABEL_ENVIRONMENT, LABEL_DISK)


@runtime_checkable
class Remembers(Protocol):
    """An engine that can say more of an open lease than what carries the lease's id."""

    def removed(self, leases: Iterable[Lease], found: Iterable[Sighting]) -> list[Sighting]:
        """What became of the servers of these open leases of which none was ``found`` alive.

        Read ``leases`` before you look. Blocks. Raises EngineUnavailable.
        """


class Engine(Protocol):
    """Something that runs servers and can prove that one is gone."""

    @property
    def name(self) -> str:
        """The name kept in a lease: ``docker`` or ``local``."""

    def sightings(self) -> list[Sighting]:
        """Every server that carries a lease's id, alive or exited.

        Blocks. A server that is created and not yet started counts as alive: only an exit
        is an end. Raises EngineUnavailable when the engine cannot say.
        """

    def end(self, sighting: Sighting) -> None:
        """End a server that nobody owns any more. Raises EngineUnavailable."""


_CONTAINER = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_MARK = f"{LEASE_VARIABLE}=".encode()


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """What the host tells of a process."""

    container: str = ""
    """The id of the innermost container; empty outside of any."""
    lease_id: str = ""
    """The lease in its environment, if that can be read."""


def owner_of(pid: int, proc: Path = Path("/proc")) -> ProcessOwner | None:
    """None when the process is gone."""
    try:
        groups = (proc / str(pid) / "cgroup").read_text(errors="replace")
    except OSError:
        return None
    return ProcessOwner(container_in(groups), _lease_in(proc / str(pid) / "environ"))


def container_in(cgroup: str) -> str:
    """The id of the innermost container in a process's ``cgroup`` file, whichever driver and
    version of cgroups wrote it; empty for none."""
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
    """Open leases by what can be seen of their processes."""

    def __init__(self, leases: Iterable[Lease] = (), proc: Path = Path("/proc")) -> None:
        leases = list(leases)
        self._by_container = {lease.engine_ref: lease for lease in leases if lease.engine_ref}
        self._by_id = {lease.id: lease for lease in leases}
        self._proc = proc

    def lease_of(self, pid: int) -> Lease | None:
        """The lease that a process belongs to; None for nobody's, and for one that is gone.

        A container counts before what a process says of itself, which its member could change.
        """
        owner = owner_of(pid, self._proc)
        if owner is None:
            return None
        if owner.container in self._by_container:
            return self._by_container[owner.container]
        return self._by_id.get(owner.lease_id)

    def pids(self) -> dict[str, list[int]]:
        """All processes of this host that belong to an open lease, by its id. Reads all of
        ``/proc``: for simulated devices, whose driver cannot say."""
        found: dict[str, list[int]] = {}
        for entry in self._proc.iterdir():
            if entry.name.isdigit() and (lease := self.lease_of(int(entry.name))):
                found.setdefault(lease.id, []).append(int(entry.name))
        return found
