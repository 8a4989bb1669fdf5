"""Requests that no browser of ours sends. Real: the accounting service as a process, SQLite, HTTP;
its Hub is a stand-in that says who asks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.support.attack_hub import Door, doors
from tests.support.hub import NAVIGATION
from tests.support.processes import PATIENCE
from tests.support.service_process import PREFIX, ServiceProcess

NOTHING = {
    "accounts": "member:ada",
    "devices": "GPU-0",
    "folders": "0" * 16,
    "leases": "0" * 32,
    "queue": "0" * 32,
    "rates": "1",
    "refills": "1",
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


def test_a_form_without_its_xsrf_cookie_is_refused_and_charging_goes_on(
    service: ServiceProcess,
) -> None:
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


def test_every_route_answers_whatever_is_forged(service: ServiceProcess) -> None:
    """Session cookies, XSRF cookies, proofs and bodies that are missing, wrong or another's."""
    ada, bob = service.sign_in("ada"), service.sign_in("bob")
    foreign = bob.cookies.get("_xsrf", path=PREFIX)
    xsrfs = (None, "wrong", '"', foreign)
    proofs: list[tuple[str, str | None]] = [
        ("none", None),
        *itertools.product(("field", "header", "query"), ("wrong", foreign)),
    ]
    modes = ({}, NAVIGATION, {"Sec-Fetch-Mode": "cors", "Sec-Fetch-Site": "cross-site"})
    bodies, ways, strange = map(itertools.cycle, (BODIES, modes, itertools.product(xsrfs, proofs)))
    found = list(doors(NOTHING))
    assert len(found) > 100
    for door in found:
        changes = door.method not in ("GET", "HEAD")
        # Signed in, every combination; as a stranger, each in its turn.
        tries = [
            (ada.cookies.get("service-gpu"), *each) for each in itertools.product(xsrfs, proofs)
        ]
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
