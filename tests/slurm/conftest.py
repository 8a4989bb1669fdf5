"""One cluster for all tests of a process: it takes ten seconds to come up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import PATIENCE

if TYPE_CHECKING:
    from tests.support.node_sampler import NodeSampler
    from tests.support.slurm_books import Books
    from tests.support.slurm_cluster import SlurmCluster


@pytest.fixture(scope="session")
def shared_cluster(clusters: None) -> Iterator[SlurmCluster]:
    """A Slurm with two nodes that have the quick images; as the last test left it."""
    from tests.support.slurm_cluster import SlurmCluster

    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The same, with every part running and no job or container before and after the test."""
    yield shared_cluster
    shared_cluster.clean()


@pytest.fixture(scope="session")
def ann(shared_cluster: SlurmCluster) -> str:
    """A Linux user that Slurm knows. Creating one takes a second."""
    return shared_cluster.user("ann")


@pytest.fixture(scope="module")
def samplers(
    shared_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[NodeSampler]]:
    """One on each node, with the certificates of the node's engine, and with no GPU yet."""
    from tests.support.node_sampler import NodeSampler
    from tests.support.nvml import nvml_library as nvml

    folder = tmp_path_factory.mktemp("samplers")
    library = nvml.build_nvml_library(folder / "nvml")
    tls = str(shared_cluster.directory / "tls")
    with ExitStack() as stack:
        made = []
        for node in shared_cluster.nodes:
            url = f"https://{node.address}:9401"
            around = node.engine.network.around
            sampler = NodeSampler(folder / node.name, library, url, "--tls", tls, around=around)
            made.append(stack.enter_context(sampler))
        yield made


@pytest.fixture(scope="module")
def sampler_urls(shared_cluster: SlurmCluster, samplers: list[NodeSampler]) -> dict[str, str]:
    """Where each node's is, by the node's name."""
    return {node.name: s.url for node, s in zip(shared_cluster.nodes, samplers, strict=True)}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services of a test wait for Slurm on a busy machine, too, which would go on without."""
    monkeypatch.setattr("gpuspawner.slurm.scheduler.PATIENCE", 5.0 * PATIENCE)
    monkeypatch.setattr("gpuspawner.slurm.service.PATIENCE", 5.0 * PATIENCE)


@pytest.fixture
def books(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Books]:
    """A hub's books beside the cluster, that looked at its jobs once: what was before is not
    theirs."""
    from tests.support.slurm_books import Books

    books = Books(cluster, tmp_path)
    books.services.job_billing.debit_cluster()
    yield books
    books.services.store.close()
