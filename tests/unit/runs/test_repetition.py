"""The form that runs something again, and what is shown of a log."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from gpuspawner.core.errors import InvalidRequest
from gpuspawner.runs.models import FollowedRun, Run, Work
from gpuspawner.runs.repetition import Repetition, parsed, shown
from gpuspawner.runs.run_page import readable
from tests.support.leases import lease_of

NOW = datetime(2026, 11, 28, tzinfo=timezone.utc)


def run(**work: Any) -> FollowedRun:
    options = {"gpus": 1, "hours": 1.5, "environment": "torch", "shown_at": "then"}
    made = Run(
        id="one-1",
        user="ada",
        title="one",
        work=Work(folder="runs/y", **work),
        options=options,
        created_at=NOW,
    )
    return FollowedRun(made, lease_of("ada", started_at=NOW))


NOTEBOOK = run(notebook="study.ipynb", parameters={"seed": 1, "name": "5"}, directory="a")
COMMAND = run(command=("python3", "a b.py", "it's", ""))


@pytest.mark.parametrize(
    "value", [1, 1.5, True, None, "", "text", "5", "true", '"', [1, "x"], {"a": "é"}, "a\nb"]
)
def test_shown_value_is_read_as_it_was(value: object) -> None:
    assert parsed(shown(value)) == value and type(parsed(shown(value))) is type(value)


@pytest.mark.parametrize("one", [NOTEBOOK, COMMAND])
def test_unchanged_form_submits_the_same(one: FollowedRun) -> None:
    form = Repetition.typed(lambda name: Repetition.of_run(one.run).as_fields().get(name, ""))
    body = form.body(one, "key-1")
    work = one.run.work
    assert (body.command, body.parameters) == (work.command, work.parameters)
    assert body.notebook == ("runs/y/input.ipynb" if work.notebook else "")
    assert body.directory == work.directory
    assert body.options == {"gpus": 1, "hours": 1.5, "environment": "torch"}
    assert body.key == "key-1"


def test_run_that_never_began_has_no_copy_of_its_notebook() -> None:
    waits = replace(NOTEBOOK, lease=None)
    assert Repetition.of_run(waits.run).body(waits, "").notebook == "study.ipynb"


def test_empty_fields_mean_the_usual_values() -> None:
    form = Repetition("one", "", (), "", "")
    assert form.body(NOTEBOOK, "").options == {"environment": "torch"}


def test_share_of_a_gpu_is_repeated_and_can_be_typed() -> None:
    form = Repetition("one", "", (), "share", "")
    assert form.body(NOTEBOOK, "").options == {"environment": "torch", "gpus": "share"}


@pytest.mark.parametrize(
    ("one", "field", "typed", "sentence"),
    [
        (COMMAND, "command", "echo 'a", "a quotation mark is not closed"),
        (COMMAND, "command", " ", "is empty"),
        (COMMAND, "gpus", "one", "is 'one': write a whole number"),
        (COMMAND, "gpus", "-1", "write a whole number"),
        (COMMAND, "hours", "nan", "is 'nan': write hours"),
        (COMMAND, "hours", "0", "write hours"),
        (NOTEBOOK, "name1", "a b", "'a b' is not a valid parameter name"),
        (NOTEBOOK, "name1", "seed", "The parameter seed is given twice."),
    ],
)
def test_bad_value_is_told(one: FollowedRun, field: str, typed: str, sentence: str) -> None:
    fields = {**Repetition.of_run(one.run).as_fields(), field: typed}
    with pytest.raises(InvalidRequest) as refused:
        Repetition.typed(lambda name: fields.get(name, "")).body(one, "")
    assert sentence in refused.value.message


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (b"a\nb\n", "a\nb\n"),
        (b"a\r\nb\r\n", "a\nb\n"),
        (b"10 %\r20 %\rdone\nb", "done\nb"),
        (b"10 %\r", "10 %"),
        (b"\x1b[1;31mred\x1b[0m\x07", "red"),
        (b"\xff<b>", "\N{REPLACEMENT CHARACTER}<b>"),
        (b"x" * 300_000 + b"\r", "x" * 300_000),
        (b"\x1b[" + b"0" * 300_000, "[" + "0" * 300_000),
    ],
)
def test_log_is_shown_as_a_terminal_would(printed: bytes, expected: str) -> None:
    assert readable(printed) == expected
