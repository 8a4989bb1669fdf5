"""What becomes of servers whose account has run dry, and who is told when. Real here: SQLite,
HTTP. The Hub is a script. ``tests/hub/test_accounting.py`` has the real one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import CannotExtend, ConfigError, NoCredits
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import (
    EndReason,
    Lease,
    LeaseState,
    Request,
    ServerRef,
    SessionEnd,
    Terms,
)
from gpuspawner.ledger.credit_policy import AccountRunway, planned_end
from gpuspawner.ledger.models import member_account
from gpuspawner.ledger.rules import owed
from gpuspawner.service.duties import CreditDuty, SessionDuty
from gpuspawner.services import Services
from gpuspawner.web import view_models
from tests.support.brokers import T0, Clock, Make, problems
from tests.support.rounds import (
    GRACE,
    RATE,
    SITE,
    ScriptedHub,
    make_credits,
    make_tick,
    open_services,
    running,
    told,
)


def end_of(services: Services, lease_id: str) -> SessionEnd | None:
    """When and why a session ends by itself, as pages and REST say it."""
    lease = services.leases.get(lease_id)
    end = view_models.session_ends(services, [lease], services.clock()).get(lease_id)
    # A charge is rounded down to a microcredit, which lasts 0.9 milliseconds.
    return end and replace(end, at=end.at.replace(microsecond=end.at.microsecond // 1000))


def server(
    services: Services, user: str, group: str = "", seconds: int | None = None, name: str = ""
) -> Lease:
    """A running lease of an A100 that is paid by its member: a credit lasts a quarter hour."""
    request = Request(devices=1, model="A100")
    terms = Terms(groups=frozenset({group}), seconds=seconds)
    lease = services.leases.grant(ServerRef(user, name), request, engine="local", terms=terms)
    return services.leases.confirm(lease.id)


def titles(services: Services, user: str = "ada") -> list[str]:
    """The titles of a member's notices, oldest first, without their times."""
    return [
        notice.title.partition(" until ")[0] for notice in services.notifications.notices_of(user)
    ][::-1]


# Stopped after a grace.


Duties = Callable[..., CreditDuty]
MINUTE = 60.0
POLICIES = {"lab": {"overdraft": "0.5"}, "course": "session", "*": "stop"}


@pytest.fixture
def services(make: Make) -> Services:
    """One with a policy for each group."""
    return make(**SITE, when_dry=POLICIES, hold_minutes=1)


@pytest.fixture
def duty(services: Services, hub: ScriptedHub) -> Duties:
    """The duty, as each service has it."""

    def make(**settings: Any) -> CreditDuty:
        return make_credits(services, hub, **settings)

    return make


async def test_exhausted_account_is_warned_and_its_server_stopped(
    services: Services, hub: ScriptedHub, clock: Clock, duty: Duties
) -> None:
    lease = running(services, "ada")
    hub.has(lease.server)
    credits = duty()
    clock.forward(seconds=899)
    await credits.round()
    assert services.leases.get(lease.id).warned_at is None
    clock.forward(seconds=1)  # after 15 minutes at 4 credits an hour: all of it is used up
    await credits.round()
    assert services.leases.get(lease.id).warned_at == clock.now

    clock.forward(seconds=GRACE - 1)
    services.ledger.grant(member_account("ada"), 2 * MICRO, actor="admin", reason="more")
    await credits.round()
    assert services.leases.get(lease.id).warned_at is None, "credits in time withdraw the warning"
    clock.forward(seconds=GRACE)
    await credits.round()
    assert services.leases.get(lease.id).outcome == ""

    clock.now = warned_at = T0 + timedelta(minutes=45)  # dry again: a whole new grace
    await credits.round()
    clock.forward(seconds=GRACE - 1)
    await credits.round()
    assert services.leases.get(lease.id).warned_at == warned_at
    assert services.leases.get(lease.id).outcome == ""
    clock.forward(seconds=1)
    await credits.round()
    ordered = services.leases.get(lease.id)
    assert (ordered.outcome, ordered.end_reason) == ("credits", "the credits ran out")
    assert ordered.state is LeaseState.RUNNING, "until an engine proves the end"
    services.ledger.charge_all()
    assert services.ledger.member("ada").balance == -owed(RATE, T0, T0 + timedelta(seconds=GRACE))

    sessions = SessionDuty(make_tick(services, hub), warn_minutes=())
    while not hub.stopped:
        await sessions.round()
        await asyncio.sleep(0.01)
    await sessions.close()
    assert hub.stopped == ["ada/"]


async def test_servers_that_cost_nothing_continue_without_credits(
    services: Services, clock: Clock, duty: Duties
) -> None:
    free = running(services, "ada", devices=0)
    paid = services.leases.grant(ServerRef("ada", "gpu"), Request(devices=1), engine="local")
    services.leases.confirm(paid.id)
    waiting = services.leases.grant(ServerRef("ada", "waits"), Request(devices=1), engine="local")
    for _ in range(16):  # a T4: an hour, and the grace
        clock.forward(seconds=GRACE)
        await duty().round()
    assert services.leases.get(paid.id).outcome == "credits"
    for other in (free, waiting):
        assert (services.leases.get(other.id).warned_at, services.leases.get(other.id).outcome) == (
            None,
            "",
        )


@pytest.mark.parametrize(
    ("group", "seconds", "reason", "stops"),
    [
        ("", 7 * 24 * 3600, EndReason.CREDITS, 900 + GRACE),  # a credit lasts a quarter hour
        ("", 600, EndReason.TIME, 600),
        ("", None, EndReason.CREDITS, 900 + GRACE),
        ("lab", 3600, EndReason.CREDITS, 1350),  # with its overdraft
        ("course", 3600, EndReason.TIME, 3600),
    ],
)
async def test_session_stops_at_the_end_and_for_the_reason_that_was_shown(
    services: Services,
    clock: Clock,
    hub: ScriptedHub,
    duty: Duties,
    group: str,
    seconds: int | None,
    reason: EndReason,
    stops: float,
) -> None:
    """The end is the same before the start, at it and after the credits are gone; it comes true."""
    policy = services.exhaustion.settings.policies[group or "*"]
    balance = services.ledger.open_account("ada").balance
    purse = AccountRunway(balance, RATE)
    planned = planned_end(purse, seconds, clock.now, policy, services.exhaustion.grace)
    lease = server(services, "ada", group, seconds=seconds)
    expected = T0 + timedelta(seconds=stops)
    assert planned == SessionEnd(expected, reason) == end_of(services, lease.id)
    credits = duty()
    for at in sorted({899, 900, int(stops) - 1}):
        if at >= stops:
            continue
        clock.now = T0 + timedelta(seconds=at)
        services.ledger.charge_all()
        await credits.round()
        assert end_of(services, lease.id) == SessionEnd(expected, reason)
        assert services.leases.get(lease.id).outcome == ""
    clock.now = expected
    services.ledger.charge_all()
    await credits.round()
    services.sessions.end_session(lease.id)
    assert services.leases.get(lease.id).outcome == (
        "credits" if reason is EndReason.CREDITS else "session_end"
    )
    assert end_of(services, lease.id) is None, "it is being stopped"


# The session ends first.


async def test_session_policy_lets_a_planned_session_finish(
    services: Services, clock: Clock, duty: Duties
) -> None:
    lease = server(services, "ada", "course", seconds=7200)
    clock.forward(seconds=900)
    await duty().round()
    clock.forward(seconds=GRACE)
    await duty().round()
    assert services.leases.get(lease.id).outcome == ""
    (notice,) = services.notifications.notices_of("ada")
    assert "continues until its session ends at " in notice.body
    with pytest.raises(NoCredits):
        server(services, "ada", "course", seconds=60, name="another")
    clock.forward(seconds=7200 - 1200)
    await duty().round()
    assert end_of(services, lease.id) == SessionEnd(clock.now, EndReason.TIME)
    assert [x.id for x in services.sessions.due_sessions().over] == [lease.id]
    settled = services.leases.release(lease.id, ended_at=clock.now, reason="its time was over")
    assert (settled.charged, settled.waived) == (8 * MICRO, 0)
    assert services.ledger.member("ada").balance == -7 * MICRO


def test_session_without_credits_cannot_be_extended(services: Services, clock: Clock) -> None:
    lease = server(services, "ada", "course", seconds=3600)
    clock.forward(seconds=14 * MINUTE)
    assert services.extensions.extend(lease.id, actor="ada").extended == 14 * MINUTE
    clock.forward(seconds=59)
    with pytest.raises(CannotExtend, match=r"member:ada has 0\.00 credits left, and needs 0\.07"):
        services.extensions.extend(lease.id, actor="ada")
    services.ledger.grant("member:ada", MICRO, actor="kim", reason="more")
    assert services.extensions.extend(lease.id, actor="ada").extended == 15 * MINUTE - 1


# A bounded overdraft.


async def test_overdraft_ends_exactly_at_its_limit(
    services: Services, clock: Clock, duty: Duties
) -> None:
    lease = server(services, "ada", "lab")
    credits = duty(warn_minutes=(10, 2))
    for at in (751, 900, 1231, 1349):  # 22.5 minutes in all
        clock.now = T0 + timedelta(seconds=at)
        services.ledger.charge_all()
        await credits.round()
    assert titles(services) == [
        "Your credits last",
        "Your credits have run out",
        "Your credits last",
    ]
    low, out, _ = services.notifications.notices_of("ada")
    assert "credits are left with the overdraft of 0.50" in low.body
    assert "continues until the overdraft of 0.50 credits is used up, about " in out.body
    stop = end_of(services, lease.id)
    assert stop and stop.reason is EndReason.CREDITS
    assert stop.at == T0 + timedelta(seconds=1350)
    with pytest.raises(NoCredits):
        server(services, "ada", "lab", name="another")
    clock.forward(seconds=1)
    await credits.round()
    assert services.leases.get(lease.id).outcome == "credits", "no grace beyond the bound"
    clock.forward(seconds=86400)  # the Hub is down for a day
    for _ in range(3):
        services.ledger.charge_all()
    assert services.ledger.member("ada").balance == -MICRO // 2
    settled = services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert services.ledger.member("ada").balance == -MICRO // 2
    assert settled.charged == 1_500_000
    assert settled.charged + settled.waived == owed(RATE, T0, clock.now)


async def test_grant_during_an_overdraft_pays_for_past_use(
    services: Services, clock: Clock, duty: Duties
) -> None:
    lease = server(services, "ada", "lab")
    clock.forward(seconds=1500)  # nobody was there to stop it at 1,350 seconds
    services.ledger.charge_all()
    assert services.ledger.member("ada").balance == -MICRO // 2
    services.ledger.grant("member:ada", 10 * MICRO, actor="kim", reason="more")
    await duty().round()
    assert services.leases.get(lease.id).outcome == ""
    settled = services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    assert (settled.charged, settled.waived) == (owed(RATE, T0, clock.now), 0)


@pytest.mark.parametrize("ticks", [[], [100, 1500, 3000]])
def test_servers_of_an_account_share_one_overdraft(
    services: Services, database_url: str, clock: Clock, ticks: list[int]
) -> None:
    """A new amount in the configuration counts once none of them runs: with two at a time, who
    is let off of what would depend on when somebody looked."""
    first = server(services, "ada", "lab", name="one")
    later = open_services(database_url, clock, when_dry={"lab": {"overdraft": 9}})
    second = server(later, "ada", "lab", name="two")
    assert first.overdraft == second.overdraft == MICRO // 2
    for at in ticks:
        clock.now = T0 + timedelta(seconds=at)
        later.ledger.charge_portion(timedelta(seconds=MINUTE))
    clock.now = T0 + timedelta(seconds=3600)
    settled = [
        later.leases.release(x.id, ended_at=clock.now, reason="stopped") for x in (first, second)
    ]
    assert [lease.charged for lease in settled] == [750_000, 750_000]
    later.ledger.grant("member:ada", 10 * MICRO, actor="kim", reason="more")
    assert server(later, "ada", "lab", name="three").overdraft == 9 * MICRO
    assert problems(services.store) == []


async def test_failed_start_in_an_overdraft_is_fully_refunded(
    services: Services, clock: Clock
) -> None:
    lease = server(services, "ada", "lab")
    clock.forward(seconds=3600)
    services.ledger.charge_all()
    settled = services.leases.release(
        lease.id, ended_at=clock.now, reason="it never was up", failed=True
    )
    assert (settled.charged, settled.waived) == (0, 0)
    assert services.ledger.member("ada").balance == MICRO


# Whose policy it is.


def test_first_matching_group_sets_the_credit_policy(services: Services) -> None:
    both = services.settings.credits.policy_for("member:ada", {"course", "lab"})
    assert (both.when_dry, both.overdraft) == ("overdraft", 500_000)
    assert services.settings.credits.policy_for("member:ada", {"other"}).when_dry == "stop"
    assert services.settings.credits.policy_for("group:course", {"lab"}).when_dry == "session"
    assert services.settings.credits.policy_for("group:other", {"lab"}).when_dry == "stop"


@pytest.mark.parametrize(
    ("group", "changes", "policy"),
    [
        ("lab", {}, ("overdraft", 500_000)),
        ("course", {"when_dry": "session", "overdraft": 0}, ("session", 0)),
    ],
    ids=["stays in the group", "leaves it while waiting"],
)
def test_ticket_gets_the_credit_policy_of_the_group(
    services: Services, clock: Clock, group: str, changes: dict[str, Any], policy: tuple[str, int]
) -> None:
    services.settings.credits.opening_grant = 100
    holder, _ = (server(services, "bob", name=str(number)) for number in range(2))
    terms = Terms(groups=frozenset({"lab"}), wait=True)
    request = Request(devices=1, model="A100")
    ticket = services.queue.ask(ServerRef("ada"), request, engine="local", terms=terms)
    assert services.queue.regrouped(ticket, frozenset({group})) == changes
    if changes:
        services.queue.regroup(ticket.id, changes)
    services.leases.release(holder.id, ended_at=clock.now, reason="stopped")
    assert ticket.id in services.queue.turns(frozenset({ticket.id}))
    lease = services.queue.start_ticket(ticket.id)
    assert (lease.when_dry, lease.overdraft) == policy


def test_invalid_exhaustion_policy_stops_the_start(database_url: str, clock: Clock) -> None:
    bounds = (True, "1,5", "NaN", 0, -1, 10**30, "0." + "1" * 18)
    wrong: list[Any] = ["", "go on", 5, None, {}, {"overdraft": 5, "grace": 1}]
    for policy in [*wrong, *({"overdraft": bound} for bound in bounds)]:
        with pytest.raises(ConfigError, match=r"GPUCredits\.when_exhausted\['lab'\]"):
            open_services(database_url, clock, when_dry={"lab": policy})


async def test_failing_account_does_not_block_other_accounts(
    services: Services, clock: Clock, duty: Duties, caplog: pytest.LogCaptureFixture
) -> None:
    """The database refuses one row, and takes it later."""
    caplog.set_level(logging.INFO, "tick")
    some = [server(services, user) for user in ("ada", "bob")]
    clock.forward(seconds=900)
    refuse = "BEFORE UPDATE ON leases WHEN NEW.id = '{}' BEGIN SELECT RAISE(ABORT, 'no'); END"
    if services.store.dialect == "postgresql":
        refuse = "CHECK (id <> '{}' OR warned_at IS NULL)"
        statement = f"ALTER TABLE leases ADD CONSTRAINT stubborn {refuse}"
        undo = "ALTER TABLE leases DROP CONSTRAINT stubborn"
    else:
        statement, undo = f"CREATE TRIGGER stubborn {refuse}", "DROP TRIGGER stubborn"
    services.store.run(lambda c: c.execute(sa.text(statement.format(some[0].id))), write=True)
    credits = duty()
    await credits.round()
    assert [services.leases.get(x.id).warned_at for x in some] == [None, clock.now]
    assert services.notifications.notices_of("ada") == []
    services.store.run(lambda c: c.execute(sa.text(undo)), write=True)
    await credits.round()
    assert services.leases.get(some[0].id).warned_at == clock.now
    assert "Credits of member:ada: all is well again" in told(caplog.records)


# Warnings.


async def test_credit_warnings_are_given_once_and_on_time(
    services: Services, clock: Clock, duty: Duties, caplog: pytest.LogCaptureFixture
) -> None:
    """The service starts again before each round."""
    caplog.set_level(logging.INFO, "tick")
    lease, said = running(services, "ada"), list[int]()
    for second in (1, 60, 299, 300, 301, 302, 540, 779, 780, 781, 782, 899):
        clock.now = T0 + timedelta(seconds=second)
        for _ in range(2):
            await duty(warn_minutes=(10, 2)).round()
        said += [second] * (len(services.notifications.notices_of("ada")) - len(said))
    assert said == [5 * 60 + 1, 13 * 60 + 1], "less than ten minutes, and two"
    assert services.leases.get(lease.id).told_dry == 2
    assert [line for line in told(caplog.records) if "was warned" in line] == [
        "member:ada has 0.67 credits left: ada was warned that less than 10 min are left",
        "member:ada has 0.13 credits left: ada was warned that less than 2 min are left",
    ]


async def test_expiring_credits_do_not_count_as_lasting(
    services: Services, clock: Clock, duty: Duties
) -> None:
    """Six credits at four an hour, of which five end in half an hour: 45 minutes, and not 90."""
    running(services, "ada")
    until = clock.now + timedelta(minutes=30)
    services.ledger.grant("member:ada", 5 * MICRO, actor="kim", reason="an hour", until=until)
    credits = duty(warn_minutes=(20,))
    clock.forward(seconds=24 * MINUTE)
    await credits.round()
    assert services.notifications.notices_of("ada") == []
    clock.forward(seconds=2 * MINUTE)
    assert services.exhaustion.accounts_to_see_to((20,)) == ["member:ada"]
    await credits.round()
    assert titles(services) == ["Your credits last"]
    clock.forward(seconds=19 * MINUTE)
    services.ledger.end_lots()
    services.ledger.charge_all()
    assert services.ledger.member("ada").balance == 0


async def test_concurrent_services_notify_the_member_once(
    database_url: str, services: Services, hub: ScriptedHub, clock: Clock
) -> None:
    """One that is not dead yet, and the one that the Hub started after it."""
    other = open_services(database_url, clock)
    lease = running(services, "ada")
    for seconds in (6 * MINUTE, 9 * MINUTE, GRACE):
        clock.forward(seconds=seconds)
        some = [make_credits(each, hub, warn_minutes=(10,)) for each in (services, other)]
        await asyncio.gather(*(each.round() for each in some for _ in range(3)))
    assert titles(services) == [
        "Your credits last",
        "Your credits have run out",
        "Your server was stopped: the credits have run out",
    ]
    assert services.leases.get(lease.id).outcome == "credits"


async def test_credit_warning_is_repeated_after_credits_and_for_a_new_server(
    services: Services, clock: Clock, duty: Duties
) -> None:
    one = server(services, "ada", name="one")
    credits = duty(warn_minutes=(10, 2))
    clock.forward(seconds=14 * MINUTE)
    await credits.round()
    assert len(titles(services)) == 1, "the two minutes; the ten were missed"
    services.ledger.grant("member:ada", MICRO // 2, actor="kim", reason="a bit")
    await credits.round()
    assert len(titles(services)) == 1, "8 minutes are left: nothing new is due on the way up"
    clock.forward(seconds=7 * MINUTE)
    await credits.round()
    assert len(titles(services)) == 2
    services.leases.release(one.id, ended_at=clock.now, reason="stopped")
    server(services, "ada", name="two")
    for _ in range(3):
        await credits.round()
    assert len(titles(services)) == 3, "a new server has a warning of its own"
