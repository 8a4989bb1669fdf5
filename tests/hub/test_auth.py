"""Sign-in with an identity provider, and with a directory. Real: JupyterHub, proxy, OpenID Connect
provider, slapd, the recipe for admins, SQLite, Chromium."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
import requests
from playwright.sync_api import Browser, Page

from gpuspawner.core.units import MICRO
from tests.support.brokers import migrated_bytes, services_on
from tests.support.browser import screenshot
from tests.support.http_client import new_session
from tests.support.hub import HubProcess
from tests.support.identity import CLIENT_ID, CLIENT_SECRET, IdentityProvider, password_of, sign_in
from tests.support.ldap import READER_PASSWORD, Directory
from tests.support.pages import look_over
from tests.support.processes import REPO, wait_for

Lab = tuple[HubProcess, IdentityProvider]
LDAPLab = tuple[HubProcess, Directory]

NOT_LISTED = "this account is not on the list of members"
LATE = "This sign-in began in another browser or too long ago, or was used already."

USERS = {
    "ada": ["ml-course", "staff"],
    "leaver": ["ml-course"],
    "mallory": ["ml-course"],
    "eve": ["art"],
    "root": [],
}

OAUTH = """
c.JupyterHub.authenticator_class = "gpuspawner.auth.MemberOAuthenticator"
c.MemberOAuthenticator.login_service = "Lab"
c.MemberOAuthenticator.authorize_url = "{provider.authorize_url}"
c.MemberOAuthenticator.token_url = "{provider.token_url}"
c.MemberOAuthenticator.userdata_url = "{provider.userdata_url}"
c.MemberOAuthenticator.client_id = "{client_id}"
c.MemberOAuthenticator.client_secret = "{client_secret}"
c.MemberOAuthenticator.username_claim = "sub"
c.MemberOAuthenticator.scope = ["openid", "profile", "groups"]
c.MemberOAuthenticator.manage_groups = True
c.MemberOAuthenticator.allowed_groups = {{"ml-course"}}
c.MemberOAuthenticator.enable_auth_state = True
c.MemberOAuthenticator.auth_refresh_age = 1
c.CryptKeeper.keys = [bytes(32)]
c.Authenticator.admin_users = {{"root"}}
c.MemberMixin.contact = "gpu@lab.example"
c.GPUCredits.opening_grant = 25
"""

DIRECTORY_USERS = {
    "ada": ["gpu-members", "staff"],
    "grace": ["gpu-members", "gpu-admins"],
    "leaver": ["gpu-members"],
    "gone": ["gpu-members"],
    "eve": ["art"],
}

LDAP = """
load_subconfig("auth/ldap.py", path={recipes!r})
c.JupyterHub.authenticator_class = "gpuspawner.auth.ldap.MemberLDAPAuthenticator"
c.MemberLDAPAuthenticator.server_address = "127.0.0.1"
c.MemberLDAPAuthenticator.server_port = {port}
c.MemberLDAPAuthenticator.tls_strategy = "insecure"  # it never leaves this machine
c.MemberLDAPAuthenticator.auth_refresh_age = 1
c.Authenticator.admin_users = set()
"""

PAGES = """
c.Authenticator.allow_all = False
c.Authenticator.blocked_users = {"mallory"}
c.JupyterHub.default_url = "/hub/home"
c.GPUDatabase.url = "sqlite:///store.sqlite"
c.GPUDevices.source = "simulated:1xT4"
import gpuspawner; gpuspawner.add_services(c)
c.JupyterHub.services, c.JupyterHub.load_roles = [], []
"""
"""The pages without the accounting service: nothing is charged here."""


@pytest.fixture(scope="module")
def oauth(hubs: None, folder: Path) -> Iterator[Lab]:
    """A hub whose members sign in with their lab's identity provider."""
    hub = HubProcess(folder / "oauth")
    provider = IdentityProvider(
        folder / "identity", users=USERS, redirect_uri=f"{hub.url}/hub/oauth_callback"
    )
    (hub.folder / "store.sqlite").write_bytes(migrated_bytes())
    settings = {"client_id": CLIENT_ID, "client_secret": CLIENT_SECRET}
    hub.config = OAUTH.format(provider=provider, **settings) + PAGES
    provider.start()
    try:
        with hub:
            yield hub, provider
    finally:
        provider.stop()


@pytest.fixture(scope="module")
def ldap(hubs: None, folder: Path) -> Iterator[LDAPLab]:
    """A hub whose members sign in with the directory of their lab."""
    directory = Directory(folder / "directory", users=DIRECTORY_USERS)
    directory.start()
    hub = HubProcess(folder / "ldap", environment={"LDAP_PASSWORD": READER_PASSWORD})
    (hub.folder / "store.sqlite").write_bytes(migrated_bytes())
    hub.config = LDAP.format(recipes=str(REPO / "hub_config"), port=directory.port) + PAGES
    try:
        with hub:
            yield hub, directory
    finally:
        directory.stop()


def home_of(hub: HubProcess, session: requests.Session) -> requests.Response:
    return session.get(f"{hub.url}/hub/home", allow_redirects=False, timeout=120)


def has_kept_ada(hub: HubProcess, session: requests.Session) -> bool:
    """Return True once the log says that the hub kept ada signed in, as it could not ask."""
    assert home_of(hub, session).status_code == 200
    return "'ada' stays signed in" in hub.log_text()


def redirect_after_refresh(hub: HubProcess, session: requests.Session) -> str:
    """Wait for the refresh after ``auth_refresh_age``; return where the hub redirects to."""

    def sent_to() -> str:
        return home_of(hub, session).headers.get("location", "")

    return wait_for(sent_to, "the hub to ask again")


def balance(hub: HubProcess, user: str) -> int | None:
    """The balance in the hub's store; None when no account is open."""
    with services_on(f"sqlite:///{hub.folder}/store.sqlite") as services:
        accounts = {account.name: account.balance for account in services.ledger.accounts()}
    return accounts.get(f"member:{user}")


def said(page: requests.Response) -> str:
    """The sentence of an error page, as a person reads it."""
    found = re.search(r'<div class="error">(.*?)</div>', page.text, re.DOTALL)
    assert found, page.text
    assert "Traceback" not in page.text
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", found[1])).split())


def callback(hub: HubProcess, **answer: str) -> requests.Response:
    """Come back from the provider with this, in a browser that set out from the hub."""
    session = new_session()
    away = session.get(f"{hub.url}/hub/oauth_login", allow_redirects=False, timeout=120)
    state = parse_qs(urlparse(away.headers["location"]).query)["state"][0]
    back = {"state": state, **answer}
    return session.get(f"{hub.url}/hub/oauth_callback", params=back, timeout=120)


def test_sign_in_imports_groups_and_opens_account(oauth: Lab) -> None:
    hub, provider = oauth
    session = new_session()
    page = sign_in(session, provider, "ada", hub.url)

    assert page.url == f"{hub.url}/hub/home" and page.status_code == 200
    user = hub.api("GET", "users/ada").json()
    assert sorted(user["groups"]) == ["ml-course", "staff"] and user["admin"] is False
    assert balance(hub, "ada") == 25 * MICRO

    again = sign_in(new_session(), provider, "ada", hub.url)
    assert again.url == f"{hub.url}/hub/home"
    assert balance(hub, "ada") == 25 * MICRO

    # An admin is in no group.
    assert sign_in(new_session(), provider, "root", hub.url).status_code == 200
    assert hub.api("GET", "users/root").json()["admin"] is True


def test_rejected_user_sees_reason_and_contact(oauth: Lab) -> None:
    hub, provider = oauth
    for user, why in (
        ("eve", f"{NOT_LISTED}; none of its groups may use this hub (art)."),
        ("mallory", "this account is blocked on this hub."),
    ):
        page = sign_in(new_session(), provider, user, hub.url)

        assert page.status_code == 403
        sentence = said(page)
        assert sentence.startswith("You are not a member here ")
        assert f"You signed in to Lab as '{user}', but {why} Ask gpu@lab.example" in sentence
        assert "Sign in with another account" in sentence
        assert 'href="/hub/oauth_login?another=1"' in page.text
        assert '<a href="mailto:gpu@lab.example">' in page.text
        assert hub.api("GET", f"users/{user}").status_code == 404
        assert balance(hub, user) is None


def test_provider_outage_keeps_members_signed_in(oauth: Lab) -> None:
    """Those who are in stay in; those who come read a sentence; then it goes on as before."""
    hub, provider = oauth
    session = new_session()
    sign_in(session, provider, "ada", hub.url)
    provider.stop()
    try:
        wait_for(lambda: has_kept_ada(hub, session), "the hub to ask the provider in vain")
        page = callback(hub, code="any")
        assert page.status_code == 503
        assert "Lab is not working, so the hub cannot tell who you are." in said(page)
        assert "Ask gpu@lab.example to look at the hub's log." in said(page)
    finally:
        provider.start()
    assert sign_in(new_session(), provider, "ada", hub.url).url == f"{hub.url}/hub/home"


def test_member_leaving_the_group_is_signed_out(oauth: Lab) -> None:
    hub, provider = oauth
    session = new_session()
    assert sign_in(session, provider, "leaver", hub.url).status_code == 200
    provider.leave_groups("leaver")
    assert "/hub/login" in redirect_after_refresh(hub, session)
    assert "in no group that may use this hub" in said(
        sign_in(session, provider, "leaver", hub.url)
    )
    started = hub.api("POST", "users/leaver/server")  # nor does an admin start one for them
    assert started.status_code == 403
    assert "'leaver': this account is no longer a member of this hub" in started.json()["message"]


ANSWERS: list[tuple[dict[str, str], int, str]] = [
    ({"code": "made-up"}, 403, "Lab did not accept this sign-in"),
    ({"error": "access_denied"}, 403, "Lab did not confirm who you are"),
    ({"error": "temporarily_unavailable"}, 503, "Lab is not working"),
    ({"error": "login_required"}, 400, LATE),
    (
        {"error": "invalid_scope", "error_description": "Call 0900-SCAM"},
        502,
        "This hub cannot use the answer of Lab",
    ),
    ({}, 400, LATE),
    ({"code": "any", "state": "forged"}, 400, LATE),
    ({"code": "any", "state": "ä"}, 400, LATE),
]


def test_provider_errors_show_a_safe_explanation(oauth: Lab) -> None:
    hub, _ = oauth
    for answer, status, sentence in ANSWERS:
        page = callback(hub, **answer)

        assert (page.status_code, sentence in said(page)) == (status, True), answer
        assert "SCAM" not in page.text
        assert "Ask gpu@lab.example to look at the hub's log." in said(page)
        assert 'href="/hub/oauth_login"' in page.text  # and try again


def test_outsider_can_switch_account_in_the_browser(oauth: Lab, browser: Browser) -> None:
    """The provider knows this browser as an outsider: it asks who it is, and a member comes in."""
    hub, provider = oauth
    page = browser.new_page()
    provider.wait_turn("eve")
    page.goto(f"{hub.url}/hub/oauth_login")
    give(page, "eve")
    page.wait_for_selector("text=You are not a member here")
    look_over(page, "auth-outsider", accessible=False)

    page.click("text=Sign in with another account")
    screenshot(page, "auth-provider-asks")
    assert page.url.startswith(provider.url)
    provider.wait_turn("ada")
    give(page, "ada")
    page.wait_for_url(f"{hub.url}/hub/home")


def give(page: Page, user: str) -> None:
    """Name and password, on the provider's own pages."""
    page.fill("input[name=login]", user)
    page.get_by_role("button", name="Continue").click()
    page.fill("input[name=password]", password_of(user))
    page.get_by_role("button", name="Sign in").click()


# With a directory.


def form(hub: HubProcess, user: str, password: str | None = None) -> requests.Response:
    data = {"username": user, "password": password_of(user) if password is None else password}
    return hub.post_form(new_session(), "/hub/login", data)


def signed_in(page: Page, hub: HubProcess, user: str, password: str) -> None:
    page.goto(f"{hub.url}/hub/login")
    page.fill("#username_input", user)
    page.fill("#password_input", password)
    page.click("#login_submit")


def test_ldap_sign_in_admits_only_members(ldap: LDAPLab, browser: Browser) -> None:
    hub, _ = ldap
    page = browser.new_page()

    signed_in(page, hub, "ada", "a guess")
    assert "Invalid username or password" in page.inner_text(".login_error")
    signed_in(page, hub, "eve", password_of("eve"))
    told = page.inner_text(".login_error")
    assert told == (
        "You signed in as 'eve', but this account is not on the list of "
        "members; none of its groups may use this hub (art). "
        "Ask gpu-admin@lab.example to let you in."
    )
    look_over(page, "auth-ldap-outsider", accessible=False)
    signed_in(page, hub, "ada", password_of("ada"))
    page.wait_for_url(f"{hub.url}/hub/home")

    ada = hub.api("GET", "users/ada").json()
    assert sorted(ada["groups"]) == ["gpu-members", "staff"] and ada["admin"] is False
    assert hub.api("GET", "users/eve").status_code == 404


def test_leaving_the_admin_group_revokes_admin_rights(ldap: LDAPLab) -> None:
    hub, directory = ldap
    assert form(hub, "Grace", password_of("grace")).url == f"{hub.url}/hub/home"
    assert hub.api("GET", "users/grace").json()["admin"] is True

    directory.leave_group("grace", "gpu-admins")
    assert form(hub, "grace").url == f"{hub.url}/hub/home"
    assert hub.api("GET", "users/grace").json()["admin"] is False


def test_invalid_or_injected_credentials_are_rejected(ldap: LDAPLab) -> None:
    hub, _ = ldap
    for user, password in (
        *(("ada", ""), ("ada", " "), ("nobody", "x"), ("ä", "ö")),
        *(("*", "x"), ("ada)(uid=*", "x")),
    ):
        page = form(hub, user, password)
        assert page.status_code == 403 and "Invalid username or password" in page.text, user


def test_leaving_group_or_directory_ends_access(ldap: LDAPLab) -> None:
    hub, directory = ldap
    sessions = {user: hub.login(user, password_of(user)) for user in ("leaver", "gone")}
    directory.leave_group("leaver", "gpu-members")
    directory.remove("gone")
    for user, reason in (
        ("leaver", "no longer a member of this hub"),
        ("gone", "the account no longer exists in the directory"),
    ):
        assert "/hub/login" in redirect_after_refresh(hub, sessions[user])
        started = hub.api("POST", f"users/{user}/server")
        assert started.status_code == 403
        assert reason in started.json()["message"]

    assert "it is in no group that may use this hub" in form(hub, "leaver").text
    directory.join_group("leaver", "gpu-members")
    assert form(hub, "leaver").url == f"{hub.url}/hub/home"


def test_directory_outage_keeps_members_signed_in(ldap: LDAPLab) -> None:
    """Those who are in stay in; those who come read a sentence; then it goes on as before."""
    hub, directory = ldap
    session = hub.login("ada", password_of("ada"))
    directory.stop()
    try:
        page = form(hub, "ada")
        assert page.status_code == 503 and "Traceback" not in page.text
        assert "The directory is not working, so the hub cannot tell who you are" in page.text
        wait_for(lambda: has_kept_ada(hub, session), "the hub to ask the directory in vain")
    finally:
        directory.start()
    assert form(hub, "ada").url == f"{hub.url}/hub/home"
