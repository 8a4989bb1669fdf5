"""Grants from a file. Real: SQLite and PostgreSQL; simulated: devices and the clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.ledger.grants import Bulk
from gpuspawner.services import Broker
from tests.support.brokers import Clock, credits_of

Make = Callable[..., Broker]
FILE = b"member,amount\nanna,10\nbert,2.5\n"


@pytest.fixture
def broker(make: Make) -> Broker:
    broker = make(opening_grant=1)
    broker.ledger.open_account("anna")
    broker.ledger.open_account("bert")
    return broker


def grant(broker: Broker, data: bytes = FILE, **more: bool) -> Bulk:
    return broker.bulk_grants.grant_file(data, actor="root", reason="course", **more)


def test_a_file_is_granted_as_a_whole(broker: Broker) -> None:
    foreseen = grant(broker, dry_run=True)
    assert not foreseen.done and foreseen.problems == () and foreseen.total == 12_500_000
    assert [(g.row.account, g.before, g.after) for g in foreseen.gifts] == [
        ("member:anna", MICRO, 11 * MICRO),
        ("member:bert", MICRO, 3_500_000),
    ]
    assert credits_of(broker) == 1 and broker.trail() == []
    done = grant(broker)
    assert done.done and done.gifts == foreseen.gifts
    assert (credits_of(broker, "anna"), credits_of(broker, "bert")) == (11, 3.5)
    (change,) = broker.trail()
    assert change.action == "grant_file" and change.detail == "12.50 credits to 2 accounts: course"


def test_the_same_file_twice_is_granted_once(broker: Broker, clock: Clock) -> None:
    grant(broker)
    clock.forward(days=1)
    for again in (FILE, b"\xef\xbb\xbfbert;2.50\r\nanna;10\r\n"):
        refused = grant(broker, again)
        assert not refused.done and "were given at 2025-03-01 12:00 UTC by root" in str(
            refused.problems[0]
        )
        assert grant(broker, again, dry_run=True).problems == refused.problems
    assert credits_of(broker) == 11
    assert grant(broker, again=True).done and grant(broker, again=True).done
    assert credits_of(broker) == 31


def test_one_bad_line_gives_nothing_to_anybody(broker: Broker) -> None:
    refused = grant(broker, b"anna,10\nbret,5\nbert,1e3\nanna,1\n")
    assert [str(problem) for problem in refused.problems] == [
        "Line 2: there is no account 'member:bret'. Did you mean member:bert? --open opens it.",
        "Line 3: the amount '1e3' is no number of credits: write it like 12.5.",
        "Line 4: member:anna is on line 1 already: add them up to one line.",
    ]
    assert not refused.done and credits_of(broker) == 1 and broker.trail() == []


def test_accounts_can_be_opened(broker: Broker) -> None:
    data = b"anna,1\nzoe,1\ngroup:lab,1\n"
    foreseen = grant(broker, data, dry_run=True, open_accounts=True)
    assert [(gift.opened, gift.after) for gift in foreseen.gifts] == [
        (False, 2 * MICRO),
        (True, 2 * MICRO),
        (True, MICRO),
    ]
    assert len(broker.ledger.accounts()) == 2
    assert grant(broker, data, open_accounts=True).gifts == foreseen.gifts
    assert [account.balance for account in broker.ledger.accounts()] == [
        *(MICRO, 2 * MICRO, MICRO, 2 * MICRO)
    ]


def test_what_a_file_gives_can_end(broker: Broker, clock: Clock) -> None:
    until = clock.now + timedelta(days=1)
    broker.bulk_grants.grant_file(FILE, actor="root", reason="course", until=until)
    assert [left for _, left in broker.ledger.lots_of("member:anna")] == [10 * MICRO]
    clock.forward(days=1)
    assert broker.ledger.end_lots() == 2 and credits_of(broker) == 1


def test_two_admins_grant_the_same_file_at_once(broker: Broker) -> None:
    gate, said = threading.Barrier(4), []

    def admin(number: int) -> None:
        gate.wait(120)
        said.append(
            broker.bulk_grants.grant_file(FILE, actor=f"admin{number}", reason="course").done
        )

    threads = [threading.Thread(target=admin, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(said) == [False, False, False, True]
    assert credits_of(broker) == 11 and len(broker.trail()) == 1
