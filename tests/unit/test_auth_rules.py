"""Who is let in, row by row. Real: JupyterHub's and OAuthenticator's classes, broker, SQLite.

Only the identity provider is left out: its claims are the rows (``tests/hub/test_auth.py`` has
a real one).
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub import orm
from jupyterhub.auth import Authenticator
from tornado import web
from tornado.httpclient import HTTPClientError
from traitlets.config import Config

from gpuspawner import auth
from gpuspawner.auth import MemberMixin, MemberOAuthenticator, MemberSharedPasswordAuthenticator
from gpuspawner.broker import Broker
from gpuspawner.model import MICRO

USER_PASSWORD = "members-password"
ADMIN_PASSWORD = "the admins' password: 32 letters"


class Believes(Authenticator):
    """Takes everybody at their word; an exception in its place is raised."""

    fresh: Any = True

    async def authenticate(self, handler: Any, data: Any) -> Any:
        if isinstance(data, Exception):
            raise data
        return dict(data) if isinstance(data, dict) else data

    async def refresh_user(self, user: Any, handler: Any = None) -> Any:
        if isinstance(self.fresh, Exception):
            raise self.fresh
        return self.fresh


class Plain(MemberMixin, Believes):
    """The mixin on an authenticator of somebody else's."""


class Claims(MemberOAuthenticator):
    """The OAuth authenticator with the provider's two answers given."""

    async def get_token_info(self, handler: Any, params: Any) -> dict[str, Any]:
        return {"access_token": "token", "token_type": "bearer", "scope": "openid"}

    def build_access_tokens_request_params(self, handler: Any, data: Any = None) -> dict[str, Any]:
        self.claims = data
        return {}

    async def token_to_user(self, token_info: Any) -> dict[str, Any]:
        return dict(self.claims)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(
        database_url=f"sqlite:///{tmp_path}/store.sqlite",
        device_source="simulated:1xT4",
        opening_grant=25,
    )
    yield broker
    broker.store.close()


def accounts(broker: Broker) -> dict[str, int]:
    return {account.name: account.balance for account in broker.accounts()}


def make(kind: type[MemberMixin], settings: dict[str, Any], **kwargs: Any) -> MemberMixin:
    config = Config()
    config[kind.__name__] = Config(settings)
    return kind(config=config, **kwargs)


def sign_in(authenticator: MemberMixin, typed: Any) -> str:
    """What the member sees: ``in``, ``in as admin``, ``wrong``, or a page's status and text."""
    try:
        model = asyncio.run(authenticator.get_authenticated_user(None, typed))
    except web.HTTPError as page:
        return f"{page.status_code} {page.get_message()}"
    if model is None:
        return "wrong"
    return "in as admin" if model["admin"] else "in"


GROUPS: dict[str, Any] = {"manage_groups": True, "allowed_groups": {"ml-course"}}
ADA: dict[str, Any] = {"name": "ada"}

TABLE = [
    # what JupyterHub's own traits say
    ("nobody is a member by default", {}, ADA, "403 not on the list of members"),
    ("on the list", {"allowed_users": {"ada"}}, ADA, "in"),
    ("a bare name will do", {"allowed_users": {"ada"}}, "ada", "in"),
    ("off the list", {"allowed_users": {"eve"}}, ADA, "403 not on the list of members"),
    ("everybody", {"allow_all": True}, ADA, "in"),
    ("names are normalized", {"allowed_users": {"ada"}}, {"name": "ADA"}, "in"),
    (
        "names are mapped",
        {"allowed_users": {"ada"}, "username_map": {"countess": "ada"}},
        {"name": "Countess"},
        "in",
    ),
    (
        "a name that no server could have",
        {"allow_all": True, "username_pattern": "[a-z]+"},
        {"name": "a/b"},
        "403 this name cannot be used",
    ),
    # blocked beats all else
    ("blocked, though all may", {"allow_all": True, "blocked_users": {"ada"}}, ADA, "403 blocked"),
    (
        "blocked, though listed",
        {"allowed_users": {"ada"}, "blocked_users": {"ada"}},
        ADA,
        "403 blocked",
    ),
    (
        "blocked in other letters",
        {"allow_all": True, "blocked_users": {"Ada"}},
        ADA,
        "403 blocked",
    ),
    (
        "blocked, though admin",
        {"admin_users": {"ada"}, "blocked_users": {"ada"}},
        ADA,
        "403 blocked",
    ),
    ("somebody else is blocked", {"allow_all": True, "blocked_users": {"eve"}}, ADA, "in"),
    # admins
    ("an admin need not be listed", {"admin_users": {"ada"}}, ADA, "in as admin"),
    ("another admin lets nobody in", {"admin_users": {"eve"}}, ADA, "403 not on the list"),
    ("the authenticator says admin", {}, {**ADA, "admin": True}, "in as admin"),
    # groups
    ("in a group", GROUPS, {**ADA, "groups": ["staff", "ml-course"]}, "in"),
    (
        "in another group",
        GROUPS,
        {**ADA, "groups": ["staff", "art"]},
        "403 nor is any of its groups (art, staff)",
    ),
    ("in no group", GROUPS, {**ADA, "groups": []}, "403 in no group that may use this hub"),
    ("by name, in no group", {**GROUPS, "allowed_users": {"ada"}}, {**ADA, "groups": []}, "in"),
    (
        "in the group, and blocked",
        {**GROUPS, "blocked_users": {"ada"}},
        {**ADA, "groups": ["ml-course"]},
        "403 blocked",
    ),
    (
        "groups that were not asked for",
        {"allowed_groups": {"ml-course"}},
        {**ADA, "groups": ["ml-course"]},
        "403 in no group",
    ),
    ("a wrong password", {"allow_all": True}, None, "wrong"),
]

OAUTH: dict[str, Any] = {"username_claim": "sub"}
OAUTH_GROUPS = {**OAUTH, **GROUPS}
OAUTH_TABLE = [
    ("no claim, no list", OAUTH, {"sub": "ada"}, "403 not on the list"),
    ("on the list", {**OAUTH, "allowed_users": {"ada"}}, {"sub": "Ada"}, "in"),
    ("admin", {**OAUTH, "admin_users": {"ada"}}, {"sub": "ada"}, "in as admin"),
    ("by the claim", OAUTH_GROUPS, {"sub": "ada", "groups": ["ml-course"]}, "in"),
    (
        "not by the claim",
        OAUTH_GROUPS,
        {"sub": "ada", "groups": ["art"]},
        "403 nor is any of its groups (art)",
    ),
    ("no claim at all", OAUTH_GROUPS, {"sub": "ada"}, "403 in no group"),
    (
        "admin by a group",
        {**OAUTH, "manage_groups": True, "admin_groups": {"staff"}},
        {"sub": "ada", "groups": ["staff"]},
        "in as admin",
    ),
    (
        "blocked, though in the group",
        {**OAUTH_GROUPS, "blocked_users": {"ada"}},
        {"sub": "ada", "groups": ["ml-course"]},
        "403 blocked",
    ),
    (
        "OAuthenticator's own sentence",
        {**OAUTH, "custom_403_message": "Enrol first."},
        {"sub": "ada"},
        "403 list of members. Enrol first. To use another account, sign out of OAuth 2.0 first.",
    ),
    ("no name in the claims", OAUTH, {"email": "a@b"}, "502 an answer that this hub cannot use"),
]

SHARED: dict[str, Any] = {
    "user_password": USER_PASSWORD,
    "admin_password": ADMIN_PASSWORD,
    "admin_users": {"root"},
    "allowed_users": {"member1"},
}
BY_PASSWORD = {**GROUPS, "password_groups": {"the-course-password": ["ml-course"]}}


def typed(name: str, password: str) -> dict[str, str]:
    return {"username": name, "password": password}


SHARED_TABLE = [
    ("a member", SHARED, typed("member1", USER_PASSWORD), "in"),
    ("a wrong password", SHARED, typed("member1", "guess"), "wrong"),
    ("no password", SHARED, {"username": "member1"}, "wrong"),
    ("letters beyond ASCII", SHARED, typed("member1", "pässwörd"), "wrong"),
    ("a name off the list", SHARED, typed("eve", USER_PASSWORD), "403 not on the list of members"),
    ("a name off the list, wrong password", SHARED, typed("eve", "guess"), "wrong"),
    ("an admin", SHARED, typed("root", ADMIN_PASSWORD), "in as admin"),
    ("an admin with the members' password", SHARED, typed("root", USER_PASSWORD), "wrong"),
    ("a member with the admins' password", SHARED, typed("member1", ADMIN_PASSWORD), "wrong"),
    ("the course's password", BY_PASSWORD, typed("ada", "the-course-password"), "in"),
]

ROWS = [
    pytest.param(kind, settings, given, verdict, id=f"{kind.__name__}-{what}".replace(" ", "-"))
    for kind, table in (
        (Plain, TABLE),
        (Claims, OAUTH_TABLE),
        (MemberSharedPasswordAuthenticator, SHARED_TABLE),
    )
    for what, settings, given, verdict in table
]


@pytest.mark.parametrize(("kind", "settings", "given", "verdict"), ROWS)
def test_verdict(
    kind: type[MemberMixin], settings: dict[str, Any], given: Any, verdict: str, broker: Broker
) -> None:
    authenticator = make(kind, settings, broker=broker)

    seen = sign_in(authenticator, given)

    if not verdict[0].isdigit():
        assert seen == verdict
    else:
        status, phrase = verdict.split(" ", 1)
        assert seen.startswith(status) and phrase in seen
    # An account, with its opening credits, is opened for those who come in and nobody else.
    assert list(accounts(broker).values()) == ([25 * MICRO] if seen.startswith("in") else [])


def test_the_page_names_the_account_the_reason_and_whom_to_ask(broker: Broker) -> None:
    settings = {**OAUTH_GROUPS, "login_service": "Lab", "contact": "gpu@lab.example"}
    authenticator = make(Claims, settings, broker=broker)

    assert sign_in(authenticator, {"sub": "eve", "groups": ["art"]}) == (
        "403 You signed in to Lab as 'eve', but this account is not on the list of members, nor "
        "is any of its groups (art). Ask gpu@lab.example to let you in. To use "
        "another account, sign out of Lab first."
    )


@pytest.mark.parametrize(
    ("contact", "shown"),
    [
        ("", "Ask the admin of this hub to let you in."),
        (
            "gpu@lab.example",
            'Ask <a href="mailto:gpu@lab.example">gpu@lab.example</a> to let you in.',
        ),
        ("Ask at 100% in room 3 <script>", "Ask at 100% in room 3 &lt;script&gt;"),
        ('"x"onclick=y@lab.example', '<a href="mailto:%22x%22onclick%3Dy@lab.example">&quot;x&quo'),
    ],
)
def test_contact_is_shown_as_text(contact: str, shown: str) -> None:
    authenticator = make(Plain, {"contact": contact})
    with pytest.raises(web.HTTPError) as page:
        asyncio.run(authenticator.check_allowed("<b>eve", {"name": "<b>eve", "groups": []}))

    markup = page.value.jupyterhub_html_message  # type: ignore[attr-defined]  # JupyterHub's name
    assert shown in markup
    assert "&lt;b&gt;eve" in markup and "<b>" not in markup and "<script" not in markup


def test_without_an_auth_model_the_verdict_is_returned() -> None:
    authenticator = make(
        Plain, {"allowed_users": {"ada"}, "admin_users": {"root"}, "blocked_users": {"eve"}}
    )
    asked = {
        name: asyncio.run(authenticator.check_allowed(name)) for name in ("ada", "eve", "root")
    }

    assert asked == {"ada": True, "eve": False, "root": True}
    assert asyncio.run(authenticator.check_blocked_users("eve")) is False


@pytest.mark.parametrize("kind", [Plain, Claims, MemberSharedPasswordAuthenticator])
@pytest.mark.parametrize("existing", [None, True])
def test_being_known_to_the_hub_is_no_membership(
    kind: type[MemberMixin], existing: bool | None
) -> None:
    settings: dict[str, Any] = {"allowed_users": {"ada"}}
    authenticator = make(kind, settings | ({} if existing is None else {"allow_existing_users": 1}))
    authenticator.add_user(orm.User(name="eve"))

    assert ("eve" in authenticator.allowed_users) is (existing is True)


def test_oauth_groups_still_need_manage_groups() -> None:
    with pytest.raises(ValueError, match="manage_groups"):
        make(MemberOAuthenticator, {"allowed_groups": {"ml-course"}})


# When something fails.


@pytest.mark.parametrize(
    ("failure", "status", "phrase"),
    [
        (ConnectionRefusedError(111, "refused"), 503, "does not answer"),
        (TimeoutError(), 503, "does not answer"),
        (HTTPClientError(599, "Timeout"), 503, "does not answer"),
        (HTTPClientError(502), 503, "does not answer"),
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
    assert accounts(broker) == {"member:ada": 25 * MICRO}


@pytest.mark.parametrize(
    "settings",
    [
        {"database_url": "postgresql://nobody@127.0.0.1:1/none"},
        {"database_url": "sqlite:////nowhere/at/all/store.sqlite"},
        {"database_url": "no url"},
    ],
    ids=["PostgreSQL down", "folder missing", "URL wrong"],
)
def test_a_store_that_is_gone_keeps_nobody_out(
    settings: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    config = Config({"Plain": {"allow_all": True}, "Broker": settings})
    config.Broker.device_source = "simulated:1xT4"
    authenticator = Plain(config=config)
    authenticator.log.propagate = True

    assert sign_in(authenticator, ADA) == "in"
    assert "account of 'ada' could not be opened" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_busy_store_makes_nobody_wait(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sign-in goes on; the account is there once the other writer is through."""
    assert accounts(broker) == {}
    monkeypatch.setattr(auth, "OPEN_ACCOUNT_SECONDS", 0.2)
    other = sqlite3.connect(tmp_path / "store.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    authenticator = make(Plain, {"allow_all": True}, broker=broker)

    async def meanwhile() -> str:
        try:
            model = await asyncio.wait_for(authenticator.get_authenticated_user(None, ADA), 2)
        finally:
            other.execute("COMMIT")
        return str(model["name"])

    assert asyncio.run(meanwhile()) == "ada"
    broker.store.executor.shutdown(wait=True)
    assert accounts(broker) == {"member:ada": 25 * MICRO}


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
