"""What the parts of the broker share, and the settings of ``c.Broker``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from traitlets import Bool, Dict, Float, Integer, Unicode, Union, default
from traitlets.config import LoggingConfigurable

from .db.engine import Store, default_url
from .devices.snapshots import InventoryCache, InventorySnapshot
from .leases.models import Lease, Request, ServerRef
from .ledger.credit_policy import CreditPolicies, CreditPolicy
from .ledger.models import Account
from .ledger.prices import PriceService, PriceSettings
from .queue.models import Ticket
from .queue.state import QueueState

if TYPE_CHECKING:
    from .devices.service import MachineService
    from .ledger.service import LedgerService
    from .queue.models import Delegate
    from .queue.scheduler import Scheduler
    from .queue.service import Terms
    from .slurm.service import ClusterMemberService


class BrokerSettings(PriceSettings):
    """The traits of :class:`~gpuspawner.services.Broker`."""

    database_url = Unicode(
        config=True,
        help="""
        Where leases and credits are kept: an SQLite file or a PostgreSQL database.

        The default is the environment variable GPUSPAWNER_DATABASE_URL, else a file
        ``gpuspawner.sqlite`` in the hub's working directory. Example::

            c.Broker.database_url = "sqlite:////srv/jupyterhub/gpuspawner.sqlite"
            c.Broker.database_url = "postgresql://gpuspawner@/gpuspawner"
        """,
    )

    @default("database_url")
    def _default_database_url(self) -> str:
        return default_url()

    hub_id_file = Unicode(
        config=True,
        help="""
        The file with the id of this hub, by which its leases are known as its own. It is made at
        the first start, and belongs into the backup of the hub's working directory.

        The default is ``gpuspawner_hub_id`` beside the hub's cookie secret. Example::

            c.Broker.hub_id_file = "/srv/jupyterhub/gpuspawner_hub_id"
        """,
    )

    device_source = Unicode(
        "auto",
        config=True,
        help="""
        Where the devices come from: ``auto`` (NVML), or a simulated fleet for trying out.

        Example::

            c.Broker.device_source = "simulated:4xA100-80GB,2xT4"
        """,
    )

    opening_grant = Union(
        [Float(), Unicode()],
        default_value=100.0,
        config=True,
        help="""
        Credits that a member gets once, when their account opens at first sign-in.

        Example::

            c.Broker.opening_grant = 250
        """,
    )

    hold_minutes = Float(
        10.0,
        config=True,
        help="""
        Minutes of GPU time that a balance must cover to start, and that are set aside.

        Example::

            c.Broker.hold_minutes = 30
        """,
    )

    hold_session = Bool(
        False,
        config=True,
        help="""
        Whether a balance must cover the whole session that is asked for, which is then set
        aside, and not only its first ``hold_minutes``. What is not used comes back at the end;
        a session without an end holds ``hold_minutes``.

        Example::

            c.Broker.hold_session = True
        """,
    )

    grace_seconds = Integer(
        300,
        config=True,
        help="""
        Seconds that a server goes on after its account ran dry and the member was warned.

        Example::

            c.Broker.grace_seconds = 600
        """,
    )

    refresh_seconds = Float(
        2.0,
        config=True,
        help="""
        Seconds for which one look at the devices serves everybody who asks.

        Example::

            c.Broker.refresh_seconds = 5
        """,
    )

    credits_help = Unicode(
        "Ask your admin for more credits.",
        config=True,
        help="""
        The sentence that tells a member without credits how to get some.

        Example::

            c.Broker.credits_help = "Write to gpu@lab.example for more credits."
        """,
    )

    def lead(self, seconds: int | None) -> timedelta:
        """How much time an account must be able to pay for when a session of so many seconds
        starts; None is one without an end."""
        whole = self.hold_session and seconds is not None
        return timedelta(seconds=seconds or 0) if whole else timedelta(minutes=self.hold_minutes)


class DryPolicies(LoggingConfigurable):
    """The policies of running dry."""

    policies: CreditPolicies
    """Read once."""

    when_dry = Dict(
        {"*": "stop"},
        config=True,
        help="""
        What becomes of a server when its account has run dry, by group; ``*`` is for all others.

        ``stop``: it is stopped ``grace_seconds`` after its member was told. ``session``: its
        planned session ends first (one without an end is stopped). ``{"overdraft": 20}``: it
        goes on until the account is 20 credits below zero, and not a microcredit more. Nobody
        starts a GPU that costs something meanwhile. Of several groups, the first that is named
        here counts; a group's own account goes by that group. A running server keeps the policy
        that it started with, and servers of one account share one overdraft: another amount
        counts once none of them runs. Example::

            c.Broker.when_dry = {"research": {"overdraft": 20}, "course-ml": "session"}
        """,
    )

    def policy_for(self, account: str, groups: Collection[str]) -> CreditPolicy:
        """What holds for a new server of a member of these groups, when this account pays."""
        return self.policies.of(account, groups)


class Core(BrokerSettings, DryPolicies):
    """The broker, as its parts see it; :class:`gpuspawner.services.Broker` has all of it.

    What one part needs of another is declared here for the type checker alone, and defined in the
    part that has it.
    """

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

        def make_scheduler(self) -> Scheduler: ...

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

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
