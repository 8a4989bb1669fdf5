"""Every page and JSON answer of the service, and the Hub's pages that are ours."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest

import gpuspawner
from tests.golden.conftest import Golden
from tests.golden.site import ADMIN, Site

MEMBERS_PAGES = (
    "",
    "billing",
    "statement",
    "notices",
    "folders",
    "cluster",
    "rates",
    "leases",
    "no-such-page",
)
ADMINS_PAGES = (
    *(
        "admin",
        "accounts",
        "accounts/member:ada",
        "accounts/group:ml",
        "accounts/member:ada/statement",
    ),
    *("bulk", "rates", "refills", "queue", "trail", "usage", "used", "cluster", "folders"),
    *("leases", "members", "devices", "workspaces"),
    *("leases/LEASE", "transfers/TRANSFER", "queue/TICKET"),
    *("statement.csv", "usage.csv", "used.csv", "trail.csv", "catalog.schema.json"),
)
MEMBERS_ANSWERS = (
    "me",
    "devices",
    "leases",
    "cluster",
    "queue",
    "notices",
    "folders",
    "leases/LEASE/now",
)
ADMINS_ANSWERS = (
    *("leases?all=1", "accounts", "accounts/member:ada", "accounts/member:ada/statement"),
    *("queue", "rates", "refills", "trail", "usage", "used", "cluster", "transfers/TRANSFER"),
    *("leases/LEASE/receipt", "folders?all=1", "workspaces", "workspaces/jobs"),
)
CONFIRMED = {
    "accounts/member:ada/grant": {"amount": "12.5", "reason": "Homework 4"},
    "bulk": {"lines": "ada,1\nbob,2", "reason": "Week 3"},
    "rates": {"rate": "2.5", "model": "A100", "reason": "Power"},
    "rates/1/remove": {},
    "refills": {
        "rule": "FREQ=DAILY;BYHOUR=6",
        "amount": "5",
        "audience": "everybody",
        "reason": "A try",
    },
    "refills/REFILL/end": {},
    "transfers/TRANSFER": {"reason": "The wrong Ada"},
    "leases/LEASE/refund": {"reason": "A sick GPU", "amount": "0.1"},
    "leases/LEASE/stop": {"reason": "A new fan"},
    "leases/LEASE/restart": {},
    "folders/FOLDER/delete": {"name": "results"},
    "members": {"lines": "name,course,ends\nada,ML101,2025-06-30"},
    "members/ada/end": {"course": "ML101"},
    "workspaces/archive": {"workspace": "work-dan"},
    "workspaces/restore": {"archive": "zoe-2025-02-01-120000.tar.gz"},
    "workspaces/unlock": {"workspace": "work-dan"},
}
"""Forms whose change is shown first, with a button that does it."""


def named(path: str) -> str:
    """The name of the file for an address."""
    return path.translate(str.maketrans("/:?=", "--- ")).replace(" ", "-") or "home"


def filled(site: Site, path: str) -> str:
    """An address with the ids that this site has."""
    services = site.services
    lease = services.leases.of_account("member:ada")[0].id
    return (
        path.replace("LEASE", lease)
        .replace("TRANSFER", services.ledger.statement("member:ada")[-1].transfer)
        .replace("TICKET", next(t.id for t in services.queue.waiting() if t.server.user == "eve"))
        .replace("REFILL", services.refills.all_refills()[0].id)
        .replace("FOLDER", services.shared_folders.folders("ada")[0].id)
    )


@pytest.mark.parametrize("path", MEMBERS_PAGES)
def test_member_pages_match_the_recording(golden: Golden, site: Site, path: str) -> None:
    golden(f"pages/member-{named(path)}.html", site.service("ada", filled(site, path)))


@pytest.mark.parametrize("user", ["ada", ADMIN])
def test_navigation_matches_the_recording(golden: Golden, site: Site, user: str) -> None:
    who = "admin" if user == ADMIN else "member"
    golden(f"pages/navigation-{who}.html", site.navigation(user))


@pytest.mark.parametrize("user", ["bob", "cleo", "dan"])
def test_idle_sick_and_queued_home_pages_match_the_recording(
    golden: Golden, site: Site, user: str
) -> None:
    golden(f"pages/member-home-{user}.html", site.service(user, ""))


@pytest.mark.parametrize("path", ADMINS_PAGES)
def test_admin_pages_match_the_recording(golden: Golden, site: Site, path: str) -> None:
    name = named(path)
    suffix = "" if name.endswith((".csv", ".json")) else ".html"
    golden(f"pages/admin-{name}{suffix}", site.service(ADMIN, filled(site, path)))


@pytest.mark.parametrize("path", CONFIRMED)
def test_confirmation_pages_match_the_recording(golden: Golden, site: Site, path: str) -> None:
    user = "ada" if path.startswith(("folders", "leases/LEASE/restart")) else ADMIN
    text = site.service(user, filled(site, path), CONFIRMED[path])
    golden(f"pages/confirm-{named(path)}.html", text)


@pytest.mark.parametrize(
    ("user", "path"), [("ada", "leases/LEASE/stop"), ("eve", "tickets/TICKET/cancel")]
)
def test_member_confirmation_pages_match_the_recording(
    golden: Golden, site: Site, user: str, path: str
) -> None:
    golden(f"pages/confirm-{user}-{named(path)}.html", site.service(user, filled(site, path), {}))


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("accounts/member:ada?done=granted", "The credits were given."),
        ("queue?done=pause", "Granting is paused."),
        ("rates?done=set", "The rate is set. It applies to servers that start from then on."),
        ("refills?done=added", "The refill is created."),
        ("transfers/TRANSFER?done=reversed", "The transfer was undone. This is its reversal."),
    ],
)
def test_page_says_what_was_done_and_nothing_for_other_words(
    site: Site, path: str, sentence: str
) -> None:
    assert sentence in html.unescape(site.service(ADMIN, filled(site, path)))
    assert 'class="notice good"' not in site.service(ADMIN, filled(site, f"{path}x"))


@pytest.mark.parametrize(
    ("user", "path"),
    [*(("ada", path) for path in MEMBERS_ANSWERS), *((ADMIN, path) for path in ADMINS_ANSWERS)],
)
def test_json_answers_match_the_recording(golden: Golden, site: Site, user: str, path: str) -> None:
    status, _, body = site.service(user, f"api/{filled(site, path)}").partition("\n")
    who = "admin" if user == ADMIN else "member"
    text = json.dumps(json.loads(body), indent=1, ensure_ascii=False)
    golden(f"api/{who}-{named(path)}.json", f"{status}\n{text}")


def test_openapi_document_matches_the_recording(golden: Golden, site: Site) -> None:
    _, _, body = site.service("ada", "api/openapi.json").partition("\n")
    document = json.loads(body)
    assert document["info"].pop("version") == gpuspawner.__version__
    golden("openapi.json", json.dumps(document, indent=1, ensure_ascii=False))


@pytest.mark.parametrize(
    ("user", "path"),
    [
        *((user, path) for user in ("", "ada") for path in ("environments", "environments/torch")),
        *(("ada", path) for path in ("environments?q=files", "welcome", "spawn")),
        *((user, "home") for user in ("ada", "bob", "dan")),
        *((user, "spawn") for user in ("cleo", ADMIN)),
        ("ada", "spawn?opt-environment=files&opt-gpus=0"),
    ],
)
def test_hub_pages_match_the_recording(golden: Golden, site: Site, user: str, path: str) -> None:
    golden(f"hub/{named(path)}-{user or 'nobody'}.html", site.hub(user, path))


PARTS: dict[str, dict[str, Any]] = {
    "page.html": {"services": [{"name": "gpu", "href": "/services/gpu/"}]},
    "home.html": {},
    "home.html stopping": {"default_server": {"pending": "stop"}},
    "login.html": {},
    "spawn_pending.html": {},
    "404.html": {"status_code": 404},
    **{f"error.html {code}": {"status_code": code} for code in (400, 402, 403, 409, 429, 500, 503)},
}
"""Templates that JupyterHub has too, with what they are rendered from."""


@pytest.mark.parametrize("part", PARTS)
def test_jupyterhub_template_additions_match_the_recording(
    golden: Golden, site: Site, part: str
) -> None:
    text = site.hub_parts(part.split()[0], message="", status_message="Odd", **PARTS[part])
    golden(f"hub/part-{part.replace('.html', '').replace(' ', '-')}.html", text)


@pytest.mark.parametrize(("path", "name"), [("devices", "drained"), ("queue/granting", "paused")])
def test_switch_that_is_neither_yes_nor_no_is_refused(site: Site, path: str, name: str) -> None:
    for form in ({}, {name: "maybe"}):
        refused = html.unescape(site.service(ADMIN, path, form))
        assert refused.startswith("400") and f"The field '{name}' is yes or no." in refused


def test_bulk_form_takes_its_own_example_and_names_its_fields(site: Site) -> None:
    page = site.service(ADMIN, "bulk")
    example = re.search(r'placeholder="([^"]+)"', page)
    assert example
    sent = {"lines": html.unescape(example[1])}
    refused = html.unescape(site.service(ADMIN, "bulk", sent))
    assert "Line 1: it has no reason" in refused and "“Reason for lines without one”" in refused
    refused = html.unescape(site.service(ADMIN, "bulk", sent | {"reason": "course"}))
    assert "there is no account 'group:ml101'" in refused
    assert "Tick “Open accounts that are not there yet”" in refused and "--" not in refused
    shown = site.service(ADMIN, "bulk", sent | {"reason": "course", "open": "yes"})
    assert "2 lines, 525.00 credits" in shown
