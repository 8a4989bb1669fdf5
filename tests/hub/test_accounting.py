"""The accounting service as the Hub starts it, who pays, and accounts that run dry, also while hub
and service are killed. Real here: JupyterHub and its groups, proxy, accounting service, kill -9,
browser forms; servers are local processes. One hub for all; the last test takes gpuspawner away."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
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
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.services import Services
from tests.support.brokers import make_services, problems
from tests.support.paying_hub import FLEET, PayingHub
from tests.support.processes import alive, wait_for
from tests.support.visitor import Visitor

COURSE = "group:course-ml"
KEEP = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"
SOON = 60.0
"""Seconds for what takes a few."""

EXACT = 0.5
"""Seconds by which a charge may differ from how long a process lived."""

GRACE = timedelta(seconds=20)
"""Longer than what holds up a test on a busy machine: it has to see that the grace has begun."""

CONFIG = f"""
c.GPUCredits.opening_grant = 0
c.GPUCredits.grace_seconds = {GRACE.seconds}
c.GPUCredits.when_exhausted = {{
    "*": "stop", "overdrawing": {{"overdraft": 40}}, "planning": "session",
}}
c.GPUCredits.warn_minutes = [5, 1]
c.GPUNotifications.hook = {[sys.executable, "-c", KEEP, "told"]!r}
c.JupyterHub.load_groups = {{
    "course-ml": {{"users": ["ada"]}},
    "course-refills": {{"users": ["rita"]}},
    "course-line": {{"users": ["lina"]}},
    "overdrawing": {{"users": ["oda"]}},
    "planning": {{"users": ["pia"]}},
}}
"""


@pytest.fixture(scope="module")
def module_hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    """Members begin with nothing, some are in a course, and a GPU costs one credit a second;
    warnings come 5 minutes and a minute before the end. The proxy is a process beside the hub,
    which may be killed."""
    with PayingHub(folder / "hub", CONFIG, external_proxy=True) as hub:
        hub.services.settings.credits.opening_grant = 0
        for course in (COURSE, "group:course-line"):
            give(hub.services, course, 500)
        yield hub


@pytest.fixture
def hub(module_hub: PayingHub) -> Iterator[PayingHub]:
    """The same; each test has members of its own, and the books are in order after it."""
    yield module_hub
    for lease in module_hub.services.leases.open_leases():
        module_hub.stop_server(lease.server.user, lease.server.name)
    assert problems(module_hub.services.store) == []


def give(services: Services, account: str, credits: int) -> None:
    now = services.clock()
    services.store.run(lambda c: ledger_repository.open_account(c, account, now), write=True)
    services.ledger.grant(account, credits * MICRO, actor="root", reason="budget")


def ended(hub: PayingHub, lease: Lease, timeout: float = 60.0) -> Lease:
    """The lease, once it is settled; its charge must be exact."""
    settled = hub.wait_end(lease, timeout)
    assert settled.ended_at is not None
    due = owed(settled.rate, settled.started_at, settled.ended_at)
    assert settled.charged + settled.waived == due
    return settled


def state_of(hub: PayingHub, lease: Lease) -> LeaseState:
    return hub.services.leases.get(lease.id).state


# The service, killed and restarted.


def test_restarted_service_catches_up_on_its_downtime(hub: PayingHub) -> None:
    """Charges, an end, refills that were due and credits that have expired: each once."""
    goes_on = hub.start_with(10_000, "goes-on", gpus=1)
    stops = hub.start_with(10_000, "stops", gpus=1)
    then = datetime.now(timezone.utc).replace(microsecond=0) - timedelta(days=2, minutes=5)
    past = make_services(
        database_url=hub.database_url, device_source=FLEET, opening_grant=0, clock=lambda: then
    )
    for name in ("rita", "rob"):
        past.ledger.open_account(name)

    def add(rule: str, amount: int, audience: str) -> Refill:
        more: dict[str, Any] = {"actor": "root", "reason": "term", "starts_at": then}
        return past.refills.add_refill(
            past.refills.plan_refill(rule, amount=amount, audience=[audience], **more)
        )

    course = add("FREQ=DAILY;COUNT=3", 5 * MICRO, "members:course-refills")
    ledger, refills = hub.services.ledger, hub.services.refills
    wait_for(lambda: len(refills.refill_runs(course.id)) == 3, "three occurrences")
    # As the Hub knows who is in the group.
    assert [ledger.member(name).balance for name in ("rita", "rob")] == [15 * MICRO, 0]

    hub.kill_service()
    hub.stop_server("stops")
    ended(hub, stops)
    everybody = add("FREQ=DAILY", MICRO, "everybody")
    missing = add("FREQ=DAILY", MICRO, "members:gone")
    ledger.open_account("ted")
    over: dict[str, Any] = {"actor": "root", "reason": "budget", "until": then + timedelta(hours=1)}
    past.ledger.grant("member:ted", 7 * MICRO, **over)

    hub.wait_pages()  # the Hub starts it anew
    back_at = hub.services.clock()
    due = owed(goes_on.rate, goes_on.started_at, back_at)
    wait_for(
        lambda: hub.services.leases.get(goes_on.id).charged >= due, "the charge for that time, too"
    )
    hub.stop_server("goes-on")
    settled = ended(hub, goes_on)
    assert ledger.member("goes-on").balance == 10_000 * MICRO - settled.charged
    lines = ledger.statement("member:goes-on", limit=1000)
    assert -sum(line.amount for line in lines if line.lease_id == goes_on.id) == settled.charged

    wait_for(lambda: len(refills.refill_runs(everybody.id)) == 3, "the rest")
    assert [ledger.member(name).balance for name in ("rita", "rob")] == [18 * MICRO, 3 * MICRO]
    assert refills.refill_runs(missing.id) == []

    def complaints() -> list[str]:
        return [line for line in hub.service_lines() if "no group 'gone'" in line]

    wait_for(complaints, "the complaint, which comes after the others' refills", timeout=30)
    (said,) = complaints()
    assert f"gpuspawner refills remove {missing.id}" in said

    wait_for(lambda: len(ledger.statement("member:ted")) == 2, "the end of credits", timeout=20)
    found = [(line.kind, line.amount) for line in ledger.statement("member:ted")]
    assert found == [("expiry", -7 * MICRO), ("grant", 7 * MICRO)]
    assert ledger.member("ted").balance == 0


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
        "POST users": {"usernames": ["evil"]},
        "POST users/evil": {},
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
    assert hub.api("GET", "users/evil").status_code == 404
    seen = ask("GET", "users/cara").json()
    assert seen.get("auth_state") is None
    assert "state" not in seen["servers"][""]
    assert ask("DELETE", "users/cara/server").status_code in (202, 204)
    wait_for(lambda: hub.server("cara") is None, "the stop")


# Credits of groups.


def test_group_account_pays_only_for_its_members(hub: PayingHub) -> None:
    assert hub.spawn("ada", {"gpus": 1}).status_code == 402, "her own account is empty"
    ada, bob = (Visitor(hub.url, name, session=hub.login(name)) for name in ("ada", "bob"))
    form = ada.get("/hub/spawn").text
    assert 'name="account"' in form and "group course-ml (500.00 credits)" in form
    assert "my own credits (0.00 credits)" in form
    assert 'name="account"' not in bob.get("/hub/spawn").text, "he has nothing to choose"
    ada.spawn({"gpus": "1", "account": COURSE})
    lease = hub.lease_of("ada")
    assert lease is not None and lease.account == COURSE
    hub.stop_server("ada")
    settled = ended(hub, lease)
    assert hub.services.ledger.account(COURSE).balance == 500 * MICRO - settled.charged
    assert hub.services.ledger.member("ada").balance == 0
    # What she keeps as her usual payer pays for a start that says nothing.
    hub.services.ledger.keep_payer("ada", COURSE, actor="ada", groups=["course-ml"])
    assert hub.start_server("ada", gpus=1).account == COURSE

    refused = hub.spawn("bob", {"gpus": 1, "account": COURSE})
    assert refused.status_code == 403
    assert "names 'group:course-ml', which you cannot use" in refused.text
    assert "member:bob" in refused.text
    assert hub.lease_of("bob") is None
    refused = hub.spawn("bob", {"gpus": 1, "account": "system:grants"})
    assert refused.status_code == 400 and "member:NAME or group:NAME" in refused.text


def test_leaving_the_group_refuses_the_waiting_ticket(hub: PayingHub) -> None:
    hub.start_with(5000, "leo", gpus=2)
    hub.start_server("leo", "other", gpus=1)
    answer = hub.spawn("lina", {"gpus": 1, "account": "group:course-line"})
    assert answer.status_code == 202

    def ticket() -> Any:
        return next(iter(hub.services.queue.tickets_of("lina")), None)

    waiting = wait_for(ticket, "her place in the queue")
    assert (waiting.account, waiting.outcome) == ("group:course-line", "")
    body = {"users": ["lina"]}
    assert hub.api("DELETE", "/groups/course-line/users", json=body).ok
    over = wait_for(lambda: ticket() if ticket().outcome else None, "its end", timeout=20)
    assert over.outcome == "refused"
    assert "names 'group:course-line', which you cannot use" in over.end_reason
    assert hub.services.ledger.account("group:course-line").balance == 500 * MICRO


# Accounts that run dry.


def kill_all(hub: PayingHub) -> None:
    hub.kill9(services=True)
    hub.start()


def heard(hub: PayingHub, user: str) -> list[str]:
    """What the hook heard of a member's credits, in order."""
    file = hub.folder / "told"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else []
    mine = [line for line in lines if line["user"] == user and "credits" in line["event"]]
    return [f"{line['event']} {line['minutes'] or 0:g}" for line in mine]


def told(hub: PayingHub, user: str) -> list[str]:
    titles = hub.told(user, NoticeKind.CREDITS_LOW, NoticeKind.STOPPED)
    return [title.partition(" until ")[0] for title in reversed(titles)]


def warned_at(hub: PayingHub, lease: Lease) -> datetime:
    """When the member was told that the account is dry, once that was told."""
    return wait_for(
        lambda: hub.services.leases.get(lease.id).warned_at, "the warning", timeout=SOON
    )


def wait_out_the_grace(hub: PayingHub, since: datetime) -> None:
    wait_for(lambda: hub.services.clock() > since + GRACE, "the end of the grace")
    hub.wait_rounds(1, "charges", "credits", "sessions")


ALL = [
    "Your credits last",
    "Your credits have run out",
    "Your server was stopped: the credits have run out",
]


def test_server_stops_after_credits_and_grace_run_out(hub: PayingHub) -> None:
    """Each warning comes once; credits in time keep the server, and it costs nothing later on."""
    lease = hub.start_with(1000, "dora", gpus=1)
    expected: list[str] = []
    for seconds, event in ((240, "credits_low 5"), (50, "credits_low 1")):
        hub.set_balance("dora", seconds)
        expected.append(event)
        wait_for(lambda: heard(hub, "dora")[: len(expected)] == expected, event, timeout=SOON)
    hub.set_balance("dora", 2)
    first = warned_at(hub, lease)
    hub.set_balance("dora", 1000)
    wait_for(lambda: not hub.services.leases.get(lease.id).warned_at, "it to be taken back")
    wait_out_the_grace(hub, first)
    assert state_of(hub, lease) is LeaseState.RUNNING
    assert hub.server("dora") is not None

    hub.set_balance("dora", 0)
    second = warned_at(hub, lease)
    assert hub.server("dora") is not None, "the grace had only begun"
    assert "Your credits have run out" in hub.page("dora").text
    settled = ended(hub, lease)
    assert settled.ended_at and settled.ended_at - second >= GRACE
    assert hub.services.monitoring.overview().free == 3
    gone = "credits_gone 0"
    expected += [gone, "credits_back 0", gone, "credits_gone_stopped 0"]
    wait_for(lambda: len(heard(hub, "dora")) >= len(expected), "the hook", timeout=SOON)
    assert heard(hub, "dora") == expected
    stop = "Stopping dora: the credits ran out"
    wait_for(lambda: stop in hub.service_lines(), "a line of it")
    assert sum("dora has no credits left" in line for line in hub.service_lines()) == 2

    wait_for(lambda: hub.server("dora") is None, "the Hub to know")
    refused = hub.spawn("dora", {"gpus": 1})
    assert refused.status_code == 402
    assert "You can start without a GPU" in refused.text
    free = hub.start_server("dora", gpus=0)
    hub.wait_rounds(1, "charges", "credits", "sessions")
    assert state_of(hub, free) is LeaseState.RUNNING


def test_credit_policies_hold_whatever_is_killed(hub: PayingHub) -> None:
    """One is stopped, one has an overdraft, and one's session goes on to its planned end."""
    planned = hub.start_with(2, "pia", gpus=1, hours=0.25)
    stopped = hub.start_with(12, "cleo", gpus=1)
    overdrawn = hub.start_with(2, "oda", gpus=1)
    pia_at = warned_at(hub, planned)
    warned_at(hub, overdrawn)
    notice = hub.services.notifications.notices_of("pia")[0]
    assert "continues until its session ends at" in notice.body
    wait_for(lambda: told(hub, "cleo"), "the warning", timeout=SOON)

    hub.kill9(services=True)
    assert overdrawn.started_at is not None
    beyond = overdrawn.started_at + timedelta(seconds=47)
    wait_for(lambda: hub.services.clock() >= beyond, "a time far beyond the bound")
    hub.start()
    cleo_at = warned_at(hub, stopped)
    assert stopped.started_at is not None and cleo_at >= stopped.started_at + timedelta(seconds=12)
    hub.kill_service()
    settled = ended(hub, overdrawn)
    assert (settled.outcome, settled.charged) == ("credits", 42 * MICRO)
    assert settled.waived >= 5 * MICRO
    assert hub.services.ledger.member("oda").balance == -40 * MICRO
    assert told(hub, "oda")[-2:] == ALL[1:]
    wait_for(lambda: heard(hub, "oda")[-1:] == ["credits_gone_stopped 0"], "the hook", timeout=SOON)

    wait_for(lambda: hub.services.leases.get(stopped.id).outcome, "the order", timeout=90)
    kill_all(hub)
    settled = ended(hub, stopped)
    assert (settled.outcome, settled.end_reason) == ("credits", "the credits ran out")
    assert settled.ended_at and settled.ended_at - cleo_at >= GRACE
    assert told(hub, "cleo") == ALL
    assert hub.services.ledger.member("cleo").balance == 12 * MICRO - settled.charged

    wait_out_the_grace(hub, pia_at)
    assert hub.server("pia") is not None
    assert hub.services.leases.get(planned.id).outcome == ""
    gone = ["credits_gone 0"]
    wait_for(lambda: heard(hub, "pia")[-1:] == gone, "what the killed ones had yet to tell")


# From here on the service does not look at servers.


def test_adopted_server_is_charged_for_its_lifetime(hub: PayingHub) -> None:
    """The service ends with a killed hub, and the next hub adopts the server. Its charge is exact,
    however late the Hub notices that its process has ended."""
    lease = hub.start_with(10_000, "lives", gpus=1)
    old = hub.service()
    assert old is not None
    command, environment = old.cmdline(), old.environ()
    hub.kill9()
    wait_for(lambda: not old.is_running(), "the service to notice", timeout=5)
    # Also one that the hub had just begun to start.
    subprocess.run(command, env=environment, cwd=hub.folder, timeout=120, check=True)
    hub.config += "c.Accounting.reconcile_seconds = 3600\n"  # it hears of an end from the Hub alone
    hub.start()
    new = hub.service()
    assert new is not None
    assert new.pid != old.pid
    assert hub.page("lives").ok
    assert state_of(hub, lease) is LeaseState.RUNNING
    assert hub.get("lives", "").text == lease.id

    process = psutil.Process(int(lease.engine_ref.partition(":")[0]))
    descriptor, began = os.pidfd_open(process.pid), started_at(lease.engine_ref)
    assert began is not None
    process.suspend()  # it does not end yet when the Hub asks it to
    with ThreadPoolExecutor(1) as threads:
        stopping = threads.submit(hub.stop_server, "lives")
        wait_for(lambda: (hub.server("lives") or {}).get("pending") == "stop", "the stop")
        hub.wait_rounds(3, "charges")
        alive_at = datetime.now(timezone.utc)
        process.resume()
        select.select([descriptor], [], [])
        dead_at = datetime.now(timezone.utc)
        stopping.result()
    os.close(descriptor)
    lived = ended(hub, lease).charged / MICRO
    assert (alive_at - began).total_seconds() - EXACT <= lived
    assert lived <= (dead_at - began).total_seconds() + EXACT


def test_removing_the_config_restores_a_plain_hub(hub: PayingHub) -> None:
    hub.api("POST", "users/plain").raise_for_status()
    headers = {"Authorization": f"token {hub.user_token('plain')}"}

    def scopes() -> set[str]:
        return set(hub.api("GET", "user", headers=headers).json()["scopes"])

    with_them = scopes()
    assert "access:services!service=gpu" in with_them

    ours = ("import gpuspawner", "gpuspawner.add_services", 'c.JupyterHub.spawner_class = "gpu-')
    hub.config = "".join(
        line for line in hub.config.splitlines(keepends=True) if not line.startswith(ours)
    )
    hub.has_service = False
    hub.restart()
    added = {s for s in with_them if s.endswith("!service=gpu") or "custom:gpuspawner:" in s}
    assert scopes() == with_them - added
    assert "gpu" not in hub.api("GET", "services").json()
    assert hub.service() is None
    hub.spawn("plain").raise_for_status()
    hub.wait_server("plain")
    assert hub.get("plain", "").text == "none"
    hub.stop_server("plain")
