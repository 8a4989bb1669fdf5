"""What tests start and send. Real: processes that choose ports at the same time."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timedelta, timezone

import pytest

from gpuspawner.ledger.refills import Recurrence
from tests.support import processes
from tests.support.attack_requests import RIGHT
from tests.support.processes import REPO


@pytest.mark.parametrize("door", ["POST refills", "POST api/refills"])
def test_attack_refills_are_not_due_within_a_month(door: str) -> None:
    """One that came would change accounts, and the attacks compare them."""
    sent = RIGHT[door].sent
    assert isinstance(sent, dict)
    now = datetime.now(timezone.utc)
    # The form has no field for the beginning: its rules begin now.
    begins = now if door == "POST refills" else datetime.fromisoformat(sent["from"][:-1] + "+00:00")
    first = Recurrence.parse(sent["rule"], "UTC", begins).next(now)
    assert first is not None
    assert first > now + timedelta(days=30)


# Ports of hubs and services.


TAKE = "from tests.support.processes import free_port; print(free_port(), flush=True); input()"


@pytest.mark.usefixtures("processes")
def test_port_reserved_by_another_run_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
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
        monkeypatch.setattr("random.choice", lambda ports: next(choices))
        assert processes.free_port() == free
        other.communicate("\n")
