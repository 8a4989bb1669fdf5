"""``gpuspawner extend`` and ``stop``: let a session go on as its member can, or end it."""

from __future__ import annotations

import argparse

from ..broker import Broker
from ..errors import UnknownLease
from ..model import Lease, ServerRef
from .config import Settings
from .known import line_broker
from .leases import plain
from .output import local, show
from .queue import actor
from .release import find_lease


def extend(arguments: argparse.Namespace, settings: Settings) -> int:
    """Begin a session's whole length anew, unless somebody would wait longer for that."""
    broker = line_broker(settings)
    lease = find_lease(broker, arguments.lease)
    extended = broker.extend(lease.id, actor=actor())
    if extended.seconds is None:
        text = f"Lease {lease.id} of {lease.server} has no end: nothing changed."
    else:
        text = f"The session of {lease.server} ends at {local(extended.ends_at)}."
    show(arguments.json, plain(extended), text)
    return 0


def stop(arguments: argparse.Namespace, settings: Settings) -> int:
    """Order the stop of a server, which the accounting service carries out."""
    broker = settings.open_broker()
    lease = _lease_of(broker, arguments.server)
    ordered = broker.stop(lease.id, actor=actor(), reason=arguments.reason)
    text = (
        f"Lease {ordered.id} of {ordered.server} is to end: the accounting service asks the Hub "
        "to stop the server until it is gone. Its member is told why, and keeps the files."
    )
    show(arguments.json, plain(ordered), text)
    return 0


def _lease_of(broker: Broker, text: str) -> Lease:
    """The open lease of a server, or the lease of an id. Raises UnknownLease."""
    user, _, name = text.partition("/")
    if lease := broker.lease_of(ServerRef(user, name)):
        return lease
    try:
        return find_lease(broker, text)
    except UnknownLease as error:
        others = [str(x.server) for x in broker.open_leases() if x.server.user == user]
        if not others:
            raise
        running = f"{user} has {', '.join(others)}"
        raise UnknownLease(f"{error.message} {running}.", lease=text) from None
