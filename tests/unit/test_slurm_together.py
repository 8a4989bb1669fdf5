"""What many ask for at once. Real: the threads. Stand-in: Slurm, which only writes down."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuspawner.core.errors import SlurmUnavailable
from gpuspawner.slurm.programs import Together
from tests.support.processes import wait_for


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


def all_at_once(told: Told, together: Together[int, int]) -> list[int | BaseException]:
    """One call runs, nine more are asked for meanwhile: what became of each."""
    with ThreadPoolExecutor(10) as threads:
        first = threads.submit(together.tell, 1)
        wait_for(lambda: told.calls, "the first call")
        others = [threads.submit(together.tell, number) for number in range(2, 11)]
        wait_for(lambda: len(together._next.wanted) == 9, "the others to have asked")
        told.go_on.set()
        return [each.exception(60) or each.result() for each in (first, *others)]


def test_those_who_ask_meanwhile_share_a_call() -> None:
    told = Told()
    assert all_at_once(told, Together(told)) == [1] + [9] * 9
    assert told.calls == [[1], list(range(2, 11))]


def test_everybody_hears_that_nobody_answered_and_may_try_again() -> None:
    away = SlurmUnavailable(why="it is away")
    told = Told(away)
    together = Together(told)
    assert all_at_once(told, together) == [away] * 10
    with pytest.raises(SlurmUnavailable):
        together.tell(2)
    assert told.calls[2] == [2], "only what is asked for now"
