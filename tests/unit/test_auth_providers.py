"""The recipes in hub_config/auth. Real: the recipes, OAuthenticator's classes, HTTP, broker,
SQLite. GitHub, GitLab, Google, Microsoft and CILogon cannot be reached: a local server answers
in the shapes that they document."""

from __future__ import annotations

import asyncio
import configparser
import importlib
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub import orm
from traitlets import TraitError

from gpuspawner.auth import (
    MemberCILogonOAuthenticator,
    MemberGitHubOAuthenticator,
    MemberGitLabOAuthenticator,
    MemberGoogleOAuthenticator,
    MemberMicrosoftOAuthenticator,
    MemberMixin,
)
from gpuspawner.services import Broker
from tests.support.members import open_broker, sign_in
from tests.support.processes import REPO
from tests.support.vendors import Vendor, from_recipe, recipe, vendor

RECIPES = ("cilogon", "github", "gitlab", "google", "ldap", "microsoft")


@pytest.fixture
def broker(tmp_path: Path, migrated_file: Path) -> Iterator[Broker]:
    broker = open_broker(tmp_path, migrated_file)
    yield broker
    broker.store.close()


@pytest.fixture
def there() -> Iterator[Vendor]:
    with vendor() as standing_in:
        yield standing_in


def groups_of(authenticator: MemberMixin) -> list[str]:
    model = asyncio.run(authenticator.get_authenticated_user(None, None))
    return list(model["groups"])


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_names_a_class_that_is_there_and_settings_that_it_has(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LDAP_PASSWORD", "secret")
    config = recipe(name)
    setup = configparser.ConfigParser()
    setup.read(REPO / "setup.cfg")
    points = setup["options.entry_points"]["jupyterhub.authenticators"].strip().splitlines()
    known = dict(line.replace(" ", "").split("=") for line in points)
    module, cls = known[config.JupyterHub.authenticator_class].split(":")
    kind = getattr(importlib.import_module(module), cls)

    assert issubclass(kind, MemberMixin)
    assert set(config) == {"JupyterHub", cls}
    assert set(config[cls]) <= set(kind.class_trait_names(config=True))


# GitHub.


def github(there: Vendor, broker: Broker, **settings: Any) -> MemberMixin:
    there.token()
    there.answers["/user"] = {"login": "Ada", "email": None}
    there.answers["/user/emails"] = [
        {"email": "ada@home.example", "primary": True, "verified": True},
        {"email": "ada@lab.example", "primary": False, "verified": True},
        {"email": "ada@bank.example", "primary": False, "verified": False},
    ]
    team = {"slug": "gpu", "organization": {"login": "lab-example"}}
    there.answers.setdefault("/user/teams", [team])
    urls = {"token_url": f"{there.url}/token", "github_api": there.url}
    kind = MemberGitHubOAuthenticator
    return from_recipe(kind, "github", {**urls, **settings}, broker=broker)


def test_github_a_team_makes_members_and_hub_groups(there: Vendor, broker: Broker) -> None:
    there.answers["/orgs/lab-example/teams/gpu/members/ada"] = 204
    assert groups_of(github(there, broker)) == ["lab-example", "lab-example:gpu"]
    there.answers["/user/teams"].append(
        {"slug": "gpu-admins", "organization": {"login": "lab-example"}}
    )
    assert sign_in(github(there, broker), None) == "in as admin"


def test_github_no_team(there: Vendor, broker: Broker) -> None:
    there.answers["/user/teams"] = []
    assert sign_in(github(there, broker), None) == (
        "403 You signed in to GitHub as 'ada', but this account is not on the list of members; it "
        "is in none of the organisations, teams or projects that may use this hub. "
        "Ask gpu-admin@lab.example to let you in."
    )


@pytest.mark.parametrize(
    ("domain", "verdict"), [("lab.example", "in"), ("bank.example", "403"), ("x.example", "403")]
)
def test_github_only_a_confirmed_address_counts(
    domain: str, verdict: str, there: Vendor, broker: Broker
) -> None:
    authenticator = github(
        there, broker, allowed_mail_domains={domain}, allowed_organizations=set()
    )
    assert sign_in(authenticator, None).startswith(verdict)


@pytest.mark.parametrize(("in_team", "verdict"), [(True, "in"), (False, "403")])
def test_github_all_rules_together(
    in_team: bool, verdict: str, there: Vendor, broker: Broker
) -> None:
    there.answers["/orgs/lab-example/teams/gpu/members/ada"] = 204 if in_team else 404
    domains = {"lab.example"}
    authenticator = github(there, broker, allowed_mail_domains=domains, membership="all")
    seen = sign_in(authenticator, None)
    assert seen.startswith(verdict)
    assert in_team or "has not all that membership needs: it is in none of the" in seen


# GitLab.


@pytest.mark.parametrize(("status", "verdict"), [(200, "in"), (404, "403")])
def test_gitlab(status: int, verdict: str, there: Vendor, broker: Broker) -> None:
    there.token()
    api = "/api/v4"
    there.answers[f"{api}/user"] = {"id": 7, "username": "ada", "email": "a@lab.example"}
    there.answers[f"{api}/version"] = {"version": "17.4.1-ee"}
    member: Any = {"id": 7} if status == 200 else 404
    there.answers[f"{api}/groups/lab-example%252Fgpu/members/all/7"] = member
    there.answers["/oauth/userinfo"] = {"groups": ["lab-example", "lab-example/gpu"]}
    urls = {"gitlab_url": there.url, "token_url": f"{there.url}/token"}
    authenticator = from_recipe(MemberGitLabOAuthenticator, "gitlab", urls, broker=broker)

    assert sign_in(authenticator, None).startswith(verdict)
    if verdict == "in":
        assert groups_of(authenticator) == ["lab-example", "lab-example/gpu"]


def test_gitlab_groups_from_elsewhere_need_no_userinfo(there: Vendor, broker: Broker) -> None:
    there.token()
    there.answers["/api/v4/user"] = {"id": 7, "username": "ada", "teams": ["gpu"]}
    there.answers["/api/v4/version"] = {"version": "17.4.1-ee"}
    there.answers["/api/v4/groups/lab-example%252Fgpu/members/all/7"] = {"id": 7}
    there.answers["/oauth/userinfo"] = 403
    settings = {
        "gitlab_url": there.url,
        "token_url": f"{there.url}/token",
        "auth_state_groups_key": "gitlab_user.teams",
    }
    authenticator = from_recipe(MemberGitLabOAuthenticator, "gitlab", settings, broker=broker)
    assert sign_in(authenticator, None) == "in"
    assert groups_of(authenticator) == ["gpu"]


# Google.


@pytest.mark.parametrize(
    ("claims", "verdict"),
    [
        ({"email": "ada@lab.example", "verified_email": True, "hd": "lab.example"}, "in"),
        (
            {"email": "grace@lab.example", "verified_email": True, "hd": "lab.example"},
            "in as admin",
        ),
        (
            {"email": "ada@gmail.example", "verified_email": True},
            "403 You signed in to Google as 'ada@gmail.example', but it belongs to no "
            "organisation that may use this hub.",
        ),
        ({"email": "ada@lab.example", "verified_email": False, "hd": "lab.example"}, "403"),
    ],
)
def test_google(claims: dict[str, Any], verdict: str, there: Vendor, broker: Broker) -> None:
    there.token()
    there.answers["/oauth2/v1/userinfo"] = claims
    urls = {"google_api_url": there.url, "token_url": f"{there.url}/token"}
    authenticator = from_recipe(MemberGoogleOAuthenticator, "google", urls, broker=broker)
    assert sign_in(authenticator, None).startswith(verdict)


# Microsoft.

MEMBERS = "4f1c2a7e-3b0e-4f5d-9a51-0e2f6c1d7b90"
CLAIMS: dict[str, Any] = {"preferred_username": "ada@lab.example", "groups": [MEMBERS, "other"]}


def microsoft(there: Vendor, broker: Broker, **settings: Any) -> MemberMixin:
    urls = {"token_url": f"{there.url}/token", "tenant_id": "lab", "enable_auth_state": True}
    kind = MemberMicrosoftOAuthenticator
    return from_recipe(kind, "microsoft", {**urls, **settings}, broker=broker)


def test_microsoft_groups_get_names_and_others_are_left_out(there: Vendor, broker: Broker) -> None:
    there.token(**CLAIMS)
    assert groups_of(microsoft(there, broker)) == ["gpu-members"]


@pytest.mark.parametrize("tenant", ["", "common", "organizations"])
def test_microsoft_without_a_tenant_is_refused(tenant: str) -> None:
    authenticator = MemberMicrosoftOAuthenticator(tenant_id=tenant)
    with pytest.raises(TraitError, match="anybody with a Microsoft account"):
        assert authenticator.authorize_url


@pytest.mark.parametrize(
    "apart", [{"exp": time.time() - 7200}, {"iat": time.time() + 7200, "nbf": time.time() + 7200}]
)
def test_clocks_that_differ(apart: dict[str, float], there: Vendor, broker: Broker) -> None:
    there.token(**CLAIMS, **apart)
    seen = sign_in(microsoft(there, broker), None)
    assert seen.startswith("502 The clocks of Microsoft and of this hub differ")
    assert "Ask gpu-admin@lab.example to set the time." in seen


def test_an_id_token_for_somebody_else(there: Vendor, broker: Broker) -> None:
    there.token(**CLAIMS, aud="another-app")
    assert sign_in(microsoft(there, broker), None).startswith("502 Microsoft gave an answer that")


def test_a_refresh_asks_for_a_new_id_token(there: Vendor, broker: Broker) -> None:
    """The one of the sign-in would name its groups for ever."""
    there.token(**CLAIMS)
    authenticator = microsoft(there, broker)
    model = asyncio.run(authenticator.get_authenticated_user(None, None))

    async def kept() -> dict[str, Any]:
        return dict(model["auth_state"])

    user: Any = SimpleNamespace(
        name="ada@lab.example", groups=[orm.Group(name="gpu-members")], get_auth_state=kept
    )
    assert isinstance(asyncio.run(authenticator.refresh_user(user)), dict)
    there.token(**{**CLAIMS, "groups": ["other"]})
    assert asyncio.run(authenticator.refresh_user(user)) is False

    known = broker.members.membership("ada@lab.example")
    assert known is not None and known.ended_at is not None
    assert known.reason.endswith("it is in no group that may use this hub")

    there.token(**CLAIMS)
    assert isinstance(asyncio.run(authenticator.refresh_user(user)), dict)
    known = broker.members.membership("ada@lab.example")
    assert known is not None and known.ended_at is None


# CILogon.


@pytest.mark.parametrize(
    ("eppn", "verdict"),
    [("ada@lab.example", "in"), ("eve@art.example", "403 You signed in to CILogon as")],
)
def test_cilogon(eppn: str, verdict: str, there: Vendor, broker: Broker) -> None:
    there.token()
    there.answers["/userinfo"] = {"eppn": eppn, "idp": "https://idp.lab.example/shibboleth"}
    urls = {"token_url": f"{there.url}/token", "userdata_url": f"{there.url}/userinfo"}
    authenticator = from_recipe(MemberCILogonOAuthenticator, "cilogon", urls, broker=broker)
    assert sign_in(authenticator, None).startswith(verdict)


# LDAP: tests/hub/test_auth_ldap.py has a real directory.


@pytest.mark.parametrize("given", [{}, {"ca_certs_file": "/etc/ssl/lab.pem"}])
def test_ldap_takes_no_certificate_on_trust(given: dict[str, str]) -> None:
    from gpuspawner.auth.ldap import MemberLDAPAuthenticator

    settings: dict[str, Any] = {"tls_kwargs": given} if given else {}
    authenticator = MemberLDAPAuthenticator(lookup_dn=True, **settings)
    assert authenticator.tls_kwargs == {"validate": ssl.CERT_REQUIRED, **given}


def test_ldap_groups_go_by_name() -> None:
    from gpuspawner.auth.ldap import MemberLDAPAuthenticator

    with pytest.raises(TraitError, match="take the names of groups"):
        MemberLDAPAuthenticator(
            lookup_dn=True, manage_groups=True, allowed_groups={"cn=gpu,dc=lab,dc=example"}
        )
