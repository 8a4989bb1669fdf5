"""Hubs that files share. Real: each of them, as its configuration says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.hub_groups import group_of
from tests.support.shared_hubs import SharedHub, SharedHubs


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
    """The hub of this file's group, as new; who asks for it asks for ``hubs`` as well.

    It stops once none of the files that follow shares it.
    """
    group = group_of(request.path)
    yield shared_hubs.take(group, tmp_path_factory.mktemp(group) / "hub")
    items = request.session.items
    later = items[max(n for n, item in enumerate(items) if item.path == request.path) + 1 :]
    shared_hubs.give_back(group, last=all(group_of(item.path) != group for item in later))
