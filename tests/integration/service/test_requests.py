"""Requests that no browser of ours sends. Real: the accounting service as a process, SQLite, HTTP;
its Hub is a stand-in that says who asks."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from gpuspawner.web.app import BODY_BYTES, HEADER_BYTES
from tests.support.attack_hub import Door, doors
from tests.support.hub import ADMIN, NAVIGATION
from tests.support.processes import PATIENCE
from tests.support.service_process import PREFIX, ServiceProcess
from tests.support.tier import SOAK

NOTHING = {
    "accounts": "member:ada",
    "catalog": "small",
    "devices": "GPU-0",
    "files": "run.log",
    "folders": "0" * 16,
    "leases": "0" * 32,
    "members": "nobody",
    "queue": "0" * 32,
    "rates": "1",
    "refills": "1",
    "runs": "none-0",
    "schedules": "none-0",
    "sweeps": "none-0",
    "tickets": "0" * 32,
    "transfers": "0" * 32,
}
"""Ids that a path may have; there is nothing behind most of them."""

FORGED = "2|1:0|10:1|11:service-gpu|4:AAAA|00"

BODIES: tuple[dict[str, Any], ...] = (
    {},
    {"data": {"confirm": "yes", "account": "member:ada"}},
    {"json": {"reason": "x"}},
    {"files": {"file": b"ada,5"}},
    {"data": b"\xff\xfe%zz=&_xsrf=%ff", "type": "application/x-www-form-urlencoded"},
    {"data": b"--x\r\nnonsense", "type": "multipart/form-data; boundary=x"},
    {"data": b"[" * 2000, "type": "application/json"},
)


@pytest.fixture(scope="module")
def service(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("service")) as service:
        yield service


def test_form_without_xsrf_cookie_is_rejected(service: ServiceProcess) -> None:
    ada = service.sign_in("ada")
    ada.cookies.set("_xsrf", None)
    refused = ada.post(
        f"{service.url}payer",
        data={"account": "member:ada", "_xsrf": "x"},
        headers=NAVIGATION,
        timeout=15 * PATIENCE,
    )
    assert refused.status_code == 403
    assert "This form is too old" in refused.text
    service.wait_rounds(2)


def test_every_route_survives_forged_requests(service: ServiceProcess) -> None:
    """Session cookies, XSRF cookies, proofs and bodies that are missing, wrong or another's."""
    ada, bob = service.sign_in("ada"), service.sign_in("bob")
    foreign = bob.cookies.get("_xsrf", path=PREFIX)
    xsrfs = (None, "wrong", '"', foreign)
    proofs: list[tuple[str, str | None]] = [
        ("none", None),
        *itertools.product(("field", "header", "query"), ("wrong", foreign)),
    ]
    modes = ({}, NAVIGATION, {"Sec-Fetch-Mode": "cors", "Sec-Fetch-Site": "cross-site"})
    every = list(itertools.product(xsrfs, proofs))
    bodies, ways, strange, cookie = map(itertools.cycle, (BODIES, modes, every, xsrfs))
    found = list(doors(NOTHING))
    assert len(found) > 100
    for door in found:
        changes = door.method not in ("GET", "HEAD")
        # Signed in, every proof with a cookie in its turn (in a soak with each): four routes have
        # all combinations. As a stranger, each in its turn.
        mine = every if SOAK else [(next(cookie), proof) for proof in proofs]
        tries = [(ada.cookies.get("service-gpu"), *each) for each in mine]
        tries += [(session, *next(strange)) for session in (None, FORGED) for _ in range(3)]
        for session, xsrf, (place, proof) in tries:
            if not changes and place in ("field", "header"):
                continue
            cookies = {"service-gpu": session, "_xsrf": xsrf}
            answer = _send(service, door, cookies, place, proof, next(ways), next(bodies))
            what = f"{door} {cookies} {place}={proof}: {answer.status_code} {answer.text[:300]}"
            assert answer.status_code < 500, what
            if changes:
                assert answer.status_code in (400, 401, 403, 404, 405), what
    service.wait_rounds(2)
    assert service.ask("GET", "api/me", "ada").ok


def _send(
    service: ServiceProcess,
    door: Door,
    cookies: dict[str, str | None],
    place: str,
    proof: str | None,
    way: dict[str, str],
    body: dict[str, Any],
) -> requests.Response:
    sent = dict(body)
    headers = dict(way)
    cookie = "; ".join(f"{name}={value}" for name, value in cookies.items() if value)
    if cookie:
        headers["Cookie"] = cookie
    if kind := sent.pop("type", ""):
        headers["Content-Type"] = kind
    if proof and place == "header":
        headers["X-XSRFToken"] = proof
    if proof and place == "query":
        sent["params"] = {"_xsrf": proof}
    if proof and place == "field" and isinstance(sent.get("data", {}), dict):
        sent["data"] = {**sent.get("data", {}), "_xsrf": proof}
        sent.pop("json", None)
    return service.ask(door.method, door.path, headers=headers, **sent)


HOSTILE = 1000
MOST_BYTES = 256 * 1024 * 1024
"""What :mod:`gpuspawner.web.app` says that so many connections hold at most."""


def test_hostile_connections_use_bounded_memory(service: ServiceProcess) -> None:
    """Headers without an end, bodies just below the limit, and bodies far above it."""
    service.ask("GET", "api/me", "ada")
    before = service.rss
    head = f"POST {PREFIX}payer HTTP/1.1\r\nHost: x\r\n".encode()
    kinds = (
        head + b"X-Long: " + b"x" * (HEADER_BYTES - 1000),
        head + f"Content-Length: {BODY_BYTES}\r\n\r\n".encode() + b"x" * (BODY_BYTES - 1),
        head + b"Content-Length: 99000000\r\n\r\n" + b"x" * 1024 * 1024,
        head
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"10000\r\n"
        + (b"x" * 65536 + b"\r\n10000\r\n") * 15,
        f"POST {PREFIX}bulk HTTP/1.1\r\nHost: x\r\nAuthorization: token token-of-ada\r\n".encode()
        + b"Content-Length: 4000000\r\n\r\n"
        + b"x" * 1024 * 1024,
    )
    with ExitStack() as stack:
        for number in range(HOSTILE):
            connection = socket.create_connection(("127.0.0.1", service.port), timeout=60)
            stack.enter_context(connection)
            with suppress(ConnectionError):  # closed as soon as it was too much
                connection.sendall(kinds[number % len(kinds)])
        service.wait_rounds(2)
        assert service.ask("GET", "api/me", "ada").ok
        assert service.rss - before < MOST_BYTES


def test_only_admins_can_send_large_bodies(service: ServiceProcess) -> None:
    lines = "\n".join(f"member{number},5" for number in range(30_000))
    assert BODY_BYTES < len(lines) < 1024 * 1024
    sent = {"json": {"csv": lines, "reason": "x", "dry_run": True}}
    assert service.ask("POST", "api/grants", ADMIN, **sent).status_code in (200, 400)
    ada = service.sign_in(ADMIN)
    form = {"lines": lines, "reason": "x", "_xsrf": ada.cookies.get("_xsrf", path=PREFIX)}
    options = {"headers": NAVIGATION, "timeout": 15 * PATIENCE}
    assert "bulk" in ada.post(f"{service.url}bulk", data=form, **options).text
    for user in ("ada", "", "no-member"):
        assert _is_refused_early(service, "api/grants", user, **sent)
    assert _is_refused_early(service, "payer", ADMIN, **sent)


def _is_refused_early(service: ServiceProcess, path: str, user: str, **sent: Any) -> bool:
    """Whether the connection ends before the body was read."""
    try:
        return service.ask("POST", path, user, **sent).status_code == 400
    except requests.RequestException:
        return True


def test_unfinished_request_is_closed_after_a_timeout(processes: None, tmp_path: Path) -> None:
    head = f"POST {PREFIX}payer HTTP/1.1\r\nHost: x\r\n".encode()
    quick = "from gpuspawner.web import app\napp.HEADER_SECONDS = app.BODY_SECONDS = 0.5"
    with ServiceProcess(tmp_path, before=quick) as service, ExitStack() as stack:
        for sent in (b"", head, head + b"Content-Length: 10\r\n\r\nabc"):
            connection = socket.create_connection(("127.0.0.1", service.port), timeout=60)
            stack.enter_context(connection)
            connection.sendall(sent)
            assert connection.recv(1000) == b"", sent
