"""How Slurm says that its nodes are, for ``gpuspawner check``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import SlurmUnavailable
from ..slurm.commands import Slurm
from ..slurm.rest import Rest

READY = frozenset(("idle", "mixed", "allocated", "completing", "planned", "reserved"))
OFF = "~"
"""Behind a state: the node is off, to save power."""

_GPUS = re.compile(r"gpu(?::([^:,(]+))?:(\d+)")
_NO_WORK = frozenset(("DRAIN", "NOT_RESPONDING", "FAIL", "MAINTENANCE", "INVALID_REG"))
"""Flags of nodes that take no jobs."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node as ``sinfo`` has it."""

    state: str
    """With its flags: ``idle``, ``down*``, ``idle~``."""
    reason: str
    gpus: Mapping[str, int]
    """By type."""
    version: str

    @property
    def off(self) -> bool:
        return self.state.endswith(OFF)


def node_states(slurm: Slurm) -> dict[str, NodeState]:
    """Every node by name. Raises SlurmUnavailable."""
    said = slurm.run("sinfo", "--Node", "--noheader", "--format=%N|%T|%v|%G|%E")
    found = {}
    for line in said.splitlines():
        name, state, version, gres, reason = line.split("|", 4)
        gpus = {kind: int(number) for kind, number in _GPUS.findall(gres)}
        found[name] = NodeState(state, "" if reason == "none" else reason, gpus, version)
    return found


def node_states_of(rest: Rest) -> dict[str, NodeState]:
    """The same, by slurmrestd. Raises SlurmUnavailable."""
    found = {}
    try:
        for node in json.loads(rest.nodes())["nodes"]:
            flags = {str(flag).upper() for flag in node.get("state_flags") or ()}
            words = [str(node["state"]).lower(), *sorted(f.lower() for f in flags & _NO_WORK)]
            state = "+".join(words) + (OFF if "POWERED_DOWN" in flags else "")
            gpus = {kind: int(number) for kind, number in _GPUS.findall(str(node["gres"] or ""))}
            version = str(node.get("slurmd_version") or "")
            found[str(node["name"])] = NodeState(
                state, str(node.get("reason") or ""), gpus, version
            )
    except (ValueError, KeyError, TypeError) as error:
        why = f"slurmrestd did not answer as Slurm 22.05 does ({error!r:.80})"
        raise SlurmUnavailable(why=why) from None
    return found
