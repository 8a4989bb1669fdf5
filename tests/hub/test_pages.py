"""The service's pages and their JSON: who sees what, and what they say. Real: JupyterHub, proxy,
accounting service, local servers, Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import requests
from playwright.sync_api import Browser, expect

from gpuspawner.core.errors import StoreUnavailable
from gpuspawner.core.units import MICRO
from gpuspawner.devices.simulated import SimulatedDevices
from gpuspawner.leases.models import ServerRef
from gpuspawner.ledger.models import member_account
from gpuspawner.services import Services
from gpuspawner.web.schemas import instant
from tests.support.brokers import make_services
from tests.support.hub import ADMIN, NAVIGATION
from tests.support.pages import (
    WIDE,
    ask,
    mentions,
    picture,
    served,
    sign_in,
    words,
)
from tests.support.paying_hub import FLEET, PayingHub
from tests.support.processes import free_port, wait_for

TRICK = "<script>alert('a reason')</script>"
TWO = "2 \N{MULTIPLICATION SIGN} A100-80GB"

CONFIG = """
c.GPURates.by_model = {"*": 1, "A100": 4, "T4": "0.5"}
c.GPUCredits.hold_minutes = 10
c.GPUCredits.grace_seconds = 3600
c.GPUCredits.help_text = "Ask Kim <kim@lab.example> for more."
c.JupyterHub.services.append({"name": "ada", "api_token": "service-called-ada"})
c.JupyterHub.load_roles.append(
    {"name": "impostor", "services": ["ada"], "scopes": ["access:services!service=gpu"]}
)
"""


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    """Ada has two GPUs and a past; Bob's credits ran out; Cleo's are low; Dan has nothing."""
    with PayingHub(folder / "hub", CONFIG) as hub:
        hub.start_server("ada", "short-one", gpus=1, gpu_model="T4")
        hub.stop_server("ada", "short-one")
        hub.start_server("ada", gpus=2, gpu_model="A100")
        hub.services.ledger.grant(member_account("ada"), 12 * MICRO, actor="admin", reason=TRICK)
        hub.start_server("bob", "training", gpus=1)
        left = hub.services.ledger.member("bob").balance
        hub.services.ledger.grant(
            member_account("bob"), -left, actor="admin", reason="a correction"
        )
        hub.start_server("cleo", gpus=0)
        hub.api("POST", "users/dan").raise_for_status()

        def bob_was_warned() -> bool:
            leases = hub.services.leases.open_leases()
            return any(lease.warned_at for lease in leases if lease.server.user == "bob")

        wait_for(bob_was_warned, "bob's warning", timeout=15)
        yield hub


# Who may see what.


def test_stranger_is_redirected_to_sign_in(hub: PayingHub) -> None:
    for path in ("", "admin"):
        page = requests.get(f"{hub.url}/services/gpu/{path}", headers=NAVIGATION, timeout=120)
        assert "/hub/login" in page.url
        assert "credits" not in page.text.lower()
    for path in ("me", "devices", "leases", "accounts"):
        url = f"{hub.url}/services/gpu/api/{path}"
        answer = requests.get(url, timeout=120, allow_redirects=False)
        assert answer.status_code == 401
        assert answer.json()["error"] == "http_401"
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_member_page_shows_own_servers_and_devices(hub: PayingHub) -> None:
    page = words(hub.page("ada"))
    assert page.startswith("Sessions Balance: ")
    assert "at 8.00 credits an hour." in page
    assert "at 8.00 credits an hour, until" in words(hub.page("ada", "billing"))
    assert f"{TWO} (GPU 0, 1)" in page
    assert "short-one" in page
    assert "1 \N{MULTIPLICATION SIGN} T4" in page
    assert "Your credits" not in page


def test_member_sees_no_names_of_others(hub: PayingHub) -> None:
    answers = [hub.page("ada"), hub.page("ada", "billing")]
    answers += [hub.json("ada", path) for path in ("me", "devices", "leases")]
    for answer in answers:
        assert answer.ok
        for name in ("bob", "cleo", "training"):
            assert not mentions(answer.text, name), f"{name} in {answer.url}"
    leases = hub.json("ada", "leases").json()["leases"]
    assert {lease["user"] for lease in leases} == {"ada"}
    bobs = hub.services.leases.of_account("member:bob")[0].id
    assert bobs not in hub.json("ada", "devices").text


def test_member_cannot_read_admin_pages(hub: PayingHub) -> None:
    for path, said in (
        ("accounts", "The list of accounts is for admins"),
        ("leases?all=1", "You do not have access to this page"),
    ):
        answer = hub.json("ada", path)
        assert answer.status_code == 403
        assert answer.json()["message"].startswith(said)
        assert "bob" not in answer.text
    page = hub.page("ada", "admin")
    assert page.status_code == 403
    assert "You do not have access to this page." in words(page)
    assert "Audit log" not in hub.page("ada").text and "Audit log" in hub.page(ADMIN).text


def test_tokens_of_services_and_without_our_scope_are_rejected(hub: PayingHub) -> None:
    narrow = hub.api("POST", "users/ada/tokens", json={"scopes": ["read:users:name!user"]}).json()
    for token, paths in (
        ("service-called-ada", ("api/me", "api/leases", "")),
        (narrow["token"], ("api/me",)),
    ):
        headers = {"Authorization": f"token {token}"}
        for path in paths:
            answer = requests.get(f"{hub.url}/services/gpu/{path}", headers=headers, timeout=120)
            assert answer.status_code == 403, (token, path)
            assert "A100" not in answer.text


def test_admin_sees_all_members_and_devices(hub: PayingHub) -> None:
    page = words(hub.page(ADMIN, "admin"))
    for text in ("ada", "bob/training", "member:cleo", "out of credits", TWO):
        assert text in page
    uuid = hub.services.monitoring.overview().devices[0].device.uuid
    assert uuid in words(hub.page(ADMIN, "devices"))
    accounts = hub.json(ADMIN, "accounts").json()["accounts"]
    assert {"member:ada", "member:bob", "member:cleo"} <= {some["account"] for some in accounts}
    leases = hub.json(ADMIN, "leases?all=1").json()["leases"]
    assert {"ada", "bob", "cleo"} == {lease["user"] for lease in leases}
    devices = hub.json(ADMIN, "devices").json()["devices"]
    assert [device["user"] for device in devices] == ["ada", "ada", "bob"]


# What is said.


def test_page_warns_about_exhausted_credits(hub: PayingHub) -> None:
    page = hub.page("bob")
    text = words(page)
    assert "Your credits have run out. Your server training will be stopped at" in text
    assert "Ask Kim &lt;kim@lab.example&gt; for more." in page.text
    me = hub.json("bob", "me").json()
    assert Decimal(me["account"]["balance"]) <= 0
    assert me["account"]["lasts_seconds"] == 0
    (lease,) = me["running"]
    assert lease["warned_at"] < lease["stops_at"]


def test_page_warns_about_low_credits(hub: PayingHub) -> None:
    account = member_account("ada")
    before = hub.services.ledger.account(account).balance
    hub.services.ledger.grant(account, 2 * MICRO - before, actor="admin", reason="a test")
    try:
        assert re.search(r"Your credits last for 1[45] min more\.", words(hub.page("ada")))
    finally:
        hub.services.ledger.grant(
            account, before - 2 * MICRO, actor="admin", reason="a test, undone"
        )


def test_page_explains_a_missing_account(hub: PayingHub) -> None:
    assert "No server is running" in words(hub.page("dan"))
    page = words(hub.page("dan", "billing"))
    assert "0.00 credits" in page
    assert "Your account opens when you first sign in" in page
    assert hub.json("dan", "me").json()["statement"] == []


def test_json_uses_decimal_strings_and_utc(hub: PayingHub) -> None:
    me = hub.json("ada", "me").json()
    assert me["name"] == "ada"
    assert me["admin"] is False
    account = me["account"]
    for key in ("balance", "held", "available", "rate_per_hour"):
        assert re.fullmatch(r"-?\d+\.\d{6}", account[key]), key
    assert Decimal(account["balance"]) - Decimal(account["held"]) == Decimal(account["available"])
    assert account["rate_per_hour"] == "8.000000"
    (lease,) = me["running"]
    assert lease["state"] == "running"
    assert [device["index"] for device in lease["devices"]] == [0, 1]
    for key in ("granted_at", "started_at"):
        assert datetime.fromisoformat(lease[key].replace("Z", "+00:00")).tzinfo == timezone.utc
    assert sum(Decimal(line["amount"]) for line in me["statement"]) == Decimal(
        me["statement"][0]["balance"]
    )


def test_lease_cost_is_current_to_the_second(hub: PayingHub) -> None:
    """The rate is 8 credits an hour, and charges come only now and then."""
    me = hub.json("ada", "me").json()
    (lease,) = me["running"]
    as_of, since = (
        datetime.fromisoformat(text.replace("Z", "+00:00"))
        for text in (me["as_of"], lease["started_at"])
    )
    expected = 8 * (as_of - since).total_seconds() / 3600
    assert abs(float(lease["cost"]) - expected) < 8 * 0.01 / 3600


def test_limit_caps_the_number_of_leases(hub: PayingHub) -> None:
    assert len(hub.json("ada", "leases").json()["leases"]) == 2
    assert len(hub.json("ada", "leases?limit=1").json()["leases"]) == 1
    for limit in ("0", "501", "x", "1.5"):
        answer = hub.json("ada", f"leases?limit={limit}")
        assert answer.status_code == 400, limit
        assert answer.json()["error"] == "invalid_request"
        assert "'limit'" in answer.json()["message"]


# How it is sent.


def test_pages_send_security_headers_and_escape_text(hub: PayingHub) -> None:
    page = hub.page("ada")
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    assert page.headers["Cache-Control"] == "no-store"
    statement = hub.page("ada", "billing").text
    assert TRICK not in statement
    assert "&lt;script&gt;alert(" in statement
    nonce = re.search(r"script-src 'self' 'nonce-([\w-]{20,})'", policy)
    assert nonce and "script-src-attr" not in policy and hub.page("ada").text != page.text
    begin, end = page.text.index("<main"), page.text.index("</main>")
    for tag in re.findall(r"<(?:script|style|link)\b[^>]*", page.text[:begin] + page.text[end:]):
        assert f'nonce="{nonce[1]}"' in tag, tag
    ours = '<script src="/services/gpu/static/times.js"></script>'
    assert re.findall(r"<script.*", page.text[begin:end]) == [ours]
    style = requests.get(f"{hub.url}/services/gpu/static/gpu.css", timeout=120)
    assert style.headers["Content-Type"].startswith("text/css")
    assert "http" not in style.text.replace("https://", "http")
    assert requests.get(f"{hub.url}/services/gpu", timeout=120).ok


def test_unsupported_requests_change_nothing(hub: PayingHub) -> None:
    before = hub.services.ledger.statement("member:ada", limit=1000)[-1]
    browser = hub.login("ada")
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("", "api/me", "admin"):
            url = f"{hub.url}/services/gpu/{path}"
            answer = browser.request(method, url, data={"amount": "100"}, timeout=120)
            assert answer.status_code in (401, 403, 405), f"{method} {path}"
            assert "Traceback" not in answer.text
    assert hub.services.ledger.statement("member:ada", limit=1000)[-1] == before
    missing = hub.page("ada", "no/such/page")
    assert missing.status_code == 404
    assert "There is no such page." in words(missing)
    for query in ("", "?code=x", "?error=denied", "?code=x&state=y"):
        back = requests.get(f"{hub.url}/services/gpu/oauth_callback{query}", timeout=120)
        assert back.status_code in (400, 403)
        assert "This did not work" in words(back)
    assert "Traceback" not in hub.log_text()


# What is seldom: the same application, on devices and a store of this test.


@pytest.fixture
def rare(hub: PayingHub, tmp_path: Path) -> Iterator[tuple[str, SimulatedDevices, Services]]:
    """Pages over a fleet that can fail, and a store of its own."""
    services = make_services(
        database_url=f"sqlite:///{tmp_path}/rare.sqlite", device_source=FLEET, refresh_seconds=0
    )
    source = services.watch.source
    assert isinstance(source, SimulatedDevices)
    services.ledger.open_account("ada")
    with served(hub, services) as url:
        yield url, source, services
    services.store.close()


def test_device_states_hide_details_from_members(
    hub: PayingHub, rare: tuple[str, SimulatedDevices, Services], browser: Browser
) -> None:
    url, source, services = rare
    first, second, _ = (d.device.uuid for d in services.monitoring.overview().devices)
    source.occupy(first, 4711, name="secret-work")
    source.fail(second, "It fell off the bus.")
    states = [d["state"] for d in ask(hub, "ada", url + "api/devices").json()["devices"]]
    assert states == ["occupied", "unknown", "free"]
    page = words(ask(hub, "ada", url + "cluster"))
    assert "1 of 1 free" in page, "the occupied and the sick one are out of service"
    for hidden in ("secret-work", "4711", "fell off the bus"):
        assert hidden not in page
        assert hidden not in ask(hub, "ada", url + "api/devices").text
    told = words(ask(hub, ADMIN, url + "devices"))
    assert "used without a lease by secret-work (pid 4711)" in told
    assert "It fell off the bus." in told
    picture(browser, hub, url + "devices", "pages-devices-states-wide", WIDE)


def test_nvml_error_details_are_shown_only_to_admins(
    hub: PayingHub, rare: tuple[str, SimulatedDevices, Services]
) -> None:
    url, source, _ = rare
    source.lose("The driver says: secret detail.")
    page = words(ask(hub, "ada", url))
    assert "GPU status is unavailable." in page
    assert "secret detail" not in page
    answer = ask(hub, "ada", url + "api/devices").json()
    assert answer["seen"] is False
    assert answer["error"] == ""
    assert answer["free"] == 0
    assert "secret detail" in words(ask(hub, ADMIN, url + "admin"))
    assert "secret detail" in ask(hub, ADMIN, url + "api/devices").json()["error"]


def test_internal_errors_show_no_traceback(
    hub: PayingHub,
    rare: tuple[str, SimulatedDevices, Services],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, _, services = rare
    for error, status, sentence in (
        (ZeroDivisionError("a secret of the code"), 500, "Something went wrong."),
        (StoreUnavailable(), 503, "Database unavailable."),
    ):

        def fail(error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(services.leases, "open_leases", fail)
        for path in ("", "api/me"):
            answer = ask(hub, "ada", url + path)
            assert answer.status_code == status
            assert sentence in answer.text
            for trace in ("a secret", "Traceback", "ZeroDivision"):
                assert trace not in answer.text


def test_unreachable_hub_is_reported(
    hub: PayingHub, rare: tuple[str, SimulatedDevices, Services]
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}/hub/api"
    with served(hub, rare[2], api_url=nobody) as url:
        for path in ("", "api/me"):
            answer = ask(hub, "ada", url + path)
            assert answer.status_code == 503
            assert "The Hub cannot confirm who you are right now." in answer.text
            assert nobody not in answer.text


# What it looks like.


@pytest.mark.parametrize("scripts", [True, False])
def test_times_are_in_the_zone_of_the_browser(
    hub: PayingHub, browser: Browser, scripts: bool
) -> None:
    """Without scripts they are in the site's zone, which the page names."""
    [lease] = [x for x in hub.services.leases.open_leases() if x.server == ServerRef("ada")]
    assert lease.started_at is not None
    at = lease.started_at.astimezone(ZoneInfo("Asia/Tokyo") if scripts else None)
    context = browser.new_context(timezone_id="Asia/Tokyo", java_script_enabled=scripts)
    page = context.new_page()
    sign_in(page, hub, "ada", "")
    since = page.locator(f"time[datetime='{instant(lease.started_at)}']").first
    expect(since).to_have_text(f"{at:%-d %b %H:%M}")
    zone = "your time zone, Asia/Tokyo" if scripts else f"{at:%Z (UTC%z)}"
    expect(page.locator("footer")).to_contain_text(f"Times are in {zone}.")
    if scripts:
        here = lease.started_at.astimezone()
        expect(since).to_have_attribute("title", f"{here:%-d %b %H:%M} in {here:%Z (UTC%z)}")
    page.goto(f"{hub.url}/services/gpu/cluster")
    expect(page.locator("[data-text=since]", has_text=f"since {at:%H:%M}").first).to_be_visible()
    context.close()
