"""Runs as JSON."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from ..core.errors import InvalidRequest
from ..queue.schemas import EstimateAnswer
from ..web.fields import invalid
from ..web.schemas import (
    Amount,
    Answer,
    Body,
    Count,
    DatedAnswer,
    Flag,
    Instant,
    Key,
    Number,
    Written,
    checked,
    told,
    written,
)
from .models import Work
from .rules import MOST_OPEN
from .sweeps import as_text, filled_in

MOST_WORDS = 1000
LONGEST_COMMAND = 32 * 1024
"""Characters of a command, with its arguments."""
LONGEST_TITLE = 100

INPUT_NAME = "input.ipynb"
INPUT = re.compile(rf"(?P<folder>runs/[^/]+)/{re.escape(INPUT_NAME)}")
"""A notebook that a program of the member has copied into the folder of its run."""

_PATH = re.compile(r"(?!/)(?!.*(?:^|/)\.\.(?:/|$))[^\x00]{1,500}")


def _words(value: Any, field: str) -> tuple[str, ...]:
    is_list = isinstance(value, list) and all(isinstance(word, str) for word in value)
    if not is_list or len(value) > MOST_WORDS or any("\0" in word for word in value):
        raise invalid(field, "is a list of texts: the program and its arguments.")
    if sum(map(len, value)) > LONGEST_COMMAND:
        raise invalid(field, f"has {LONGEST_COMMAND} characters at most.")
    return tuple(value)


def _path(value: Any, field: str) -> str:
    if not isinstance(value, str) or (value and not _PATH.fullmatch(value)):
        raise invalid(field, "is a path in your workspace, such as project/train.ipynb.")
    return value


def _object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(field, "is an object.")
    return value


Words = Annotated[
    tuple[str, ...],
    checked(_words),
    WithJsonSchema({"type": "array", "items": {"type": "string"}, "maxItems": MOST_WORDS}),
]
NotebookPath = Annotated[
    str, checked(_path), WithJsonSchema({"type": "string", "pattern": "^[^/][^\\u0000]{0,499}$|^$"})
]
JSONObject = Annotated[dict[str, Any], checked(_object), WithJsonSchema({"type": "object"})]


def _sets(value: Any, field: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_OPEN:
        raise invalid(field, f"is a list of 1 to {MOST_OPEN} objects: the parameters of each run.")
    return tuple(_object(each, field) for each in value)


def _most(value: Any, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_OPEN:
        raise invalid(field, f"is a whole number from 1 to {MOST_OPEN}.")
    return value


ParameterSets = Annotated[
    tuple[dict[str, Any], ...],
    checked(_sets),
    WithJsonSchema(
        {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": MOST_OPEN}
    ),
]
Most = Annotated[
    int, checked(_most), WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MOST_OPEN})
]


class RunBody(Body):
    """A run: a command or a notebook, and what it needs."""

    command: Words = ()
    notebook: NotebookPath = ""
    parameters: JSONObject = {}
    directory: NotebookPath = ""
    title: Written = written(LONGEST_TITLE, "train", "")
    options: JSONObject = {}
    requeue: Flag = False
    preemptible: Flag = False
    key: Key = ""

    @property
    def title_in_lists(self) -> str:
        """The title, by default the name of the program or the notebook."""
        what = self.notebook.rpartition("/")[2] or (self.command[0] if self.command else "")
        return (self.title.strip() or what)[:LONGEST_TITLE]

    def work(self, folder: str) -> Work:
        """Return what the run does. Raises InvalidRequest unless it is a command or a notebook.

        ``folder`` is for its files. A notebook that is already the ``input.ipynb`` of a run's
        folder keeps that folder.
        """
        if (found := INPUT.fullmatch(self.notebook)) is not None:
            folder = found["folder"]
        if bool(self.command) == bool(self.notebook):
            raise InvalidRequest(
                "Send a command or a notebook: a run does one of them.", field="command"
            )
        if self.command and self.parameters:
            raise InvalidRequest("Only a notebook has parameters.", field="parameters")
        return Work(
            command=self.command,
            notebook=self.notebook,
            parameters=self.parameters,
            directory=self.directory,
            folder=folder,
        )


class QuoteBody(Body):
    """A run whose price is asked for."""

    options: JSONObject = {}
    lease: Written = Field(
        "",
        examples=["0a1b2c"],
        description="The session whose options apply where none are sent.",
    )
    preemptible: Flag = False


class QuotedAccount(Answer):
    account: str
    available: Amount


class QuoteAnswer(Answer):
    """What a run would cost, when it would start, and what its member may choose."""

    options: dict[str, Any] = Field(description="All options, with which the run can be submitted.")
    environment: str
    environment_name: str
    gpus: Count
    most_gpus: Count
    share: str = Field(description="What a share of a GPU is here; empty if none can be asked for.")
    cpu_variant: bool = Field(description="Whether it also runs without a GPU.")
    models: tuple[str, ...]
    hours: Number | None
    most_hours: Number | None
    account: str
    accounts: tuple[QuotedAccount, ...]
    what: str = Field(description="The GPUs in words, such as `2 x T4`; empty for none.")
    price: str
    total: str = Field(description="The price of all its hours; empty without a time limit.")
    lasts: str = Field(
        description="How long the account pays, if that ends the run before its time limit."
    )
    refusal: str = Field(description="Why it would be refused; empty if it would not.")
    preemptible: bool = Field(
        description="Whether the price and start are those of a preemptible run."
    )
    preemptible_share: Number | None = Field(
        description="The price of a preemptible run as a share of the usual price; null on a hub "
        "without preemptible runs."
    )
    at_once: bool
    place: Count | None = Field(description="Its position in the queue, if it would wait.")
    estimate: EstimateAnswer | None
    planned: Instant | None
    latest: Instant | None


class SweepBody(RunBody):
    """Runs of one command or notebook, each with different parameters.

    In a command, they replace their names in braces, such as ``{lr}``.
    """

    sets: ParameterSets
    at_most: Most | None = Field(
        None, description="How many may wait in the queue or run at once; null for all."
    )

    def works(self, title: str, folder: str) -> list[tuple[str, Work]]:
        """Return the title of each run, and what it does. Raises InvalidRequest."""
        common = self.model_copy(update={"parameters": {}}).work(folder)
        found = []
        for number, varied in enumerate(self.sets, 1):
            values = {**self.parameters, **varied}
            work = replace(common, folder=f"{common.folder}-{number:03}")
            if common.command:
                work = replace(work, command=filled_in(common.command, values))
            else:
                work = replace(work, parameters=values)
            words = " ".join([title, *(f"{name}={as_text(x)}" for name, x in varied.items())])
            found.append((words[:LONGEST_TITLE], work))
        return found


class AgainBody(Body):
    """A request to submit the failed runs of a sweep again."""

    key: Key = ""


class RunAnswer(Answer):
    """A run."""

    id: str = told("run.id")
    user: str = told("run.user")
    title: str = told("run.title")
    state: str
    command: tuple[str, ...] = told("run.work.command")
    notebook: str = told("run.work.notebook")
    parameters: dict[str, Any] = told("run.work.parameters")
    directory: str = told("run.work.directory")
    folder: str = told("run.work.folder")
    options: dict[str, Any] = told("run.options", description="The options it was submitted with.")
    requeue: bool = told("run.requeue")
    restarts: Count = told("run.restarts")
    preemptible: bool = told("run.preemptible")
    preemptions: Count = told("run.preemptions")
    created_at: Instant = told("run.created_at")
    started_at: Instant | None = told("lease.started_at", None)
    ended_at: Instant | None = told("run.ended_at")
    reason: str = told("run.reason")
    exit_status: int | None = told("run.exit_code")
    lease: str | None = told("lease.id", None)
    charged: Amount = told("lease.charged", 0)
    cell: Count | None = told(
        "record.cell",
        None,
        description="The cell that its notebook executes; only for a single run.",
    )
    cells: Count | None = told("record.cells", None)
    sweep: str | None = told("run.sweep")


class RunsAnswer(DatedAnswer):
    """Runs, newest first."""

    runs: tuple[RunAnswer, ...]
    next: str | None


class RunFileAnswer(Answer):
    path: str
    size: Count


class RunFilesAnswer(Answer):
    """The files in a run's folder."""

    files: tuple[RunFileAnswer, ...]


class SweepAnswer(Answer):
    """A sweep, with its runs in the order in which they start."""

    id: str
    user: str = told("first.user")
    at_most: Count | None = told("first.at_most")
    created_at: Instant = told("first.created_at")
    states: dict[str, Count] = Field(description="How many runs are in each state.")
    charged: Amount = Field(description="For all its runs and their restarts.")
    runs: tuple[RunAnswer, ...]


class SweepQuoteAnswer(Answer):
    """The most that a sweep can cost."""

    runs: Count
    seconds: Count | None = Field(description="The time limit of each run.")
    rate_per_hour: Amount = told(
        "rate", description="Of one run, on the most expensive GPUs that fit."
    )
    most: Amount | None = Field(description="Of all runs, if each lasts until its time limit.")
    hold: Amount = Field(description="The credits needed for the runs that start at once.")
