"""Pages of accounts and credits. Real here: JupyterHub, proxy, accounting service, local servers,
Chromium, axe-core; one hub for all."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser, Page

from gpuspawner.core.units import MICRO
from gpuspawner.leases import repository as leases_repository
from gpuspawner.leases.models import Lease, LeaseState, ServerRef
from gpuspawner.monitoring.models import DeviceUse
from tests.support import axe
from tests.support.batch_jobs import CLUSTER, look_since, run
from tests.support.browser import screenshot
from tests.support.hub import ADMIN, NAVIGATION
from tests.support.pages import sign_in, words
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 800}
TRICK = "=cmd|'/c calc'!A1 <script>alert(1)</script>"

CONFIG = """
c.GPURates.by_model = {"*": 1, "A100": 4}
c.GPUCredits.grace_seconds = 3600
c.JupyterHub.load_groups = {"ml101": {"users": ["ada", "bob"]}}
"""


@pytest.fixture(scope="module")
def hub(hubs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PayingHub]:
    """Ada has a session that is over and one that runs; Bob has nothing running; of Carl and of
    somebody unknown a job of sbatch ended yesterday."""
    with PayingHub(tmp_path_factory.mktemp("credits") / "hub", CONFIG) as hub:
        for user in ("ada", "bob"):
            hub.broker.ledger.open_account(user)
        hub.start_server("ada", "past", gpus=1, gpu_model="A100")
        wait_for(lambda: seen_for_a_second(past_lease(hub)), "proof of a second's session")
        hub.stop_server("ada", "past")
        hub.start_server("ada", gpus=1)
        hub.broker.ledger.grant("member:ada", 12 * MICRO, actor="kim", reason=TRICK)
        hub.broker.ledger.open_account("carl")
        began = hub.broker.clock() - timedelta(days=1)
        look_since(hub.broker, began)
        jobs = [run(1, began, 5400, gpus={"a100": 2}, user="carl"), run(2, began, user="eve")]
        assert hub.broker.job_billing.debit(CLUSTER, jobs).jobs == 1
        yield hub


def seen_for_a_second(lease: Lease) -> bool:
    """What was seen of a session is charged, whatever comes."""
    since, seen = lease.started_at, lease.seen_at
    return bool(lease.charged and since and seen and seen - since >= timedelta(seconds=1))


def past_lease(hub: PayingHub) -> Lease:
    (found,) = [x for x in hub.broker.leases_of("member:ada", 500) if x.server.name == "past"]
    return found


def send(hub: PayingHub, user: str, path: str, **fields: str) -> requests.Response:
    """A form of the page, as this member's browser sends it, with the page's XSRF token."""
    hub.page(user)
    browser = hub._browsers[user]
    cookie = browser.cookies.get("_xsrf", "", path="/services/gpu/")
    url = f"{hub.url}/services/gpu/{path}"
    data = {"_xsrf": cookie, **fields}
    return browser.post(url, data=data, headers=NAVIGATION, timeout=120)


# What it looks like, and whether everybody can use it.


OUTSIDE = """
[...document.querySelectorAll("dd")].filter(cell => {
    const text = document.createRange()
    text.selectNodeContents(cell)
    return text.getBoundingClientRect().right > cell.getBoundingClientRect().right + 1
}).map(cell => cell.innerText)
"""
"""What sticks out of its place in a list."""


@pytest.mark.parametrize(
    ("user", "path", "name"),
    [
        ("ada", "", "credits-member"),
        ("ada", "statement", "credits-statement"),
        ("ada", "leases/{lease}", "credits-receipt"),
        (ADMIN, "accounts", "credits-accounts"),
        (ADMIN, "accounts/member:ada", "credits-account"),
        (ADMIN, "transfers/{transfer}", "credits-transfer"),
        (ADMIN, "leases/{lease}", "credits-refund"),
        (ADMIN, "usage", "credits-usage"),
        (ADMIN, "trail", "credits-trail"),
        (ADMIN, "admin", "credits-everyone"),
        (ADMIN, "queue", "credits-queue"),
        ("ada", "notices", "credits-notices"),
    ],
)
@pytest.mark.parametrize(("size", "kind"), [(WIDE, "wide"), (PHONE, "phone")])
def test_pages_in_a_browser(
    hub: PayingHub, browser: Browser, user: str, path: str, name: str, size: Any, kind: str
) -> None:
    """Nothing sticks out, nothing comes from elsewhere, and axe finds nothing serious."""
    transfer = hub.broker.reports.statement_page("member:ada").entries[-1].transfer
    path = path.format(lease=past_lease(hub).id, transfer=transfer)
    context = browser.new_context(viewport=size)
    page = context.new_page()
    noise: list[str] = []
    sign_in(page, hub, user, path)
    page.on("console", lambda message: noise.append(message.text))
    page.reload()
    screenshot(page, f"{name}-{kind}")
    assert noise == []
    assert page.locator("h1").count() == 1
    assert page.locator("table th:not([scope])").count() == 0
    across = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(across) == 0
    assert page.evaluate(OUTSIDE) == [], "what is side by side does not touch"
    assert axe.troubles(page, "landmark-unique") == []
    context.close()


def test_a_finding_of_axe_would_be_seen(browser: Browser) -> None:
    """The check above is not blind."""
    page = browser.new_page()
    page.set_content("<html lang=en><title>x</title><main><h1>x</h1><input></main></html>")
    assert [finding.split(":")[0] for finding in axe.troubles(page)] == ["critical label"]


# A member's own.


def test_a_member_sees_what_their_balance_means(hub: PayingHub) -> None:
    page = words(hub.page("ada"))
    assert re.search(r"\d+ d \d+ h on one A100-80GB \(80 GB, 4\.00 an hour\)", page)
    assert re.search(r"on one T4 \(16 GB, 1\.00 an hour\)", page)
    assert "My last weeks" in page
    assert "<svg" in hub.page("ada").text
    assert "Receipt so far" in page


def test_a_receipt_adds_up(hub: PayingHub) -> None:
    lease = past_lease(hub)
    page = words(hub.page("ada", f"leases/{lease.id}"))
    total = f"{lease.charged // MICRO}.{lease.charged % MICRO:06}"
    assert f"Total {total}" in page
    assert "4.000000 credits an hour" in page
    assert lease.devices[0].uuid in page
    answer = hub.page("ada", f"leases/{lease.id}.csv")
    assert answer.headers["Content-Type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert sum(Decimal(row["amount"]) for row in rows) == Decimal(total)
    assert rows[-1]["cost"] == total


def test_a_receipt_tells_what_the_gpus_did(hub: PayingHub) -> None:
    some = past_lease(hub)
    assert "Mean use" not in words(hub.page("ada", f"leases/{some.id}"))
    began = some.granted_at.replace(minute=0, second=0, microsecond=0) - timedelta(days=2)
    times = {
        "granted_at": began,
        "started_at": began,
        "answered_at": began,
        "seen_at": began,
        "ended_at": None,
    }
    lease = replace(some, id="5" * 16, server=ServerRef("ada", "longer"), **times)
    lease = replace(lease, state=LeaseState.RUNNING, charged=0, waived=0)
    lease = replace(lease, devices=(replace(some.devices[0], model="L4"),))
    with hub.broker.store.write() as connection:
        leases_repository.insert(connection, lease)
        leases_repository.end(connection, lease.id, began + timedelta(minutes=5), "stopped", 0, 0)
    did = {"samples": 60, "known": 60, "measured": 60, "use_sum": 60 * 42, "use_max": 97}
    minute = DeviceUse(uuid=lease.uuids[0], since=began, seconds=60, memory_max=12 * 2**30, **did)
    hub.broker.monitoring.remember_use([minute])
    page = words(hub.page("ada", f"leases/{lease.id}"))
    assert re.search(r"Mean use Peak use Most memory .*42 % 97 % 12 GB", page)
    told = hub.json("ada", f"leases/{lease.id}/receipt").json()
    assert told["use"] == [
        {"uuid": lease.uuids[0], "mean_percent": 42.0, "peak_percent": 97}
        | {"memory_peak_bytes": 12 * 2**30}
    ]


def test_a_statement_as_csv_is_whole_and_harmless(hub: PayingHub) -> None:
    answer = hub.page("ada", "statement.csv")
    assert 'filename="statement-member-ada.csv"' in answer.headers["Content-Disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert Decimal(rows[0]["balance"]) == sum(Decimal(row["amount"]) for row in rows)
    (trick,) = [row for row in rows if row["actor"] == "kim"]
    assert trick["reason"] == "'" + TRICK
    assert trick["amount"] == "12.000000"
    assert any(row["amount"].startswith("-") for row in rows)


@pytest.mark.parametrize(
    ("user", "path", "sentence"),
    [
        ("bob", "accounts/member:ada", "The account 'member:ada' is not yours"),
        ("bob", "accounts/member:ada/statement", "The account 'member:ada' is not yours"),
        ("bob", "accounts/member:ada/statement.csv", "is not yours"),
        ("bob", "accounts/member:nobody/statement", "The account 'member:nobody' is not yours"),
        ("bob", "accounts", "This page is not for you."),
        ("bob", "usage", "Reports of use are for admins"),
        ("bob", "usage.csv", "Reports of use are for admins"),
        ("bob", "trail", "This page is not for you."),
        ("bob", "leases/{lease}", "This session is not yours"),
        ("bob", "leases/{lease}.csv", "This session is not yours"),
        ("bob", "leases/0123456789abcdef", "This session is not yours"),
        ("bob", "transfers/{transfer}", "This page is not for you."),
    ],
)
def test_what_is_anothers_is_refused_in_words(
    hub: PayingHub, user: str, path: str, sentence: str
) -> None:
    transfer = hub.broker.reports.statement_page("member:ada").entries[-1].transfer
    answer = hub.page(user, path.format(lease=past_lease(hub).id, transfer=transfer))
    assert answer.status_code == 403
    assert sentence in answer.text.replace("&#39;", "'")
    for hidden in ("A100", "kim", "short"):
        assert hidden not in answer.text


def test_a_member_stops_their_server(hub: PayingHub) -> None:
    lease = hub.start_server("ada", "to-stop", gpus=0)
    stranger = send(hub, "bob", f"leases/{lease.id}/stop", confirm="yes")
    assert stranger.status_code == 404
    asked = send(hub, "ada", f"leases/{lease.id}/stop")
    assert "Stop to-stop?" in words(asked)
    assert hub.server("ada", "to-stop")
    done = send(hub, "ada", f"leases/{lease.id}/stop", confirm="yes")
    assert "The server is being stopped." in words(done)
    wait_for(lambda: hub.server("ada", "to-stop") is None, "the stop")
    again = send(hub, "ada", f"leases/{lease.id}/stop", confirm="yes")
    assert (again.status_code, "stopped already" in again.text) == (409, True)


# What admins change.


def press(page: Page, name: str) -> None:
    """A button, found by its words and pressed by keyboard."""
    button = page.get_by_role("button", name=name)
    button.focus()
    with page.expect_navigation():
        page.keyboard.press("Enter")


def test_an_admin_gives_credits_and_takes_them_back(hub: PayingHub, browser: Browser) -> None:
    """Without JavaScript, by keyboard: given, undone by its opposite, and given again."""
    before = hub.broker.ledger.member("bob").balance
    context = browser.new_context(viewport=PHONE, java_script_enabled=False)
    page = context.new_page()
    sign_in(page, hub, ADMIN, "accounts/member:bob")
    page.get_by_label("Credits", exact=True).fill("2.5")
    page.get_by_label("Reason, which its member reads").fill("a <present>")
    press(page, "Give")
    screenshot(page, "credits-confirm-phone")
    assert "Give credits to member:bob?" in page.inner_text("main")
    assert hub.broker.ledger.member("bob").balance == before
    press(page, "Give them")
    assert "The credits were given." in page.inner_text("main")
    assert hub.broker.ledger.member("bob").balance == before + 5 * MICRO // 2
    page.get_by_role("link", name="Grant by admin").first.click()
    page.get_by_label("Reason, which its member reads").fill("the wrong Bob")
    press(page, "Undo")
    assert hub.broker.ledger.member("bob").balance == before + 5 * MICRO // 2
    press(page, "Undo it")
    assert "undone by this one" in page.inner_text("main")
    assert hub.broker.ledger.member("bob").balance == before
    context.close()
    statement = words(hub.page("bob", "statement"))
    assert "a &lt;present&gt;" in statement and "the wrong Bob" in statement
    trail = words(hub.page(ADMIN, "trail"))
    assert "grant member:bob" in trail and "the wrong Bob" in trail


def test_a_form_that_is_sent_twice_gives_once(hub: PayingHub) -> None:
    before = hub.broker.ledger.member("bob").balance
    fields = {"amount": "3", "reason": "once", "confirm": "yes", "key": "0123456789abcdef"}
    assert "The credits were given." in words(
        send(hub, ADMIN, "accounts/member:bob/grant", **fields)
    )
    again = send(hub, ADMIN, "accounts/member:bob/grant", **fields)
    assert "nothing was changed" in words(again)
    assert hub.broker.ledger.member("bob").balance == before + 3 * MICRO
    hub.broker.ledger.grant("member:bob", -3 * MICRO, actor="kim", reason="a test, undone")


@pytest.mark.parametrize(
    ("amount", "reason", "sentence"),
    [
        ("NaN", "x", "'NaN'"),
        ("1,5", "x", "'1,5'"),
        ("1" + "0" * 30, "x", "decimal number"),
        ("0.123456789012345678", "x", "six decimals"),
        ("0", "x", "nothing would change"),
        ("", "x", "decimal number"),
        ("5", "", "The reason is missing"),
        ("5", "y" * 301, "300 is the most"),
    ],
)
def test_a_grant_with_a_mistake_is_shown_again(
    hub: PayingHub, amount: str, reason: str, sentence: str
) -> None:
    before = hub.broker.ledger.member("bob")
    path = "accounts/member:bob/grant"
    answer = send(hub, ADMIN, path, amount=amount, reason=reason, confirm="yes", key="k")
    assert answer.status_code == 400
    assert "Nothing was changed." in words(answer)
    assert sentence in answer.text.replace("&#39;", "'")
    assert hub.broker.ledger.member("bob") == before


def test_changes_need_our_own_form_and_an_admin(hub: PayingHub) -> None:
    before = hub.broker.ledger.member("bob")
    path = "accounts/member:bob/grant"
    fields = {"amount": "5", "reason": "x", "confirm": "yes", "key": "k"}
    assert send(hub, "bob", path, **fields).status_code == 403
    hub.page(ADMIN)
    url = f"{hub.url}/services/gpu/{path}"
    forged = hub._browsers[ADMIN].post(url, data=fields, headers=NAVIGATION, timeout=120)
    assert forged.status_code == 403
    assert "This form is too old, or came from another page." in words(forged)
    for place in (f"leases/{past_lease(hub).id}/refund", path):
        refused = send(hub, "ada", place, reason="x", amount="1", confirm="yes", key="k")
        assert refused.status_code == 403
    assert hub.broker.ledger.member("bob") == before


def test_a_session_is_refunded_once(hub: PayingHub) -> None:
    lease = past_lease(hub)
    path = f"leases/{lease.id}/refund"
    asked = words(send(hub, ADMIN, path, reason="the GPU was sick"))
    assert "Give back what this session cost?" in asked
    assert past_lease(hub).charged == lease.charged > 0
    part = {"reason": "a slow disk", "amount": "0.000001", "key": "a-part"}
    assert "Give a part of it back?" in words(send(hub, ADMIN, path, **part))
    for _ in range(2):
        given = send(hub, ADMIN, path, confirm="yes", **part)
        assert "0.000001 came back" in words(given), given.text
        assert past_lease(hub).charged == lease.charged - 1
    for amount in ("-1", "0", "1,5", "1000"):
        refused = send(hub, ADMIN, path, reason="x", amount=amount, confirm="yes")
        assert refused.status_code == 400, amount
    assert past_lease(hub).refunded == 1
    done = words(send(hub, ADMIN, path, reason="the GPU was sick", confirm="yes"))
    assert "It was given back." in done and "came back" in done
    assert "Total 0.000000" in done
    assert past_lease(hub).charged == 0
    again = send(hub, ADMIN, path, reason="the GPU was sick", confirm="yes")
    assert again.status_code == 400
    assert "refunded already" in again.text
    report = hub.json(ADMIN, "usage?by=model").json()["rows"]
    (row,) = [row for row in report if row["name"] == "A100-80GB"]
    assert (row["credits"], row["sessions"]) == ("0.000000", 1)


def test_accounts_are_found(hub: PayingHub) -> None:
    page = words(hub.page(ADMIN, "accounts?search=BO"))
    assert "member:bob" in page and "member:ada" not in page
    nobody = words(hub.page(ADMIN, "accounts?search=nobody"))
    assert "No account has this in its name." in nobody
    assert hub.page(ADMIN, "accounts/member:nobody").status_code == 404
    assert hub.page(ADMIN, "accounts/system:grants").status_code == 403
    own = hub.page("bob", "accounts/member:bob")
    assert own.url.endswith("/services/gpu/")


def test_reports_say_the_same_in_every_form(hub: PayingHub) -> None:
    for by in ("member", "group", "account", "model", "environment", "week"):
        told = hub.json(ADMIN, f"usage?by={by}").json()
        rows = list(csv.reader(io.StringIO(hub.page(ADMIN, f"usage.csv?by={by}").text)))
        beside = ["batch_gpu_hours", "batch_credits", "batch_jobs"]
        assert rows[0] == [by, "gpu_seconds", "gpu_hours", "credits", "sessions", *beside]
        total = told["total"]["batch"]
        assert (total["gpu_seconds"], total["jobs"]) == (3 * 3600 + 3600, 2)
        paid = hub.broker.ledger.statement("member:carl", 1)[0].amount
        assert Decimal(total["credits"]) == Decimal(-paid) / MICRO
        assert sum(int(row[7]) for row in rows[1:]) == 2
        names = [row["name"] for row in told["rows"]]
        assert [row[0] for row in rows[1:]] == names
        page = words(hub.page(ADMIN, f"usage?by={by}"))
        assert "All together" in page and "Batch jobs" in page
    assert hub.page(ADMIN, "usage?from=2026-13-01").status_code == 400
    trail = list(csv.DictReader(io.StringIO(hub.page(ADMIN, "trail.csv").text)))
    assert [row["action"] for row in trail] == [
        change["action"] for change in hub.json(ADMIN, "trail?limit=500").json()["changes"]
    ]
