"""Notebook sessions with a GPU, drawn from what was published of them.

No trace of notebook sessions with their GPU activity is public. What is, of the one study of a
notebook service (NotebookOS, which holds its AdobeTrace; see the sources in the field notes):

* nearly 70 % of sessions never use their GPU, three quarters use it for at most 5 % of the session;
* reserved GPUs are idle for more than 81 % of the time;
* a task on the GPU takes 2 minutes or less in half of all cases, 5 or less in three quarters;
* from the start of a task to that of the next in its session it is 5 minutes in the median, and
  never less than 4.

The rest is assumed, and is here: a session lasts 4 hours in the median (lognormal, sigma 1, at most
three days). What is above the least of 4 minutes between tasks is lognormal with the spread of the
tasks, and a median of half a minute, which makes that from start to start 5: some tasks are longer
than what they would leave. Tasks come in sittings of 90 minutes in the median,
with breaks between them of 3 hours; the first begins 5 minutes after the start. One of six
sessions with a task has only one to three. One of ten of the others also trains for 2 to 12 hours
with nobody there. While somebody sits there, half of all minutes have output; in a session without
tasks that is for 20 minutes in the median. A task uses 60 % of the GPU. In one of fifty
sessions without tasks a script pretends to work: a second in each minute, at 20 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

UNUSED = 0.70
LIGHT = 1 / 6
LONG = 0.1
PRETENDS = 0.02
TASK_MEDIAN, SIGMA = 2.0, math.log(2.5) / 0.6745
LEAST_BETWEEN, MORE_MEDIAN = 4.0, 0.5
TASK_USE = 60.0
MOST_MINUTES = 72 * 60.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What is assumed, in minutes: medians, and the spread of what lies between sittings."""

    session: float = 240.0
    sitting: float = 90.0
    pause: float = 180.0


@dataclass(slots=True)
class Session:
    """One session; all times in minutes since its start."""

    minutes: int
    tasks: list[tuple[float, float]] = field(default_factory=list)
    """(begin, end) of each task, in order."""
    sittings: list[tuple[float, float]] = field(default_factory=list)
    pretends: bool = False
    busy: list[float] = field(default_factory=list)
    """Seconds of each minute in which a task runs."""
    output: list[bool] = field(default_factory=list)

    def use(self, minute: int) -> float:
        """Percent of the GPU, the mean of this minute."""
        pretended = 20.0 / 60 if self.pretends else 0.0
        return max(pretended, TASK_USE * self.busy[minute] / 60)

    def worked(self, minute: int) -> float:
        """Seconds of this minute in which any kernel ran."""
        return max(self.busy[minute], 1.0 if self.pretends else 0.0)


def draw(random: Random, shape: Shape) -> Session:
    """One session."""
    length = min(MOST_MINUTES, random.lognormvariate(math.log(shape.session), 1.0))
    made = Session(minutes=max(1, round(length)))
    if random.random() < UNUSED:
        there = random.lognormvariate(math.log(20), 1.0)
        made.sittings = [(0.0, min(there, made.minutes))]
        made.pretends = random.random() < PRETENDS
    else:
        _draw_tasks(random, shape, made)
    _fill(random, made)
    return made


def _draw_tasks(random: Random, shape: Shape, made: Session) -> None:
    light = random.random() < LIGHT
    left = random.randint(1, 3) if light else 10**9
    long_at = None if light or random.random() >= LONG else random.uniform(0, made.minutes)
    at = random.lognormvariate(math.log(5), 1.0)
    while at < made.minutes and left:
        end = at + random.lognormvariate(math.log(shape.sitting), 0.7)
        began, last = at, at
        while at < min(end, made.minutes) and left:
            task = random.lognormvariate(math.log(TASK_MEDIAN), SIGMA)
            if long_at is not None and at >= long_at:
                task, long_at = random.uniform(120, 720), None
                end = at  # nobody waits for it
            last = min(at + task, made.minutes)
            made.tasks.append((at, last))
            left -= 1
            more = random.lognormvariate(math.log(MORE_MEDIAN), SIGMA)
            at = max(at + LEAST_BETWEEN + more, at + task + 0.5)
        made.sittings.append((began, min(max(end, began + 1), made.minutes)))
        at = max(last, end) + max(20.0, random.lognormvariate(math.log(shape.pause), 1.0))


def _fill(random: Random, made: Session) -> None:
    made.busy = [0.0] * made.minutes
    made.output = [False] * made.minutes
    for begin, end in made.tasks:
        for minute in range(int(begin), min(made.minutes, math.ceil(end))):
            overlap = min(end, minute + 1) - max(begin, minute)
            made.busy[minute] = min(60.0, made.busy[minute] + 60 * overlap)
    for begin, end in made.sittings:
        for minute in range(int(begin), min(made.minutes, math.ceil(end))):
            made.output[minute] = made.output[minute] or random.random() < 0.5
