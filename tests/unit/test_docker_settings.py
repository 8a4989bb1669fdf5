"""What DockerSpawner's settings mean with ours. Real: JupyterHub's and our own classes."""

from __future__ import annotations

from typing import Any

import pytest
from traitlets.config import Config

from gpuspawner.cli.hub import open_hub


def spawner_with(**settings: Any) -> Any:
    """A spawner of a hub that is configured and not started."""
    config = Config()
    config.JupyterHub.spawner_class = "gpuspawner.spawners.docker.GPUDockerSpawner"
    config.DockerSpawner.update(settings)
    return open_hub(config).spawner


@pytest.mark.parametrize("name", ["allowed_images", "image_whitelist"])
def test_a_list_of_images_makes_an_own_form(name: str) -> None:
    spawner = spawner_with(**{name: {"plain": "lab/plain", "other": "lab/other"}})
    assert spawner.shows_own_form() and spawner.takes_foreign_options()
    assert 'value="other"' in spawner.options_form


@pytest.mark.parametrize(
    ("settings", "sent", "kept"),
    [
        ({}, {"Memory": 0}, {}),
        ({"mem_limit": 0}, {"Memory": 0}, {"Memory": 0}),
        ({"mem_limit": lambda spawner: 0}, {"Memory": 0}, {"Memory": 0}),
        ({"mem_limit": "1G"}, {"Memory": 2**30}, {"Memory": 2**30}),
        ({"mem_limit": 0, "extra_host_config": {"mem_limit": 7}}, {"Memory": 7}, {"Memory": 7}),
        (
            {"extra_host_config": {"pids_limit": 0, "oom_score_adj": 0, "mem_limit": 0}},
            {"Memory": 0},
            {"PidsLimit": 0, "OomScoreAdj": 0, "Memory": 0},
        ),
        ({"extra_host_config": {"privileged": False, "cpu_shares": 0}}, {}, {}),
    ],
)
def test_a_zero_that_the_admin_wrote_is_kept(
    settings: dict[str, Any], sent: dict[str, Any], kept: dict[str, Any]
) -> None:
    assert spawner_with(**settings)._with_own_zeros(sent) == kept
