"""Notices in the store, and what the accounting rounds tell. Real: SQL; the Hub is a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import sqlalchemy as sa

from gpuspawner.core.units import MICRO, format_credits
from gpuspawner.db import schema as db_schema
from gpuspawner.db.engine import Store
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.ledger.models import member_account
from gpuspawner.ledger.rules import owed
from gpuspawner.notifications import repository as notifications_repository
from gpuspawner.notifications.models import Notice, NoticeKind
from gpuspawner.notifications.repository import ChannelChoice, Outcome
from gpuspawner.services import Broker
from tests.support.rounds import (
    GRACE,
    START,
    Clock,
    ScriptedHub,
    make_credits,
    open_broker,
    running,
)
from tests.support.telling import choose, tell


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(database_url: str, clock: Clock) -> Iterator[Broker]:
    broker = open_broker(database_url, clock)
    yield broker
    broker.store.close()


@pytest.fixture
async def hub() -> AsyncIterator[ScriptedHub]:
    async with ScriptedHub().serving() as hub:
        yield hub


NOTICE = Notice(key="one", user="ada", kind=NoticeKind.TURN, title="t", body="b\nc", at=START)


# The store.


def test_a_key_is_told_once(broker: Broker) -> None:
    assert broker.notifications.add_notice(NOTICE)
    assert not broker.notifications.add_notice(replace(NOTICE, user="bob", title="other"))
    (told,) = broker.notifications.notices_of("ada")
    assert told == replace(NOTICE, id=told.id)
    assert broker.notifications.notices_of("bob") == []


async def test_several_who_tell_the_same_at_once(database_url: str, clock: Clock) -> None:
    stores = [Store(database_url) for _ in range(4)]

    def add(store: Store) -> bool:
        with store.write() as connection:
            return notifications_repository.add(connection, NOTICE)

    said = await asyncio.gather(*(asyncio.to_thread(add, store) for store in stores * 3))
    assert sorted(said) == [False] * 11 + [True]
    for store in stores:
        store.close()


def test_what_is_told_is_gone_with_its_transaction(broker: Broker) -> None:
    with pytest.raises(ZeroDivisionError), broker.store.write() as connection:
        assert notifications_repository.add(connection, NOTICE)
        raise ZeroDivisionError
    assert broker.notifications.notices_of("ada") == []


def test_what_is_unsent_comes_in_order(broker: Broker, clock: Clock) -> None:
    first, second, third = (tell(broker, user) for user in ("ada", "bob", "ada"))
    assert broker.notifications.unsent(3) == [first.id, second.id, third.id]
    broker.notifications.mark(
        {first.id: Outcome(START, 0), second.id: Outcome(None, 2, "mail: gone")}
    )
    assert broker.notifications.unsent(3) == [second.id, third.id]
    assert broker.notifications.unsent(2) == [third.id]
    failed = broker.notifications.notices_of("bob")[0]
    assert (failed.sent_at, failed.tries, failed.error) == (None, 2, "mail: gone")
    clock.now += timedelta(days=1)
    assert broker.notifications.unsent(3) == []


def test_many_are_read_at_once(broker: Broker) -> None:
    with broker.store.write() as connection:
        for number in range(1203):
            notifications_repository.add(
                connection, replace(NOTICE, key=str(number), user=f"user{number}")
            )
    ids = broker.notifications.unsent(1)
    assert len(ids) == 1203
    choose(broker, "user7")
    found = broker.notifications.with_choices(ids)
    assert [notice.key for notice, _ in found] == [str(number) for number in range(1203)]
    assert [notice.user for notice, own in found if own] == ["user7"]


def test_choices_are_kept_by_channel(broker: Broker) -> None:
    assert broker.notifications.choices("ada") == {}
    mail = ChannelChoice(
        "mail", "ada@lab.example", frozenset({NoticeKind.TURN, NoticeKind.STOPPED})
    )
    broker.notifications.choose("ada", [mail, ChannelChoice("chat", "@ada", frozenset(NoticeKind))])
    broker.notifications.choose("bob", [ChannelChoice("mail", "bob@lab.example")])
    assert broker.notifications.choices("ada")["mail"] == mail
    broker.notifications.choose("ada", [ChannelChoice("chat")])
    assert broker.notifications.choices("ada") == {"mail": mail, "chat": ChannelChoice("chat")}
    assert set(broker.notifications.choices("bob")) == {"mail"}


def test_a_kind_that_this_version_does_not_know_is_left_out(broker: Broker) -> None:
    broker.notifications.choose(
        "ada", [ChannelChoice("mail", "a@b.example", frozenset({NoticeKind.TURN}))]
    )
    with broker.store.write() as connection:
        connection.execute(sa.update(db_schema.notice_choices).values(kinds="turn moon"))
    assert broker.notifications.choices("ada")["mail"].kinds == {NoticeKind.TURN}


# What the rounds tell.


def told(broker: Broker, user: str = "ada") -> list[tuple[str, str]]:
    """Kind and title of what a member was told, oldest first."""
    return [
        (some.kind.value, some.title) for some in reversed(broker.notifications.notices_of(user))
    ]


async def minutes(broker: Broker, hub: ScriptedHub, clock: Clock, count: int) -> None:
    """So many rounds, a minute apart, each by a service that was just started."""
    for _ in range(count):
        clock.advance(60)
        broker.ledger.charge_all()
        await make_credits(broker, hub, warn_minutes=(10, 2)).round()


def until(clock: Clock, lease: Lease) -> str:
    """When the one credit of ``lease`` is used up, as a member reads it."""
    assert lease.started_at
    return (lease.started_at + timedelta(minutes=15)).astimezone().strftime("%H:%M (%Z)")


async def test_a_balance_that_runs_low_and_dry_is_told_once(
    broker: Broker, hub: ScriptedHub, clock: Clock
) -> None:
    """Each round is another service: what was told is in the store, and in no memory."""
    broker.settings.credits.help_text = "Ask Kim."
    lease = running(broker, "ada")
    hub.has(lease.server)
    await minutes(broker, hub, clock, 40)
    dry = (lease.started_at or START) + timedelta(minutes=15, seconds=GRACE)
    assert told(broker) == [
        ("credits_low", f"Your credits last until {until(clock, lease)}"),
        ("credits_low", f"Your credits last until {until(clock, lease)}"),
        ("credits_low", "Your credits have run out"),
        ("stopped", "Your server is stopped: the credits have run out"),
    ]
    stopped, out, _, low = broker.notifications.notices_of("ada")
    left = format_credits(MICRO - owed(lease.rate, START, low.at))
    assert f"{left} credits are left" in low.body and "cost 4.00 an hour" in low.body
    assert f"stopped at {dry.astimezone():%H:%M} (" in out.body and "Ask Kim." in out.body
    assert "Your files are where you left them" in stopped.body
    assert broker.lease(lease.id).outcome == "credits"


async def test_after_new_credits_it_is_told_again(
    broker: Broker, hub: ScriptedHub, clock: Clock
) -> None:
    lease = running(broker, "ada")
    hub.has(lease.server)
    await minutes(broker, hub, clock, 17)
    assert len(told(broker)) == 3
    broker.ledger.grant(member_account("ada"), MICRO, actor="admin", reason="more")
    await minutes(broker, hub, clock, 5)
    assert [title[:17] for _, title in told(broker)][3:] == ["Your credits last"]
    await minutes(broker, hub, clock, 30)
    assert [kind for kind, _ in told(broker)] == ["credits_low"] * 6 + ["stopped"]


async def test_everybody_whom_an_account_pays_for_is_told(
    broker: Broker, hub: ScriptedHub, clock: Clock
) -> None:
    with broker.store.write() as connection:
        broker.ledger.open_in(connection, "group:ml", clock.now)
    broker.ledger.grant("group:ml", 2 * MICRO, actor="admin", reason="a course")
    servers = [ServerRef("ada"), ServerRef("bob", "lab"), ServerRef("ada", "second")]
    for server in servers[:2]:
        request = Request(devices=1, model="A100")
        broker.confirm(broker.acquire(server, request, engine="local", account="group:ml").id)
    t4 = Request(devices=1, model="T4")
    broker.confirm(broker.acquire(servers[2], t4, engine="local", account="group:ml").id)
    hub.has(*servers)
    await minutes(broker, hub, clock, 5)  # 9 credits an hour: 13 minutes in all
    for user, theirs in (("ada", "your servers"), ("bob", "your server")):
        ((kind, title),) = told(broker, user)
        assert (kind, title[:28]) == ("credits_low", "The credits of the group ml ")
        assert (
            f"a while after that, {theirs} will be stopped"
            in broker.notifications.notices_of(user)[0].body
        )
    await minutes(broker, hub, clock, 10)
    assert [title for _, title in told(broker, "bob")][-1] == (
        "The credits of the group ml have run out"
    )
    assert "Your server lab will be stopped at" in broker.notifications.notices_of("bob")[0].body


async def test_who_has_credits_enough_is_told_nothing(
    broker: Broker, hub: ScriptedHub, clock: Clock
) -> None:
    running(broker, "ada", devices=0)
    await minutes(broker, hub, clock, 30)
    assert told(broker) == []
