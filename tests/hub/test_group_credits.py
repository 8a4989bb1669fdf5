"""Credits of groups, refills and credits that end at a real hub. Real here: JupyterHub and its
groups, proxy, accounting service, browser forms; servers are processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import ServerRef
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.services import Broker
from tests.support.brokers import make_broker, problems
from tests.support.paying_hub import FLEET, PayingHub
from tests.support.processes import wait_for
from tests.support.visitor import Visitor

Factory = Callable[..., PayingHub]
COURSE = "group:course-ml"
GROUPS = """
c.JupyterHub.load_groups = {
    "course-ml": {"users": ["ada"]},
    "course-form": {"users": ["fay"]},
    "course-refills": {"users": ["rita"]},
    "course-line": {"users": ["lina"]},
    "empty": {"users": []},
}
"""


@pytest.fixture(scope="module")
def hub(hubs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PayingHub]:
    """Each test has a course with one member, and others who are in none; members begin with
    nothing, and a GPU costs one credit a second."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("groups") / "hub"
        # Enough for a minute is held: what is asked for just after a start is still there.
        config = "c.GPUCredits.opening_grant = 0\nc.GPUCredits.hold_minutes = 1\n"
        hub = PayingHub(folder, GROUPS + config)
        stack.callback(hub.stop)
        hub.start()
        hub.broker.settings.credits.opening_grant = 0
        for course in (COURSE, "group:course-form", "group:course-line"):
            give(hub.broker, course, 500)
        yield hub


def give(broker: Broker, account: str, credits: int, **more: Any) -> None:
    now = broker.clock()
    broker.store.run(lambda c: ledger_repository.open_account(c, account, now), write=True)
    broker.ledger.grant(account, credits * MICRO, actor="root", reason="budget", **more)


def test_a_course_pays_for_its_members_and_for_nobody_else(hub: PayingHub) -> None:
    refused = hub.spawn("ada", {"gpus": 1})
    assert refused.status_code == 402, "her own account is empty"
    lease = hub.start_server("ada", gpus=1, account=COURSE)
    assert lease.account == COURSE and hub.broker.ledger.account(COURSE).held > 0
    hub.stop_server("ada")
    settled = wait_for(lambda: _ended(hub, lease.id), "its end")
    assert hub.broker.ledger.account(COURSE).balance == 500 * MICRO - settled.charged
    assert hub.broker.ledger.member("ada").balance == 0

    refused = hub.spawn("bob", {"gpus": 1, "account": COURSE})
    assert refused.status_code == 403
    assert "names 'group:course-ml', which you may not draw on" in refused.text
    assert "member:bob" in refused.text
    assert hub.broker.lease_of(ServerRef("bob")) is None
    refused = hub.spawn("bob", {"gpus": 1, "account": "system:grants"})
    assert refused.status_code == 400 and "member:NAME or group:NAME" in refused.text
    assert problems(hub.broker.store) == []


def _ended(hub: PayingHub, lease_id: str) -> Any:
    lease = hub.broker.lease(lease_id)
    return lease if lease.ended_at else None


def test_the_form_offers_who_pays(hub: PayingHub) -> None:
    fay, bob = (Visitor(hub.url, name, session=hub.login(name)) for name in ("fay", "bob"))
    form = fay.get("/hub/spawn").text
    assert 'name="account"' in form and "group course-form (500.00 credits)" in form
    assert "my own credits (0.00 credits)" in form
    assert 'name="account"' not in bob.get("/hub/spawn").text, "he has nothing to choose"
    fay.spawn({"gpus": "1", "account": "group:course-form"})
    lease = hub.broker.lease_of(ServerRef("fay"))
    assert lease is not None and lease.account == "group:course-form"
    hub.stop_server("fay")
    # What she keeps as her usual payer pays for a start that says nothing.
    hub.broker.ledger.keep_payer("fay", "group:course-form", actor="fay", groups=["course-form"])
    wait_for(lambda: hub.broker.lease_of(ServerRef("fay")) is None, "its end")
    assert hub.start_server("fay", gpus=1).account == "group:course-form"
    hub.stop_server("fay")


def test_refills_are_given_by_the_service_once_also_after_a_kill(
    hub: PayingHub, tmp_path: Path
) -> None:
    then = datetime.now(timezone.utc).replace(microsecond=0) - timedelta(days=2, minutes=5)
    past = make_broker(
        database_url=hub.database_url, device_source=FLEET, opening_grant=0, clock=lambda: then
    )
    for name in ("rita", "rob"):
        past.ledger.open_account(name)
    refill = {"actor": "root", "reason": "term", "starts_at": then}
    course = past.refills.add_refill(
        past.refills.plan_refill(
            "FREQ=DAILY;COUNT=3", amount=5 * MICRO, audience=["members:course-refills"], **refill
        )
    )
    wait_for(
        lambda: len(hub.broker.refills.refill_runs(course.id)) == 3, "three occurrences", timeout=30
    )
    assert hub.broker.ledger.member("rita").balance == 15 * MICRO, (
        "as the Hub knows who is in the group"
    )
    assert hub.broker.ledger.member("rob").balance == 0

    hub.kill_service()
    everybody = past.refills.add_refill(
        past.refills.plan_refill("FREQ=DAILY", amount=MICRO, audience=["everybody"], **refill)
    )
    missing = past.refills.add_refill(
        past.refills.plan_refill("FREQ=DAILY", amount=MICRO, audience=["members:gone"], **refill)
    )
    hub.wait_pages()  # the Hub starts it anew
    wait_for(lambda: len(hub.broker.refills.refill_runs(everybody.id)) == 3, "the rest", timeout=30)
    assert hub.broker.ledger.member("rob").balance == 3 * MICRO
    assert hub.broker.ledger.member("rita").balance == 18 * MICRO
    assert hub.broker.refills.refill_runs(missing.id) == []

    def complaints() -> list[str]:
        return [line for line in hub.service_lines() if "no group 'gone'" in line]

    wait_for(complaints, "the complaint, which comes after the others' refills", timeout=30)
    said = complaints()
    assert len(said) == 1 and f"gpuspawner refills remove {missing.id}" in said[0]
    assert problems(hub.broker.store) == []


def test_the_service_takes_back_what_has_ended(hub: PayingHub) -> None:
    hub.broker.ledger.open_account("ted")
    give(hub.broker, "member:ted", 7, until=hub.broker.clock() + timedelta(seconds=3))

    def lines() -> list[tuple[str, int]]:
        return [(line.kind, line.amount) for line in hub.broker.ledger.statement("member:ted")]

    wait_for(lambda: len(lines()) == 2, "the end", timeout=20)
    assert lines() == [("expiry", -7 * MICRO), ("grant", 7 * MICRO)]
    assert hub.broker.ledger.member("ted").balance == 0


def test_who_leaves_the_group_in_line_loses_its_budget_and_is_told(hub: PayingHub) -> None:
    hub.broker.ledger.open_account("leo")
    give(hub.broker, "member:leo", 5000)
    hub.start_server("leo", gpus=2)
    hub.start_server("leo", "other", gpus=1)
    answer = hub.spawn("lina", {"gpus": 1, "account": "group:course-line"})
    assert answer.status_code == 202

    def ticket() -> Any:
        return next(iter(hub.broker.tickets_of("lina")), None)

    waiting = wait_for(ticket, "her place in line")
    assert (waiting.account, waiting.outcome) == ("group:course-line", "")
    body = {"users": ["lina"]}
    assert hub.api("DELETE", "/groups/course-line/users", json=body).ok
    ended = wait_for(lambda: ticket() if ticket().outcome else None, "its end", timeout=20)
    assert ended.outcome == "refused"
    assert "names 'group:course-line', which you may not draw on" in ended.end_reason
    assert hub.broker.ledger.account("group:course-line").balance == 500 * MICRO
    for server in ("", "other"):
        hub.stop_server("leo", server)
