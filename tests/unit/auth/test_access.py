"""Who may sign in, row by row. Real: JupyterHub's and OAuthenticator's classes, services, SQLite.

Stand-in: the identity provider, whose claims are the rows (tests/hub/test_auth.py has a real one).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from jupyterhub import orm
from jupyterhub.auth import DummyAuthenticator
from tornado import web

from gpuspawner.auth import MemberMixin, MemberOAuthenticator, MemberSharedPasswordAuthenticator
from gpuspawner.core.units import MICRO
from gpuspawner.services import Services
from tests.support.members import ADA, GROUPS, OPENING_GRANT, Claims, Plain, accounts, make, sign_in

pytestmark = pytest.mark.usefixtures("patient_sign_in")

USER_PASSWORD = "members-password"
ADMIN_PASSWORD = "the admins' password: 32 letters"


class MemberDummy(MemberMixin, DummyAuthenticator):
    """JupyterHub's own, which lets everybody in by default."""


LISTED: dict[str, Any] = {"allowed_users": {"ada"}}
MAPPED = {**LISTED, "username_map": {"countess": "ada"}}
ALL: dict[str, Any] = {"allow_all": True}
LETTERS = {**ALL, "username_pattern": "[a-z]+"}
BLOCKED: dict[str, Any] = {"blocked_users": {"ada"}}
UNMANAGED = {"allowed_groups": {"ml-course"}}
OFF = "403 not on the list of members"


def of(*groups: str) -> dict[str, Any]:
    return {**ADA, "groups": list(groups)}


TABLE = [
    # JupyterHub's own traits
    ("nobody is a member by default", {}, ADA, OFF),
    ("on the list", LISTED, ADA, "in"),
    ("a bare name will do", LISTED, "ada", "in"),
    ("off the list", {"allowed_users": {"eve"}}, ADA, OFF),
    ("everybody", ALL, ADA, "in"),
    ("names are normalized", LISTED, {"name": "ADA"}, "in"),
    ("names are mapped", MAPPED, {"name": "Countess"}, "in"),
    ("a name that no server could have", LETTERS, {"name": "a/b"}, "403 this name cannot be used"),
    # blocked beats all else
    ("blocked, though all may", {**ALL, **BLOCKED}, ADA, "403 blocked"),
    ("blocked, though listed", {**LISTED, **BLOCKED}, ADA, "403 blocked"),
    ("blocked in other letters", {**ALL, "blocked_users": {"Ada"}}, ADA, "403 blocked"),
    ("blocked, though admin", {"admin_users": {"ada"}, **BLOCKED}, ADA, "403 blocked"),
    ("somebody else is blocked", {**ALL, "blocked_users": {"eve"}}, ADA, "in"),
    # admins
    ("an admin need not be listed", {"admin_users": {"ada"}}, ADA, "in as admin"),
    ("another admin lets nobody in", {"admin_users": {"eve"}}, ADA, "403 not on the list"),
    ("the authenticator says admin", {}, {**ADA, "admin": True}, "in as admin"),
    # groups
    ("in a group", GROUPS, of("staff", "ml-course"), "in"),
    ("in other groups", GROUPS, of("staff", "art"), "403 may use this hub (art, staff)"),
    ("in no group", GROUPS, of(), "403 in no group that may use this hub"),
    ("by name, in no group", {**GROUPS, **LISTED}, of(), "in"),
    ("in the group, and blocked", {**GROUPS, **BLOCKED}, of("ml-course"), "403 blocked"),
    ("groups that are not managed", UNMANAGED, of("ml-course"), "403 in no group"),
    ("a wrong password", ALL, None, "wrong"),
]

OAUTH: dict[str, Any] = {"username_claim": "sub"}
OAUTH_GROUPS = {**OAUTH, **GROUPS}
OAUTH_STAFF = {**OAUTH, "manage_groups": True, "admin_groups": {"staff"}}
OAUTH_BLOCKED = {**OAUTH_GROUPS, **BLOCKED}
OAUTH_SENTENCE = {**OAUTH, "custom_403_message": "Enrol first."}


def claims(*groups: str) -> dict[str, Any]:
    return {"sub": "ada", "groups": list(groups)}


OAUTH_TABLE = [
    ("no claim, no list", OAUTH, {"sub": "ada"}, "403 not on the list"),
    ("on the list", {**OAUTH, **LISTED}, {"sub": "Ada"}, "in"),
    ("admin", {**OAUTH, "admin_users": {"ada"}}, {"sub": "ada"}, "in as admin"),
    ("by the claim", OAUTH_GROUPS, claims("ml-course"), "in"),
    ("not by the claim", OAUTH_GROUPS, claims("art"), "403 none of its groups may use this"),
    ("no claim at all", OAUTH_GROUPS, {"sub": "ada"}, "403 in no group"),
    ("admin by a group", OAUTH_STAFF, claims("staff"), "in as admin"),
    ("blocked, though in the group", OAUTH_BLOCKED, claims("ml-course"), "403 blocked"),
    ("own sentence", OAUTH_SENTENCE, {"sub": "ada"}, "403 list of members. Enrol first."),
    ("no name in the claims", OAUTH, {"email": "a@b"}, "502 This hub cannot use the answer"),
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
    **GROUPS,
    "password_groups": {"the-course-password": ["ml-course"]},
}


SHARED_TABLE = [
    (what, SHARED, {"username": name} | ({"password": word} if word else {}), verdict)
    for what, name, word, verdict in (
        ("a member", "member1", USER_PASSWORD, "in"),
        ("a wrong password", "member1", "guess", "wrong"),
        ("no password", "member1", "", "wrong"),
        ("letters beyond ASCII", "member1", "pässwörd", "wrong"),
        ("a name off the list", "eve", USER_PASSWORD, OFF),
        ("a name off the list, wrong password", "eve", "guess", "wrong"),
        ("an admin", "root", ADMIN_PASSWORD, "in as admin"),
        ("an admin with the members' password", "root", USER_PASSWORD, "wrong"),
        ("a member with the admins' password", "member1", ADMIN_PASSWORD, "wrong"),
        ("the course's password", "ada", "the-course-password", "in"),
    )
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
def test_membership_rules_decide_sign_in_and_account_opening(
    kind: type[MemberMixin], settings: dict[str, Any], given: Any, verdict: str, services: Services
) -> None:
    authenticator = make(kind, settings, services=services)

    seen = sign_in(authenticator, given)

    if not verdict[0].isdigit():
        assert seen == verdict
    else:
        status, phrase = verdict.split(" ", 1)
        assert seen.startswith(status) and phrase in seen
    # An account, with its opening credits, is opened for those who come in and nobody else.
    assert list(accounts(services).values()) == (
        [OPENING_GRANT * MICRO] if seen.startswith("in") else []
    )


def test_refusal_names_account_reason_and_contact(services: Services) -> None:
    settings = {**OAUTH_GROUPS, "login_service": "Lab", "contact": "gpu@lab.example"}
    authenticator = make(Claims, settings, services=services)

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
def test_refusal_page_escapes_contact_and_username(
    contact: str, shown: str, tmp_path: Path
) -> None:
    authenticator = make(Plain, {"contact": contact}, tmp_path)
    with pytest.raises(web.HTTPError) as page:
        asyncio.run(authenticator.check_allowed("<b>eve", {"name": "<b>eve", "groups": []}))

    markup = vars(page.value)["jupyterhub_html_message"]  # JupyterHub's name
    assert shown in markup
    assert "&lt;b&gt;eve" in markup and "<b>" not in markup and "<script" not in markup


def test_membership_checks_work_without_an_auth_model() -> None:
    who = {"allowed_users": {"ada"}, "admin_users": {"root"}, "blocked_users": {"eve"}}
    authenticator = make(Plain, who)
    asked = [asyncio.run(authenticator.check_allowed(name)) for name in ("ada", "root", "eve")]
    assert asked == [True, True, False]
    assert asyncio.run(authenticator.check_blocked_users("eve")) is False
    with pytest.raises(ValueError, match="manage_groups"):
        make(MemberOAuthenticator, {"allowed_groups": {"ml-course"}})


@pytest.mark.parametrize("kind", [Plain, Claims, MemberSharedPasswordAuthenticator])
@pytest.mark.parametrize("existing", [None, True])
def test_existing_hub_users_are_members_only_if_enabled(
    kind: type[MemberMixin], existing: bool | None
) -> None:
    settings: dict[str, Any] = {"allowed_users": {"ada"}}
    authenticator = make(kind, settings | ({} if existing is None else {"allow_existing_users": 1}))
    authenticator.add_user(orm.User(name="eve"))

    assert ("eve" in authenticator.allowed_users) is (existing is True)
