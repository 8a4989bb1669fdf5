"""How long a look at a server on a node may take. Real: the spawner. Stand-in: its node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuspawner.slurm.images import QUICK
from gpuspawner.spawners.slurm import GPUSlurmSpawner


class OnNode(GPUSlurmSpawner):
    """A spawner whose server runs on a node, with clients that only know their time-out."""

    node = cast(Any, SimpleNamespace(name="node1"))

    def connect(self, timeout: float = 60) -> Any:
        return SimpleNamespace(timeout=timeout)


@pytest.mark.parametrize(
    ("pending", "seconds"),
    [("_spawn_pending", 60), ("_stop_pending", 60), ("_check_pending", QUICK), ("", QUICK)],
)
def test_a_look_at_a_node_gives_up_soon(pending: str, seconds: float) -> None:
    """A start may pull and a stop may take its time; a poll may not hold up others."""
    user = SimpleNamespace(
        name="ada", escaped_name="ada", settings={}, groups=[], url="/", admin=False
    )
    spawner = OnNode(user=user)
    if pending:
        setattr(spawner, pending, True)
    assert spawner.client.timeout == seconds
    assert spawner.client is spawner.client, "one for all servers on the node"
