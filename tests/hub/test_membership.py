"""A member's first day and last. Real: JupyterHub, proxy, the accounting service, local servers,
kill -9, Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from gpuspawner.core.units import MICRO
from gpuspawner.notifications.models import NoticeKind
from tests.support.gpu_hub import text_of
from tests.support.hub import ADMIN
from tests.support.pages import WIDE, Clicks, add_cookies, look_over, send_sign_in
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

CONFIG = """
c.JupyterHub.authenticator_class = "gpu-members-shared-password"
c.Authenticator.allow_all = False
c.MemberMixin.roster = True
c.GPURates.by_model = {"A100": 4, "T4": 1}
c.GPUMembers.grace_minutes = 0.1
"""


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    """Whoever is on the roster is a member: three are, as long as nobody ends it."""
    with PayingHub(folder / "hub", CONFIG) as hub:
        put_on_roster(hub, "ada,", "bob,", "cara,")
        yield hub


def put_on_roster(hub: PayingHub, *lines: str) -> None:
    text = "\n".join(("name,ends", *lines))
    assert hub.services.roster.import_roster(text.encode(), actor="eva").done


def test_new_member_sees_the_welcome_page_once(hub: PayingHub, browser: Browser) -> None:
    page = browser.new_context(viewport=WIDE).new_page()
    page.goto(hub.url)
    send_sign_in(page, "ada")
    expect(page.get_by_role("heading", name="Welcome, ada")).to_be_visible()
    for heading in ("Credits pay for GPUs", "you wait in the queue", "Your files are in work"):
        expect(page.get_by_role("heading", name=heading)).to_be_visible()
    expect(page.get_by_text("You have 100.00 credits")).to_be_visible()
    expect(page.get_by_text("T4: 1.00 an hour, enough for 100 hours")).to_be_visible()
    work = Path(hub.folder) / "workspaces" / "ada" / "work"
    wait_for(work.is_dir, "the workspace, before any start")
    page.goto(hub.url)
    page.wait_for_url(re.compile("/hub/spawn"))
    page.goto(f"{hub.url}/hub/home")
    page.get_by_role("link", name="Quick start guide").click()
    page.get_by_role("link", name="Start a server").click()
    page.wait_for_url(re.compile("/hub/spawn"))
    hub.restart()  # it is in the store, and not only in the hub's memory
    hub.wait_pages()
    page.goto(hub.url)
    page.wait_for_url(re.compile("/hub/spawn"))
    page.context.close()


def test_welcome_page_does_not_replace_a_direct_link(hub: PayingHub) -> None:
    session = hub.login("bob")  # to /hub/home
    assert "Welcome, bob" not in session.get(f"{hub.url}/hub/home", timeout=60).text
    assert "Welcome, bob" in session.get(hub.url, timeout=60).text
    assert "Welcome, bob" not in session.get(hub.url, timeout=60).text


def test_expired_member_is_stopped_and_can_return(
    hub: PayingHub,
) -> None:
    session = hub.login("cara")
    assert hub.page("cara").ok
    lease = hub.start_server("cara", gpus=1)
    work = Path(hub.folder) / "workspaces" / "cara" / "work"
    (work / "thesis.txt").write_text("mine", encoding="utf-8")
    hub.services.roster.end_on_roster("cara", actor="eva", reason="the term is over")
    wait_for(lambda: hub.told("cara", NoticeKind.SESSION_ENDS), "the warning", timeout=60)
    hub.kill_service()  # the next one goes on
    assert hub.wait_end(lease).outcome == "member_gone"
    assert hub.told("cara", NoticeKind.STOPPED) == [
        "Your server was stopped: your membership has ended"
    ]
    assert len(hub.told("cara", NoticeKind.SESSION_ENDS)) == 1
    assert hub.services.members.membership_end("cara") is not None
    answer = hub.spawn("cara", {"gpus": 0})
    assert not answer.ok and hub.server("cara") is None
    answer = session.get(f"{hub.url}/hub/spawn?opt-gpus=0", timeout=60)
    assert not hub.services.leases.open_leases(), text_of(answer.text)
    balance = hub.services.ledger.member("cara").balance

    said = text_of(hub.page("cara").text)
    assert "Your membership has ended: the time on the roster ended on" in said
    assert "Your files and credits are kept, but you cannot start servers." in said

    put_on_roster(hub, "cara,")
    wait_for(lambda: not hub.services.members.former_members(), "the return", timeout=60)
    assert hub.services.ledger.member("cara").balance == balance
    hub.login("cara")
    hub.start_server("cara", gpus=1)
    assert (work / "thesis.txt").read_text(encoding="utf-8") == "mine"
    hub.stop_server("cara")
    assert "Your membership" not in text_of(hub.page("cara").text)
    lines = [x.action for x in hub.services.audit.trail() if x.subject == "member:cara"]
    assert lines[::-1] == [
        "membership began",
        "roster end",
        "membership ended",
        "membership returned",
    ]


def test_admin_imports_a_roster_and_ends_an_entry(
    hub: PayingHub, browser: Browser, tmp_path: Path
) -> None:
    known = {entry.user for entry in hub.services.roster.entries()}
    page = browser.new_context(viewport=WIDE).new_page()
    page.goto(hub.url)
    send_sign_in(page, ADMIN)
    page.get_by_role("button", name="Admin").click()
    page.get_by_role("link", name="Members").click()
    file = tmp_path / "course.csv"

    file.write_text("name,course,ends\neve,ML101,2035-07-31\neve,ML101,2035-07-31\n")
    page.get_by_label("CSV file").set_input_files(file)
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("alert")).to_contain_text("Line 3: eve is on line 2 already for ML101")

    file.write_text("name,course,ends\neve,ML101,2035-07-31\nfay,ML101,2035-07-31\n")
    page.get_by_label("CSV file").set_input_files(file)
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("heading", name="Preview 2 new, 0 changed")).to_be_visible()
    look_over(page, "membership-preview")
    assert {entry.user for entry in hub.services.roster.entries()} == known
    page.get_by_role("button", name="Import").click()
    expect(page.get_by_text("The roster is imported: 2 new")).to_be_visible()
    assert {entry.user for entry in hub.services.roster.entries()} == known | {"eve", "fay"}

    page.get_by_label("Name, course or group").fill("ML101")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("heading", name="Roster 2")).to_be_visible()
    page.get_by_role("button", name="End fay ML101").click()
    page.get_by_label("Reason").fill("left the course")
    page.get_by_role("button", name="End entry").click()
    expect(page.get_by_text("The roster entry has ended.")).to_be_visible()
    assert hub.services.roster.roster_member("eve").member
    assert not hub.services.roster.roster_member("fay").member
    [ended, imported] = hub.services.audit.trail(2)
    assert (ended.actor, ended.action, ended.detail) == (
        ADMIN,
        "roster end",
        "ML101: left the course",
    )
    assert (imported.actor, imported.action) == (ADMIN, "roster import")
    page.context.close()


def test_admin_prepares_a_course_in_few_clicks(
    hub: PayingHub, browser: Browser, tmp_path: Path
) -> None:
    """A roster, a weekly refill, a refund and a drain: all from the menu, nothing typed twice."""
    hub.start_server("bob", "ruined", gpus=1, gpu_model="A100")
    ruined = hub.services.leases.of_account("member:bob", 500)[0].id
    wait_for(lambda: hub.services.leases.get(ruined).charged, "a charge")
    hub.stop_server("bob", "ruined")
    context = browser.new_context(viewport=WIDE)
    clicks, page = Clicks(context), context.new_page()
    add_cookies(page, hub, ADMIN)
    page.goto(f"{hub.url}/hub/home")

    def go(*path: str) -> None:
        page.get_by_role("button", name="Admin").click()
        menu = page.locator(".dropdown-menu:visible")
        menu.get_by_role("link", name=path[0], exact=True).click()
        for name in path[1:]:
            page.get_by_role("link", name=name, exact=True).click()

    file = tmp_path / "course.csv"
    file.write_text("name,course,groups\ngus,DL202,dl202\nhedi,DL202,dl202\n")
    go("Members")
    page.get_by_label("CSV file").set_input_files(file)
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("button", name="Import").click()
    expect(page.get_by_text("The roster is imported: 2 new")).to_be_visible()

    go("Billing", "Refills")
    page.get_by_label("On (weekly)").select_option("Thursday")
    page.get_by_label("Credits each").fill("25")
    page.get_by_label("For whom").fill("members:dl202")
    page.get_by_label("Reason (shown to members)").fill("exercises")
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("row", name="members:dl202")).to_be_visible()

    go("Sessions")
    page.get_by_role("link", name="Receipt of bob/ruined").click()
    page.get_by_label("Reason (shown to the member)").fill("the GPU was sick")
    page.get_by_role("button", name="Refund").click()
    page.get_by_role("button", name="Refund").click()
    expect(page.get_by_text("The session was refunded.")).to_be_visible()

    go("Devices")
    page.get_by_role("link", name="Drain GPU 0").click()
    page.get_by_label("Reason").fill("a new fan")
    page.get_by_role("button", name="Drain").click()
    expect(page.get_by_text("The GPU is drained")).to_be_visible()
    assert clicks.count <= 19
    context.close()

    services = hub.services
    assert services.roster.roster_member("gus").member
    [refill] = services.refills.all_refills()
    assert refill.audience == ("members:dl202",) and refill.amount == 25 * MICRO
    lease = services.leases.get(ruined)
    assert services.reports.receipt(ruined).items.total == 0 and lease.refunded > 0
    [drained] = services.devices.closures().values()
    assert (drained.actor, drained.reason) == (ADMIN, "a new fan")
    services.devices.undrain(drained.subject, actor=ADMIN)
