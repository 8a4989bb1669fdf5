"""What the parts of the broker share."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from traitlets.config import LoggingConfigurable

from .db.engine import Store
from .devices.snapshots import InventoryCache, InventorySnapshot
from .leases.models import Lease, Request, ServerRef
from .ledger.models import Account
from .ledger.prices import PriceService
from .queue.models import Ticket
from .queue.state import QueueState

if TYPE_CHECKING:
    from .devices.service import MachineService
    from .ledger.service import LedgerService
    from .queue.models import Delegate
    from .queue.service import Terms
    from .settings import BrokerSettings
    from .slurm.service import ClusterMemberService


class Core(LoggingConfigurable):
    """The broker, as its parts see it; :class:`gpuspawner.services.Broker` has all of it.

    What one part needs of another is declared here for the type checker alone, and defined in the
    part that has it.
    """

    settings: BrokerSettings
    store: Store
    clock: Callable[[], datetime]
    watch: InventoryCache
    line: QueueState
    delegate: Delegate | None = None
    engine_ids: dict[str, str]
    ledger: LedgerService
    machines: MachineService
    prices: PriceService
    cluster_members: ClusterMemberService

    if TYPE_CHECKING:

        @property
        def skew(self) -> timedelta:
            """Wall clock less :attr:`clock` now."""

        @property
        def clock_version(self) -> int:
            """Grows whenever all times were moved."""

        def look(self, *, fresh: bool = False) -> InventorySnapshot:
            """The newest look at the devices."""

        def acquire(
            self,
            server: ServerRef,
            request: Request,
            *,
            engine: str,
            account: str = "",
            terms: Terms | None = None,
        ) -> Lease:
            """Grant devices to a server, now or never."""

        def end_ticket(
            self, ticket_id: str, outcome: str, reason: str, *, actor: str = "", tell: bool = True
        ) -> Ticket:
            """Take a ticket out of the line, for a reason that stays written."""

        def _enqueue(self, ticket: Ticket) -> Ticket: ...

        def _grant_ticket(
            self,
            ticket: Ticket,
            look: InventorySnapshot,
            kept: frozenset[str],
            since: datetime | None = None,
        ) -> Lease: ...

        def _check_credits(
            self, account: Account, hold: int, rate: int, lead: timedelta
        ) -> None: ...
