"""The REST API, and who is kept out of it and the pages. Real here: JupyterHub, proxy, accounting
service, local servers; schemathesis holds the service to its own OpenAPI document, as an admin, a
member and, in a soak, a course's bot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests

from gpuspawner.core.scopes import GRANT, READ_USAGE
from gpuspawner.core.units import MICRO
from gpuspawner.ledger.models import member_account
from tests.support.hub import ADMIN, NAVIGATION
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for
from tests.support.tier import SEED, SOAK

CONFIG = f"""
c.GPURates.by_model = {{"*": 1, "A100": 4}}
c.GPUCredits.grace_seconds = 3600
c.GPUCredits.charge_seconds = 3
c.Accounting.reconcile_seconds = 10
c.GPUFolders.source = "/nowhere/{{id}}"
for name, scopes in {{
    "bot": ["access:services!service=gpu", "{GRANT}!group=ml101"],
    "reporter": ["access:services!service=gpu", "{READ_USAGE}"],
    "tutor": ["access:services!service=gpu", "{READ_USAGE}!group=ml101"],
    "nobody": ["access:services!service=gpu"],
    "ada": ["access:services!service=gpu"],
}}.items():
    c.JupyterHub.services.append({{"name": name, "api_token": f"token-of-{{name}}"}})
    c.JupyterHub.load_roles.append({{"name": name, "services": [name], "scopes": scopes}})
c.JupyterHub.load_groups = {{"ml101": {{"users": ["ada", "bob"]}}, "other": {{"users": ["cleo"]}}}}
"""

SETTINGS = Path(__file__).parents[1] / "support/schemathesis.toml"
HOOKS = SETTINGS.with_name("schemathesis_hooks.py")


@pytest.fixture(scope="module")
def hub(quick_hub: None, folder: Path) -> Iterator[PayingHub]:
    """Ada and Bob are in ml101, Cleo is not; Ada has a session that is over, and one that runs."""
    with PayingHub(folder / "hub", CONFIG) as hub:
        for user in ("ada", "bob", "cleo"):
            hub.services.ledger.open_account(user)
        hub.start_server("ada", "past", gpus=1)
        hub.stop_server("ada", "past")
        hub.start_server("ada", gpus=1, gpu_model="A100")
        yield hub


def call(hub: PayingHub, who: str, method: str, path: str, **kwargs: Any) -> requests.Response:
    """The API as a member, or as one of the services, with a token."""
    if who not in ("bot", "reporter", "tutor", "nobody"):
        return hub.call(who, method, path, **kwargs)
    headers = {"Authorization": f"token token-of-{who}"}
    url = f"{hub.url}/services/gpu/api/{path}"
    return requests.request(method, url, headers=headers, timeout=120, **kwargs)


def grant(hub: PayingHub, who: str, account: str, amount: Any = "5", **more: Any) -> Any:
    """A grant, and what came of it."""
    body = {"amount": amount, "reason": "week 3", **more}
    return call(hub, who, "POST", f"accounts/{account}/grants", json=body)


# Who is kept out.


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


def test_tokens_of_services_and_without_our_scope_are_rejected(hub: PayingHub) -> None:
    """A service that is called as a member is not that member."""
    narrow = hub.api("POST", "users/ada/tokens", json={"scopes": ["read:users:name!user"]}).json()
    for token, paths in (
        ("token-of-ada", ("api/me", "api/leases", "")),
        (narrow["token"], ("api/me",)),
    ):
        headers = {"Authorization": f"token {token}"}
        for path in paths:
            answer = requests.get(f"{hub.url}/services/gpu/{path}", headers=headers, timeout=120)
            assert answer.status_code == 403, (token, path)
            assert "A100" not in answer.text


def test_unsupported_requests_change_nothing(hub: PayingHub) -> None:
    before = hub.services.ledger.account(member_account("bob"))
    browser = hub.browser_of("bob")
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("", "api/me", "admin"):
            url = f"{hub.url}/services/gpu/{path}"
            answer = browser.request(method, url, data={"amount": "100"}, timeout=120)
            assert answer.status_code in (401, 403, 405), f"{method} {path}"
            assert "Traceback" not in answer.text
    assert hub.services.ledger.account(member_account("bob")) == before
    for query in ("", "?code=x", "?error=denied", "?code=x&state=y"):
        back = requests.get(f"{hub.url}/services/gpu/oauth_callback{query}", timeout=120)
        assert back.status_code in (400, 403)
        assert "This did not work" in back.text
    assert requests.get(f"{hub.url}/services/gpu", timeout=120).ok
    assert "Traceback" not in hub.log_text()


# A course's bot.


def test_bot_grants_credits_to_its_group_once(hub: PayingHub) -> None:
    before = hub.services.ledger.member("bob").balance
    answer = grant(hub, "bot", "member:bob", "2.5", key="week-3")
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["granted"], told["amount"], told["key"]) == (True, "2.500000", "week-3")
    again = grant(hub, "bot", "member:bob", "2.5", key="week-3")
    assert again.json()["granted"] is False
    assert hub.services.ledger.member("bob").balance == before + 5 * MICRO // 2
    entry = hub.services.reports.statement_page("member:bob").entries[0]
    assert (entry.actor, entry.reason) == ("service:bot", "week 3")
    other = grant(hub, "bot", "member:bob", "3", key="week-3")
    assert (other.status_code, other.json()["error"]) == (409, "ledger")
    assert hub.services.ledger.member("bob").balance == before + 5 * MICRO // 2


@pytest.mark.parametrize(
    "account", ["member:cleo", "group:other", "member:admin", "member:bot", "member:nobody-known"]
)
def test_bot_cannot_access_other_accounts(hub: PayingHub, account: str) -> None:
    before = hub.services.ledger.accounts()
    answer = grant(hub, "bot", account)
    assert (answer.status_code, answer.json()["error"]) == (403, "not_allowed")
    assert f"You may not give credits to '{account}'." in answer.json()["message"]
    for path in (f"accounts/{account}", f"accounts/{account}/statement"):
        refused = call(hub, "bot", "GET", path)
        assert refused.status_code == 403
        assert "is not yours" in refused.json()["message"]
    # What runs goes on to be charged; nobody got anything.
    after = {account.name: account.balance for account in hub.services.ledger.accounts()}
    assert {a.name for a in before} == set(after)
    assert all(after[a.name] <= a.balance for a in before)


def test_bot_reads_only_accounts_of_its_group(hub: PayingHub) -> None:
    found = call(hub, "bot", "GET", "accounts").json()
    names = {account["account"] for account in found["accounts"]}
    assert {"member:ada", "member:bob"} <= names <= {"member:ada", "member:bob", "group:ml101"}
    assert call(hub, "bot", "GET", "accounts?search=cleo").json()["accounts"] == []
    statement = call(hub, "bot", "GET", "accounts/member:ada/statement?limit=1").json()
    assert len(statement["entries"]) == 1
    (lease,) = call(hub, "ada", "GET", "leases?limit=1").json()["leases"]
    assert call(hub, "bot", "GET", f"leases/{lease['id']}/receipt").ok
    for path in ("me", "leases", "devices", "queue", "trail", "usage", "notices"):
        assert call(hub, "bot", "GET", path).status_code == 403, path


def test_bot_cannot_revoke_or_administer_credits(hub: PayingHub) -> None:
    """It may give: what members have is not the bot's to drain."""
    before = hub.services.ledger.member("bob").balance
    refused = grant(hub, "bot", "member:bob", "-5")
    assert (refused.status_code, refused.json()["error"]) == (403, "not_allowed")
    assert "take none back: an amount below zero is for admins" in refused.json()["message"]
    assert hub.services.ledger.member("bob").balance == before
    lease = hub.services.reports.find_leases(user="ada").found[-1].id
    paths = [f"leases/{lease}/refund", f"leases/{lease}/stop", "grants", "rates", "refills"]
    for path in paths:
        body = {"reason": "x", "amount": "1", "csv": "bob,1", "rate": "0"}
        for who in ("bot", "ada", "reporter"):
            answer = call(hub, who, "POST", path, json=body)
            assert answer.status_code == 403, (path, who, answer.text)
    taken = grant(hub, ADMIN, "member:bob", "-5")
    assert taken.ok and hub.services.ledger.member("bob").balance == before - 5 * MICRO
    assert grant(hub, "bot", "member:bob", "5").ok


def test_bot_cannot_grant_to_former_group_members(hub: PayingHub) -> None:
    hub.api("DELETE", "groups/ml101/users", json={"users": ["bob"]}).raise_for_status()
    try:
        assert grant(hub, "bot", "member:bob").status_code == 403
        assert grant(hub, "bot", "member:ada").ok
    finally:
        hub.api("POST", "groups/ml101/users", json={"users": ["bob"]}).raise_for_status()
    assert grant(hub, "bot", "member:bob").ok


def test_service_needs_a_scope_for_each_api(hub: PayingHub) -> None:
    for path in ("accounts", "accounts/member:ada", "usage", "me"):
        assert call(hub, "nobody", "GET", path).status_code == 403
    assert grant(hub, "nobody", "member:ada").status_code == 403
    assert call(hub, "reporter", "GET", "usage").json()["total"]["sessions"] == 2
    for report in ("usage", "used"):
        assert call(hub, "tutor", "GET", report).status_code == 403, "a report is of everybody"
    assert call(hub, "reporter", "GET", "accounts").status_code == 403
    assert grant(hub, "reporter", "member:ada").status_code == 403


# Members and admins.


def test_member_reads_own_account_and_grants_nothing(hub: PayingHub) -> None:
    assert call(hub, "ada", "GET", "accounts/member:ada").ok
    for account in ("member:bob", "group:other", "member:nobody"):
        refused = call(hub, "ada", "GET", f"accounts/{account}/statement")
        assert (refused.status_code, refused.json()["error"]) == (403, "not_allowed")
        assert f"The account '{account}' is not yours" in refused.json()["message"]
    for account in ("member:ada", "member:bob"):
        assert grant(hub, "ada", account).status_code == 403
    lease = hub.services.reports.find_leases(user="ada").found[0].id
    refused = call(hub, "cleo", "GET", f"leases/{lease}/receipt")
    assert refused.status_code == 403
    assert "This session is not yours" in refused.json()["message"]
    assert call(hub, "cleo", "GET", f"leases/{'0' * 16}/receipt").json() == refused.json()


def test_statement_pagination_covers_every_entry(hub: PayingHub) -> None:
    for number in range(6):
        hub.services.ledger.grant(
            "member:cleo", MICRO + number, actor="kim", reason=f"number {number}"
        )
    found, before = [], ""
    while True:
        page = call(hub, ADMIN, "GET", f"accounts/member:cleo/statement?limit=3{before}").json()
        found += page["entries"]
        if page["next"] is None:
            break
        before = f"&before={page['next']}"
    assert len(found) >= 7
    assert [entry["id"] for entry in found] == sorted((e["id"] for e in found), reverse=True)
    for newer, older in pairwise(found):
        assert Decimal(newer["balance"]) - Decimal(newer["amount"]) == Decimal(older["balance"])
    empty = call(hub, ADMIN, "GET", "accounts/member:cleo/statement?before=")
    assert empty.status_code == 400 and "'before'" in empty.json()["message"]


def test_invalid_grant_changes_nothing(hub: PayingHub) -> None:
    """The message for each field: tests/unit/web/test_operations.py."""
    before = hub.services.ledger.member("cleo")
    for fields, sentence in (
        ({"amount": "NaN"}, "'NaN'"),
        ({"amount": "1" + "0" * 30}, "'amount'"),
        ({"key": "x y"}, "'key'"),
        ({"device": "GPU-1"}, "There is no field 'device'"),
    ):
        body = {"amount": "5", "reason": "x", **fields}
        answer = call(hub, ADMIN, "POST", "accounts/member:cleo/grants", json=body)
        assert answer.status_code == 400, answer.text
        assert sentence in answer.json()["message"]
    assert hub.services.ledger.member("cleo") == before


def test_unknown_account_is_rejected(hub: PayingHub) -> None:
    for account in ("member:nobody", "group:nobody", "nobody", "system:grants", "member:%00"):
        answer = grant(hub, ADMIN, account)
        assert answer.status_code in (403, 404), account
        assert "Traceback" not in answer.text
        assert call(hub, ADMIN, "GET", f"accounts/{account}").status_code in (403, 404)


def test_usage_report_adds_up_by_every_grouping(hub: PayingHub) -> None:
    lease = hub.services.reports.find_leases(user="ada").found[-1]
    for by, names in {
        "member": {"ada"},
        "account": {"member:ada"},
        "model": {"A100-80GB", "T4"},
        "environment": {"default"},
    }.items():
        report = call(hub, ADMIN, "GET", f"usage?by={by}").json()
        assert {row["name"] for row in report["rows"]} <= names
        assert sum(Decimal(row["credits"]) for row in report["rows"]) == Decimal(
            report["total"]["credits"]
        )
        assert Decimal(report["total"]["credits"]) >= Decimal(lease.charged) / MICRO
        assert report["total"]["sessions"] == 2
    assert len(call(hub, ADMIN, "GET", "usage?by=week").json()["rows"]) == 4
    for query in ("by=x", "from=x", "to=2020-02-30", "from=2026-03-02&to=2026-03-01", "to="):
        assert call(hub, ADMIN, "GET", f"usage?{query}").status_code == 400, query


# What admins change.


def test_bulk_grant_applies_once_after_a_dry_run(hub: PayingHub) -> None:
    before = hub.services.ledger.member("bob").balance
    body = {"csv": "bob,2.5,\ncleo,1,hello", "reason": "homework"}
    dry = call(hub, ADMIN, "POST", "grants", json={**body, "dry_run": True}).json()
    assert (dry["done"], dry["total"], dry["problems"]) == (False, "3.500000", [])
    assert [line["account"] for line in dry["lines"]] == ["member:bob", "member:cleo"]
    assert hub.services.ledger.member("bob").balance == before
    until = "2999-01-01T00:00:00Z"
    done = call(hub, ADMIN, "POST", "grants", json={**body, "until": until}).json()
    assert done["done"] and hub.services.ledger.member("bob").balance == before + 5 * MICRO // 2
    assert hub.services.ledger.ending_of(["member:bob"])["member:bob"][0][1] == 5 * MICRO // 2
    again = call(hub, ADMIN, "POST", "grants", json=body)
    assert again.status_code == 409 and "were given at" in again.json()["message"]
    wrong = {"csv": "zoe,1\nbob,NaN", "reason": "x", "dry_run": True}
    problems = call(hub, ADMIN, "POST", "grants", json=wrong).json()["problems"]
    assert [problem["line"] for problem in problems] == [1, 2]
    assert call(hub, ADMIN, "POST", "grants", json={"csv": 5}).status_code == 400


def test_grant_expiry_must_be_in_the_future(hub: PayingHub) -> None:
    given = grant(hub, ADMIN, "member:cleo", "4", until="2999-01-01T01:00:00+01:00")
    assert given.json()["until"] == "2999-01-01T00:00:00.000Z"
    over = grant(hub, ADMIN, "member:cleo", "4", until="2020-01-01T00:00:00Z")
    assert (over.status_code, "in the past" in over.json()["message"]) == (409, True)


def test_admin_sets_and_removes_a_rate(hub: PayingHub) -> None:
    body = {"rate": "2.5", "model": "T4", "hours": "Sat, Sun", "zone": "Europe/Vienna"}
    body |= {"from": "2999-01-01T00:00:00Z", "reason": "weekends"}
    made = call(hub, ADMIN, "POST", "rates", json=body).json()
    assert (made["rate_per_hour"], made["from"]) == ("2.500000", "2999-01-01T00:00:00.000Z")
    assert made in call(hub, ADMIN, "GET", "rates").json()["rates"]
    for field, value in (("rate", "1,5"), ("rate", 2), ("hours", "x"), ("zone", "Mars"), ("x", 1)):
        refused = call(hub, ADMIN, "POST", "rates", json={**body, field: value})
        assert refused.status_code == 400, field
        assert f"'{field}'" in refused.json()["message"]
    path = f"rates/{made['id']}/remove"
    assert call(hub, ADMIN, "POST", path, json={"reason": "over"}).json() == made
    assert call(hub, ADMIN, "POST", path, json={}).status_code == 404


def test_refill_is_previewed_created_once_and_ended(hub: PayingHub) -> None:
    body = {"rule": "FREQ=WEEKLY;BYDAY=MO", "amount": "5", "audience": ["members:ml101"]}
    body |= {"from": "2999-01-01T00:00:00Z", "keep_days": 7, "reason": "term", "key": "term"}
    tried = call(hub, ADMIN, "POST", "refills", json={**body, "dry_run": True}).json()
    assert (tried["made"], tried["keep_seconds"]) == (False, 7 * 86400)
    assert [gift["account"] for gift in tried["gifts"]] == ["member:ada", "member:bob"]
    assert hub.services.refills.all_refills() == []
    first, second = (call(hub, ADMIN, "POST", "refills", json=body).json() for _ in range(2))
    for answer in (first, second):
        answer.pop("gifts")  # balances go on: Ada's server runs
    assert first == second and len(hub.services.refills.all_refills()) == 1
    told = call(hub, ADMIN, "GET", f"refills/{first['id']}").json()
    assert told["comes_at"] == tried["comes_at"] and len(told["comes_at"]) == 5
    other = call(hub, ADMIN, "POST", "refills", json={**body, "amount": "6"})
    assert (other.status_code, "same key" in other.json()["message"]) == (400, True)
    for field, value in (("rule", "x"), ("amount", "-1"), ("audience", []), ("keep_days", 0)):
        refused = call(hub, ADMIN, "POST", "refills", json={**body, field: value, "key": "k"})
        assert refused.status_code == 400, field
    ended = call(hub, ADMIN, "POST", f"refills/{first['id']}/end", json={"reason": "over"}).json()
    assert ended["comes_at"] == [] and hub.services.refills.all_refills() == []


def test_session_is_stopped_and_refunded_in_parts(hub: PayingHub) -> None:
    lease = hub.start_server("cleo", "stopped", gpus=1, gpu_model="A100")
    wait_for(lambda: hub.services.leases.get(lease.id).charged > 2, "a charge", timeout=60)
    refused = call(hub, ADMIN, "POST", f"leases/{lease.id}/refund", json={"reason": "x"})
    assert (refused.status_code, "is still open" in refused.json()["message"]) == (409, True)
    assert call(hub, ADMIN, "POST", f"leases/{lease.id}/stop", json={}).status_code == 400
    why = {"reason": "a new fan"}
    stopped = call(hub, ADMIN, "POST", f"leases/{lease.id}/stop", json=why).json()
    assert (stopped["outcome"], stopped["end_reason"]) == ("admin", "a new fan")
    again = call(hub, ADMIN, "POST", f"leases/{lease.id}/stop", json=why)
    assert again.status_code == 409, again.text
    wait_for(lambda: hub.services.leases.get(lease.id).ended_at, "the stop", timeout=60)
    cost = hub.services.leases.get(lease.id).charged
    part = {"amount": "0.000001", "reason": "a slow disk", "key": "mail-7"}
    for _ in range(2):
        told = call(hub, ADMIN, "POST", f"leases/{lease.id}/refund", json=part).json()
        assert told["refunded"] == "0.000001"
        assert Decimal(told["charged"]) * MICRO == cost - 1
    for amount in ("100000", "0", "-1", "1,5", 1):
        body = {**part, "amount": amount, "key": "other"}
        refused = call(hub, ADMIN, "POST", f"leases/{lease.id}/refund", json=body)
        assert refused.status_code in (400, 409), amount
    rest = call(hub, ADMIN, "POST", f"leases/{lease.id}/refund", json={"reason": "all"}).json()
    assert (rest["charged"], rest["outcome"]) == ("0.000000", "refunded")
    receipt = call(hub, "cleo", "GET", f"leases/{lease.id}/receipt").json()
    assert receipt["total"] == "0.000000"
    assert [item["kind"] for item in receipt["items"]][-2:] == ["refund", "refund"]


# The document.


def test_openapi_document_is_public(hub: PayingHub) -> None:
    answer = requests.get(f"{hub.url}/services/gpu/api/openapi.json", timeout=120)
    assert answer.ok
    assert answer.json()["openapi"] == "3.1.0"
    assert answer.json()["servers"] == [{"url": "/services/gpu"}]


@pytest.mark.parametrize("who", [ADMIN, "ada", *(["bot"] if SOAK else [])])
def test_service_conforms_to_its_openapi_document(
    hubs: None, hub: PayingHub, who: str, tmp_path: Path
) -> None:
    """As whom nearly all is refused, what is made up at random is enough; as an admin also every
    limit in the document, and one request after the other. Requests go to the service directly:
    the proxy is not under test."""
    url = hub.api("GET", "services/gpu").json()["url"]
    token = "token-of-bot" if who == "bot" else hub.user_token(who)
    phases, examples = ([], 20) if who == ADMIN else (["--phases", "fuzzing"], 5)
    examples = 60 if SOAK else examples
    member = hub.services.ledger.account(member_account("cleo"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(SETTINGS), "run"),
            *("--header", f"Authorization: token {token}", "--seed", str(SEED % 2**32)),
            *("--max-examples", str(examples), "--no-color", *phases),
            f"{url}/services/gpu/api/openapi.json",
        ],
        cwd=tmp_path,
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "0 failed" not in done.stdout
    assert "Traceback" not in hub.log_text()
    if who != ADMIN:
        assert hub.services.ledger.account(member_account("cleo")) == member
