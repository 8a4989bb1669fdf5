"""What a sweep costs at most. Pure."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.runs.models import FollowedRun, Run, Work
from gpuspawner.runs.sweeps import Sweep
from tests.support.leases import lease_of

NOW = datetime(2026, 11, 28, tzinfo=timezone.utc)


def run(number: int, lease: Lease | None = None, outcome: str = "") -> FollowedRun:
    run_id = f"train-1-{number:03}"
    made = Run(id=run_id, user="ada", title="", work=Work(), created_at=NOW, outcome=outcome)
    return FollowedRun(made, lease)


def lease(rate: int, seconds: int | None, **fields: object) -> Lease:
    return lease_of("ada", rate=rate, seconds=seconds, state=LeaseState.RUNNING, **fields)


@pytest.mark.parametrize(
    ("runs", "rate", "seconds", "most"),
    [
        ([run(1), run(2)], 60, 7200, 17 + 240),
        ([run(1), run(2)], 0, None, 17),
        ([run(1), run(2)], 60, None, None),
        ([run(1), run(2)], None, None, None),
        ([run(1, outcome="done"), run(2, outcome="failed")], None, None, 17),
        ([run(1, lease(30, 3600, charged=10, extended=1800))], 60, 7200, 17 + 45 - 10),
        ([run(1, lease(30, None))], 60, 7200, None),
        ([run(1, lease(0, None))], 60, 7200, 17),
    ],
)
def test_sweep_costs_what_it_was_charged_and_what_its_open_runs_may_take(
    runs: list[FollowedRun], rate: int | None, seconds: int | None, most: int | None
) -> None:
    assert Sweep("train-1", tuple(runs), charged=17).most(rate, seconds) == most


def test_ended_lease_of_a_run_that_waits_again_is_only_what_it_was_charged() -> None:
    over = lease_of("ada", rate=30, seconds=3600, state=LeaseState.ENDED, charged=17)
    assert Sweep("train-1", (run(1, over),), charged=17).most(60, 3600) == 17 + 60
