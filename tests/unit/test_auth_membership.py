"""Rules of membership together, and what the broker hears of it. Real: OAuthenticator's class,
broker, roster, SQLite. The provider's claims are the rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.members import repository as members_repository
from gpuspawner.members.repository import RosterEntry
from gpuspawner.services import Broker
from tests.support.brokers import make_broker
from tests.support.members import ADA, Claims, Plain, accounts, make, open_broker, sign_in

pytestmark = pytest.mark.usefixtures("patient_sign_in")


@pytest.fixture
def broker(tmp_path: Path, migrated_file: Path) -> Iterator[Broker]:
    broker = open_broker(tmp_path, migrated_file)
    yield broker
    broker.store.close()


def enrol(broker: Broker, *, days: float, groups: tuple[str, ...] = ()) -> None:
    """Ada is on the roster, since yesterday, for so many days from now."""
    now = broker.clock()
    start, end = now - timedelta(days=1), now + timedelta(days=days)
    entry = RosterEntry("ada", "ml", groups, starts_at=start, ends_at=end)
    with broker.store.write() as connection:
        members_repository.put_roster(connection, [entry], now)


CLAIM: dict[str, Any] = {"username_claim": "sub", "login_service": "Lab"}
MAIL = {**CLAIM, "allowed_mail_domains": {"lab.example", "*.Uni.example"}}
BOTH = {**MAIL, "manage_groups": True, "allowed_groups": {"ml"}}
ALL = {**BOTH, "membership": "all"}


def who(mail: str, *groups: str, confirmed: Any = True) -> dict[str, Any]:
    return {"sub": "ada", "email": mail, "email_verified": confirmed, "groups": list(groups)}


@pytest.mark.parametrize(
    ("settings", "claims", "verdict"),
    [
        (MAIL, who("ada@lab.example"), "in"),
        (MAIL, who("ada@LAB.example"), "in"),
        (MAIL, who("ada@cs.uni.example"), "in"),
        (MAIL, who("ada@uni.example"), "(ada@uni.example) is in no domain that may use"),
        (MAIL, who("ada@evil-lab.example"), "is in no domain that may use this hub"),
        (MAIL, who("ada@lab.example.evil.example"), "is in no domain that may use this hub"),
        (MAIL, who("ada@evil.example@lab.example"), "is in no domain that may use this hub"),
        (MAIL, who("ada@lab.example", confirmed=False), "Lab has not confirmed its mail address"),
        (MAIL, who("ada@lab.example", confirmed=None), "Lab has not confirmed its mail address"),
        ({**MAIL, "mail_is_confirmed": True}, who("ada@lab.example", confirmed=None), "in"),
        (MAIL, who(""), "Lab gives no mail address of it"),
        (MAIL, {"sub": "ada"}, "Lab gives no mail address of it"),
        ({**MAIL, "blocked_users": {"ada"}}, who("ada@lab.example"), "is blocked on this hub"),
        (BOTH, who("ada@x.example", "ml"), "in"),
        (BOTH, who("ada@lab.example", "art"), "in"),
        (BOTH, who("ada@x.example", "art"), "(art); its mail address (ada@x.example) is in no"),
        (ALL, who("ada@lab.example", "ml"), "in"),
        (ALL, who("ada@lab.example", "art"), "has not all that membership needs: none of its"),
        (ALL, who("ada@x.example", "ml"), "membership needs: its mail address (ada@x.example)"),
        ({**ALL, "allowed_users": {"ada"}}, who("ada@x.example"), "in"),
        ({**ALL, "admin_users": {"ada"}}, who("ada@x.example"), "in as admin"),
        ({**CLAIM, "membership": "all"}, who("ada@lab.example"), "not on the list of members"),
    ],
)
def test_rules(settings: dict[str, Any], claims: Any, verdict: str, broker: Broker) -> None:
    seen = sign_in(make(Claims, settings, broker=broker), claims)

    if verdict in ("in", "in as admin"):
        assert seen == verdict
    else:
        assert seen.startswith("403 You signed in to Lab as 'ada', but ") and verdict in seen
    assert bool(accounts(broker)) is seen.startswith("in")


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
def test_groups_by_the_names_of_this_hub(
    names: dict[str, str], claim: Any, groups: list[str], broker: Broker
) -> None:
    settings = {**CLAIM, "manage_groups": True, "group_names": names, "allow_all": True}
    authenticator = make(Claims, settings, broker=broker)
    no_browser: Any = None
    said = {"sub": "ada", "groups": claim}
    model = asyncio.run(authenticator.get_authenticated_user(no_browser, said))
    assert model["groups"] == groups


# The roster.


def test_the_roster_lets_in_for_its_time_with_its_groups(broker: Broker) -> None:
    settings = {**CLAIM, "manage_groups": True, "roster": True}
    authenticator = make(Claims, settings, broker=broker)
    assert "this name is not on the roster of members" in sign_in(authenticator, {"sub": "ada"})

    enrol(broker, days=10, groups=("course",))
    model = asyncio.run(authenticator.get_authenticated_user(None, who("", "staff")))
    assert model["groups"] == ["course", "staff"]
    known = broker.members.membership("ada")
    assert known is not None and known.by_roster and known.ended_at is None

    enrol(broker, days=-0.5)
    assert "the time on the roster (ml) ended on" in sign_in(authenticator, {"sub": "ada"})
    known = broker.members.membership("ada")
    assert known is not None and known.ended_at is not None


def test_who_is_a_member_by_something_else_too_does_not_end_with_the_roster(
    broker: Broker,
) -> None:
    enrol(broker, days=10)
    authenticator = make(Claims, {**MAIL, "roster": True}, broker=broker)
    assert sign_in(authenticator, who("ada@lab.example")) == "in"
    known = broker.members.membership("ada")
    assert known is not None and not known.by_roster


def test_all_rules_and_the_roster_end_with_the_roster(broker: Broker) -> None:
    enrol(broker, days=10)
    authenticator = make(Claims, {**MAIL, "roster": True, "membership": "all"}, broker=broker)
    assert sign_in(authenticator, who("ada@lab.example")) == "in"
    known = broker.members.membership("ada")
    assert known is not None and known.by_roster


def test_a_roster_that_cannot_be_read_is_no_verdict() -> None:
    broker = make_broker(
        database_url="postgresql://nobody@127.0.0.1:1/none", device_source="simulated:1xT4"
    )
    seen = sign_in(make(Plain, {"roster": True}, broker=broker), ADA)
    assert seen.startswith("503 The roster of members cannot be read just now")


# What the broker hears.


def test_out_and_in_again_is_written_once_each(broker: Broker) -> None:
    member = make(Plain, {"allowed_users": {"ada"}}, broker=broker)
    nobody = make(Plain, {}, broker=broker)
    assert sign_in(member, ADA) == "in"
    for _ in range(2):
        assert sign_in(nobody, ADA).startswith("403")
    known = broker.members.membership("ada")
    assert known is not None and known.actor == "sign-in"
    assert known.reason == "this account is not on the list of members"
    assert sign_in(member, ADA) == "in"

    known = broker.members.membership("ada")
    assert known is not None and known.ended_at is None
    assert accounts(broker) == {"member:ada": 25 * MICRO}


def test_a_stranger_leaves_no_trace(broker: Broker) -> None:
    assert sign_in(make(Plain, {}, broker=broker), ADA).startswith("403")
    assert broker.members.membership("ada") is None and accounts(broker) == {}


def test_no_token_gets_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    authenticator = make(Plain, {"allow_all": True})
    authenticator.log = logging.getLogger("hub")  # pytest's handler hangs on the root
    token = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhZGEifQ.c2lnbmF0dXJl"
    assert sign_in(authenticator, ValueError(f"Bad response: {token}")).startswith("502")
    assert "Sign-in failed" in caplog.text and token not in caplog.text
