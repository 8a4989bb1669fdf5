"""Slurm's programs as they are called. Real: processes and threads; the programs are scripts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuspawner.core.errors import SlurmRefused, SlurmUnavailable
from gpuspawner.slurm.programs import CallBatcher, SingleFlight, Slurm
from tests.support.processes import wait_for


def program(folder: Path, text: str) -> Slurm:
    file = folder / "squeue"
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
    return Slurm(folder=str(folder), conf="/etc/our.conf", seconds=60)


def test_program_arguments_are_verbatim_and_environment_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = program(tmp_path, 'for w; do echo "<$w>"; done; cat')
    nasty = ("$(touch x)", "a b", "; rm -rf /", "`id`", "'\"")
    said = slurm.run("squeue", *nasty, script="exec sleep 1\n")
    assert said == "".join(f"<{word}>\n" for word in nasty) + "exec sleep 1\n"

    monkeypatch.setenv("SBATCH_ACCOUNT", "another")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    settings = program(tmp_path, "env").run("squeue").splitlines()
    assert "SLURM_CONF=/etc/our.conf" in settings
    assert not any(line.startswith("SBATCH_") for line in settings)


REFUSED = (
    "sbatch: error: Batch job submission failed: Requested node configuration is not available"
)
NO_CONTROLLER = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
NO_DATABASE = "sacctmgr: error: Problem talking to the database: Connection refused"


@pytest.mark.parametrize(
    ("text", "error", "why"),
    [
        (NO_CONTROLLER, SlurmUnavailable, "contact"),
        (NO_DATABASE, SlurmUnavailable, "database"),
        (REFUSED, SlurmRefused, r"^Slurm rejected the request: Requested node configuration"),
    ],
)
def test_program_failure_is_reported_as_unavailable_or_refused(
    tmp_path: Path, text: str, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        program(tmp_path, f"echo '{text}' >&2; exit 1").run("squeue")


def test_missing_or_hanging_program_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(SlurmUnavailable, match="scontrol is not on this machine"):
        program(tmp_path, "").run("scontrol")
    with pytest.raises(SlurmUnavailable, match=r"did not respond within 0\.2 seconds"):
        Slurm(folder=program(tmp_path, "exec sleep 60").folder, seconds=0.2).run("squeue")


# One question for many threads.


def test_concurrent_callers_share_one_query() -> None:
    """Whoever asks while it is being asked gets the same answer, or leaves after a while."""
    answers: list[int] = []
    go_on = threading.Event()

    def ask() -> None:
        go_on.wait(60)
        answers.append(len(answers))

    asker = SingleFlight(ask)
    assert not asker.wait(lambda: True, 0.01), "it goes on"
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(asker.wait, lambda: not answers, 60.0) for _ in range(8)]
        assert not any(each.done() for each in waiting) and asker.seconds > 0
        go_on.set()
        assert all(each.result(timeout=60) for each in waiting)
    assert answers == [0] and asker.seconds == 0


def test_failed_query_is_retried_by_the_next_caller(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def ask() -> None:
        asked.append(1)
        raise ValueError("a mistake")

    asker = SingleFlight(ask)
    assert asker.wait(lambda: True, 60.0) and asker.wait(lambda: True, 60.0)
    assert asker.wait(lambda: False, 60.0), "not due"
    assert len(asked) == 2 and "a mistake" in caplog.text

    # A machine may have no room for one more just now.
    asked = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    asker = SingleFlight(lambda: asked.append(1))
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            asker.wait(lambda: True, 60.0)
    assert asker.wait(lambda: True, 60.0) and asked == [1]


# What many ask for at once: the stand-in only writes down.


class Told:
    """Slurm, which takes its time over the first call."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[list[int]] = []
        self.go_on = threading.Event()
        self._error = error

    def __call__(self, wanted: list[int]) -> int:
        self.calls.append(sorted(wanted))
        if len(self.calls) == 1:
            self.go_on.wait(60)
        if self._error is not None:
            raise self._error
        return len(wanted)


def all_at_once(told: Told, together: CallBatcher[int, int]) -> list[int | BaseException]:
    """One call runs, nine more are asked for meanwhile: what became of each."""
    with ThreadPoolExecutor(10) as threads:
        first = threads.submit(together.tell, 1)
        wait_for(lambda: told.calls, "the first call")
        others = [threads.submit(together.tell, number) for number in range(2, 11)]
        wait_for(lambda: len(together._next.wanted) == 9, "the others to have asked")
        told.go_on.set()
        return [each.exception(60) or each.result() for each in (first, *others)]


def test_requests_during_a_call_share_the_next_one() -> None:
    told = Told()
    assert all_at_once(told, CallBatcher(told)) == [1] + [9] * 9
    assert told.calls == [[1], list(range(2, 11))]


def test_failed_shared_call_is_reported_to_all_and_retryable() -> None:
    away = SlurmUnavailable(why="it is away")
    told = Told(away)
    together = CallBatcher(told)
    assert all_at_once(told, together) == [away] * 10
    with pytest.raises(SlurmUnavailable):
        together.tell(2)
    assert told.calls[2] == [2], "only what is asked for now"
