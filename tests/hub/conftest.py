"""Hubs that files share. Real: each of them, as its configuration says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.engine import PrivateEngine
from tests.support.hub_groups import group_of
from tests.support.shared_hubs import (
    CONFIGS,
    GPU_CONFIGS,
    SharedGPUHub,
    SharedHub,
    SharedHubs,
)


@pytest.fixture(scope="session")
def shared_hubs() -> Iterator[SharedHubs]:
    hubs = SharedHubs()
    yield hubs
    hubs.stop()


@pytest.fixture(scope="module")
def shared_hub(
    request: pytest.FixtureRequest,
    shared_hubs: SharedHubs,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SharedHub]:
    """The hub of this file's group, as new; who asks for it asks for ``hubs`` as well."""
    group = group_of(request.path)
    folder = tmp_path_factory.mktemp(group) / "hub"
    yield shared_hubs.take(group, lambda: SharedHub(folder, CONFIGS[group]))
    shared_hubs.give_back(group, last=_is_last(request))


@pytest.fixture(scope="module")
def shared_gpu_hub(
    request: pytest.FixtureRequest,
    shared_hubs: SharedHubs,
    engine: PrivateEngine,
    images: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SharedGPUHub]:
    """The same with containers."""
    group = group_of(request.path)
    folder = tmp_path_factory.mktemp(group) / "hub"
    make = partial(SharedGPUHub, folder, engine, *GPU_CONFIGS[group])
    yield shared_hubs.take(group, make)
    shared_hubs.give_back(group, last=_is_last(request))


def _is_last(request: pytest.FixtureRequest) -> bool:
    """Return True if none of the files that follow shares the hub of this one."""
    items = request.session.items
    place = max(number for number, item in enumerate(items) if item.path == request.path)
    return all(group_of(item.path) != group_of(request.path) for item in items[place + 1 :])
