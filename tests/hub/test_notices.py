"""Being told. Real: JupyterHub, proxy, accounting service, Apprise, an SMTP server, Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser, Page, expect

from gpuspawner.notifications.models import NoticeKind
from gpuspawner.notifications.repository import ChannelChoice
from tests.support.browser import screenshot, show_notifications
from tests.support.hub import ADMIN
from tests.support.mail import MailServer
from tests.support.pages import (
    WIDE,
    ask,
    look_over_page,
    served,
    sign_in,
    words,
)
from tests.support.paying_hub import PayingHub
from tests.support.processes import free_port, wait_for
from tests.support.telling import choose, now, tell

CONFIG = """
c.GPUNotifications.channels = {{
    "mail": {{"url": {mail!r}, "label": "Mail"}},
    "team": {{"url": "json://127.0.0.1:{nobody}/T0KEN", "label": "The lab's chat"}},
    "push": {{"url": "ntfy://127.0.0.1:{nobody}/{{address}}", "label": "Push to a phone",
              "pattern": "[a-z-]{{4,40}}", "example": "my-own-topic"}},
}}
service_constants["gpuspawner.service.notifier.RETRY_SECONDS"] = [0.2] * 2000
c.GPUCredits.opening_grant = 10
"""
"""A credit a second: on a busy machine a round comes late, and has to find some left."""

TRICK = "<script>alert('a title')</script>"


@pytest.fixture(scope="module")
def mail() -> Iterator[MailServer]:
    with MailServer() as mail:
        yield mail


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path, mail: MailServer) -> Iterator[PayingHub]:
    config = CONFIG.format(mail=mail.url, nobody=free_port())
    with PayingHub(folder / "hub", config) as hub:
        for user in ("ada", "bob", "cleo", "dan"):
            hub.api("POST", f"users/{user}").raise_for_status()
        yield hub


def send_form(
    hub: PayingHub, user: str, fields: dict[str, Any], path: str = "notices"
) -> requests.Response:
    """Open the page of notices as this member, and send its form."""
    hub.page(user, "notices")
    session, page = hub.browser_of(user), "/services/gpu/notices"
    return hub.post_form(session, f"/services/gpu/{path}", fields, page=page)


def mails_to(mail: MailServer, address: str) -> list[str]:
    return [got.subject for got in mail.received if got.to == (address,)]


# The form.


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


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"address-mail": "cleo", "kinds-mail": "turn"}, "'cleo' is not an address for Mail."),
        ({"kinds-mail": "turn"}, "Mail needs an address, or nothing chosen."),
        ({"address-mail": "c@x.example\r\nBcc: eve@x.example"}, "is not an address for Mail"),
        ({"address-push": "json://evil.example", "kinds-push": "turn"}, "like my-own-topic"),
        ({"address-team": "json://evil.example"}, "needs no address"),
        ({"kinds-mail": "test", "address-mail": "c@x.example"}, "'test' is not a kind of"),
        ({"address-mail": "<b>cleo</b>"}, "is not an address for Mail"),
    ],
)
def test_invalid_notice_choices_are_not_saved(
    hub: PayingHub, fields: dict[str, str], sentence: str
) -> None:
    choose(hub.services, "cleo", "push", "cleos-topic")
    before = hub.services.notifications.choices("cleo")
    answer = send_form(hub, "cleo", {"kinds-team": "turn", **fields})
    assert answer.status_code == 400
    assert sentence in words(answer)
    assert "Nothing was saved." in words(answer)
    assert "<b>cleo" not in answer.text
    if fields.get("address-mail") == "cleo":
        assert 'value="cleo"' in answer.text, "what was typed is still there"
    assert hub.services.notifications.choices("cleo") == before


def test_unknown_form_field_is_rejected(hub: PayingHub) -> None:
    for field in ("url-mail", "address-sms", "kinds-gone", "user"):
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


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("", "Send one JSON object of channels"),
        ("[" * 100_000, "Send one JSON object of channels"),
        (json.dumps({"mail": {"address": "x" * 70_000}}), "Send one JSON object of channels"),
        ('{"sms": {}}', "There is no channel 'sms'; there are: mail, team, push."),
        ('{"mail": {"url": "json://evil.example"}}', "'url' is not an option."),
        ('{"mail": {"kinds": ["turn"]}}', "Mail needs an address"),
        ('{"mail": {"address": 5}}', "must be a text"),
        ('{"mail": {"address": "b@x.example", "kinds": "turn"}}', "must be a list"),
        ('{"mail": {"address": "b@x.example", "kinds": [{}]}}', "is not a kind of notification"),
    ],
)
def test_invalid_json_choices_are_rejected(hub: PayingHub, body: str, sentence: str) -> None:
    before = hub.services.notifications.choices("bob")
    answer = hub.call("bob", "PUT", "notices/choices", data=body)
    assert answer.status_code == 400
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
    hub.api("POST", "users/eve").raise_for_status()
    choose(hub.services, "eve", address=address)
    hub.start_server("eve", gpus=1)
    wait_for(
        lambda: "Your server was stopped: the credits have run out" in mails_to(mail, address),
        "the last mail",
    )
    found = mails_to(mail, address)
    assert "Your credits have run out" in found
    assert any(subject.startswith("Your credits last until ") for subject in found)
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
    hub.api("POST", "users/gil").raise_for_status()
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
        page.goto(f"{hub.url}{path}", wait_until="networkidle")  # RequireJS measures time too
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
