"""A service that submits the runs of schedules until it is killed, as the duty and the Hub do."""

from __future__ import annotations

import secrets
from multiprocessing.connection import Connection
from pathlib import Path

from gpuspawner.runs.models import Run
from gpuspawner.runs.schedules import DueRun
from gpuspawner.services import Services
from tests.support.brokers import open_services
from tests.support.racers import SharedClock


def submit(services: Services, due: DueRun) -> None:
    """Submit the run of a time, as the Hub does, and note it, as the duty does."""
    schedule = due.schedule
    run = Run(
        id=f"{schedule.id}-{secrets.token_hex(4)}",
        user=schedule.user,
        key=due.key,
        title=schedule.title,
        work=schedule.work,
        created_at=services.clock(),
    )
    known = services.schedules.run_of(due) or services.runs.submit(run)[0]
    services.schedules.note_run(due, known.id)


def submit_until_killed(ready: Connection, url: str, clock_file: str) -> None:
    """Submit whatever is due, again and again, by a clock that the test sets."""
    clock = SharedClock.__new__(SharedClock)  # the test made the file
    clock.path = Path(clock_file)
    services = open_services(url, clock)
    ready.send(True)
    while True:
        for due in services.schedules.find_due():
            submit(services, due)
