"""What becomes of servers whose account has run dry. Real here: SQLite and PostgreSQL, HTTP.
The Hub is a script. ``tests/hub/test_running_dry.py`` has the real one."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import CannotExtend, ConfigError, NoCredits
from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import LeaseState, Request, ServerRef
from gpuspawner.ledger.models import member_account
from gpuspawner.ledger.rules import owed
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.service import Terms
from gpuspawner.service.session_duties import SessionDuty
from gpuspawner.services import Broker
from tests.integration.dry.conftest import Make
from tests.support.brokers import problems
from tests.support.dry import MINUTE, server, titles
from tests.support.rounds import (
    GRACE,
    RATE,
    START,
    Clock,
    ScriptedHub,
    make_tick,
    open_broker,
    running,
    told,
)

# Stopped after a grace.


async def test_a_dry_account_is_told_then_stopped(
    broker: Broker, hub: ScriptedHub, clock: Clock, make: Make
) -> None:
    lease = running(broker, "ada")
    hub.has(lease.server)
    credits = make()
    clock.advance(899)
    await credits.round()
    assert broker.lease(lease.id).warned_at is None
    clock.advance(1)  # 15 minutes at 4 credits an hour: the whole credit, to the microcredit
    await credits.round()
    assert broker.lease(lease.id).warned_at == clock.now

    warned_at = clock.now
    clock.advance(GRACE - 1)
    await credits.round()
    assert broker.lease(lease.id).warned_at == warned_at
    assert broker.lease(lease.id).outcome == ""
    clock.advance(1)
    await credits.round()
    ordered = broker.lease(lease.id)
    assert (ordered.outcome, ordered.end_reason) == ("credits", "the credits ran out")
    assert ordered.state is LeaseState.RUNNING, "until an engine proves the end"
    broker.ledger.charge_all()
    assert broker.ledger.member("ada").balance == -owed(
        RATE, START, START + timedelta(seconds=GRACE)
    )


async def test_the_stop_is_carried_out_with_those_of_sessions(
    broker: Broker, hub: ScriptedHub, clock: Clock, make: Make
) -> None:
    lease = running(broker, "ada")
    hub.has(lease.server)
    for seconds in (1000, GRACE):
        clock.advance(seconds)
        await make().round()
    sessions = SessionDuty(make_tick(broker, hub), warn_minutes=())
    while not hub.stopped:
        await sessions.round()
        await asyncio.sleep(0.01)
    await sessions.close()
    assert hub.stopped == ["ada/"]


async def test_credits_in_time_take_the_warning_back(
    broker: Broker, clock: Clock, make: Make
) -> None:
    lease = running(broker, "ada")
    credits = make()
    clock.advance(1000)
    await credits.round()
    broker.ledger.grant(member_account("ada"), MICRO, actor="admin", reason="more")
    clock.advance(1)
    await credits.round()
    assert broker.lease(lease.id).warned_at is None
    clock.advance(GRACE)
    await credits.round()
    assert broker.lease(lease.id).outcome == ""
    clock.advance(GRACE * 3)  # dry again: a whole new grace
    await credits.round()
    clock.advance(GRACE - 1)
    await credits.round()
    assert broker.lease(lease.id).outcome == ""
    clock.advance(1)
    await credits.round()
    assert broker.lease(lease.id).outcome == "credits"


async def test_servers_that_cost_nothing_go_on(broker: Broker, clock: Clock, make: Make) -> None:
    free = running(broker, "ada", devices=0)
    paid = broker.acquire(ServerRef("ada", "gpu"), Request(devices=1), engine="local")
    broker.confirm(paid.id)
    waiting = broker.acquire(ServerRef("ada", "waits"), Request(devices=1), engine="local")
    for _ in range(16):  # a T4: an hour, and the grace
        clock.advance(GRACE)
        await make().round()
    assert broker.lease(paid.id).outcome == "credits"
    for other in (free, waiting):
        assert (broker.lease(other.id).warned_at, broker.lease(other.id).outcome) == (None, "")


# The session ends first.


async def test_a_planned_session_ends_before_anything_is_stopped(
    broker: Broker, clock: Clock, make: Make
) -> None:
    lease = server(broker, "ada", "course", seconds=7200)
    clock.advance(900)
    await make().round()
    clock.advance(GRACE)
    await make().round()
    assert broker.lease(lease.id).outcome == ""
    (notice,) = broker.notifications.notices_of("ada")
    assert "goes on until its session ends at " in notice.body
    with pytest.raises(NoCredits):
        server(broker, "ada", "course", seconds=60, name="another")
    clock.advance(7200 - 1200)
    await make().round()
    assert broker.exhaustion.dry_stops([broker.lease(lease.id)]) == {lease.id: clock.now}
    assert [x.id for x in broker.due_sessions().over] == [lease.id]
    settled = broker.release(lease.id, ended_at=clock.now, reason="its time was over")
    assert (settled.charged, settled.waived) == (8 * MICRO, 0)
    assert broker.ledger.member("ada").balance == -7 * MICRO


def test_a_session_that_may_go_on_without_credits_is_not_extended_without(
    broker: Broker, clock: Clock
) -> None:
    lease = server(broker, "ada", "course", seconds=3600)
    clock.advance(14 * MINUTE)
    assert broker.extend(lease.id, actor="ada").extended == 14 * MINUTE
    clock.advance(59)
    with pytest.raises(CannotExtend, match=r"member:ada has 0\.00 credits left, and needs 0\.06"):
        broker.extend(lease.id, actor="ada")
    broker.ledger.grant("member:ada", MICRO, actor="kim", reason="more")
    assert broker.extend(lease.id, actor="ada").extended == 15 * MINUTE - 1


async def test_a_session_without_an_end_is_stopped_after_the_grace(
    broker: Broker, clock: Clock, make: Make
) -> None:
    lease = server(broker, "ada", "course")
    for seconds in (900, GRACE):
        clock.advance(seconds)
        await make().round()
    assert broker.lease(lease.id).outcome == "credits"


# A bounded overdraft.


async def test_an_overdraft_ends_at_its_bound_to_the_microcredit(
    broker: Broker, clock: Clock, make: Make
) -> None:
    lease = server(broker, "ada", "lab")
    credits = make(warn_minutes=(10, 2))
    for at in (751, 900, 1231, 1349):  # 22.5 minutes in all
        clock.now = START + timedelta(seconds=at)
        broker.ledger.charge_all()
        await credits.round()
    assert titles(broker) == [
        "Your credits last",
        "Your credits have run out",
        "Your credits last",
    ]
    low, out, _ = broker.notifications.notices_of("ada")
    assert "credits are left with the overdraft of 0.50" in low.body
    assert "goes on until the overdraft of 0.50 credits is used up, about " in out.body
    (stop,) = broker.exhaustion.dry_stops([broker.lease(lease.id)]).values()
    assert round((stop - START).total_seconds(), 2) == 1350
    with pytest.raises(NoCredits):
        server(broker, "ada", "lab", name="another")
    clock.advance(1)
    await credits.round()
    assert broker.lease(lease.id).outcome == "credits", "no grace beyond the bound"
    clock.advance(86400)  # the Hub is down for a day
    for _ in range(3):
        broker.ledger.charge_all()
    assert broker.ledger.member("ada").balance == -MICRO // 2
    settled = broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert broker.ledger.member("ada").balance == -MICRO // 2
    assert settled.charged == 1_500_000
    assert settled.charged + settled.waived == owed(RATE, START, clock.now)


async def test_credits_in_the_overdraft_pay_for_what_was_used(
    broker: Broker, clock: Clock, make: Make
) -> None:
    lease = server(broker, "ada", "lab")
    clock.advance(1500)  # nobody was there to stop it at 1,350 seconds
    broker.ledger.charge_all()
    assert broker.ledger.member("ada").balance == -MICRO // 2
    broker.ledger.grant("member:ada", 10 * MICRO, actor="kim", reason="more")
    await make().round()
    assert broker.lease(lease.id).outcome == ""
    settled = broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert (settled.charged, settled.waived) == (owed(RATE, START, clock.now), 0)


async def test_two_servers_share_the_bound(broker: Broker, clock: Clock, make: Make) -> None:
    some = [server(broker, "ada", "lab", name=name) for name in ("one", "two")]
    clock.advance(3600)
    await make().round()
    assert {broker.lease(x.id).outcome for x in some} == {"credits"}
    for lease in some:
        broker.release(lease.id, ended_at=clock.now, reason="stopped")
    assert broker.ledger.member("ada").balance == -MICRO // 2


@pytest.mark.parametrize("ticks", [[], [10], [1000], [10, 700, 1000, 2000]])
def test_who_of_two_is_let_off_is_a_matter_of_time_alone(
    broker: Broker, clock: Clock, ticks: list[int]
) -> None:
    """Both pay up to the moment when the overdraft is used up, whenever somebody looks."""
    some = [server(broker, "ada", "lab", name=name) for name in ("one", "two")]
    for at in ticks:
        clock.now = START + timedelta(seconds=at)
        broker.ledger.charge_all()
    clock.now = START + timedelta(seconds=3600)
    settled = [
        broker.release(lease.id, ended_at=clock.now, reason="stopped") for lease in reversed(some)
    ]
    assert [lease.charged for lease in settled] == [750_000, 750_000]
    assert broker.ledger.member("ada").balance == -MICRO // 2
    assert problems(broker.store) == []


@pytest.mark.parametrize("ticks", [[], [100, 1500, 3000]])
def test_servers_of_an_account_share_one_overdraft(
    broker: Broker, database_url: str, clock: Clock, ticks: list[int]
) -> None:
    """A new amount in the configuration counts once none of them runs: with two at a time, who
    is let off of what would depend on when somebody looked."""
    first = server(broker, "ada", "lab", name="one")
    later = open_broker(database_url, clock, when_dry={"lab": {"overdraft": 9}})
    second = server(later, "ada", "lab", name="two")
    assert first.overdraft == second.overdraft == MICRO // 2
    for at in ticks:
        clock.now = START + timedelta(seconds=at)
        later.ledger.charge_portion(timedelta(seconds=MINUTE))
    clock.now = START + timedelta(seconds=3600)
    settled = [later.release(x.id, ended_at=clock.now, reason="stopped") for x in (first, second)]
    assert [lease.charged for lease in settled] == [750_000, 750_000]
    later.ledger.grant("member:ada", 10 * MICRO, actor="kim", reason="more")
    assert server(later, "ada", "lab", name="three").overdraft == 9 * MICRO
    assert problems(broker.store) == []


async def test_a_failed_start_in_the_overdraft_gives_all_back(broker: Broker, clock: Clock) -> None:
    lease = server(broker, "ada", "lab")
    clock.advance(3600)
    broker.ledger.charge_all()
    settled = broker.release(lease.id, ended_at=clock.now, reason="it never was up", failed=True)
    assert (settled.charged, settled.waived) == (0, 0)
    assert broker.ledger.member("ada").balance == MICRO


# Whose policy it is.


def test_the_first_group_that_is_named_counts(broker: Broker) -> None:
    both = broker.settings.credits.policy_for("member:ada", {"course", "lab"})
    assert (both.when_dry, both.overdraft) == ("overdraft", 500_000)
    assert broker.settings.credits.policy_for("member:ada", {"other"}).when_dry == "stop"
    assert broker.settings.credits.policy_for("group:course", {"lab"}).when_dry == "session"
    assert broker.settings.credits.policy_for("group:other", {"lab"}).when_dry == "stop"


def test_who_waits_in_line_keeps_the_policy(broker: Broker, clock: Clock) -> None:
    broker.settings.credits.opening_grant = 100
    holders = [server(broker, "bob", name=str(number)) for number in range(2)]
    terms = Terms(groups=frozenset({"lab"}), wait=True)
    ticket = broker.ask(
        ServerRef("ada"), Request(devices=1, model="A100"), engine="local", terms=terms
    )
    broker.release(holders[0].id, ended_at=clock.now, reason="stopped")
    assert ticket.id in broker.turns(frozenset({ticket.id}))
    lease = broker.start_ticket(ticket.id)
    assert (lease.when_dry, lease.overdraft) == ("overdraft", 500_000)


def test_who_leaves_the_group_while_waiting_leaves_its_overdraft(
    broker: Broker, clock: Clock
) -> None:
    broker.settings.credits.opening_grant = 100
    holders = [server(broker, "bob", name=str(number)) for number in range(2)]
    terms = Terms(groups=frozenset({"lab"}), wait=True)
    request = Request(devices=1, model="A100")
    ticket = broker.ask(ServerRef("ada"), request, engine="local", terms=terms)
    assert isinstance(ticket, Ticket)
    assert broker.regrouped(ticket, frozenset({"lab"})) == {}
    changes = broker.regrouped(ticket, frozenset({"course"}))
    assert changes == {"when_dry": "session", "overdraft": 0}
    broker.regroup(ticket.id, changes)
    broker.release(holders[0].id, ended_at=clock.now, reason="stopped")
    assert ticket.id in broker.turns(frozenset({ticket.id}))
    lease = broker.start_ticket(ticket.id)
    assert (lease.when_dry, lease.overdraft) == ("session", 0)


@pytest.mark.parametrize(
    "policy",
    ["", "go on", 5, None, {}, {"overdraft": 5, "grace": 1}, {"overdraft": True},
     {"overdraft": "1,5"}, {"overdraft": "NaN"}, {"overdraft": 0}, {"overdraft": -1},
     {"overdraft": 10**30}, {"overdraft": "0." + "1" * 18}],
)  # fmt: skip
def test_a_policy_that_is_none_stops_the_start(
    database_url: str, clock: Clock, policy: object
) -> None:
    with pytest.raises(ConfigError, match=r"GPUCredits\.when_exhausted\['lab'\]"):
        open_broker(database_url, clock, when_dry={"lab": policy})


async def test_an_account_that_cannot_be_seen_to_holds_up_no_other(
    broker: Broker, clock: Clock, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The database refuses one row, and takes it later."""
    caplog.set_level(logging.INFO, "tick")
    some = [server(broker, user) for user in ("ada", "bob")]
    clock.advance(900)
    refuse = "BEFORE UPDATE ON leases WHEN NEW.id = '{}' BEGIN SELECT RAISE(ABORT, 'no'); END"
    if broker.store.dialect == "postgresql":
        refuse = "CHECK (id <> '{}' OR warned_at IS NULL)"
        statement = f"ALTER TABLE leases ADD CONSTRAINT stubborn {refuse}"
        undo = "ALTER TABLE leases DROP CONSTRAINT stubborn"
    else:
        statement, undo = f"CREATE TRIGGER stubborn {refuse}", "DROP TRIGGER stubborn"
    broker.store.run(lambda c: c.execute(sa.text(statement.format(some[0].id))), write=True)
    credits = make()
    await credits.round()
    assert [broker.lease(x.id).warned_at for x in some] == [None, clock.now]
    assert broker.notifications.notices_of("ada") == []
    broker.store.run(lambda c: c.execute(sa.text(undo)), write=True)
    await credits.round()
    assert broker.lease(some[0].id).warned_at == clock.now
    assert "Credits of member:ada: all is well again" in told(caplog.records)
