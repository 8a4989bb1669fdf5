"""The member's dashboard on the Hub's home page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

from jupyterhub.user import User
from markupsafe import Markup

from ..core.errors import GPUSpawnerError
from ..services import Services
from ..web import view_models
from ..web.pages import TEMPLATES

RECENT = timedelta(days=1)
"""For how long the page says why the last session was stopped."""

NOTICES = 3
"""How many of the newest notices it shows."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """What the template of the page shows."""

    html: str = ""
    """Markup, once there is something to show."""
    queued: bool = False
    """True if the default server waits in the queue."""


def dashboard_of(user: User | None) -> Callable[[str, str], Awaitable[Dashboard]]:
    """Return what home.html calls: the Hub computes a template's variables for every page."""

    async def dashboard(service_url: str, hub_url: str) -> Dashboard:
        return await _dashboard(user, service_url, hub_url) if user else Dashboard()

    return dashboard


async def _dashboard(user: User, service_url: str, hub_url: str) -> Dashboard:
    """Return what runs or waits, what it costs, and what ended.

    Only a sentence if the store is not responding, and nothing if the Hub's spawner is not one of
    ours. ``service_url`` is such as ``/services/gpu/``, ``hub_url`` as ``/hub/``.
    """
    spawner = user.spawner
    services = getattr(spawner, "services", None)
    if not isinstance(services, Services):
        return Dashboard()
    try:
        seen = await services.read(view_models.look, services, user.name, spawner.group_names, ())
        told = await services.read(services.notifications.notices_of, user.name)
    except GPUSpawnerError as error:
        spawner.log.warning("The home page of %s has no dashboard: %s", user.name, error)
        said = Markup('<p class="alert alert-warning" role="status">{}</p>')
        return Dashboard(said.format(error.message))
    last = seen.mine.sessions[0].lease if seen.mine.sessions else None
    is_recent = last and last.ended_at and seen.mine.now - last.ended_at < RECENT
    text = TEMPLATES.get_template("dashboard.html").render(
        prefix=service_url,
        hub=hub_url,
        user=user.escaped_name,
        mine=seen.mine,
        tickets=seen.tickets,
        curves=seen.curves,
        ended=seen.ended,
        notices=told[:NOTICES],
        stopped=last if last and last.outcome and is_recent else None,
    )
    queued = any(place and not ticket.server.name for ticket, place in seen.tickets.waiting)
    return Dashboard(Markup(text), queued)  # every value in it is escaped  # nosec B704
