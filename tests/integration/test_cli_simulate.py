"""``gpuspawner simulate`` from a shell. Real: the command as a process, SQLite and PostgreSQL."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from gpuspawner.leases.models import ServerRef
from gpuspawner.queue import replay_policies
from gpuspawner.services import Broker
from tests.support.command import Command, grant

TRACE = "timestamp,duration,num_gpus,cluster\n" + "".join(
    f"2026-10-01 0{n}:00:00,{1800 * (n + 1)},1,{'ab'[n % 2]}\n" for n in range(6)
)


def test_a_trace_is_played_under_every_policy(cli: Command, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    printed = cli("simulate", "--trace", str(trace), "--gpus", "1").stdout
    names = [line.split()[0] for line in printed.splitlines()[1:7]]
    assert names == ["gpuspawner", *replay_policies.NAMES]
    assert "6 sessions on 1 GPU" in printed
    found = cli.json("simulate", "--trace", str(trace), "--gpus", "1", "--policy", "fifo")
    assert list(found["policies"]) == ["fifo"]
    # One after the other: 0.5 h, 1 h, ... asked for an hour apart.
    assert found["policies"]["fifo"]["longest"] == pytest.approx(3)


def test_the_sites_own_past(cli: Command, broker: Broker) -> None:
    now = datetime.now(timezone.utc)
    for hours, user in enumerate(("ada", "bob", "cleo"), start=1):
        start = now - timedelta(days=2, seconds=-hours)
        broker.clock = lambda at=start: at
        lease = grant(broker, ServerRef(user), devices=1, model="A100" if hours < 3 else None)
        broker.confirm(lease.id)
        end = start + timedelta(hours=hours)
        broker.clock = lambda at=end: at
        broker.release(lease.id, ended_at=end, reason="stopped")
    found = cli.json("simulate", "--policy", "gpuspawner")
    assert found["jobs"] == 3
    assert found["policies"]["gpuspawner"]["longest"] == 0
    crowded = cli.json("simulate", "--policy", "fifo", "--gpus", "1")
    assert crowded["policies"]["fifo"]["longest"] == pytest.approx(3, rel=0.01)


def test_bad_input_is_a_sentence(cli: Command, broker: Broker, tmp_path: Path) -> None:
    assert not broker.open_leases()  # the database is there
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE + "2026-10-01 07:00:00,soon,1,a\n")
    for arguments, sentence in (
        (["--trace", str(trace), "--gpus", "1"], "trace.csv, line 8: duration is 'soon'"),
        (["--trace", str(tmp_path / "none.csv"), "--gpus", "1"], "none.csv cannot be read"),
        (["--policy", "luck"], "There is no policy 'luck'; there are gpuspawner, fifo"),
        (["--days", "3"], "No session with GPUs ended in the last 3 days"),
    ):
        refused = cli("simulate", *arguments, code=1)
        assert sentence in refused.stderr
        assert "Traceback" not in refused.stderr
