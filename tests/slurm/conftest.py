"""One cluster for all tests of a process: it takes ten seconds to come up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.slurm_cluster import SlurmCluster


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[SlurmCluster]:
    """A Slurm with two nodes that have the quick images; as the last test left it."""
    from tests.support.slurm_cluster import SlurmCluster

    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The same, with every part running and no job or container before and after the test."""
    yield shared_cluster
    shared_cluster.clean()
