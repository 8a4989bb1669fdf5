"""Makes the process that imports this halt at the steps of a run; see ``fault_points``."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker

from gpuspawner.engines.base import LABEL_SERVER
from gpuspawner.engines.docker import DockerEngine
from gpuspawner.leases.models import RUN_PREFIX
from gpuspawner.leases.service import LeaseService
from gpuspawner.queue.service import QueueService
from gpuspawner.runs.service import RunService
from gpuspawner.spawners.runs import RunLauncher
from tests.support.fault_points import FaultPoint

FOLDER = ""
"""Where the test names the moment; set by the configuration of the hub."""

GRACE_SECONDS = 3.0
"""Nothing younger is ended only because the Hub does not list it; a minute in production."""

_created: set[str] = set()
"""The containers of runs that this process has created."""


def _creates_run(given: dict[str, Any]) -> bool:
    labels = given["kwargs"].get("labels") or {}
    return str(labels.get(LABEL_SERVER, "")).startswith(RUN_PREFIX)


def _starts_run(given: dict[str, Any]) -> bool:
    return given["args"][1] in _created


def _always(_: dict[str, Any]) -> bool:
    return True


Concerns = Callable[[dict[str, Any]], bool]
"""Returns True for the arguments of a call that is a step of a run."""

STEPS: tuple[tuple[str, type, str, Concerns], ...] = (
    ("submit", RunLauncher, "submit", _always),
    ("save", RunService, "submit_all", _always),
    ("grant", QueueService, "ask", _always),
    ("create", docker.APIClient, "create_container", _creates_run),
    ("start", docker.APIClient, "start", _starts_run),
    ("confirm", LeaseService, "confirm", _always),
    ("end", RunService, "note_exit", _always),
    ("release", LeaseService, "release", _always),
    ("removal", DockerEngine, "end", _always),
    ("settle", RunService, "_settle_one", _always),
)


def _reach(moment: str) -> None:
    """Halt if the test waits for this moment, until it lets go."""
    point = FaultPoint(Path(FOLDER))
    if FOLDER and point.take(moment):
        while point.is_reached:
            time.sleep(0.01)


def _halting(step: str, work: Callable[..., Any], concerns: Concerns) -> Callable[..., Any]:
    @functools.wraps(work)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        _reach(f"before {step}")
        result = await work(*args, **kwargs)
        _reach(f"after {step}")
        return result

    @functools.wraps(work)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not concerns({"args": args, "kwargs": kwargs}):
            return work(*args, **kwargs)
        _reach(f"before {step}")
        result = work(*args, **kwargs)
        if step == "create":
            _created.add(result["Id"])
        _reach(f"after {step}")
        return result

    return awaited if inspect.iscoroutinefunction(work) else called


def _shorten_grace() -> None:
    reconcile = LeaseService.reconcile

    def soon(services: LeaseService, *args: Any, grace_seconds: float = 0.0) -> Any:
        return reconcile(services, *args, grace_seconds=min(grace_seconds, GRACE_SECONDS))

    owner: Any = LeaseService
    owner.reconcile = soon


for _step, _owner, _method, _concerns in STEPS:
    setattr(_owner, _method, _halting(_step, getattr(_owner, _method), _concerns))
_shorten_grace()
