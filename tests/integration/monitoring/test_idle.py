"""Servers whose GPUs rest, from the minutes in the store to the order to stop. Real: both
databases; the answers of the culler's arbiter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from gpuspawner.core.errors import CannotSnooze, ConfigError
from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.monitoring.models import DeviceUse
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.models import Ticket
from gpuspawner.service import idle_culler
from gpuspawner.services import Services, utcnow
from tests.support.brokers import Clock, Make, acquire, open_services, running
from tests.support.parts import each_database

HOUR_AGO = timedelta(hours=1)


@pytest.fixture
def services(make: Make) -> Services:
    policy = {"*": {"mode": "enforce"}, "environment:other": {"mode": "off"}}
    return make(when_idle=policy, opening_grant=1000)


def minutes(services: Services, lease: Lease, count: int, use: int | None = 0) -> None:
    """So many minutes pass, in which the devices of a lease work so much; None: unknown."""
    for _ in range(count):
        since = services.clock().replace(second=0, microsecond=0)
        known = 0 if use is None else 60
        counts = {"samples": 60, "known": known, "measured": known, "use_sum": known * (use or 0)}
        counts["busy"] = 60 if use else 0
        services.monitoring.remember_use(
            [DeviceUse(uuid=uuid, since=since, seconds=60, **counts) for uuid in lease.uuids]
        )
        Clock.of(services).forward(minutes=1)


def judged(services: Services, output: datetime | None = None) -> list[str]:
    """What happened; ``output``: when all servers had some last."""
    held = services.idle.holding_gpus()
    return [it.event for it in services.idle.judge_idle({lease.server: output for lease in held})]


def told(services: Services, kind: NoticeKind) -> list[str]:
    return [x.title for x in services.notifications.notices_of("ada") if x.kind is kind]


def test_idle_session_is_warned_and_then_stopped(services: Services) -> None:
    lease = running(services, "ada")
    minutes(services, lease, 30)
    assert judged(services) == []  # of these, the minute in which it started is not all its own
    minutes(services, lease, 1)
    assert judged(services) == ["warn"]
    assert judged(services) == []
    (title,) = told(services, NoticeKind.SESSION_ENDS)
    assert title.startswith("Your server stops at 12:41")
    assert title.endswith("its GPU is idle")
    minutes(services, lease, 9)
    assert judged(services) == []
    minutes(services, lease, 1)
    assert judged(services) == ["stop"]
    ordered = services.leases.get(lease.id)
    assert (ordered.outcome, ordered.end_reason) == ("idle", "its GPUs were not used")
    assert told(services, NoticeKind.STOPPED) == ["Your server was stopped: its GPU was idle"]
    assert services.sessions.due_sessions().stop == (ordered,)  # by whom the service carries it out
    assert judged(services) == []


def test_activity_cancels_idle_stop_and_unknown_use_is_ignored(services: Services) -> None:
    lease = running(services, "ada")
    minutes(services, lease, 31)
    assert judged(services) == ["warn"]
    minutes(services, lease, 60, use=None)
    assert judged(services) == []
    minutes(services, lease, 1, use=80)
    assert judged(services) == ["back"]
    assert told(services, NoticeKind.SESSION_ENDS)[0] == "Your server continues"
    assert services.leases.get(lease.id).outcome == ""
    # Another countdown is another warning, also when all of it is judged at once.
    minutes(services, lease, 40)
    assert judged(services) == ["warn"]
    minutes(services, lease, 1, use=50)
    minutes(services, lease, 40)
    assert judged(services) == ["warn"]
    assert len(told(services, NoticeKind.SESSION_ENDS)) == 4
    assert services.leases.get(lease.id).outcome == ""


def test_session_missing_from_hub_data_is_not_judged(services: Services) -> None:
    lease = running(services, "ada")
    minutes(services, lease, 120)
    assert services.idle.judge_idle({}) == []
    assert judged(services, output=services.clock()) == ["warn"]


def test_idle_countdown_pauses_while_sampling_stops(services: Services, clock: Clock) -> None:
    """The service was away, or the clock was set forward: nobody could snooze meanwhile."""
    lease = running(services, "ada")
    minutes(services, lease, 35)
    assert judged(services) == ["warn"]
    clock.forward(hours=1)
    minutes(services, lease, 1)
    assert judged(services) == ["warn"]  # when it stops now
    (resting,) = services.idle.resting("ada")
    assert resting.stops_at == services.clock() + timedelta(minutes=9)
    clock.forward(hours=-1)
    minutes(services, lease, 30)
    assert judged(services) == []  # these are known already
    assert services.leases.get(lease.id).outcome == ""
    clock.forward(minutes=30)
    minutes(services, lease, 9)
    assert judged(services) == ["stop"]


def test_idle_advice_becomes_a_countdown_when_others_wait(services: Services) -> None:
    services.settings.idle.policy = {"*": {"mode": "advise", "mode_waiting": "enforce"}}
    lease = running(services, "ada")
    minutes(services, lease, 60)
    assert judged(services) == ["warn"]
    assert told(services, NoticeKind.SESSION_ENDS) == ["Your server does not use its GPU"]
    (resting,) = services.idle.resting("ada")
    assert (resting.stops_at, resting.snooze_minutes) == (None, 0)
    minutes(services, lease, 60)
    assert judged(services) == []  # once
    running(services, "bob", devices=3)

    def wait() -> Ticket:
        asked, terms = Request(devices=1, environment="pytorch"), Terms(wait=True)
        ticket = services.queue.ask(ServerRef("eve"), asked, engine="docker", terms=terms)
        assert isinstance(ticket, Ticket)
        return ticket

    minutes(services, lease, 1)
    waits = wait()
    assert judged(services) == []  # where another scheduler decides, it may go on at once
    minutes(services, lease, 1)
    assert judged(services) == ["warn"]
    assert "stops at" in told(services, NoticeKind.SESSION_ENDS)[0]
    (resting,) = services.idle.resting("ada")
    assert resting.stops_at == services.clock() + timedelta(minutes=10)
    assert resting.snooze_minutes == 30
    # Nobody waits any more, and then somebody does: it begins anew.
    minutes(services, lease, 5)
    services.queue.end_ticket(waits.id, "cancelled", "a test")
    assert judged(services) == []
    assert services.idle.resting("ada")[0].stops_at is None
    wait()
    minutes(services, lease, 10)
    assert judged(services) == ["warn"]
    minutes(services, lease, 10)
    assert judged(services) == ["stop"]


def test_idle_stop_can_be_snoozed_only_twice(services: Services) -> None:
    lease = running(services, "ada")
    with pytest.raises(CannotSnooze, match="not going to be stopped"):
        services.idle.snooze(lease.id)
    minutes(services, lease, 31)
    judged(services)
    services.idle.snooze(lease.id)
    minutes(services, lease, 39)
    assert judged(services) == []
    services.idle.snooze(lease.id)
    with pytest.raises(CannotSnooze, match="postponed 2 times"):
        services.idle.snooze(lease.id)
    minutes(services, lease, 31)
    assert judged(services) == ["stop"]
    with pytest.raises(CannotSnooze, match="being stopped already"):
        services.idle.snooze(lease.id)


@each_database
def test_idle_state_is_deleted_when_the_lease_ends(services: Services) -> None:
    running(services, "bob", devices=0)
    acquire(services, "grace")
    assert services.idle.holding_gpus() == [], "neither without a GPU nor before it is up"
    lease = running(services, "ada")
    minutes(services, lease, 2)
    judged(services)
    assert services.idle.idle_state(lease.server)[1] is not None
    services.leases.release(lease.id, reason="stopped")
    judged(services)
    again = running(services, "ada")
    assert again.id != lease.id
    assert services.idle.idle_state(again.server)[1] is None


def test_invalid_idle_policy_is_a_config_error(database_url: str) -> None:
    for policy in ({"ml101": {"mode": "enforce"}}, {"*": "enforce"}):
        with pytest.raises(ConfigError, match=r"GPUIdle\.policy"):
            open_services(database_url, when_idle=policy)


@pytest.fixture
def asked(services: Services, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    """The services that the arbiter has, and its clock is the true one."""
    monkeypatch.setenv("GPUSPAWNER_DATABASE_URL", services.settings.database.url)
    idle_culler._services.cache_clear()
    Clock.of(services).now = utcnow() - HOUR_AGO
    yield services
    idle_culler._services.cache_clear()


def culls(user: str, inactive: timedelta = HOUR_AGO, name: str = "") -> bool:
    url = f"/user/{user}/{name}/" if name else f"/user/{user}/"
    server: dict[str, Any] = {"name": name, "url": url}
    return asyncio.run(
        idle_culler.cull_arbiter(inactive=inactive, inactive_limit=1800, server=server, extra=1)
    )


def test_culler_stops_inactive_servers_unless_their_gpus_are_busy(asked: Services) -> None:
    lease = running(asked, "ada")
    assert not culls("ada")  # nothing is known yet
    minutes(asked, lease, 60, use=70)
    judged(asked)
    assert not culls("ada")
    assert culls("nobody")
    assert not culls("nobody", inactive=timedelta(minutes=5))

    asked.settings.idle.policy = {}
    Clock.of(asked).now = utcnow() - HOUR_AGO
    rests = running(asked, "bob", server="night")
    minutes(asked, rests, 60)
    judged(asked)
    assert culls("bob", name="night")
    assert not culls("bob", name="night", inactive=timedelta(minutes=5))
    asked.leases.release(lease.id, reason="stopped")
    assert culls("ada")


def test_culler_respects_announced_stops_and_outdated_idle_state(asked: Services) -> None:
    old = running(asked, "bob")
    minutes(asked, old, 40)
    judged(asked)
    assert not culls("bob"), "for twenty minutes nothing is known"

    Clock.of(asked).now = utcnow() - timedelta(minutes=32)
    lease = running(asked, "ada")
    minutes(asked, lease, 32)
    assert "warn" in judged(asked)
    assert not culls("ada")
    asked.idle.snooze(lease.id)
    assert not culls("ada")


@pytest.mark.parametrize(
    ("url", "name", "found"),
    [
        ("/user/ada/", "", ServerRef("ada")),
        ("/hub-base/user/ada%20l/", "", ServerRef("ada l")),
        ("//ada.hub.example/user/ada/", "", ServerRef("ada")),
        ("/user/ada/user/", "user", ServerRef("ada", "user")),
        ("/user/ada@lab.example/my%20own/", "my own", ServerRef("ada@lab.example", "my own")),
        ("/somewhere/", "", None),
        (None, "", None),
    ],
)
def test_server_is_identified_from_the_hub_url(
    url: str | None, name: str, found: ServerRef | None
) -> None:
    assert idle_culler.server_of({"name": name, "url": url}) == found
