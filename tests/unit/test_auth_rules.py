"""Who is let in, row by row. Real: JupyterHub's and OAuthenticator's classes, broker, SQLite.

Only the identity provider is left out: its claims are the rows (``tests/hub/test_auth.py`` has
a real one).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyterhub import orm
from jupyterhub.auth import DummyAuthenticator
from tornado import web

from gpuspawner.auth import MemberMixin, MemberOAuthenticator, MemberSharedPasswordAuthenticator
from gpuspawner.core.units import MICRO
from gpuspawner.services import Broker
from tests.support.members import (
    ADA,
    GROUPS,
    OPENING_GRANT,
    Claims,
    Plain,
    accounts,
    make,
    open_broker,
    sign_in,
)

pytestmark = pytest.mark.usefixtures("patient_sign_in")

USER_PASSWORD = "members-password"
ADMIN_PASSWORD = "the admins' password: 32 letters"


class MemberDummy(MemberMixin, DummyAuthenticator):
    """JupyterHub's own, which lets everybody in by default."""


@pytest.fixture
def broker(tmp_path: Path, migrated_file: Path) -> Iterator[Broker]:
    broker = open_broker(tmp_path, migrated_file)
    yield broker
    broker.store.close()


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
        "403 none of its groups may use this hub (art, staff)",
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
        "403 none of its groups may use this hub (art)",
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
        "403 list of members. Enrol first.",
    ),
    ("no name in the claims", OAUTH, {"email": "a@b"}, "502 an answer that this hub cannot use"),
]

DUMMY_TABLE = [
    ("everybody, no more", {}, {"username": "ada", "password": ""}, "403 not on the list"),
    ("everybody", {"allow_all": True}, {"username": "ada", "password": ""}, "in"),
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
        (MemberDummy, DUMMY_TABLE),
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
    assert list(accounts(broker).values()) == (
        [OPENING_GRANT * MICRO] if seen.startswith("in") else []
    )


def test_the_page_names_the_account_the_reason_and_whom_to_ask(broker: Broker) -> None:
    settings = {**OAUTH_GROUPS, "login_service": "Lab", "contact": "gpu@lab.example"}
    authenticator = make(Claims, settings, broker=broker)

    assert sign_in(authenticator, {"sub": "eve", "groups": ["art"]}) == (
        "403 You signed in to Lab as 'eve', but this account is not on the list of members; none "
        "of its groups may use this hub (art). Ask gpu@lab.example to let you in."
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

    markup = page.value.jupyterhub_html_message  # JupyterHub's name
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
