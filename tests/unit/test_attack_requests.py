"""The requests that the attacks send. Nothing is started."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from gpuspawner.ledger.refills import Recurrence
from tests.support.attack_requests import RIGHT


@pytest.mark.parametrize("door", ["POST refills", "POST api/refills"])
def test_no_refill_that_an_attack_makes_comes_while_the_tests_run(door: str) -> None:
    """One that came would change accounts, and the attacks compare them."""
    sent = RIGHT[door].sent
    assert isinstance(sent, dict)
    now = datetime.now(timezone.utc)
    # The form has no field for the beginning: its rules begin now.
    begins = now if door == "POST refills" else datetime.fromisoformat(sent["from"][:-1] + "+00:00")
    first = Recurrence.parse(sent["rule"], "UTC", begins).next(now)
    assert first is not None
    assert first > now + timedelta(days=30)
