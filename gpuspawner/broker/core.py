"""What the parts of the broker know of one another."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ..model import Account, Lease, Request, ServerRef, Ticket
from ..store import Store
from .line import Line
from .policies import DryPolicies
from .prices import Prices
from .settings import BrokerSettings
from .watch import Look, Watch

if TYPE_CHECKING:
    from ..scheduler import Scheduler
    from ..scheduler.delegated import Delegate
    from .queue import Terms


class Core(BrokerSettings, Prices, DryPolicies):
    """The broker, as its parts see it; :class:`gpuspawner.broker.Broker` has all of it.

    What one part needs of another is declared here for the type checker alone, and defined in the
    part that has it.
    """

    store: Store
    clock: Callable[[], datetime]
    watch: Watch
    line: Line
    delegate: Delegate | None = None
    engine_ids: dict[str, str]

    if TYPE_CHECKING:

        @property
        def skew(self) -> timedelta:
            """Wall clock less :attr:`clock` now."""

        @property
        def clock_version(self) -> int:
            """Grows whenever all times were moved."""

        def make_scheduler(self) -> Scheduler: ...

        def look(self, *, fresh: bool = False) -> Look:
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

        def admit_to_cluster(self, ticket: Ticket) -> str: ...

        def _enqueue(self, ticket: Ticket) -> Ticket: ...

        def _grant_ticket(
            self, ticket: Ticket, look: Look, kept: frozenset[str], since: datetime | None = None
        ) -> Lease: ...

        def _open_account(self, connection: sa.Connection, name: str, now: datetime) -> Account: ...

        def _opening_amount(self) -> int: ...

        def _check_credits(
            self, account: Account, hold: int, rate: int, lead: timedelta
        ) -> None: ...

        def _ending(
            self, connection: sa.Connection, account: str, now: datetime
        ) -> tuple[tuple[datetime, int], ...]: ...

        def _end_due_lots(self, connection: sa.Connection, account: str, now: datetime) -> None: ...

        def _payer(self, user: str, groups: Collection[str], asked: str, *, free: bool) -> str: ...

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
