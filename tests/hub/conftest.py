"""What several files share beside their hubs."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.engine import PrivateEngine
    from tests.support.gate import Gate


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this file's tests, for their hub."""
    return tmp_path_factory.mktemp(Path(request.node.name).stem)


@pytest.fixture(scope="module")
def silent_registry() -> Iterator[int]:
    """The port of a registry that takes every call and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def gate(engine: PrivateEngine) -> Iterator[Gate]:
    """Between a hub and the engine."""
    from tests.support.gate import Gate

    with Gate(engine.url) as gate:
        yield gate


@pytest.fixture
def member(request: pytest.FixtureRequest) -> str:
    """A member whose account no other test has touched."""
    name = request.node.name.removeprefix("test_")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")
