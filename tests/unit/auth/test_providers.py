"""The recipes in hub_config/auth. Real: the recipes, OAuthenticator's classes, HTTP, services,
SQLite. GitHub, GitLab, Google, Microsoft and CILogon cannot be reached: a local server answers
in the shapes that they document."""

from __future__ import annotations

import asyncio
import configparser
import importlib
import ssl
import time
from collections.abc import Iterator
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
from gpuspawner.services import Services
from tests.support.members import sign_in
from tests.support.processes import REPO
from tests.support.vendors import Vendor, from_recipe, recipe, vendor

RECIPES = ("cilogon", "github", "gitlab", "google", "ldap", "microsoft")


@pytest.fixture
def there() -> Iterator[Vendor]:
    with vendor() as standing_in:
        yield standing_in


def groups_of(authenticator: MemberMixin) -> list[str]:
    model = asyncio.run(authenticator.get_authenticated_user(None, None))
    return list(model["groups"])


@pytest.mark.parametrize("name", RECIPES)
def test_auth_recipes_use_existing_classes_and_settings(
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


def github(there: Vendor, services: Services, **settings: Any) -> MemberMixin:
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
    return from_recipe(kind, "github", {**urls, **settings}, services=services)


def test_github_teams_decide_membership_and_hub_groups(there: Vendor, services: Services) -> None:
    there.answers["/orgs/lab-example/teams/gpu/members/ada"] = 204
    assert groups_of(github(there, services)) == ["lab-example", "lab-example:gpu"]
    admins = {"slug": "gpu-admins", "organization": {"login": "lab-example"}}
    there.answers["/user/teams"].append(admins)
    assert sign_in(github(there, services), None) == "in as admin"

    del there.answers["/orgs/lab-example/teams/gpu/members/ada"]
    there.answers["/user/teams"] = []
    assert sign_in(github(there, services), None) == (
        "403 You signed in to GitHub as 'ada', but this account is not on the list of members; it "
        "is in none of the organisations, teams or projects that may use this hub. "
        "Ask gpu-admin@lab.example to let you in."
    )


@pytest.mark.parametrize(
    ("domain", "verdict"), [("lab.example", "in"), ("bank.example", "403"), ("x.example", "403")]
)
def test_github_counts_only_verified_mail_addresses(
    domain: str, verdict: str, there: Vendor, services: Services
) -> None:
    settings: dict[str, Any] = {"allowed_mail_domains": {domain}, "allowed_organizations": set()}
    assert sign_in(github(there, services, **settings), None).startswith(verdict)


@pytest.mark.parametrize(("in_team", "verdict"), [(True, "in"), (False, "403")])
def test_github_membership_all_also_requires_the_team(
    in_team: bool, verdict: str, there: Vendor, services: Services
) -> None:
    there.answers["/orgs/lab-example/teams/gpu/members/ada"] = 204 if in_team else 404
    domains = {"lab.example"}
    authenticator = github(there, services, allowed_mail_domains=domains, membership="all")
    seen = sign_in(authenticator, None)
    assert seen.startswith(verdict)
    assert in_team or "does not meet all rules of membership: it is in none of the" in seen


# GitLab.


def gitlab(there: Vendor, services: Services, **settings: Any) -> MemberMixin:
    there.token()
    there.answers["/api/v4/user"] = {"id": 7, "username": "ada", "teams": ["gpu"]}
    there.answers["/api/v4/version"] = {"version": "17.4.1-ee"}
    there.answers["/oauth/userinfo"] = {"groups": ["lab-example", "lab-example/gpu"]}
    urls = {"gitlab_url": there.url, "token_url": f"{there.url}/token"}
    kind = MemberGitLabOAuthenticator
    return from_recipe(kind, "gitlab", {**urls, **settings}, services=services)


GITLAB_MEMBER = "/api/v4/groups/lab-example%252Fgpu/members/all/7"


def test_gitlab_groups_decide_membership_and_hub_groups(there: Vendor, services: Services) -> None:
    there.answers[GITLAB_MEMBER] = 404
    assert sign_in(gitlab(there, services), None).startswith("403")
    there.answers[GITLAB_MEMBER] = {"id": 7}
    assert sign_in(gitlab(there, services), None) == "in"
    assert groups_of(gitlab(there, services)) == ["lab-example", "lab-example/gpu"]

    elsewhere = gitlab(there, services, auth_state_groups_key="gitlab_user.teams")
    there.answers["/oauth/userinfo"] = 403  # and not needed
    assert sign_in(elsewhere, None) == "in"
    assert groups_of(elsewhere) == ["gpu"]


# Google.

GMAIL = "Google as 'ada@gmail.example', but it belongs to no organisation that may use this hub."


@pytest.mark.parametrize(
    ("claims", "verdict"),
    [
        ({"email": "ada@lab.example"}, "in"),
        ({"email": "grace@lab.example"}, "in as admin"),
        ({"email": "ada@gmail.example", "hd": None}, f"403 You signed in to {GMAIL}"),
        ({"email": "ada@lab.example", "verified_email": False}, "403"),
    ],
)
def test_google_requires_allowed_domain_and_verified_mail(
    claims: dict[str, Any], verdict: str, there: Vendor, services: Services
) -> None:
    there.token()
    said = {"verified_email": True, "hd": "lab.example", **claims}
    there.answers["/oauth2/v1/userinfo"] = {k: v for k, v in said.items() if v is not None}
    urls = {"google_api_url": there.url, "token_url": f"{there.url}/token"}
    authenticator = from_recipe(MemberGoogleOAuthenticator, "google", urls, services=services)
    assert sign_in(authenticator, None).startswith(verdict)


# Microsoft.

MEMBERS = "4f1c2a7e-3b0e-4f5d-9a51-0e2f6c1d7b90"
CLAIMS: dict[str, Any] = {"preferred_username": "ada@lab.example", "groups": [MEMBERS, "other"]}


def microsoft(there: Vendor, services: Services, **settings: Any) -> MemberMixin:
    urls = {"token_url": f"{there.url}/token", "tenant_id": "lab", "enable_auth_state": True}
    kind = MemberMicrosoftOAuthenticator
    return from_recipe(kind, "microsoft", {**urls, **settings}, services=services)


def test_microsoft_groups_are_mapped_and_unknown_ones_dropped(
    there: Vendor, services: Services
) -> None:
    there.token(**CLAIMS)
    assert groups_of(microsoft(there, services)) == ["gpu-members"]


@pytest.mark.parametrize("tenant", ["", "common", "organizations", "consumers"])
def test_microsoft_requires_a_single_tenant(tenant: str) -> None:
    authenticator = MemberMicrosoftOAuthenticator(tenant_id=tenant)
    with pytest.raises(TraitError, match="anybody with a Microsoft account"):
        assert authenticator.authorize_url


LATE = {"exp": time.time() - 7200}
EARLY = {"iat": time.time() + 7200, "nbf": time.time() + 7200}


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (LATE, "502 The clocks of Microsoft and of this hub differ"),
        (EARLY, "502 The clocks of Microsoft and of this hub differ"),
        ({"aud": "another-app"}, "502 This hub cannot use the answer of Microsoft"),
    ],
    ids=["late", "early", "for somebody else"],
)
def test_id_token_with_wrong_time_or_audience_is_rejected(
    token: dict[str, Any], said: str, there: Vendor, services: Services
) -> None:
    there.token(**CLAIMS, **token)
    seen = sign_in(microsoft(there, services), None)
    assert seen.startswith(said)
    assert "aud" in token or "Ask gpu-admin@lab.example to set the time." in seen


def test_microsoft_refresh_reads_groups_from_a_new_id_token(
    there: Vendor, services: Services
) -> None:
    """The id token of the sign-in always names the same groups."""
    there.token(**CLAIMS)
    authenticator = microsoft(there, services)
    model = asyncio.run(authenticator.get_authenticated_user(None, None))

    async def kept() -> dict[str, Any]:
        return dict(model["auth_state"])

    user: Any = SimpleNamespace(
        name="ada@lab.example", groups=[orm.Group(name="gpu-members")], get_auth_state=kept
    )
    assert isinstance(asyncio.run(authenticator.refresh_user(user)), dict)
    there.token(**{**CLAIMS, "groups": ["other"]})
    assert asyncio.run(authenticator.refresh_user(user)) is False

    known = services.members.membership("ada@lab.example")
    assert known is not None and known.ended_at is not None
    assert known.reason.endswith("it is in no group that may use this hub")

    there.token(**CLAIMS)
    assert isinstance(asyncio.run(authenticator.refresh_user(user)), dict)
    known = services.members.membership("ada@lab.example")
    assert known is not None and known.ended_at is None


# CILogon.


@pytest.mark.parametrize(
    ("eppn", "verdict"),
    [("ada@lab.example", "in"), ("eve@art.example", "403 You signed in to CILogon as")],
)
def test_cilogon_admits_only_allowed_eppn_domains(
    eppn: str, verdict: str, there: Vendor, services: Services
) -> None:
    there.token()
    there.answers["/userinfo"] = {"eppn": eppn, "idp": "https://idp.lab.example/shibboleth"}
    urls = {"token_url": f"{there.url}/token", "userdata_url": f"{there.url}/userinfo"}
    authenticator = from_recipe(MemberCILogonOAuthenticator, "cilogon", urls, services=services)
    assert sign_in(authenticator, None).startswith(verdict)


# LDAP: tests/hub/test_auth.py has a real directory.


@pytest.mark.parametrize("given", [{}, {"ca_certs_file": "/etc/ssl/lab.pem"}])
def test_ldap_validates_certificates_and_rejects_group_dns(given: dict[str, str]) -> None:
    from gpuspawner.auth.ldap import MemberLDAPAuthenticator

    settings: dict[str, Any] = {"tls_kwargs": given} if given else {}
    authenticator = MemberLDAPAuthenticator(lookup_dn=True, **settings)
    assert authenticator.tls_kwargs == {"validate": ssl.CERT_REQUIRED, **given}
    with pytest.raises(TraitError, match="take the names of groups"):
        MemberLDAPAuthenticator(
            lookup_dn=True, manage_groups=True, allowed_groups={"cn=gpu,dc=lab,dc=example"}
        )
