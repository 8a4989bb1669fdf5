"""``gpuspawner simulate``: next month's rules on last month's sessions."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..broker import Broker
from ..broker.line import kind_of
from ..errors import InvalidRequest
from ..pool import leasable
from ..simulation import (
    ANY,
    Figures,
    Job,
    Player,
    TraceError,
    figures,
    policies,
    read_trace,
    replay,
)
from .config import Settings
from .output import count, note, show, table

HEADERS = ("POLICY", "MEAN", "P50", "P95", "LONGEST", "WORST GROUP", "SLOWDOWN", "USED", "FAIRNESS")


def simulate(arguments: argparse.Namespace, settings: Settings) -> int:
    """Play sessions of the past under the hub's own rules, and under others beside them."""
    names = _names(arguments.policy)
    if arguments.trace:
        jobs, devices = _of_trace(arguments.trace, arguments.gpus, settings)
    else:
        jobs, devices = _of_store(settings.open_broker(), arguments.days, arguments.gpus)
    found: dict[str, tuple[Figures, int]] = {}
    for name in names:
        player = _ours(settings, devices) if name == OURS else policies.make(name, jobs)
        replayed = replay(jobs, devices, player, policies.wakes(name))
        found[name] = figures(replayed), replayed.refused
    value = {
        "devices": dict(devices),
        "jobs": len(jobs),
        "policies": {
            name: {**asdict(some), "refused": refused} for name, (some, refused) in found.items()
        },
    }
    text = table(HEADERS, [_row(name, some) for name, (some, _) in found.items()], HEADERS[1:])
    refused = max((number for _, number in found.values()), default=0)
    about = f"{count(len(jobs), 'session')} on {count(sum(devices.values()), 'GPU')}"
    about += f", {refused} of them wider than that" if refused else ""
    show(arguments.json, value, f"{text}\n\nWaits in hours; {about}.")
    return 0


OURS = "gpuspawner"
"""The hub's own scheduler, with the settings of its configuration."""


def _ours(settings: Settings, devices: Mapping[str, int]) -> Player:
    scheduler = settings.scheduler()
    scheduler.set_capacity(devices)
    return scheduler


def _names(chosen: Sequence[str] | None) -> list[str]:
    names = [OURS, *policies.NAMES]
    if unknown := [name for name in chosen or () if name not in names]:
        sentence = f"There is no policy {unknown[0]!r}; there are {', '.join(names)}."
        raise InvalidRequest(sentence, field="policy")
    return list(chosen or names)


def _of_trace(
    path: str, gpus: int | None, settings: Settings
) -> tuple[Sequence[Job], Mapping[str, int]]:
    """The jobs of a CSV file, on GPUs that are all alike."""
    try:
        jobs = read_trace(Path(path))
    except TraceError as error:
        raise InvalidRequest(str(error), field="trace") from None
    return jobs, {ANY: gpus or max(1, _devices(settings.open_broker()).total())}


def _of_store(
    broker: Broker, days: int, gpus: int | None
) -> tuple[Sequence[Job], Mapping[str, int]]:
    """The site's own sessions, on its own devices or on so many that are all alike."""
    devices: Mapping[str, int] = {ANY: gpus} if gpus else _devices(broker)
    jobs = []
    for asked_at, lease in broker.asked_for(broker.clock() - timedelta(days=days)):
        started, ended = lease.started_at or lease.granted_at, lease.ended_at or lease.granted_at
        held = {f"{device.model}/{device.memory_bytes}" for device in lease.devices}
        kinds = frozenset({ANY}) if gpus else frozenset(held & devices.keys())
        if not kinds:
            continue  # devices that are not there any more
        jobs.append(
            Job(
                asked_at=asked_at.timestamp(),
                duration=max(0.0, (ended - started).total_seconds()),
                devices=len(lease.devices),
                member=lease.server.user,
                group=lease.group,
                kinds=kinds,
                seconds=float(lease.seconds) if lease.seconds is not None else None,
            )
        )
    if not jobs:
        raise InvalidRequest(
            f"No session with GPUs ended in the last {days} days: there is nothing to play. "
            "Take more --days, or a --trace.",
            field="days",
        )
    note(f"The sessions of the last {days} days, as they were asked for.")
    return jobs, devices


def _devices(broker: Broker) -> Counter[str]:
    return Counter(kind_of(d) for d in broker.look().devices if leasable(d) is None)


def _row(name: str, some: Figures) -> tuple[Any, ...]:
    hours = (some.mean, some.p50, some.p95, some.longest, some.worst_group)
    numbers = [f"{value:.2f}" for value in hours]
    ratios = [f"{some.slowdown:.1f}", f"{some.utilisation:.0%}", f"{some.fairness:.3f}"]
    return (name, *numbers, *ratios)
