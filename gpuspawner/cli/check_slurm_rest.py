"""What a hub needs that reaches Slurm by slurmrestd: somebody who answers there, and a token."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from ..engines.probe import Finding, Status
from ..errors import ConfigError, GPUSpawnerError, SlurmUnavailable
from ..slurm.config import TESTED, is_tested
from ..slurm.rest import Rest
from .node_states import NodeState, node_states_of

SOON = timedelta(days=7)
"""A token that ends within so long is worth a warning."""
SOMEBODY = "nobody"
"""A user for whom we try whether we may act; nothing is done for them."""


def check_rest(settings: Mapping[str, Any]) -> tuple[list[Finding], Mapping[str, NodeState]]:
    """Whether slurmrestd answers to ``c.Broker``'s token, and how the nodes are."""
    try:
        rest = Rest(
            str(settings["slurm_rest"]),
            str(settings.get("slurm_rest_token", "")),
            str(settings.get("slurm_rest_ca", "")),
        )
        found = [_check_token(rest)]
    except ConfigError as error:
        remedy = "On the controller: scontrol token username=slurm lifespan=31536000"
        return [Finding("token", Status.FAIL, error.message, remedy)], {}
    found.append(_check_controller(rest))
    states: Mapping[str, NodeState] = {}
    if found[-1].status is Status.OK:
        if settings.get("jobs_of_members", True):
            found.append(_check_members(rest))
        try:
            states = node_states_of(rest)
        except GPUSpawnerError as error:
            found.append(Finding("nodes", Status.FAIL, error.message))
    found.append(_check_programs())
    return found, states


def _check_token(rest: Rest) -> Finding:
    name, token = "token", rest.token()
    if token.ends_at is None:
        return Finding(name, Status.OK, f"It is {token.user}'s and has no end")
    ends = f"{token.ends_at:%Y-%m-%d %H:%M} UTC"
    remedy = f"On the controller: scontrol token username={token.user} lifespan=31536000"
    if token.has_ended():
        return Finding(name, Status.FAIL, f"It ended on {ends}.", remedy)
    if token.ends_at - datetime.now(timezone.utc) < SOON:
        text = f"It ends on {ends}: put the next one into {rest.token_file} before."
        return Finding(name, Status.UNCHECKED, text, remedy)
    return Finding(name, Status.OK, f"It is {token.user}'s, until {ends}")


def _check_controller(rest: Rest) -> Finding:
    name = "controller"
    remedy = "On the controller: systemctl status slurmrestd slurmctld"
    try:
        version, up = rest.ping()
    except SlurmUnavailable as error:
        return Finding(name, Status.FAIL, error.message, remedy)
    if not is_tested(version):
        text = f"This is Slurm {version}; gpuspawner was tried with {', '.join(TESTED)}."
        return Finding(name, Status.FAIL, text, "Install one of these (Debian 12 has it).")
    if not up:
        return Finding(name, Status.FAIL, "slurmrestd reaches no controller.", remedy)
    return Finding(name, Status.OK, f"Slurm {version} answers at {rest.url}")


def _check_members(rest: Rest) -> Finding:
    """Whether we may act for others than ourselves."""
    name = "members' jobs"
    try:
        rest.ping(user=SOMEBODY)
    except SlurmUnavailable:
        text = f"The token of {rest.token().user} may not act for members."
        remedy = "Make it for SlurmUser (scontrol token username=slurm), or set "
        return Finding(name, Status.FAIL, text, f"{remedy}c.Broker.jobs_of_members = False.")
    return Finding(name, Status.OK, f"The token of {rest.token().user} may act for members")


def _check_programs() -> Finding:
    name = "slurmdbd"
    if shutil.which("sacctmgr") is None:
        text = "Slurm's database is not asked: it takes sacctmgr, which is not on this machine."
        remedy = "Type gpuspawner slurm sync and audit on a machine that has slurm-client."
        return Finding(name, Status.UNCHECKED, text, remedy)
    return Finding(name, Status.OK, "sacctmgr is here, for Slurm's database")
