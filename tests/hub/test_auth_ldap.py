"""Signing in with a directory. Real: slapd, the recipe for admins, JupyterHub, proxy, Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from playwright.sync_api import Browser, Page

from tests.support.hub import HubProcess
from tests.support.ldap import READER_PASSWORD, Directory, password_of
from tests.support.pages import look_over
from tests.support.processes import REPO, wait_for

Lab = tuple[HubProcess, Directory]

USERS = {
    "ada": ["gpu-members", "staff"],
    "grace": ["gpu-members", "gpu-admins"],
    "leaver": ["gpu-members"],
    "gone": ["gpu-members"],
    "eve": ["art"],
}

CONFIG = """
load_subconfig("auth/ldap.py", path={recipes!r})
c.JupyterHub.authenticator_class = "gpuspawner.auth.ldap.MemberLDAPAuthenticator"
c.MemberLDAPAuthenticator.server_address = "127.0.0.1"
c.MemberLDAPAuthenticator.server_port = {port}
c.MemberLDAPAuthenticator.tls_strategy = "insecure"  # it never leaves this machine
c.MemberLDAPAuthenticator.auth_refresh_age = 1
c.Authenticator.allow_all = False
c.Authenticator.admin_users = set()
c.Authenticator.blocked_users = {{"mallory"}}
c.JupyterHub.default_url = "/hub/home"
c.GPUDatabase.url = "sqlite:///store.sqlite"
c.GPUDevices.source = "simulated:1xT4"
import gpuspawner; gpuspawner.add_services(c)
"""


@pytest.fixture(scope="module")
def lab(hubs: None, folder: Path) -> Iterator[Lab]:
    """A hub whose members sign in with the directory of their lab."""
    directory = Directory(folder / "directory", users=USERS)
    directory.start()
    hub = HubProcess(folder / "hub", environment={"LDAP_PASSWORD": READER_PASSWORD})
    hub.config = CONFIG.format(recipes=str(REPO / "hub_config"), port=directory.port)
    try:
        with hub:
            yield hub, directory
    finally:
        directory.stop()


def form(hub: HubProcess, user: str, password: str | None = None) -> requests.Response:
    data = {"username": user, "password": password_of(user) if password is None else password}
    return hub.post_form(requests.Session(), "/hub/login", data)


def signed_in(page: Page, hub: HubProcess, user: str, password: str) -> None:
    page.goto(f"{hub.url}/hub/login")
    page.fill("#username_input", user)
    page.fill("#password_input", password)
    page.click("#login_submit")


def test_ldap_sign_in_admits_only_members(lab: Lab, browser: Browser) -> None:
    hub, _ = lab
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


def test_leaving_the_admin_group_revokes_admin_rights(lab: Lab) -> None:
    hub, directory = lab
    assert form(hub, "Grace", password_of("grace")).url == f"{hub.url}/hub/home"
    assert hub.api("GET", "users/grace").json()["admin"] is True

    directory.leave_group("grace", "gpu-admins")
    assert form(hub, "grace").url == f"{hub.url}/hub/home"
    assert hub.api("GET", "users/grace").json()["admin"] is False


@pytest.mark.parametrize(
    ("user", "password"),
    [("ada", ""), ("ada", " "), ("*", "x"), ("ada)(uid=*", "x"), ("nobody", "x"), ("ä", "ö")],
)
def test_invalid_or_injected_credentials_are_rejected(user: str, password: str, lab: Lab) -> None:
    hub, _ = lab
    page = form(hub, user, password)
    assert page.status_code == 403 and "Invalid username or password" in page.text


def home_of(hub: HubProcess, session: requests.Session) -> requests.Response:
    return session.get(f"{hub.url}/hub/home", allow_redirects=False, timeout=60)


def test_leaving_group_or_directory_ends_access(lab: Lab) -> None:
    hub, directory = lab
    sessions = {user: hub.login(user, password_of(user)) for user in ("leaver", "gone")}
    directory.leave_group("leaver", "gpu-members")
    directory.remove("gone")
    for user, reason in (
        ("leaver", "no longer a member of this hub"),
        ("gone", "the account no longer exists in the directory"),
    ):

        def sent_to(session: requests.Session = sessions[user]) -> str:
            return home_of(hub, session).headers.get("location", "")

        assert "/hub/login" in wait_for(sent_to, "the hub to ask the directory again")
        started = hub.api("POST", f"users/{user}/server")
        assert started.status_code == 403
        assert reason in started.json()["message"]

    assert "it is in no group that may use this hub" in form(hub, "leaver").text
    directory.join_group("leaver", "gpu-members")
    assert form(hub, "leaver").url == f"{hub.url}/hub/home"


def test_directory_outage_keeps_members_signed_in(lab: Lab) -> None:
    """Those who are in stay in; those who come read a sentence; then it goes on as before."""
    hub, directory = lab
    session = hub.login("ada", password_of("ada"))
    directory.stop()
    try:
        page = form(hub, "ada")
        assert page.status_code == 503 and "Traceback" not in page.text
        assert "The directory is not working, so the hub cannot tell who you are" in page.text
        wait_for(
            lambda: home_of(hub, session).ok and "'ada' stays signed in" in hub.log_text(),
            "the hub to ask the directory in vain",
        )
    finally:
        directory.start()
    assert form(hub, "ada").url == f"{hub.url}/hub/home"
