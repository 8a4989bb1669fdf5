"""Spawns that wait in the queue, without a hub. Real: the queue, SQLite and PostgreSQL.

Stand-in: the hub's check of what a member may have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from gpuspawner.core.errors import ConfigError, GPUSpawnerError, MemberGone, NotAllowed, TicketEnded
from gpuspawner.db import engine as db_engine
from gpuspawner.db.leader import LeaderLock, hub_name
from gpuspawner.leases.models import Lease, LeaseState, Request, ServerRef, Terms
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from gpuspawner.spawners.progress import SpawnProgress
from gpuspawner.spawners.turns import StartsWithoutGPU, TurnDispatcher
from tests.support.brokers import Clock, Make, running
from tests.support.parts import each_database
from tests.support.processes import PATIENCE, wait_for
from tests.support.telling import until

ONE = Request(devices=1)
SOON = 20.0 * PATIENCE
"""Seconds for what takes a round or two, on a busy machine."""


@pytest.fixture
def services(make: Make) -> Iterator[Services]:
    """Two devices, in use by ada and bob."""
    services = make(device_source="simulated:2xT4", group_priority={"course": "course"})
    for user in ("ada", "bob"):
        running(services, user)
    yield services
    services.granter.give_up()


class Spawn:
    """A waiting spawn, with the messages that its pending page shows."""

    def __init__(self, queueing: TurnDispatcher, user: str, groups: tuple[str, ...] = ()) -> None:
        self.services, self.user = queueing.services, user
        self.groups = frozenset(groups)
        self.refusal: Exception | None = None
        self.said: list[str] = []
        ticket = self.services.queue.ask(ServerRef(user), ONE, engine="docker", terms=self.terms())
        assert isinstance(ticket, Ticket)
        self.id = ticket.id
        self.progress = SpawnProgress()
        self.page = asyncio.ensure_future(self.read())
        self.wait = asyncio.ensure_future(queueing.wait(ticket, self.check, self.progress))

    async def read(self) -> None:
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
        return self.services.queue.ticket(self.id)

    async def lease(self) -> Lease:
        return await asyncio.wait_for(self.wait, SOON)

    async def refused(self) -> GPUSpawnerError:
        with pytest.raises(GPUSpawnerError) as caught:
            await asyncio.wait_for(self.wait, SOON)
        return caught.value

    async def hears(self, words: str) -> None:
        await until(lambda: self.said and words in self.said[-1], words, SOON)


class Line:
    """Lets members ask one after the other: ``spawn("dan")``."""

    def __init__(self, services: Services, clock: Clock) -> None:
        self.queueing = TurnDispatcher(services, logging.getLogger("line"))
        self.spawns: list[Spawn] = []
        self.clock = clock

    async def rounds(self, count: int) -> None:
        """Wait until the queue was checked ``count`` times, from beginning to end."""
        last = self.queueing.looks + count + 1  # one may be under way

        def over() -> bool:
            self.queueing.kick()
            return self.queueing.looks >= last

        await until(over, f"{count} rounds", SOON)

    def __call__(self, user: str, *groups: str) -> Spawn:
        self.clock.forward(minutes=1)
        self.spawns.append(Spawn(self.queueing, user, groups))
        return self.spawns[-1]


@pytest.fixture
async def spawn(services: Services, clock: Clock) -> AsyncIterator[Line]:
    spawn = Line(services, clock)
    yield spawn
    tasks = [task for each in spawn.spawns for task in (each.wait, each.page)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def free_one(services: Services, user: str = "ada") -> None:
    lease = services.leases.of_server(ServerRef(user))
    assert lease is not None
    services.leases.release(lease.id, reason="stopped")


@contextlib.contextmanager
def busy(services: Services) -> Iterator[None]:
    """Keep another thread in the middle of a write, for which nobody waits long."""
    held, go_on = threading.Event(), threading.Event()

    def write() -> None:
        with services.store.write():
            held.set()
            go_on.wait(60)

    writer = threading.Thread(target=write)
    writer.start()
    assert held.wait(120)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(db_engine, "BUSY_SECONDS", 0.5)
            yield
    finally:
        go_on.set()
        writer.join()


async def test_losing_permission_refuses_the_ticket_at_once(
    services: Services, spawn: Line
) -> None:
    dan, eve = spawn("dan"), spawn("eve")
    await eve.hears("number 2 of 2")
    dan.refusal = NotAllowed(what="the environment 'lab'")
    assert (await dan.refused()).message == "You may not use the environment 'lab'."
    await eve.hears("the only one in the queue")
    assert (dan.ticket.outcome, dan.ticket.end_reason) == (
        "refused",
        "You may not use the environment 'lab'.",
    )
    [told] = services.notifications.notices_of("dan")
    assert told.kind is NoticeKind.TICKET_ENDED and "'lab'" in told.body
    free_one(services)
    assert (await eve.lease()).server == ServerRef("eve")


async def test_renamed_member_loses_the_waiting_ticket(services: Services, spawn: Line) -> None:
    dan = spawn("dan")
    dan.refusal = MemberGone(why="the member was renamed")
    said = (await dan.refused()).message
    assert said.startswith("You lost your place in the queue: the member was renamed.")
    assert (dan.ticket.outcome, dan.ticket.end_reason) == ("member_gone", "the member was renamed")


@pytest.mark.parametrize(
    "trouble", [ConfigError(what="line 3 of the catalog"), ZeroDivisionError("an admin's function")]
)
async def test_failing_permission_check_keeps_the_ticket(
    services: Services, clock: Clock, spawn: Line, trouble: Exception
) -> None:
    """Nor does it delay the others for long."""
    dan, eve, fay = spawn("dan"), spawn("eve"), spawn("fay")
    await fay.hears("number 3 of 3")
    dan.refusal = trouble
    await spawn.rounds(2)
    free_one(services)
    clock.forward(minutes=3)
    assert (await eve.lease()).server == ServerRef("eve")
    assert dan.ticket.outcome == "" and not dan.wait.done()
    dan.refusal = None
    await dan.hears("next in the queue")
    free_one(services, "bob")
    assert (await dan.lease()).server == ServerRef("dan")
    await fay.hears("the only one in the queue")


async def test_ticket_priority_follows_current_groups(services: Services, spawn: Line) -> None:
    dan = spawn("dan")
    eve = spawn("eve", "course")
    await eve.hears("next in the queue")
    eve.groups = frozenset()
    await eve.hears("number 2 of 2")
    assert (eve.ticket.group, eve.ticket.priority) == ("", dan.ticket.priority)
    dan.groups = frozenset({"course"})
    await until(lambda: dan.ticket.group == "course", "the group", SOON)
    assert dan.ticket.priority > eve.ticket.priority


@pytest.mark.parametrize("released", [False, True])
async def test_unreported_grant_reaches_the_spawn_or_ends_it(
    services: Services, spawn: Line, released: bool
) -> None:
    """As when the connection to the database is cut after it had written everything."""
    dan = spawn("dan")
    await dan.hears("in the queue")
    with services.line.lock:  # between two rounds
        free_one(services)
        granted = services.queue.start_ticket(dan.id)
        if released:
            services.leases.release(granted.id, reason="released by an admin")
    if released:
        assert isinstance(await dan.refused(), TicketEnded)
    else:
        assert (await dan.lease()).id == granted.id


async def test_ticket_end_is_written_after_a_busy_database(
    services: Services, spawn: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless its member is back before that, be it while the end waits for the database."""
    real, asked = services.queue.end_ticket, threading.Event()

    def end_ticket(ticket_id: str, *details: str, **more: Any) -> Ticket:
        if ticket_id == dan.id:
            asked.set()
        return real(ticket_id, *details, **more)

    monkeypatch.setattr(services.queue, "end_ticket", end_ticket)
    dan, eve = spawn("dan"), spawn("eve")
    await eve.hears("number 2 of 2")
    for each in (dan, eve):
        each.wait.cancel()
    with busy(services):
        for each in (dan, eve):
            await spawn.queueing.end(each.id, "cancelled", "the start was stopped", tell=False)
            assert each.ticket.outcome == ""
        asked.clear()
        await until(asked.is_set, "the next try to end dan's ticket", SOON)
        waits = spawn.queueing.wait(dan.ticket, dan.check, dan.progress)
        dan.wait = asyncio.ensure_future(waits)
        await until(lambda: dan.id in spawn.queueing._waiters, "the wait", SOON)
    await until(lambda: eve.ticket.outcome, "the end of the ticket", SOON)
    assert (eve.ticket.outcome, eve.ticket.end_reason) == ("cancelled", "the start was stopped")
    assert services.notifications.notices_of("eve") == []
    free_one(services)
    assert (await dan.lease()).ticket_id == dan.id


# Granted, and lost with the hub.


def queued(services: Services, user: str, server: str = "") -> Ticket:
    terms = Terms(wait=True)
    ticket = services.queue.ask(ServerRef(user, server), ONE, engine="docker", terms=terms)
    assert isinstance(ticket, Ticket)
    return ticket


def granted(services: Services, user: str) -> tuple[Ticket, Lease]:
    ticket = queued(services, user)
    free_one(services)
    assert services.queue.turns(frozenset({ticket.id})) == [ticket.id]
    return ticket, services.queue.start_ticket(ticket.id)


def test_start_lost_with_its_hub_returns_to_its_position(services: Services, clock: Clock) -> None:
    ticket, lease = granted(services, "dan")
    clock.forward(minutes=5)
    later = queued(services, "eve")
    ended = services.leases.release(lease.id, reason="the server was gone", lost=True)
    assert ended.state is LeaseState.ENDED and ended.charged == 0
    back = services.queue.ticket(ticket.id)
    assert (back.outcome, back.lease_id, back.created_at) == ("", None, ticket.created_at)
    assert [each.id for each in services.queue.waiting()] == [ticket.id, later.id]
    assert services.queue.turns(frozenset({ticket.id, later.id})) == [ticket.id]
    again = services.queue.start_ticket(ticket.id)
    assert services.leases.of_server(ServerRef("dan")) == again
    turns = [n for n in services.notifications.notices_of("dan") if n.kind is NoticeKind.TURN]
    assert len(turns) == 2, "one notice of each turn"


def test_server_lost_before_its_claim_costs_nothing(services: Services, clock: Clock) -> None:
    ticket, lease = granted(services, "dan")
    services.leases.confirm(lease.id)
    clock.forward(minutes=5)
    services.ledger.charge_all()
    assert services.leases.get(lease.id).charged > 0
    ended = services.leases.release(lease.id, reason="the server was gone", lost=True)
    assert (ended.charged, ended.outcome) == (0, "lost") and services.leases.get(lease.id) == ended
    assert [each.id for each in services.queue.waiting()] == [ticket.id]


@pytest.mark.parametrize("how", ["its member came", "it was stopped", "it failed", "asked anew"])
def test_only_lost_unclaimed_starts_return_to_the_queue(services: Services, how: str) -> None:
    ticket, lease = granted(services, "dan")
    if how == "its member came":
        services.leases.confirm(lease.id)
        services.sessions.claim(lease.id)
    elif how == "it was stopped":
        services.leases.give_up(lease.id, "stopped")
    elif how == "asked anew":
        queued(services, "dan", "other")
    services.leases.release(lease.id, reason="the server was gone", lost=how != "it failed")
    back = [each.id for each in services.queue.waiting()]
    assert (ticket.id in back) == (how == "asked anew"), "another server is no reason"


# Who may grant.


@each_database
def test_only_one_hub_holds_the_granting_lock(services: Services) -> None:
    one, two = LeaderLock(services.store), LeaderLock(services.store)
    assert two.holder() == "" and not one.sure
    assert one.take() and one.take() and one.sure
    assert not two.take() and not two.sure
    assert two.holder() == hub_name(os.getpid()) == one.holder()
    one.give_up()  # a server lets go as soon as it sees that the connection is closed
    wait_for(lambda: two.holder() == "", "nobody to hold it")
    assert two.take() and not one.take()
    two.give_up()


async def test_ticket_waits_while_another_hub_holds_the_lock(
    services: Services, spawn: Line
) -> None:
    other = LeaderLock(services.store)
    assert other.take()
    dan = spawn("dan")
    free_one(services)
    await spawn.rounds(3)
    assert not dan.wait.done() and dan.ticket.outcome == ""
    other.give_up()
    assert (await dan.lease()).server == ServerRef("dan")


async def test_start_goes_on_without_gpu_although_the_round_sees_the_end_first(
    spawn: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    dan = spawn("dan")
    end = spawn.queueing.end

    async def end_and_look(*args: Any, **kwargs: Any) -> None:
        await end(*args, **kwargs)
        await until(dan.wait.done, "the round that sees the end", SOON)

    await spawn.rounds(1)
    monkeypatch.setattr(spawn.queueing, "end", end_and_look)
    await spawn.queueing.stop_waiting(dan.id)
    assert isinstance(await dan.refused(), StartsWithoutGPU)
    assert dan.ticket.end_reason == "the server was started without a GPU"
