"""Links of the audit chain, as they are in databases."""

from __future__ import annotations

from datetime import datetime, timezone

from gpuspawner.db.hash_chain import link_transfers, transfer_facts
from gpuspawner.ledger.models import Posting, Transfer, TransferKind


def grant(microsecond: int, lease_id: str | None) -> Transfer:
    return Transfer(
        id="t1",
        key="grant:it's",
        kind=TransferKind.GRANT,
        at=datetime(2026, 11, 1, 12, 0, 0, microsecond, tzinfo=timezone.utc),
        actor="ädmin",
        reason='for "Anna"\n\\',
        postings=(Posting("system:grants", -5), Posting("member:anna", 5)),
        lease_id=lease_id,
    )


def test_links_are_what_earlier_code_wrote() -> None:
    """Else every ledger would be reported as changed by hand."""
    first = link_transfers(None, transfer_facts([grant(0, None)]))
    assert first == "b4dde27b80e0ab025b86a8a26c9fe968e9c453d8989fa3671935dc7a52c7d351"
    both = link_transfers("a" * 64, transfer_facts([grant(0, None), grant(1200, "l1")]))
    assert both == "b58ededa499936039492aeda891ec3b14d6a2cec7ec4691d235e14635cfbb919"
