"""Combined membership rules, what is recorded, and sign-ins while something is broken.
Real: the classes of JupyterHub and OAuthenticator, services, roster, SQLite. Claims are rows."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub import orm
from jupyterhub.auth import Authenticator
from tornado import web
from tornado.httpclient import HTTPClientError
from traitlets.config import Config

from gpuspawner.auth import mixin
from gpuspawner.core.units import MICRO
from gpuspawner.members import repository as members_repository
from gpuspawner.members.repository import RosterEntry
from gpuspawner.services import Services
from tests.support.brokers import make_services
from tests.support.members import ADA, GROUPS, OPENING_GRANT, Claims, Plain, accounts, make, sign_in

pytestmark = pytest.mark.usefixtures("patient_sign_in")


def enrol(services: Services, *, days: float, groups: tuple[str, ...] = ()) -> None:
    """Put ada on the roster, from yesterday until so many days from now."""
    now = services.clock()
    start, end = now - timedelta(days=1), now + timedelta(days=days)
    entry = RosterEntry("ada", "ml", groups, starts_at=start, ends_at=end)
    with services.store.write() as connection:
        members_repository.put_roster(connection, [entry], now)


CLAIM: dict[str, Any] = {"username_claim": "sub", "login_service": "Lab"}
MAIL = {**CLAIM, "allowed_mail_domains": {"lab.example", "*.Uni.example"}}
BOTH = {**MAIL, "manage_groups": True, "allowed_groups": {"ml"}}
ALL = {**BOTH, "membership": "all"}


NO_DOMAIN = "is in no domain that may use this hub"
DOWN = "is not working, so the hub cannot tell"
UNUSABLE = "This hub cannot use the answer"


def who(mail: str, *groups: str, confirmed: Any = True) -> dict[str, Any]:
    return {"sub": "ada", "email": mail, "email_verified": confirmed, "groups": list(groups)}


@pytest.mark.parametrize(
    ("settings", "claims", "verdict"),
    [
        (MAIL, who("ada@lab.example"), "in"),
        (MAIL, who("ada@LAB.example"), "in"),
        (MAIL, who("ada@cs.uni.example"), "in"),
        (MAIL, who("ada@uni.example"), f"(ada@uni.example) {NO_DOMAIN}"),
        (MAIL, who("ada@evil-lab.example"), NO_DOMAIN),
        (MAIL, who("ada@lab.example.evil.example"), NO_DOMAIN),
        (MAIL, who("ada@evil.example@lab.example"), NO_DOMAIN),
        (MAIL, who("ada@lab.example", confirmed=False), "Lab has not confirmed its mail address"),
        (MAIL, who("ada@lab.example", confirmed=None), "Lab has not confirmed its mail address"),
        ({**MAIL, "mail_is_confirmed": True}, who("ada@lab.example", confirmed=None), "in"),
        (MAIL, who(""), "Lab reports no mail address for it"),
        (MAIL, {"sub": "ada"}, "Lab reports no mail address for it"),
        ({**MAIL, "blocked_users": {"ada"}}, who("ada@lab.example"), "is blocked on this hub"),
        (BOTH, who("ada@x.example", "ml"), "in"),
        (BOTH, who("ada@lab.example", "art"), "in"),
        (BOTH, who("ada@x.example", "art"), "(art); its mail address (ada@x.example) is in no"),
        (ALL, who("ada@lab.example", "ml"), "in"),
        (ALL, who("ada@lab.example", "art"), "not meet all rules of membership: none of its"),
        (ALL, who("ada@x.example", "ml"), "rules of membership: its mail address (ada@x.example)"),
        ({**ALL, "allowed_users": {"ada"}}, who("ada@x.example"), "in"),
        ({**ALL, "admin_users": {"ada"}}, who("ada@x.example"), "in as admin"),
        ({**CLAIM, "membership": "all"}, who("ada@lab.example"), "not on the list of members"),
    ],
)
def test_mail_domain_and_group_rules_decide_sign_in(
    settings: dict[str, Any], claims: Any, verdict: str, services: Services
) -> None:
    seen = sign_in(make(Claims, settings, services=services), claims)

    if verdict in ("in", "in as admin"):
        assert seen == verdict
    else:
        assert seen.startswith("403 You signed in to Lab as 'ada', but ") and verdict in seen
    assert bool(accounts(services)) is seen.startswith("in")


NAMES = {"CN=Machine Learning": "ml", "secret": "", "one": "ml"}


@pytest.mark.parametrize(
    ("names", "claim", "groups"),
    [
        (NAMES, ["CN=Machine Learning", "secret", "art"], ["art", "ml"]),
        ({**NAMES, "*": ""}, ["CN=Machine Learning", "secret", "art"], ["ml"]),
        ({}, "ml", ["ml"]),
        ({}, ["x" * 300, "7"], ["7"]),
        ({}, None, []),
        ({}, [{"id": 7, "name": "lab"}], []),
        ({}, ["ml", 1, None], []),
        ({}, {"ml": True}, []),
        ({}, 7, []),
    ],
)
def test_group_claims_map_to_hub_names_or_are_ignored(
    names: dict[str, str], claim: Any, groups: list[str], services: Services
) -> None:
    settings = {**CLAIM, "manage_groups": True, "group_names": names, "allow_all": True}
    authenticator = make(Claims, settings, services=services)
    no_browser: Any = None
    said = {"sub": "ada", "groups": claim}
    model = asyncio.run(authenticator.get_authenticated_user(no_browser, said))
    assert model["groups"] == groups


# The roster.


def test_roster_grants_membership_and_groups_until_it_ends(services: Services) -> None:
    settings = {**CLAIM, "manage_groups": True, "roster": True}
    authenticator = make(Claims, settings, services=services)
    assert "this name is not on the roster of members" in sign_in(authenticator, {"sub": "ada"})

    enrol(services, days=10, groups=("course",))
    model = asyncio.run(authenticator.get_authenticated_user(None, who("", "staff")))
    assert model["groups"] == ["course", "staff"]
    known = services.members.membership("ada")
    assert known is not None and known.by_roster and known.ended_at is None

    enrol(services, days=-0.5)
    assert "the time on the roster (ml) ended on" in sign_in(authenticator, {"sub": "ada"})
    known = services.members.membership("ada")
    assert known is not None and known.ended_at is not None


@pytest.mark.parametrize("rules", ["any", "all"])
def test_membership_all_ties_a_mail_member_to_the_roster(rules: str, services: Services) -> None:
    enrol(services, days=10)
    authenticator = make(Claims, {**MAIL, "roster": True, "membership": rules}, services=services)
    assert sign_in(authenticator, who("ada@lab.example")) == "in"
    known = services.members.membership("ada")
    assert known is not None and known.by_roster is (rules == "all")


def test_unreadable_roster_makes_sign_in_answer_503() -> None:
    services = make_services(
        database_url="postgresql://nobody@127.0.0.1:1/none", device_source="simulated:1xT4"
    )
    seen = sign_in(make(Plain, {"roster": True}, services=services), ADA)
    assert seen.startswith("503 The roster of members cannot be read right now")


# What is recorded.


def test_sign_in_records_end_and_return_of_membership(services: Services) -> None:
    member = make(Plain, {"allowed_users": {"ada"}}, services=services)
    nobody = make(Plain, {}, services=services)
    assert sign_in(nobody, ADA).startswith("403")
    assert services.members.membership("ada") is None and accounts(services) == {}, "a stranger"
    assert sign_in(member, ADA) == "in"
    for _ in range(2):
        assert sign_in(nobody, ADA).startswith("403")
    known = services.members.membership("ada")
    assert known is not None and known.actor == "sign-in"
    assert known.reason == "this account is not on the list of members"
    assert sign_in(member, ADA) == "in"

    known = services.members.membership("ada")
    assert known is not None and known.ended_at is None
    assert accounts(services) == {"member:ada": 25 * MICRO}, "no second opening grant"


# While something is broken.

TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhZGEifQ.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    ("failure", "status", "phrase"),
    [
        (ConnectionRefusedError(111, "refused"), 503, DOWN),
        (TimeoutError(), 503, DOWN),
        (HTTPClientError(599, "Timeout"), 503, DOWN),
        (HTTPClientError(502), 503, DOWN),
        (HTTPClientError(400), 403, "did not accept this sign-in"),
        (ValueError(f"Bad response: {TOKEN}"), 502, UNUSABLE),
        (web.HTTPError(500, f"Bad response: {TOKEN}"), 502, UNUSABLE),
        (web.HTTPError(403, "Your tenant is closed."), 403, "Your tenant is closed."),
    ],
)
def test_provider_failure_is_explained_without_leaking_tokens(
    failure: Exception, status: int, phrase: str, caplog: pytest.LogCaptureFixture
) -> None:
    authenticator = make(Plain, {"allow_all": True})
    authenticator.log = logging.getLogger("hub")  # pytest's handler hangs on the root
    seen = sign_in(authenticator, failure)

    assert seen.startswith(f"{status} ") and phrase in seen
    assert TOKEN not in seen and TOKEN not in caplog.text
    assert "Sign-in failed" in caplog.text or status != 502


def test_post_auth_hook_can_still_refuse_sign_in(services: Services) -> None:
    def hook(authenticator: Any, handler: Any, model: Any) -> None:
        return None

    authenticator = make(Plain, {"allow_all": True, "post_auth_hook": hook}, services=services)

    assert sign_in(authenticator, ADA) == "wrong"
    assert accounts(services) == {}


@pytest.mark.parametrize(
    "url",
    ["postgresql://nobody@127.0.0.1:1/none", "sqlite:////nowhere/at/all/store.sqlite", "no url"],
    ids=["PostgreSQL down", "folder missing", "URL wrong"],
)
def test_sign_in_succeeds_if_the_database_is_unavailable(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config({"Plain": {"allow_all": True}, "GPUDatabase": {"url": url}})
    config.GPUDevices.source = "simulated:1xT4"
    authenticator = Plain(config=config)
    monkeypatch.setattr(authenticator.log, "propagate", True)

    assert sign_in(authenticator, ADA) == "in"
    assert "account of 'ada' could not be opened" in caplog.text
    assert "Traceback" not in caplog.text


def test_sign_in_does_not_wait_for_a_busy_database(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account is opened when the other writer has finished."""
    assert accounts(services) == {}
    monkeypatch.setattr(mixin, "OPEN_ACCOUNT_SECONDS", 0.2)
    other = sqlite3.connect(tmp_path / "store.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    authenticator = make(Plain, {"allow_all": True}, services=services)

    async def meanwhile() -> str:
        try:
            model = await asyncio.wait_for(authenticator.get_authenticated_user(None, ADA), 120)
        finally:
            other.execute("COMMIT")
        return str(model["name"])

    assert asyncio.run(meanwhile()) == "ada"
    services.store.executor.shutdown(wait=True)
    assert accounts(services) == {"member:ada": OPENING_GRANT * MICRO}


# While they are signed in.


def user_in(*groups: str) -> Any:
    """As much of JupyterHub's user as is read."""
    return SimpleNamespace(name="ada", groups=[orm.Group(name=group) for group in groups])


HUB_GROUPS = {"allowed_groups": {"ml-course"}}
STRICT = {**GROUPS, "auth_refresh_strict": True}
FRESH = [
    ("nothing new", GROUPS, user_in(), True, True),
    ("sign in again", GROUPS, user_in(), False, False),
    ("still in the group", GROUPS, user_in(), {**ADA, "groups": ["ml-course"]}, "model"),
    ("left the group", GROUPS, user_in("ml-course"), {**ADA, "groups": []}, False),
    ("in the hub's group", HUB_GROUPS, user_in("ml-course"), ADA, "model"),
    ("left the hub's group", HUB_GROUPS, user_in("art"), ADA, False),
    ("blocked now", {"allow_all": True, "blocked_users": {"ada"}}, user_in(), ADA, False),
    ("everybody may", {"allow_all": True}, user_in(), ADA, "model"),
    ("provider down", GROUPS, user_in(), ConnectionRefusedError(), True),
    ("provider slow", GROUPS, user_in(), HTTPClientError(599), True),
    (
        *("provider down, strict", STRICT, user_in(), ConnectionRefusedError()),
        "page 503" if hasattr(Authenticator, "auth_refresh_strict") else True,
    ),
    ("provider answers nonsense", GROUPS, user_in(), ValueError("?"), "page 502"),
]


@pytest.mark.parametrize(
    ("settings", "user", "fresh", "verdict"),
    [pytest.param(*row[1:], id=row[0].replace(" ", "-")) for row in FRESH],
)
def test_auth_refresh_rechecks_membership(
    settings: dict[str, Any],
    user: Any,
    fresh: Any,
    verdict: Any,
    tmp_path: Path,
) -> None:
    authenticator = make(Plain, settings, tmp_path)
    authenticator.fresh = fresh

    try:
        seen: Any = asyncio.run(authenticator.refresh_user(user))
    except web.HTTPError as page:
        seen = f"page {page.status_code}"
    assert seen == (fresh if verdict == "model" else verdict)
