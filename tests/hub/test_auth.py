"""Signing in. Real: JupyterHub with its proxy, an OpenID Connect provider, services and SQLite."""

from __future__ import annotations

import html
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
import requests
from playwright.sync_api import Browser, Page

from gpuspawner.core.units import MICRO
from tests.support.brokers import services_on
from tests.support.browser import screenshot
from tests.support.hub import ADMIN_PASSWORD, USER_PASSWORD, HubProcess
from tests.support.identity import CLIENT_ID, CLIENT_SECRET, IdentityProvider, password_of, sign_in
from tests.support.pages import look_over
from tests.support.processes import wait_for

Lab = tuple[HubProcess, IdentityProvider]

NOT_LISTED = "this account is not on the list of members"

USERS = {
    "ada": ["ml-course", "staff"],
    "leaver": ["ml-course"],
    "mallory": ["ml-course"],
    "eve": ["art"],
    "stranger": [],
    "root": [],
}

COMMON = """
c.Authenticator.allow_all = False
c.Authenticator.admin_users = {"root"}
c.Authenticator.blocked_users = {"mallory"}
c.MemberMixin.contact = "gpu@lab.example"
c.JupyterHub.default_url = "/hub/home"
c.GPUDatabase.url = "sqlite:///store.sqlite"
c.GPUDevices.source = "simulated:1xT4"
c.GPUCredits.opening_grant = 25
"""

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
import gpuspawner; gpuspawner.add_services(c)
c.CryptKeeper.keys = [bytes(32)]
"""

SHARED_PASSWORD = f"""
c.JupyterHub.authenticator_class = "gpuspawner.auth.MemberSharedPasswordAuthenticator"
c.MemberSharedPasswordAuthenticator.user_password = {USER_PASSWORD!r}
c.MemberSharedPasswordAuthenticator.admin_password = {ADMIN_PASSWORD!r}
c.MemberSharedPasswordAuthenticator.allowed_users = {{"member1", "member2", "mallory"}}
c.MemberSharedPasswordAuthenticator.allowed_groups = {{"ml-course"}}
c.JupyterHub.load_groups = {{"ml-course": {{"users": ["ada"]}}, "art": {{"users": ["eve"]}}}}
"""


@pytest.fixture(scope="module")
def oauth(hubs: None, folder: Path) -> Iterator[Lab]:
    """A hub whose members sign in with their lab's identity provider."""
    hub = HubProcess(folder / "hub")
    provider = IdentityProvider(
        folder / "identity", users=USERS, redirect_uri=f"{hub.url}/hub/oauth_callback"
    )
    hub.config = COMMON + OAUTH.format(
        provider=provider, client_id=CLIENT_ID, client_secret=CLIENT_SECRET
    )
    provider.start()
    try:
        with hub:
            yield hub, provider
    finally:
        provider.stop()


@pytest.fixture(scope="module")
def shared(hubs: None, folder: Path) -> Iterator[HubProcess]:
    """A hub whose members share a password."""
    with HubProcess(folder / "shared", COMMON + SHARED_PASSWORD) as hub:
        yield hub


def balance(hub: HubProcess, user: str) -> int | None:
    """The balance in the hub's store; None when no account is open."""
    with services_on(f"sqlite:///{hub.folder}/store.sqlite") as services:
        accounts = {account.name: account.balance for account in services.ledger.accounts()}
    return accounts.get(f"member:{user}")


def said(page: requests.Response) -> str:
    """The sentence of an error page, or of the sign-in form, as a person reads it."""
    found = re.search(r'<div class="error">(.*?)</div>', page.text, re.DOTALL) or re.search(
        r'<p class="login_error">(.*?)</p>', page.text, re.DOTALL
    )
    assert found, page.text
    assert "Traceback" not in page.text
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", found[1])).split())


def callback(hub: HubProcess, **answer: str) -> requests.Response:
    """Come back from the provider with this, in a browser that set out from the hub."""
    session = requests.Session()
    away = session.get(f"{hub.url}/hub/oauth_login", allow_redirects=False, timeout=120)
    state = parse_qs(urlparse(away.headers["location"]).query)["state"][0]
    back = {"state": state, **answer}
    return session.get(f"{hub.url}/hub/oauth_callback", params=back, timeout=120)


# With an identity provider.


def test_sign_in_imports_groups_and_opens_account(oauth: Lab) -> None:
    hub, provider = oauth
    session = requests.Session()
    page = sign_in(session, provider, "ada", hub.url)

    assert page.url == f"{hub.url}/hub/home" and page.status_code == 200
    user = hub.api("GET", "users/ada").json()
    assert sorted(user["groups"]) == ["ml-course", "staff"] and user["admin"] is False
    assert balance(hub, "ada") == 25 * MICRO

    again = sign_in(requests.Session(), provider, "ada", hub.url)
    assert again.url == f"{hub.url}/hub/home"
    assert balance(hub, "ada") == 25 * MICRO

    # An admin is in no group.
    assert sign_in(requests.Session(), provider, "root", hub.url).status_code == 200
    assert hub.api("GET", "users/root").json()["admin"] is True


@pytest.mark.parametrize(
    ("user", "why"),
    [
        ("eve", f"{NOT_LISTED}; none of its groups may use this hub (art)."),
        ("stranger", f"{NOT_LISTED}; it is in no group that may use this hub."),
        ("mallory", "this account is blocked on this hub."),
    ],
)
def test_rejected_oauth_user_sees_reason_and_contact(user: str, why: str, oauth: Lab) -> None:
    hub, provider = oauth
    page = sign_in(requests.Session(), provider, user, hub.url)

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
    session = requests.Session()
    sign_in(session, provider, "ada", hub.url)
    provider.stop()
    try:

        def asked() -> bool:
            home = session.get(f"{hub.url}/hub/home", allow_redirects=False, timeout=120)
            assert home.status_code == 200
            return "'ada' stays signed in" in hub.log_text()

        wait_for(asked, "the hub to ask the provider, after auth_refresh_age")

        page = callback(hub, code="any")
        assert page.status_code == 503
        assert "Lab is not working, so the hub cannot tell who you are." in said(page)
        assert "Ask gpu@lab.example to look at the hub's log." in said(page)
    finally:
        provider.start()
    assert sign_in(requests.Session(), provider, "ada", hub.url).url == f"{hub.url}/hub/home"


def test_member_leaving_the_group_is_signed_out(oauth: Lab) -> None:
    hub, provider = oauth
    session = requests.Session()
    assert sign_in(session, provider, "leaver", hub.url).status_code == 200
    provider.leave_groups("leaver")

    def out() -> str:
        home = session.get(f"{hub.url}/hub/home", allow_redirects=False, timeout=120)
        return home.headers["location"] if home.status_code == 302 else ""

    assert "/hub/login" in wait_for(out, "the hub to ask the provider, after auth_refresh_age")
    assert "in no group that may use this hub" in said(
        sign_in(session, provider, "leaver", hub.url)
    )
    started = hub.api("POST", "users/leaver/server")  # nor does an admin start one for them
    assert started.status_code == 403
    assert "'leaver': this account is no longer a member of this hub" in started.json()["message"]


@pytest.mark.parametrize(
    ("answer", "status", "sentence"),
    [
        ({"code": "made-up"}, 403, "Lab did not accept this sign-in"),
        ({"error": "access_denied"}, 403, "Lab did not confirm who you are"),
        ({"error": "temporarily_unavailable"}, 503, "Lab is not working"),
        ({"error": "login_required"}, 400, "This sign-in began in another browser or too long"),
        (
            {"error": "invalid_scope", "error_description": "Call 0900-SCAM"},
            502,
            "This hub cannot use the answer of Lab",
        ),
        ({}, 400, "This sign-in began in another browser or too long ago"),
        ({"code": "any", "state": "forged"}, 400, "This sign-in began in another browser or too"),
        ({"code": "any", "state": "ä"}, 400, "This sign-in began in another browser or too long"),
    ],
)
def test_provider_errors_show_a_safe_explanation(
    answer: dict[str, str], status: int, sentence: str, oauth: Lab
) -> None:
    hub, _ = oauth
    page = callback(hub, **answer)

    assert page.status_code == status
    assert sentence in said(page) and "SCAM" not in page.text
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


# With a shared password.


def form(hub: HubProcess, user: str, password: str = USER_PASSWORD) -> requests.Response:
    data = {"username": user, "password": password}
    return hub.post_form(requests.Session(), "/hub/login", data)


def test_members_sign_in_by_name_or_hub_group(shared: HubProcess) -> None:
    for user in ("member1", "ada"):
        assert form(shared, user).url == f"{shared.url}/hub/home"
        assert balance(shared, user) == 25 * MICRO
    assert form(shared, "late").status_code == 403
    shared.api("POST", "users/late").raise_for_status()
    assert form(shared, "late").status_code == 403
    shared.api("POST", "groups/ml-course/users", json={"users": ["late"]}).raise_for_status()

    assert form(shared, "late").url == f"{shared.url}/hub/home"


def test_admin_signs_in_only_with_the_admin_password(shared: HubProcess) -> None:
    assert "Invalid username or password" in said(form(shared, "root"))
    assert form(shared, "root", ADMIN_PASSWORD).url == f"{shared.url}/hub/home"


@pytest.mark.parametrize(
    ("user", "password", "sentence"),
    [
        ("member1", "a wrong password", "Invalid username or password"),
        ("member1", "ein falsches Paßwort", "Invalid username or password"),
        (
            "nobody",
            USER_PASSWORD,
            f"You signed in as 'nobody', but {NOT_LISTED}; it is in no group that may use this "
            "hub. Ask gpu@lab.example to let you in.",
        ),
        (
            "eve",
            USER_PASSWORD,
            f"You signed in as 'eve', but {NOT_LISTED}; none of its groups may use this hub (art). "
            "Ask gpu@lab.example to let you in.",
        ),
        (
            "mallory",
            USER_PASSWORD,
            "You signed in as 'mallory', but this account is blocked on this hub. "
            "Ask gpu@lab.example about it.",
        ),
    ],
)
def test_sign_in_form_explains_rejection(
    user: str, password: str, sentence: str, shared: HubProcess
) -> None:
    page = form(shared, user, password)

    assert page.status_code == 403 and said(page) == sentence
    if user != "member1":
        assert balance(shared, user) is None


def test_rejected_user_name_is_escaped_in_html(shared: HubProcess) -> None:
    page = form(shared, "<img src=x onerror=alert(1)>")

    assert page.status_code == 403
    assert "You signed in as '<img src=x onerror=alert(1)>'" in html.unescape(page.text)
    assert "<img src=x" not in page.text


def test_member_signs_in_while_the_store_is_locked(shared: HubProcess) -> None:
    """The member comes in, and the account is there once the store is free again."""
    other = sqlite3.connect(shared.folder / "store.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        assert form(shared, "member2").url == f"{shared.url}/hub/home"
    finally:
        other.execute("ROLLBACK")
        other.close()
    assert "The account of 'member2' could not be opened at sign-in" in shared.log_text()
    wait_for(lambda: balance(shared, "member2") == 25 * MICRO, "the account of member2")
