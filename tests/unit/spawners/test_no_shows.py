"""Detection of members who connect to their servers. Real: JupyterHub's database, in memory."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from jupyterhub import orm

from gpuspawner.spawners import no_shows
from gpuspawner.spawners.no_shows import HubRecords
from tests.support.rounds import START

MANY = 30


@pytest.fixture
def db(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(no_shows, "QUERY_SECONDS", 0.0)
    return orm.new_session_factory("sqlite:///:memory:")()


class Server(SimpleNamespace):
    """As much of a spawner as is read; it is a key of dictionaries."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def server(db: Any, name: str, **times: datetime | None) -> Server:
    """A server with the Hub's records of it, and one token of its OAuth client."""
    user = orm.User(name=name)
    spawner = orm.Spawner(name="", user=user, last_activity=_plain(times.get("activity")))
    client = orm.OAuthClient(identifier=f"client-{name}", secret="x")
    db.add_all([user, spawner, client])
    if "created" in times or "used" in times:
        created = _plain(times.get("created", START - timedelta(days=1)))
        token = orm.APIToken(user=user, oauth_client=client, created=created)
        token.token, token.last_activity = f"{name}-" + "x" * 32, _plain(times.get("used"))
        db.add(token)
    db.commit()
    user_of = SimpleNamespace(name=name, db=db)
    return Server(user=user_of, orm_spawner=spawner, oauth_client_id=f"client-{name}")


def _plain(at: datetime | None) -> datetime | None:
    return at.replace(tzinfo=None) if at else None


async def test_member_connection_is_detected_by_activity_or_token(db: Any) -> None:
    later, before = START + timedelta(seconds=5), START - timedelta(seconds=5)
    servers: list[Any] = [
        server(db, "active", activity=later),
        server(db, "started", activity=START + timedelta(seconds=1)),
        server(db, "made", activity=before, created=later),
        server(db, "used", used=later),
        server(db, "early", activity=before, created=before, used=before),
        server(db, "nothing", activity=None),
    ]
    records = HubRecords()
    found = await asyncio.gather(*(records.has_connected(each, START) for each in servers))
    connected = {each.user.name for each, has in zip(servers, found, strict=True) if has}
    assert connected == {"active", "made", "used"}


async def test_many_servers_need_no_more_queries_than_one(db: Any) -> None:
    servers: list[Any] = [server(db, f"user{number}") for number in range(MANY)]
    said: list[str] = []
    sa.event.listen(db.get_bind(), "before_cursor_execute", lambda *told: said.append(told[2]))
    records = HubRecords()
    for _ in range(3):
        await asyncio.gather(*(records.has_connected(each, START) for each in servers))
    selects = [text for text in said if " FROM " in text.replace("\n", " ")]
    assert len(selects) == 3 * 2


async def test_failed_read_of_hub_records_is_retried(
    db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    some: Any = server(db, "ada", activity=START + timedelta(seconds=5))
    records = HubRecords()
    with monkeypatch.context() as broken:
        broken.setattr(db, "execute", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await records.has_connected(some, START)
    assert await records.has_connected(some, START)
