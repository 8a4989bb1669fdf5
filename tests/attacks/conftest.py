"""What members, thieves and strangers may not do, tried. Real: hub, proxy, service, Docker Engine,
containers, nginx; each attempt is refused, and counted in the summary of the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.support.attack_hub import AttackHub
from tests.support.attacks import Attempts
from tests.support.engine import PrivateEngine
from tests.support.processes import wait_for


@pytest.fixture(scope="module")
def hub(
    hubs: None, engine: PrivateEngine, images: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AttackHub]:
    """The attacked hub; it leaves nothing in the engine for whoever comes next."""
    with AttackHub(tmp_path_factory.mktemp("attacks") / "hub", engine) as hub:
        page = f"{hub.url}/services/gpu/static/gpu.css"
        wait_for(lambda: requests.get(page, timeout=60).ok, "the service's pages", timeout=60)
        hub.furnish()
        yield hub
    engine.clean()


@pytest.fixture
def attempt(request: pytest.FixtureRequest) -> Iterator[Attempts]:
    """Notes one attempt after the other; the test fails at its end if one succeeded."""
    attempts = Attempts(request.node)
    yield attempts
    attempts.close()
