"""``gpuspawner leases``: who holds what, since when, at which rate."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..model import Lease, LeaseState
from .config import Settings
from .output import count, credits, exact, local, show, table, utc


def leases(arguments: argparse.Namespace, settings: Settings) -> int:
    """List the open leases, or all of them."""
    broker = settings.open_broker()
    member = arguments.member
    if not arguments.all:
        found = broker.open_leases()
    elif member is None:
        found = broker.leases_of(None, arguments.limit)
    else:
        found = broker.leases_of(None, _EVERY)  # a group's account may have paid for some
    if member is not None:
        found = [lease for lease in found if lease.server.user == member]
    if arguments.all:
        found = found[: arguments.limit]
    show(arguments.json, [plain(lease) for lease in found], _text(found, arguments))
    return 0


_EVERY = 2**31 - 1


def devices_of(lease: Lease) -> str:
    """The devices of a lease for people: ``2x A100 (0, 1)``."""
    if not lease.devices:
        return "no GPU"
    models = sorted({device.model for device in lease.devices})
    indices = ", ".join(str(device.index) for device in lease.devices)
    return f"{len(lease.devices)}x {', '.join(models)} ({indices})"


def plain(lease: Lease) -> dict[str, Any]:
    """A lease for scripts."""
    return {
        "id": lease.id,
        "member": lease.server.user,
        "server": lease.server.name,
        "account": lease.account,
        "environment": lease.environment,
        "devices": [asdict(device) for device in lease.devices],
        "state": lease.state.value,
        "rate": exact(lease.rate),
        "hold": exact(lease.hold),
        "held": exact(lease.held),
        "charged": exact(lease.charged),
        "engine": lease.engine,
        "engine_ref": lease.engine_ref,
        "granted_at": utc(lease.granted_at),
        "started_at": utc(lease.started_at),
        "seen_at": utc(lease.seen_at),
        "warned_at": utc(lease.warned_at),
        "when_dry": lease.when_dry,
        "overdraft": exact(lease.overdraft),
        "waived": exact(lease.waived),
        "group": lease.group,
        "ends_at": utc(lease.ends_at),
        "claim_by": utc(lease.claim_by),
        "outcome": lease.outcome,
        "ended_at": utc(lease.ended_at),
        "end_reason": lease.end_reason,
    }


def _text(found: Sequence[Lease], arguments: argparse.Namespace) -> str:
    whose = f" of {arguments.member}" if arguments.member is not None else ""
    if not found:
        return f"No {'' if arguments.all else 'open '}leases{whose}."
    headers = ["LEASE", "SERVER", "ENVIRONMENT", "DEVICES", "STATE", "GRANTED", "STARTED"]
    headers += ["CREDITS/H", "CHARGED"]
    headers += ["ENDED", "WHY"] if arguments.all else ["ENDS"]
    rows = [_row(lease, arguments.all) for lease in found]
    kind = "lease" if arguments.all else "open lease"
    text = table(headers, rows, right=("CREDITS/H", "CHARGED"))
    text += f"\n\n{count(len(found), kind)}{whose}"
    if arguments.all and len(found) == arguments.limit:
        text += f" (the newest; --limit shows more than {arguments.limit})"
    return text


def _row(lease: Lease, ended: bool) -> list[str]:
    row = [
        lease.id,
        str(lease.server),
        lease.environment or "-",
        devices_of(lease),
        "warned" if lease.warned_at and lease.state is LeaseState.RUNNING else lease.state.value,
        local(lease.granted_at),
        local(lease.started_at),
        credits(lease.rate),
        credits(lease.charged),
    ]
    if ended:
        return [*row, local(lease.ended_at), lease.end_reason]
    return [*row, local(lease.ends_at) if lease.started_at else "-"]
