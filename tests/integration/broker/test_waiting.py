"""Spawns that wait, without a hub around them. Real: the line, SQLite and PostgreSQL.

What a member may have, which a hub would know, is what the test says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from gpuspawner.core.errors import ConfigError, GPUSpawnerError, MemberGone, NotAllowed, TicketEnded
from gpuspawner.db import engine as db_engine
from gpuspawner.db.leader import Granter, hub_name
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from gpuspawner.spawners.progress import SpawnProgress
from gpuspawner.spawners.turns import Queueing
from tests.support.brokers import Clock, running
from tests.support.processes import wait_for

Make = Callable[..., Broker]
ONE = Request(devices=1)
SOON = 20.0
"""Seconds for what takes a round or two, on a machine with other things to do."""


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


@pytest.fixture
def broker(make: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """Two devices, in use by ada and bob."""
    monkeypatch.setattr(db_engine, "BUSY_SECONDS", 0.5)  # of patience, to save time here
    broker = make(device_source="simulated:2xT4", group_priority={"course": "course"})
    for user in ("ada", "bob"):
        running(broker, user)
    yield broker
    broker.granter.give_up()


async def until(true: Callable[[], bool]) -> None:
    async def look() -> None:
        while not true():
            await asyncio.sleep(0.02)

    await asyncio.wait_for(look(), SOON)


class Spawn:
    """A spawn that waits, and what is said to it."""

    def __init__(self, queueing: Queueing, user: str, groups: tuple[str, ...] = ()) -> None:
        self.broker, self.user = queueing.broker, user
        self.groups = frozenset(groups)
        self.refusal: Exception | None = None
        self.said: list[str] = []
        ticket = self.broker.ask(ServerRef(user), ONE, engine="docker", terms=self.terms())
        assert isinstance(ticket, Ticket)
        self.id = ticket.id
        self.progress = SpawnProgress()
        self.page = asyncio.ensure_future(self.read())
        self.wait = asyncio.ensure_future(queueing.wait(ticket, self.check, self.progress))

    async def read(self) -> None:
        """As a pending page does."""
        async for event in self.progress.follow():
            self.said += [event["message"]] if "message" in event else []

    def terms(self) -> Terms:
        return Terms(wait=True, groups=self.groups)

    def check(self) -> Terms:
        if self.refusal is not None:
            raise self.refusal
        return self.terms()

    @property
    def ticket(self) -> Ticket:
        return self.broker.ticket(self.id)

    async def lease(self) -> Lease:
        return await asyncio.wait_for(self.wait, SOON)

    async def refused(self) -> GPUSpawnerError:
        with pytest.raises(GPUSpawnerError) as caught:
            await asyncio.wait_for(self.wait, SOON)
        return caught.value

    async def hears(self, words: str) -> None:
        await until(lambda: bool(self.said) and words in self.said[-1])


class Line:
    """Lets members ask one after the other: ``spawn("dan")``."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self.queueing = Queueing(broker, logging.getLogger("line"))
        self.spawns: list[Spawn] = []
        self.clock = clock

    async def rounds(self, count: int) -> None:
        """Until the line was looked at so often, from the beginning of a look to its end."""
        last = self.queueing.looks + count + 1  # one may be under way

        def over() -> bool:
            self.queueing.kick()
            return self.queueing.looks >= last

        await until(over)

    def __call__(self, user: str, *groups: str) -> Spawn:
        self.clock.forward(minutes=1)
        self.spawns.append(Spawn(self.queueing, user, groups))
        return self.spawns[-1]


@contextlib.asynccontextmanager
async def line(broker: Broker, clock: Clock) -> AsyncIterator[Line]:
    """All who asked are stopped at the end."""
    spawn = Line(broker, clock)
    try:
        yield spawn
    finally:
        for each in spawn.spawns:
            each.wait.cancel()
            each.page.cancel()
        ended = (task for each in spawn.spawns for task in (each.wait, each.page))
        await asyncio.gather(*ended, return_exceptions=True)


def free_one(broker: Broker, user: str = "ada") -> None:
    lease = broker.lease_of(ServerRef(user))
    assert lease is not None
    broker.release(lease.id, reason="stopped")


@contextlib.contextmanager
def busy(broker: Broker) -> Iterator[None]:
    """Somebody else is in the middle of a write, and stays there."""
    held, go_on = threading.Event(), threading.Event()

    def write() -> None:
        with broker.store.write():
            held.set()
            go_on.wait(60)

    writer = threading.Thread(target=write)
    writer.start()
    assert held.wait(120)
    try:
        yield
    finally:
        go_on.set()
        writer.join()


def test_who_may_not_any_more_loses_the_place_at_once(broker: Broker, clock: Clock) -> None:
    async def story() -> None:
        async with line(broker, clock) as spawn:
            dan, eve = spawn("dan"), spawn("eve")
            await eve.hears("number 2 of 2")
            dan.refusal = NotAllowed(what="the environment 'lab'")
            assert (await dan.refused()).message == "You may not use the environment 'lab'."
            await eve.hears("the only one in line")
            assert (dan.ticket.outcome, dan.ticket.end_reason) == (
                "refused",
                "You may not use the environment 'lab'.",
            )
            [told] = broker.notifications.notices_of("dan")
            assert told.kind is NoticeKind.TICKET_ENDED and "'lab'" in told.body
            free_one(broker)
            assert (await eve.lease()).server == ServerRef("eve")

    asyncio.run(story())


def test_who_is_gone(broker: Broker, clock: Clock) -> None:
    async def story() -> None:
        async with line(broker, clock) as spawn:
            dan = spawn("dan")
            dan.refusal = MemberGone(why="the member was renamed")
            said = (await dan.refused()).message
            assert said.startswith("Your place in line is gone: the member was renamed.")
            assert (dan.ticket.outcome, dan.ticket.end_reason) == (
                "member_gone",
                "the member was renamed",
            )

    asyncio.run(story())


@pytest.mark.parametrize(
    "trouble", [ConfigError(what="line 3 of the catalog"), ZeroDivisionError("an admin's function")]
)
def test_what_nobody_can_tell_costs_no_place(
    broker: Broker, clock: Clock, trouble: Exception
) -> None:
    """It holds nobody up for long either."""

    async def story() -> None:
        async with line(broker, clock) as spawn:
            dan, eve, fay = spawn("dan"), spawn("eve"), spawn("fay")
            await fay.hears("number 3 of 3")
            dan.refusal = trouble
            await spawn.rounds(2)
            free_one(broker)
            clock.forward(minutes=3)
            assert (await eve.lease()).server == ServerRef("eve")
            assert dan.ticket.outcome == "" and not dan.wait.done()
            dan.refusal = None
            await dan.hears("next in line")
            free_one(broker, "bob")
            assert (await dan.lease()).server == ServerRef("dan")
            await fay.hears("the only one in line")

    asyncio.run(story())


def test_a_group_that_is_left_has_no_say_any_more(broker: Broker, clock: Clock) -> None:
    async def story() -> None:
        async with line(broker, clock) as spawn:
            dan = spawn("dan")
            eve = spawn("eve", "course")
            await eve.hears("next in line")
            eve.groups = frozenset()
            await eve.hears("number 2 of 2")
            assert (eve.ticket.group, eve.ticket.priority) == ("", dan.ticket.priority)
            dan.groups = frozenset({"course"})
            await until(lambda: dan.ticket.group == "course")
            assert dan.ticket.priority > eve.ticket.priority

    asyncio.run(story())


def test_a_grant_of_which_nobody_heard_is_handed_over(broker: Broker, clock: Clock) -> None:
    """As when the connection to the database is cut after it had written everything."""

    async def story() -> None:
        async with line(broker, clock) as spawn:
            dan = spawn("dan")
            await dan.hears("in line")
            with broker.line.lock:  # between two rounds
                free_one(broker)
                granted = broker.start_ticket(dan.id)
            assert (await dan.lease()).id == granted.id

    asyncio.run(story())


def test_a_grant_that_came_to_nothing_meanwhile_is_not(broker: Broker, clock: Clock) -> None:
    async def story() -> None:
        async with line(broker, clock) as spawn:
            dan = spawn("dan")
            await dan.hears("in line")
            with broker.line.lock:
                free_one(broker)
                broker.release(broker.start_ticket(dan.id).id, reason="released by an admin")
            assert isinstance(await dan.refused(), TicketEnded)

    asyncio.run(story())


def test_an_end_outlasts_a_busy_database(broker: Broker, clock: Clock) -> None:
    async def story() -> None:
        async with line(broker, clock) as spawn:
            dan, eve = spawn("dan"), spawn("eve")
            await eve.hears("number 2 of 2")
            dan.wait.cancel()
            with busy(broker):
                await spawn.queueing.end(dan.id, "cancelled", "the start was stopped", tell=False)
                assert dan.ticket.outcome == ""
            await eve.hears("the only one in line")
            assert (dan.ticket.outcome, dan.ticket.end_reason) == (
                "cancelled",
                "the start was stopped",
            )
            assert broker.notifications.notices_of("dan") == []

    asyncio.run(story())


def test_who_is_back_before_the_end_was_written_keeps_the_place(
    broker: Broker, clock: Clock
) -> None:
    async def story() -> None:
        async with line(broker, clock) as spawn:
            dan, _ = spawn("dan"), spawn("eve")
            await dan.hears("next in line")
            dan.wait.cancel()
            with busy(broker):
                await spawn.queueing.end(dan.id, "cancelled", "the start was stopped")
                waits = spawn.queueing.wait(dan.ticket, dan.check, dan.progress)
                dan.wait = asyncio.ensure_future(waits)
                await until(lambda: dan.id in spawn.queueing._waiters)
            free_one(broker)
            assert (await dan.lease()).ticket_id == dan.id

    asyncio.run(story())


# Granted, and lost with the hub.


def granted(broker: Broker, user: str) -> tuple[Ticket, Lease]:
    ticket = broker.ask(ServerRef(user), ONE, engine="docker", terms=Terms(wait=True))
    assert isinstance(ticket, Ticket)
    free_one(broker)
    assert broker.turns(frozenset({ticket.id})) == [ticket.id]
    return ticket, broker.start_ticket(ticket.id)


def test_a_start_that_was_lost_with_its_hub_is_back_at_its_place(
    broker: Broker, clock: Clock
) -> None:
    ticket, lease = granted(broker, "dan")
    clock.forward(minutes=5)
    later = broker.ask(ServerRef("eve"), ONE, engine="docker", terms=Terms(wait=True))
    assert isinstance(later, Ticket)
    ended = broker.release(lease.id, reason="the server was gone", lost=True)
    assert ended.state is LeaseState.ENDED and ended.charged == 0
    back = broker.ticket(ticket.id)
    assert (back.outcome, back.lease_id, back.created_at) == ("", None, ticket.created_at)
    assert [each.id for each in broker.waiting()] == [ticket.id, later.id]
    assert broker.turns(frozenset({ticket.id, later.id})) == [ticket.id]
    again = broker.start_ticket(ticket.id)
    assert broker.lease_of(ServerRef("dan")) == again
    turns = [n for n in broker.notifications.notices_of("dan") if n.kind is NoticeKind.TURN]
    assert len(turns) == 2, "told of each turn"


def test_a_server_that_was_lost_before_its_member_came_costs_nothing(
    broker: Broker, clock: Clock
) -> None:
    ticket, lease = granted(broker, "dan")
    broker.confirm(lease.id)
    clock.forward(minutes=5)
    broker.ledger.charge_all()
    assert broker.lease(lease.id).charged > 0
    ended = broker.release(lease.id, reason="the server was gone", lost=True)
    assert (ended.charged, ended.outcome) == (0, "lost") and broker.lease(lease.id) == ended
    assert [each.id for each in broker.waiting()] == [ticket.id]


@pytest.mark.parametrize("how", ["its member came", "it was stopped", "it failed", "asked anew"])
def test_what_else_ended_does_not_come_back(broker: Broker, how: str) -> None:
    ticket, lease = granted(broker, "dan")
    if how == "its member came":
        broker.confirm(lease.id)
        broker.claim(lease.id)
    elif how == "it was stopped":
        broker.give_up(lease.id, "stopped")
    elif how == "asked anew":
        broker.ask(ServerRef("dan", "other"), ONE, engine="docker", terms=Terms(wait=True))
    broker.release(lease.id, reason="the server was gone", lost=how != "it failed")
    back = [each.id for each in broker.waiting()]
    assert (ticket.id in back) == (how == "asked anew"), "another server is no reason"


# Who may grant.


def test_one_grants_for_as_long_as_it_lives(broker: Broker) -> None:
    one, two = Granter(broker.store), Granter(broker.store)
    assert two.holder() == "" and not one.sure
    assert one.take() and one.take() and one.sure
    assert not two.take() and not two.sure
    assert two.holder() == hub_name(os.getpid()) == one.holder()
    one.give_up()  # a server lets go as soon as it sees that the connection is closed
    wait_for(lambda: two.holder() == "", "nobody to hold it")
    assert two.take() and not one.take()
    two.give_up()


def test_nobody_starts_while_another_hub_grants(broker: Broker, clock: Clock) -> None:
    async def story() -> None:
        async with line(broker, clock) as spawn:
            other = Granter(broker.store)
            assert other.take()
            dan = spawn("dan")
            free_one(broker)
            await spawn.rounds(3)
            assert not dan.wait.done() and dan.ticket.outcome == ""
            other.give_up()
            assert (await dan.lease()).server == ServerRef("dan")

    asyncio.run(story())
