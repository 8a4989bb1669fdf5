"""A database's owner. Real: SQLite and PostgreSQL, files, the command."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from traitlets.config import Config

from gpuspawner.core.errors import AnotherHubGrants, ConfigError, NotTheOwner
from gpuspawner.db.leader import LeaderLock, for_log, identity_file, make_identity, read_identity
from gpuspawner.hub_pages.handlers import CatalogPages
from gpuspawner.leases.models import Request, ServerRef, Terms
from gpuspawner.services import Services, hub_services
from tests.support.brokers import make_services
from tests.support.command import run_here
from tests.support.parts import each_database
from tests.support.processes import wait_for
from tests.support.rounds import ScriptedHub, make_tick

A, B = "a" * 16, "b" * 16
ADA = ServerRef("ada")


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    services = make_services(database_url=database_url, device_source="simulated:1xT4")
    yield services
    services.store.close()


def take_and_let_go(services: Services, identity: str) -> None:
    """A hub of this identity starts, gives something out, and is killed."""
    hub = LeaderLock(services.store, identity)
    # PostgreSQL lets go of a lock some time after the connection that held it was closed.
    wait_for(hub.take, "the lock of whoever had it before")
    hub.give_up()
    wait_for(lambda: hub.holder() == "", "its lock to be let go of")


# The identity.


def test_hub_identity_is_created_once_and_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = identity_file(Config({"JupyterHub": {"cookie_secret_file": str(tmp_path / "secret")}}))
    assert path == tmp_path / "gpuspawner_hub_id"
    assert read_identity(path) == ""
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: make_identity(path), range(32)))
    assert found == {read_identity(path)} == {make_identity(path)}
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    monkeypatch.chdir(tmp_path)
    assert identity_file(Config()) == path, "by default it is in the hub's directory"


def test_pages_and_spawners_share_services_and_identity(tmp_path: Path, database_url: str) -> None:
    """A page may be the first to ask: a catalog that is public, say."""
    file = tmp_path / "gpuspawner_hub_id"
    secret = {"cookie_secret_file": str(tmp_path / "secret")}
    config = Config({"GPUDatabase": {"url": database_url}, "JupyterHub": secret})
    settings: dict[str, Any] = {"config": config, "log": logging.getLogger(__name__)}
    settings["users"] = SimpleNamespace(settings=settings)
    services = CatalogPages.of(settings).services
    assert services is hub_services(settings, config, settings["log"])
    assert services.granter.identity == read_identity(file) != ""
    services.store.close()


def test_damaged_identity_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "gpuspawner_hub_id"
    path.write_text("half of an i")
    with pytest.raises(ConfigError, match="does not contain a hub's id"):
        make_identity(path)
    assert path.read_text() == "half of an i"


# Who may grant.


@each_database
@pytest.mark.parametrize("what", ["lease", "ticket"])
def test_other_hub_cannot_grant_with_open_lease_or_ticket(services: Services, what: str) -> None:
    take_and_let_go(services, A)
    lease = services.leases.grant(ADA, Request(devices=1), engine="local")
    if what == "ticket":
        ticket = services.queue.ask(
            ServerRef("bob"), Request(devices=1), engine="local", terms=Terms(wait=True)
        )
        services.leases.release(lease.id, reason="stopped")
    other = LeaderLock(services.store, B)
    for _ in range(2):
        with pytest.raises(NotTheOwner, match="belong to another hub"):
            other.take()
        assert not other.sure and other.holder() == "", "it is not in the way of its owner"
    take_and_let_go(services, A)
    if what == "ticket":
        services.queue.end_ticket(ticket.id, "cancelled", "stopped")
    else:
        services.leases.release(lease.id, reason="stopped")
    take_and_let_go(services, B)
    owner, _ = other.owner()
    assert owner is not None and owner.hub == B


@each_database
def test_only_one_of_several_starting_hubs_becomes_owner(services: Services) -> None:
    services.leases.grant(ADA, Request(devices=1), engine="local")
    hubs = [LeaderLock(services.store, f"{number:016x}") for number in range(6)]

    def take(hub: LeaderLock) -> bool:
        try:
            return hub.take()
        except NotTheOwner:
            return False

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(take, hubs)) == 1
    [winner] = [hub for hub in hubs if hub.sure]
    owner, _ = winner.owner()
    assert owner is not None and owner.hub == winner.identity
    winner.give_up()


@each_database
def test_takeover_is_refused_under_a_running_hub_and_audited(services: Services) -> None:
    one, two = LeaderLock(services.store, A), LeaderLock(services.store, B)
    assert one.take()
    services.leases.grant(ADA, Request(devices=1), engine="local")
    with pytest.raises(AnotherHubGrants) as told:
        two.take_over("cli:root")
    assert "c." not in told.value.message, "members read it"
    assert "(c.GPUDatabase.url)" in for_log(told.value)
    one.give_up()
    wait_for(lambda: two.holder() == "", "its lock to be let go of")
    two.take_over("cli:root")
    take_and_let_go(services, B)
    with pytest.raises(NotTheOwner):
        one.take()
    [line] = [each for each in services.audit.trail() if each.action == "takeover"]
    assert line.actor == "cli:root"
    assert line.detail.startswith(f"from {A} (") and f" to {B} (" in line.detail


# The accounting service of a hub that was refused.


async def test_service_of_a_refused_hub_changes_nothing(services: Services) -> None:
    take_and_let_go(services, A)
    lease = services.leases.grant(ADA, Request(devices=1), engine="local")
    services.leases.confirm(lease.id, "1:1")  # no such process: whoever looks finds it gone
    async with ScriptedHub().serving() as hub:
        services.granter.identity = B
        tick = make_tick(services, hub, start_grace_seconds=0)
        before = rows(services)
        worked = []

        async def work() -> None:
            worked.append(1)

        for part in ("Charges", "Sessions", "Members"):
            await tick.round(part, work)
        with pytest.raises(NotTheOwner):
            await tick.reconcile()
        assert not worked and rows(services) == before and hub.asked == []
        assert tick.rounds["Charges"] == 1, "the round was had, and refused"
        services.granter.take_over("cli:root")
        tick._owned_at = float("-inf")
        await tick.round("Charges", work)
        assert worked


def rows(services: Services) -> list[str]:
    with services.store.read() as connection:
        return [str(row) for row in connection.execute(sa.text("SELECT * FROM leases"))]


# The command.


def test_takeover_command_asks_before_taking_over(
    services: Services, database_url: str, tmp_path: Path
) -> None:
    def command(*words: str) -> tuple[int, str]:
        done = run_here(words, tmp_path, {"PATH": os.environ["PATH"], "TZ": "UTC"}, answer="")
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    words = ("takeover", "--database", database_url)
    take_and_let_go(services, A)
    services.leases.grant(ADA, Request(devices=1), engine="local")
    code, said = command(*words)
    assert code == 1 and "No hub has started here yet" in said
    mine = make_identity(tmp_path / "gpuspawner_hub_id")
    code, said = command(*words)
    assert code == 1 and "1 open lease and 0 waiting tickets" in said
    assert "Nothing was changed." in said
    holder = LeaderLock(services.store, A)
    assert holder.take()
    code, said = command(*words, "--yes")
    assert code == 1 and f"A hub runs on this database ({A}@" in said
    holder.give_up()
    wait_for(lambda: holder.holder() == "", "its lock to be let go of")
    code, said = command(*words, "--yes")
    assert code == 0, said
    owner, _ = holder.owner()
    assert owner is not None and owner.hub == mine
    code, said = command(*words)
    assert code == 0 and "Nothing to do" in said
