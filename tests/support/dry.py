"""Servers that an account pays for until it runs dry, and what their members are told."""

from __future__ import annotations

from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.services import Services

MINUTE = 60.0


def server(
    services: Services, user: str, group: str = "", seconds: int | None = None, name: str = ""
) -> Lease:
    """A running lease of an A100 that is paid by its member: a credit lasts a quarter hour."""
    request, terms = (
        Request(devices=1, model="A100"),
        Terms(groups=frozenset({group}), seconds=seconds),
    )
    lease = services.leases.grant(ServerRef(user, name), request, engine="local", terms=terms)
    return services.leases.confirm(lease.id)


def titles(services: Services, user: str = "ada") -> list[str]:
    return [
        notice.title.partition(" until ")[0] for notice in services.notifications.notices_of(user)
    ][::-1]
