"""The welcome page on credits, queue and files, which each member sees once before the others.

The Hub's default URL shows it to members who have not seen it; links to other pages are not
affected. The store records who has seen it. The member's workspace is created at the same time.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from jupyterhub.handlers.base import BaseHandler
from jupyterhub.handlers.pages import RootHandler
from jupyterhub.user import User
from tornado import web

from ..core.errors import GPUSpawnerError
from ..core.units import format_credits
from ..devices.snapshots import ModelCount
from ..ledger.models import Account
from ..services import Services
from .handlers import CatalogPages, HubPageHandler

KEY = "gpuspawner_welcomed"

MODELS = 4
"""Maximum number of GPU models on this page; the environments' pages show the other ones."""


def front_door(handler: BaseHandler) -> str:
    """Return the Hub's ``default_url``: the welcome page for a user who may be new, else empty.

    With an empty URL the Hub behaves as usual. This function does not ask the database, because
    that would block the Hub: the page itself checks if the user is new, and the process remembers
    the result.
    """
    user = handler.current_user
    if user is None and not isinstance(handler, RootHandler):
        # They have just signed in. Their cookie identifies them from the next request on.
        return str(handler.hub.base_url)
    if not isinstance(user, User) or user.name in _known(handler.settings):
        return ""
    return f"{handler.hub.base_url}welcome/first"


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a GPU of one model, and how long a balance pays for it."""

    model: str
    rate: str
    """Credits per hour, formatted."""
    hours: int | None
    """Full hours; None if the GPU is free of charge."""


class Welcome(HubPageHandler):
    """The page ``/hub/welcome``."""

    @web.authenticated
    async def get(self) -> None:
        """Show the page, even to members who have seen it before."""
        if not isinstance(self.current_user, User):
            raise web.HTTPError(403, "This page is for members.")
        await self.show_it(self.current_user.name)

    async def show_it(self, user: str) -> None:
        """Send the page with the member's balance and the prices."""
        services = self.site.services
        account, models = await self.ask(_known_of, services, user)
        await self.show(
            "welcome.html",
            balance=format_credits(account.balance),
            prices=prices(account, models),
            more_prices=len(models) > MODELS,
            claim_minutes=services.settings.queue.claim_minutes,
            place=_place(self.site, self.settings["spawner_class"]),
            folders=bool(services.settings.folders.source),
        )


class FirstWelcome(Welcome):
    """The page ``/hub/welcome/first``, which redirects members who have seen it."""

    @web.authenticated
    async def get(self) -> None:
        """Show the page and record it, or redirect to the next page."""
        user = self.current_user
        name = user.name if isinstance(user, User) else ""
        if not name or not await self._is_due(name):
            _known(self.settings).add(name)
            self.redirect(self.get_next_url(user))
            return
        await self.show_it(name)
        _known(self.settings).add(name)
        services = self.site.services
        try:
            await services.run(services.members.welcomed, name)
        except GPUSpawnerError as error:  # they see it again after the hub restarts
            self.log.warning(
                "Could not record that %r saw the welcome page: %s", name, error.message
            )
        await self._open_workspace(user)

    async def _open_workspace(self, user: User) -> None:
        """Create the workspace ahead of the first start. The page has already been sent."""
        if open_workspace := getattr(user.spawner, "open_workspace", None):
            try:
                await open_workspace()
            except Exception as error:  # of an engine's library; the first start reports it too
                self.log.warning("The workspace of %r is not created yet: %s", user.name, error)

    async def _is_due(self, user: str) -> bool:
        """Return True if a member has not seen the page; False if the store cannot tell."""
        services = self.site.services
        try:
            return await services.read(services.members.welcome_due, user)
        except GPUSpawnerError as error:
            self.log.warning("Cannot tell if %r is new: %s", user, error.message)
            return False


def prices(account: Account, models: list[ModelCount]) -> list[Price]:
    """Return the prices of the cheapest GPU models, and how long the balance pays for each."""
    rates: dict[str, int] = {}
    for each in models:
        rates[each.model] = min(each.rate, rates.get(each.model, each.rate))
    cheapest = sorted(rates.items(), key=lambda item: (item[1], item[0]))[:MODELS]
    available = max(0, account.available)
    return [
        Price(model, format_credits(rate), available // rate if rate else None)
        for model, rate in cheapest
    ]


def _place(site: CatalogPages, spawner: type[Any]) -> str:
    """Return the folder whose files are kept; empty if none is configured."""
    traits = spawner.class_traits()
    kept = [name for name in ("workspace", "volumes") if name in traits]
    if not any(site.configured(name) or traits[name].default_value for name in kept):
        return ""
    target = str(site.configured("workspace_target") or "work")
    return "work" if target.endswith("/work") else target


def _known_of(services: Services, user: str) -> tuple[Account, list[ModelCount]]:
    """Return the member's account, opened if the sign-in failed to, and the GPU models."""
    return services.ledger.open_account(user), list(services.monitoring.overview().models)


def _known(settings: MutableMapping[str, Any]) -> set[str]:
    """Return the names of users who need no welcome, as far as this process knows."""
    found: set[str] = settings["users"].settings.setdefault(KEY, set())
    return found
