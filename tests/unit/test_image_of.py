"""Which image the service says that a ticket's server needs. Real: the catalog's file."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.catalog.loader import WatchedCatalog
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.queue.models import Ticket
from gpuspawner.service.image_prefetch import image_of

CATALOG = """
environments:
  - {slug: lab, display_name: Lab, image: "lab:1"}
  - slug: torch
    display_name: Torch
    image: "torch:1"
    profile_options:
      version:
        display_name: Version
        choices:
          old: {display_name: Old, image: "torch:0"}
          new: {display_name: New}
"""


@pytest.fixture
def catalog(tmp_path: Path) -> WatchedCatalog:
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    return WatchedCatalog(tmp_path / "catalog.yaml")


def ticket(environment: str, **options: Any) -> Ticket:
    return Ticket(
        id="t1",
        server=ServerRef("ann"),
        request=Request(devices=1, environment=environment),
        options=options,
        created_at=datetime(2026, 3, 2, tzinfo=timezone.utc),
    )


def test_the_image_of_an_environment_or_a_members_own(catalog: WatchedCatalog) -> None:
    assert image_of(catalog, ticket("lab")) == "lab:1"
    assert image_of(catalog, ticket("lab", own_image="mine:1")) == "mine:1"


def test_nobody_guesses(catalog: WatchedCatalog, tmp_path: Path) -> None:
    assert image_of(catalog, ticket("torch")) == "", "it is one of two"
    assert image_of(catalog, ticket("gone")) == ""
    assert image_of(WatchedCatalog(tmp_path / "none.yaml"), ticket("lab")) == ""
