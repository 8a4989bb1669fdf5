"""Notices in the store, and what the accounting rounds tell. Real: SQL; the Hub is a script."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest
import sqlalchemy as sa

from gpuspawner.core.units import MICRO
from gpuspawner.db import schema as db_schema
from gpuspawner.db.engine import Store
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.notifications import repository as notifications_repository
from gpuspawner.notifications.models import Notice, NoticeKind
from gpuspawner.notifications.repository import ChannelChoice, Outcome
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, Make
from tests.support.parts import each_database
from tests.support.rounds import SITE, ScriptedHub, make_credits
from tests.support.telling import choose, tell


@pytest.fixture
def services(make: Make) -> Services:
    return make(**SITE)


NOTICE = Notice(
    key="one",
    user="ada",
    kind=NoticeKind.TURN,
    title="t",
    body="b\nc",
    at=T0,
    facts={"event": "turn", "gpus": ["GPU-1"], "minutes": None},
)


# The store.


def test_a_key_is_told_once(services: Services) -> None:
    assert services.notifications.add_notice(NOTICE)
    assert not services.notifications.add_notice(replace(NOTICE, user="bob", title="other"))
    (told,) = services.notifications.notices_of("ada")
    assert told == replace(NOTICE, id=told.id)
    assert services.notifications.notices_of("bob") == []


@each_database
async def test_several_who_tell_the_same_at_once(database_url: str) -> None:
    stores = [Store(database_url) for _ in range(4)]

    def add(store: Store) -> bool:
        with store.write() as connection:
            return notifications_repository.add(connection, NOTICE)

    said = await asyncio.gather(*(asyncio.to_thread(add, store) for store in stores * 3))
    assert sorted(said) == [False] * 11 + [True]
    for store in stores:
        store.close()


def test_what_is_told_is_gone_with_its_transaction(services: Services) -> None:
    with pytest.raises(ZeroDivisionError), services.store.write() as connection:
        assert notifications_repository.add(connection, NOTICE)
        raise ZeroDivisionError
    assert services.notifications.notices_of("ada") == []


@each_database
def test_what_is_unsent_comes_in_order(services: Services, clock: Clock) -> None:
    first, second, third = (tell(services, user) for user in ("ada", "bob", "ada"))
    assert services.notifications.unsent(3) == [first.id, second.id, third.id]
    services.notifications.mark(
        {first.id: Outcome(T0, 0), second.id: Outcome(None, 2, "mail: gone")}
    )
    assert services.notifications.unsent(3) == [second.id, third.id]
    assert services.notifications.unsent(2) == [third.id]
    failed = services.notifications.notices_of("bob")[0]
    assert (failed.sent_at, failed.tries, failed.error) == (None, 2, "mail: gone")
    clock.now += timedelta(days=1)
    assert services.notifications.unsent(3) == []


@each_database
def test_many_are_read_at_once(services: Services) -> None:
    with services.store.write() as connection:
        for number in range(1203):
            notifications_repository.add(
                connection, replace(NOTICE, key=str(number), user=f"user{number}")
            )
    ids = services.notifications.unsent(1)
    assert len(ids) == 1203
    choose(services, "user7")
    found = services.notifications.with_choices(ids)
    assert [notice.key for notice, _ in found] == [str(number) for number in range(1203)]
    assert [notice.user for notice, own in found if own] == ["user7"]


@each_database
def test_choices_are_kept_by_channel(services: Services) -> None:
    assert services.notifications.choices("ada") == {}
    mail = ChannelChoice(
        "mail", "ada@lab.example", frozenset({NoticeKind.TURN, NoticeKind.STOPPED})
    )
    services.notifications.choose(
        "ada", [mail, ChannelChoice("chat", "@ada", frozenset(NoticeKind))]
    )
    services.notifications.choose("bob", [ChannelChoice("mail", "bob@lab.example")])
    assert services.notifications.choices("ada")["mail"] == mail
    services.notifications.choose("ada", [ChannelChoice("chat")])
    assert services.notifications.choices("ada") == {"mail": mail, "chat": ChannelChoice("chat")}
    assert set(services.notifications.choices("bob")) == {"mail"}


def test_a_kind_that_this_version_does_not_know_is_left_out(services: Services) -> None:
    services.notifications.choose(
        "ada", [ChannelChoice("mail", "a@b.example", frozenset({NoticeKind.TURN}))]
    )
    with services.store.write() as connection:
        connection.execute(sa.update(db_schema.notice_choices).values(kinds="turn moon"))
    assert services.notifications.choices("ada")["mail"].kinds == {NoticeKind.TURN}


# What the rounds tell.


def told(services: Services, user: str = "ada") -> list[tuple[str, str]]:
    """Kind and title of what a member was told, oldest first."""
    return [
        (some.kind.value, some.title) for some in reversed(services.notifications.notices_of(user))
    ]


async def minutes(services: Services, hub: ScriptedHub, clock: Clock, count: int) -> None:
    """So many rounds, a minute apart, each by a service that was just started."""
    for _ in range(count):
        clock.forward(seconds=60)
        services.ledger.charge_all()
        await make_credits(services, hub, warn_minutes=(10, 2)).round()


async def test_everybody_whom_an_account_pays_for_is_told(
    services: Services, hub: ScriptedHub, clock: Clock
) -> None:
    with services.store.write() as connection:
        services.ledger.open_in(connection, "group:ml", clock.now)
    services.ledger.grant("group:ml", 2 * MICRO, actor="admin", reason="a course")
    servers = [ServerRef("ada"), ServerRef("bob", "lab"), ServerRef("ada", "second")]
    for server in servers[:2]:
        request = Request(devices=1, model="A100")
        services.leases.confirm(
            services.leases.grant(server, request, engine="local", account="group:ml").id
        )
    t4 = Request(devices=1, model="T4")
    services.leases.confirm(
        services.leases.grant(servers[2], t4, engine="local", account="group:ml").id
    )
    hub.has(*servers)
    await minutes(services, hub, clock, 5)  # 9 credits an hour: 13 minutes in all
    for user, theirs in (("ada", "your servers"), ("bob", "your server")):
        ((kind, title),) = told(services, user)
        assert (kind, title[:28]) == ("credits_low", "The credits of the group ml ")
        assert (
            f"a while after that, {theirs} will be stopped"
            in services.notifications.notices_of(user)[0].body
        )
    await minutes(services, hub, clock, 10)
    assert [title for _, title in told(services, "bob")][-1] == (
        "The credits of the group ml have run out"
    )
    assert "Your server lab will be stopped at" in services.notifications.notices_of("bob")[0].body
