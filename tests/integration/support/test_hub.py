"""The tests' hub is seen to have started, whatever its log says. Real: the hub and its proxy."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.hub import RUNS, HubProcess


def test_hub_with_a_quiet_log_is_seen_to_run(hub_factory: Callable[..., HubProcess]) -> None:
    hub = hub_factory('c.JupyterHub.log_level = "ERROR"\n')
    assert RUNS.decode() not in hub.log_text()
    assert hub.api("GET", "users").ok
