"""The page that a member sees once, before all others: credits, queue, files.

It is shown to whoever comes to the Hub's front door and was not shown it before; a link to a
certain page leads there as ever. Who was shown it is in the store. The member's workspace is
opened with it.
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
"""Models of GPUs whose price is said; the other ones are on the environments' pages."""


def front_door(handler: BaseHandler) -> str:
    """Where the Hub's front door leads (its ``default_url``): to the welcome page of a newcomer,
    else where it always did.

    It asks no database, for the Hub waits for it: the first look decides at the page itself, and
    this process remembers.
    """
    user = handler.current_user
    if user is None and not isinstance(handler, RootHandler):
        # Who has signed in just now, elsewhere: their cookie tells who it is at the next step.
        return str(handler.hub.base_url)
    if not isinstance(user, User) or user.name in _known(handler.settings):
        return ""
    return f"{handler.hub.base_url}welcome/first"


@dataclass(frozen=True, slots=True)
class Price:
    """What a GPU of a model costs, and how long a balance pays for it."""

    model: str
    rate: str
    """Credits an hour."""
    hours: int | None
    """None: for ever, it is free."""


class Welcome(HubPageHandler):
    """``/hub/welcome``: the three things to know."""

    @web.authenticated
    async def get(self) -> None:
        if not isinstance(self.current_user, User):
            raise web.HTTPError(403, "This page is for members.")
        await self.show_it(self.current_user.name)

    async def show_it(self, user: str) -> None:
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
    """``/hub/welcome/first``: the same for who was not shown it; others go on."""

    @web.authenticated
    async def get(self) -> None:
        user = self.current_user
        name = user.name if isinstance(user, User) else ""
        if not name or not await self._is_due(name):
            self._go_on(name)
            return
        await self.show_it(name)
        _known(self.settings).add(name)
        services = self.site.services
        try:
            await services.run(services.members.welcomed, name)
        except GPUSpawnerError as error:  # then they see it again, after the hub's next start
            self.log.warning("That %r was welcomed could not be written: %s", name, error.message)
        await self._open_workspace(user)

    async def _open_workspace(self, user: User) -> None:
        """So that it is there before the first start, which else makes it. The page is sent."""
        if open_workspace := getattr(user.spawner, "open_workspace", None):
            try:
                await open_workspace()
            except Exception as error:
                # An engine can fail in as many ways as it has libraries: the start says which.
                self.log.warning("The workspace of %r waits for a start: %s", user.name, error)

    async def _is_due(self, user: str) -> bool:
        """Whether somebody is still to be welcomed. Who cannot be told goes on."""
        services = self.site.services
        try:
            return await services.read(services.members.welcome_due, user)
        except GPUSpawnerError as error:
            self.log.warning("Whether %r is new cannot be told: %s", user, error.message)
            return False

    def _go_on(self, user: str) -> None:
        _known(self.settings).add(user)
        self.redirect(self.get_next_url(self.current_user))


def prices(account: Account, models: list[ModelCount]) -> list[Price]:
    """What the GPUs cost, the cheapest first, and for how long the balance pays."""
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
    """Where files stay; nothing where they do not, for no place is set up for them."""
    traits = spawner.class_traits()
    kept = [name for name in ("workspace", "volumes") if name in traits]
    if not any(site.configured(name) or traits[name].default_value for name in kept):
        return ""
    target = str(site.configured("workspace_target") or "work")
    return "work" if target.endswith("/work") else target


def _known_of(services: Services, user: str) -> tuple[Account, list[ModelCount]]:
    """The member's account, which is opened now if sign-in could not, and the GPUs."""
    return services.ledger.open_account(user), list(services.monitoring.overview().models)


def _known(settings: MutableMapping[str, Any]) -> set[str]:
    """Who needs no welcome, as far as this process knows."""
    found: set[str] = settings["users"].settings.setdefault(KEY, set())
    return found
