"""A member gets another name, with all that is theirs. Real: SQLite, PostgreSQL, files, SIGKILL."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import Refused
from gpuspawner.core.units import MICRO
from gpuspawner.db import hash_chain
from gpuspawner.db.schema import leases, metadata, postings, renames
from gpuspawner.leases.models import ServerRef
from gpuspawner.members import repository
from gpuspawner.members.renames import Belongings
from gpuspawner.services import Services
from tests.support import racers
from tests.support.belongings import (
    OPENING,
    columns_with,
    give_everything,
    rename_and_die,
    services_of,
)
from tests.support.brokers import Clock, broken_invariants, problems, running
from tests.support.parts import each_database
from tests.support.tier import SOAK, Rounds

OLD, NEW = "annamaria", "anna.smith"

WITHOUT_NAMES = {
    "audit": "action",
    "batch_jobs": "cluster devices id label name",
    "batch_marks": "cluster",
    "chain": "facts kind link ref",
    "clock_offsets": "boot_id",
    "closures": "subject",
    "device_health": "accepted cause probe reason uuid verdict",
    "device_use": "error uuid xids",
    "devices": "compute_mode model parent_uuid pci_bus_id processes reason source status uuid",
    "folder_members": "folder_id",
    "folders": "id",
    "idle": "lease_id",
    "lease_places": "lease_id model uuid",
    "leases": "engine engine_id engine_ref environment group id outcome server_name state "
    "ticket_id when_dry",
    "lots": "transfer_id",
    "member_groups": "groups",
    "moved": "account",
    "notice_choices": "channel kinds",
    "notices": "error kind",
    "owner": "hub machine",
    "postings": "link transfer_id",
    "rates": "environment hours model reason zone",
    "refill_runs": "refill_id",
    "refills": "id mode reason rule zone",
    "renames": "kept",
    "roster": "course groups",
    "sick_leases": "cause lease_id reason uuid",
    "tickets": "engine group id lease_id outcome request server_name state when_dry",
    "totals": "by span",
    "transfers": "id kind lease_id",
}
"""Columns of text that no member's name is ever in, by table."""


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    services = services_of(database_url, Clock())
    yield services
    services.store.close()


def balance_of(services: Services, user: str) -> int:
    return services.ledger.member(user).balance


def statement_of(services: Services, user: str) -> list[tuple[int, int]]:
    return [(x.amount, x.balance) for x in services.ledger.statement(f"member:{user}", 500)]


def sources_of(services: Services, user: str) -> set[str]:
    return {each.source for each, _ in services.storage.workspaces_of(user)}


def rename(services: Services, old: str = OLD, new: str = NEW, **more: Any) -> Belongings:
    return services.renames.rename_member(old, new, actor="root", **more)


def assert_holds(services: Services) -> None:
    assert broken_invariants(services) == {}
    assert problems(services.store) == []


def test_every_text_column_is_renamed_or_exempt() -> None:
    texts = {
        f"{table.name}.{column.name}"
        for table in metadata.sorted_tables
        for column in table.columns
        if isinstance(column.type, sa.Text)
    }
    said = repository.COLUMNS | repository.AS_WRITTEN.keys()
    assert said - texts == set(), "these columns are not there any more"
    assert not repository.COLUMNS & repository.AS_WRITTEN.keys()
    others = {f"{table}.{name}" for table, some in WITHOUT_NAMES.items() for name in some.split()}
    assert texts - said == others, (
        "can a new column have a member's name in it? Then members/repository.py has to know it"
    )


@each_database
def test_rename_moves_all_data_of_a_member(services: Services, tmp_path: Path) -> None:
    old, new = str(tmp_path / OLD), str(tmp_path / NEW)
    give_everything(services, OLD, [old, f"work-{OLD}"])
    before = columns_with(services, OLD)
    assert before >= repository.COLUMNS, "the test has something of everything"
    balance = balance_of(services, OLD)
    statement = statement_of(services, OLD)
    noted, triggers = services.audit.chain_head(), _triggers(services)
    lots = [left for _, left in services.ledger.lots_of(f"member:{OLD}")]
    found = rename(services, sources={old: new})
    assert (found.leases, found.tickets, found.folders, len(found.workspaces)) == (2, 1, 1, 2)
    assert columns_with(services, OLD) <= {*repository.AS_WRITTEN, "workspaces.source"}
    assert columns_with(services, NEW) >= repository.COLUMNS
    assert_holds(services)
    assert services.audit.knows_head(noted)
    assert_append_only(services)
    assert _triggers(services) == triggers
    assert (balance_of(services, NEW), balance_of(services, OLD)) == (balance, 0)
    assert statement_of(services, NEW) == statement
    assert [left for _, left in services.ledger.lots_of(f"member:{NEW}")] == lots
    assert sources_of(services, NEW) == {new, f"work-{OLD}"}
    [change] = [x for x in services.audit.trail() if x.action == "rename member"]
    assert (change.actor, change.subject) == ("root", NEW) and OLD in change.detail
    done = services.renames.last_rename(OLD, NEW)
    assert done is not None and done.actor == "root"


def test_accounting_continues_under_the_new_name(services: Services) -> None:
    clock = Clock.of(services)
    give_everything(services, OLD, [])
    rename(services)
    [newest, *_] = services.leases.of_account(f"member:{NEW}", 1)
    services.ledger.refund(newest.id, actor="root", reason="a broken fan")
    clock.forward(days=1)
    [refill] = services.refills.due_refills()
    run = services.refills.give_refill(refill.id)
    assert run is not None and run.accounts == 2
    clock.forward(days=10)
    services.ledger.end_lots()
    lease = running(services, NEW)
    clock.forward(minutes=5)
    services.ledger.charge_all()
    services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert_holds(services)


def test_old_name_can_be_reused_by_another_member(services: Services) -> None:
    give_everything(services, OLD, [])
    rename(services)
    balance = balance_of(services, NEW)
    assert services.ledger.open_account(OLD).balance == OPENING * MICRO
    assert balance_of(services, NEW) == balance
    assert services.renames.last_rename(OLD, NEW) is None, "the name is somebody else's"
    with pytest.raises(Refused, match="has a history of their own"):
        rename(services)
    rename(services, OLD, "third")
    assert balance_of(services, "third") == OPENING * MICRO
    assert_holds(services)


def test_member_can_be_renamed_repeatedly_and_back(services: Services) -> None:
    give_everything(services, OLD, [])
    balance = balance_of(services, OLD)
    for names in ((OLD, NEW), (NEW, OLD), (OLD, "third"), ("third", NEW)):
        rename(services, *names)
        services.ledger.grant(f"member:{names[1]}", MICRO, actor="root", reason="prize")
        balance += MICRO
        assert balance_of(services, names[1]) == balance
        assert_holds(services)


def test_opening_grant_of_new_name_does_not_block_rename(services: Services) -> None:
    """Who is renamed at the Hub signs in there before an admin types anything."""
    give_everything(services, OLD, [])
    balance = balance_of(services, OLD)
    services.members.membership_returned(NEW, actor="hub")
    services.ledger.open_account(NEW)
    rename(services)
    assert balance_of(services, NEW) == balance, "what the account opened with is taken back"
    assert_holds(services)
    rename(services, NEW, OLD)
    assert balance_of(services, OLD) == balance
    assert_holds(services)


def test_rename_keeps_the_running_session_and_its_charge(services: Services) -> None:
    clock = Clock.of(services)
    services.ledger.open_account(OLD)
    lease = running(services, OLD)
    clock.forward(minutes=10)
    services.ledger.charge_all()
    services.leases.follow_rename(lease.id, ServerRef(NEW))
    services.ledger.open_account(NEW)
    found = rename(services)
    assert [each.id for each in found.open_leases] == [lease.id]
    clock.forward(minutes=20)
    services.ledger.charge_all()
    ended = services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert (ended.account, ended.charged) == (f"member:{NEW}", 2 * MICRO)
    assert balance_of(services, NEW) == (OPENING - 2) * MICRO
    assert_holds(services)


def test_session_renamed_by_the_hub_does_not_block_rename(services: Services) -> None:
    services.ledger.open_account(OLD)
    lease = running(services, OLD)
    services.leases.follow_rename(lease.id, ServerRef(NEW))
    ended_at = Clock.of(services).forward(minutes=1)
    services.leases.release(lease.id, ended_at=ended_at, reason="stopped")
    rename(services)
    assert services.leases.of_account(f"member:{NEW}", 5)[0].server == ServerRef(NEW)
    assert_holds(services)


def test_invalid_rename_is_refused_and_changes_nothing(services: Services) -> None:
    def refused(old: str, new: str) -> str:
        before = _everything(services)
        with pytest.raises(Refused) as error:
            rename(services, old, new, move=lambda: pytest.fail("moved"))
        assert _everything(services) == before
        assert error.value.message.endswith("Nothing was changed.")
        return error.value.message

    assert "There is no member 'nobody'" in refused("nobody", NEW)
    services.ledger.open_account(OLD)
    assert f"{OLD} already has that name" in refused(OLD, OLD)
    for name in ("", " x", "a\nb"):
        assert f"{name!r} is not a name of a member" in refused(OLD, name)
    lease = running(services, OLD)
    assert f"The server {OLD} runs under the name {OLD} (lease {lease.id})" in refused(OLD, NEW)
    services.leases.release(lease.id, reason="stopped")
    other = running(services, NEW)
    assert f"{NEW} has a history of their own (1 lease)" in refused(OLD, NEW)
    services.leases.release(other.id, reason="stopped")
    assert f"{NEW} has a history of their own (1 lease" in refused(OLD, NEW)
    services.ledger.open_account("third")
    services.ledger.grant("member:third", MICRO, actor="root", reason="prize")
    assert "(1 entry in the ledger)" in refused(OLD, "third")


def test_rename_refuses_a_lease_changed_by_hand(services: Services) -> None:
    give_everything(services, OLD, [])
    [lease, *_] = services.leases.of_account(f"member:{OLD}", 1)
    change = sa.update(leases).where(leases.c.id == lease.id).values(end_reason="idle")
    services.store.run(lambda connection: connection.execute(change), write=True)
    with pytest.raises(Refused, match=f"The ended lease {lease.id} was changed by hand"):
        rename(services)


@pytest.mark.parametrize("what", ["posting", "rename", "unsealed rename", "rename deleted"])
def test_audit_detects_tampering_after_a_rename(services: Services, what: str) -> None:
    give_everything(services, OLD, [])
    rename(services)
    assert_holds(services)
    with services.store.write() as connection:
        if what == "posting":
            first = sa.select(sa.func.min(postings.c.id))
            first = first.where(postings.c.account == f"member:{NEW}")
            change = sa.update(postings).where(postings.c.id == first.scalar_subquery())
            with hash_chain.not_append_only(connection):
                connection.execute(change.values(account="member:friend"))
        elif what == "rename":
            connection.execute(sa.update(renames).values(old="friend"))
        elif what == "rename deleted":
            connection.execute(sa.delete(renames))
        else:
            values = {"at": Clock.of(services).now, "actor": "root", "old": "friend", "new": NEW}
            connection.execute(sa.insert(renames).values(**values, posting=0, kept=""))
        found = [*hash_chain.check_transfers(connection), *hash_chain.check_seals(connection)]
    assert found


def rename_until(
    url: str, clock: Clock, names: tuple[str, str], paths: dict[str, str], at: int | str
) -> int:
    """Rename in a process that is killed at a step; how many steps it took, 0 if it was killed."""
    ours, theirs = racers.FORKSERVER.Pipe()
    arguments = (theirs, url, clock, names, paths, at)
    process = racers.FORKSERVER.Process(target=rename_and_die, args=arguments, daemon=True)
    process.start()
    theirs.close()
    process.join(timeout=120)
    assert process.exitcode in (0, -9)
    return int(ours.recv()) if process.exitcode == 0 else 0


@each_database
@pytest.mark.parametrize(
    "how", ["UPDATE postings", "UPDATE workspaces", "COMMIT", "a directory", "a statement"]
)
def test_failed_rename_keeps_all_rows_and_the_ledger_trigger(
    services: Services, database_url: str, how: str
) -> None:
    """Killed before a statement, the first of which comes while the trigger is off; or refused."""
    give_everything(services, OLD, [f"work-{OLD}"])
    before = _everything(services)

    def fail() -> None:
        raise Refused("The directory cannot be renamed.")

    if how == "a directory":
        with pytest.raises(Refused, match="cannot be renamed"):
            rename(services, move=fail)
    elif how == "a statement":
        nobody = sa.update(postings).values(account="member:nobody")  # there is no such account
        with (
            pytest.raises(sa.exc.IntegrityError),
            services.store.write() as connection,
            hash_chain.not_append_only(connection),
        ):
            connection.execute(nobody)
    else:
        killed = rename_until(database_url, Clock.of(services), (OLD, NEW), {}, how) == 0
        assert killed, "it was killed there"
    assert_append_only(services)
    assert _everything(services) == before
    assert_holds(services)


@each_database
def test_killed_rename_completes_when_repeated(
    services: Services, database_url: str, tmp_path: Path, rounds: Rounds, chance: random.Random
) -> None:
    clock, names = Clock.of(services), (OLD, NEW)
    paths = {str(tmp_path / f"{d}/{OLD}"): str(tmp_path / f"{d}/{NEW}") for d in ("one", "two")}
    for old in paths:
        Path(old).mkdir(parents=True)
        (Path(old) / "notebook").write_text(old)
    give_everything(services, OLD, [*paths])
    balance = balance_of(services, OLD)

    def rename_to(at: int) -> int:
        return rename_until(database_url, clock, names, paths, at)

    steps = rename_to(1_000_000)
    assert steps > 30
    for round_ in range(rounds(2 * steps)):
        names, paths = names[::-1], {new: old for old, new in paths.items()}
        at = 1 + round_ % steps if SOAK else chance.randint(1, steps)
        done = rename_to(at)
        for account in names:
            assert balance_of(services, account) in (0, balance), at
        assert_holds(services)
        assert done or rename_to(1_000_000), at
        assert balance_of(services, names[1]) == balance
        assert services.renames.last_rename(*names) is not None
        for old, new in paths.items():
            assert not Path(old).exists() and (Path(new) / "notebook").exists(), at
        assert_holds(services)
        assert sources_of(services, names[1]) == {*paths.values()}


def assert_append_only(services: Services) -> None:
    """Nobody can change or delete a posting."""
    for change in (sa.update(postings).values(amount=0), sa.delete(postings)):
        with (
            pytest.raises(sa.exc.DatabaseError, match="append-only"),
            services.store.write() as connection,
        ):
            connection.execute(change)


def _triggers(services: Services) -> list[str]:
    """The triggers as the database has them, and whether they are on."""
    query = "SELECT name, tbl_name, sql FROM sqlite_master WHERE type = 'trigger'"
    if services.store.dialect == "postgresql":
        query = (
            "SELECT tgname, tgrelid::regclass::text, tgenabled::text FROM pg_trigger "
            "WHERE NOT tgisinternal"
        )
    with services.store.read() as connection:
        return sorted(map(repr, connection.exec_driver_sql(query)))


def _everything(services: Services) -> dict[str, list[str]]:
    """All rows by table, and the triggers."""
    with services.store.read() as connection:
        rows = {
            table.name: sorted(map(repr, connection.execute(sa.select(table))))
            for table in metadata.sorted_tables
        }
    return rows | {"triggers": _triggers(services)}
