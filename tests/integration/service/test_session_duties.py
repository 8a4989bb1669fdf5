"""What the service does about sessions. Real here: SQLite, HTTP, a command as the hook. The Hub
is a script: it can fail for an hour, and be asked how often it was asked."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.service import duties
from gpuspawner.service.duties import LONGEST_PAUSE, SessionDuty
from gpuspawner.services import Services
from tests.support.brokers import Clock, Make
from tests.support.rounds import SITE, ScriptedHub, make_tick, open_services, told
from tests.support.telling import notifying

WARN = (10.0,)
Duties = Callable[..., SessionDuty]
Log, Patch = pytest.LogCaptureFixture, pytest.MonkeyPatch


@pytest.fixture
def services(make: Make) -> Services:
    """Two A100 at 4 credits an hour and a T4 at 1; everybody has 1,000 credits."""
    return make(**{**SITE, "opening_grant": 1000})


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow one another within hundredths of a second, as they do within a minute."""
    monkeypatch.setattr(duties, "AGAIN", 0.02)
    monkeypatch.setattr(duties, "LONGEST_PAUSE", 0.02)


@pytest.fixture
async def duty(services: Services, hub: ScriptedHub) -> AsyncIterator[Duties]:
    """The duty; closed at the end, as by a service that stops."""
    opened: list[SessionDuty] = []

    def make(**settings: Any) -> SessionDuty:
        tick = make_tick(services, hub)
        opened.append(SessionDuty(tick, warn_minutes=WARN, **settings))
        return opened[-1]

    yield make
    for some in opened:
        await some.close()


def session(services: Services, user: str, seconds: int = 3600) -> Lease:
    request, terms = Request(devices=1, model="A100"), Terms(seconds=seconds)
    return services.leases.confirm(
        services.leases.grant(ServerRef(user), request, engine="local", terms=terms).id
    )


async def rounds(sessions: SessionDuty, until: Callable[[], bool], limit: float = 120.0) -> None:
    """Go on with rounds until something is true."""
    end = asyncio.get_running_loop().time() + limit
    while not until():
        assert asyncio.get_running_loop().time() < end, "it did not come"
        await sessions.round()
        await asyncio.sleep(0.01)


async def test_expired_session_is_stopped_until_it_is_gone(
    services: Services, hub: ScriptedHub, clock: Clock, duty: Duties
) -> None:
    lease = session(services, "ada")
    session(services, "bob", seconds=7200)
    hub.has(lease.server)
    sessions = duty()
    clock.forward(seconds=3599)
    await sessions.round()
    assert hub.stopped == []
    clock.forward(seconds=1)
    await rounds(sessions, lambda: len(hub.stopped) == 3)
    assert set(hub.stopped) == {"ada/"}
    services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    asked = len(hub.stopped)
    for _ in range(20):
        await sessions.round()
        await asyncio.sleep(0.01)
    assert len(hub.stopped) <= asked + 1, "one may have been on its way"


async def test_stop_in_progress_is_not_requested_again(
    services: Services, hub: ScriptedHub, clock: Clock, duty: Duties, monkeypatch: Patch
) -> None:
    lease, other = session(services, "ada"), session(services, "bob")
    hub.has(lease.server, other.server)
    sessions = duty()
    answers = asyncio.Event()
    stop_server = sessions.tick.hub.stop_server
    asked: list[str] = []

    async def slow(server: ServerRef) -> bool:
        asked.append(server.user)
        if server.user == "ada":
            await answers.wait()
        return await stop_server(server)

    monkeypatch.setattr(sessions.tick.hub, "stop_server", slow)
    clock.forward(seconds=3600)
    await rounds(sessions, lambda: asked.count("bob") >= 5)
    assert asked.count("ada") == 1, "and it holds up nobody else's"
    answers.set()
    await rounds(sessions, lambda: asked.count("ada") >= 2)


async def test_failing_stop_is_retried_until_it_succeeds(
    services: Services, hub: ScriptedHub, clock: Clock, duty: Duties, caplog: Log
) -> None:
    caplog.set_level(logging.INFO, "tick")
    lease = session(services, "ada")
    hub.has(lease.server)
    sessions = duty()
    clock.forward(seconds=3600)
    hub.status = 502
    await rounds(sessions, lambda: len(hub.asked) >= 60)
    clock.forward(seconds=-3600)  # and somebody sets the clock back meanwhile
    hub.status = None
    # The Hub has the stop before the duty has its answer.
    await rounds(sessions, lambda: "Stop of ada: all is well again" in told(caplog.records))
    assert set(hub.stopped) == {"ada/"}
    assert sum("502" in line for line in told(caplog.records)) == 1
    assert len(services.notifications.notices_of("ada")) == 1


async def test_retry_delay_doubles_up_to_a_minute(
    services: Services, hub: ScriptedHub, clock: Clock, duty: Duties, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(duties, "LONGEST_PAUSE", LONGEST_PAUSE)
    lease = session(services, "ada")
    sessions = duty()
    clock.forward(seconds=3600)
    hub.status = 502
    now = [0.0]
    clock_of_loop = SimpleNamespace(time=lambda: now[0])
    stopped = {**vars(asyncio), "get_running_loop": lambda: clock_of_loop}
    monkeypatch.setattr(duties, "asyncio", SimpleNamespace(**stopped))
    waited = []
    for count in range(1, 11):
        while len(hub.asked) < count:
            await sessions.round()
            await asyncio.sleep(0.005)
        while sessions._stops[lease.id].under_way:
            await asyncio.sleep(0.005)
        pause = sessions._stops[lease.id].not_before - now[0]
        waited.append(pause)
        now[0] += pause
    assert waited == [2, 4, 8, 16, 32, 60, 60, 60, 60, 60]


async def test_stop_spares_a_newer_server_of_the_same_name(
    services: Services, hub: ScriptedHub, clock: Clock, duty: Duties
) -> None:
    lease = session(services, "ada")
    clock.forward(seconds=3600)
    due = services.sessions.due_sessions(WARN)
    assert services.sessions.end_session(due.over[0].id)
    services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    session(services, "ada")
    hub.has(lease.server)
    sessions = duty()
    sessions._carry_out(due.over)  # a round that began before
    tasks = [stop.task for stop in sessions._stops.values() if stop.task is not None]
    assert len(tasks) == 1
    await asyncio.gather(*tasks)
    assert hub.stopped == []


async def test_stop_orders_of_other_processes_are_executed(
    database_url: str, services: Services, hub: ScriptedHub, clock: Clock, duty: Duties
) -> None:
    """The hub says that nobody connected; an admin has another server stopped."""
    admin = open_services(database_url, clock)
    lease = session(services, "ada")
    starting = services.leases.grant(ServerRef("bob"), Request(devices=1), engine="local")
    hub.has(lease.server, starting.server)
    admin.sessions.stop(lease.id, actor="kim", reason="a new fan")
    admin.sessions.stop(starting.id, actor="kim", reason="a new fan")
    await rounds(duty(), lambda: {"ada/", "bob/"} <= set(hub.stopped))


async def test_session_unknown_to_the_hub_keeps_its_lease(
    services: Services, hub: ScriptedHub, clock: Clock, duty: Duties, caplog: Log
) -> None:
    caplog.set_level(logging.INFO, "tick")
    session(services, "ada")
    clock.forward(seconds=3600)
    await rounds(duty(), lambda: any("the Hub does not have it" in t for t in told(caplog.records)))
    assert services.leases.of_server(ServerRef("ada")) is not None


KEEP = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


def kept(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def test_hook_runs_once_per_warning_and_session_end(
    services: Services, clock: Clock, duty: Duties, tmp_path: Path
) -> None:
    file = tmp_path / "told"
    lease = session(services, "ada")
    poked: list[int] = []
    sessions = duty(poke=lambda: poked.append(1))
    async with notifying(services, hook=[sys.executable, "-c", KEEP, str(file)]):
        for seconds in (3000.5, 10, 589.5):
            clock.forward(seconds=seconds)
            for _ in range(2):
                await sessions.round()
        await rounds(sessions, lambda: len(kept(file)) == 2)
    warning, end = sorted(kept(file), key=lambda line: line["at"])
    assert warning == {
        "key": f"session_ends:{lease.id}:1740834000:10",
        "user": "ada",
        "kind": "session_ends",
        "title": warning["title"],
        "body": warning["body"],
        "at": "2025-03-01T12:50:00.500+00:00",
        "event": "session_ends",
        "lease": lease.id,
        "server": "",
        "environment": "",
        "gpus": list(lease.uuids),
        "account": "member:ada",
        "balance": None,
        "rate_per_hour": None,
        "minutes": 10,
        "ends_at": "2025-03-01T13:00:00.000+00:00",
        "stops_at": None,
        "reason": "",
    }
    assert (end["event"], end["lease"], end["minutes"]) == ("session_over", lease.id, None)
    assert end["reason"].startswith("its time was over at ")
    assert poked == [1, 1]
