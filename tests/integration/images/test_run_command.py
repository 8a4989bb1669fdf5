"""`gpuspawner-run` and a hub that is away for a moment. Real: the command, HTTP; who answers in the
hub's place answers what the test says."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.lab import load_lab_module
from tests.support.lab_server import TOKEN, StandInHub, stand_in_hub

program = load_lab_module("gpuspawner_run")

RUN = {"id": "train-0a1b", "folder": "runs/x", "state": "waiting", "reason": ""}
AWAY = "The hub does not respond. Trying again for 2 minutes; nothing is submitted twice.\n"


class InTurn(dict[str, tuple[int, Any]]):
    """Answers to requests for one path in turn; the last one stays."""

    def __init__(self, last: str, *answers: tuple[int, Any]) -> None:
        super().__init__({last: answers[-1]})
        self._rest = list(answers)

    def get(self, key: str, default: Any = None) -> Any:
        """The next answer."""
        return self._rest.pop(0) if key in self and self._rest else super().get(key, default)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    with stand_in_hub() as hub:
        monkeypatch.setenv("JUPYTERHUB_API_URL", hub.url)
        monkeypatch.setenv("JUPYTERHUB_API_TOKEN", TOKEN)
        monkeypatch.setenv("GPUSPAWNER_WORKSPACE", str(tmp_path))
        monkeypatch.setattr(program, "PAUSE", 0.01)
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.mark.parametrize("status", [502, 503, 504])
def test_submission_is_repeated_with_its_key_until_the_hub_answers(
    hub: StandInHub, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    away = (status, {"message": "The GPU service is not responding."})
    hub.answers = InTurn("runs", away, away, (200, RUN))
    assert program.main(["true"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("train-0a1b is submitted.") and told.err == AWAY, "said once"
    first, *more = hub.sent("runs")
    assert first["key"] and more == [first, first]


def test_connection_that_is_refused_is_tried_again(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.answers = {"runs": (200, RUN)}
    monkeypatch.setenv("JUPYTERHUB_API_URL", "http://127.0.0.1:1/hub/api")  # nobody listens
    is_told = threading.Event()

    class Told:
        """Notices the line that says that the hub is away; then the hub is back."""

        def write(self, text: str) -> None:
            if "does not respond" in text and not is_told.is_set():
                is_told.set()
                monkeypatch.setenv("JUPYTERHUB_API_URL", hub.url)

        def flush(self) -> None:
            """Nothing is kept."""

    monkeypatch.setattr("sys.stderr", Told())
    assert program.main(["true"]) == 0
    assert is_told.is_set() and len(hub.sent("runs")) == 1


def test_request_without_a_key_is_sent_once(
    hub: StandInHub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.answers = {"train-0a1b": (503, {"message": "The GPU service is not responding."})}
    for words in (["stop", "train-0a1b"], ["wait", "train-0a1b"]):
        hub.asked.clear()
        assert program.main(words) == 1
        assert capsys.readouterr().err == "gpuspawner-run: The GPU service is not responding.\n"
        assert len(hub.asked) == 1


@pytest.mark.parametrize(
    ("status", "message"), [(500, "It broke."), (409, "Your balance does not cover a GPU.")]
)
def test_hub_that_answers_otherwise_is_asked_once(
    hub: StandInHub, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.answers = {"runs": (status, {"message": message})}
    assert program.main(["true"]) == 1
    assert capsys.readouterr().err == f"gpuspawner-run: {message}\n" and len(hub.asked) == 1


def test_hub_that_stays_away_is_given_up(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moments = itertools.count()  # a second passes whenever the program looks
    clock = SimpleNamespace(monotonic=lambda: next(moments), sleep=lambda seconds: None)
    monkeypatch.setattr(program, "time", clock)
    monkeypatch.setattr(program, "PATIENCE", 2.5)
    hub.answers = {"runs": (503, {"message": "The GPU service is not responding."})}
    assert program.main(["true"]) == 1
    assert capsys.readouterr().err.endswith("gpuspawner-run: The GPU service is not responding.\n")
    assert len({body["key"] for body in hub.sent("runs")}) == 1 and len(hub.asked) == 3


def test_amount_of_memory_is_sent_with_a_run(hub: StandInHub) -> None:
    hub.answers = InTurn("runs", (200, RUN))
    assert program.main(["true", "--gpus", "share", "--gpu-memory", "4"]) == 0
    (sent,) = hub.sent("runs")
    assert sent["options"] == {"gpus": "share", "gpu_memory": 4}
