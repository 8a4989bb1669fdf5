"""The accounting service as the Hub starts it, and who pays. Real here: JupyterHub and its groups,
proxy, accounting service, culler, browser forms; servers are processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from gpuspawner.core.clock import TOLERATED
from gpuspawner.core.units import MICRO
from gpuspawner.engines.local import started_at
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.ledger.refills import Refill
from gpuspawner.ledger.rules import owed
from gpuspawner.services import Services
from tests.support.brokers import make_services, problems
from tests.support.paying_hub import FLEET, PayingHub
from tests.support.processes import alive, wait_for
from tests.support.visitor import Visitor

COURSE = "group:course-ml"

CONFIG = """
c.GPUCredits.opening_grant = 0
# Enough for a minute is held: what is asked for just after a start is still there.
c.GPUCredits.hold_minutes = 1
c.JupyterHub.load_groups = {
    "course-ml": {"users": ["ada"]},
    "course-form": {"users": ["fay"]},
    "course-refills": {"users": ["rita"]},
    "course-line": {"users": ["lina"]},
    "empty": {"users": []},
}
"""


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    """Members begin with nothing, some are in a course, and a GPU costs one credit a second; the
    proxy is a process beside the hub, which may be killed."""
    with PayingHub(
        folder / "hub", CONFIG, services=", cull_idle_after=3600", external_proxy=True
    ) as hub:
        hub.services.settings.credits.opening_grant = 0
        for course in (COURSE, "group:course-form", "group:course-line"):
            give(hub.services, course, 500)
        yield hub


def give(services: Services, account: str, credits: int, **more: Any) -> None:
    now = services.clock()
    services.store.run(lambda c: ledger_repository.open_account(c, account, now), write=True)
    services.ledger.grant(account, credits * MICRO, actor="root", reason="budget", **more)


def ended(hub: PayingHub, lease: Lease, timeout: float = 30.0) -> Lease:
    """The lease, once it is settled; its charge must be exact."""
    settled = hub.wait_end(lease, timeout)
    assert settled.ended_at is not None
    assert settled.charged == owed(settled.rate, settled.started_at, settled.ended_at)
    return settled


def test_restarted_service_charges_for_its_downtime(hub: PayingHub) -> None:
    goes_on = hub.start_with(10_000, "goes-on", gpus=1)
    stops = hub.start_with(10_000, "stops", gpus=1)
    hub.kill_service()
    down_since = hub.services.clock()
    charged = hub.services.leases.get(goes_on.id).charged
    hub.stop_server("stops")
    ended(hub, stops)

    # The Hub starts it anew.
    hub.wait_pages()
    back = wait_for(lambda: _charged_after(hub, goes_on, charged), "the next charge")
    assert back.charged > owed(back.rate, down_since, hub.services.clock()) - 5 * MICRO
    hub.stop_server("goes-on")
    settled = ended(hub, goes_on)
    assert hub.services.ledger.member("goes-on").balance == 10_000 * MICRO - settled.charged
    lines = hub.services.ledger.statement("member:goes-on", limit=1000)
    assert -sum(line.amount for line in lines if line.lease_id == goes_on.id) == settled.charged


def _charged_after(hub: PayingHub, lease: Lease, charged: int) -> Lease | None:
    now = hub.services.leases.get(lease.id)
    return now if now.charged > charged else None


def test_killed_server_is_not_charged_after_its_end(hub: PayingHub) -> None:
    lease = hub.start_with(10_000, "dies", gpus=2)
    seen_at = wait_for(lambda: hub.services.leases.get(lease.id).seen_at, "the first look")
    pid = int(lease.engine_ref.partition(":")[0])
    (server,) = [p for p in hub.children_left() if p.pid == pid]
    server.send_signal(signal.SIGKILL)
    wait_for(lambda: not alive(pid), "its end")
    killed_at = hub.services.clock()
    settled = ended(hub, lease, timeout=10)
    assert settled.ended_at is not None
    # Charged up to when it was last seen alive: never for time in which it was gone. The clocks of
    # two processes may differ by as much as the store ignores.
    assert seen_at <= settled.ended_at <= killed_at + timedelta(microseconds=TOLERATED)
    assert hub.services.monitoring.overview().free == 3
    hub.stop_server("dies")  # the Hub has yet to hear of it


def test_service_exits_when_the_hub_is_killed(hub: PayingHub) -> None:
    lease = hub.start_with(10_000, "lives", gpus=1)
    old = hub.service()
    assert old is not None
    command, environment = old.cmdline(), old.environ()
    hub.kill9()
    wait_for(lambda: not old.is_running(), "the service to notice", timeout=5)
    # Also one that the hub had just begun to start.
    subprocess.run(command, env=environment, cwd=hub.folder, timeout=120, check=True)
    hub.start()
    new = hub.service()
    assert new is not None
    assert new.pid != old.pid
    assert hub.page("lives").ok
    assert hub.services.leases.get(lease.id).state is LeaseState.RUNNING
    assert hub.get("lives", "").text == lease.id
    hub.stop_server("lives")
    ended(hub, lease)


def test_service_token_has_minimal_permissions(hub: PayingHub) -> None:
    hub.start_with(10_000, "cara", gpus=1)
    service = hub.service()
    assert service is not None
    token = service.environ()["JUPYTERHUB_API_TOKEN"]
    assert "gpuspawner.sqlite" not in " ".join(service.cmdline())

    def ask(method: str, path: str, **kwargs: Any) -> requests.Response:
        headers = {"Authorization": f"token {token}"}
        return hub.api(method, path, headers=headers, **kwargs)

    assert ask("GET", "users?state=active").ok
    forbidden = {
        "POST users": {"usernames": ["eve"]},
        "POST users/eve": {},
        "DELETE users/cara": None,
        "PATCH users/cara": {"admin": True},
        "GET users/cara/tokens": None,
        "POST users/cara/tokens": {},
        "GET groups": None,
        "GET services": None,
        "GET proxy": None,
        "POST shutdown": {},
    }
    answers = {
        call: ask(*call.split(" "), json=body).status_code for call, body in forbidden.items()
    }
    # What a service may not even see is "not found" on the Hub.
    assert set(answers.values()) <= {403, 404}, answers
    assert hub.api("GET", "users/eve").status_code == 404
    seen = ask("GET", "users/cara").json()
    assert seen.get("auth_state") is None
    assert "state" not in seen["servers"][""]
    assert ask("DELETE", "users/cara/server").status_code in (202, 204)
    wait_for(lambda: hub.server("cara") is None, "the stop")


# Credits of groups, refills and credits that end.


def test_group_account_pays_only_for_its_members(hub: PayingHub) -> None:
    refused = hub.spawn("ada", {"gpus": 1})
    assert refused.status_code == 402, "her own account is empty"
    lease = hub.start_server("ada", gpus=1, account=COURSE)
    assert lease.account == COURSE and hub.services.ledger.account(COURSE).held > 0
    hub.stop_server("ada")
    settled = ended(hub, lease)
    assert hub.services.ledger.account(COURSE).balance == 500 * MICRO - settled.charged
    assert hub.services.ledger.member("ada").balance == 0

    refused = hub.spawn("bob", {"gpus": 1, "account": COURSE})
    assert refused.status_code == 403
    assert "names 'group:course-ml', which you cannot use" in refused.text
    assert "member:bob" in refused.text
    assert hub.lease_of("bob") is None
    refused = hub.spawn("bob", {"gpus": 1, "account": "system:grants"})
    assert refused.status_code == 400 and "member:NAME or group:NAME" in refused.text
    assert problems(hub.services.store) == []


def test_spawn_form_offers_group_accounts(hub: PayingHub) -> None:
    fay, bob = (Visitor(hub.url, name, session=hub.login(name)) for name in ("fay", "bob"))
    form = fay.get("/hub/spawn").text
    assert 'name="account"' in form and "group course-form (500.00 credits)" in form
    assert "my own credits (0.00 credits)" in form
    assert 'name="account"' not in bob.get("/hub/spawn").text, "he has nothing to choose"
    fay.spawn({"gpus": "1", "account": "group:course-form"})
    lease = hub.lease_of("fay")
    assert lease is not None and lease.account == "group:course-form"
    hub.stop_server("fay")
    # What she keeps as her usual payer pays for a start that says nothing.
    hub.services.ledger.keep_payer("fay", "group:course-form", actor="fay", groups=["course-form"])
    wait_for(lambda: hub.lease_of("fay") is None, "its end")
    assert hub.start_server("fay", gpus=1).account == "group:course-form"
    hub.stop_server("fay")


def test_service_runs_each_refill_once_despite_a_kill(hub: PayingHub) -> None:
    then = datetime.now(timezone.utc).replace(microsecond=0) - timedelta(days=2, minutes=5)
    past = make_services(
        database_url=hub.database_url, device_source=FLEET, opening_grant=0, clock=lambda: then
    )
    for name in ("rita", "rob"):
        past.ledger.open_account(name)
    refill = {"actor": "root", "reason": "term", "starts_at": then}

    def add(rule: str, amount: int, audience: str) -> Refill:
        plan = past.refills.plan_refill(rule, amount=amount, audience=[audience], **refill)
        return past.refills.add_refill(plan)

    course = add("FREQ=DAILY;COUNT=3", 5 * MICRO, "members:course-refills")
    refills = hub.services.refills
    wait_for(lambda: len(refills.refill_runs(course.id)) == 3, "three occurrences")
    # As the Hub knows who is in the group.
    assert hub.services.ledger.member("rita").balance == 15 * MICRO
    assert hub.services.ledger.member("rob").balance == 0

    hub.kill_service()
    everybody = add("FREQ=DAILY", MICRO, "everybody")
    missing = add("FREQ=DAILY", MICRO, "members:gone")
    hub.wait_pages()  # the Hub starts it anew
    wait_for(lambda: len(refills.refill_runs(everybody.id)) == 3, "the rest")
    assert hub.services.ledger.member("rob").balance == 3 * MICRO
    assert hub.services.ledger.member("rita").balance == 18 * MICRO
    assert refills.refill_runs(missing.id) == []

    def complaints() -> list[str]:
        return [line for line in hub.service_lines() if "no group 'gone'" in line]

    wait_for(complaints, "the complaint, which comes after the others' refills", timeout=30)
    said = complaints()
    assert len(said) == 1 and f"gpuspawner refills remove {missing.id}" in said[0]
    assert problems(hub.services.store) == []


def test_service_reclaims_expired_credits(hub: PayingHub) -> None:
    hub.services.ledger.open_account("ted")
    give(hub.services, "member:ted", 7, until=hub.services.clock() + timedelta(seconds=3))

    def lines() -> list[tuple[str, int]]:
        return [(line.kind, line.amount) for line in hub.services.ledger.statement("member:ted")]

    wait_for(lambda: len(lines()) == 2, "the end", timeout=20)
    assert lines() == [("expiry", -7 * MICRO), ("grant", 7 * MICRO)]
    assert hub.services.ledger.member("ted").balance == 0


def test_leaving_the_group_refuses_the_waiting_ticket(hub: PayingHub) -> None:
    hub.services.ledger.open_account("leo")
    give(hub.services, "member:leo", 5000)
    hub.start_server("leo", gpus=2)
    hub.start_server("leo", "other", gpus=1)
    answer = hub.spawn("lina", {"gpus": 1, "account": "group:course-line"})
    assert answer.status_code == 202

    def ticket() -> Any:
        return next(iter(hub.services.queue.tickets_of("lina")), None)

    waiting = wait_for(ticket, "her place in the queue")
    assert (waiting.account, waiting.outcome) == ("group:course-line", "")
    body = {"users": ["lina"]}
    assert hub.api("DELETE", "/groups/course-line/users", json=body).ok
    ended = wait_for(lambda: ticket() if ticket().outcome else None, "its end", timeout=20)
    assert ended.outcome == "refused"
    assert "names 'group:course-line', which you cannot use" in ended.end_reason
    assert hub.services.ledger.account("group:course-line").balance == 500 * MICRO
    for server in ("", "other"):
        hub.stop_server("leo", server)


# A hub whose service seldom compares; the last test takes it away.


@pytest.fixture(scope="module")
def slow_hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    """The service does not look at servers: it hears of an end from the Hub alone."""
    with PayingHub(folder / "slow", "c.Accounting.reconcile_seconds = 3600") as hub:
        yield hub


def test_local_server_is_charged_for_its_lifetime(slow_hub: PayingHub) -> None:
    """However late the Hub notices that the process has ended."""
    hub = slow_hub
    lease = hub.start_server("exact", gpus=1)
    process = psutil.Process(int(lease.engine_ref.partition(":")[0]))
    descriptor, began = os.pidfd_open(process.pid), started_at(lease.engine_ref)
    assert began is not None
    process.suspend()  # it does not end yet when the Hub asks it to
    with ThreadPoolExecutor(1) as threads:
        stopping = threads.submit(hub.stop_server, "exact")
        wait_for(lambda: (hub.server("exact") or {}).get("pending") == "stop", "the stop")
        hub.wait_rounds(3, "charges")
        process.resume()
        select.select([descriptor], [], [])
        lived = (datetime.now(timezone.utc) - began).total_seconds()
        stopping.result()
    os.close(descriptor)
    settled = ended(hub, lease)
    assert settled.charged / MICRO == pytest.approx(lived, abs=0.5)


def test_removing_the_config_restores_a_plain_hub(slow_hub: PayingHub) -> None:
    hub = slow_hub
    hub.api("POST", "users/ada").raise_for_status()
    headers = {"Authorization": f"token {hub.user_token('ada')}"}

    def scopes() -> set[str]:
        return set(hub.api("GET", "user", headers=headers).json()["scopes"])

    with_them = scopes()
    assert "access:services!service=gpu" in with_them

    lines = hub.config.splitlines()
    lines = [line for line in lines if "gpuspawner" not in line and "gpu-local" not in line]
    hub.config = "\n".join(lines) + "\n"
    hub.has_service = False
    hub.restart()
    ours = {s for s in with_them if s.endswith("!service=gpu") or "custom:gpuspawner:" in s}
    assert scopes() == with_them - ours
    assert "gpu" not in hub.api("GET", "services").json()
    assert hub.service() is None
    hub.spawn("ada").raise_for_status()
    hub.wait_server("ada")
    assert hub.get("ada", "").text == "none"
    hub.stop_server("ada")
