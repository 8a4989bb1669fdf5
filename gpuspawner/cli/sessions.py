"""``gpuspawner extend``: let a session go on, as its member can on their page."""

from __future__ import annotations

import argparse

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
