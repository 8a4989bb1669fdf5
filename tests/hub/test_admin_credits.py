"""Rates, refills and many grants at once on the admin's pages. Real here: JupyterHub, proxy,
accounting service, Chromium, axe-core; one hub for all."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, timezone
from typing import Any

import pytest
from playwright.sync_api import Browser

from gpuspawner.core.units import MICRO
from tests.support import axe
from tests.support.browser import screenshot
from tests.support.hub import ADMIN
from tests.support.lines import send
from tests.support.pages import sign_in, words
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 800}

CONFIG = """
c.GPURates.by_model = {"*": 1, "A100": 4}
c.GPURates.zone = "Europe/Vienna"
c.JupyterHub.load_groups = {"ml101": {"users": ["ada", "bob"]}}
"""

_DAY = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")[(date.today().weekday() + 3) % 7]
WEEKLY = {
    "rule": f"FREQ=WEEKLY;BYDAY={_DAY};BYHOUR=6;BYMINUTE=0",  # not while the tests run
    "zone": "Europe/Vienna",
    "mode": "add",
    "amount": "25",
    "audience": "members:ml101",
    "reason": "every week",
}


@pytest.fixture(scope="module")
def hub(hubs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PayingHub]:
    """Ada and Bob are in ml101; Cleo is not."""
    with PayingHub(tmp_path_factory.mktemp("admin") / "hub", CONFIG) as hub:
        for user in ("ada", "bob", "cleo"):
            hub.broker.ledger.open_account(user)
        hub.api("POST", "users/cleo").raise_for_status()
        hub.broker.prices.set_rate(
            "2.5", model="T4", hours="Sat, Sun", actor="kim", reason="weekends"
        )
        hub.broker.refills.add_refill(
            hub.broker.refills.plan_refill(
                "FREQ=MONTHLY;BYMONTHDAY=1",
                amount=10 * MICRO,
                audience=["everybody"],
                actor="kim",
                reason="a month",
                starts_at=datetime(2999, 1, 1, tzinfo=timezone.utc),
            )
        )
        yield hub


@pytest.mark.parametrize("path", ["rates", "refills", "bulk"])
@pytest.mark.parametrize(("size", "kind"), [(WIDE, "wide"), (PHONE, "phone")])
def test_pages_in_a_browser(
    hub: PayingHub, browser: Browser, path: str, size: Any, kind: str
) -> None:
    context = browser.new_context(viewport=size)
    page = context.new_page()
    noise: list[str] = []
    sign_in(page, hub, ADMIN, path)
    page.on("console", lambda message: noise.append(message.text))
    page.reload()
    screenshot(page, f"credits-{path}-{kind}")
    assert noise == []
    assert page.locator("table th:not([scope])").count() == 0
    across = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(across) == 0
    assert axe.troubles(page, "landmark-unique") == []
    context.close()


@pytest.mark.parametrize("path", ["rates", "refills", "bulk"])
def test_they_are_for_admins(hub: PayingHub, path: str) -> None:
    assert hub.page("ada", path).status_code == 403
    refused = send(hub, "ada", path, confirm="yes", lines="ada,5,x", rate="0", **WEEKLY)
    assert refused.status_code == 403
    assert len(hub.broker.refills.all_refills()) == 1
    assert hub.json("ada", "refills").status_code == 403
    told = hub.json("ada", "rates").json()["rates"]
    assert told[0]["rate_per_hour"] == "2.500000"
    assert all("actor" not in rate for rate in told)
    assert hub.json(ADMIN, "refills").json()["refills"][0]["amount"] == "10.000000"


# Many at once.


def test_a_file_is_shown_then_given_once(hub: PayingHub) -> None:
    before = {user: hub.broker.ledger.member(user).balance for user in ("ada", "bob")}
    lines = "\ufeffmember;amount;reason\r\nada;2.5;week 1\r\nbob;3;<week> 1\r\n"
    shown = words(send(hub, ADMIN, "bulk", lines=lines))
    assert "What it would do 2 lines, 5.50 credits" in shown
    assert "&lt;week&gt; 1" in shown
    assert {user: hub.broker.ledger.member(user).balance for user in before} == before
    done = words(send(hub, ADMIN, "bulk", lines=lines, confirm="yes"))
    assert "5.50 credits were given to 2 accounts." in done
    again = send(hub, ADMIN, "bulk", lines=lines, confirm="yes")
    assert again.status_code == 400
    assert "The same grants were given at" in words(again)
    assert hub.broker.ledger.member("ada").balance == before["ada"] + 5 * MICRO // 2
    assert hub.broker.ledger.member("bob").balance == before["bob"] + 3 * MICRO


def test_a_file_is_uploaded_and_confirmed(hub: PayingHub, browser: Browser) -> None:
    before = hub.broker.ledger.member("cleo").balance
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    sign_in(page, hub, ADMIN, "bulk")
    file = {"name": "grants.csv", "mimeType": "text/csv", "buffer": b"cleo,1\ngroup:ml101,50\n"}
    page.get_by_label("A CSV file").set_input_files(files=[file])
    page.get_by_label("Reason for lines without one").fill("autumn")
    page.get_by_label("Open accounts that are not there yet").check()
    with page.expect_navigation():
        page.get_by_role("button", name="Show what it would do").click()
    screenshot(page, "credits-bulk-shown")
    assert "is opened" in page.inner_text("main")
    with page.expect_navigation():
        page.get_by_role("button", name="Give all of it").click()
    assert "51.00 credits were given to 2 accounts." in page.inner_text("main")
    context.close()
    assert hub.broker.ledger.member("cleo").balance == before + MICRO
    assert hub.broker.ledger.account("group:ml101").balance == 50 * MICRO
    group = words(hub.page(ADMIN, "accounts/group:ml101"))
    assert "Members of this group may draw on it: ada, bob." in group
    assert hub.json("ada", "accounts/group:ml101").json()["balance"] == "50.000000"
    assert hub.json("cleo", "accounts/group:ml101").status_code == 403
    assert hub.json("ada", "accounts/group:ml101/statement").status_code == 403


def test_a_member_keeps_who_pays(hub: PayingHub) -> None:
    hub.broker.bulk_grants.grant_file(
        b"group:ml101,20", actor="kim", reason="x", open_accounts=True, again=True
    )
    page = words(hub.page("ada"))
    assert "Who pays for me" in page and "group:ml101" in page
    done = words(send(hub, "ada", "payer", account="group:ml101"))
    assert "Kept: group:ml101 pays when you do not say another one." in done
    assert hub.broker.ledger.payers("ada", ["ml101"]).usual == "group:ml101"
    for account in ("member:bob", "group:other", "system:grants", "x", ""):
        refused = send(hub, "ada", "payer", account=account)
        assert refused.status_code in (400, 403), account
        assert hub.broker.ledger.payers("ada", ["ml101"]).usual == "group:ml101"
    assert "Who pays for me" not in words(hub.page("cleo"))
    stranger = send(hub, "cleo", "payer", account="group:ml101")
    assert stranger.status_code == 403


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("", "There is nothing in it"),
        ("nobody-known,5,x", "there is no account 'member:nobody-known'"),
        ('ada,"1,5",x', "Line 1"),
        ("ada,NaN,x\nbob,5,x", "Line 1"),
        ("ada,5,x\nada,6,x", "Line 2"),
        ("ada,1" + "0" * 30 + ",x", "Line 1"),
        ("ada,0.123456789012345678,x", "Line 1"),
        ("ada,-5,x", "Line 1"),
    ],
)
def test_a_file_with_a_mistake_gives_nothing(hub: PayingHub, lines: str, sentence: str) -> None:
    before = hub.broker.ledger.accounts()
    answer = send(hub, ADMIN, "bulk", lines=lines, confirm="yes")
    assert answer.status_code == 400
    assert "Nothing was given." in words(answer)
    assert sentence in words(answer)
    assert hub.broker.ledger.accounts() == before


# What a running server is told.


def test_an_admin_stops_a_server_for_a_reason(hub: PayingHub, browser: Browser) -> None:
    """Without JavaScript, by keyboard; its member reads the reason."""
    lease = hub.start_server("cleo", gpus=1)
    context = browser.new_context(viewport=PHONE, java_script_enabled=False)
    page = context.new_page()
    sign_in(page, hub, ADMIN, "admin")
    with page.expect_navigation():
        page.get_by_role("button", name="Stop cleo").press("Enter")
    screenshot(page, "admin-stop-phone")
    assert "Stop the server of cleo?" in page.inner_text("main")
    page.get_by_label("Reason, which its member reads").fill("a new <fan>")
    with page.expect_navigation():
        page.get_by_role("button", name="Stop it").press("Enter")
    assert "its member is told why" in page.inner_text("main")
    context.close()
    wait_for(lambda: hub.server("cleo") is None, "the stop", timeout=60)
    ended = hub.broker.lease(lease.id)
    assert (ended.outcome, ended.end_reason) == ("admin", "a new <fan>")
    assert "an admin stopped it" in words(hub.page("cleo", "notices"))
    assert "a new &lt;fan&gt;" in words(hub.page("cleo"))
    (change,) = hub.json(ADMIN, "trail?search=fan").json()["changes"]
    assert (change["actor"], change["action"]) == (ADMIN, "stop")
    again = send(hub, ADMIN, f"leases/{lease.id}/stop", reason="x", confirm="yes")
    assert (again.status_code, "has stopped already" in again.text) == (409, True)


def test_a_stop_needs_an_admin_and_a_reason(hub: PayingHub) -> None:
    lease = hub.start_server("cleo", "kept", gpus=0)
    path = f"leases/{lease.id}/stop"
    assert send(hub, "ada", path, reason="x", confirm="yes").status_code == 404
    for reason, sentence in (("", "The reason is missing"), ("x" * 301, "300 is the most")):
        refused = send(hub, ADMIN, path, reason=reason, confirm="yes")
        assert refused.status_code == 400
        assert sentence in words(refused) and "Stop the server of cleo?" in words(refused)
    assert hub.broker.lease(lease.id).outcome == "" and hub.server("cleo", "kept")


def test_credits_are_given_until_a_day(hub: PayingHub) -> None:
    """By the clock of the hub's own zone for dates: Vienna's."""
    path, sent = "accounts/member:bob/grant", {"amount": "7", "reason": "term", "key": "term-7"}
    asked = words(send(hub, ADMIN, path, until="2999-07-01", **sent))
    assert "They end" in asked
    done = send(hub, ADMIN, path, until="2999-07-01", confirm="yes", **sent)
    assert "The credits were given." in words(done)
    ((ends_at, left),) = hub.broker.ledger.ending_of(["member:bob"])["member:bob"]
    assert (f"{ends_at:%Y-%m-%d %H:%M}", left) == ("2999-06-30 22:00", 7 * MICRO)
    assert "7.00 of them end at" in words(hub.page("bob"))
    for until in ("soon", "2020-01-01", "2999-02-30"):
        refused = send(hub, ADMIN, path, **{**sent, "until": until, "confirm": "yes", "key": "k"})
        assert refused.status_code == 400, until
    assert len(hub.broker.ledger.lots_of("member:bob")) == 1


# Rates and refills.


def test_a_rate_is_set_and_removed(hub: PayingHub) -> None:
    fields = {"rate": "7.25", "model": "A100", "environment": "course", "reason": "a course"}
    before = hub.broker.prices.all_rates().rates
    asked = words(send(hub, ADMIN, "rates", **fields))
    assert "Set this rate?" in asked and "7.25" in asked
    assert hub.broker.prices.all_rates().rates == before
    done = words(send(hub, ADMIN, "rates", confirm="yes", **fields))
    assert "The rate is set" in done and "course" in done
    (rate,) = [rate for rate in hub.broker.prices.all_rates().rates if rate.environment == "course"]
    assert (rate.amount, rate.actor, rate.reason) == (7_250_000, ADMIN, "a course")
    assert "Remove this rate?" in words(send(hub, ADMIN, f"rates/{rate.id}/remove"))
    assert "Removed." in words(send(hub, ADMIN, f"rates/{rate.id}/remove", confirm="yes"))
    gone = send(hub, ADMIN, f"rates/{rate.id}/remove", confirm="yes")
    assert gone.status_code == 400
    assert "There is no rate" in words(gone)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"rate": ""}, "'rate' is empty"),
        ({"rate": "NaN"}, "'rate'"),
        ({"rate": "1,5"}, "'rate'"),
        ({"rate": "-1"}, "'rate'"),
        ({"rate": "1" + "0" * 30}, "'rate'"),
        ({"since": "2020-01-01"}, "that is over"),
        ({"hours": "Mon-Fri 99"}, "'hours'"),
        ({"reason": "x" * 400}, "300 is the most"),
    ],
)
def test_a_rate_with_a_mistake_changes_nothing(
    hub: PayingHub, fields: dict[str, str], sentence: str
) -> None:
    before = hub.broker.prices.all_rates().rates
    sent = {"rate": "2", "model": "A100", **fields}
    confirm = {} if not sent["rate"] else {"confirm": "yes"}
    answer = send(hub, ADMIN, "rates", **confirm, **sent)
    assert answer.status_code == 400
    assert sentence in words(answer)
    assert hub.broker.prices.all_rates().rates == before


def test_a_refill_is_previewed_made_and_ended(hub: PayingHub) -> None:
    asked = words(send(hub, ADMIN, "refills", **WEEKLY))
    assert "Make this refill?" in asked
    assert "50.00 credits to 2 accounts: member:ada 25.00, member:bob 25.00" in asked
    assert len(hub.broker.refills.all_refills()) == 1
    for _ in range(2):
        done = words(send(hub, ADMIN, "refills", confirm="yes", key="weekly-1", **WEEKLY))
        assert "The refill is made." in done
    (made,) = [refill for refill in hub.broker.refills.all_refills() if refill.made_by == ADMIN]
    assert "End this refill?" in words(send(hub, ADMIN, f"refills/{made.id}/end"))
    assert "The refill is ended" in words(send(hub, ADMIN, f"refills/{made.id}/end", confirm="yes"))
    assert len(hub.broker.refills.all_refills()) == 1
    trail = hub.json(ADMIN, "trail?search=refill").json()["changes"]
    assert {"refill_add", "refill_end"} <= {change["action"] for change in trail}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"rule": "FREQ=SECONDLY"}, "comes too often"),
        ({"rule": "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30"}, "never comes"),
        ({"rule": "nonsense"}, "is no recurrence rule"),
        ({"zone": "Mars/Base"}, "no time zone"),
        ({"amount": "-5"}, "gives nothing"),
        ({"amount": "1,5"}, "'1,5'"),
        ({"cap": "0"}, "'cap'"),
        ({"keep": "x"}, "'keep'"),
        ({"mode": "x"}, "'mode'"),
        ({"audience": "ada"}, "names nobody"),
        ({"audience": ""}, "Say who gets it"),
        ({"reason": ""}, "The reason is missing"),
    ],
)
def test_a_refill_with_a_mistake_is_not_made(
    hub: PayingHub, fields: dict[str, str], sentence: str
) -> None:
    answer = send(hub, ADMIN, "refills", confirm="yes", **{**WEEKLY, **fields})
    assert answer.status_code == 400
    assert sentence in words(answer)
    assert len(hub.broker.refills.all_refills()) == 1
