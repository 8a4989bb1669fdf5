"""A member's first day and last. Real: JupyterHub, proxy, the accounting service, local servers,
kill -9, Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.notifications.models import NoticeKind
from tests.support import axe
from tests.support.browser import screenshot
from tests.support.gpu_hub import text_of
from tests.support.hub import USER_PASSWORD
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

WIDE = ViewportSize(width=1280, height=900)
PHONE = ViewportSize(width=390, height=844)
SLOW = 120_000
"""Milliseconds for a page or a server, on a machine with other things to do."""

CONFIG = """
c.JupyterHub.authenticator_class = "gpu-members-shared-password"
c.Authenticator.allow_all = False
c.MemberMixin.roster = True
c.GPURates.by_model = {"A100": 4, "T4": 1}
c.GPUMembers.grace_minutes = 0.1
"""


@pytest.fixture(scope="module")
def hub(hubs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PayingHub]:
    """Whoever is on the roster is a member: three are, as long as nobody ends it."""
    with PayingHub(tmp_path_factory.mktemp("members") / "hub", CONFIG) as hub:
        put_on_roster(hub, "ada,", "bob,", "cara,")
        yield hub


def put_on_roster(hub: PayingHub, *lines: str) -> None:
    text = "\n".join(("name,ends", *lines))
    assert hub.broker.roster.import_roster(text.encode(), actor="eva").done


def told(hub: PayingHub, user: str, kind: NoticeKind) -> list[str]:
    return [x.title for x in hub.broker.notifications.notices_of(user) if x.kind is kind]


def ended(hub: PayingHub, lease: Lease) -> Lease:
    """The lease, once it is settled: its server is proved gone."""
    wait_for(
        lambda: hub.broker.lease(lease.id).state is LeaseState.ENDED, "the server's end", timeout=60
    )
    return hub.broker.lease(lease.id)


def keep(page: Page, name: str) -> None:
    """Pictures as on a desk and as on a phone; nothing sticks out, and nothing is hard to use."""
    for size, suffix in ((WIDE, "wide"), (PHONE, "phone")):
        page.set_viewport_size(size)
        screenshot(page, f"membership-{name}-{suffix}")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= size["width"], f"{name} is {width} pixels wide on {suffix}"
        assert axe.troubles(page) == []
    page.set_viewport_size(WIDE)


def test_a_newcomer_is_welcomed_once(hub: PayingHub, browser: Browser) -> None:
    page = browser.new_context(viewport=WIDE).new_page()
    page.set_default_timeout(SLOW)
    page.goto(hub.url)
    page.get_by_label("Username").fill("ada")
    page.get_by_label("Password", exact=False).first.fill(USER_PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Welcome, ada")).to_be_visible(timeout=SLOW)
    for heading in ("Credits pay for GPUs", "you wait in line", "Your files are in work"):
        expect(page.get_by_role("heading", name=heading)).to_be_visible()
    expect(page.get_by_text("You have 100.00 credits")).to_be_visible()
    expect(page.get_by_text("T4: 1.00 an hour, enough for 100 hours")).to_be_visible()
    keep(page, "welcome")
    work = Path(hub.folder) / "workspaces" / "ada" / "work"
    wait_for(work.is_dir, "the workspace, before any start")
    page.goto(hub.url)
    page.wait_for_url(re.compile("/hub/spawn"))
    page.goto(f"{hub.url}/hub/home")
    keep(page, "home")
    page.get_by_role("link", name="Credits, queue and files in a minute").click()
    page.get_by_role("link", name="Start a server").click()
    page.wait_for_url(re.compile("/hub/spawn"))
    hub.restart()  # it is in the store, and not only in the hub's memory
    hub.wait_pages()
    page.goto(hub.url)
    page.wait_for_url(re.compile("/hub/spawn"))
    page.context.close()


def test_a_link_leads_to_its_page_and_the_welcome_waits(hub: PayingHub) -> None:
    session = hub.login("bob")  # to /hub/home
    assert "Welcome, bob" not in session.get(f"{hub.url}/hub/home", timeout=60).text
    assert "Welcome, bob" in session.get(hub.url, timeout=60).text
    assert "Welcome, bob" not in session.get(hub.url, timeout=60).text


def test_whose_time_is_over_is_warned_and_stopped_and_comes_back_to_all_they_had(
    hub: PayingHub,
) -> None:
    session = hub.login("cara")
    assert hub.page("cara").ok
    lease = hub.start_server("cara", gpus=1)
    work = Path(hub.folder) / "workspaces" / "cara" / "work"
    (work / "thesis.txt").write_text("mine", encoding="utf-8")
    hub.broker.roster.end_on_roster("cara", actor="eva", reason="the term is over")
    wait_for(lambda: told(hub, "cara", NoticeKind.SESSION_ENDS), "the warning", timeout=60)
    hub.kill_service()  # the next one goes on
    assert ended(hub, lease).outcome == "member_gone"
    assert told(hub, "cara", NoticeKind.STOPPED) == [
        "Your server is stopped: your membership has ended"
    ]
    assert len(told(hub, "cara", NoticeKind.SESSION_ENDS)) == 1
    assert hub.broker.members.membership_end("cara") is not None
    answer = hub.spawn("cara", {"gpus": 0})
    assert not answer.ok and hub.server("cara") is None
    answer = session.get(f"{hub.url}/hub/spawn?opt-gpus=0", timeout=60)
    assert not hub.broker.open_leases(), text_of(answer.text)
    balance = hub.broker.ledger.member("cara").balance

    said = text_of(hub.page("cara").text)
    assert "Your membership has ended: the time on the roster ended on" in said
    assert "Your files and your credits are kept; nothing new can be started." in said

    put_on_roster(hub, "cara,")
    wait_for(lambda: not hub.broker.members.former_members(), "the return", timeout=60)
    assert hub.broker.ledger.member("cara").balance == balance
    hub.login("cara")
    hub.start_server("cara", gpus=1)
    assert (work / "thesis.txt").read_text(encoding="utf-8") == "mine"
    hub.stop_server("cara")
    assert "Your membership" not in text_of(hub.page("cara").text)
    lines = [x.action for x in hub.broker.trail() if x.subject == "member:cara"]
    assert lines[::-1] == [
        "membership began",
        "roster end",
        "membership ended",
        "membership returned",
    ]
