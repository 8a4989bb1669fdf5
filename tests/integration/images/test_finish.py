"""The server's part of "Finish without me". Real: Jupyter's server with our handlers, HTTP, files;
who answers in the hub's place answers what the test says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support.lab import load_lab_module
from tests.support.lab_server import TOKEN, StandInHub, lab_server

pytestmark = pytest.mark.usefixtures("processes")

load_lab_module("gpuspawner_run")
finish = load_lab_module("gpuspawner_finish")

CELL = """
# what may be changed
seed = 1
rate: float = 3e-4
name = "birds"
is_quick = True
sizes = [32, 64]
nothing = None
path = base + "/x"
left, right = 1, 2
both = (1, 2)
text = "two\\nlines"
import os
"""

QUOTE = {"options": {"environment": "base", "gpus": 1}, "gpus": 1}


def notebook(source: str = CELL, **metadata: Any) -> str:
    cell: dict[str, Any] = {
        "cell_type": "code",
        "source": source.splitlines(keepends=True),
        "outputs": [],
    }
    cell |= {"execution_count": None, "metadata": {"tags": ["parameters"], **metadata}}
    kernel = {"name": "python3", "display_name": "Python", "language": "python"}
    told = {"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(told)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workspace, which the file browser shows from one folder above."""
    found = tmp_path_factory.mktemp("home") / "files" / "work"
    (found / "birds").mkdir(parents=True)
    return found


@pytest.fixture(scope="module")
def url(stand_in: StandInHub, work: Path) -> Iterator[str]:
    environment = stand_in.environment(
        GPUSPAWNER_ENVIRONMENT="base", GPUSPAWNER_WORKSPACE=str(work)
    )
    with lab_server(work.parent, environment, program="jupyter_server") as url:
        yield url


@pytest.fixture
def hub(stand_in: StandInHub, work: Path) -> StandInHub:
    """The stand-in, which knows nothing yet; and the workspace with one notebook."""
    run = {"id": "night-0a1b2c3d", "state": "waiting", "folder": "runs/x"}
    stand_in.answers = {"quote": (200, QUOTE), "runs": (200, run)}
    stand_in.asked.clear()
    (work / "birds" / "night.ipynb").write_text(notebook())
    return stand_in


def ask(url: str, what: str, **body: Any) -> dict[str, Any]:
    sent = {"path": "work/birds/night.ipynb", **body}
    answer = requests.post(f"{url}/gpuspawner/runs/{what}", json=sent, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def submit(url: str, key: str, **body: Any) -> dict[str, Any]:
    chosen = {"options": {"gpus": 2}, "preemptible": True, "requeue": False, "parameters": {}}
    return ask(url, "submit", **{"key": key, **chosen, **body})


def copies(work: Path) -> list[Path]:
    return sorted((work / "runs").glob("*")) if (work / "runs").exists() else []


def test_first_question_asks_for_this_session_and_finds_parameters(
    url: str, hub: StandInHub
) -> None:
    told = ask(url, "quote")
    assert told["quote"] == QUOTE
    assert told["parameters"] == {
        "seed": "1",
        "rate": "0.0003",
        "name": "birds",
        "is_quick": "True",
        "sizes": "[32, 64]",
        "nothing": "None",
    }
    sent = {"lease": "0a", "options": {"environment": "base"}}
    assert hub.asked == [("POST", "/hub/api/gpuspawner/runs/-/quote", f"token {TOKEN}", sent)]
    chosen = {"options": {"gpus": 2}, "preemptible": True}
    assert ask(url, "quote", **chosen) == {"quote": QUOTE}
    assert hub.sent("quote")[1] == chosen, "these are all"


def test_accepted_notebook_is_copied_and_only_changes_are_sent(
    url: str, hub: StandInHub, work: Path
) -> None:
    before = copies(work)
    typed = {"seed": "7", "rate": "0.0003", "name": "a 'b'", "is_quick": "false", "other": "1"}
    told = submit(url, "accepted", parameters=typed)
    assert told == {"id": "night-0a1b2c3d", "folder": "runs/x", "open": "work/runs/x"}
    [folder] = set(copies(work)) - set(before)
    assert (folder / "input.ipynb").read_text() == notebook()
    [body] = hub.sent("runs")
    assert body == {
        "title": "night",
        "options": {"gpus": 2},
        "preemptible": True,
        "requeue": False,
        "parameters": {"seed": 7, "name": "a 'b'", "is_quick": False},
        "directory": "birds",
        "key": "accepted",
        "notebook": f"runs/{folder.name}/input.ipynb",
    }


def test_refused_notebook_leaves_no_copy(url: str, hub: StandInHub, work: Path) -> None:
    before = copies(work)
    hub.answers["runs"] = (409, {"message": "Your balance does not cover a GPU."})
    assert submit(url, "refused") == {"message": "Your balance does not cover a GPU."}
    assert len(hub.sent("runs")) == 1 and copies(work) == before


@pytest.mark.parametrize("answer", [(503, {"message": "The Hub is not responding."}), (500, [])])
def test_attempt_without_an_answer_is_repeated_with_the_same_copy(
    url: str, hub: StandInHub, work: Path, answer: tuple[int, Any]
) -> None:
    before, accepted, key = copies(work), hub.answers["runs"], f"key-{answer[0]}"
    hub.answers["runs"] = answer
    assert submit(url, key)["message"] in (
        "The Hub is not responding.",
        "The hub answered 500.",
    )
    hub.answers["runs"] = accepted
    assert submit(url, key)["id"] == "night-0a1b2c3d"
    first, second = hub.sent("runs")
    assert first == second and first["key"] == key
    assert len(copies(work)) == len(before) + 1, "the run that may exist needs it"


def test_hub_that_is_away_is_told_in_words(url: str, hub: StandInHub) -> None:
    hub.answers["quote"] = (503, "nonsense")
    assert ask(url, "quote") == {"message": "The hub answered 503."}
    hub.answers["quote"] = (409, {"message": "This hub runs no notebooks."})
    assert ask(url, "quote") == {"message": "This hub runs no notebooks."}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("work/none.ipynb", "There is no file work/none.ipynb: save the notebook first."),
        ("outside.ipynb", "The notebook is not in your workspace, "),
        ("../../etc/passwd", "The notebook is not in your workspace, "),
        ("work/birds/broken.ipynb", " is not a notebook."),
    ],
)
def test_notebooks_that_cannot_run_are_told_in_words(
    url: str, hub: StandInHub, work: Path, path: str, words: str
) -> None:
    (work.parent / "outside.ipynb").write_text(notebook())
    (work / "birds" / "broken.ipynb").write_text("{}")
    before = copies(work)
    assert words in submit(url, "bad", path=path)["message"]
    assert hub.asked == [] and copies(work) == before


def test_parameter_that_is_no_value_is_told(url: str, hub: StandInHub, work: Path) -> None:
    before = copies(work)
    told = submit(url, "typed", parameters={"seed": "seven"})
    assert told["message"].startswith("The parameter seed is 'seven': write a number")
    assert hub.asked == [] and copies(work) == before


def test_workspace_that_cannot_be_written_is_told(url: str, hub: StandInHub, work: Path) -> None:
    (work / "runs").rename(work / "kept")
    (work / "runs").write_text("a file")
    try:
        told = submit(url, "full")
    finally:
        (work / "runs").unlink()
        (work / "kept").rename(work / "runs")
    assert told["message"].endswith("/work/runs cannot be written: File exists.")
    assert hub.asked == []


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        '{"cells": [1]}',
        '{"cells": [{"metadata": null}]}',
        notebook("x <- 1"),
        notebook(tags=["other"]),
        notebook("x = 1e999\ny = b'z'\nz = {1: 2}"),
    ],
)
def test_other_cells_have_no_parameters(tmp_path: Path, text: str) -> None:
    (tmp_path / "it.ipynb").write_text(text)
    assert finish.parameters(tmp_path / "it.ipynb") == {}


def test_without_a_workspace_there_is_nothing(stand_in: StandInHub, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    with lab_server(files, stand_in.environment(), program="jupyter_server") as url:
        answer = requests.post(f"{url}/gpuspawner/runs/quote", json={}, timeout=120)
        assert answer.status_code == 404
