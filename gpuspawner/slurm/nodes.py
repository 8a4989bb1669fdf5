"""The part of :class:`gpuspawner.slurm.delegate.SlurmDelegate` for the nodes: how they are, and
which of them are closed, by whom."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from ..errors import GPUSpawnerError, InvalidRequest, SlurmRefused, SlurmUnavailable
from ..model import Device, DeviceStatus, Inventory, Ticket
from . import holder
from .asking import AWAY_PATIENCE, PATIENCE, Asker
from .cluster import Cluster, Node
from .controller import Controller

NODES_EVERY = 15.0
"""Seconds between two looks at the nodes."""

OURS = "gpuspawner: "
"""How the reason of a node begins that we closed. Every other one stays closed until whoever closed
it opens it: an admin, or an admin for Slurm, which closes a node whose epilog failed."""

_GONE = frozenset({"DOWN", "NOT_RESPONDING", "FAIL"})
"""What Slurm calls nodes that get no jobs now."""
_OFF = {
    "POWERED_DOWN": "off (power saving)",
    "POWERING_DOWN": "being switched off (power saving)",
    "POWERING_UP": "being switched on",
}
"""What Slurm calls nodes that it switches on for a job, and what people are told."""


class Nodes:
    """Looks at the nodes, closes them, and opens what it closed."""

    name: str

    def __init__(self, cluster: Cluster, slurm: Controller, log: logging.Logger | Any) -> None:
        self.cluster = cluster
        self.slurm = slurm
        self._log = log
        self._nodes: Inventory | None = None
        self._resting: Mapping[str, str] = {}
        self._drained: frozenset[str] = frozenset()
        """The nodes that are closed in Slurm, as of its last answer."""
        self._nodes_at = self._nodes_told_at = float("-inf")
        self._nodes_asker = Asker(self._look_at_nodes)
        self._untold: Mapping[str, str] = {}
        """The nodes that are closed here and open in Slurm, and why they are."""
        self._refused_at: dict[str, float] = {}
        """When Slurm refused to close a node."""

    def observe(self, now: datetime) -> Inventory:
        """The devices of all nodes, as of the last answer; those of a node that gets no jobs are
        unknown or drained."""

        def is_due() -> bool:
            old = time.monotonic() - self._nodes_at >= NODES_EVERY
            return old or self._nodes_at <= self._nodes_told_at

        # Who looks may hold up others: an older answer will do.
        known = self._nodes is not None
        self._nodes_asker.wait(is_due, AWAY_PATIENCE if known else PATIENCE)
        nodes = self._nodes
        if nodes is None:
            why = SlurmUnavailable(why="it has not said yet which nodes there are").message
            return Inventory(devices=(), observed_at=now, source=self.name, error=why)
        return replace(nodes, observed_at=now)

    def resting(self, machine: str) -> str:
        """Why nobody is to expect an answer of a machine; empty when somebody is. Blocks."""
        self.observe(datetime.now(timezone.utc))
        return self._resting.get(machine, "")

    def machine_of(self, uuid: str) -> str:
        found = self.cluster.device(uuid)
        return found[0].name if found else ""

    def on_machine(self, uuid: str) -> tuple[str, ...]:
        found = self.cluster.device(uuid)
        return tuple(device.uuid for device in found[0].devices) if found else (uuid,)

    def drained(self) -> frozenset[str]:
        nodes = [node for node in self.cluster.nodes if node.name in self._drained]
        return frozenset(device.uuid for node in nodes for device in node.devices)

    def close(self, uuid: str, reason: str) -> None:
        if not (machine := self.machine_of(uuid)):
            return
        found, words = self._state_of(machine), OURS + reason
        if not found.drained or (found.is_ours and found.reason != words):
            self.slurm.close(machine, words)
            self._nodes_told_at = time.monotonic()

    def keep_closed(self, closed: Mapping[str, str]) -> list[str]:
        wanted = {self.machine_of(uuid): (uuid, reason) for uuid, reason in closed.items()}
        wanted.pop("", None)  # of no machine of the cluster: this one's own, from before
        if wanted:
            self.observe(datetime.now(timezone.utc))
        told, untold = [], {}
        for machine in sorted(wanted.keys() - self._drained):
            uuid, reason = wanted[machine]
            if machine in self._untold and self._is_asked_often(machine):
                untold[machine] = self._untold[machine]
                continue
            try:
                self.close(uuid, reason)
                told.append(uuid)
            except GPUSpawnerError as error:
                if isinstance(error, SlurmRefused):
                    self._refused_at[machine] = time.monotonic()
                untold[machine] = error.message
                if self._untold.get(machine) != error.message:
                    self._log.warning("The machine %s is open yet: %s", machine, error.message)
        self._untold = untold
        return told

    def reopen(self, uuid: str) -> None:
        if not (machine := self.machine_of(uuid)):
            return
        found = self._state_of(machine)
        if not found.drained:
            return
        if not found.is_ours:
            why = (found.reason or "none is given") + (f" (by {found.by})" if found.by else "")
            raise InvalidRequest(
                f"The machine {machine} was drained in Slurm, not by gpuspawner; the reason: "
                f"{why}. See to that, then type: scontrol update NodeName={machine} "
                "State=RESUME."
            )
        self.slurm.reopen(machine)
        self._nodes_told_at = time.monotonic()

    def must_be_open(self, ticket: Ticket) -> frozenset[str]:
        """The nodes that a job must not run on: they are closed, and Slurm does not know it.
        Raises SlurmUnavailable where no other one would do."""
        untold = frozenset(self._untold)
        if untold and holder.able(ticket.request, self.cluster) <= untold:
            raise SlurmUnavailable(why="the machines that would do are closed")
        return untold

    # Steps of the above.

    def _is_asked_often(self, machine: str) -> bool:
        """Whether Slurm refused a moment ago to close it: it would say so each second."""
        at = self._refused_at.get(machine, float("-inf"))
        return time.monotonic() - at < NODES_EVERY

    def _look_at_nodes(self) -> None:
        began, now = time.monotonic(), datetime.now(timezone.utc)
        try:
            self._nodes = self._observed(now)
        except GPUSpawnerError as error:
            devices = self._nodes.devices if self._nodes else ()
            self._nodes = Inventory(
                devices=devices, observed_at=now, source=self.name, error=error.message
            )
        finally:
            self._nodes_at = began

    def _observed(self, now: datetime) -> Inventory:
        """Raises SlurmUnavailable or SlurmRefused."""
        states = _states(self.slurm.nodes())
        self._resting = {name: state.resting for name, state in states.items()}
        self._drained = frozenset(name for name, state in states.items() if state.drained)
        node_of = {device.uuid: node for node in self.cluster.nodes for device in node.devices}
        devices = tuple(
            _seen(device, node_of[device.uuid], states)
            for device in holder.devices_of(self.cluster)
        )
        return Inventory(devices=devices, observed_at=now, source=self.name)

    def _state_of(self, machine: str) -> _State:
        """How a node is now. Raises SlurmRefused or SlurmUnavailable."""
        states = _states(self.slurm.nodes())
        if machine not in states:
            raise SlurmUnavailable(why=f"it says nothing of the machine {machine}")
        return states[machine]


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """How a node is, as far as it matters to who waits for its devices."""

    status: DeviceStatus
    why: str = ""
    resting: str = ""
    """Why nobody is to expect an answer of it."""
    drained: bool = False
    reason: str = ""
    """Slurm's own, and who gave it."""
    by: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether we closed it, if it is closed."""
        return self.reason.startswith(OURS)


_UNHEARD_OF = _State(status=DeviceStatus.UNKNOWN, why="Slurm does not know it")


def _seen(device: Device, node: Node, states: Mapping[str, _State]) -> Device:
    state = states.get(node.name, _UNHEARD_OF)
    reason = state.why
    if state.status is DeviceStatus.UNKNOWN:
        reason = f"the machine {node.name} gets no work: {reason}"
    return replace(device, status=state.status, reason=reason)


def _states(text: str) -> dict[str, _State]:
    """How each node is, by its name. Raises SlurmUnavailable."""
    try:
        found = json.loads(text)
        if errors := found.get("errors"):
            raise SlurmUnavailable(why=f"sinfo says {str(errors)[:200]}")
        return {str(node["name"]): _state(node) for node in found["nodes"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"sinfo --json did not answer as Slurm 22.05 does ({error!r:.80})"
        raise SlurmUnavailable(why=why) from None


def _state(node: Mapping[str, Any]) -> _State:
    flags: Iterable[str] = node.get("state_flags") or ()
    words = {str(node["state"]).upper(), *(str(flag).upper() for flag in flags)}
    reason, by = str(node.get("reason") or ""), str(node.get("reason_set_by_user") or "")
    off = next((said for word, said in _OFF.items() if word in words), "")
    state = _State(
        status=DeviceStatus.OK,
        why=off,
        resting=off,
        drained="DRAIN" in words,
        reason=reason,
        by=by,
    )
    # One that is off does not respond, and gets jobs all the same.
    if gone := words & (_GONE - {"NOT_RESPONDING"} if off else _GONE):
        said = " and ".join(sorted(word.lower().replace("_", " ") for word in gone))
        why = f"{said} ({reason})" if reason else said
        return replace(state, status=DeviceStatus.UNKNOWN, why=why, resting="")
    if state.drained:
        who = f"drained by {by}" if by and not state.is_ours else "drained"
        said = reason.removeprefix(OURS)
        why = f"{who}: {said}" if said else who
        return replace(state, status=DeviceStatus.DRAINED, why=why)
    return state
