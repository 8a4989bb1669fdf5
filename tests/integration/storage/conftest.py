"""Services whose hub has shared folders, and members who have signed in."""

from __future__ import annotations

import pytest

from gpuspawner.services import Services
from tests.support.brokers import Make


@pytest.fixture
def services(make: Make) -> Services:
    made = make(folder_source="/srv/folders/{id}", folder_quota=1)
    for name in ("anna", "bert", "carl"):
        made.ledger.open_account(name)
    return made
