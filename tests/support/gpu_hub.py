"""A real hub whose members get simulated devices in real containers, and what its store holds."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import requests
import sqlalchemy as sa

from gpuspawner.db import schema as db_schema
from gpuspawner.devices.simulated import SimulatedDevices
from gpuspawner.engines.base import LABEL_LEASE
from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Lease, LeaseState, Slot
from gpuspawner.ledger.models import member_account
from tests.support.engine import PrivateEngine
from tests.support.hub import HubProcess
from tests.support.images import INSTANT
from tests.support.page_text import text_of
from tests.support.processes import wait_for

CATALOG = f"""
environments:
  - slug: instant
    display_name: Instant
    description: A server that answers at once.
    image: {INSTANT}
    default: true
    devices: {{default: 1, max: 8}}
  - slug: cpu
    display_name: Without a GPU
    image: {INSTANT}
    devices: {{max: 0}}
"""
"""What members choose from unless a test says otherwise; both answer in a moment."""

CONFIG = """
c.JupyterHub.spawner_class = "gpuspawner.spawners.docker.GPUDockerSpawner"
c.JupyterHub.allow_named_servers = True
c.GPUDatabase.url = {database_url!r}
c.GPUDevices.source = "simulated:{fleet}"
c.GPUDockerSpawner.gpu_injection = "device_requests"
c.GPUDockerSpawner.catalog = {catalog!r}
c.DockerSpawner.remove = True
c.DockerSpawner.use_internal_ip = True
"""

RECORDS = (
    db_schema.leases,
    db_schema.lease_places,
    db_schema.accounts,
    db_schema.transfers,
    db_schema.postings,
    db_schema.tickets,
)
"""The tables that a refusal must leave as they are."""


class GPUHub(HubProcess):
    """``with GPUHub(folder, engine, "c....", fleet="2xT4") as hub``.

    The fleet is simulated, and the engine's stand-in hook has the same devices: what a
    container sees of them went through real device requests.
    """

    def __init__(
        self,
        folder: Path,
        engine: PrivateEngine,
        config: str = "",
        *,
        fleet: str = "2xA100-80GB",
        catalog: str = CATALOG,
        database_url: str = "",
        docker_host: str = "",
        environment: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "catalog.yaml").write_text(catalog, encoding="utf-8")
        self.engine = engine
        self.database_url = database_url or f"sqlite:///{folder}/gpuspawner.sqlite"
        self.devices = simulated_uuids(fleet)
        ours = CONFIG.format(
            database_url=self.database_url, fleet=fleet, catalog=str(folder / "catalog.yaml")
        )
        super().__init__(
            folder,
            ours + config,
            hub_ip=engine.gateway,
            environment={"DOCKER_HOST": docker_host or engine.url, **(environment or {})},
            **kwargs,
        )
        self._database = sa.create_engine(self.database_url, poolclass=sa.NullPool)

    def start(self, timeout: float = 60.0) -> None:
        """Give the engine its devices, and start the hub."""
        self.engine.set_devices(self.devices)
        super().start(timeout)

    # What the store holds.

    def leases(self, user: str = "") -> list[Lease]:
        """All leases, or a member's; newest first."""
        account = member_account(user) if user else None
        with self._database.connect() as connection:
            if not sa.inspect(connection).has_table("leases"):
                return []  # nobody asked for anything yet
            return leases_repository.of_account(connection, account, limit=1000)

    def open_leases(self, user: str = "") -> list[Lease]:
        """Those that have not ended."""
        return [lease for lease in self.leases(user) if lease.state is not LeaseState.ENDED]

    def stop_all_servers(self) -> None:
        """Stop the server of every open lease, so that its devices are free."""
        for lease in self.open_leases():
            self.stop_server(lease.server.user, lease.server.name)

    def taken(self) -> dict[Slot, str]:
        """The places under open leases, with the lease's id."""
        with self._database.connect() as connection:
            return leases_repository.taken(connection)

    def balance(self, user: str) -> int:
        """Microcredits on a member's account; the sum of its postings must say the same."""
        name = member_account(user)
        with self._database.connect() as connection:
            kept = connection.execute(
                sa.select(db_schema.accounts.c.balance).where(db_schema.accounts.c.name == name)
            ).scalar_one()
            query = sa.select(sa.func.sum(db_schema.postings.c.amount))
            posted = connection.execute(query.where(db_schema.postings.c.account == name)).scalar()
        assert kept == (posted or 0), f"{name} has {kept}, and its postings say {posted}"
        return int(kept)

    def records(self) -> dict[str, list[Any]]:
        """Every row of leases and credits: two of these are equal when nothing changed.

        Without the mark of leases that are in the totals, which the service sets some time later.
        """
        with self._database.connect() as connection:
            return {
                table.name: sorted(map(repr, connection.execute(sa.select(*columns))))
                for table in RECORDS
                if (columns := [c for c in table.c if c is not db_schema.leases.c.days])
            }

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Another process, which is us, is in the middle of a write to SQLite and stays there."""
        with locked(self.database_url):
            yield

    # What runs, and what members see.

    def containers(self) -> list[dict[str, Any]]:
        """Every container with a lease's id, also one that has exited, but none being removed."""
        found: list[dict[str, Any]] = self.engine.client.containers(
            all=True, filters={"label": LABEL_LEASE}
        )
        return [each for each in found if each["State"] not in ("removing", "dead")]

    def container_of(self, member: str) -> str:
        """The id of the container of a member's running server."""
        [found] = [c for c in self.containers() if c["Labels"]["gpuspawner.member"] == member]
        return str(found["Id"])

    def shell(
        self, member: str, command: str, program: str = "sh", **options: Any
    ) -> tuple[int, str]:
        """A command in the container of a member's server: its exit code and what it says."""
        return self.engine.execute(self.container_of(member), [program, "-c", command], **options)

    def environment_of(self, user: str) -> dict[str, str]:
        """The variables inside a server of the image ``instant``."""
        lines = self.get(user, "env").text.splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def device_nodes(self, user: str) -> list[str]:
        """The NVIDIA devices inside a server of the image ``instant``."""
        return self.get(user, "devices").text.split()

    def browser_of(self, user: str) -> requests.Session:
        """The same, of a member whose account is open."""
        known = user in self._browsers
        session = super().browser_of(user)
        if not known:
            self.open_page(user, "/hub/spawn")  # the first visit opens the account
        return session

    def send_form(self, user: str, fields: Mapping[str, Any]) -> requests.Response:
        """Open the spawn form as this member and send it with these fields."""
        return self.post_form(self.browser_of(user), "/hub/spawn", fields)

    def send_refused_form(self, user: str, fields: Mapping[str, Any]) -> requests.Response:
        """Send the spawn form, and return the page that refuses the start."""
        return refused_in_time(lambda: self.send_form(user, fields))


def refused_in_time(ask: Callable[[], requests.Response]) -> requests.Response:
    """The page that refuses a start. JupyterHub waits for a second for a form's answer and then
    shows the page for those who wait: who gets that on a busy machine asks again."""

    def refused() -> list[requests.Response]:
        page = ask()
        return [] if "/spawn-pending/" in page.url else [page]

    (page,) = wait_for(refused, "an answer within a second", timeout=60)
    return page


@contextmanager
def locked(database_url: str) -> Iterator[None]:
    """Nobody else can write to this SQLite database meanwhile."""
    file = database_url.removeprefix("sqlite:///")
    connection = sqlite3.connect(file, timeout=20, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        connection.rollback()
        connection.close()


def simulated_uuids(fleet: str) -> list[str]:
    """The UUIDs of a simulated fleet, by index."""
    seen = SimulatedDevices(fleet).observe(datetime.now(timezone.utc))
    return [device.uuid for device in seen.devices]


def message_of(answer: requests.Response) -> str:
    """The sentence of a refused REST call."""
    return str(answer.json()["message"])


def error_on(page: str) -> str:
    """The sentence in the red box of the form; empty when there is no box."""
    found = re.search(r'class="spawn-error-msg[^"]*">\s*(.*?)\s*</p>', page, re.DOTALL)
    return text_of(found[1]) if found else ""


def assert_in_words(text: str) -> None:
    """No page and no answer shows a member what only a developer can read."""
    for trace in ("Traceback", "Exception", "Error(", ".py", "object at 0x"):
        assert trace not in text, f"{trace!r} in: {text[:2000]}"
