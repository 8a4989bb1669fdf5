"""What the tests of programs in the images share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.lab_server import StandInHub, stand_in_hub


@pytest.fixture(scope="module")
def stand_in(processes: None) -> Iterator[StandInHub]:
    """Answers in the hub's place what the test says."""
    with stand_in_hub() as hub:
        yield hub
