"""Pages of accounts and credits, rates, refills and many grants at once. Real here: JupyterHub,
proxy, accounting service, local servers, Chromium, axe-core; one hub for all."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease
from tests.support import axe
from tests.support.batch_jobs import CLUSTER, look_since, run
from tests.support.browser import screenshot
from tests.support.hub import ADMIN, NAVIGATION
from tests.support.pages import PHONE, sign_in, words
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

TRICK = "=cmd|'/c calc'!A1 <script>alert(1)</script>"

_DAY = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")[(date.today().weekday() + 3) % 7]
WEEKLY = {
    "rule": f"FREQ=WEEKLY;BYDAY={_DAY};BYHOUR=6;BYMINUTE=0",  # not while the tests run
    "zone": "Europe/Vienna",
    "mode": "add",
    "amount": "25",
    "audience": "members:ml101",
    "reason": "every week",
}

CONFIG = """
c.GPURates.by_model = {"*": 1, "A100": 4}
c.GPURates.zone = "Europe/Vienna"
c.GPUCredits.grace_seconds = 3600
c.JupyterHub.load_groups = {"ml101": {"users": ["ada", "bob"]}}
"""


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    """Ada has a session that is over and one that runs; Bob has nothing running; of Carl and of
    somebody unknown a job of sbatch ended yesterday."""
    with PayingHub(folder / "hub", CONFIG) as hub:
        for user in ("ada", "bob"):
            hub.services.ledger.open_account(user)
        hub.start_server("ada", "past", gpus=1, gpu_model="A100")
        wait_for(lambda: seen_for_a_second(past_lease(hub)), "proof of a second's session")
        hub.stop_server("ada", "past")
        hub.start_server("ada", gpus=1)
        hub.services.ledger.grant("member:ada", 12 * MICRO, actor="kim", reason=TRICK)
        hub.services.ledger.open_account("carl")
        began = hub.services.clock() - timedelta(days=1)
        look_since(hub.services, began)
        jobs = [run(1, began, 5400, gpus={"a100": 2}, user="carl"), run(2, began, user="eve")]
        assert hub.services.job_billing.debit(CLUSTER, jobs).jobs == 1
        furnish_admins_pages(hub)
        yield hub


def furnish_admins_pages(hub: PayingHub) -> None:
    """A rate and a refill, and Cleo, who is in no group."""
    hub.services.ledger.open_account("cleo")
    hub.api("POST", "users/cleo").raise_for_status()
    hub.services.prices.set_rate(
        "2.5", model="T4", environment="seminar", hours="Sat, Sun", actor="kim", reason="weekends"
    )
    hub.services.refills.add_refill(
        hub.services.refills.plan_refill(
            "FREQ=MONTHLY;BYMONTHDAY=1",
            amount=10 * MICRO,
            audience=["everybody"],
            actor="kim",
            reason="a month",
            starts_at=datetime(2999, 1, 1, tzinfo=timezone.utc),
        )
    )


def seen_for_a_second(lease: Lease) -> bool:
    """Return True if a second of the session is charged, whatever happens next."""
    since, seen = lease.started_at, lease.seen_at
    return bool(lease.charged and since and seen and seen - since >= timedelta(seconds=1))


def past_lease(hub: PayingHub) -> Lease:
    (found,) = [
        x for x in hub.services.leases.of_account("member:ada", 500) if x.server.name == "past"
    ]
    return found


# What it looks like, and whether everybody can use it.


def test_axe_check_detects_a_missing_label(browser: Browser) -> None:
    """The check in test_every_page.py is not blind."""
    page = browser.new_page()
    page.set_content("<html lang=en><title>x</title><main><h1>x</h1><input></main></html>")
    assert [finding.split(":")[0] for finding in axe.troubles(page)] == ["critical label"]


# A member's own.


def test_receipt_and_statement_are_printed(hub: PayingHub, browser: Browser) -> None:
    """Without the navigation and all that can be pressed, and with the details opened."""
    lease = hub.services.leases.of_account("member:ada")[0].id
    page = browser.new_context().new_page()
    page.add_init_script("window.print = () => dispatchEvent(new Event('beforeprint'))")
    sign_in(page, hub, "ada", f"leases/{lease}")
    for name in ("receipt", "statement"):
        if name == "statement":
            page.emulate_media(media="screen")
            page.goto(f"{hub.url}/services/gpu/statement")
        page.get_by_role("button", name="Print or save as PDF").click()
        page.emulate_media(media="print")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        for pressed in ("nav", "button", "form", "footer"):
            assert not any(each.is_visible() for each in page.locator(pressed).all()), pressed
        details = page.locator("main details").all()
        assert details and all(each.get_attribute("open") is not None for each in details)
        screenshot(page, f"credits-{name}-print")
        assert page.pdf().startswith(b"%PDF")


def test_statement_csv_is_complete_and_escaped(hub: PayingHub) -> None:
    answer = hub.page("ada", "statement.csv")
    assert 'filename="statement-member-ada.csv"' in answer.headers["Content-Disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert Decimal(rows[0]["balance"]) == sum(Decimal(row["amount"]) for row in rows)
    (trick,) = [row for row in rows if row["actor"] == "kim"]
    assert trick["reason"] == "'" + TRICK
    assert trick["amount"] == "12.000000"
    assert any(row["amount"].startswith("-") for row in rows)


def test_member_cannot_open_pages_of_others(hub: PayingHub) -> None:
    """Every other page and file: see tests/attacks/test_members.py."""
    lease, not_yours = past_lease(hub).id, "This session is not yours"
    transfer = hub.services.reports.statement_page("member:ada").entries[-1].transfer
    for path, sentence in {
        "accounts/member:ada": "The account 'member:ada' is not yours",
        "accounts/member:nobody/statement": "The account 'member:nobody' is not yours",
        "accounts": "You do not have access to this page.",
        "usage": "Reports of use are for admins",
        "trail": "You do not have access to this page.",
        f"leases/{lease}": not_yours,
        "leases/0123456789abcdef": not_yours,
        f"transfers/{transfer}": "You do not have access to this page.",
    }.items():
        answer = hub.page("bob", path)
        assert answer.status_code == 403, path
        assert sentence in answer.text.replace("&#39;", "'"), path
        assert not any(hidden in answer.text for hidden in ("A100", "kim", "short")), path


def test_member_stops_own_server_after_confirmation(hub: PayingHub) -> None:
    lease = hub.start_server("ada", "to-stop", gpus=0)
    stranger = hub.send("bob", f"leases/{lease.id}/stop", confirm="yes")
    assert stranger.status_code == 404
    asked = hub.send("ada", f"leases/{lease.id}/stop")
    assert "Stop to-stop?" in words(asked)
    assert hub.server("ada", "to-stop")
    done = hub.send("ada", f"leases/{lease.id}/stop", confirm="yes")
    assert "The server is being stopped." in words(done)
    wait_for(lambda: hub.server("ada", "to-stop") is None, "the stop")
    again = hub.send("ada", f"leases/{lease.id}/stop", confirm="yes")
    assert (again.status_code, "stopped already" in again.text) == (409, True)


# What admins change.


def press(page: Page, name: str) -> None:
    """A button, found by its words and pressed by keyboard."""
    button = page.get_by_role("button", name=name)
    button.focus()
    with page.expect_navigation():
        page.keyboard.press("Enter")


def test_admin_grants_and_reverses_credits(hub: PayingHub, browser: Browser) -> None:
    """Without JavaScript, by keyboard: given, undone by its opposite, and given again."""
    before = hub.services.ledger.member("bob").balance
    context = browser.new_context(viewport=PHONE, java_script_enabled=False)
    page = context.new_page()
    sign_in(page, hub, ADMIN, "accounts/member:bob")
    page.get_by_label("Credits", exact=True).fill("2.5")
    page.get_by_label("Reason (shown to the member)").fill("a <present>")
    press(page, "Give")
    screenshot(page, "credits-confirm-phone")
    assert "Give credits to member:bob?" in page.inner_text("main")
    assert hub.services.ledger.member("bob").balance == before
    press(page, "Give credits")
    assert "The credits were given." in page.inner_text("main")
    assert hub.services.ledger.member("bob").balance == before + 5 * MICRO // 2
    page.get_by_role("link", name="Grant by admin").first.click()
    page.get_by_label("Reason (shown to the member)").fill("the wrong Bob")
    press(page, "Undo")
    assert hub.services.ledger.member("bob").balance == before + 5 * MICRO // 2
    press(page, "Undo")
    assert "This is its reversal." in page.inner_text("main")
    assert hub.services.ledger.member("bob").balance == before
    context.close()
    statement = words(hub.page("bob", "statement"))
    assert "a &lt;present&gt;" in statement and "the wrong Bob" in statement
    trail = words(hub.page(ADMIN, "trail"))
    assert "grant member:bob" in trail and "the wrong Bob" in trail


def test_grant_form_applies_once_and_only_if_valid(hub: PayingHub) -> None:
    path, member = "accounts/member:bob/grant", hub.services.ledger.member
    before = member("bob")
    fields = {"amount": "3", "reason": "once", "confirm": "yes", "key": "0123456789abcdef"}
    for amount, reason, sentence in (
        ("NaN", "x", "'NaN'"),
        ("0", "x", "nothing would change"),
        ("5", "y" * 301, "300 is the most"),
    ):
        answer = hub.send(ADMIN, path, **{**fields, "amount": amount, "reason": reason})
        assert answer.status_code == 400
        assert "Nothing was changed." in words(answer) and sentence in words(answer)
    url = f"{hub.url}/services/gpu/{path}"
    forged = hub.browser_of(ADMIN).post(url, data=fields, headers=NAVIGATION, timeout=120)
    assert forged.status_code == 403
    assert "This form is too old, or came from another page." in words(forged)
    for user, place in (
        ("bob", path),
        ("ada", path),
        ("ada", f"leases/{past_lease(hub).id}/refund"),
    ):
        assert hub.send(user, place, **fields).status_code == 403
    assert member("bob") == before

    assert "The credits were given." in words(hub.send(ADMIN, path, **fields))
    assert "nothing was changed" in words(hub.send(ADMIN, path, **fields))
    assert member("bob").balance == before.balance + 3 * MICRO


def test_session_is_refunded_only_once(hub: PayingHub) -> None:
    lease = past_lease(hub)
    path = f"leases/{lease.id}/refund"
    asked = words(hub.send(ADMIN, path, reason="the GPU was sick"))
    assert "Refund this session?" in asked
    assert past_lease(hub).charged == lease.charged > 0
    part = {"reason": "a slow disk", "amount": "0.000001", "key": "a-part"}
    assert "Refund part of this session?" in words(hub.send(ADMIN, path, **part))
    for _ in range(2):
        given = hub.send(ADMIN, path, confirm="yes", **part)
        assert "a slow disk" in words(given), given.text
        assert past_lease(hub).charged == lease.charged - 1
    assert hub.send(ADMIN, path, reason="x", amount="1000", confirm="yes").status_code == 400
    assert past_lease(hub).refunded == 1
    done = words(hub.send(ADMIN, path, reason="the GPU was sick", confirm="yes"))
    assert "The session was refunded." in done and "the GPU was sick" in done
    assert "Total 0.00" in done
    assert past_lease(hub).charged == 0
    again = hub.send(ADMIN, path, reason="the GPU was sick", confirm="yes")
    assert again.status_code == 400
    assert "refunded already" in again.text
    report = hub.json(ADMIN, "usage?by=model").json()["rows"]
    (row,) = [row for row in report if row["name"] == "A100-80GB"]
    assert (row["credits"], row["sessions"]) == ("0.000000", 1)


def test_account_search_matches_part_of_the_name(hub: PayingHub) -> None:
    page = words(hub.page(ADMIN, "accounts?search=BO"))
    assert "member:bob" in page and "member:ada" not in page
    nobody = words(hub.page(ADMIN, "accounts?search=nobody"))
    assert "No account matches." in nobody
    assert hub.page(ADMIN, "accounts/member:nobody").status_code == 404
    assert hub.page(ADMIN, "accounts/system:grants").status_code == 403
    own = hub.page("bob", "accounts/member:bob")
    assert own.url.endswith("/services/gpu/billing")


def test_reports_agree_across_json_csv_and_html(hub: PayingHub) -> None:
    for by in ("member", "week"):  # every one: see test_rest.py
        told = hub.json(ADMIN, f"usage?by={by}").json()
        rows = list(csv.reader(io.StringIO(hub.page(ADMIN, f"usage.csv?by={by}").text)))
        beside = ["batch_gpu_hours", "batch_credits", "batch_jobs"]
        beside += ["cpu_seconds", "memory_peak_bytes"]
        assert rows[0] == [by, "gpu_seconds", "gpu_hours", "credits", "sessions", *beside]
        total = told["total"]["batch"]
        assert (total["gpu_seconds"], total["jobs"]) == (3 * 3600 + 3600, 2)
        paid = hub.services.ledger.statement("member:carl", 1)[0].amount
        assert Decimal(total["credits"]) == Decimal(-paid) / MICRO
        assert sum(int(row[7]) for row in rows[1:]) == 2
        names = [row["name"] for row in told["rows"]]
        assert [row[0] for row in rows[1:]] == names
        page = words(hub.page(ADMIN, f"usage?by={by}"))
        assert "Total" in page and "Batch jobs" in page
    assert hub.page(ADMIN, "usage?from=2026-13-01").status_code == 400
    trail = list(csv.DictReader(io.StringIO(hub.page(ADMIN, "trail.csv").text)))
    assert [row["action"] for row in trail] == [
        change["action"] for change in hub.json(ADMIN, "trail?limit=500").json()["changes"]
    ]


# Rates, refills and many grants at once.


@pytest.fixture(scope="module")
def nobody_pays(hub: PayingHub) -> None:
    """No server runs for which somebody is charged: balances stay as they are."""
    hub.stop_server("ada")


def test_rates_refills_and_bulk_are_for_admins_only(hub: PayingHub) -> None:
    for path in ("rates", "refills", "bulk"):
        assert hub.page("ada", path).status_code == 403
        refused = hub.send("ada", path, confirm="yes", lines="ada,5,x", rate="0", **WEEKLY)
        assert refused.status_code == 403
    assert len(hub.services.refills.all_refills()) == 1
    assert hub.json("ada", "refills").status_code == 403
    told = hub.json("ada", "rates").json()["rates"]
    assert told[0]["rate_per_hour"] == "2.500000"
    assert all("actor" not in rate for rate in told)
    assert hub.json(ADMIN, "refills").json()["refills"][0]["amount"] == "10.000000"


# Many at once.


@pytest.mark.usefixtures("nobody_pays")
def test_bulk_grant_is_previewed_and_applied_once(hub: PayingHub) -> None:
    accounts = hub.services.ledger.accounts()
    for lines, sentence in (
        ("", "The list is empty"),
        ("nobody-known,5,x", "there is no account 'member:nobody-known'"),
        ('ada,"1,5",x', "Line 1"),
    ):
        answer = hub.send(ADMIN, "bulk", lines=lines, confirm="yes")
        assert answer.status_code == 400
        assert "Nothing was given." in words(answer) and sentence in words(answer)
    assert hub.services.ledger.accounts() == accounts

    before = {user: hub.services.ledger.member(user).balance for user in ("ada", "bob")}
    lines = "\ufeffmember;amount;reason\r\nada;2.5;week 1\r\nbob;3;<week> 1\r\n"
    shown = words(hub.send(ADMIN, "bulk", lines=lines))
    assert "What it would do 2 lines, 5.50 credits" in shown
    assert "&lt;week&gt; 1" in shown
    assert {user: hub.services.ledger.member(user).balance for user in before} == before
    done = words(hub.send(ADMIN, "bulk", lines=lines, confirm="yes"))
    assert "5.50 credits were given to 2 accounts." in done
    again = hub.send(ADMIN, "bulk", lines=lines, confirm="yes")
    assert again.status_code == 400
    assert "The same grants were given at" in words(again)
    assert hub.services.ledger.member("ada").balance == before["ada"] + 5 * MICRO // 2
    assert hub.services.ledger.member("bob").balance == before["bob"] + 3 * MICRO


def test_admin_uploads_and_confirms_a_bulk_grant(hub: PayingHub, browser: Browser) -> None:
    before = hub.services.ledger.member("cleo").balance
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    sign_in(page, hub, ADMIN, "bulk")
    file = {"name": "grants.csv", "mimeType": "text/csv", "buffer": b"cleo,1\ngroup:ml101,50\n"}
    page.get_by_label("CSV file").set_input_files(files=[file])
    page.get_by_label("Reason for lines without one").fill("autumn")
    page.get_by_label("Open accounts that are not there yet").check()
    with page.expect_navigation():
        page.get_by_role("button", name="Preview").click()
    screenshot(page, "credits-bulk-shown")
    assert "is opened" in page.inner_text("main")
    with page.expect_navigation():
        page.get_by_role("button", name="Grant all").click()
    assert "51.00 credits were given to 2 accounts." in page.inner_text("main")
    context.close()
    assert hub.services.ledger.member("cleo").balance == before + MICRO
    assert hub.services.ledger.account("group:ml101").balance == 50 * MICRO
    group = words(hub.page(ADMIN, "accounts/group:ml101"))
    assert "Members of this group can use it: ada, bob." in group
    assert hub.json("ada", "accounts/group:ml101").json()["balance"] == "50.000000"
    assert hub.json("cleo", "accounts/group:ml101").status_code == 403
    assert hub.json("ada", "accounts/group:ml101/statement").status_code == 403


def test_member_chooses_a_default_payer(hub: PayingHub) -> None:
    hub.services.bulk_grants.grant_file(
        b"group:ml101,20", actor="kim", reason="x", open_accounts=True, again=True
    )
    page = words(hub.page("ada", "billing"))
    assert "Who pays" in page and "group:ml101" in page
    done = words(hub.send("ada", "payer", account="group:ml101"))
    assert "Saved: group:ml101 pays unless you choose another account." in done
    assert hub.services.ledger.payers("ada", ["ml101"]).usual == "group:ml101"
    for account in ("group:other", "x", ""):
        refused = hub.send("ada", "payer", account=account)
        assert refused.status_code in (400, 403), account
    assert hub.services.ledger.payers("ada", ["ml101"]).usual == "group:ml101"
    assert "Who pays" not in words(hub.page("cleo", "billing"))
    stranger = hub.send("cleo", "payer", account="group:ml101")
    assert stranger.status_code == 403


# What a running server is told.


def test_admin_stops_a_server_and_member_sees_why(hub: PayingHub, browser: Browser) -> None:
    """Without JavaScript, by keyboard; its member reads the reason."""
    lease = hub.start_server("cleo", gpus=1)
    path = f"leases/{lease.id}/stop"
    assert hub.send("ada", path, reason="x", confirm="yes").status_code == 404
    for reason, sentence in (("", "The reason is missing"), ("x" * 301, "300 is the most")):
        refused = hub.send(ADMIN, path, reason=reason, confirm="yes")
        assert refused.status_code == 400
        assert sentence in words(refused) and "Stop the server of cleo?" in words(refused)
    assert hub.services.leases.get(lease.id).outcome == "" and hub.server("cleo")

    context = browser.new_context(viewport=PHONE, java_script_enabled=False)
    page = context.new_page()
    sign_in(page, hub, ADMIN, "admin")
    with page.expect_navigation():
        page.get_by_role("button", name="Stop cleo").press("Enter")
    screenshot(page, "admin-stop-phone")
    assert "Stop the server of cleo?" in page.inner_text("main")
    page.get_by_label("Reason (shown to the member)").fill("a new <fan>")
    with page.expect_navigation():
        page.get_by_role("button", name="Stop server").press("Enter")
    assert "Its member is notified with the reason" in page.inner_text("main")
    context.close()
    wait_for(lambda: hub.server("cleo") is None, "the stop", timeout=60)
    ended = hub.services.leases.get(lease.id)
    assert (ended.outcome, ended.end_reason) == ("admin", "a new <fan>")
    assert "was stopped by an admin" in words(hub.page("cleo", "notices"))
    assert "a new &lt;fan&gt;" in words(hub.page("cleo"))
    home = hub.open_page("cleo", "/hub/home").text
    assert "Your server was stopped at" in home and "a new &lt;fan&gt;" in home
    (change,) = hub.json(ADMIN, "trail?search=fan").json()["changes"]
    assert (change["actor"], change["action"]) == (ADMIN, "stop")
    again = hub.send(ADMIN, path, reason="x", confirm="yes")
    assert (again.status_code, "has stopped already" in again.text) == (409, True)


def test_granted_credits_can_expire_on_a_date(hub: PayingHub) -> None:
    """By the clock of the hub's own zone for dates: Vienna's."""
    path, sent = "accounts/member:bob/grant", {"amount": "7", "reason": "term", "key": "term-7"}
    asked = words(hub.send(ADMIN, path, until="2999-07-01", **sent))
    assert "Expires" in asked
    done = hub.send(ADMIN, path, until="2999-07-01", confirm="yes", **sent)
    assert "The credits were given." in words(done)
    ((ends_at, left),) = hub.services.ledger.ending_of(["member:bob"])["member:bob"]
    assert (f"{ends_at:%Y-%m-%d %H:%M}", left) == ("2999-06-30 22:00", 7 * MICRO)
    assert "7.00 of them expire at" in words(hub.page("bob", "billing"))
    for until in ("2020-01-01", "2999-02-30"):
        refused = hub.send(ADMIN, path, **{**sent, "until": until, "confirm": "yes", "key": "k"})
        assert refused.status_code == 400, until
    assert len(hub.services.ledger.lots_of("member:bob")) == 1


# Rates and refills.


def test_admin_sets_and_removes_a_rate(hub: PayingHub) -> None:
    fields = {"rate": "7.25", "model": "A100", "environment": "course", "reason": "a course"}
    before = hub.services.prices.all_rates().rates
    for confirm in ({}, {"confirm": "yes"}):  # the preview refuses it too
        answer = hub.send(ADMIN, "rates", **{**fields, "hours": "Mon-Fri 99"}, **confirm)
        assert answer.status_code == 400 and "'hours'" in words(answer)
    asked = words(hub.send(ADMIN, "rates", **fields))
    assert "Set this rate?" in asked and "7.25" in asked
    assert hub.services.prices.all_rates().rates == before
    done = words(hub.send(ADMIN, "rates", confirm="yes", **fields))
    assert "The rate is set" in done and "course" in done
    (rate,) = [
        rate for rate in hub.services.prices.all_rates().rates if rate.environment == "course"
    ]
    assert (rate.amount, rate.actor, rate.reason) == (7_250_000, ADMIN, "a course")
    assert "Remove this rate?" in words(hub.send(ADMIN, f"rates/{rate.id}/remove"))
    removed = hub.send(ADMIN, f"rates/{rate.id}/remove", confirm="yes")
    assert "The rate is removed." in words(removed)
    gone = hub.send(ADMIN, f"rates/{rate.id}/remove", confirm="yes")
    assert gone.status_code == 400
    assert "There is no rate" in words(gone)


def test_admin_previews_creates_and_ends_a_refill(hub: PayingHub) -> None:
    for wrong, sentence in (
        ({"rule": "FREQ=SECONDLY"}, "comes too often"),
        ({"keep": "x"}, "'keep'"),
        ({"mode": "x"}, "'mode'"),
        ({"audience": "ada"}, "is not an audience"),
    ):
        answer = hub.send(ADMIN, "refills", confirm="yes", **{**WEEKLY, **wrong})
        assert answer.status_code == 400 and sentence in words(answer)
    asked = words(hub.send(ADMIN, "refills", **WEEKLY))
    assert "Create this refill?" in asked
    assert "50.00 credits to 2 accounts: member:ada 25.00, member:bob 25.00" in asked
    assert len(hub.services.refills.all_refills()) == 1
    monthly = {**WEEKLY, "rule": "", "every": "month", "monthday": "3", "at": "07:05"}
    asked = words(hub.send(ADMIN, "refills", **monthly))
    assert "on day 3 of every month at 07:05 (" in asked and "50.00 credits to 2" in asked
    assert "hour must be" in words(hub.send(ADMIN, "refills", **{**monthly, "at": "25:00"}))
    for _ in range(2):
        done = words(hub.send(ADMIN, "refills", confirm="yes", key="weekly-1", **WEEKLY))
        assert "The refill is created." in done
    (made,) = [refill for refill in hub.services.refills.all_refills() if refill.made_by == ADMIN]
    assert "End this refill?" in words(hub.send(ADMIN, f"refills/{made.id}/end"))
    assert "The refill has ended" in words(hub.send(ADMIN, f"refills/{made.id}/end", confirm="yes"))
    assert len(hub.services.refills.all_refills()) == 1
    trail = hub.json(ADMIN, "trail?search=refill").json()["changes"]
    assert {"refill_add", "refill_end"} <= {change["action"] for change in trail}
