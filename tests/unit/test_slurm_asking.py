"""One question for many threads. Real: threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuspawner.slurm.programs import Asker


def test_threads_wait_for_one_question() -> None:
    """Whoever asks while it is being asked gets the same answer, or leaves after a while."""
    answers, go_on = [], threading.Event()

    def ask() -> None:
        go_on.wait(60)
        answers.append(len(answers))

    asker = Asker(ask)
    assert not asker.wait(lambda: True, 0.01), "it goes on"
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(asker.wait, lambda: not answers, 60.0) for _ in range(8)]
        assert not any(each.done() for each in waiting) and asker.seconds > 0
        go_on.set()
        assert all(each.result(timeout=60) for each in waiting)
    assert answers == [0] and asker.seconds == 0


def test_a_mistake_in_it_is_not_the_last_question(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def ask() -> None:
        asked.append(1)
        raise ValueError("a mistake")

    asker = Asker(ask)
    assert asker.wait(lambda: True, 60.0) and asker.wait(lambda: True, 60.0)
    assert asker.wait(lambda: False, 60.0), "not due"
    assert len(asked) == 2 and "a mistake" in caplog.text


def test_a_thread_that_cannot_be_started_is_not_the_last_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine may have no room for one more just now."""
    asked = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    asker = Asker(lambda: asked.append(1))
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            asker.wait(lambda: True, 60.0)
    assert asker.wait(lambda: True, 5.0) and asked == [1]
