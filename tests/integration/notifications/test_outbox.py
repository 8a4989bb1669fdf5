"""Notices in the store, and what the accounting rounds tell. Real: SQL, a command as the hook; the
Hub is a script."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

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
from tests.support.rounds import GRACE, SITE, ScriptedHub, make_credits, running
from tests.support.telling import choose, notifying, tell, until


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


def test_notice_is_added_once_and_with_its_transaction(services: Services) -> None:
    with pytest.raises(ZeroDivisionError), services.store.write() as connection:
        assert notifications_repository.add(connection, NOTICE)
        raise ZeroDivisionError
    assert services.notifications.notices_of("ada") == []
    assert services.notifications.add_notice(NOTICE)
    assert not services.notifications.add_notice(replace(NOTICE, user="bob", title="other"))
    (told,) = services.notifications.notices_of("ada")
    assert told == replace(NOTICE, id=told.id)
    assert services.notifications.notices_of("bob") == []


@each_database
async def test_concurrent_writers_add_a_notice_once(database_url: str) -> None:
    stores = [Store(database_url) for _ in range(4)]

    def add(store: Store) -> bool:
        with store.write() as connection:
            return notifications_repository.add(connection, NOTICE)

    said = await asyncio.gather(*(asyncio.to_thread(add, store) for store in stores * 3))
    assert sorted(said) == [False] * 11 + [True]
    for store in stores:
        store.close()


@each_database
def test_unsent_notices_are_listed_in_order(services: Services, clock: Clock) -> None:
    first, second, third = (tell(services, user) for user in ("ada", "bob", "ada"))
    assert services.notifications.unsent(3) == [first.id, second.id, third.id]
    failed = Outcome(None, 2, "mail: gone")
    services.notifications.mark({first.id: Outcome(T0, 0), second.id: failed})
    assert services.notifications.unsent(3) == [second.id, third.id]
    assert services.notifications.unsent(2) == [third.id]
    (kept,) = services.notifications.notices_of("bob")
    assert Outcome(kept.sent_at, kept.tries, kept.error) == failed
    clock.now += timedelta(days=1)
    assert services.notifications.unsent(3) == []


def test_many_notices_are_read_with_their_choices(services: Services) -> None:
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
def test_choices_are_stored_per_member_and_channel(services: Services) -> None:
    assert services.notifications.choices("ada") == {}
    kinds = frozenset({NoticeKind.TURN, NoticeKind.STOPPED})
    mail = ChannelChoice("mail", "ada@lab.example", kinds)
    chat = ChannelChoice("chat", "@ada", frozenset(NoticeKind))
    services.notifications.choose("ada", [mail, chat])
    services.notifications.choose("bob", [ChannelChoice("mail", "bob@lab.example")])
    assert services.notifications.choices("ada")["mail"] == mail
    services.notifications.choose("ada", [ChannelChoice("chat")])
    assert services.notifications.choices("ada") == {"mail": mail, "chat": ChannelChoice("chat")}
    assert set(services.notifications.choices("bob")) == {"mail"}


def test_unknown_notice_kind_is_ignored(services: Services) -> None:
    choose(services, "ada", kinds=[NoticeKind.TURN])
    with services.store.write() as connection:
        connection.execute(sa.update(db_schema.notice_choices).values(kinds="turn moon"))
    assert services.notifications.choices("ada")["mail"].kinds == {NoticeKind.TURN}


# What the rounds tell.


def told(services: Services, user: str = "ada") -> list[tuple[str, str]]:
    """Kind and title of what a member was told, oldest first."""
    oldest_first = reversed(services.notifications.notices_of(user))
    return [(some.kind.value, some.title) for some in oldest_first]


async def minutes(services: Services, hub: ScriptedHub, clock: Clock, count: int) -> None:
    """So many rounds, a minute apart, each by a service that was just started."""
    for _ in range(count):
        clock.forward(seconds=60)
        services.ledger.charge_all()
        await make_credits(services, hub, warn_minutes=(10, 2)).round()


async def test_low_group_account_notifies_every_session_owner(
    services: Services, hub: ScriptedHub, clock: Clock
) -> None:
    with services.store.write() as connection:
        services.ledger.open_in(connection, "group:ml", clock.now)
    services.ledger.grant("group:ml", 2 * MICRO, actor="admin", reason="a course")
    servers = [ServerRef("ada"), ServerRef("bob", "lab"), ServerRef("ada", "second")]
    for server, model in zip(servers, ("A100", "A100", "T4"), strict=True):
        request = Request(devices=1, model=model)
        lease = services.leases.grant(server, request, engine="local", account="group:ml")
        services.leases.confirm(lease.id)
    hub.has(*servers)
    await minutes(services, hub, clock, 5)  # 9 credits an hour: 13 minutes in all
    for user, theirs in (("ada", "your servers"), ("bob", "your server")):
        ((kind, title),) = told(services, user)
        assert (kind, title[:28]) == ("credits_low", "The credits of the group ml ")
        newest = services.notifications.notices_of(user)[0]
        assert f"; {theirs} will be stopped at " in newest.body
    await minutes(services, hub, clock, 10)
    newest = services.notifications.notices_of("bob")[0]
    assert newest.title == "The credits of the group ml have run out"
    assert "Your server lab will be stopped at" in newest.body


# The hook.

KEEP = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


async def test_the_hook_hears_of_each_event_of_credits_once(
    services: Services, hub: ScriptedHub, clock: Clock, tmp_path: Path
) -> None:
    """Also of new credits, which no member is told."""
    file = tmp_path / "told"
    lease = running(services, "ada")
    poked: list[int] = []

    def heard() -> list[dict[str, Any]]:
        lines = map(json.loads, file.read_text().splitlines()) if file.exists() else []
        return sorted(lines, key=lambda line: line["at"])

    async with notifying(services, hook=[sys.executable, "-c", KEEP, str(file)]) as notifier:
        for seconds, given in ((360, 0), (540, MICRO), (1, 0), (899, 0), (GRACE, 0)):
            clock.forward(seconds=seconds)
            settings = {"poke": lambda: poked.append(1), "tell_admin": notifier.tell_admin}
            credits = make_credits(services, hub, warn_minutes=(10,), **settings)
            for _ in range(2):
                await credits.round()
            if given:
                services.ledger.grant("member:ada", given, actor="kim", reason="more")
        await until(lambda: len(heard()) >= 5, "the hook")
    low, gone, back, again, stopped = heard()
    assert low == low | {
        "user": "ada",
        "kind": "credits_low",
        "event": "credits_low",
        "lease": lease.id,
        "server": "",
        "environment": "",
        "account": "member:ada",
        "balance": "0.600000",
        "rate_per_hour": "4.000000",
        "minutes": 10,
        "stops_at": "2025-03-01T12:20:00.000+00:00",
        "at": "2025-03-01T12:06:00.000+00:00",
    }
    assert (gone["event"], gone["balance"]) == ("credits_gone", "0.000000")
    assert gone["stops_at"] == "2025-03-01T12:20:00.000+00:00"
    assert (back["event"], back["lease"]) == ("credits_back", lease.id)
    assert (back["balance"], back["stops_at"]) == ("0.998889", None)
    assert again["event"] == "credits_gone"
    assert (stopped["event"], stopped["balance"]) == ("credits_gone_stopped", "-0.333333")
    assert stopped["reason"] == "the credits ran out"
    assert poked == [1] * 5
    keys = {notice.key for notice in services.notifications.notices_of("ada")}
    assert keys == {line["key"] for line in heard()} - {back["key"]}
