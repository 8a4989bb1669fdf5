"""Servers that an account pays for until it runs dry, and what their members are told."""

from __future__ import annotations

from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker

MINUTE = 60.0


def server(
    broker: Broker, user: str, group: str = "", seconds: int | None = None, name: str = ""
) -> Lease:
    """A running lease of an A100 that is paid by its member: a credit lasts a quarter hour."""
    request, terms = (
        Request(devices=1, model="A100"),
        Terms(groups=frozenset({group}), seconds=seconds),
    )
    lease = broker.acquire(ServerRef(user, name), request, engine="local", terms=terms)
    return broker.confirm(lease.id)


def titles(broker: Broker, user: str = "ada") -> list[str]:
    return [
        notice.title.partition(" until ")[0] for notice in broker.notifications.notices_of(user)
    ][::-1]
