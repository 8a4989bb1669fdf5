"""Grants from a file. Real: SQLite and PostgreSQL; simulated: devices and the clock."""

from __future__ import annotations

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.ledger.grants import BulkGrantResult
from gpuspawner.services import Services
from tests.support.brokers import Clock, Make, credits_of
from tests.support.parts import each_database
from tests.support.threads import at_once

FILE = b"member,amount\nanna,10\nbert,2.5\n"


@pytest.fixture
def services(make: Make) -> Services:
    services = make(opening_grant=1)
    services.ledger.open_account("anna")
    services.ledger.open_account("bert")
    return services


def grant(services: Services, data: bytes = FILE, **more: bool) -> BulkGrantResult:
    return services.bulk_grants.grant_file(data, actor="root", reason="course", **more)


def test_repeated_grant_file_is_refused_without_again(services: Services, clock: Clock) -> None:
    grant(services)
    clock.forward(days=1)
    for again in (FILE, b"\xef\xbb\xbfbert;2.50\r\nanna;10\r\n"):
        refused = grant(services, again)
        assert not refused.done and "were given at 2025-03-01 12:00 UTC by root" in str(
            refused.problems[0]
        )
        assert grant(services, again, dry_run=True).problems == refused.problems
    assert credits_of(services) == 11
    assert grant(services, again=True).done and grant(services, again=True).done
    assert credits_of(services) == 31


def test_grant_file_can_open_accounts(services: Services) -> None:
    data = b"anna,1\nzoe,1\ngroup:lab,1\n"
    foreseen = grant(services, data, dry_run=True, open_accounts=True)
    assert [(gift.opened, gift.after) for gift in foreseen.gifts] == [
        (False, 2 * MICRO),
        (True, 2 * MICRO),
        (True, MICRO),
    ]
    assert not foreseen.done and foreseen.total == 3 * MICRO
    assert len(services.ledger.accounts()) == 2 and services.audit.trail() == []
    assert grant(services, data, open_accounts=True).gifts == foreseen.gifts
    assert [account.balance for account in services.ledger.accounts()] == [
        *(MICRO, 2 * MICRO, MICRO, 2 * MICRO)
    ]


def test_foreseen_balance_is_less_what_is_due(services: Services, clock: Clock) -> None:
    lease = services.leases.grant(ServerRef("anna"), Request(devices=1), engine="local")
    services.leases.confirm(lease.id)
    clock.forward(minutes=10)
    foreseen = grant(services, dry_run=True)
    assert foreseen.gifts[0].before == services.ledger.current_account("member:anna").balance
    assert foreseen.gifts[0].before < services.ledger.account("member:anna").balance
    assert grant(services).gifts == foreseen.gifts
    assert foreseen.gifts[0].after == services.ledger.current_account("member:anna").balance


@each_database
def test_concurrent_grants_of_one_file_happen_once(services: Services) -> None:
    done = at_once(4, lambda number: grant(services).done)
    assert sorted(done) == [False, False, False, True]
    assert (credits_of(services, "anna"), credits_of(services, "bert")) == (11, 3.5)
    (change,) = services.audit.trail()
    assert change.action == "grant_file" and change.detail == "12.50 credits to 2 accounts: course"
