"""What is said of runs whose programs failed."""

from __future__ import annotations

import pytest

from gpuspawner.leases.models import LeaseState
from gpuspawner.monitoring.resource_totals import ResourceTotals
from gpuspawner.runs.rules import RunEnd, end_of
from tests.support.leases import GRANTED, lease_of

GB = 2**30
ENDED = lease_of("ada", state=LeaseState.ENDED, ended_at=GRANTED, started_at=GRANTED)


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        (None, ""),
        (ResourceTotals(memory_peak_bytes=GB, memory_limit_bytes=GB), ""),
        (
            ResourceTotals(memory_kills=1),
            " The system ended a program in it because its memory was used up.",
        ),
        (
            ResourceTotals(memory_kills=2, memory_limit_bytes=2 * GB),
            " The system ended a program in it because its 2.0 GB of memory were used up.",
        ),
        (
            ResourceTotals(memory_kills=1, memory_peak_bytes=GB, memory_limit_bytes=2 * GB),
            " The system ended a program in it because its 2.0 GB of memory were used up; "
            "1.0 GB were measured before.",
        ),
    ],
)
def test_failed_run_says_that_its_memory_was_used_up(
    resources: ResourceTotals | None, said: str
) -> None:
    assert end_of(ENDED, 1, "MemoryError", resources) == RunEnd(
        "failed", f"Its program ended with exit status 1.{said} Its last line: MemoryError", 1
    )


def test_run_that_is_done_says_nothing_of_it() -> None:
    assert end_of(ENDED, 0, "", ResourceTotals(memory_kills=1)) == RunEnd("done", "", 0)
