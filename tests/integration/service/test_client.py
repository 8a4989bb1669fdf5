"""The Python client. Real: the accounting service as a process, SQLite, HTTP; its Hub is a stand-in
that says who asks, and has no servers."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import pytest
from urllib3.response import BaseHTTPResponse
from urllib3.util.retry import Retry

from gpuspawner.client import Client, RequestRefused
from gpuspawner.core.units import MICRO
from gpuspawner.services import Services
from tests.support.brokers import running, services_on
from tests.support.hub import ADMIN
from tests.support.processes import free_port
from tests.support.service_process import ServiceProcess, token_of


@pytest.fixture(scope="module")
def service(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture(scope="module")
def services(service: ServiceProcess) -> Iterator[Services]:
    """Ada had a session, and has seven credits from as many grants; Bob has an account."""
    with services_on(service.database_url, device_source="simulated:1xT4") as services:
        for user in ("ada", "bob"):
            services.ledger.open_account(user)
        for week in range(7):
            services.ledger.grant("member:ada", MICRO, actor=ADMIN, reason=f"week {week}")
        lease = running(services, "ada")
        services.leases.release(lease.id, reason="stopped")
        yield services


def client_of(service: ServiceProcess, user: str) -> Client:
    return Client(f"{service.url}api", token_of(user))


def test_accounts_are_read_page_by_page(service: ServiceProcess, services: Services) -> None:
    ada = client_of(service, "ada")
    me = ada.me()
    assert me.name == "ada" and not me.admin and me.running == ()
    assert me.account == ada.accounts.get("member:ada")
    stored = services.ledger.account("member:ada").balance
    assert me.account.balance == Decimal(stored) / MICRO and me.account.lasts_seconds is None
    lines = list(ada.accounts.statement("member:ada", page=2))
    assert lines == list(me.statement) and len(lines) >= 7
    grants = [line for line in lines if line.reason.startswith("week")]
    assert [line.reason for line in grants] == [f"week {week}" for week in range(6, -1, -1)]
    assert {line.amount for line in grants} == {Decimal(1)} and grants[0].at.tzinfo is not None
    admin = client_of(service, ADMIN)
    assert [x.account for x in admin.accounts.list(page=1)] == ["member:ada", "member:bob"]
    assert [x.account for x in admin.accounts.list(search="bo")] == ["member:bob"]


def test_sessions_are_listed_and_refusals_are_sentences(
    service: ServiceProcess, services: Services
) -> None:
    ada, bob = (client_of(service, user) for user in ("ada", "bob"))
    (session,) = ada.sessions.list()
    assert session.state == "ended" and session.devices[0].model == "T4"
    assert list(bob.sessions.list()) == []
    admin = client_of(service, ADMIN)
    assert [x.id for x in admin.sessions.list(everybody=True, page=1)] == [session.id]
    for call in (ada.sessions.extend, ada.sessions.end):
        with pytest.raises(RequestRefused) as refused:
            call(session.id)
        assert refused.value.status == 409 and str(refused.value).endswith(".")
        assert refused.value.reason and not refused.value.reason.startswith("http_")
    with pytest.raises(RequestRefused) as refused:
        bob.accounts.get("member:ada")
    assert refused.value.status == 403
    with pytest.raises(RequestRefused) as refused:
        list(bob.runs.list(everybody=True))
    assert refused.value.status == 403
    for call in (bob.runs.get, bob.runs.stop, bob.runs.wait):
        with pytest.raises(RequestRefused, match="There is no run 'none-1'") as refused:
            call("none-1")
        assert (refused.value.status, refused.value.reason) == (404, "unknown_run")
    with pytest.raises(RequestRefused, match="no such page"):
        bob.runs.get("../me")


def test_wrong_token_is_refused(service: ServiceProcess) -> None:
    with pytest.raises(RequestRefused) as refused:
        Client(f"{service.url}api", "wrong").me()
    assert refused.value.status in (401, 403)


def test_answer_of_something_else_is_told(service: ServiceProcess) -> None:
    with pytest.raises(RequestRefused, match="status 404"):
        Client(f"{service.url}static", token_of("ada")).me()


def test_reading_survives_a_restart_of_the_service(
    service: ServiceProcess, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses, sleep = [], Retry.sleep

    def pause(self: Retry, response: BaseHTTPResponse | None = None) -> None:
        sleep(self, response)
        pauses.append(self)
        if len(pauses) == 3:
            service.start()

    monkeypatch.setattr(Retry, "sleep", pause)
    ada = client_of(service, "ada")
    service.stop()
    assert ada.me().name == "ada" and len(pauses) == 3


def test_address_without_a_hub_is_told_after_some_tries() -> None:
    client = Client(f"http://127.0.0.1:{free_port()}", "x")
    with pytest.raises(RequestRefused, match="does not respond") as refused:
        client.sessions.end("0a")
    assert (refused.value.status, refused.value.reason) == (0, "no_answer")
    with pytest.raises(TimeoutError, match="train-1 has not ended in 1 s"):
        client.runs.wait("train-1", timeout=1)


def test_token_is_not_replaced_by_netrc(
    service: ServiceProcess,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    file = tmp_path_factory.mktemp("home") / "netrc"
    file.write_text("default login bob password token-of-bob\n")
    monkeypatch.setenv("NETRC", str(file))
    assert client_of(service, "ada").me().name == "ada"


def test_outside_a_session_address_and_token_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTERHUB_API_URL", "JUPYTERHUB_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for arguments in ((), ("https://hub.example/services/gpu/api",), ("", "token")):
        with pytest.raises(ValueError, match="not a session"):
            Client(*arguments)
