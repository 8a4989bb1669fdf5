"""Brokers with a clock that tests set, and everything that must always hold in their store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sqlalchemy as sa
from traitlets.config import Config

from gpuspawner.core.units import MICRO
from gpuspawner.db import hash_chain
from gpuspawner.db.engine import Store
from gpuspawner.db.schema import accounts, lease_places, postings, transfers
from gpuspawner.devices.simulated import SimulatedDevices
from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef
from gpuspawner.leases.settings import GPUHost
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.ledger.checks import Books, PostingRow, check_all
from gpuspawner.ledger.models import TransferKind
from gpuspawner.ledger.settings import GPUCredits
from gpuspawner.queue.settings import GPUQueue
from gpuspawner.services import Services
from gpuspawner.settings import GPUDevices

T0 = datetime(2025, 3, 1, 12, tzinfo=timezone.utc)
"""When simulated clocks begin."""

Make = Callable[..., Services]
"""Opens services with these settings on the test's database."""


class Clock:
    """A clock for services: it stands still until the test moves it."""

    def __init__(self, now: datetime = T0) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now

    @classmethod
    def of(cls, services: Services) -> Clock:
        """The clock of these services."""
        assert isinstance(services.clock, cls)
        return services.clock

    def forward(self, **time: float) -> datetime:
        """Move on by ``timedelta(**time)``, and say what time it is then."""
        self.now += timedelta(**time)
        return self.now


def make_tables(url: str) -> None:
    """Run all migrations on a database."""
    store = Store(url)
    store.run(lambda connection: None)
    store.close()


@cache
def migrated_bytes() -> bytes:
    """A SQLite database as it is after all migrations: each hub that runs them itself takes longer
    than most of what its tests do. Hubs with a database of their own begin with none."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "migrated.sqlite")
        make_tables(f"sqlite:///{file}")
        return file.read_bytes()


SETTINGS = {
    "database_url": "GPUDatabase.url",
    "device_source": "GPUDevices.source",
    "gpu_rates": "GPURates.by_model",
    "special_rates": "GPURates.special",
    "rate_zone": "GPURates.zone",
    "when_dry": "GPUCredits.when_exhausted",
    "credits_help": "GPUCredits.help_text",
    "membership_grace_minutes": "GPUMembers.grace_minutes",
    "when_idle": "GPUIdle.policy",
    "when_sick": "GPUHealth.actions",
    "sick_refund": "GPUHealth.refund",
    "folder_source": "GPUFolders.source",
    "folder_quota": "GPUFolders.quota",
    "archives": "GPUFolders.archives",
    "gpu_injection": "GPUDockerSpawner.gpu_injection",
    "cluster": "GPUSlurm.cluster_file",
    "host_memory": "GPUHost.memory",
    "host_cpus": "GPUHost.cpus",
} | {
    name: f"{each.__name__}.{name}"
    for each in (GPUDevices, GPUCredits, GPUQueue, GPUHost)
    for name in each.class_trait_names(config=True)
    if name not in ("source", "policy", "memory", "cpus")
}
"""What a test says of settings in a keyword, and where the configuration has it."""


def config_of(**settings: Any) -> Config:
    """A configuration with these settings; see :data:`SETTINGS`."""
    config = Config()
    for name, value in settings.items():
        section, _, trait = SETTINGS[name].partition(".")
        config[section][trait] = value
    return config


def make_services(clock: Callable[[], datetime] | None = None, **settings: Any) -> Services:
    """Services with these settings. Close its store."""
    services = Services(config_of(**settings), clock=clock)
    services.watch.changes_slots = True  # as in a hub
    return services


@contextmanager
def services_on(url: str, **settings: Any) -> Iterator[Services]:
    """Services on the database of a hub that runs, to look into it."""
    services = make_services(database_url=url, **settings)
    try:
        yield services
    finally:
        services.store.close()


def open_services(
    url: str, clock: Callable[[], datetime] | None = None, **settings: Any
) -> Services:
    """Services of four simulated A100s. Close its store."""
    settings.setdefault("device_source", "simulated:4xA100-80GB")
    return make_services(clock, database_url=url, **settings)


def fleet(services: Services) -> SimulatedDevices:
    """The services' devices, to fail, occupy and restore."""
    source = services.watch.source
    assert isinstance(source, SimulatedDevices)
    return source


def acquire(
    services: Services, user: str, devices: int = 1, server: str = "", **wants: Any
) -> Lease:
    """A lease for a server of this member on the Docker Engine."""
    request = Request(devices=devices, environment="pytorch", **wants)
    return services.leases.grant(ServerRef(user, server), request, engine="docker")


def running(
    services: Services, user: str, devices: int = 1, server: str = "", **wants: Any
) -> Lease:
    """The same for a server that answered."""
    lease = acquire(services, user, devices, server, **wants)
    return services.leases.confirm(lease.id, f"container-{lease.id}")


def books(store: Store, failed: Collection[str] = ()) -> Books:
    """The whole ledger and every lease in one view; ``failed``: leases whose start failed."""
    with store.read() as connection:
        every = leases_repository.of_account(connection, None, limit=1_000_000)
        rows = connection.execute(
            sa.select(postings.c.transfer_id, postings.c.account, postings.c.amount)
            .add_columns(transfers.c.key, transfers.c.kind, transfers.c.lease_id)
            .join(transfers, transfers.c.id == postings.c.transfer_id)
        ).mappings()
        return Books(
            postings=tuple(
                PostingRow(**{**row, "kind": TransferKind(row["kind"])}) for row in rows
            ),
            accounts=tuple(
                ledger_repository.get_account(connection, name)
                for name in connection.execute(sa.select(accounts.c.name)).scalars().all()
            ),
            leases=tuple(every),
            failed=frozenset(failed),
        )


def problems(store: Store, failed: Collection[str] = (), *, chains: bool = True) -> list[str]:
    """What does not hold in the store; empty when all is well.

    Beside the ledger's own checks: no transfer is half-written, no device is leased twice,
    no server holds two leases, and a place is taken exactly as long as its lease is open.
    ``chains``: and no row was changed by hand. Rows are only added to the chains, so who looks
    after every step may leave that to the last look.
    """
    with store.view():  # of a hub that runs, too: all of it is of one moment
        return _problems(store, failed, chains)


def _problems(store: Store, failed: Collection[str], chains: bool) -> list[str]:
    seen = books(store, failed)
    found = check_all(seen)
    total = sum(account.balance for account in seen.accounts)
    if total:
        found.append(f"The balances of all accounts sum to {total}.")
    open_leases = [lease for lease in seen.leases if lease.state is not LeaseState.ENDED]
    found += _twice("The server", [lease.server for lease in open_leases])
    found += _twice("The place", [(d.uuid, d.slot) for lease in open_leases for d in lease.devices])
    with store.read() as connection:
        whole = {row.transfer_id for row in seen.postings}
        bare = set(connection.execute(sa.select(transfers.c.id)).scalars()) - whole
        if chains:
            found += [*hash_chain.check_transfers(connection), *hash_chain.check_seals(connection)]
        query = sa.select(lease_places.c.lease_id).where(lease_places.c.open).distinct()
        taken_by = set(connection.execute(query).scalars())
    found += [f"The transfer {name} has no postings." for name in bare]
    expected = {lease.id for lease in open_leases if lease.devices}
    found += [f"Lease {name} has ended and takes places." for name in taken_by - expected]
    found += [f"Lease {name} is open and takes no place." for name in expected - taken_by]
    return found


def broken_invariants(services: Services) -> dict[str, str]:
    """What ``gpuspawner audit`` finds: a sentence by the name of each invariant that is broken."""
    findings, _ = services.audit.check()
    return {finding.name: finding.problem for finding in findings if finding.problem}


def _twice(what: str, names: list[Any]) -> list[str]:
    return [f"{what} {name} is leased {n} times." for name, n in Counter(names).items() if n > 1]


def credits_of(services: Services, user: str = "anna") -> float:
    return services.ledger.member(user).balance / MICRO


def states(services: Services) -> list[str]:
    return [view.state for view in services.monitoring.overview().devices]
