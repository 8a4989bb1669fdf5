"""Servers whose GPUs rest, from the minutes in the store to the order to stop. Real: both
databases; the answers of the culler's arbiter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from gpuspawner.core.errors import CannotSnooze, ConfigError
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.monitoring.models import DeviceUse
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.service import Terms
from gpuspawner.service import idle_culler
from gpuspawner.services import Broker, utcnow
from tests.support.brokers import Clock, acquire, open_broker, running

HOUR_AGO = timedelta(hours=1)


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    broker = open_broker(
        database_url,
        Clock(),
        when_idle={
            "*": {"mode": "enforce"},
            "environment:other": {"mode": "off"},
        },
        opening_grant=1000,
    )
    yield broker
    broker.store.close()


def clock(broker: Broker) -> Clock:
    assert isinstance(broker.clock, Clock)
    return broker.clock


def minutes(broker: Broker, lease: Lease, count: int, use: int | None = 0) -> None:
    """So many minutes pass, in which the devices of a lease work so much; None: do not answer."""
    for _ in range(count):
        since = clock(broker)().replace(second=0, microsecond=0)
        known = 0 if use is None else 60
        counts = {"samples": 60, "known": known, "measured": known, "use_sum": known * (use or 0)}
        counts["busy"] = 60 if use else 0
        broker.monitoring.remember_use(
            [DeviceUse(uuid=uuid, since=since, seconds=60, **counts) for uuid in lease.uuids]
        )
        clock(broker).forward(minutes=1)


def judged(broker: Broker, output: datetime | None = None) -> list[str]:
    """What happened; ``output``: when all servers had some last."""
    held = broker.idle.holding_gpus()
    return [it.event for it in broker.idle.judge_idle({lease.server: output for lease in held})]


def told(broker: Broker, kind: NoticeKind) -> list[str]:
    return [
        notice.title for notice in broker.notifications.notices_of("ada") if notice.kind is kind
    ]


def test_from_the_first_minute_to_the_stop(broker: Broker) -> None:
    lease = running(broker, "ada")
    minutes(broker, lease, 30)
    assert judged(broker) == []  # of these, the minute in which it started is not all its own
    minutes(broker, lease, 1)
    assert judged(broker) == ["warn"]
    assert judged(broker) == []
    (title,) = told(broker, NoticeKind.SESSION_ENDS)
    assert title.startswith("Your server stops at 12:41")
    assert title.endswith("its GPU is not used")
    minutes(broker, lease, 9)
    assert judged(broker) == []
    minutes(broker, lease, 1)
    assert judged(broker) == ["stop"]
    ordered = broker.lease(lease.id)
    assert (ordered.outcome, ordered.end_reason) == ("idle", "its GPUs were not used")
    assert told(broker, NoticeKind.STOPPED) == ["Your server is stopped: its GPU was not used"]
    assert broker.due_sessions().stop == (ordered,)  # by whom the service carries it out
    assert judged(broker) == []


def test_work_calls_it_off_and_unknown_is_not_idle(broker: Broker) -> None:
    lease = running(broker, "ada")
    minutes(broker, lease, 31)
    assert judged(broker) == ["warn"]
    minutes(broker, lease, 60, use=None)
    assert judged(broker) == []
    minutes(broker, lease, 1, use=80)
    assert judged(broker) == ["back"]
    assert told(broker, NoticeKind.SESSION_ENDS)[0] == "Your server goes on"
    assert broker.lease(lease.id).outcome == ""


def test_a_second_countdown_is_told_too(broker: Broker) -> None:
    """Also when work ended the first one, and all of it is judged at once."""
    lease = running(broker, "ada")
    minutes(broker, lease, 31)
    assert judged(broker) == ["warn"]
    minutes(broker, lease, 1, use=50)
    minutes(broker, lease, 40)
    assert judged(broker) == ["warn"]
    assert len(told(broker, NoticeKind.SESSION_ENDS)) == 2
    assert broker.lease(lease.id).outcome == ""


def test_what_the_hub_does_not_tell_is_not_judged(broker: Broker) -> None:
    lease = running(broker, "ada")
    minutes(broker, lease, 120)
    assert broker.idle.judge_idle({}) == []
    assert judged(broker, output=clock(broker)()) == ["warn"]


def test_output_slows_it_down(broker: Broker) -> None:
    lease = running(broker, "ada")
    for _ in range(60):
        minutes(broker, lease, 1)
        assert judged(broker, output=clock(broker)()) == []
    minutes(broker, lease, 1)
    assert judged(broker, output=clock(broker)()) == ["warn"]


def test_a_service_that_was_away_warns_before_it_stops(broker: Broker) -> None:
    lease = running(broker, "ada")
    minutes(broker, lease, 300)
    assert judged(broker) == ["warn"]
    assert broker.lease(lease.id).outcome == ""


def test_a_countdown_stands_still_while_nobody_samples(broker: Broker) -> None:
    """The service was away, or the clock was set forward: nobody could snooze meanwhile."""
    lease = running(broker, "ada")
    minutes(broker, lease, 35)
    assert judged(broker) == ["warn"]
    clock(broker).forward(hours=1)
    minutes(broker, lease, 1)
    assert judged(broker) == ["warn"]  # when it stops now
    (resting,) = broker.idle.resting("ada")
    assert resting.stops_at == clock(broker)() + timedelta(minutes=9)
    minutes(broker, lease, 9)
    assert judged(broker) == ["stop"]


def test_a_clock_that_is_set_back_stops_nobody_sooner(broker: Broker) -> None:
    lease = running(broker, "ada")
    minutes(broker, lease, 35)
    assert judged(broker) == ["warn"]
    clock(broker).forward(hours=-1)
    minutes(broker, lease, 30)
    assert judged(broker) == []  # these are known already
    assert broker.lease(lease.id).outcome == ""


def test_who_was_advised_has_a_countdown_when_others_come_to_wait(broker: Broker) -> None:
    broker.settings.idle.policy = {"*": {"mode": "advise", "mode_waiting": "enforce"}}
    lease = running(broker, "ada")
    minutes(broker, lease, 60)
    assert judged(broker) == ["warn"]
    assert told(broker, NoticeKind.SESSION_ENDS) == ["Your server does not use its GPU"]
    (resting,) = broker.idle.resting("ada")
    assert (resting.stops_at, resting.snooze_minutes) == (None, 0)
    minutes(broker, lease, 60)
    assert judged(broker) == []  # once
    running(broker, "bob", devices=3)
    asked = Request(devices=1, environment="pytorch")
    minutes(broker, lease, 1)
    waits = broker.ask(ServerRef("eve"), asked, engine="docker", terms=Terms(wait=True))
    assert isinstance(waits, Ticket)
    assert judged(broker) == []  # where another scheduler decides, it may go on at once
    minutes(broker, lease, 1)
    assert judged(broker) == ["warn"]
    assert "stops at" in told(broker, NoticeKind.SESSION_ENDS)[0]
    (resting,) = broker.idle.resting("ada")
    assert resting.stops_at == clock(broker)() + timedelta(minutes=10)
    assert resting.snooze_minutes == 30
    # Nobody waits any more, and then somebody does: it begins anew.
    minutes(broker, lease, 5)
    broker.end_ticket(waits.id, "cancelled", "a test")
    assert judged(broker) == []
    assert broker.idle.resting("ada")[0].stops_at is None
    assert isinstance(
        broker.ask(ServerRef("eve"), asked, engine="docker", terms=Terms(wait=True)), Ticket
    )
    minutes(broker, lease, 10)
    assert judged(broker) == ["warn"]
    minutes(broker, lease, 10)
    assert judged(broker) == ["stop"]


def test_snoozing(broker: Broker) -> None:
    lease = running(broker, "ada")
    with pytest.raises(CannotSnooze, match="not going to be stopped"):
        broker.idle.snooze(lease.id)
    minutes(broker, lease, 31)
    judged(broker)
    broker.idle.snooze(lease.id)
    minutes(broker, lease, 39)
    assert judged(broker) == []
    broker.idle.snooze(lease.id)
    with pytest.raises(CannotSnooze, match="put off 2 times"):
        broker.idle.snooze(lease.id)
    minutes(broker, lease, 31)
    assert judged(broker) == ["stop"]
    with pytest.raises(CannotSnooze, match="being stopped already"):
        broker.idle.snooze(lease.id)


def test_a_policy_that_is_off_stops_nobody(broker: Broker) -> None:
    broker.settings.idle.policy = {"*": {"mode": "enforce"}, "environment:pytorch": {"mode": "off"}}
    lease = running(broker, "ada")
    minutes(broker, lease, 300)
    assert judged(broker) == []


def test_a_server_without_gpus_and_one_that_starts_are_not_judged(broker: Broker) -> None:
    running(broker, "ada", devices=0)
    acquire(broker, "grace")
    assert broker.idle.holding_gpus() == []


def test_the_end_of_a_lease_is_the_end_of_its_row(broker: Broker) -> None:
    lease = running(broker, "ada")
    minutes(broker, lease, 2)
    judged(broker)
    assert broker.idle.idle_state(lease.server)[1] is not None
    broker.release(lease.id, reason="stopped")
    judged(broker)
    again = running(broker, "ada")
    assert again.id != lease.id
    assert broker.idle.idle_state(again.server)[1] is None


def test_a_mistake_in_the_policy_is_said_at_the_start(database_url: str) -> None:
    with pytest.raises(ConfigError, match=r"GPUIdle\.policy: 'ml101' is no server's"):
        open_broker(database_url, when_idle={"ml101": {"mode": "enforce"}})
    with pytest.raises(ConfigError, match=r"GPUIdle\.policy"):
        open_broker(database_url, when_idle={"*": "enforce"})


# What the culler asks.


@pytest.fixture
def asked(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """The broker that the arbiter has, and its clock is the true one."""
    monkeypatch.setenv("GPUSPAWNER_DATABASE_URL", broker.settings.database.url)
    idle_culler._broker.cache_clear()
    clock(broker).now = utcnow() - HOUR_AGO
    yield broker
    idle_culler._broker.cache_clear()


def culls(user: str, inactive: timedelta = HOUR_AGO, name: str = "") -> bool:
    url = f"/user/{user}/{name}/" if name else f"/user/{user}/"
    server: dict[str, Any] = {"name": name, "url": url}
    return asyncio.run(
        idle_culler.cull_arbiter(inactive=inactive, inactive_limit=1800, server=server, extra=1)
    )


def test_the_culler_spares_whose_gpus_work(asked: Broker) -> None:
    lease = running(asked, "ada")
    assert not culls("ada")  # nothing is known yet
    minutes(asked, lease, 60, use=70)
    judged(asked)
    assert not culls("ada")
    assert culls("nobody")
    assert not culls("nobody", inactive=timedelta(minutes=5))
    asked.release(lease.id, reason="stopped")
    assert culls("ada")


def test_the_culler_stops_whose_gpus_rest_too(asked: Broker) -> None:
    asked.settings.idle.policy = {}
    lease = running(asked, "ada", server="night")
    minutes(asked, lease, 60)
    judged(asked)
    assert culls("ada", name="night")
    assert not culls("ada", name="night", inactive=timedelta(minutes=5))


def test_the_culler_keeps_to_what_the_member_was_told(asked: Broker) -> None:
    lease = running(asked, "ada")
    clock(asked).now = utcnow() - timedelta(minutes=32)
    minutes(asked, lease, 32)
    assert judged(asked) == ["warn"]
    assert not culls("ada")
    asked.idle.snooze(lease.id)
    assert not culls("ada")


def test_what_was_judged_long_ago_tells_nothing_of_now(asked: Broker) -> None:
    lease = running(asked, "ada")
    minutes(asked, lease, 40)
    judged(asked)
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
def test_whose_server_the_hub_speaks_of(
    url: str | None, name: str, found: ServerRef | None
) -> None:
    assert idle_culler.server_of({"name": name, "url": url}) == found
