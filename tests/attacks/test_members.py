"""A member with a browser, a member with a token, a thief with a server's token, a service, and a
stranger. Real: hub, proxy, service, containers of a Docker Engine; each attempt is counted."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import requests

from tests.support.attack_hub import HOSTILE, OWNER, THIEF, VICTIM, AttackHub
from tests.support.attack_requests import FRIEND, Call, Requests
from tests.support.attacks import Attempts
from tests.support.http_client import new_session
from tests.support.hub import ADMIN, NAVIGATION, USER_PASSWORD
from tests.support.processes import wait_for

SMUGGLED: list[dict[str, Any]] = [
    {"devices": "GPU-0"},
    {"device_ids": ["0"]},
    {"NVIDIA_VISIBLE_DEVICES": "all"},
    {"environment": "small", "image": "evil/image"},
    {"environment": "staff.evil"},
    {"environment": "small; privileged=1"},
    {"own_image": "gpuspawner/exits:test"},
    {"volumes": {"/": "/host"}},
    {"binds": "/var/run/docker.sock:/s"},
    {"extra_host_config": {"privileged": True}},
    {"cmd": ["bash"]},
    {"mem_limit": "1T"},
    {"data": ["exams"]},
    {"data": "../../etc"},
    {"account": f"member:{VICTIM}"},
    {"account": "group:staff"},
    {"account": "system:mint"},
    {"options": "image=evil"},
    {"gpus": 1, "hours": "1e9"},
]
"""What a start must not be able to say."""

REPORTS = {name for which in ("usage", "used") for name in (which, f"{which}.csv", f"api/{which}")}
"""What who holds the scope for reports may read."""

OWN = {
    *("POST notices", "PUT api/notices/choices"),
    *("POST payer", "POST folders", "POST api/folders"),
    *("POST api/runs", "POST api/runs/-/quote"),
    *("POST api/sweeps", "POST api/sweeps/-/quote", "POST api/runs/-/schedules"),
}
"""What every member may do, with what is theirs."""


@pytest.fixture(scope="module")
def thief(hub: AttackHub) -> str:
    """Mallory's API token, which may do what he may."""
    return hub.user_token(THIEF)


@pytest.fixture(scope="module")
def right(hub: AttackHub) -> Requests:
    """A request for each door, which works for who may make it."""
    return Requests(hub)


# What a start may say.


def test_forbidden_start_options_are_rejected(hub: AttackHub, attempt: Attempts) -> None:
    before = hub.kept()
    running = {c["Id"] for c in hub.containers()}
    for options in SMUGGLED:
        rest = hub.spawn("bob", options)
        attempt(f"{options} by REST", refused=400 <= rest.status_code < 500)
        plain = {name: str(value) for name, value in options.items()}
        form = hub.send_refused_form("bob", plain)
        attempt(f"{options} by the form", refused=400 <= form.status_code < 500)
        hub.open_page("bob", "/hub/spawn", **{f"opt-{name}": v for name, v in plain.items()})
        attempt(f"{options} by a link", refused=hub.server("bob") is None)
    assert {c["Id"] for c in hub.containers()} == running
    assert hub.kept() == before
    hub.spawn_and_wait("bob", {"environment": "small", "gpus": 0})  # without any of it he may
    hub.stop_server("bob")


# What is another member's.


def test_every_handler_rejects_another_member(
    hub: AttackHub, right: Requests, attempt: Attempts
) -> None:
    """Mallory at every method of every handler, with what works for Olga or an admin: what is for
    scripts by token, and pages with cookies."""
    calls = right.calls()
    assert len(calls) > 100
    for ready in calls:
        call = ready()
        if str(call) in OWN:
            continue
        before = hub.kept()
        answer = right.send(call, THIEF, by_token=call.scripted)
        assert hub.kept() == before, call
        counts = right.works(call, [answer], by_token=call.scripted)
        what = f"{call} by {THIEF}: {answer.status_code}"
        attempt(what, refused=_keeps_out(call, answer), counts=counts)
    right.assert_known(attempt.uncounted)


def test_member_cannot_access_other_servers_or_hub_admin_api(
    hub: AttackHub, thief: str, attempt: Attempts
) -> None:
    sessions = hub.browser_of(THIEF)
    for path in ("api/contents", "api/kernels", "api/terminals", "lab", "api/sessions"):
        url = f"{hub.server_url(VICTIM)}/{path}"
        headers = {"Authorization": f"token {thief}"}
        answer = requests.get(url, headers=headers, timeout=60)
        attempt(f"{path} of her server by token", refused=answer.status_code == 403)
        shown = sessions.get(url, headers=NAVIGATION, timeout=60)
        attempt(f"{path} of her server by cookie", refused=shown.status_code == 403)
    calls: list[tuple[str, str, Mapping[str, Any]]] = [
        ("GET", f"users/{VICTIM}", {}),
        ("DELETE", f"users/{VICTIM}/server", {}),
        ("POST", f"users/{VICTIM}/server", {}),
        ("DELETE", f"users/{VICTIM}", {}),
        ("GET", f"users/{VICTIM}/tokens", {}),
        ("POST", f"users/{VICTIM}/tokens", {}),
        ("GET", f"users/{VICTIM}/server/progress", {}),
        ("PATCH", f"users/{THIEF}", {"admin": True}),
        ("GET", "users", {}),
        ("POST", "groups/staff/users", {"users": [THIEF]}),
        ("GET", "proxy", {}),
        ("POST", "shutdown", {}),
        ("GET", "services", {}),
    ]
    for method, path, body in calls:
        headers = {"Authorization": f"token {thief}"}
        answer = hub.api(method, path, headers=headers, json=body)
        seen = answer.ok and VICTIM not in answer.text and answer.text in ("{}", "[]")
        refused = answer.status_code in (400, 403, 404, 405) or seen
        counts = _works_for_admins(hub, method, path, body)
        attempt(f"{method} {path}: {answer.status_code}", refused=refused, counts=counts)
    assert hub.server(VICTIM), "she works on"


# Tokens that are not what they seem.


def test_forged_expired_revoked_or_foreign_tokens_are_rejected(
    hub: AttackHub, attempt: Attempts
) -> None:
    made = hub.api("POST", f"users/{VICTIM}/tokens", json={"expires_in": 1}).json()
    revoked = hub.api("POST", f"users/{VICTIM}/tokens", json={}).json()
    assert hub.api("DELETE", f"users/{VICTIM}/tokens/{revoked['id']}").ok
    used = hub.api("POST", f"users/{ADMIN}/tokens", json={}).json()
    assert hub.service("GET", "api/trail", token=used["token"]).ok, "good until it is revoked"
    assert hub.api("DELETE", f"users/{ADMIN}/tokens/{used['id']}").ok
    narrow = hub.api(
        "POST", f"users/{VICTIM}/tokens", json={"scopes": [f"read:users:name!user={VICTIM}"]}
    ).json()
    expired = {"Authorization": f"token {made['token']}"}
    wait_for(lambda: not hub.api("GET", "user", headers=expired).ok, "the token to expire")
    tokens = {
        "a forged token": secrets.token_hex(32),
        "a token of nothing": "",
        "an expired token": made["token"],
        "a revoked token": revoked["token"],
        "a narrowed token": narrow["token"],
        "the token of Mallory's server": _server_token(hub, THIEF),
        "a service that may do nothing": f"token-of-stranger-{hub.secret}",
    }
    before = hub.kept()
    wait_for(
        lambda: not hub.service("GET", "api/trail", token=used["token"]).ok,
        "the service to hear of it",
    )
    tokens["a revoked token that was used"] = used["token"]
    for what, token in tokens.items():
        for path in ("api/me", "api/queue", f"leases/{hub.lease}", "metrics", "api/accounts"):
            answer = hub.service("GET", path, token=token)
            refused = answer.status_code in (302, 401, 403) or (
                "Mallory" in what and VICTIM not in answer.text and hub.lease not in answer.text
            )
            attempt(f"{path} with {what}: {answer.status_code}", refused=refused)
        door = f"api/accounts/member:{THIEF}/grants"
        gives = hub.service("POST", door, token=token, json={"amount": "5", "reason": "x"})
        attempt(f"{door} with {what}", refused=gives.status_code in (302, 401, 403))
    assert hub.kept() == before


def test_stolen_server_token_gives_little_access(hub: AttackHub, attempt: Attempts) -> None:
    """What somebody can do who reads Victoria's token in her container."""
    token = _server_token(hub, VICTIM)
    calls: list[tuple[str, str, Mapping[str, Any]]] = [
        ("GET", "users", {}),
        ("GET", f"users/{THIEF}", {}),
        ("POST", f"users/{VICTIM}/tokens", {"scopes": ["admin:users"]}),
        ("POST", f"users/{VICTIM}/tokens", {}),
        ("PATCH", f"users/{VICTIM}", {"admin": True}),
        ("DELETE", f"users/{THIEF}/server", {}),
        ("POST", f"users/{VICTIM}/server", {"environment": "staff"}),
        ("POST", f"users/{VICTIM}/servers/other", {}),
        ("POST", "users/new-admin", {"admin": True}),
        ("POST", "groups/evil", {}),
        ("GET", "groups", {}),
        ("GET", "services", {}),
        ("GET", "proxy", {}),
        ("POST", "proxy", {}),
        ("POST", "shutdown", {}),
        ("GET", "info", {}),
    ]
    for method, path, body in calls:
        headers = {"Authorization": f"token {token}"}
        answer = hub.api(method, path, headers=headers, json=body)
        nothing = answer.ok and answer.text.strip() in ("[]", "{}")
        refused = answer.status_code in (400, 403, 404) or nothing
        counts = _works_for_admins(hub, method, path, body)
        attempt(f"{method} {path}", refused=refused, counts=counts)
    for door in (f"api/accounts/member:{VICTIM}", f"api/leases/{hub.lease}/receipt"):
        answer = hub.service("GET", door, token=token)
        attempt(f"{door} with the token of a server", refused=answer.status_code in (401, 403))
    thiefs = _server_token(hub, THIEF)
    for method, path in (("GET", "now"), ("POST", "snooze"), ("POST", "extend"), ("POST", "end")):
        door = f"leases/{hub.lease}/{path}"
        answer = hub.service(method, f"api/{door}", token=thiefs)
        attempt(f"{door} with the token of another's server", refused=answer.status_code == 404)
        headers = {"Authorization": f"token {thiefs}"}
        answer = hub.api(method, f"gpuspawner/{door}", headers=headers)
        attempt(f"{door} by way of the hub's API", refused=answer.status_code == 404)


def test_service_cannot_exceed_its_scopes(
    hub: AttackHub, right: Requests, attempt: Attempts
) -> None:
    grant = {"amount": "5", "reason": "x"}
    may = {"bot": {"api/accounts"}, "reporter": REPORTS}
    tokens = {name: f"token-of-{name}-{hub.secret}" for name in may}
    for ready in right.calls():
        call = ready()
        if call.path in ("api/openapi.json", "catalog.schema.json"):
            continue
        if call.method != "GET" and not call.scripted:
            continue  # forms take no token, whosever it is
        before = hub.kept()
        tried = {
            name: hub.service(call.method, call.path, token=token, **call.body)
            for name, token in tokens.items()
            if call.path not in may[name]
        }
        assert hub.kept() == before, call
        counts = right.works(call, tried.values(), by_token=True)
        for name, answer in tried.items():
            refused = not answer.ok or 300 <= answer.status_code < 400
            what = f"{call} by the service {name}: {answer.status_code}"
            attempt(what, refused=refused, counts=counts)
    right.assert_known(attempt.uncounted)
    before = hub.kept()
    for token in tokens.values():
        headers = {"Authorization": f"token {token}"}
        for path in ("users", "groups", "proxy", f"users/{VICTIM}"):
            answer = hub.api("GET", path, headers=headers)
            attempt(f"{path} by a service", refused=not answer.ok)
    for account, amount in (("member:bob", "-5"), (f"member:{VICTIM}", "5"), ("system:mint", "5")):
        body = {**grant, "amount": amount}
        path = f"api/accounts/{account}/grants"
        answer = hub.service("POST", path, token=f"token-of-bot-{hub.secret}", json=body)
        attempt(f"{amount} for {account} by the bot", refused=answer.status_code in (400, 403))
    assert hub.kept() == before


# A page of somebody else's, in the browser of a member or an admin.


@pytest.mark.parametrize("user", [OWNER, FRIEND, ADMIN])
def test_cross_site_requests_are_rejected(
    hub: AttackHub, right: Requests, user: str, attempt: Attempts
) -> None:
    """Every POST of ours that works for the member from a page of ours: with their cookies, and
    without the proof that they sent it."""
    hub.open_page(user, "/services/gpu/")  # signed in at the service too
    assert hub.browse(user, "GET", "").status_code == 200
    foreign = {"Sec-Fetch-Mode": "cors", "Sec-Fetch-Site": "cross-site", "Origin": "https://evil"}
    for ready in right.calls(by=user):
        call = ready()
        before = hub.kept()
        answers = []
        for headers in (foreign, NAVIGATION):
            forged = call.body
            if "data" in forged:
                forged["data"]["_xsrf"] = "2|0|0|0"
            answers.append(hub.browse(user, call.method, call.path, headers=headers, **forged))
        assert hub.kept() == before, call
        counts = right.works(call, by_token=False)
        for answer in answers:
            refused = answer.status_code == 403
            attempt(f"{call} without XSRF: {answer.status_code}", refused=refused, counts=counts)
    right.assert_known(attempt.uncounted)
    before = hub.kept()
    session = hub.browser_of(user)
    for method, path in [
        ("POST", f"users/{user}/tokens"),
        ("POST", f"users/{user}/server"),
        ("DELETE", f"users/{VICTIM}/server"),
    ]:
        url = f"{hub.url}/hub/api/{path}"
        answer = session.request(method, url, headers=foreign, json={}, timeout=60)
        attempt(f"{method} {path} without XSRF", refused=answer.status_code == 403)
    for page in ("/hub/spawn", "/hub/login"):
        answer = session.post(hub.url + page, data={"environment": "small"}, headers=foreign)
        attempt(f"POST {page} without XSRF", refused=answer.status_code == 403)
    assert hub.kept() == before


@pytest.mark.parametrize("signed_in", [True, False])
def test_redirects_stay_on_the_hub(hub: AttackHub, signed_in: bool, attempt: Attempts) -> None:
    for target in (
        *("https://evil.example/", "//evil.example/", "/\\evil.example/", "\\\\evil.example/"),
        *("https:evil.example", "///evil.example", "/%2f/evil.example", "javascript:alert(1)"),
        *("http://127.0.0.1:1/", "https://evil.example\\@127.0.0.1/", "\thttps://evil.example/"),
    ):
        if signed_in:
            session = hub.browser_of(THIEF)
            asked: dict[str, Any] = {
                "params": {"next": target},
                "allow_redirects": False,
                "timeout": 60,
            }
            pages = ("/hub/login", "/hub/welcome/first", "/hub/")
            answers = [session.get(hub.url + page, **asked) for page in pages]
        else:
            session = new_session()
            path = f"/hub/login?next={quote(target, safe='')}"
            fields = {"username": "bob", "password": USER_PASSWORD}
            assert session.get(hub.url + path, headers=NAVIGATION, timeout=60).ok
            fields["_xsrf"] = session.cookies.get("_xsrf", path="/hub/") or ""
            asked = {"data": fields, "headers": NAVIGATION, "allow_redirects": False}
            answers = [session.post(hub.url + path, **asked)]
            assert answers[0].status_code in (302, 400, 403), "signed in, or refused"
        for answer in answers:
            led = answer.headers.get("Location", "")
            refused = answer.status_code in (200, 302, 400, 403) and _stays(hub, led)
            attempt(f"next={target!r} leads to {led!r}", refused=refused)
    for path in ("services/gpu/oauth_callback?code=x&state=forged", "services/gpu//evil.example"):
        answer = requests.get(f"{hub.url}/{path}", allow_redirects=False, timeout=60)
        attempt(path, refused=_stays(hub, answer.headers.get("Location", "")))


def test_user_input_is_never_rendered_as_script(hub: AttackHub, attempt: Attempts) -> None:
    """A name, a reason, a folder and an environment that are scripts, on every page there is."""
    user = '"><img src=x onerror=window.hacked=1>'
    assert hub.api("POST", f"users/{quote(user, safe='')}").ok
    sent = {"amount": "1", "reason": HOSTILE}
    granted = hub.service("POST", f"api/accounts/member:{VICTIM}/grants", ADMIN, json=sent)
    assert granted.ok, granted.text
    hub.service("POST", "api/folders", THIEF, json={"name": HOSTILE})
    stop = {"reason": HOSTILE, "points": 1}
    assert hub.service("POST", f"api/queue/{hub.ticket}/boost", ADMIN, json=stop).ok
    shown = 0
    pages = [f"/services/gpu/{d.path}" for d in hub.doors() if d.method == "GET"]
    pages = [page for page in pages if "/api/" not in page and "oauth" not in page]
    pages += ["/hub/environments", "/hub/environments/small", "/hub/spawn", "/hub/home"]
    pages += ["/hub/welcome", "/hub/welcome/first"]
    pages += ["/hub/admin", f"/hub/spawn/{THIEF}/{quote(HOSTILE, safe='')}"]
    pages += [f"/services/gpu/{quote(HOSTILE, safe='')}", "/hub/spawn?opt-environment=" + HOSTILE]
    for page in pages:
        answer = hub.browser_of(ADMIN).get(hub.url + page, headers=NAVIGATION, timeout=60)
        if "text/html" not in answer.headers.get("Content-Type", ""):
            continue
        bare = "<img src=x" in answer.text or "<script>window.hacked" in answer.text
        shown += "&lt;img src=x" in answer.text
        attempt(f"a script on {page}", refused=not bare and 'href="javascript:' not in answer.text)
        policy = answer.headers.get("Content-Security-Policy", "")
        ours = "/services/gpu/" not in page or "default-src 'none'" in policy
        attempt(f"{page} in a frame of another site", refused="frame-ancestors" in policy and ours)
    assert shown >= 4, "they were there to be seen"


# Below here: how.


def _keeps_out(call: Call, answer: requests.Response) -> bool:
    """Whether who sent this neither changed nor read anything of Olga's."""
    if answer.ok and 300 <= answer.status_code < 400:
        return True
    if any(word in answer.text for word in call.hers if word not in call.path):
        return False
    return not answer.ok or (call.method == "GET" and not any(w in call.path for w in call.hers))


def _works_for_admins(hub: AttackHub, method: str, path: str, body: Mapping[str, Any]) -> bool:
    """Whether the same call at the Hub works for an admin. It is undone; what cannot be undone is
    not tried, and counts as what does not work for anybody."""
    undo: dict[str, tuple[str, str, Mapping[str, Any]] | None] = {
        f"POST users/{VICTIM}/tokens": None,
        f"PATCH users/{THIEF}": ("PATCH", path, {"admin": False}),
        f"PATCH users/{VICTIM}": ("PATCH", path, {"admin": False}),
        "POST groups/staff/users": ("DELETE", path, body),
        "POST groups/evil": ("DELETE", path, {}),
        "POST users/new-admin": ("DELETE", path, {}),
        "POST proxy": None,
    }
    call = f"{method} {path}"
    if method != "GET" and call not in undo:
        return False
    headers = {"Authorization": f"token {hub.user_token(ADMIN)}"}
    sent = body if method != "GET" else None
    works = hub.api(method, path, json=sent, headers=headers).ok
    if works and (back := undo.get(call)):
        hub.api(back[0], back[1], json=back[2], headers=headers).raise_for_status()
    return works


def _server_token(hub: AttackHub, user: str) -> str:
    environment = hub.container(user)["Config"]["Env"]
    [token] = [e.split("=", 1)[1] for e in environment if e.startswith("JUPYTERHUB_API_TOKEN=")]
    return str(token)


def _stays(hub: AttackHub, location: str) -> bool:
    """Whether a browser that follows this stays at the hub."""
    location = location.replace("\\", "/")
    place = urlsplit(location)
    return not location.startswith("//") and place.netloc in ("", urlsplit(hub.url).netloc)
