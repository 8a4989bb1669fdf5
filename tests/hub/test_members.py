"""A member's first day and last, and how they are told of what happens. Real: JupyterHub, proxy,
accounting service, local servers, kill -9, Apprise, an SMTP server, Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser, Page, expect

from gpuspawner.core.units import MICRO
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.notifications.repository import ChannelChoice
from tests.support.browser import screenshot, show_notifications
from tests.support.http_client import new_session
from tests.support.hub import ADMIN, USER_PASSWORD
from tests.support.mail import MailServer
from tests.support.page_text import text_of
from tests.support.pages import (
    WIDE,
    Clicks,
    add_cookies,
    ask,
    look_over,
    look_over_page,
    send_sign_in,
    served,
    sign_in,
    words,
)
from tests.support.paying_hub import PayingHub
from tests.support.processes import free_port, wait_for
from tests.support.telling import choose, now, tell

LAB = ["ada", "bob", "cleo", "dan", "eve", "fay", "gil", "gus", "kai"]
"""Members by a group of the hub; the others are on the roster."""

CONFIG = """
c.JupyterHub.authenticator_class = "gpu-members-shared-password"
c.Authenticator.allow_all = False
c.MemberMixin.roster = True
c.MemberMixin.allowed_groups = {{"lab"}}
c.JupyterHub.load_groups = {{"lab": {{"users": {lab!r}}}}}
c.GPURates.by_model = {{"A100": 3600, "T4": 1}}
c.GPUMembers.grace_minutes = 0.1
c.GPUNotifications.channels = {{
    "mail": {{"url": {mail!r}, "label": "Mail"}},
    "team": {{"url": "json://127.0.0.1:{nobody}/T0KEN", "label": "The lab's chat"}},
    "push": {{"url": "ntfy://127.0.0.1:{nobody}/{{address}}", "label": "Push to a phone",
              "pattern": "[a-z-]{{4,40}}", "example": "my-own-topic"}},
}}
service_constants["gpuspawner.service.notifier.RETRY_SECONDS"] = [0.2] * 2000
"""
"""An A100 costs a credit a second: who has 400 is warned at once."""

TRICK = "<script>alert('a title')</script>"


@pytest.fixture(scope="module")
def mail() -> Iterator[MailServer]:
    with MailServer() as mail:
        yield mail


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path, mail: MailServer) -> Iterator[PayingHub]:
    config = CONFIG.format(lab=LAB, mail=mail.url, nobody=free_port())
    with PayingHub(folder / "hub", config) as hub:
        put_on_roster(hub, "amy,", "ben,", "cara,")
        yield hub


# Who is a member.


def put_on_roster(hub: PayingHub, *lines: str) -> None:
    text = "\n".join(("name,ends", *lines))
    assert hub.services.roster.import_roster(text.encode(), actor="eva").done


def test_new_member_sees_the_welcome_page_once(hub: PayingHub, browser: Browser) -> None:
    page = browser.new_context(viewport=WIDE).new_page()
    page.goto(hub.url)
    send_sign_in(page, "amy")
    expect(page.get_by_role("heading", name="Welcome, amy")).to_be_visible()
    for heading in ("Credits pay for GPUs", "you wait in the queue", "Your files are in work"):
        expect(page.get_by_role("heading", name=heading)).to_be_visible()
    expect(page.get_by_text("You have 100.00 credits")).to_be_visible()
    expect(page.get_by_text("T4: 1.00 an hour, enough for 100 hours")).to_be_visible()
    work = Path(hub.folder) / "workspaces" / "amy" / "work"
    wait_for(work.is_dir, "the workspace, before any start")
    page.goto(hub.url)
    page.wait_for_url(re.compile("/hub/spawn"))
    page.goto(f"{hub.url}/hub/home")
    page.get_by_role("link", name="Quick start guide").click()
    page.get_by_role("link", name="Start a server").click()
    page.wait_for_url(re.compile("/hub/spawn"))
    assert not hub.services.members.welcome_due("amy"), "it is in the store"
    page.context.close()


def test_members_of_a_hub_group_sign_in_and_others_read_why_not(hub: PayingHub) -> None:
    def form(user: str, password: str = USER_PASSWORD) -> requests.Response:
        data = {"username": user, "password": password}
        return hub.post_form(new_session(), "/hub/login", data)

    page = form("<img src=x onerror=alert(1)>")
    assert page.status_code == 403 and "<img src=x" not in page.text
    assert (
        "You signed in as '<img src=x onerror=alert(1)>', but this account is not on the list of "
        "members; it is in no group that may use this hub; this name is not on the roster of "
        "members." in text_of(page.text)
    )
    page = form("ben", "ein falsches Paßwort")
    assert page.status_code == 403 and "Invalid username or password" in page.text

    hub.api("POST", "users/late").raise_for_status()
    assert form("late").status_code == 403
    hub.api("POST", "groups/lab/users", json={"users": ["late"]}).raise_for_status()
    assert form("late").url == f"{hub.url}/hub/welcome/first"


def test_welcome_page_does_not_replace_a_direct_link(hub: PayingHub) -> None:
    session = hub.login("ben")  # to /hub/home
    assert "Welcome, ben" not in session.get(f"{hub.url}/hub/home", timeout=60).text
    assert "Welcome, ben" in session.get(hub.url, timeout=60).text
    assert "Welcome, ben" not in session.get(hub.url, timeout=60).text


def test_expired_member_is_stopped_and_can_return(hub: PayingHub) -> None:
    session = hub.login("cara")
    assert hub.page("cara").ok
    lease = hub.start_server("cara", gpus=1, gpu_model="T4")
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

    hub.wait_pages()  # the one that was killed may have ended the session itself
    said = text_of(hub.page("cara").text)
    assert "Your membership has ended: the time on the roster ended on" in said
    assert "Your files and credits are kept, but you cannot start servers." in said

    put_on_roster(hub, "cara,")
    wait_for(lambda: not hub.services.members.former_members(), "the return", timeout=60)
    assert hub.services.ledger.member("cara").balance == balance
    hub.login("cara")
    hub.start_server("cara", gpus=1, gpu_model="T4")
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


def test_admin_prepares_a_course_in_few_clicks(
    hub: PayingHub, browser: Browser, tmp_path: Path
) -> None:
    """A roster, a weekly refill, a refund and a drain: all from the menu, nothing typed twice."""
    hub.start_server("ben", "ruined", gpus=1, gpu_model="T4")
    ruined = hub.services.leases.of_account("member:ben", 500)[0].id
    wait_for(lambda: hub.services.leases.get(ruined).charged, "a charge")
    hub.stop_server("ben", "ruined")
    services = hub.services
    known = {entry.user for entry in services.roster.entries()}
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

    def preview(*lines: str) -> None:
        file = tmp_path / "course.csv"
        file.write_text("\n".join(("name,course,groups,ends", *lines)))
        page.get_by_label("CSV file").set_input_files(file)
        page.get_by_role("button", name="Preview").click()

    go("Members")
    preview(*["rea,DL202,dl202,2035-07-31"] * 2)
    expect(page.get_by_role("alert")).to_contain_text("Line 3: rea is on line 2 already for DL202")
    preview("rea,DL202,dl202,2035-07-31", "rob,DL202,dl202,2035-07-31")
    expect(page.get_by_role("heading", name="Preview 2 new, 0 changed")).to_be_visible()
    look_over(page, "membership-preview")
    assert {entry.user for entry in services.roster.entries()} == known
    page.get_by_role("button", name="Import").click()
    expect(page.get_by_text("The roster is imported: 2 new")).to_be_visible()
    assert {entry.user for entry in services.roster.entries()} == known | {"rea", "rob"}

    page.get_by_label("Name, course or group").fill("DL202")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("heading", name="Roster 2")).to_be_visible()
    page.get_by_role("button", name="End rob DL202").click()
    page.get_by_label("Reason").fill("left the course")
    page.get_by_role("button", name="End entry").click()
    expect(page.get_by_text("The roster entry has ended.")).to_be_visible()
    assert services.roster.roster_member("rea").member
    assert not services.roster.roster_member("rob").member
    [ended, imported] = services.audit.trail(2)
    assert (ended.actor, ended.action) == (ADMIN, "roster end")
    assert ended.detail == "DL202: left the course"
    assert (imported.actor, imported.action) == (ADMIN, "roster import")

    go("Billing", "Refills")
    page.get_by_label("On (weekly)").select_option("Thursday")
    page.get_by_label("Credits each").fill("25")
    page.get_by_label("For whom").fill("members:dl202")
    page.get_by_label("Reason (shown to members)").fill("exercises")
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("row", name="members:dl202")).to_be_visible()
    [refill] = services.refills.all_refills()
    assert refill.audience == ("members:dl202",) and refill.amount == 25 * MICRO

    go("Sessions")
    page.get_by_role("link", name="Receipt of ben/ruined").click()
    page.get_by_label("Reason (shown to the member)").fill("the GPU was sick")
    page.get_by_role("button", name="Refund").click()
    page.get_by_role("button", name="Refund").click()
    expect(page.get_by_text("The session was refunded.")).to_be_visible()
    assert services.reports.receipt(ruined).items.total == 0
    assert services.leases.get(ruined).refunded > 0

    go("Devices")
    page.get_by_role("link", name="Drain GPU 0").click()
    page.get_by_label("Reason").fill("a new fan")
    page.get_by_role("button", name="Drain").click()
    expect(page.get_by_text("The GPU is drained")).to_be_visible()
    assert clicks.count <= 23
    context.close()
    [drained] = services.devices.closures().values()
    assert (drained.actor, drained.reason) == (ADMIN, "a new fan")
    services.devices.undrain(drained.subject, actor=ADMIN)


def send_form(
    hub: PayingHub, user: str, fields: dict[str, Any], path: str = "notices"
) -> requests.Response:
    """Open the page of notices as this member, and send its form."""
    hub.page(user, "notices")
    session, page = hub.browser_of(user), "/services/gpu/notices"
    return hub.post_form(session, f"/services/gpu/{path}", fields, page=page)


def mails_to(mail: MailServer, address: str) -> list[str]:
    return [got.subject for got in mail.received if got.to == (address,)]


# How they are told: the form.


def test_member_saves_notification_choices(hub: PayingHub) -> None:
    page = words(hub.page("ada", "notices"))
    said = ("Notification settings", "Mail", "The lab's chat", "My credits run low", "Nothing yet.")
    for text in said:
        assert text in page
    fields = {"address-mail": " ada@lab.example ", "kinds-mail": ["turn", "stopped"]}
    saved = send_form(hub, "ada", fields | {"kinds-team": "session_ends"})
    assert saved.history[0].status_code == 303
    assert "Saved." in words(saved)
    assert hub.services.notifications.choices("ada") == {
        "mail": ChannelChoice(
            "mail", "ada@lab.example", frozenset({NoticeKind.TURN, NoticeKind.STOPPED})
        ),
        "team": ChannelChoice("team", "", frozenset({NoticeKind.SESSION_ENDS})),
        "push": ChannelChoice("push"),
    }
    again = hub.page("ada", "notices").text
    assert 'value="ada@lab.example"' in again
    assert len(re.findall(r"checkbox.*? checked>", again)) == 3
    assert "Choose notifications" in words(hub.page("ada", "billing"))


def test_invalid_notice_choices_are_not_saved(hub: PayingHub) -> None:
    choose(hub.services, "cleo", "push", "cleos-topic")
    before = hub.services.notifications.choices("cleo")
    for fields, sentence in (
        ({"address-mail": "cleo", "kinds-mail": "turn"}, "'cleo' is not an address for Mail."),
        ({"address-mail": "c@x.example\r\nBcc: eve@x.example"}, "is not an address for Mail"),
        ({"address-mail": "<b>cleo</b>"}, "is not an address for Mail"),
    ):
        answer = send_form(hub, "cleo", {"kinds-team": "turn", **fields})
        assert answer.status_code == 400
        assert sentence in words(answer)
        assert "Nothing was saved." in words(answer)
        assert "<b>cleo" not in answer.text
        if fields["address-mail"] == "cleo":
            assert 'value="cleo"' in answer.text, "what was typed is still there"
        assert hub.services.notifications.choices("cleo") == before
    for field in ("url-mail", "user"):
        answer = send_form(hub, "cleo", {field: "x"})
        assert answer.status_code == 400
        assert f"'{field}' is not an option." in words(answer)


def refused_test(hub: PayingHub, user: str) -> requests.Response:
    """The answer to a test so soon after another one that it is refused. One is sent in each
    slot of the clock: when one slot ended meanwhile, the next test is in the same as this one."""

    def refused() -> requests.Response | None:
        answer = send_form(hub, user, {}, "notices/test")
        return None if answer.status_code == 200 else answer

    found = wait_for(lambda: [each for each in [refused()] if each is not None], "a refusal")
    assert found[0].status_code == 400
    return found[0]


def test_member_sends_a_test_notice_by_mail(hub: PayingHub, mail: MailServer) -> None:
    answer = send_form(hub, "dan", {}, "notices/test")
    assert answer.status_code == 400
    assert "Nothing is chosen yet" in words(answer)

    send_form(hub, "dan", {"address-mail": "dan@lab.example", "kinds-mail": "turn"})
    sent = send_form(hub, "dan", {}, "notices/test")
    assert sent.history[0].status_code == 303
    assert "The test was sent." in words(sent)
    assert mails_to(mail, "dan@lab.example") == ["Test notification"]
    assert "A test was sent a moment ago. Wait 20 seconds" in words(refused_test(hub, "dan"))
    tests = [n for n in hub.services.notifications.notices_of("dan") if n.kind is NoticeKind.TEST]
    assert len(mails_to(mail, "dan@lab.example")) == len(tests), "none of the refused one"


def test_failed_test_notice_is_reported(hub: PayingHub) -> None:
    choose(hub.services, "gus", "push", "his-topic")
    answer = send_form(hub, "gus", {}, "notices/test")
    assert answer.ok
    page = words(answer)
    assert "The test was not delivered. Not sent by Push to a phone." in page
    assert "127.0.0.1" not in page


def test_members_see_their_own_notices_escaped(hub: PayingHub) -> None:
    tell(hub.services, "cleo", title=TRICK, body=f"first {TRICK}\nsecond line")
    page = hub.page("cleo", "notices")
    assert TRICK not in page.text
    assert "&lt;script&gt;alert(" in page.text
    assert "second line" in page.text
    assert "alert(" not in hub.page("dan", "notices").text
    assert "alert(" not in hub.json("dan", "notices").text
    scripts = page.headers["Content-Security-Policy"].partition("script-src")[2].partition(";")[0]
    assert "unsafe" not in scripts and "nonce-" in scripts


def test_channel_urls_are_never_shown(hub: PayingHub) -> None:
    for user in ("ada", ADMIN):
        for answer in (hub.page(user, "notices"), hub.json(user, "notices")):
            assert answer.ok
            for hidden in ("json://", "ntfy://", "mailto:", "T0KEN", "127.0.0.1"):
                assert hidden not in answer.text


# The same as JSON.


def test_json_api_reads_and_updates_choices(hub: PayingHub, mail: MailServer) -> None:
    choose(hub.services, "bob", "push", "bobs-topic")
    wish = {"mail": {"address": "bob@lab.example", "kinds": ["credits_low", "stopped"]}}
    answer = hub.call("bob", "PUT", "notices/choices", data=json.dumps(wish | {"push": {}}))
    assert answer.status_code == 200, answer.text
    told = hub.call("bob", "GET", "notices").json()
    found = {channel["name"]: channel for channel in told["channels"]}
    assert found["mail"]["address"] == "bob@lab.example"
    assert found["mail"]["kinds"] == ["stopped", "credits_low"]
    assert (found["push"]["kinds"], found["push"]["example"]) == ([], "my-own-topic")
    assert found["team"]["needs_address"] is False
    assert "test" not in told["kinds"]

    wait_for(lambda: hub.call("bob", "POST", "notices/test").ok, "the next test", timeout=25)
    assert "Test notification" in mails_to(mail, "bob@lab.example")
    newest = hub.call("bob", "GET", "notices").json()["notices"][0]
    assert (newest["kind"], newest["state"], newest["error"]) == ("test", "done", "")
    assert hub.call("bob", "GET", "notices/test").status_code == 405


def test_invalid_json_choices_are_rejected(hub: PayingHub) -> None:
    before = hub.services.notifications.choices("bob")
    for body, sentence in (
        ("", "Send one JSON object of channels"),
        ("[" * 100_000, "Send one JSON object of channels"),
        (json.dumps({"mail": {"address": "x" * 70_000}}), "Send one JSON object of channels"),
        ('{"sms": {}}', "There is no channel 'sms'; there are: mail, team, push."),
        ('{"mail": {"url": "json://evil.example"}}', "'url' is not an option."),
        ('{"mail": {"kinds": ["turn"]}}', "Mail needs an address"),
    ):
        answer = hub.call("bob", "PUT", "notices/choices", data=body)
        assert answer.status_code == 400, body[:60]
        assert sentence in answer.json()["message"]
    assert hub.services.notifications.choices("bob") == before


def test_page_explains_missing_channels(hub: PayingHub) -> None:
    with served(hub, hub.services) as url:
        page = words(ask(hub, "cleo", url + "notices"))
        for offered in ("Send me a test", "Notification settings", "c.GPU"):
            assert offered not in page
        assert "c.GPUNotifications.channels" in words(ask(hub, ADMIN, url + "notices"))


# The whole way.


def test_running_out_of_credits_sends_mail_once(hub: PayingHub, mail: MailServer) -> None:
    address = "eve@lab.example"
    choose(hub.services, "eve", address=address)
    hub.start_with(400, "eve", gpus=1, gpu_model="A100")

    def is_warned() -> bool:
        return any(it.startswith("Your credits last until ") for it in mails_to(mail, address))

    wait_for(is_warned, "the warning")
    hub.set_balance("eve", 0)
    wait_for(
        lambda: "Your server was stopped: the credits have run out" in mails_to(mail, address),
        "the last mail",
    )
    found = mails_to(mail, address)
    assert "Your credits have run out" in found
    assert len(found) == len(set(found)), "each once"
    page = words(hub.page("eve", "notices"))
    assert "Your files are kept" in page


def test_killed_service_loses_no_notices(hub: PayingHub, mail: MailServer) -> None:
    """The mail server is down, the service is killed, and both come back."""
    address = "kai@lab.example"
    choose(hub.services, "kai")
    sent = tell(hub.services, "kai", title="before")
    wait_for(lambda: mails_to(mail, address), "the first mail")
    wait_for(lambda: now(hub.services, sent).sent_at, "it to be noted")
    mail.stop()
    try:
        notices = [tell(hub.services, "kai", title=f"number {n}") for n in range(20)]
        wait_for(lambda: now(hub.services, notices[-1]).tries, "the first tries")
        hub.kill_service()
        notices.append(tell(hub.services, "kai", title="number 20"))
    finally:
        mail.start()
    hub.wait_pages()  # the Hub starts it anew
    wait_for(lambda: all(now(hub.services, n).sent_at for n in notices), "all of them")
    found = mails_to(mail, address)
    assert set(found) == {"before", *(f"number {n}" for n in range(21))}
    assert found.count("before") == 1


# What it looks like.


def test_notices_page_works_without_javascript(
    hub: PayingHub, browser: Browser, mail: MailServer
) -> None:
    """By hand and without scripts: choose, save, be told what is wrong, send a test."""
    page = browser.new_context(viewport=WIDE, java_script_enabled=False).new_page()
    sign_in(page, hub, "fay", "notices")
    page.get_by_label("Address").first.fill("fay")
    group = page.get_by_role("group", name="Mail")
    group.get_by_label("My credits run low").check()
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("alert")).to_contain_text("Nothing was saved.")
    screenshot(page, "notices-mistake")

    page.get_by_label("Address").first.fill("fay@lab.example")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status")).to_contain_text("Saved.")
    expect(group.get_by_label("My credits run low")).to_be_checked()
    tell(
        hub.services,
        "fay",
        kind=NoticeKind.SESSION_ENDS,
        title="Your session ends at 15:40 (CET)",
        body="Save your work, or extend it on your page while nobody waits.",
    )
    page.get_by_role("button", name="Send me a test").click()
    expect(page.get_by_role("status")).to_contain_text("The test was sent.")
    assert mails_to(mail, "fay@lab.example") == ["Test notification"]

    scripted = browser.new_context(viewport=WIDE).new_page()  # without scripts nothing is measured
    sign_in(scripted, hub, "fay", "notices")
    assert look_over_page(scripted, "notices") == []


def browser_that_shows(browser: Browser, *, allowed: bool) -> Page:
    """A page in a browser that allows notifications, or has blocked them."""
    context = browser.new_context(viewport=WIDE)
    show_notifications(context, allowed=allowed)
    return context.new_page()


def shown_later(page: Page) -> int:
    """How many notifications the page has shown, once its clock has gone past its next question."""
    page.clock.fast_forward(15_000)
    return page.locator("output").count()


def test_open_page_shows_notices_in_the_browser(hub: PayingHub, browser: Browser) -> None:
    tell(hub.services, "gil", title="An old notice")
    page = browser_that_shows(browser, allowed=True)
    page.clock.install()
    sign_in(page, hub, "gil", "notices")
    page.get_by_role("button", name="Notify me in this browser").click()
    expect(page.get_by_text("This browser notifies you while")).to_be_visible()
    screenshot(page, "notices-in-this-browser")
    assert page.locator("output").count() == 0

    # On every page of the hub, the Hub's own too.
    for path in ("/services/gpu/", "/services/gpu/cluster", "/hub/home"):
        page.goto(f"{hub.url}{path}", wait_until="networkidle")
        if path == "/hub/home":  # RequireJS gives up on a module that takes long by this clock
            page.wait_for_function("require.defined('home')")
        title = f"It is your turn, seen on {path}"
        tell(hub.services, "gil", title=title, body="Your server starts.")
        wait_for(lambda: shown_later(page), "the notice on the page")
        expect(page.locator("output")).to_have_text([f"{title}: Your server starts."])

    page.goto(f"{hub.url}/services/gpu/notices")
    page.get_by_role("button", name="Turn off").click()
    expect(page.get_by_role("button", name="Notify me in this browser")).to_be_visible()
    assert page.evaluate("localStorage['gpuspawner-notify:gil']") == "off"
    page.context.close()


def test_blocked_browser_notifications_are_explained(hub: PayingHub, browser: Browser) -> None:
    page = browser_that_shows(browser, allowed=False)
    sign_in(page, hub, "bob", "notices")
    expect(page.get_by_text("This browser blocks notifications from this site.")).to_be_visible()
    assert page.get_by_role("button", name="Notify me in this browser").count() == 0
    page.context.close()


def test_newest_notices_are_for_their_member_only(hub: PayingHub) -> None:
    tell(hub.services, "bob", title="For Bob")
    told = hub.browser_of("bob").get(f"{hub.url}/hub/notices").json()
    assert told["notices"][0]["title"] == "For Bob" and told["as_of"]
    assert "For Bob" not in hub.browser_of("cleo").get(f"{hub.url}/hub/notices").text
    assert requests.get(f"{hub.url}/hub/notices", timeout=120).status_code == 403
