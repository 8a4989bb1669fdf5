"""What signing in does while something is broken. Real: JupyterHub's class, broker, SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub import orm
from tornado import web
from tornado.httpclient import HTTPClientError
from traitlets.config import Config

from gpuspawner.auth import mixin
from gpuspawner.core.units import MICRO
from gpuspawner.services import Broker
from tests.support.members import (
    ADA,
    GROUPS,
    OPENING_GRANT,
    Plain,
    accounts,
    make,
    open_broker,
    sign_in,
)

pytestmark = pytest.mark.usefixtures("patient_sign_in")


@pytest.fixture
def broker(tmp_path: Path, migrated_file: Path) -> Iterator[Broker]:
    broker = open_broker(tmp_path, migrated_file)
    yield broker
    broker.store.close()


@pytest.mark.parametrize(
    ("failure", "status", "phrase"),
    [
        (ConnectionRefusedError(111, "refused"), 503, "is not working, so the hub cannot tell"),
        (TimeoutError(), 503, "is not working, so the hub cannot tell"),
        (HTTPClientError(599, "Timeout"), 503, "is not working, so the hub cannot tell"),
        (HTTPClientError(502), 503, "is not working, so the hub cannot tell"),
        (HTTPClientError(400), 403, "did not accept this sign-in"),
        (ValueError("token=secret"), 502, "an answer that this hub cannot use"),
        (web.HTTPError(500, "Bad response: token=secret"), 502, "an answer that this hub cannot"),
        (web.HTTPError(403, "Your tenant is closed."), 403, "Your tenant is closed."),
    ],
)
def test_a_failing_provider_is_a_sentence(failure: Exception, status: int, phrase: str) -> None:
    seen = sign_in(make(Plain, {"allow_all": True}), failure)

    assert seen.startswith(f"{status} ") and phrase in seen
    assert "secret" not in seen


def test_the_admins_hook_may_still_refuse(broker: Broker) -> None:
    def hook(authenticator: Any, handler: Any, model: Any) -> None:
        return None

    authenticator = make(Plain, {"allow_all": True, "post_auth_hook": hook}, broker=broker)

    assert sign_in(authenticator, ADA) == "wrong"
    assert accounts(broker) == {}


def test_signing_in_again_gives_no_second_opening_grant(broker: Broker) -> None:
    authenticator = make(Plain, {"allow_all": True}, broker=broker)

    assert [sign_in(authenticator, ADA) for _ in range(3)] == ["in"] * 3
    assert accounts(broker) == {"member:ada": OPENING_GRANT * MICRO}


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "postgresql://nobody@127.0.0.1:1/none"},
        {"url": "sqlite:////nowhere/at/all/store.sqlite"},
        {"url": "no url"},
    ],
    ids=["PostgreSQL down", "folder missing", "URL wrong"],
)
def test_a_store_that_is_gone_keeps_nobody_out(
    settings: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config({"Plain": {"allow_all": True}, "GPUDatabase": settings})
    config.GPUDevices.source = "simulated:1xT4"
    authenticator = Plain(config=config)
    monkeypatch.setattr(authenticator.log, "propagate", True)

    assert sign_in(authenticator, ADA) == "in"
    assert "account of 'ada' could not be opened" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_busy_store_makes_nobody_wait(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sign-in goes on; the account is there once the other writer is through."""
    assert accounts(broker) == {}
    monkeypatch.setattr(mixin, "OPEN_ACCOUNT_SECONDS", 0.2)
    other = sqlite3.connect(tmp_path / "store.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    authenticator = make(Plain, {"allow_all": True}, broker=broker)

    async def meanwhile() -> str:
        try:
            model = await asyncio.wait_for(authenticator.get_authenticated_user(None, ADA), 20)
        finally:
            other.execute("COMMIT")
        return str(model["name"])

    assert asyncio.run(meanwhile()) == "ada"
    broker.store.executor.shutdown(wait=True)
    assert accounts(broker) == {"member:ada": OPENING_GRANT * MICRO}


# While they are signed in.


def member(*groups: str) -> Any:
    """What JupyterHub hands over as the user, as far as it is looked at."""
    return SimpleNamespace(name="ada", groups=[orm.Group(name=group) for group in groups])


HUB_GROUPS = {"allowed_groups": {"ml-course"}}
FRESH = [
    ("nothing new", GROUPS, member(), True, True),
    ("sign in again", GROUPS, member(), False, False),
    ("still in the group", GROUPS, member(), {**ADA, "groups": ["ml-course"]}, "model"),
    ("left the group", GROUPS, member("ml-course"), {**ADA, "groups": []}, False),
    ("in the hub's group", HUB_GROUPS, member("ml-course"), ADA, "model"),
    ("left the hub's group", HUB_GROUPS, member("art"), ADA, False),
    ("blocked now", {"allow_all": True, "blocked_users": {"ada"}}, member(), ADA, False),
    ("everybody may", {"allow_all": True}, member(), ADA, "model"),
    ("provider down", GROUPS, member(), ConnectionRefusedError(), True),
    ("provider slow", GROUPS, member(), HTTPClientError(599), True),
    (
        "provider down, strict",
        {**GROUPS, "auth_refresh_strict": True},
        member(),
        ConnectionRefusedError(),
        "page 503",
    ),
    ("provider answers nonsense", GROUPS, member(), ValueError("?"), "page 502"),
]


@pytest.mark.parametrize(
    ("settings", "user", "fresh", "verdict"),
    [pytest.param(*row[1:], id=row[0].replace(" ", "-")) for row in FRESH],
)
def test_refresh(settings: dict[str, Any], user: Any, fresh: Any, verdict: Any) -> None:
    authenticator = make(Plain, settings)
    authenticator.fresh = fresh

    try:
        seen: Any = asyncio.run(authenticator.refresh_user(user))
    except web.HTTPError as page:
        seen = f"page {page.status_code}"
    assert seen == (fresh if verdict == "model" else verdict)
