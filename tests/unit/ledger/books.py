"""Values of the ledger that several tests use: Anna's lease, and moments."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState, ServerRef
from gpuspawner.ledger.models import member_account
from tests.support.leases import lease_of

T0 = datetime(2025, 3, 1, 12, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
ANNA = member_account("anna")


def lease(**changes: Any) -> Lease:
    """Anna's running lease at 4 credits an hour, with these changes."""
    running: dict[str, Any] = {
        "server": ServerRef("anna", "lab"),
        "rate": 4 * MICRO,
        "hold": MICRO,
        "granted_at": T0,
        "started_at": T0,
        "state": LeaseState.RUNNING,
    }
    return lease_of("anna", **running | changes)
