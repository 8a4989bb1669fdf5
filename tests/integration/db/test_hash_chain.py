"""The audit chain: rows that somebody changed, deleted or put in by hand are found.

Real: SQLite, PostgreSQL, the command. What is wrong is written with triggers and constraints taken
away first, and is consistent with everything but the chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import sqlalchemy as sa

from gpuspawner.core.units import MICRO
from gpuspawner.db import hash_chain
from gpuspawner.db.schema import postings
from gpuspawner.ledger.service import note
from gpuspawner.services import Services
from tests.support.broken_stores import by_hand
from tests.support.brokers import Clock, broken_invariants, open_services, problems, running
from tests.support.parts import each_database

CHAINS = {"chain of transfers", "chain of the audit log"}


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    clock = Clock()
    services = open_services(database_url, clock, gpu_rates={"*": 4})
    for user in ("anna", "bert"):
        lease = running(services, user, 2)
        clock.forward(minutes=30)
        services.ledger.charge_all()
        services.leases.release(lease.id, ended_at=clock.forward(minutes=7), reason="stopped")
    services.ledger.refund(lease.id, actor="root", reason="a broken fan", amount=MICRO // 2)
    free = running(services, "carl", 0)
    services.leases.release(free.id, ended_at=clock.forward(minutes=1), reason="stopped")
    uuid = services.devices.look().devices[0].uuid
    services.devices.drain(uuid, actor="root", reason="new fan")
    services.devices.undrain(uuid, actor="root")
    services.ledger.grant("member:anna", MICRO, actor="root", reason="prize")
    running(services, "dora")
    clock.forward(minutes=1)
    services.ledger.charge_all()
    yield services
    services.store.close()


NEWEST = "(SELECT id FROM audit ORDER BY id DESC LIMIT 1)"
OLDEST = "(SELECT min(id) FROM audit)"
PAST = "(SELECT id FROM leases WHERE \"user\" = 'anna')"
GRANT = "(SELECT id FROM transfers WHERE reason = 'prize')"

CHANGED = {
    "was changed by hand": (
        f"UPDATE lease_places SET uuid = 'GPU-other' WHERE lease_id = {PAST} AND \"index\" = 0",
        f'DELETE FROM lease_places WHERE lease_id = {PAST} AND "index" = 0',
        'INSERT INTO lease_places (lease_id, uuid, slot, "index", model, memory_bytes, open) '
        "SELECT id, 'GPU-other', 0, 7, 'A100', 1, false FROM leases WHERE \"user\" = 'carl'",
        "UPDATE leases SET end_reason = 'idle' WHERE \"user\" = 'carl'",
        "UPDATE leases SET \"user\" = 'eve' WHERE \"user\" = 'anna'",
        "UPDATE leases SET engine_id = 'other' WHERE \"user\" = 'carl'",
        f"UPDATE audit SET actor = 'eve' WHERE id = {OLDEST}",
    ),
    "The ended lease": ("DELETE FROM leases WHERE \"user\" = 'carl'",),
    "does not follow the one before it": (
        "UPDATE transfers SET reason = 'because' WHERE reason = 'prize'",
        "UPDATE transfers SET reason = 'because' WHERE id = "
        "(SELECT transfer_id FROM postings ORDER BY id LIMIT 1)",
        "UPDATE transfers SET at = '2025-03-01 12:00:00.000001' WHERE id = "
        "(SELECT transfer_id FROM postings ORDER BY id DESC LIMIT 1)",
        "UPDATE transfers SET actor = 'eve' WHERE reason = 'prize'",
        "DELETE FROM chain WHERE id = 1",
        "UPDATE chain SET facts = link WHERE id = (SELECT max(id) FROM chain)",
    ),
    "is missing": (
        f"DELETE FROM audit WHERE id = {OLDEST}",
        f"DELETE FROM audit WHERE id = {NEWEST}",
    ),
    "was inserted by hand": (
        "INSERT INTO audit (at, actor, action, subject, detail) "
        "VALUES ('2025-03-01 12:00:00', 'root', 'drain', 'GPU-x', '')",
    ),
    "no seal": ("DELETE FROM chain WHERE id = (SELECT max(id) FROM chain)",),
}
"""Statements by what the audit says of each."""


@each_database
def test_chain_check_names_a_row_changed_by_hand(services: Services) -> None:
    assert broken_invariants(services) == {}
    with by_hand(services) as connection:
        connection.commit()
        for sentence, statement in ((key, each) for key, some in CHANGED.items() for each in some):
            if services.store.dialect == "sqlite":
                connection.exec_driver_sql("BEGIN")
            assert connection.exec_driver_sql(statement).rowcount == 1, statement
            found = [*hash_chain.check_transfers(connection), *hash_chain.check_seals(connection)]
            assert found and sentence in found[0], (statement, found)
            connection.rollback()
    assert broken_invariants(services) == {}


FORGED = (
    "INSERT INTO transfers (id, key, kind, at, actor, reason) "
    "SELECT 'forged', 'grant:forged', kind, at, actor, 'a gift' FROM transfers WHERE id = {GRANT}",
    "INSERT INTO postings (transfer_id, account, amount, apart, link) "
    "SELECT 'forged', account, amount, apart, {link} FROM postings WHERE transfer_id = {GRANT}",
    "UPDATE accounts SET balance = balance + 1000000 WHERE name = 'member:anna'",
    "UPDATE accounts SET balance = balance - 1000000 WHERE name = 'system:grants'",
)


@pytest.mark.parametrize(
    "link", ["NULL", "link", "(SELECT link FROM postings ORDER BY id DESC LIMIT 1)"]
)
def test_self_consistent_forged_grant_is_found(services: Services, link: str) -> None:
    with by_hand(services) as connection:
        for statement in FORGED:
            text = statement.format(GRANT=GRANT, link=link)
            assert connection.exec_driver_sql(text).rowcount >= 1
    found = broken_invariants(services)
    assert "Transfer forged" in found.pop("chain of transfers")
    assert set(found) <= {"totals of credits"}


def newest(services: Services, count: int) -> list[str]:
    """The ids of the newest transfers, oldest first."""
    query = sa.select(postings.c.transfer_id).order_by(postings.c.id.desc()).limit(2 * count)
    found = services.store.run(lambda connection: connection.execute(query).scalars().all())
    return [*dict.fromkeys(reversed(found))]


@pytest.fixture
def together(services: Services) -> list[str]:
    """The ids of four transfers that one transaction posted, with others before and after them."""
    for user in ("eva", "finn", "gina"):
        running(services, user, 1)
    Clock.of(services).forward(minutes=1)
    assert services.ledger.charge_all() == 4
    found = newest(services, 4)
    services.ledger.grant("member:anna", MICRO, actor="root", reason="later")
    return found


def test_transfers_posted_together_share_one_link(services: Services, together: list[str]) -> None:
    query = (
        sa.select(postings.c.link)
        .where(postings.c.transfer_id.in_(together))
        .order_by(postings.c.id)
    )
    links = services.store.run(lambda connection: connection.execute(query).scalars().all())
    assert links[:-1] == [None] * 7 and links[-1]
    assert broken_invariants(services) == {}


TOGETHER = {
    "reason changed": "UPDATE transfers SET reason = 'because' WHERE id = '{id}'",
    "amounts changed": "UPDATE postings SET amount = 2 * amount WHERE transfer_id = '{id}'",
    "moved to another account": "UPDATE postings SET account = 'member:carl' "
    "WHERE transfer_id = '{id}' AND account LIKE 'member:%'",
    "deleted": "DELETE FROM postings WHERE transfer_id = '{id}'",
    "one posting deleted": "DELETE FROM postings WHERE id = "
    "(SELECT max(id) FROM postings WHERE transfer_id = '{id}')",
    "link added": "UPDATE postings SET link = (SELECT max(link) FROM postings) WHERE id = "
    "(SELECT min(id) FROM postings WHERE transfer_id = '{id}')",
    "link changed": "UPDATE postings SET link = "
    "(SELECT min(link) FROM postings WHERE transfer_id <> '{id}') WHERE id = "
    "(SELECT max(id) FROM postings WHERE transfer_id = '{id}')",
}


@each_database
def test_change_within_a_batch_of_transfers_is_found(
    services: Services, together: list[str]
) -> None:
    with by_hand(services) as connection:
        connection.commit()
        for transfer, (what, statement) in product(together, TOGETHER.items()):
            if services.store.dialect == "sqlite":
                connection.exec_driver_sql("BEGIN")
            text = statement.format(id=transfer).replace("%", "%%")
            assert connection.exec_driver_sql(text).rowcount >= 1, what
            found = "".join(hash_chain.check_transfers(connection))
            assert "does not follow the one before it" in found, what
            assert any(each in found for each in together), (what, found)
            connection.rollback()


def test_deleted_last_transfer_of_a_batch_is_found(services: Services) -> None:
    """Also while nothing was written after them: the others then have no link."""
    for user in ("eva", "finn"):
        running(services, user, 1)
    Clock.of(services).forward(minutes=1)
    assert services.ledger.charge_all() == 3
    first, _, last = newest(services, 3)
    with by_hand(services) as connection:
        for table, column in (("postings", "transfer_id"), ("transfers", "id")):
            connection.exec_driver_sql(f"DELETE FROM {table} WHERE {column} = '{last}'")
        [found] = hash_chain.check_transfers(connection)
    assert f"One of the 2 transfers from {first}" in found
    assert found.endswith("it was inserted by hand, or what was written with it was deleted.")


def test_deletion_of_the_newest_grant_is_found(services: Services) -> None:
    services.ledger.grant("member:anna", MICRO, actor="root", reason="last")
    last = "(SELECT id FROM transfers WHERE reason = 'last')"
    with by_hand(services) as connection:
        for statement in (
            "UPDATE accounts SET balance = balance - 1000000 WHERE name = 'member:anna'",
            "UPDATE accounts SET balance = balance + 1000000 WHERE name = 'system:grants'",
            f"DELETE FROM postings WHERE transfer_id = {last}",
            "DELETE FROM transfers WHERE reason = 'last'",
        ):
            assert connection.exec_driver_sql(statement).rowcount >= 1
    sentence = broken_invariants(services)["chain of transfers"]
    assert sentence.endswith(
        "was written after a transfer that is missing: it was deleted by hand."
    )


def test_noted_head_reveals_a_transfer_deleted_after_last_seal(services: Services) -> None:
    Clock.of(services).forward(minutes=1)
    services.ledger.charge_all()
    noted = services.audit.chain_head()
    last = "(SELECT transfer_id FROM postings ORDER BY id DESC LIMIT 1)"
    with by_hand(services) as connection:
        deleted = connection.exec_driver_sql(f"SELECT transfer_id FROM ({last}) t").scalar_one()
        for table, column in (("postings", "transfer_id"), ("transfers", "id")):
            connection.exec_driver_sql(f"DELETE FROM {table} WHERE {column} = '{deleted}'")
        assert [*hash_chain.check_transfers(connection), *hash_chain.check_seals(connection)] == []
    assert not services.audit.knows_head(noted)


def test_tampering_is_still_found_after_the_next_write(services: Services) -> None:
    with by_hand(services) as connection:
        connection.exec_driver_sql("UPDATE transfers SET actor = 'eve' WHERE reason = 'prize'")
    services.ledger.grant("member:anna", MICRO, actor="root", reason="later")
    assert "does not follow" in broken_invariants(services)["chain of transfers"]


@each_database
def test_concurrent_writers_make_one_chain(services: Services) -> None:
    def write(number: int) -> None:
        user = f"user{number}"
        services.ledger.open_account(user)
        services.ledger.grant(f"member:{user}", MICRO, actor="root", reason="course")
        lease = running(services, user, 0)
        services.leases.release(lease.id, reason="stopped")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(24)))
    assert problems(services.store) == [] and broken_invariants(services) == {}


@each_database
def test_failed_write_leaves_no_gap_in_the_chain(services: Services) -> None:
    with pytest.raises(ZeroDivisionError), services.store.write() as connection:
        note(connection, "root", "drain", "GPU-x", "", Clock.of(services).now)
        raise ZeroDivisionError
    services.ledger.grant("member:anna", MICRO, actor="root", reason="later")
    services.devices.pause(actor="root", reason="new fans")
    assert broken_invariants(services) == {}


@each_database
def test_noted_head_is_known_and_wrong_heads_are_not(services: Services) -> None:
    noted = services.audit.chain_head()
    assert services.audit.chain_head() == noted
    services.ledger.grant("member:anna", MICRO, actor="root", reason="later")
    services.devices.pause(actor="root", reason="new fans")
    assert services.audit.chain_head() != noted
    assert services.audit.knows_head(noted) and services.audit.knows_head(
        services.audit.chain_head()
    )
    for wrong in ("", "x", "1.2", "1.2.3", noted[:-1], "9" * 40 + ".1.x", "-1.-1.x"):
        assert not services.audit.knows_head(wrong)


def test_removal_of_the_whole_chain_is_found(services: Services) -> None:
    with by_hand(services) as connection:
        for statement in ("UPDATE postings SET link = NULL", "DELETE FROM chain"):
            connection.exec_driver_sql(statement)
    assert set(broken_invariants(services)) >= CHAINS
