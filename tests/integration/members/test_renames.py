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
from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.members import repository
from gpuspawner.members.renames import Belongings
from gpuspawner.queue.models import Ticket
from gpuspawner.runs.models import Run, Work
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
NEVER = 1_000_000
"""A step that no rename comes to."""

WITHOUT_NAMES = {
    "audit": "action",
    "batch_jobs": "cluster devices id label name",
    "batch_marks": "cluster",
    "chain": "facts kind link ref",
    "clock_offsets": "boot_id",
    "closures": "subject",
    "device_health": "accepted cause probe reason uuid verdict",
    "device_use": "error lease_id uuid xids",
    "devices": "compute_mode model parent_uuid pci_bus_id processes reason reserved_for source "
    "status uuid",
    "environment_use": "environment",
    "folder_members": "folder_id",
    "folders": "id",
    "idle": "lease_id",
    "lease_places": "lease_id model uuid",
    "leases": "engine engine_id engine_ref environment group id outcome server_name state "
    "ticket_id when_dry",
    "lots": "transfer_id",
    "member_groups": "groups",
    "mig_changes": "failure gpu_uuid layout worker",
    "mig_instances": "boot_id gpu_uuid profile state uuid",
    "moved": "account",
    "notice_choices": "channel kinds",
    "notices": "error kind",
    "nvml_clients": "process",
    "owner": "hub machine",
    "postings": "link transfer_id",
    "rates": "environment hours model reason zone",
    "refill_runs": "refill_id",
    "refills": "id mode reason rule zone",
    "renames": "kept",
    "resource_use": "container_id lease_id",
    "roster": "course groups",
    "runs": "after_lease id key options outcome reason sweep title work",
    "schedules": "cron id key options title work zone",
    "schedule_times": "run_id schedule_id",
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


def test_renames_of_a_member_follow_one_another(services: Services) -> None:
    """To a name that has signed in, as who is renamed at the Hub does, to new ones, and back."""
    give_everything(services, OLD, [])
    balance = balance_of(services, OLD)
    services.members.membership_returned(NEW, actor="hub")
    services.ledger.open_account(NEW)
    for names in ((OLD, NEW), (NEW, OLD), (OLD, "third"), ("third", NEW)):
        rename(services, *names)
        assert balance_of(services, names[1]) == balance, (
            "what an account opened with is taken back"
        )
        services.ledger.grant(f"member:{names[1]}", MICRO, actor="root", reason="prize")
        balance += MICRO
        assert_holds(services)

    # Somebody else comes under the old name.
    assert services.renames.last_rename("third", NEW)
    assert services.ledger.open_account("third").balance == OPENING * MICRO
    assert balance_of(services, NEW) == balance
    assert services.renames.last_rename("third", NEW) is None, "the name is somebody else's"
    with pytest.raises(Refused, match="has a history of their own"):
        rename(services, "third", NEW)
    rename(services, "third", "fourth")
    assert balance_of(services, "fourth") == OPENING * MICRO
    assert_holds(services)


def test_rename_keeps_sessions_that_the_hub_has_renamed(services: Services) -> None:
    """One session has ended and one runs. Neither counts as the new name's own history."""
    clock = Clock.of(services)
    services.ledger.open_account(OLD)
    over, lease = running(services, OLD, server="over"), running(services, OLD)
    for each in (over, lease):
        services.leases.follow_rename(each.id, ServerRef(NEW, each.server.name))
    clock.forward(minutes=10)
    services.ledger.charge_all()
    services.leases.release(over.id, ended_at=clock.now, reason="stopped")
    services.ledger.open_account(NEW)
    found = rename(services)
    assert [each.id for each in found.open_leases] == [lease.id]
    clock.forward(minutes=20)
    services.ledger.charge_all()
    ended = services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert (ended.account, ended.charged) == (f"member:{NEW}", 2 * MICRO)
    servers = {each.server.name for each in services.leases.of_account(f"member:{NEW}", 5)}
    assert servers == {"over", ""}
    assert balance_of(services, NEW) == OPENING * MICRO - ended.charged - 40 * MICRO // 60
    assert_holds(services)


def test_runs_of_a_renamed_member_go_on(services: Services) -> None:
    """One waits in the queue and the others run."""
    clock = Clock.of(services)
    services.ledger.open_account(OLD)
    got = []
    for number in range(5):
        work = Work(command=("train",))
        run = Run(id=f"run-{number}", user=OLD, title="", work=work, created_at=clock.now)
        services.runs.submit(run)
        terms = Terms(wait=True)
        request = Request(devices=1)
        got.append(services.queue.ask(run.server, request, engine="docker", terms=terms))
    *held, ticket = got
    assert isinstance(ticket, Ticket)
    for lease in held:
        assert isinstance(lease, Lease)
        services.leases.confirm(lease.id, started_at=clock.now)
    assert services.queue.turns(frozenset({ticket.id})) == []
    rename(services)
    clock.forward(minutes=10)
    services.runs.note_exit("run-0", 0)
    services.leases.release(held[0].id, ended_at=clock.now, reason="exit code 0")
    [ended] = services.runs.settle()
    assert (ended.id, ended.user, ended.outcome) == ("run-0", NEW, "done")
    waits = services.runs.get("run-4").run
    known = services.queue.ask(waits.server, request, engine="docker", terms=terms)
    assert isinstance(known, Ticket) and known.id == ticket.id, "it keeps its place"
    assert services.queue.turns(frozenset({ticket.id})) == [ticket.id]
    lease = services.queue.start_ticket(ticket.id)
    assert (lease.server, lease.account) == (waits.server, f"member:{NEW}")
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


def test_changes_by_hand_are_found_before_and_after_a_rename(services: Services) -> None:
    give_everything(services, OLD, [])
    [lease, *_] = services.leases.of_account(f"member:{OLD}", 1)
    for reason in ("idle", lease.end_reason):
        change = sa.update(leases).where(leases.c.id == lease.id).values(end_reason=reason)
        services.store.run(lambda connection, change=change: connection.execute(change), write=True)
        if reason == "idle":
            with pytest.raises(Refused, match=f"The ended lease {lease.id} was changed by hand"):
                rename(services)
    rename(services)
    assert_holds(services)
    first = sa.select(sa.func.min(postings.c.id)).where(postings.c.account == f"member:{NEW}")
    moved = sa.update(postings).where(postings.c.id == first.scalar_subquery())
    unsealed = {"at": Clock.of(services).now, "actor": "root", "old": "friend", "new": NEW}
    for change in (
        moved.values(account="member:friend"),
        sa.update(renames).values(old="friend"),
        sa.delete(renames),
        sa.insert(renames).values(**unsealed, posting=0, kept=""),
    ):
        with pytest.raises(ZeroDivisionError), services.store.write() as connection:
            with hash_chain.not_append_only(connection):
                connection.execute(change)
            found = [*hash_chain.check_transfers(connection), *hash_chain.check_seals(connection)]
            assert found, str(change)
            raise ZeroDivisionError  # and nothing of it stays
    assert_holds(services)


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
def test_failed_or_killed_rename_changes_nothing_and_completes_when_repeated(
    services: Services, database_url: str, tmp_path: Path, rounds: Rounds, chance: random.Random
) -> None:
    """Refused at its end, or killed before any statement, also while the trigger is off."""
    clock, names = Clock.of(services), (OLD, NEW)
    paths = {str(tmp_path / f"{d}/{OLD}"): str(tmp_path / f"{d}/{NEW}") for d in ("one", "two")}
    for old in paths:
        Path(old).mkdir(parents=True)
        (Path(old) / "notebook").write_text(old)
    give_everything(services, OLD, [*paths])
    balance, before = balance_of(services, OLD), _everything(services)

    def refuse() -> None:
        raise Refused("The directory cannot be renamed.")

    with pytest.raises(Refused, match="cannot be renamed"):
        rename(services, move=refuse)
    nobody = sa.update(postings).values(account="member:nobody")  # there is no such account
    with (
        pytest.raises(sa.exc.IntegrityError),
        services.store.write() as connection,
        hash_chain.not_append_only(connection),
    ):
        connection.execute(nobody)
    assert_append_only(services)
    assert _everything(services) == before

    def rename_to(at: int | str) -> int:
        return rename_until(database_url, clock, names, paths, at)

    steps = rename_to(NEVER)
    assert steps > 30
    moments = ["UPDATE postings", "UPDATE workspaces", "COMMIT"]
    moments += [1 + n % steps if SOAK else chance.randint(1, steps) for n in range(rounds(steps))]
    for at in moments:
        names, paths = names[::-1], {new: old for old, new in paths.items()}
        before = _everything(services)
        killed = not rename_to(at)
        assert killed or isinstance(at, int), f"not killed at {at}"
        if killed:
            assert _everything(services) == before, at
            assert rename_to(NEVER), at
        assert balance_of(services, names[1]) == balance
        assert services.renames.last_rename(*names) is not None
        for old, new in paths.items():
            assert not Path(old).exists() and (Path(new) / "notebook").exists(), at
        assert sources_of(services, names[1]) == {*paths.values()}
        assert_holds(services)
    assert_append_only(services)


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
