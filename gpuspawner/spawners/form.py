"""The spawn form, links that fill it in, and the choice of who pays.

JupyterHub itself starts a server for whoever follows such a link. Here a link starts nothing: it
may stand in a course page, or come from somebody who likes others to spend their credits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from html.parser import HTMLParser
from typing import Any

from jinja2 import ChoiceLoader, PackageLoader
from jinja2 import Environment as Templates
from jupyterhub.handlers.pages import SpawnHandler
from jupyterhub.spawner import SpawnException
from jupyterhub.utils import maybe_future
from traitlets import Any as AnyTrait
from traitlets import Dict

from ..catalog.loader import Catalog
from ..catalog.models import Environment, SessionHours
from ..core.errors import GPUSpawnerError, UnknownAccount
from ..core.units import format_credits
from ..devices.models import DeviceStatus
from ..devices.snapshots import Overview
from ..hub_pages.cards import PAGE, make_cards, usual_request, wait_tables
from ..hub_pages.prices import PriceList, model_label
from ..ledger.models import Account, member_account
from ..ledger.rules import check_payer
from ..ledger.service import Payers
from . import options
from .base import GPUSpawnerBase, hour_choices, length, spawn_exception, usual_label
from .options import DataChoice, data_choices, with_data


@dataclass(frozen=True, slots=True)
class PayerChoice:
    """One line of the form's list of accounts."""

    value: str
    label: str
    selected: bool


def payer_choices(payers: Payers, last: str | None) -> list[PayerChoice]:
    """What a member may choose from, and what they chose last time; nothing to choose is none."""
    names = [account.name for account in payers.accounts]
    if len(names) < 2:
        return []
    chosen = last if last in names else payers.usual
    return [
        PayerChoice(account.name, _label(account.name, account.available), account.name == chosen)
        for account in payers.accounts
    ]


def _label(account: str, available: int) -> str:
    kind, _, name = account.partition(":")
    whose = f"group {name}" if kind == "group" else "my own credits"
    return f"{whose} ({format_credits(available)} credits)"


PREFIX = "opt-"

_NOT_SET_BY_LINKS = ("hidden", "file", "password", "submit", "button", "image", "reset")
"""Types of fields that no link fills in."""

_LIMITS = ("gpu_limit", "default_hours", "most_hours", "workspace_quota")
"""Traits that decide what the form offers."""


class GPUSpawnerLinks(GPUSpawnerBase):
    """The part of the mixin that reads links. Use :class:`GPUSpawnerMixin`, not this."""

    asked = AnyTrait(None, allow_none=True, help="What the link chose by which the form is open.")

    asked_beside = Dict(
        help="What the link says beside that: texts by name, of the admin's fields."
    )

    async def run_auth_state_hook(self, auth_state: Any) -> None:
        """The admin's hook; when the form is asked for, the link's choice is taken then.

        It is the last thing of a spawner's that JupyterHub calls before it would start a server
        with what the link says. A choice that cannot be had is left for
        :meth:`options_from_query`, whose refusal JupyterHub shows above the form.
        """
        await super().run_auth_state_hook(auth_state)
        handler = getattr(self, "handler", None)
        if not isinstance(handler, SpawnHandler) or handler.request.method != "GET":
            return
        query = handler.request.query_arguments
        self.asked = None
        fields = _fields(query)
        self.asked_beside = _fields_beside(query)
        try:
            if fields:
                choice = self._choice_of(fields)
                await self._check_choice(choice)
                self.asked = choice
        except GPUSpawnerError:
            return
        for name in [name for name in query if name not in ("next", "display_name")]:
            del query[name]

    def asked_of(self, names: Collection[str]) -> dict[str, list[str]]:
        """Return what the link says of these fields of the admin's."""
        return {name: texts for name, texts in self.asked_beside.items() if name in names}

    async def options_from_query(self, query_data: Mapping[str, list[Any]]) -> dict[str, Any]:
        """Never options: why what a link chose cannot be had."""
        try:
            choice = self._choice_of(query_data)
            await self._check_choice(choice)
        except GPUSpawnerError as error:
            raise spawn_exception(error) from None
        self.asked = choice
        sentence = "Look at what the link chose, and press Start."
        raise SpawnException(sentence, reason="link", status_code=400)

    def run_options_from_form(self, form_data: Mapping[str, list[Any]]) -> Any:
        """What the member chose now counts, and no link any more."""
        self.asked, self.asked_beside = None, {}
        return super().run_options_from_form(form_data)

    def last_choice(self) -> options.FormChoice:
        """What this server was started with last time, and what a link says over it."""
        try:
            stored = self.orm_spawner.user_options or {}
            last = options.parse(stored, foreign=True)
        except GPUSpawnerError:  # written by an older version, or by somebody else
            last = options.FormChoice()
        if self.asked is None:
            return last
        if self.asked.environment not in (None, last.environment):
            last = options.FormChoice(account=last.account, wait=last.wait)
        return replace(last, **self.asked.as_user_options())

    def _choice_of(self, fields: Mapping[str, list[Any]]) -> options.FormChoice:
        """What a link chose of ours; what else it says, an admin's own form may read."""
        return self.parse_options(fields)

    async def _check_choice(self, choice: options.FormChoice) -> None:
        """Whether this member may have it here, at all and not now. Raises Refused."""
        await self.refresh_catalog()
        catalog, groups = self.load_catalog(), self.group_names
        if choice.environment:
            environment = catalog.get_for(choice.environment, groups)
        else:
            environment = catalog.default_for(groups)
        environment.with_options(choice.options_in(environment))
        with_data(catalog, environment, choice.data, groups)
        if choice.account:
            check_payer(choice.account, self.user.name, groups)
        with self._set_for_now(await self._limits_of_groups()):
            request = options.resolve(choice, environment, self.most_gpus())
            if request.devices:
                options.session_seconds(choice, self.session_hours(environment), environment)
        if choice.gpus:
            await self.broker.read(self.broker.must_fit, request)

    # What group_overrides will set.

    async def _limits_of_groups(self) -> dict[str, Any]:
        """What ``group_overrides`` will set at the start, of what the form shows."""
        overrides = self.group_overrides
        if callable(overrides):
            overrides = await maybe_future(overrides(self))
        found = {}
        for name in sorted(overrides):
            if self.group_names & set(overrides[name]["groups"]):
                settings = overrides[name]["spawner_override"]
                found.update({trait: settings[trait] for trait in _LIMITS if trait in settings})
        return {trait: value(self) if callable(value) else value for trait, value in found.items()}

    @contextmanager
    def _set_for_now(self, values: Mapping[str, Any]) -> Iterator[None]:
        before = {trait: getattr(self, trait) for trait in values}
        try:
            for trait, value in values.items():
                self.set_trait(trait, value)
            yield
        finally:
            for trait, value in before.items():
                self.set_trait(trait, value)


def _fields(query: MutableMapping[str, list[bytes]]) -> dict[str, list[str]]:
    """The options of an address, as JupyterHub would read them, but for strangers' additions.

    Values are mended in place where they are no UTF-8: JupyterHub reads them after us.
    """
    for name, values in query.items():
        query[name] = [value.decode("utf-8", "replace").encode() for value in values]
    said = {name: [value.decode() for value in values] for name, values in query.items()}
    ours = {name[len(PREFIX) :]: said[name] for name in said if name.startswith(PREFIX)}
    # Without the prefix only what is known: mail programs and course pages add things.
    return ours or {name: said[name] for name in said if name in options.FIELDS}


def _fields_beside(query: Mapping[str, list[bytes]]) -> dict[str, list[str]]:
    """The fields of an address that are not ours, with or without the prefix."""
    said = {
        name.removeprefix(PREFIX): [value.decode("utf-8", "replace") for value in values]
        for name, values in query.items()
    }
    return {name: texts for name, texts in said.items() if name not in options.FIELDS}


def names_in(form: str) -> set[str]:
    """Return the names of the fields of a form, which is HTML."""
    reader = _FieldNames()
    reader.feed(form)
    return reader.names


class _FieldNames(HTMLParser):
    """Collects the names of the controls that a member can set."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("select", "input", "textarea") and given.get("type") not in _NOT_SET_BY_LINKS:
            self.names.add(given.get("name") or "")


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
class FormLimits:
    """What one member may choose from at this moment, and what is chosen already."""

    environments: tuple[Environment, ...]
    """Those that have a card."""
    left_out: int
    """How many more there are."""
    chosen: Environment
    last: options.FormChoice
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
class FormContext:
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

    def _make_form(self, limits: FormLimits, user: str, groups: frozenset[str]) -> str:
        # Off the event loop: nothing below asks the Hub's own database.
        return self._render(limits, self._know(user, groups))

    def _know(self, user: str, groups: frozenset[str]) -> FormContext:
        """Asks the store; who comes for the first time gets the opening grant now."""
        try:
            account = self.broker.ledger.account(member_account(user))
        except UnknownAccount:
            account = self.broker.ledger.open_account(user)
        payers = self.broker.ledger.payers(user, groups)
        ending = self.broker.ledger.ending_of([each.name for each in payers.accounts])
        return FormContext(self.broker.overview(), account, payers, ending)

    def _limits(self, catalog: Catalog, usual: Environment) -> FormLimits:
        """What this member may choose from, and what is chosen already."""
        environments = catalog.visible_to(self.group_names)
        last = self.last_choice()
        chosen = next((e for e in environments if e.slug == last.environment), usual)
        shown = environments[:PAGE]
        if chosen not in shown:
            shown = (chosen, *shown)
        return FormLimits(
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

    def _render(self, limits: FormLimits, known: FormContext) -> str:
        """The form as HTML. Values that a member could have written are escaped."""
        overview, account, payers = known.overview, known.account, known.payers
        shown, last, chosen = limits.environments, limits.last, limits.chosen
        most = min(limits.most_gpus, max(e.devices.max for e in shown), overview.total)
        counts = range(most + 1)
        count = chosen.devices.default if last.gpus is None else last.gpus
        now = self.broker.clock()
        outlooks = self.broker.outlooks({e.slug: usual_request(e) for e in shown})
        cards = make_cards(shown, overview, outlooks, now, limits.pages_url)
        prices = PriceList(overview, shown, now, known.ending)
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
