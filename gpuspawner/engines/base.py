"""What the reconciler needs of an engine, and the labels that tie a container to its lease."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from ..model import Lease, Sighting

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
