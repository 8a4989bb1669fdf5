"""What a container's inspection says of a run's end. Real: everything, it is pure."""

from __future__ import annotations

from typing import Any

import pytest

from gpuspawner.engines.docker import sighting_of

STARTED = "2025-03-01T12:00:00.5Z"
ENDED = "2025-03-01T12:01:00.5Z"
NEVER = "0001-01-01T00:00:00Z"


def container(status: str, started: str, ended: str, code: int) -> dict[str, Any]:
    state = {"Status": status, "StartedAt": started, "FinishedAt": ended, "ExitCode": code}
    config = {"Labels": {"gpuspawner.lease": "1"}}
    return {"Id": "c", "Config": config, "State": state, "Created": STARTED}


@pytest.mark.parametrize(
    ("status", "started", "ended", "code", "told"),
    [
        ("exited", STARTED, ENDED, 0, 0),
        ("exited", STARTED, ENDED, 3, 3),
        ("removing", STARTED, ENDED, 137, 137),
        ("running", STARTED, NEVER, 0, None),
        ("created", NEVER, NEVER, 0, None),
        ("removing", NEVER, NEVER, 0, None),
        ("dead", NEVER, NEVER, 0, None),
    ],
)
def test_only_a_program_that_ran_has_an_exit_status(
    status: str, started: str, ended: str, code: int, told: int | None
) -> None:
    assert sighting_of(container(status, started, ended, code)).exit_code == told


def test_container_that_never_started_does_not_tell_of_an_exit_code() -> None:
    assert sighting_of(container("dead", NEVER, NEVER, 0)).detail == "it was never started"
