"""Leases that no store has."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from gpuspawner.leases.models import Lease, ServerRef

GRANTED = datetime(2026, 3, 1, tzinfo=timezone.utc)


def lease_of(user: str, **fields: Any) -> Lease:
    """One without devices that costs nothing, but for what ``fields`` say."""
    made: dict[str, Any] = {
        "id": "lease-1",
        "server": ServerRef(user),
        "account": f"member:{user}",
        "environment": "",
        "devices": (),
        "rate": 0,
        "hold": 0,
        "granted_at": GRANTED,
    }
    return Lease(**(made | fields))
