"""Real: Slurm with its database and two nodes, Linux users, the commands of the documentation.
Stand-in: the GPUs.

A node is reserved for the members of a group, as the page about reserved GPUs says.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.doc_blocks import DOCS, blocks_in
from tests.support.slurm_cluster import SlurmCluster
from tests.support.steps import lines_of

PAGE = DOCS / "how-to/admins/reserve-gpus.md"
NODES, USERS, ACCOUNTS = "Nodes=gpu[1-2]", "Users=ada,bob", "Accounts=vision-lab"


def commands() -> list[list[str]]:
    """The words of the page's commands: one reserves nodes, the other makes that last longer."""
    lines = [line for block in blocks_in(PAGE) for line, _ in lines_of(block)]
    found = [shlex.split(line) for line in lines if line.startswith("scontrol ")]
    create, update = found
    assert {NODES, USERS} <= {*create} and update[1] == "update"
    assert f"`{ACCOUNTS}` in place of `Users=`" in PAGE.read_text(encoding="utf-8")
    return found


@contextmanager
def reserved(cluster: SlurmCluster, who: str) -> Iterator[None]:
    """The page's reservation of the node with one GPU, for these users or accounts."""
    create, update = commands()
    typed = {NODES: f"Nodes={cluster.nodes[1].name}", USERS: who}
    cluster.run(*(typed.get(word, word) for word in create))
    try:
        cluster.run(*update)
        yield
    finally:
        cluster.clean()  # a reservation with jobs cannot be deleted
        cluster.run("scontrol", "delete", "ReservationName=vision")


def node_of(cluster: SlurmCluster, job: int) -> str:
    """The node on which a job runs, once it does."""
    cluster.wait_state(job, "RUNNING")
    return cluster.run("squeue", "-h", "-j", str(job), "-o", "%N").strip()


def cancel(cluster: SlurmCluster, *jobs: int) -> None:
    """End jobs, and wait until nodes have cleaned up after them: their GPUs are free then."""
    cluster.run("scancel", *map(str, jobs))
    for job in jobs:
        cluster.wait_state(job, "CANCELLED")


@pytest.mark.parametrize("who", ["Users=gsada", ACCOUNTS])
def test_members_of_the_group_get_the_reserved_node_and_others_do_not(
    cluster: SlurmCluster, who: str
) -> None:
    ada, cleo = cluster.user("gsada", "vision-lab"), cluster.user("gscleo")
    free, kept = (node.name for node in cluster.nodes)
    before = cluster.hold(cleo, "--gres=gpu:h100:1")
    assert node_of(cluster, before) == kept

    with reserved(cluster, who):
        assert cluster.state(before) == "RUNNING"
        assert "EndTime=2036-01-01" in cluster.run("scontrol", "show", "reservation", "vision")
        cluster.run("scancel", str(before))

        # Others get the open GPUs, and no more.
        theirs = [cluster.hold(cleo, "--gres=gpu:1") for _ in range(2)]
        assert [node_of(cluster, job) for job in theirs] == [free, free]
        waiting = [cluster.hold(cleo, "--gres=gpu:1"), cluster.hold(cleo, "--gres=gpu:h100:1")]

        # A later job of the group names neither node nor reservation, and goes before them.
        for _ in range(2):
            ours = cluster.hold(ada, "--gres=gpu:1")
            assert node_of(cluster, ours) == kept
            assert [cluster.state(job) for job in waiting] == ["PENDING", "PENDING"]
            cancel(cluster, ours)

        # Although open GPUs are free, too.
        cancel(cluster, *theirs, *waiting)
        assert node_of(cluster, cluster.hold(ada, "--gres=gpu:1")) == kept

    assert node_of(cluster, cluster.hold(cleo, "--gres=gpu:h100:1")) == kept


def test_nodes_in_use_are_not_reserved_without_the_flag_that_the_page_names(
    cluster: SlurmCluster,
) -> None:
    cleo = cluster.user("gscleo")
    node = cluster.nodes[1].name
    cluster.wait_state(cluster.hold(cleo, "--gres=gpu:h100:1"), "RUNNING")
    create, _ = commands()
    typed = {NODES: f"Nodes={node}", USERS: f"Users={cleo}"}
    words = [typed.get(word, word).replace(",IGNORE_JOBS", "") for word in create]
    assert words[-1] == "Flags=MAGNETIC"
    assert "Requested nodes are busy" in cluster.run(*words, check=False)
