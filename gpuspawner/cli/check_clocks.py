"""Whether the clocks of the nodes go like this machine's.

munge, and with it Slurm, refuses what a machine with another time says, and does not say by how
much it is another. A node's engine and its sampler tell the time without munge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone

import docker
from docker.errors import DockerException
from requests import RequestException

from ..engines.probe import Finding, Status
from ..slurm.cluster import Node
from ..slurm.telemetry import MOST_APART, seconds_ahead

REFUSED = 300.0
"""Seconds apart from which munge believes nothing."""

_FRACTION = re.compile(r"\.\d+")


def check_clock(node: Node, client: docker.APIClient | None) -> Finding | None:
    """How far a node's clock is from this machine's; None when nobody there tells. ``client`` is
    of the node's engine, if that answers."""
    name = f"clock {node.name}"
    told = [*_of_engine(client), *_of_sampler(node)]
    if not told:
        return None
    apart = max(told, key=abs)
    if abs(apart) <= MOST_APART:
        return Finding(name, Status.OK, f"It is within {MOST_APART:.0f} s of this machine's")
    text = f"Its clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} this machine's"
    if abs(apart) < REFUSED:
        text += f": at {REFUSED:.0f} s munge refuses what it says, and Slurm gives it up."
    else:
        text += ": munge refuses what it says, and Slurm gives it no jobs."
    remedy = (
        f"On {node.name}, and here: timedatectl. Let every machine keep its time by NTP: apt-get "
        "install systemd-timesyncd"
    )
    return Finding(name, Status.FAIL, text, remedy)


def _of_engine(client: docker.APIClient | None) -> Iterator[float]:
    """Seconds ahead; nothing when it does not say."""
    if client is None:
        return
    try:
        before = datetime.now(timezone.utc)
        said = _FRACTION.sub("", str(client.info()["SystemTime"]))
        here = before + (datetime.now(timezone.utc) - before) / 2
        there = datetime.fromisoformat(said.replace("Z", "+00:00"))
        yield (there - here).total_seconds()
    except (DockerException, RequestException, KeyError, ValueError, TypeError):
        return  # what is wrong with it is said elsewhere


def _of_sampler(node: Node) -> Iterator[float]:
    if node.sampler and (ahead := seconds_ahead(node)) is not None:
        yield ahead
