"""Who is told that credits run low, and when. Real here: SQLite and PostgreSQL, commands as hooks.
The Hub is a script. ``tests/hub/test_running_dry.py`` has the real one."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.services import Broker
from tests.integration.dry.conftest import Make
from tests.support.dry import MINUTE, server, titles
from tests.support.rounds import (
    GRACE,
    Clock,
    ScriptedHub,
    make_credits,
    open_broker,
    running,
    told,
)

# Warnings.


@pytest.mark.parametrize("restarts", [False, True])
async def test_each_warning_comes_once_and_to_the_second(
    broker: Broker, clock: Clock, make: Make, restarts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tick")
    lease = running(broker, "ada")
    credits, said = make(warn_minutes=(10, 2)), []
    for second in range(1, 15 * 60):
        clock.advance(1)
        if restarts:
            await credits.close()
            credits = make(warn_minutes=(10, 2))
        if second % 50 in (49, 0, 1, 29, 30, 31) or second % 60 in (59, 0, 1):
            await credits.round()
            said += [second] * (len(broker.notifications.notices_of("ada")) - len(said))
    assert said == [5 * 60 + 1, 13 * 60 + 1], "less than ten minutes, and two"
    assert broker.lease(lease.id).told_dry == 2
    assert [line for line in told(caplog.records) if "was warned" in line] == [
        "member:ada has 0.66 credits left: ada was warned that less than 10 min are left",
        "member:ada has 0.13 credits left: ada was warned that less than 2 min are left",
    ]


async def test_credits_that_end_soon_do_not_count_as_lasting(
    broker: Broker, clock: Clock, make: Make
) -> None:
    """Six credits at four an hour, of which five end in half an hour: 45 minutes, and not 90."""
    running(broker, "ada")
    until = clock.now + timedelta(minutes=30)
    broker.ledger.grant("member:ada", 5 * MICRO, actor="kim", reason="an hour", until=until)
    credits = make(warn_minutes=(20,))
    clock.advance(24 * MINUTE)
    await credits.round()
    assert broker.notifications.notices_of("ada") == []
    clock.advance(2 * MINUTE)
    assert broker.exhaustion.accounts_to_see_to((20,)) == ["member:ada"]
    await credits.round()
    assert titles(broker) == ["Your credits last"]
    clock.advance(19 * MINUTE)
    broker.ledger.end_lots()
    broker.ledger.charge_all()
    assert broker.ledger.member("ada").balance == 0


async def test_two_services_at_once_tell_it_once(
    database_url: str, broker: Broker, hub: ScriptedHub, clock: Clock
) -> None:
    """One that is not dead yet, and the one that the Hub started after it."""
    other = open_broker(database_url, clock)
    lease = running(broker, "ada")
    for seconds in (6 * MINUTE, 9 * MINUTE, GRACE):
        clock.advance(seconds)
        some = [make_credits(each, hub, warn_minutes=(10,)) for each in (broker, other)]
        await asyncio.gather(*(each.round() for each in some for _ in range(3)))
    assert titles(broker) == [
        "Your credits last",
        "Your credits have run out",
        "Your server is stopped: the credits have run out",
    ]
    assert broker.lease(lease.id).outcome == "credits"


async def test_a_warning_that_was_passed_on_the_way_up_comes_again(
    broker: Broker, clock: Clock, make: Make
) -> None:
    server(broker, "ada", name="one")
    credits = make(warn_minutes=(10, 2))
    clock.advance(14 * MINUTE)
    await credits.round()
    assert len(titles(broker)) == 1, "the two minutes; the ten were missed"
    broker.ledger.grant("member:ada", MICRO // 2, actor="kim", reason="a bit")
    await credits.round()
    assert len(titles(broker)) == 1, "8 minutes are left: nothing new is due on the way up"
    clock.advance(7 * MINUTE)
    await credits.round()
    assert len(titles(broker)) == 2


async def test_a_new_server_is_told_anew(broker: Broker, clock: Clock, make: Make) -> None:
    one = server(broker, "ada", name="one")
    credits = make(warn_minutes=(10,))
    clock.advance(6 * MINUTE)
    await credits.round()
    broker.release(one.id, ended_at=clock.now, reason="stopped")

    server(broker, "ada", name="two")
    for _ in range(3):
        await credits.round()
    assert len(titles(broker)) == 2


# The hook.

KEEP = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


async def test_the_hook_hears_of_each_event_once(
    broker: Broker, clock: Clock, make: Make, tmp_path: Path
) -> None:
    file = tmp_path / "told"
    lease = server(broker, "ada")
    command = [sys.executable, "-c", KEEP, str(file)]
    poked: list[int] = []
    for seconds in (360, 540, GRACE):
        clock.advance(seconds)
        credits = make(warn_minutes=(10,), command=command, poke=lambda: poked.append(1))
        for _ in range(2):
            await credits.round()
    end = asyncio.get_running_loop().time() + 20
    while not file.exists() or len(file.read_text().splitlines()) < 3:
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.02)
    low, out, stop = sorted(map(json.loads, file.read_text().splitlines()), key=lambda x: x["at"])
    assert low == {
        "event": "low",
        "account": "member:ada",
        "balance": "0.600000",
        "rate_per_hour": "4.000000",
        "lease": lease.id,
        "user": "ada",
        "server": "",
        "environment": "",
        "when_dry": "stop",
        "minutes": 10,
        "stops_at": None,
        "at": "2026-03-01T12:06:00.000+00:00",
    }
    assert (out["event"], out["stops_at"]) == ("dry", "2026-03-01T12:20:00.000+00:00")
    assert (stop["event"], stop["balance"]) == ("stop", "-0.333333")
    assert poked == [1, 1, 1]


async def test_a_hook_that_fails_is_said_and_holds_up_nothing(
    broker: Broker, clock: Clock, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tick")
    lease = server(broker, "ada")
    credits = make(command=["/no/such/command"])
    for seconds in (900, GRACE):
        clock.advance(seconds)
        await credits.round()
    assert broker.lease(lease.id).outcome == "credits"
    while not any("c.GPUCredits.hook: The hook" in line for line in told(caplog.records)):
        await asyncio.sleep(0.01)
