"""Worked examples: what the production classes answer for made-up figures."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import Any

from .page import Generated, plain, table

HOUR = 3600.0
DAY = 24 * HOUR
NOW = 40 * DAY
KIND = "A100"


@cache
def queue() -> Any:
    """Return a scheduler of the queue with four GPUs, four tickets and a past."""
    from gpuspawner.queue.models import (
        EndedSession,
        Priority,
        QueuePolicy,
        RunningLease,
        WaitingTicket,
    )
    from gpuspawner.queue.scheduler import Scheduler

    scheduler = Scheduler(QueuePolicy())
    scheduler.set_capacity({KIND: 4})
    scheduler.learn(
        [
            # Ada had one GPU for two days, which ended a week ago; Bob's sessions last three hours.
            EndedSession(member="ada", devices=1, started_at=NOW - 9 * DAY, ended_at=NOW - 7 * DAY),
            *(
                EndedSession(
                    member="bob",
                    devices=2,
                    started_at=NOW - day * DAY,
                    ended_at=NOW - day * DAY + 3 * HOUR,
                )
                for day in range(1, 6)
            ),
        ]
    )
    scheduler.started(
        RunningLease(id="running", member="zoe", held={KIND: 4}, started_at=NOW - HOUR)
    )
    kinds = frozenset((KIND,))
    for ticket in (
        WaitingTicket(
            id="ada", member="ada", devices=1, kinds=kinds, asked_at=NOW - 18 * HOUR, seconds=HOUR
        ),
        WaitingTicket(id="bob", member="bob", devices=2, kinds=kinds, asked_at=NOW - 9 * HOUR),
        WaitingTicket(id="eve", member="eve", devices=1, kinds=kinds, asked_at=NOW - HOUR),
        WaitingTicket(
            id="kim",
            member="kim",
            group="ml101",
            devices=1,
            kinds=kinds,
            asked_at=NOW - 60,
            priority=Priority.COURSE,
        ),
    ):
        scheduler.submit(ticket)
    return scheduler


class QueueExample(Generated):
    """``{queue-example}``: each ticket's points, part by part."""

    def markdown(self) -> Iterator[str]:
        """Yield the table, in the order of the queue."""
        rows = []
        for ranked in queue().order(NOW):
            for part in ranked.parts:
                rows.append(("", "", plain(part.name), f"{part.points:+.2f}", plain(part.why)))
            first = len(rows) - len(ranked.parts)
            rows[first] = (f"{ranked.place}", f"**{ranked.id}**", *rows[first][2:])
            rows.append(("", "", "**sum**", f"**{ranked.score:+.2f}**", ""))
        yield from table(("Place", "Ticket", "Part", "Points", "Figures behind it"), rows)


class ChargeExample(Generated):
    """``{charge-example}``: the charges of one session, with ticks that come late or twice."""

    def markdown(self) -> Iterator[str]:
        """Yield a row for each tick."""
        from gpuspawner.core.units import format_credits, parse_credits
        from gpuspawner.ledger.rules import owed

        rate = parse_credits("3.6")
        start = datetime(2026, 3, 2, 9, tzinfo=timezone.utc)
        charged = 0
        rows = []
        for seconds, what in (
            (60, "the first minute is over"),
            (120, "the next one"),
            (120, "a second process charges the same minute"),
            (1800, "the service was down for 28 minutes"),
            (4321.5, "the server is proven gone: the last charge"),
        ):
            due = owed(rate, start, start + timedelta(seconds=seconds))
            shown = (format_credits(each, places=6) for each in (due, charged, due - charged))
            rows.append((f"{seconds:,.1f} s", what, *shown))
            charged = due
        yield from table(("After", "What happens", "Owed", "Charged before", "Charge"), rows)


class IdleExample(Generated):
    """``{idle-example}``: the idle credit of a server through a day."""

    def markdown(self) -> Iterator[str]:
        """Yield a row for each period."""
        from gpuspawner.monitoring.idle import Activity, IdlePolicy, begin, credit_after

        policy = IdlePolicy()
        credit = begin(policy).credit
        rows = [("start", "", f"{credit / 60:.0f} min")]
        for minutes, use, output, what in (
            (20, 0.0, False, "nothing runs"),
            (5, 80.0, False, "training at 80 %"),
            (60, 0.0, True, "no GPU work, but cells print"),
            (60, 0.0, False, "lunch"),
            (60, 1.0, False, "one second of work in each 100"),
        ):
            for _ in range(minutes):
                busy = 60.0 if use > 50 else 60.0 * use / 100
                credit = credit_after(policy, credit, Activity(60.0, use, busy, output))
            rows.append((f"{minutes} min", what, f"{credit / 60:.0f} min"))
        yield from table(("For", "The server", "Idle credit after it"), rows)


class Fields(Generated):
    """``{fields} queue``: the parameters of a policy, with their defaults."""

    required_arguments = 1

    def markdown(self) -> Iterator[str]:
        """Yield the table."""
        import dataclasses

        from sphinx.pycode import ModuleAnalyzer

        from gpuspawner.monitoring import idle
        from gpuspawner.queue import models

        cls = {"queue": models.QueuePolicy, "idle": idle.IdlePolicy}[self.arguments[0]]
        self.uses(models, idle)
        told = ModuleAnalyzer.for_module(cls.__module__).find_attr_docs()
        rows = []
        for each in dataclasses.fields(cls):
            words = " ".join(" ".join(told.get((cls.__name__, each.name), ())).split())
            if each.default is dataclasses.MISSING:
                assert each.default_factory is not dataclasses.MISSING
                made: Any = each.default_factory()
                shown = ", ".join(f"{k.name.lower()} {v:g}" for k, v in made.items())
            else:
                shown = f"`{each.default!r}`" if each.default != "" else "as `mode`"
            rows.append((f"`{each.name}`", shown, plain(words.replace("``", "`"))))
        yield from table(("Key", "Default", "Meaning"), rows)
