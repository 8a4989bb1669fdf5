"""Schedules: each time becomes one run, whatever is killed and however many services race. Real:
services, threads, processes, SIGKILL, both databases. Simulated: devices and the Hub."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import sqlalchemy as sa
from tornado import web

from gpuspawner.core.errors import (
    GPUSpawnerError,
    MembershipEnded,
    TooManySchedules,
    UnknownSchedule,
)
from gpuspawner.db.schema import runs
from gpuspawner.leases.models import ServerRef
from gpuspawner.runs.models import Run, Work
from gpuspawner.runs.schedules import MOST_SCHEDULES, SKIPPED, FollowedSchedule, Schedule
from gpuspawner.service.schedule_duty import ScheduleDuty
from gpuspawner.services import Services
from tests.support import racers, timetable
from tests.support.brokers import T0, Clock, open_services
from tests.support.parts import each_database
from tests.support.processes import wait_for
from tests.support.rounds import ScriptedHub, make_tick
from tests.support.tier import Rounds

HOUR = timedelta(hours=1)


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    services = open_services(database_url, Clock(T0))
    services.monitoring.overview()
    yield services
    services.store.close()


def new(services: Services, name: str = "train-1", user: str = "ada", **fields: Any) -> Schedule:
    schedule = Schedule(
        id=name,
        user=user,
        title="train",
        work=Work(command=("train",)),
        created_at=services.clock(),
        next_at=services.clock(),
        **{"cron": "0 * * * *", "zone": "UTC", **fields},
    )
    return services.schedules.create(schedule)


def change(services: Services, **fields: Any) -> FollowedSchedule:
    """Change the schedule, as its member."""
    return services.schedules.change("train-1", lambda it: replace(it, **fields), actor="ada")


def keys(services: Services) -> list[str]:
    """The keys of all runs, each as often as it is there."""
    query = sa.select(runs.c.key).order_by(runs.c.key)
    return services.store.run(lambda c: list(c.execute(query).scalars()))


# What becomes a run.


@each_database
def test_each_time_becomes_one_run(services: Services) -> None:
    assert new(services).next_at == T0 + HOUR
    assert services.schedules.find_due() == []
    for hour in (1, 2):
        Clock.of(services).forward(hours=1)
        (due,) = services.schedules.find_due()
        assert due.due_at == T0 + hour * HOUR
        assert services.schedules.find_due() == [due], "until it is noted"
        timetable.submit(services, due)
        assert services.schedules.find_due() == []
    found = services.schedules.get("train-1")
    assert [time.due_at for time in found.times] == [T0 + 2 * HOUR, T0 + HOUR]
    assert [services.runs.get(time.run or "").run.key for time in found.times] == [
        f"schedule:train-1:{int(time.due_at.timestamp())}" for time in found.times
    ]
    assert services.schedules.of_user("ada") == [found] == services.schedules.of_user(None)
    assert services.schedules.of_user("bob") == []


@each_database
def test_of_several_missed_times_the_newest_becomes_a_run(services: Services) -> None:
    new(services)
    Clock.of(services).forward(hours=5, minutes=1)
    (due,) = services.schedules.find_due()
    assert due.due_at == T0 + 5 * HOUR
    newest, first = services.schedules.get("train-1").times
    assert (newest.reason, first.due_at, first.reason) == ("", T0 + HOUR, SKIPPED)
    assert services.schedules.get("train-1").schedule.next_at == T0 + 6 * HOUR

    # The Hub does not respond, or the service is killed, until the next time has come.
    timetable.submit(services, due)
    Clock.of(services).forward(hours=1)
    (sixth,) = services.schedules.find_due()
    Clock.of(services).forward(hours=1)
    run = Run(
        id="unnoted",
        user="ada",
        key=sixth.key,
        title="train",
        work=Work(),
        created_at=services.clock(),
    )
    services.runs.submit(run)
    (seventh,) = services.schedules.find_due()
    assert seventh.due_at == T0 + 7 * HOUR
    assert services.schedules.get("train-1").times[1].run == "unnoted", "it was submitted"
    Clock.of(services).forward(hours=1)
    (eighth,) = services.schedules.find_due()
    assert services.schedules.get("train-1").times[1].reason == SKIPPED
    timetable.submit(services, seventh)
    assert services.schedules.get("train-1").times[1].run, "another service had begun with it"
    assert services.schedules.find_due() == [eighth]


@each_database
def test_paused_schedule_starts_nothing_and_goes_on_from_now(services: Services) -> None:
    new(services)
    change(services, paused=True)
    Clock.of(services).forward(hours=3, minutes=30)
    assert services.schedules.find_due() == []
    found = change(services, paused=False)
    assert found.schedule.next_at == T0 + 4 * HOUR and services.schedules.find_due() == []
    found = change(services, title="other")
    assert (found.schedule.title, found.schedule.next_at) == ("other", T0 + 4 * HOUR)
    found = change(services, cron="30 12 * * *")
    assert found.schedule.next_at == T0 + 24.5 * HOUR
    assert services.audit.trail() == [], "a member's own changes are no news"
    assert services.schedules.delete("train-1", actor="root").schedule == found.schedule
    [entry] = services.audit.trail()
    assert (entry.actor, entry.action) == ("root", "delete schedule")
    assert entry.subject == "schedule train-1 of ada"
    with pytest.raises(UnknownSchedule):
        services.schedules.get("train-1")
    Clock.of(services).forward(days=2)
    assert services.schedules.find_due() == []


@each_database
def test_limit_keys_and_membership(services: Services) -> None:
    services.members.membership_returned("ada", actor="hub")
    first = new(services, key="k")
    assert new(services, "train-2", key="k") == first
    assert new(services, "train-3", "bob", key="k").id == "train-3"
    for number in range(MOST_SCHEDULES - 1):
        new(services, f"more-{number}")
    with pytest.raises(TooManySchedules, match="already have 50 schedules"):
        new(services, "one-more")
    services.members.membership_returned("eve", actor="hub")
    services.members.membership_ended("eve", "she left", actor="root")
    with pytest.raises(MembershipEnded):
        new(services, "train-4", "eve")


@each_database
def test_only_the_newest_times_are_kept(services: Services) -> None:
    new(services, cron="* * * * *")
    for _ in range(60):
        Clock.of(services).forward(minutes=1)
        (due,) = services.schedules.find_due()
        services.schedules.note_refused(due, "No credits.")
    found = services.schedules.get("train-1").times
    assert 50 <= len(found) <= 51 and found[0].due_at == T0 + timedelta(minutes=60)
    assert len(services.schedules.of_user("ada")[0].times) == 10


# Races and kills.


@each_database
def test_racing_services_submit_one_run_for_each_time(database_url: str, rounds: Rounds) -> None:
    clock = Clock(T0)
    many = [open_services(database_url, clock) for _ in range(2)]
    new(many[0])
    steps = rounds(200)
    start = Barrier(len(many))

    def serve(services: Services) -> None:
        start.wait(120)
        for due in services.schedules.find_due():
            timetable.submit(services, due)

    with ThreadPoolExecutor(len(many)) as pool:
        for _ in range(steps):
            clock.forward(hours=1)
            list(pool.map(serve, many))
            for run in many[0].runs.open_runs():
                many[0].runs.refuse(run.run.id, "The test has seen it.")
    found = keys(many[0])
    assert len(found) == len(set(found)) == steps
    for services in many:
        services.store.close()


@each_database
def test_killed_services_submit_one_run_for_each_time(
    database_url: str, tmp_path: Path, rounds: Rounds, chance: random.Random
) -> None:
    clock = racers.SharedClock(tmp_path / "clock")
    services = open_services(database_url, clock)
    new(services)
    steps = rounds(100) // 2 + 2
    arguments = (timetable.submit_until_killed, database_url, str(clock.path))
    for step in range(1, steps + 1):
        victim = racers.Victim(*arguments)
        victim.wait_round()
        clock.set(step * 3600.0)
        time.sleep(chance.uniform(0, 0.02))  # killed at any point of its work
        victim.kill()
    heir = racers.Victim(*arguments)
    heir.wait_round()

    def is_done() -> bool:
        times = services.schedules.get("train-1").times
        return bool(times and times[0].run) and times[0].due_at == T0 + steps * HOUR

    wait_for(is_done, "the last run")
    heir.kill()
    times = services.schedules.get("train-1").times
    assert all(each.run or each.reason == SKIPPED for each in times)
    found = keys(services)
    assert len(found) == len(set(found))
    assert {each.run for each in times if each.run} == {x.run.id for x in services.runs.newest()}
    services.store.close()


# What the duty asks of the Hub.


class SubmittingHub(ScriptedHub):
    """A Hub that submits runs by the services of the test, or refuses them."""

    def __init__(self, services: Services) -> None:
        super().__init__()
        self.services = services
        self.refusal: GPUSpawnerError | None = None
        self.has(ServerRef("ada"))

    def app(self) -> web.Application:
        """The pages that answer, and the launcher."""
        hub, services = self, self.services

        class Launcher(web.RequestHandler):
            def post(self) -> None:
                sent = json.loads(self.request.body)
                hub.asked.append(f"{sent['user']} {sent['key']} {sent['work']['folder']}")
                if sent["user"] not in hub.users:
                    raise web.HTTPError(404)
                if hub.refusal:
                    self.set_status(hub.refusal.status_code)
                    self.finish({"error": "refused", "message": hub.refusal.message})
                    return
                run = Run(
                    id=f"run-{len(hub.asked)}",
                    user=sent["user"],
                    key=sent["key"],
                    title=sent["title"],
                    work=Work(**sent["work"]),
                    created_at=services.clock(),
                )
                self.finish({"id": services.runs.submit(run)[0].id})

        app = super().app()
        app.add_handlers(".*$", [("/hub/api/gpuspawner/launcher", Launcher)])
        return app


async def test_refused_time_has_its_sentence_and_is_told_once(services: Services) -> None:
    new(services)
    poked: list[bool] = []
    async with SubmittingHub(services).serving() as serving:
        hub = serving
        assert isinstance(hub, SubmittingHub)
        duty = ScheduleDuty(make_tick(services, hub), lambda: poked.append(True))
        hub.refusal = MembershipEnded(why="the course is over")
        for _ in range(2):
            Clock.of(services).forward(hours=1)
            await duty.round()
            await duty.round()
        sentence = hub.refusal.message
        found = services.schedules.get("train-1")
        assert [each.reason for each in found.times] == [sentence, sentence]
        assert found.schedule.refusal == sentence
        (notice,) = services.notifications.notices_of("ada")
        assert notice.title == "Your schedule train could not start a run"
        assert sentence in notice.body and poked == [True]

        hub.refusal = None
        Clock.of(services).forward(hours=1)
        await duty.round()
        found = services.schedules.get("train-1")
        assert found.schedule.refusal == "" and found.times[0].run
        assert any(said.endswith(" runs/2025-03-01-150000-train-1") for said in hub.asked)
        hub.refusal = MembershipEnded(why="again")
        Clock.of(services).forward(hours=1)
        await duty.round()
        assert len(services.notifications.notices_of("ada")) == 2

        hub.has(ServerRef("bob"))
        Clock.of(services).forward(hours=1)
        await duty.round()
        assert "no longer has a member" in services.schedules.get("train-1").times[0].reason


async def test_hub_that_is_away_is_asked_again_and_submits_once(services: Services) -> None:
    new(services)
    async with SubmittingHub(services).serving() as serving:
        hub = serving
        assert isinstance(hub, SubmittingHub)
        duty = ScheduleDuty(make_tick(services, hub))
        hub.refusal = GPUSpawnerError("The hub restarts.")
        hub.refusal.status_code = 503
        Clock.of(services).forward(hours=1)
        await duty.round()
        assert services.schedules.get("train-1").times[0].reason == ""
        hub.refusal = None
        await duty.round()
        await duty.round()
        assert services.schedules.get("train-1").times[0].run == services.runs.newest()[0].run.id
    assert len(keys(services)) == 1
