"""What the pages say of credits, devices, times and faults, to whom, and how it is sent. Real:
everything of ours, SQLite, HTTP, Chromium. Stand-ins: simulated devices, a clock that stands still,
a small HTTP server for the Hub.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import requests
from playwright.sync_api import Browser, BrowserContext, expect

from gpuspawner.core.errors import StoreUnavailable
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease
from gpuspawner.web.schemas import instant
from tests.golden.scenario import start
from tests.golden.site import ADMIN, Site
from tests.support.brokers import fleet
from tests.support.browser import screenshot
from tests.support.page_text import text_of
from tests.support.pages import WIDE, mentions, words
from tests.support.processes import free_port
from tests.support.service_process import token_of

SCRIPT = {
    "2": {"processes": [[4711, "secret-work"]]},
    "3": {"held_bytes": 8 * 2**30},
    "4": {"error": "It fell off the bus."},
}
"""Two are occupied without a lease, and one is sick."""
HELP = "Ask Kim <kim@lab.example> for more."
TRICK = "<script>alert('a reason')</script>"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Iterator[Site]:
    """Of eight devices one is free and one leased; the other six are out of service."""
    folder = tmp_path_factory.mktemp("site")
    script = folder / "script.json"
    script.write_text(json.dumps(SCRIPT))
    settings: dict[str, Any] = {"credits_help": HELP, "refresh_seconds": 0}
    with (
        mock.patch.dict(os.environ, {"GPUSPAWNER_SIMULATION": str(script)}),
        Site(folder, migrated_file, "simulated:8xA100-80GB", **settings) as site,
    ):
        services = site.services
        for user in ("ada", "bob"):
            services.members.membership_returned(user, actor="sign-in")
            services.ledger.open_account(user)
        services.ledger.grant("member:ada", 12 * MICRO, actor="kim", reason=TRICK)
        start(services, site.clock, "ada", environment="torch")
        going = start(services, site.clock, "ada", "going", environment="torch")
        views = services.monitoring.overview().devices
        free = [view.device.uuid for view in views if view.state == "free"]
        for uuid in (going.devices[0].uuid, *free[1:]):
            services.devices.drain(uuid, actor="kim", reason="A new fan")
        yield site


@pytest.fixture
def training(site: Site) -> Iterator[Lease]:
    """A server of Bob's, who has no credits left, on the last free device."""
    set_balance(site, "bob", 10 * MICRO)
    lease = start(site.services, site.clock, "bob", "training", environment="torch")
    set_balance(site, "bob", 0)
    yield lease
    site.services.leases.release(lease.id, ended_at=site.clock(), reason="stopped")


def set_balance(site: Site, user: str, micro: int) -> None:
    change = micro - site.services.ledger.member(user).balance
    site.services.ledger.grant(f"member:{user}", change, actor="kim", reason="a test")


def ask(site: Site, user: str, path: str = "") -> requests.Response:
    """A page or an answer, as a script with this member's token gets it."""
    headers = {"Authorization": f"token {token_of(user)}"}
    return requests.get(site.service_url() + path, headers=headers, timeout=60)


def signed_in(site: Site, browser: Browser, user: str, **options: Any) -> BrowserContext:
    """A browser with the service's cookies of a member."""
    context = browser.new_context(viewport=WIDE, **options)
    cookies = site.session(user).cookies
    at = {"domain": "127.0.0.1"}
    context.add_cookies(
        [{"name": c.name, "value": str(c.value), "path": c.path, **at} for c in cookies]
    )
    return context


# Devices.


def test_free_and_total_devices_agree_everywhere(site: Site) -> None:
    states = sorted(view.state for view in site.services.monitoring.overview().devices)
    out = ["drained", "drained", "draining", "occupied", "occupied", "unknown"]
    assert states == sorted([*out, "free", "leased"])

    form, card = text_of(site.hub("ada", "spawn")), text_of(site.hub("", "environments/torch"))
    assert "1 of 2 GPUs free" in form, "the header"
    assert "1 of 2 GPUs free now" in form and "1 of 2 GPUs free now" in card
    assert re.search(r"A100-80GB 1 of 2 3\.60", form), "the table of prices"
    assert "1 of 2 free" in text_of(site.service("ada", "cluster"))
    assert "GPUs 1 of 2 free" in text_of(site.service(ADMIN, "admin"))
    answer = json.loads(site.service("ada", "api/cluster").partition("\n")[2])
    assert (answer["free"], answer["total"], answer["host"]) == (1, 2, None)
    assert "1 of 2 devices free" in site.command("devices")
    told = json.loads(site.command("devices", "--json"))
    assert (told["free"], told["total"]) == (1, 2)
    metrics = site.service(ADMIN, "metrics")
    for state in ("free", "leased"):
        assert f'gpuspawner_devices{{model="A100-80GB",state="{state}"}} 1' in metrics


def test_details_of_devices_are_for_admins(site: Site, browser: Browser) -> None:
    for path in ("cluster", "api/devices"):
        told = ask(site, "ada", path).text
        for hidden in ("secret-work", "4711", "fell off the bus"):
            assert hidden not in told, path
    told = words(ask(site, ADMIN, "devices"))
    assert "used without a lease by secret-work (pid 4711)" in told
    assert "It fell off the bus." in told
    page = signed_in(site, browser, ADMIN).new_page()
    page.goto(f"{site.service_url()}devices")
    screenshot(page, "pages-devices-states-wide")


def test_details_of_a_lost_driver_are_for_admins(site: Site) -> None:
    source = fleet(site.services)
    source.lose("The driver says: secret detail.")
    try:
        page = words(ask(site, "ada"))
        answer = ask(site, "ada", "api/devices").json()
        told = [ask(site, ADMIN, path).text for path in ("admin", "api/devices")]
    finally:
        source.restore()
    assert "GPU status is unavailable." in page and "secret detail" not in page
    assert (answer["seen"], answer["error"], answer["free"]) == (False, "", 0)
    assert all("secret detail" in each for each in told)


# Credits.


def test_pages_warn_about_low_and_exhausted_credits(site: Site, training: Lease) -> None:
    site.services.exhaustion.see_to("member:bob", [30])
    page = ask(site, "bob")
    said = "Your credits have run out. Your server training will be stopped at"
    assert said in words(page)
    assert "Ask Kim &lt;kim@lab.example&gt; for more." in page.text
    me = ask(site, "bob", "api/me").json()
    assert float(me["account"]["balance"]) <= 0 and me["account"]["lasts_seconds"] == 0
    (lease,) = me["running"]
    assert lease["warned_at"] < lease["stops_at"]

    set_balance(site, "ada", 2 * MICRO)  # two servers, at 7.20 credits an hour
    assert re.search(r"Your credits last for 1[56] min more\.", words(ask(site, "ada")))


def test_pages_explain_a_missing_account(site: Site) -> None:
    assert "No server is running" in words(ask(site, "zoe"))
    page = words(ask(site, "zoe", "billing"))
    assert "0.00 credits" in page and "Your account opens when you first sign in" in page
    assert ask(site, "zoe", "api/me").json()["statement"] == []


def test_member_sees_no_names_of_others(site: Site, training: Lease) -> None:
    for path in ("", "billing", "cluster", "api/me", "api/devices", "api/leases"):
        answer = ask(site, "ada", path)
        assert answer.ok
        for name in ("bob", "training", training.id):
            assert not mentions(answer.text, name), f"{name} in {answer.url}"
    leases = ask(site, "ada", "api/leases").json()["leases"]
    assert {lease["user"] for lease in leases} == {"ada"}


# How it is sent.


def test_pages_send_security_headers_and_escape_text(site: Site) -> None:
    page = ask(site, "ada")
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    assert page.headers["Cache-Control"] == "no-store"
    statement = ask(site, "ada", "billing").text
    assert TRICK not in statement
    assert "&lt;script&gt;alert(" in statement
    nonce = re.search(r"script-src 'self' 'nonce-([\w-]{20,})'", policy)
    assert nonce and "script-src-attr" not in policy and ask(site, "ada").text != page.text
    begin, end = page.text.index("<main"), page.text.index("</main>")
    for tag in re.findall(r"<(?:script|style|link)\b[^>]*", page.text[:begin] + page.text[end:]):
        assert f'nonce="{nonce[1]}"' in tag, tag
    ours = '<script src="/services/gpu/static/times.js"></script>'
    assert re.findall(r"<script.*", page.text[begin:end]) == [ours]
    style = requests.get(f"{site.service_url()}static/gpu.css", timeout=60)
    assert style.headers["Content-Type"].startswith("text/css")
    assert "http" not in style.text


def test_faults_show_no_traceback(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, status, sentence in (
        (ZeroDivisionError("a secret of the code"), 500, "Something went wrong."),
        (StoreUnavailable(), 503, "Database unavailable."),
    ):

        def fail(error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(site.services.leases, "open_leases", fail)
        for path in ("", "api/me"):
            answer = ask(site, "ada", path)
            assert answer.status_code == status
            assert sentence in answer.text
            for trace in ("a secret", "Traceback", "ZeroDivision"):
                assert trace not in answer.text

    nobody = f"http://127.0.0.1:{free_port()}/hub/api"
    monkeypatch.setattr(site.hub_auth, "api_url", nobody)
    for path in ("", "api/me"):  # of somebody whom the Hub was not asked about before
        answer = ask(site, "yvonne", path)
        assert answer.status_code == 503
        assert "The Hub cannot confirm who you are right now." in answer.text
        assert nobody not in answer.text


# What it looks like.


@pytest.mark.parametrize("scripts", [True, False])
def test_times_are_in_the_zone_of_the_browser(site: Site, browser: Browser, scripts: bool) -> None:
    """Without scripts they are in the site's zone, which the page names."""
    lease = next(x for x in site.services.leases.open_leases() if not x.server.name)
    assert lease.started_at is not None
    hours = 9 if scripts else 0
    at = lease.started_at + timedelta(hours=hours)
    page = signed_in(
        site, browser, "ada", timezone_id="Asia/Tokyo", java_script_enabled=scripts
    ).new_page()
    page.goto(site.service_url())
    since = page.locator(f"time[datetime='{instant(lease.started_at)}']").first
    expect(since).to_have_text(f"{at:%-d %b %H:%M}")
    zone = "your time zone, Asia/Tokyo" if scripts else "UTC (UTC+0000)"
    expect(page.locator("footer")).to_contain_text(f"Times are in {zone}.")
    if scripts:
        title = f"{lease.started_at:%-d %b %H:%M} in UTC (UTC+0000)"
        expect(since).to_have_attribute("title", title)
    page.goto(f"{site.service_url()}cluster")
    expect(page.locator("[data-text=since]", has_text=f"since {at:%H:%M}").first).to_be_visible()
