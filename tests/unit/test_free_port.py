"""Ports for hubs and services of tests. Real: processes that choose one at the same time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import processes
from tests.support.processes import REPO

TAKE = "from tests.support.processes import free_port; print(free_port(), flush=True); input()"


@pytest.mark.usefixtures("processes")
def test_a_port_that_another_run_was_given_is_not_given_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though nobody listens on it yet."""
    command = [sys.executable, "-c", TAKE]
    with subprocess.Popen(
        command, cwd=REPO, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        taken = int(other.stdout.readline())
        free = processes.free_port()
        monkeypatch.setattr(processes, "_given", set())
        choices = iter([taken, taken, free])
        monkeypatch.setattr(processes.random, "choice", lambda ports: next(choices))
        assert processes.free_port() == free
        other.communicate("\n")
