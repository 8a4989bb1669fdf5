"""The table of jobs in the background. Real: threads that race."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

import pytest

from gpuspawner.core.errors import Refused
from gpuspawner.core.jobs import DONE, FAILED, Job, JobTable
from tests.support.threads import at_once

NOW = datetime(2026, 3, 1, tzinfo=timezone.utc)
KEPT = 3


@pytest.fixture
def table() -> JobTable[Job]:
    return JobTable(lambda: NOW, KEPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Yielding(Job):
    """Lets another thread go on between any two steps of the table."""

    def __post_init__(self) -> None:
        time.sleep(0)

    @property
    def is_open(self) -> bool:
        time.sleep(0)
        return self.state not in (DONE, FAILED)


def new(kind: type[Job] = Job) -> Job:
    return kind(actor="kim", state="running", started_at=NOW - timedelta(minutes=1))


def test_job_is_open_until_its_end_and_keeps_its_last_values(table: JobTable[Job]) -> None:
    job, other = table.add(new()), table.add(new())
    assert [each.id for each in table.jobs()] == [other.id, job.id], "newest first"
    assert table.open_jobs() == [job, other], "oldest first"
    assert table.change(job.id, done_bytes=7).done_bytes == 7
    table.end(job.id, FAILED, error="No space.")
    ended = table.jobs()[1]
    assert (ended.state, ended.ended_at, ended.done_bytes, ended.error) == (
        (FAILED, NOW, 7, "No space.")
    )
    assert not ended.is_open and table.open_jobs() == [other]


def test_only_the_oldest_ended_jobs_are_forgotten(table: JobTable[Job]) -> None:
    waits = table.add(new())
    ended = [table.add(new()).id for _ in range(KEPT + 2)]
    for job_id in ended:
        table.end(job_id, DONE)
    assert [job.id for job in table.jobs()] == [*reversed(ended[2:]), waits.id]


def test_racing_threads_lose_no_job(table: JobTable[Job]) -> None:
    def work(_: int) -> list[int]:
        mine = []
        for _ in range(50):
            job = table.add(new(Yielding))
            mine.append(job.id)
            shown = {each.id: each for each in table.jobs()}
            assert job.id in shown, "an open one was forgotten"
            assert sum(each.state == DONE for each in shown.values()) <= KEPT
            table.end(job.id, DONE)
        return mine

    assert len(set().union(*at_once(8, work))) == 400, "two got the same id"
    assert len(table.jobs()) == KEPT


def test_racing_threads_lose_no_change(table: JobTable[Job]) -> None:
    job = table.add(new(Yielding))

    def work(number: int) -> None:
        field = ("done_bytes", "error")[number]  # which no other thread changes
        for turn in range(500):
            table.change(job.id, **{field: turn})
            table.open_jobs()  # lets the other one go on
            [shown] = table.jobs()
            assert getattr(shown, field) == turn

    at_once(2, work)


def test_one_of_racing_threads_is_let_in_under_the_lock(table: JobTable[Job]) -> None:
    """As both users do: who finds no open job adds one."""

    def start(_: int) -> Job:
        with table.lock:
            if table.open_jobs():
                raise Refused()
            return table.add(new(Yielding))

    for _ in range(20):
        [job] = [each for each in at_once(8, start) if isinstance(each, Job)]
        table.end(job.id, DONE)


@pytest.mark.parametrize(
    ("error", "shown", "logged"),
    [
        (Refused("It is in use."), "It is in use.", ""),
        (PermissionError(13, "secret detail"), "See the log.", "secret detail"),
    ],
)
def test_failed_job_shows_a_sentence_and_the_log_has_the_words(
    table: JobTable[Job],
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    shown: str,
    logged: str,
) -> None:
    def fail(_: Job) -> None:
        raise error

    table.run(table.add(new()), fail, logging.getLogger("jobs"), "See the log.")
    [job] = table.jobs()
    assert (job.state, job.error, job.ended_at) == (FAILED, shown, NOW)
    assert logged in caplog.text and bool(logged) is bool(caplog.text)
