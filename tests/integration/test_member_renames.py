"""A member gets another name, with all that is theirs. Real: SQLite, PostgreSQL, files, SIGKILL."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import Refused
from gpuspawner.core.units import MICRO
from gpuspawner.db import hash_chain
from gpuspawner.db.schema import metadata, postings, renames
from gpuspawner.leases.models import ServerRef
from gpuspawner.members import rename_repository
from gpuspawner.services import Broker
from tests.support import racers
from tests.support.belongings import (
    OPENING,
    broker_of,
    columns_with,
    give_everything,
    rename_and_die,
)
from tests.support.brokers import Clock, problems, running
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
def broker(each_database_url: str) -> Iterator[Broker]:
    broker = broker_of(each_database_url, Clock())
    yield broker
    broker.store.close()


def assert_holds(broker: Broker) -> None:
    findings, _ = broker.audit()
    assert [finding.problem for finding in findings if finding.problem] == []
    assert problems(broker.store) == []


def test_every_column_of_text_is_renamed_or_stays_for_a_reason() -> None:
    texts = {
        f"{table.name}.{column.name}"
        for table in metadata.sorted_tables
        for column in table.columns
        if isinstance(column.type, sa.Text)
    }
    said = rename_repository.COLUMNS | rename_repository.AS_WRITTEN.keys()
    assert said - texts == set(), "these columns are not there any more"
    assert not rename_repository.COLUMNS & rename_repository.AS_WRITTEN.keys()
    others = {f"{table}.{name}" for table, some in WITHOUT_NAMES.items() for name in some.split()}
    assert texts - said == others, (
        "can a new column have a member's name in it? "
        "Then members/rename_repository.py has to know it"
    )


def test_all_that_a_member_has_gets_the_new_name(broker: Broker, tmp_path: Path) -> None:
    old, new = str(tmp_path / OLD), str(tmp_path / NEW)
    give_everything(broker, OLD, [old, f"work-{OLD}"])
    before = columns_with(broker, OLD)
    assert before >= rename_repository.COLUMNS, "the test has something of everything"
    balance = broker.ledger.member(OLD).balance
    statement = [
        (line.amount, line.balance) for line in broker.ledger.statement(f"member:{OLD}", 500)
    ]
    noted = broker.chain_head()
    lots = [left for _, left in broker.ledger.lots_of(f"member:{OLD}")]
    found = broker.renames.rename_member(OLD, NEW, actor="root", sources={old: new})
    assert (found.leases, found.tickets, found.folders, len(found.workspaces)) == (2, 1, 1, 2)
    assert columns_with(broker, OLD) <= {*rename_repository.AS_WRITTEN, "workspaces.source"}
    assert columns_with(broker, NEW) >= rename_repository.COLUMNS
    assert_holds(broker)
    assert broker.knows_head(noted)
    account = f"member:{NEW}"
    assert broker.ledger.member(NEW).balance == balance and broker.ledger.member(OLD).balance == 0
    assert [(x.amount, x.balance) for x in broker.ledger.statement(account, 500)] == statement
    assert [left for _, left in broker.ledger.lots_of(account)] == lots
    assert {each.workspace.source for each in broker.storage.files_of(NEW)} == {new, f"work-{OLD}"}
    [change] = [x for x in broker.trail() if x.action == "rename member"]
    assert (change.actor, change.subject) == ("root", NEW) and OLD in change.detail
    done = broker.renames.last_rename(OLD, NEW)
    assert done is not None and done.actor == "root"


def test_life_goes_on_under_the_new_name(broker: Broker) -> None:
    clock = Clock.of(broker)
    give_everything(broker, OLD, [])
    broker.renames.rename_member(OLD, NEW, actor="root")
    [newest, *_] = broker.leases_of(f"member:{NEW}", 1)
    broker.ledger.refund(newest.id, actor="root", reason="a broken fan")
    clock.forward(days=1)
    [refill] = broker.refills.due_refills()
    run = broker.refills.give_refill(refill.id)
    assert run is not None and run.accounts == 2
    clock.forward(days=10)
    broker.ledger.end_lots()
    lease = running(broker, NEW)
    clock.forward(minutes=5)
    broker.ledger.charge_all()
    broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert_holds(broker)


def test_somebody_else_can_have_the_old_name(broker: Broker) -> None:
    give_everything(broker, OLD, [])
    broker.renames.rename_member(OLD, NEW, actor="root")
    balance = broker.ledger.member(NEW).balance
    assert broker.ledger.open_account(OLD).balance == OPENING * MICRO
    assert broker.ledger.member(NEW).balance == balance
    assert broker.renames.last_rename(OLD, NEW) is None, "the name is somebody else's"
    with pytest.raises(Refused, match="has a history of their own"):
        broker.renames.rename_member(OLD, NEW, actor="root")
    broker.renames.rename_member(OLD, "third", actor="root")
    assert broker.ledger.member("third").balance == OPENING * MICRO
    assert_holds(broker)


def test_a_member_can_be_renamed_back_and_again(broker: Broker) -> None:
    give_everything(broker, OLD, [])
    balance = broker.ledger.member(OLD).balance
    for names in ((OLD, NEW), (NEW, OLD), (OLD, "third"), ("third", NEW)):
        broker.renames.rename_member(*names, actor="root")
        broker.ledger.grant(f"member:{names[1]}", MICRO, actor="root", reason="prize")
        balance += MICRO
        assert broker.ledger.member(names[1]).balance == balance
        assert_holds(broker)


def test_what_the_new_name_got_at_its_first_sign_in_is_no_history(broker: Broker) -> None:
    """Who is renamed at the Hub signs in there before an admin types anything."""
    give_everything(broker, OLD, [])
    balance = broker.ledger.member(OLD).balance
    broker.members.membership_returned(NEW, actor="hub")
    broker.ledger.open_account(NEW)
    broker.renames.rename_member(OLD, NEW, actor="root")
    assert broker.ledger.member(NEW).balance == balance, (
        "what the account opened with is taken back"
    )
    assert_holds(broker)
    broker.renames.rename_member(NEW, OLD, actor="root")
    assert broker.ledger.member(OLD).balance == balance
    assert_holds(broker)


def test_a_server_that_the_hub_has_renamed_goes_on(broker: Broker) -> None:
    clock = Clock.of(broker)
    broker.ledger.open_account(OLD)
    lease = running(broker, OLD)
    clock.forward(minutes=10)
    broker.ledger.charge_all()
    broker.follow_rename(lease.id, ServerRef(NEW))
    broker.ledger.open_account(NEW)
    found = broker.renames.rename_member(OLD, NEW, actor="root")
    assert [each.id for each in found.open_leases] == [lease.id]
    clock.forward(minutes=20)
    broker.ledger.charge_all()
    ended = broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert (ended.account, ended.charged) == (f"member:{NEW}", 2 * MICRO)
    assert broker.ledger.member(NEW).balance == (OPENING - 2) * MICRO
    assert_holds(broker)


def test_a_session_that_was_renamed_and_ended_is_no_history_of_the_new_name(
    broker: Broker,
) -> None:
    broker.ledger.open_account(OLD)
    lease = running(broker, OLD)
    broker.follow_rename(lease.id, ServerRef(NEW))
    broker.release(lease.id, ended_at=Clock.of(broker).forward(minutes=1), reason="stopped")
    broker.renames.rename_member(OLD, NEW, actor="root")
    assert broker.leases_of(f"member:{NEW}", 5)[0].server == ServerRef(NEW)
    assert_holds(broker)


def test_what_cannot_be_renamed_is_refused_in_words_and_changes_nothing(broker: Broker) -> None:
    def refused(old: str, new: str) -> str:
        before = {table.name: _rows(broker, table) for table in metadata.sorted_tables}
        with pytest.raises(Refused) as error:
            broker.renames.rename_member(old, new, actor="root", move=lambda: pytest.fail("moved"))
        after = {table.name: _rows(broker, table) for table in metadata.sorted_tables}
        assert before == after
        assert error.value.message.endswith("Nothing was changed.")
        return error.value.message

    assert "Nothing is known of a member 'nobody'" in refused("nobody", NEW)
    broker.ledger.open_account(OLD)
    assert f"{OLD} is called that already" in refused(OLD, OLD)
    for name in ("", " x", "a\nb"):
        assert f"{name!r} is no name of a member" in refused(OLD, name)
    lease = running(broker, OLD)
    assert f"The server {OLD} runs under the name {OLD} (lease {lease.id})" in refused(OLD, NEW)
    broker.release(lease.id, reason="stopped")
    other = running(broker, NEW)
    assert f"{NEW} has a history of their own (1 lease)" in refused(OLD, NEW)
    broker.release(other.id, reason="stopped")
    assert f"{NEW} has a history of their own (1 lease" in refused(OLD, NEW)
    broker.ledger.open_account("third")
    broker.ledger.grant("member:third", MICRO, actor="root", reason="prize")
    assert "(1 entry in the ledger)" in refused(OLD, "third")


def test_a_row_that_was_changed_by_hand_is_not_made_good(broker: Broker) -> None:
    give_everything(broker, OLD, [])
    [lease, *_] = broker.leases_of(f"member:{OLD}", 1)
    broker.store.run(
        lambda c: c.execute(
            sa.text("UPDATE leases SET end_reason = 'idle' WHERE id = :id"), {"id": lease.id}
        ),
        write=True,
    )
    with pytest.raises(Refused, match=f"The ended lease {lease.id} was changed by hand"):
        broker.renames.rename_member(OLD, NEW, actor="root")


@pytest.mark.parametrize("what", ["posting", "rename", "unsealed rename", "rename deleted"])
def test_the_audit_finds_what_is_changed_after_a_rename(broker: Broker, what: str) -> None:
    give_everything(broker, OLD, [])
    broker.renames.rename_member(OLD, NEW, actor="root")
    assert_holds(broker)
    with broker.store.write() as connection:
        if what == "posting":
            first = sa.select(sa.func.min(postings.c.id)).where(
                postings.c.account == f"member:{NEW}"
            )
            change = sa.update(postings).where(postings.c.id == first.scalar_subquery())
            with hash_chain.not_append_only(connection):
                connection.execute(change.values(account="member:friend"))
        elif what == "rename":
            connection.execute(sa.update(renames).values(old="friend"))
        elif what == "rename deleted":
            connection.execute(sa.delete(renames))
        else:
            values = {"at": Clock.of(broker).now, "actor": "root", "old": "friend", "new": NEW}
            connection.execute(sa.insert(renames).values(**values, posting=0, kept=""))
        found = [*hash_chain.check_transfers(connection), *hash_chain.check_seals(connection)]
    assert found


@pytest.mark.parametrize("moment", ["UPDATE postings", "UPDATE workspaces", "COMMIT"])
def test_a_kill_leaves_the_trigger_of_the_ledger_on_and_all_rows_as_before(
    broker: Broker, each_database_url: str, moment: str
) -> None:
    """The first of these statements comes while the trigger is off."""
    give_everything(broker, OLD, [f"work-{OLD}"])
    before = _everything(broker)
    ours, theirs = racers.FORKSERVER.Pipe()
    arguments = (theirs, each_database_url, Clock.of(broker), (OLD, NEW), {}, moment)
    process = racers.FORKSERVER.Process(target=rename_and_die, args=arguments, daemon=True)
    process.start()
    theirs.close()
    process.join(timeout=120)
    ours.close()
    assert process.exitcode == -9, "it was killed there"
    assert_append_only(broker)
    assert _everything(broker) == before
    assert_holds(broker)


def test_directories_that_cannot_be_renamed_leave_the_trigger_on_and_all_rows_as_before(
    broker: Broker,
) -> None:
    give_everything(broker, OLD, [])
    before = _everything(broker)

    def fail() -> None:
        raise Refused("The directory cannot be renamed.")

    with pytest.raises(Refused, match="cannot be renamed"):
        broker.renames.rename_member(OLD, NEW, actor="root", move=fail)
    assert_append_only(broker)
    assert _everything(broker) == before
    assert_holds(broker)


def test_a_statement_that_fails_while_the_trigger_is_off_leaves_it_on(broker: Broker) -> None:
    give_everything(broker, OLD, [])
    before = _everything(broker)
    nobody = sa.update(postings).values(account="member:nobody")  # there is no such account
    with (
        pytest.raises(sa.exc.IntegrityError),
        broker.store.write() as connection,
        hash_chain.not_append_only(connection),
    ):
        connection.execute(nobody)
    assert_append_only(broker)
    assert _everything(broker) == before


def test_the_trigger_of_the_ledger_is_on_after_a_rename(broker: Broker) -> None:
    give_everything(broker, OLD, [])
    before = _triggers(broker)
    broker.renames.rename_member(OLD, NEW, actor="root")
    assert_append_only(broker)
    assert _triggers(broker) == before


def test_a_rename_that_is_killed_at_any_step_is_complete_when_it_is_said_again(
    broker: Broker, each_database_url: str, tmp_path: Path, rounds: Rounds, chance: random.Random
) -> None:
    clock, names = Clock.of(broker), (OLD, NEW)
    paths = {str(tmp_path / f"{d}/{OLD}"): str(tmp_path / f"{d}/{NEW}") for d in ("one", "two")}
    for old in paths:
        Path(old).mkdir(parents=True)
        (Path(old) / "notebook").write_text(old)
    give_everything(broker, OLD, [*paths])
    balance = broker.ledger.member(OLD).balance

    def rename(at: int) -> int:
        """How many steps it took; 0 if it was killed."""
        ours, theirs = racers.FORKSERVER.Pipe()
        arguments = (theirs, each_database_url, clock, names, paths, at)
        process = racers.FORKSERVER.Process(target=rename_and_die, args=arguments, daemon=True)
        process.start()
        theirs.close()
        process.join(timeout=120)
        assert process.exitcode in (0, -9)
        return int(ours.recv()) if process.exitcode == 0 else 0

    steps = rename(1_000_000)
    assert steps > 30
    for round_ in range(rounds(2 * steps)):
        names, paths = names[::-1], {new: old for old, new in paths.items()}
        at = 1 + round_ % steps if SOAK else chance.randint(1, steps)
        done = rename(at)
        for account in names:
            assert broker.ledger.member(account).balance in (0, balance), at
        assert_holds(broker)
        assert done or rename(1_000_000), at
        assert broker.ledger.member(names[1]).balance == balance
        assert broker.renames.last_rename(*names) is not None
        for old, new in paths.items():
            assert not Path(old).exists() and (Path(new) / "notebook").exists(), at
        assert_holds(broker)
        assert {each.workspace.source for each in broker.storage.files_of(names[1])} == {
            *paths.values()
        }


def assert_append_only(broker: Broker) -> None:
    """Nobody can change or delete a posting."""
    for change in (sa.update(postings).values(amount=0), sa.delete(postings)):
        with (
            pytest.raises(sa.exc.DatabaseError, match="append-only"),
            broker.store.write() as connection,
        ):
            connection.execute(change)


def _triggers(broker: Broker) -> list[str]:
    """The triggers as the database has them, and whether they are on."""
    query = "SELECT name, tbl_name, sql FROM sqlite_master WHERE type = 'trigger'"
    if broker.store.dialect == "postgresql":
        query = (
            "SELECT tgname, tgrelid::regclass::text, tgenabled::text FROM pg_trigger "
            "WHERE NOT tgisinternal"
        )
    with broker.store.read() as connection:
        return sorted(map(repr, connection.exec_driver_sql(query)))


def _everything(broker: Broker) -> dict[str, list[str]]:
    """All rows by table, and the triggers."""
    rows = {table.name: _rows(broker, table) for table in metadata.sorted_tables}
    return rows | {"triggers": _triggers(broker)}


def _rows(broker: Broker, table: sa.Table) -> list[str]:
    with broker.store.read() as connection:
        return sorted(map(repr, connection.execute(sa.select(table))))
