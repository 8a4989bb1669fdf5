"""The spawn form: its lists, an admin's own form above it, and links that fill it in.

Unlike in JupyterHub, a link starts nothing: its author may want others to spend their credits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta, timezone
from functools import cache, partial
from html.parser import HTMLParser
from typing import Any, NoReturn, Protocol, TypeVar

from jinja2 import ChoiceLoader, PackageLoader
from jinja2 import Environment as Templates
from jupyterhub.handlers.pages import SpawnHandler
from jupyterhub.utils import maybe_future
from traitlets import DefaultHandler

from ..catalog.loader import Catalog
from ..catalog.models import Environment, SessionHours
from ..core.errors import GPUSpawnerError, UnknownAccount
from ..core.units import format_credits
from ..devices.models import DeviceStatus
from ..devices.snapshots import Overview
from ..hub_pages.cards import PAGE, make_cards, usual_request, wait_tables
from ..hub_pages.prices import PriceList, model_label, most_shared, share_choice
from ..leases.host_resources import HostAmount
from ..leases.models import SHARE, LeaseState, Request
from ..ledger.models import member_account
from ..ledger.rules import check_payer, format_time_left
from ..ledger.service import Payers
from ..services import Services
from . import options
from .compat import SpawnException
from .options import DataChoice, choose_environment, data_choices
from .progress import FailedSpawn

T = TypeVar("T")

# The lists of accounts and of hours.


@dataclass(frozen=True, slots=True)
class PayerChoice:
    """One entry in the form's list of accounts."""

    account: str
    available: str
    """Credits."""
    selected: bool


def payer_choices(payers: Payers, last: str | None) -> list[PayerChoice]:
    """Return the accounts that a member may choose, with the last one selected.

    The list is empty if there is only one account.
    """
    names = [account.name for account in payers.accounts]
    if len(names) < 2:
        return []
    chosen = last if last in names else payers.usual
    return [
        PayerChoice(account.name, format_credits(account.available), account.name == chosen)
        for account in payers.accounts
    ]


STEPS = (1.0, 2.0, 4.0, 8.0, 12.0, 24.0, 48.0, 72.0, 168.0)
"""Session lengths in hours that the form offers, up to the member's limit."""


@dataclass(frozen=True, slots=True)
class HourChoice:
    """One entry in the form's list of hours."""

    hours: float
    value: str
    length: str
    """The hours in words."""
    label: str
    """The same with their cost."""


def hour_choices(
    limits: Sequence[SessionHours], last: float | None, rates: Iterable[int]
) -> list[HourChoice]:
    """Return the session lengths that a form offers, shortest first, with their costs.

    ``limits`` are those of the environments that the member may choose, ``last`` are the hours that
    they chose last time, and ``rates`` are microcredits per GPU-hour of the available models.
    """
    most = max((math.inf if each.max is None else each.max for each in limits), default=0.0)
    offered = {hours for hours in STEPS if hours <= most}
    if most < math.inf:
        offered.add(most)
    if last is not None and last <= most:
        offered.add(last)
    found = sorted(rates)
    return [
        HourChoice(hours, repr(hours).removesuffix(".0"), length(hours), _hours_label(hours, found))
        for hours in sorted(offered)
        if hours >= options.LEAST_HOURS
    ]


def usual_label(limits: Sequence[SessionHours]) -> str:
    """Describe what happens if the member chooses no session length."""
    defaults = {limit.default for limit in limits}
    if len(defaults) > 1:
        return "Default"
    (usual,) = defaults or {None}
    return f"as usual: {length(usual)}" if usual is not None else "until I stop it"


def length(hours: float) -> str:
    """Format hours as ``1 h 30 min``, ``3 d``, or ``less than a minute``."""
    return format_time_left(timedelta(hours=hours))


def _hours_label(hours: float, rates: Sequence[int]) -> str:
    """Format ``4 h, 2 to 16 credits a GPU``, without the price if everything is free."""
    if not rates or not rates[-1]:
        return length(hours)
    costs = sorted({format_credits(math.ceil(rate * hours)) for rate in rates}, key=float)
    price = costs[0] if len(costs) == 1 else f"{costs[0]} to {costs[-1]}"
    return f"{length(hours)}, {price} credits a GPU"


# An admin's own form.

KNOWN_PACKAGES = ("gpuspawner", "jupyterhub", "dockerspawner", "traitlets")
"""Packages whose classes are not the admin's own."""

FORM = frozenset({"options_form", "get_options_form"})
OPTIONS = frozenset({"options_from_form", "run_options_from_form", "apply_user_options"})


@cache
def defines_form(spawner_class: type) -> bool:
    """Return True if a class of the admin's, above or below ours, defines a spawn form."""
    return not _defined_by_admin(spawner_class).isdisjoint(FORM)


@cache
def defines_options(spawner_class: type) -> bool:
    """Return True if a class of the admin's defines a form or reads submitted forms."""
    return not _defined_by_admin(spawner_class).isdisjoint(FORM | OPTIONS)


def _defined_by_admin(spawner_class: type) -> frozenset[str]:
    """Return the names of all attributes that classes outside of the known packages define."""
    return frozenset(
        name
        for cls in spawner_class.__mro__
        if cls.__module__.partition(".")[0] not in KNOWN_PACKAGES and cls is not object
        for attribute, value in vars(cls).items()
        for name in _names_of(attribute, value)
    )


def _names_of(attribute: str, value: Any) -> tuple[str, ...]:
    """Return the name that a class attribute defines: its own, or a trait's for its default."""
    if isinstance(value, DefaultHandler):
        return (str(value.trait_name),)
    name = attribute.removeprefix("_").removesuffix("_default")
    return (name,) if attribute == f"_{name}_default" else (attribute,)


# Links.

PREFIX = "opt-"

_NOT_SET_BY_LINKS = ("hidden", "file", "password", "submit", "button", "image", "reset")
"""Types of fields that links do not fill in."""


def link_fields(query: MutableMapping[str, list[bytes]]) -> dict[str, list[str]]:
    """Return the options in an address as JupyterHub would read them, without foreign additions.

    Values that are not UTF-8 are repaired in place, because JupyterHub reads them afterwards.
    """
    for name, values in query.items():
        query[name] = [value.decode("utf-8", "replace").encode() for value in values]
    said = {name: [value.decode() for value in values] for name, values in query.items()}
    # Without the prefix only known fields count: mail programs and course pages add parameters.
    return _prefixed(said) or {name: said[name] for name in said if name in options.FIELDS}


def _prefixed(said: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the fields with the prefix, without it."""
    return {name[len(PREFIX) :]: said[name] for name in said if name.startswith(PREFIX)}


def fields_beside(query: Mapping[str, list[bytes]]) -> dict[str, list[str]]:
    """Return the fields in an address that are not ours, with or without the prefix."""
    said = {
        name.removeprefix(PREFIX): [value.decode("utf-8", "replace") for value in values]
        for name, values in query.items()
    }
    return {name: texts for name, texts in said.items() if name not in options.FIELDS}


def names_in(form: str) -> set[str]:
    """Return the names of the fields in an HTML form that a link can fill in."""
    reader = _FieldNames()
    reader.feed(form)
    return reader.names


class _FieldNames(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("select", "input", "textarea") and given.get("type") not in _NOT_SET_BY_LINKS:
            self.names.add(given.get("name") or "")


# The form.

templates = Templates(
    loader=ChoiceLoader(
        [
            PackageLoader("gpuspawner.spawners"),
            PackageLoader("gpuspawner.spawners", "hub_templates"),  # shared with the cards
        ]
    ),
    autoescape=True,
    trim_blocks=True,
    auto_reload=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormLimits:
    """What one member may currently choose from, and what is preselected."""

    environments: tuple[Environment, ...]
    """The environments that have a card."""
    left_out: int
    chosen: Environment
    last: options.FormChoice
    by_link: bool
    most_gpus: int
    data: list[DataChoice]
    hours: dict[str, SessionHours]
    """Session limits by slug, for environments with devices."""
    guaranteed: HostAmount
    """What a server has where its environment guarantees nothing."""
    show_environments: bool
    catalog_problem: str
    pages_url: str


def render_form(services: Services, limits: FormLimits, user: str, groups: frozenset[str]) -> str:
    """Return one member's form as HTML, with all values escaped that a member could have written.

    Blocks on the store; does not use the Hub's own database. A new member gets the opening grant.
    """
    try:
        account = services.ledger.account(member_account(user))
    except UnknownAccount:
        account = services.ledger.open_account(user)
    payers = services.ledger.payers(user, groups)
    # As all pages show it: less what is due now.
    account = next((each for each in payers.accounts if each.name == account.name), account)
    overview = services.monitoring.overview().usable_by(groups, services.clock())
    shown, last, chosen = limits.environments, limits.last, limits.chosen
    ask = partial(services.positions.outlooks, member=user, groups=groups)
    guaranteed = limits.guaranteed
    outlooks = ask({e.slug: usual_request(e, guaranteed) for e in shown})
    reserved = {slug: outlook.reserved for slug, outlook in outlooks.items() if outlook.reserved}
    prices = price_list(services, overview, shown, payers, groups, reserved=reserved)
    now = prices.now
    cards = make_cards(shown, overview, outlooks, now, limits.pages_url, guaranteed)
    lines = prices.lines(account)
    fields = {e.slug: environment_fields(e, prices, limits) for e in shown}
    shares = list(prices.shares())
    most = max(each.gpus for each in fields.values())
    usual = [each.usual_gpus for each in fields.values() if isinstance(each.usual_gpus, int)]
    counts: list[int | str] = [*range(1 + max(most, *usual)), *([SHARE] if shares else [])]
    offered_counts = [each for each in counts if isinstance(each, str) or each <= most]
    count = fields[chosen.slug].usual_gpus if last.gpus is None else last.gpus
    offered = payer_choices(payers, last.account)
    paying = {a.name: a for a in payers.accounts}
    who = [(choice.account, paying[choice.account]) for choice in offered] or [("", account)]
    models = [count.model for count in overview.models]
    waits = partial(wait_tables, shown, counts, models, ask, now, guaranteed=guaranteed)
    by_memory = {e.slug: prices.choices_by_memory(e, counts, last.gpu_memory) for e in shown}
    memories = sorted({memory for some in by_memory.values() for _, _, memory in some})
    hours = list(limits.hours.values())
    rates = [line.rate for line in lines if not line.is_share]
    lengths = hour_choices(hours, last.hours, rates)
    cost = partial(
        prices.tables,
        counts,
        who,
        [(choice.value, choice.hours) for choice in lengths],
        {slug: each.default for slug, each in limits.hours.items()},
        services.ledger.settings.lead(None),
    )
    return templates.get_template("form.html").render(
        limits=limits,
        cards=cards,
        chosen=chosen,
        overview=overview,
        silent=[v.device for v in overview.devices if v.device.status is DeviceStatus.UNKNOWN],
        counts=offered_counts,
        count=min(count, most) if isinstance(count, int) else count,
        shares=prices.smallest_shares(),
        share_choice=share_choice(shares),
        shared=most_shared(shares),
        last=last,
        balance=format_credits(account.available),
        models=[(count.model, model_label(count)) for count in overview.models],
        memories=memories,
        lines=lines,
        prices_until=prices.until(),
        shown_at=prices.now.astimezone(timezone.utc).isoformat(),
        told={
            "costs": asdict(cost()),
            "waits": asdict(waits()),
            "by_memory": {
                "costs": asdict(cost(by_memory=by_memory)),
                "waits": asdict(waits(by_memory=by_memory)),
            },
            "fields": {slug: asdict(each) for slug, each in fields.items()},
        },
        payers=offered,
        hours=lengths,
        usual_hours=usual_label(hours),
        most_hours={s: length(h.max) for s, h in limits.hours.items() if h.max is not None},
    )


def price_list(
    services: Services,
    overview: Overview,
    environments: Sequence[Environment],
    payers: Payers,
    groups: frozenset[str],
    discounted: Callable[[int], int] = lambda rate: rate,
    *,
    reserved: Mapping[str, str] | None = None,
) -> PriceList:
    """Return what environments cost now, and how long each account pays. Blocks on the store."""
    names = [account.name for account in payers.accounts]
    running: Counter[str] = Counter()
    for lease in services.leases.open_leases():
        running[lease.account] += lease.rate if lease.state is LeaseState.RUNNING else 0
    policy_for = services.ledger.settings.policy_for
    return PriceList(
        overview,
        environments,
        services.clock(),
        services.ledger.ending_of(names),
        running,
        {name: policy_for(name, groups) for name in names},
        services.exhaustion.grace,
        discounted,
        reserved,
    )


@dataclass(frozen=True, slots=True)
class EnvironmentFields:
    """What the form's fields offer in one environment."""

    name: str
    gpus: int
    """The most that this member may choose."""
    usual_gpus: int | str
    share: str
    """What a share is here; empty if this member may choose none."""
    cpu_variant: bool
    models: list[str]
    most_hours: float | None
    usual_hours: float | None
    usual_length: str
    """The same in words; empty if a session has no end unless the member chooses one."""


def environment_fields(
    environment: Environment, prices: PriceList, limits: FormLimits
) -> EnvironmentFields:
    """Return what one member may choose in an environment."""
    hours = limits.hours.get(environment.slug, SessionHours())
    return EnvironmentFields(
        name=environment.display_name,
        gpus=min(limits.most_gpus, prices.most_gpus(environment)),
        usual_gpus=options.usual_gpus(environment, limits.most_gpus),
        share=share_choice(prices.shares_of(environment)) if limits.most_gpus else "",
        cpu_variant=environment.cpu_variant,
        models=prices.model_names(environment),
        most_hours=hours.max,
        usual_hours=hours.default,
        usual_length="" if hours.default is None else length(hours.default),
    )


def note_of_link(own: str, beside: Mapping[str, list[str]], hidden: Collection[str]) -> str:
    """Return HTML about a link's values for the admin's own fields; empty for none.

    ``own`` is the admin's form, ``beside`` the link's values for fields that are not ours, and
    ``hidden`` the fields that are sent along with ours if the admin's form lacks them.
    """
    shown = names_in(own)
    in_form = {name: texts for name, texts in beside.items() if name in shown}
    in_ours = {n: texts for n, texts in beside.items() if n in hidden and n not in in_form}
    if not in_form and not in_ours:
        return ""
    return templates.get_template("own_fields.html").render(shown=in_form, hidden=in_ours)


class _Owner(Protocol):
    """What the form needs from its spawner; see GPUSpawnerMixin."""

    asked: options.FormChoice | None
    refused: options.FormChoice | None
    asked_beside: Mapping[str, list[str]]
    services: Any
    catalog: Any
    group_overrides: Any
    hub: Any
    last_started: Mapping[str, Any]
    user: Any

    @property
    def group_names(self) -> frozenset[str]: ...
    def load_catalog(self) -> Catalog: ...
    async def refresh_catalog(self) -> None: ...
    def catalog_problem(self) -> str: ...
    def most_gpus(self) -> int: ...
    def usual_guarantee(self) -> HostAmount: ...
    def session_hours(self, environment: Environment) -> SessionHours: ...
    def parse_options(self, fields: Mapping[str, Any]) -> options.FormChoice: ...
    def refusal(self, error: GPUSpawnerError) -> FailedSpawn: ...
    def set_trait(self, name: str, value: Any) -> None: ...


_LIMITS = (
    *("gpu_limit", "default_hours", "most_hours", "workspace_quota"),
    *("mem_guarantee", "cpu_guarantee"),
)
"""Traits that determine what the form offers."""


class SpawnForm:
    """What a member may choose for one server, chose last time, and chose through a link."""

    def __init__(self, spawner: _Owner) -> None:
        self._spawner = spawner

    @property
    def services(self) -> Services:
        """The hub's services, created on first use because the database may be unavailable."""
        services: Services = self._spawner.services
        return services

    async def render(self) -> str:
        """Return the form as HTML, or the reason why there is none."""
        spawner = self._spawner
        await spawner.refresh_catalog()
        try:
            catalog = spawner.load_catalog()
            usual = catalog.default_for(spawner.group_names)
            limits = await self.within_group_limits(lambda: self._limits(catalog, usual))
            return await self.services.read(
                render_form, self.services, limits, spawner.user.name, spawner.group_names
            )
        except GPUSpawnerError as error:
            return templates.get_template("unavailable.html").render(message=error.message)

    def _limits(self, catalog: Catalog, usual: Environment) -> FormLimits:
        spawner = self._spawner
        environments = catalog.visible_to(spawner.group_names)
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
            by_link=spawner.asked is not None and spawner.asked is not spawner.refused,
            most_gpus=spawner.most_gpus(),
            data=data_choices(catalog, shown, spawner.group_names, last.data),
            hours={e.slug: spawner.session_hours(e) for e in shown if not e.cpu_only},
            guaranteed=spawner.usual_guarantee(),
            show_environments=bool(spawner.catalog),
            catalog_problem=spawner.catalog_problem(),
            pages_url=f"{spawner.hub.base_url}environments",
        )

    def last_choice(self) -> options.FormChoice:
        """Return the choices with which this server last started, overridden by those of a link.

        JupyterHub stores ``user_options`` before a start, so a refused choice would come back.
        """
        try:
            last = options.parse(self._spawner.last_started, foreign=True)
        except GPUSpawnerError:  # stored by an older version or by another program
            last = options.FormChoice()
        asked = self._spawner.asked
        if asked is None:
            return last
        if asked.environment not in (None, last.environment):
            last = options.FormChoice(account=last.account)
        return replace(last, **{"wait": None, **asked.as_user_options()})

    async def take_link(self, handler: Any) -> None:
        """Take the choice of the link that opens a form.

        An impossible choice is left to :meth:`refuse_link`, whose refusal JupyterHub shows above
        the form.
        """
        if not isinstance(handler, SpawnHandler) or handler.request.method != "GET":
            return
        query = handler.request.query_arguments
        self._spawner.asked = None
        fields = link_fields(query)
        self._spawner.asked_beside = fields_beside(query)
        try:
            if fields:
                choice = self._spawner.parse_options(fields)
                await self._check_choice(choice)
                self._spawner.asked = choice
        except GPUSpawnerError:
            return
        for name in [name for name in query if name not in ("next", "display_name")]:
            del query[name]

    async def refuse_link(self, query: Mapping[str, list[Any]]) -> NoReturn:
        """Raise SpawnException: a link's choice is impossible, or a link starts nothing."""
        try:
            # JupyterHub 5 leaves the prefix to us.
            choice = self._spawner.parse_options(_prefixed(query) or query)
            await self._check_choice(choice)
        except GPUSpawnerError as error:
            raise self._spawner.refusal(error) from None
        self._spawner.asked = choice
        sentence = "Look at what the link chose, and press Start."
        raise SpawnException(sentence, reason="link", status_code=400)

    async def _check_choice(self, choice: options.FormChoice) -> None:
        """Raise Refused if this member could never have this choice, however long they wait."""
        spawner = self._spawner
        await spawner.refresh_catalog()
        groups = spawner.group_names
        environment = choose_environment(spawner.load_catalog(), choice, groups)
        if choice.account:
            check_payer(choice.account, spawner.user.name, groups)

        def resolve() -> Request:
            request = options.resolve(choice, environment, spawner.most_gpus())
            if request.devices:
                options.session_seconds(choice, spawner.session_hours(environment), environment)
            return request

        request = await self.within_group_limits(resolve)
        if choice.gpus or choice.gpu_memory:
            await self.services.read(self.services.positions.require_fit, request, groups)

    async def within_group_limits(self, look: Callable[[], T]) -> T:
        """Call ``look`` with the spawner's traits as ``group_overrides`` will set them."""
        limits = await self._limits_of_groups()
        before = {trait: getattr(self._spawner, trait) for trait in limits}
        try:
            for trait, value in limits.items():
                self._spawner.set_trait(trait, value)
            return look()
        finally:
            for trait, value in before.items():
                self._spawner.set_trait(trait, value)

    async def _limits_of_groups(self) -> dict[str, Any]:
        overrides = self._spawner.group_overrides
        if callable(overrides):
            overrides = await maybe_future(overrides(self._spawner))
        found = {}
        for name in sorted(overrides):
            if self._spawner.group_names & set(overrides[name]["groups"]):
                settings = overrides[name]["spawner_override"]
                found.update({trait: settings[trait] for trait in _LIMITS if trait in settings})
        return {
            trait: value(self._spawner) if callable(value) else value
            for trait, value in found.items()
        }
