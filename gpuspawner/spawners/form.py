"""The spawn form: environments, devices, hours, who pays, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from jinja2 import ChoiceLoader, PackageLoader
from jinja2 import Environment as Templates

from ..broker.payers import Payers
from ..broker.view import Overview
from ..catalog import Catalog, Environment, SessionHours
from ..errors import GPUSpawnerError, UnknownAccount
from ..model import Account, DeviceStatus, format_credits, member_account
from ..pages.cards import PAGE, make_cards, usual_request
from ..pages.prices import Prices, model_label
from ..pages.waits import wait_tables
from . import options
from .data import DataChoice, data_choices
from .hours import hour_choices, length, usual_label
from .links import GPUSpawnerLinks, names_in
from .payers import payer_choices

_templates = Templates(
    loader=ChoiceLoader(
        [
            PackageLoader("gpuspawner.spawners"),
            PackageLoader("gpuspawner.spawners", "hub_templates"),  # for what the cards share
        ]
    ),
    autoescape=True,
    trim_blocks=True,
    auto_reload=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one member may choose from at this moment, and what is chosen already."""

    environments: tuple[Environment, ...]
    """Those that have a card."""
    left_out: int
    """How many more there are."""
    chosen: Environment
    last: options.Choice
    by_link: bool
    most_gpus: int
    data: list[DataChoice]
    """Datasets and folders."""
    hours: dict[str, SessionHours]
    """By slug, of environments with devices."""
    show_environments: bool
    catalog_problem: str
    pages_url: str


@dataclass(frozen=True, slots=True)
class Known:
    """What the store says for one member's form."""

    overview: Overview
    account: Account
    payers: Payers
    ending: Mapping[str, Sequence[tuple[datetime, int]]]
    """When credits of these accounts end, and how many microcredits, by account."""


class GPUSpawnerForm(GPUSpawnerLinks):
    """The part of the mixin that makes the form. Use :class:`GPUSpawnerMixin`, not this."""

    async def get_options_form(self) -> str:
        """The admin's own form, if there is one, then environments, GPUs and the balance."""
        own = (await super().get_options_form() if self.shows_own_form() else "") or ""
        own += self._note_of_link(own)
        await self.refresh_catalog()
        try:
            catalog = self.load_catalog()
            usual = catalog.default_for(self.group_names)
            with self._set_for_now(await self._limits_of_groups()):
                limits = self._limits(catalog, usual)
            user, groups = self.user.name, self.group_names
            return own + await self.broker.read(self._make_form, limits, user, groups)
        except GPUSpawnerError as error:
            return own + _templates.get_template("unavailable.html").render(message=error.message)

    # Steps of the above.

    def _note_of_link(self, own: str) -> str:
        """What a link says of the admin's own fields; empty for none.

        Those that have no place in the admin's form go along with ours.
        """
        shown = self.asked_of(names_in(own))
        hidden = self.asked_of(set(self.extra_options) - shown.keys())
        if not shown and not hidden:
            return ""
        return _templates.get_template("own_fields.html").render(shown=shown, hidden=hidden)

    def _make_form(self, limits: Limits, user: str, groups: frozenset[str]) -> str:
        # Off the event loop: nothing below asks the Hub's own database.
        return self._render(limits, self._know(user, groups))

    def _know(self, user: str, groups: frozenset[str]) -> Known:
        """Asks the store; who comes for the first time gets the opening grant now."""
        try:
            account = self.broker.account(member_account(user))
        except UnknownAccount:
            account = self.broker.open_account(user)
        payers = self.broker.payers(user, groups)
        ending = self.broker.ending_of([each.name for each in payers.accounts])
        return Known(self.broker.overview(), account, payers, ending)

    def _limits(self, catalog: Catalog, usual: Environment) -> Limits:
        """What this member may choose from, and what is chosen already."""
        environments = catalog.visible_to(self.group_names)
        last = self.last_choice()
        chosen = next((e for e in environments if e.slug == last.environment), usual)
        shown = environments[:PAGE]
        if chosen not in shown:
            shown = (chosen, *shown)
        return Limits(
            environments=shown,
            left_out=len(environments) - len(shown),
            chosen=chosen,
            last=last,
            by_link=self.asked is not None,
            most_gpus=self.most_gpus(),
            data=data_choices(catalog, shown, self.group_names, last.data),
            hours={e.slug: self.session_hours(e) for e in shown if not e.cpu_only},
            show_environments=bool(self.catalog),
            catalog_problem=self.catalog_problem(),
            pages_url=f"{self.hub.base_url}environments",
        )

    def _render(self, limits: Limits, known: Known) -> str:
        """The form as HTML. Values that a member could have written are escaped."""
        overview, account, payers = known.overview, known.account, known.payers
        shown, last, chosen = limits.environments, limits.last, limits.chosen
        most = min(limits.most_gpus, max(e.devices.max for e in shown), overview.total)
        counts = range(most + 1)
        count = chosen.devices.default if last.gpus is None else last.gpus
        now = self.broker.clock()
        outlooks = self.broker.outlooks({e.slug: usual_request(e) for e in shown})
        cards = make_cards(shown, overview, outlooks, now, limits.pages_url)
        prices = Prices(overview, shown, now, known.ending)
        lines = prices.lines(account)
        offered = payer_choices(payers, last.account)
        paying = {a.name: a for a in payers.accounts}
        who = [(choice.value, paying[choice.value]) for choice in offered] or [("", account)]
        models = [count.model for count in overview.models]
        costs = prices.tables(counts, who)
        waits = wait_tables(shown, counts, models, self.broker.outlooks)
        hours = list(limits.hours.values())
        return _templates.get_template("form.html").render(
            cards=cards,
            left_out=limits.left_out,
            pages_url=limits.pages_url,
            by_link=limits.by_link,
            catalog_problem=limits.catalog_problem,
            chosen=chosen,
            overview=overview,
            silent=[v.device for v in overview.devices if v.device.status is DeviceStatus.UNKNOWN],
            counts=counts,
            count=min(count, most),
            last=last,
            balance=format_credits(account.available),
            models=[(count.model, model_label(count)) for count in overview.models],
            lines=lines,
            prices_until=prices.until(),
            shown_at=prices.now.astimezone(timezone.utc).isoformat(),
            told={
                "costs": costs._asdict(),
                "waits": waits._asdict(),
                "names": {card.slug: card.name for card in cards},
            },
            payers=offered,
            data=limits.data,
            with_devices=bool(hours),
            hours=hour_choices(hours, last.hours, [line.rate for line in lines]),
            usual_hours=usual_label(hours),
            most_hours={
                slug: length(h.max) for slug, h in limits.hours.items() if h.max is not None
            },
            show_environments=limits.show_environments,
        )
