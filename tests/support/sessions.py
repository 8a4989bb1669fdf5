"""Sessions of members, and what they are told of them."""

from __future__ import annotations

from typing import Any

from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.notifications.models import Notice, NoticeKind
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services

HOUR = 3600
WARN = (30.0, 10.0, 2.0)


def session(
    services: Services, user: str, seconds: int | None = HOUR, devices: int = 1, model: str = "A100"
) -> Lease:
    """A running lease that ends after some time."""
    request = Request(devices=devices, model=model if devices else None)
    terms = Terms(seconds=seconds, groups=frozenset({"guests"}))
    lease = services.queue.ask(ServerRef(user), request, engine="local", terms=terms)
    assert isinstance(lease, Lease)
    return services.leases.confirm(lease.id)


def ask(services: Services, user: str, devices: int = 1, server: str = "", **terms: Any) -> Any:
    """The lease or the ticket that a member gets on the Docker Engine."""
    request, asked = Request(devices=devices, environment="pytorch"), Terms(**terms)
    return services.queue.ask(ServerRef(user, server), request, engine="docker", terms=asked)


def line_up(
    services: Services, user: str, devices: int = 1, server: str = "", **terms: Any
) -> Ticket:
    """The ticket of a member who has to wait."""
    ticket = ask(services, user, devices, server, wait=True, **terms)
    assert isinstance(ticket, Ticket)
    return ticket


def wait(services: Services, user: str, devices: int = 1, model: str = "A100") -> Ticket:
    """A ticket for an hour."""
    request = Request(devices=devices, model=model)
    terms = Terms(seconds=HOUR, wait=True)
    ticket = services.queue.ask(ServerRef(user), request, engine="local", terms=terms)
    assert isinstance(ticket, Ticket)
    return ticket


def turn(services: Services, ticket: Ticket) -> Lease:
    """The ticket's turn has come, and its server answers."""
    assert ticket.id in services.queue.turns(frozenset({ticket.id}))
    return services.leases.confirm(services.queue.start_ticket(ticket.id).id)


def told(services: Services, user: str, kind: NoticeKind) -> list[Notice]:
    return [notice for notice in services.notifications.notices_of(user) if notice.kind is kind][
        ::-1
    ]


def warn(services: Services) -> list[float | None]:
    """Give every warning that is due; how many minutes each was for."""
    found = [
        services.sessions.warn_session(lease.id, WARN)
        for lease in services.sessions.due_sessions(WARN).warn
    ]
    return [lease.told_minutes for lease in found if lease]
