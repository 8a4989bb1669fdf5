"""The base of our spawners: traits, catalog, session lengths, and an admin's own form."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from jupyterhub.spawner import Spawner, SpawnException
from jupyterhub.traitlets import Callable
from traitlets import Any as AnyTrait
from traitlets import DefaultHandler, Float, Integer, List, Unicode, Union, default
from traitlets.config import Configurable

from ..catalog.loader import Catalog, watched
from ..catalog.models import DeviceLimits, Environment, SessionHours
from ..catalog.value_kinds import MOST_HOURS
from ..core.errors import ConfigError, GPUSpawnerError, InvalidRequest
from ..core.units import format_credits
from ..leases.models import Request
from ..ledger.rules import check_payer, format_time_left
from ..queue.service import Terms
from . import options
from .options import with_data

STEPS = (1.0, 2.0, 4.0, 8.0, 12.0, 24.0, 48.0, 72.0, 168.0)
"""Hours that the form offers, as far as they are allowed."""


class Hours(Configurable):
    """The traits that limit how long servers with a GPU run."""

    default_hours = Union(
        [Float(), Callable()],
        default_value=None,
        allow_none=True,
        config=True,
        help="""
        Hours that a server with a GPU may run when its member does not say how long.

        A number, or a callable that takes the spawner. None: as many as ``most_hours``; an
        environment of the catalog may say otherwise. Example::

            c.GPUSpawnerMixin.default_hours = 8
        """,
    )

    most_hours = Union(
        [Float(), Callable()],
        default_value=None,
        allow_none=True,
        config=True,
        help="""
        The most hours of one session with a GPU; an environment may allow fewer.

        A number, or a callable that takes the spawner. ``group_overrides`` can set it for
        a group. None: no limit, and no end unless the member asks for one. Servers without
        a GPU have no end. Example::

            c.GPUSpawnerMixin.most_hours = 24
            c.GPUSpawnerMixin.most_hours = lambda spawner: 72 if spawner.user.admin else 12
        """,
    )

    def session_hours(self, environment: Environment) -> SessionHours:
        """The usual and the greatest length for this member in this environment.

        Raises ConfigError when a setting makes no sense.
        """
        usual, most = self._hours("default_hours"), self._hours("most_hours")
        return options.combine(environment.hours, SessionHours(usual, most))

    def _hours(self, trait: str) -> float | None:
        value = getattr(self, trait)
        hours: Any = value(self) if callable(value) else value
        if hours is None:
            return None
        number = isinstance(hours, (int, float)) and not isinstance(hours, bool)
        if not number or not 0 < hours <= MOST_HOURS:
            what = (
                f"c.GPUSpawnerMixin.{trait} is {hours!r}; it is a number of hours, or None. "
                f"{MOST_HOURS} is the most"
            )
            raise ConfigError(what=what)
        return float(hours)


@dataclass(frozen=True, slots=True)
class HourChoice:
    """One line of the form's list of hours."""

    hours: float
    value: str
    label: str


def hour_choices(
    limits: Sequence[SessionHours], last: float | None, rates: Iterable[int]
) -> list[HourChoice]:
    """The hours that a form offers, shortest first, with what they cost.

    ``limits`` are those of the environments that the member may choose, ``last`` what was
    chosen last time, ``rates`` microcredits per GPU-hour of the models there are.
    """
    most = max((_most(limit) for limit in limits), default=0.0)
    offered = {hours for hours in STEPS if hours <= most}
    if most < math.inf:
        offered.add(most)
    if last is not None and last <= most:
        offered.add(last)
    found = sorted(rates)
    return [
        HourChoice(hours, repr(hours).removesuffix(".0"), _label(hours, found))
        for hours in sorted(offered)
        if hours >= options.LEAST_HOURS
    ]


def usual_label(limits: Sequence[SessionHours]) -> str:
    """What happens when the member says nothing, in words."""
    defaults = {limit.default for limit in limits}
    if len(defaults) > 1:
        return "usual for the environment"
    (usual,) = defaults or {None}
    return f"as usual: {length(usual)}" if usual is not None else "until I stop it"


def length(hours: float) -> str:
    """``1 h 30 min``, ``3 d``, or ``less than a minute``."""
    return format_time_left(timedelta(hours=hours))


def _most(limit: SessionHours) -> float:
    return math.inf if limit.max is None else limit.max


def _label(hours: float, rates: Sequence[int]) -> str:
    """``4 h, 2 to 16 credits a GPU``; the price is left out where everything is free."""
    costs = sorted({format_credits(math.ceil(rate * hours)) for rate in rates}, key=float)
    if not rates or not rates[-1]:
        return length(hours)
    price = costs[0] if len(costs) == 1 else f"{costs[0]} to {costs[-1]}"
    return f"{length(hours)}, {price} credits a GPU"


KNOWN_PACKAGES = ("gpuspawner", "jupyterhub", "dockerspawner", "traitlets")
"""Packages whose classes define only what JupyterHub and this package ship."""

FORM = frozenset({"options_form", "get_options_form"})
OPTIONS = frozenset({"options_from_form", "run_options_from_form", "apply_user_options"})


@cache
def defines_form(spawner_class: type) -> bool:
    """Return True if a class of the admin's, above or below ours, has a spawn form."""
    return not _defined_by_admin(spawner_class).isdisjoint(FORM)


@cache
def defines_options(spawner_class: type) -> bool:
    """Return True if a class of the admin's has a form or reads what a form sends."""
    return not _defined_by_admin(spawner_class).isdisjoint(FORM | OPTIONS)


def _defined_by_admin(spawner_class: type) -> frozenset[str]:
    """The names of FORM and OPTIONS that classes outside of the known packages define."""
    return frozenset(
        name
        for cls in spawner_class.__mro__
        if cls.__module__.partition(".")[0] not in KNOWN_PACKAGES and cls is not object
        for attribute, value in vars(cls).items()
        for name in _names_of(attribute, value)
    )


def _names_of(attribute: str, value: Any) -> tuple[str, ...]:
    """What an attribute of a class defines: itself, or the default of a trait."""
    if isinstance(value, DefaultHandler):
        return (str(value.trait_name),)
    name = attribute.removeprefix("_").removesuffix("_default")
    return (name,) if attribute == f"_{name}_default" else (attribute,)


class GPUSpawnerBase(Hours, Spawner):
    """Traits and options of every GPU spawner. Use :class:`GPUSpawnerMixin`, not this."""

    engine_name = ""
    """The name kept in leases, of the engine that proves an end."""

    broker: Any

    catalog = Unicode(
        config=True,
        help="""
        The YAML file with the environments that members choose from.

        Without one there is a single environment: the spawner's own image. An edit counts from
        the next form or start on; one that is not right changes nothing, and is said in the log
        and to admins on the form. Example::

            c.GPUSpawnerMixin.catalog = "/etc/gpuspawner/catalog.yaml"
        """,
    )

    gpu_limit = Union(
        [Integer(), Callable()],
        default_value=8,
        config=True,
        help="""
        The most GPUs of one server; the environment may allow fewer.

        A number, or a callable that takes the spawner. ``group_overrides`` can set it for
        a group. Example::

            c.GPUSpawnerMixin.gpu_limit = 2
            c.GPUSpawnerMixin.gpu_limit = lambda spawner: 4 if spawner.user.admin else 1
        """,
    )

    extra_options = List(
        Unicode(),
        config=True,
        help="""
        Fields of ``user_options`` that only your own hooks and callables read, such as
        ``pre_spawn_hook`` or a callable in ``environment``.

        They come by REST or by a form and are handed on as they are, unchecked. Others are
        refused, unless you have a form of your own. Example::

            c.GPUSpawnerMixin.extra_options = ["course"]
        """,
    )

    chosen = AnyTrait(None, allow_none=True, help="The environment of this start.")

    @default("apply_user_options")
    def _default_apply_user_options(self) -> Any:
        # Ours are applied in the pre-spawn stage, after groups and the admin's own hook.
        return lambda spawner, user_options: None

    # JupyterHub wants these from every Spawner class; the engine's class has them.

    async def start(self) -> Any:
        return await super().start()

    async def stop(self, now: bool = False) -> None:
        await super().stop(now=now)

    async def poll(self) -> Any:
        return await super().poll()

    # The catalog.

    def load_catalog(self) -> Catalog:
        """The catalog as the file is now, or as it last was right. Raises ConfigError."""
        if not self.catalog:
            return Catalog.single(devices=DeviceLimits(default=1, max=options.MOST_GPUS))
        return watched(self.user.settings, self.catalog, self.log).current()

    def catalog_is_due(self) -> bool:
        """Return True if the catalog's file changed and was not read since."""
        path = self.catalog
        return bool(path) and watched(self.user.settings, path, self.log).is_due()

    async def refresh_catalog(self) -> None:
        """Read a change of the catalog's file, if there is one, off the event loop."""
        if self.catalog:
            await watched(self.user.settings, self.catalog, self.log).refresh()

    def catalog_problem(self) -> str:
        """For an admin: why the newest edit of the catalog does not hold; else empty."""
        if not self.catalog or not self.user.admin:
            return ""
        return watched(self.user.settings, self.catalog, self.log).problem

    @property
    def group_names(self) -> frozenset[str]:
        """The member's groups, as the Hub knows them."""
        return frozenset(group.name for group in self.user.groups)

    def most_gpus(self) -> int:
        """``gpu_limit`` for this member."""
        limit = self.gpu_limit
        return int(limit(self)) if callable(limit) else int(limit)

    # Options.

    @property
    def own_form_traits(self) -> tuple[str, ...]:
        """Traits that, once configured, put the spawner's own form above ours."""
        return ("options_form",)

    def shows_own_form(self) -> bool:
        """Return True if the form of the admin's configuration or class goes above ours."""
        return not self._configured.isdisjoint(self.own_form_traits) or defines_form(type(self))

    def takes_foreign_options(self) -> bool:
        """Return True if the admin's configuration or class reads options of its own."""
        names = (*self.own_form_traits, "options_from_form", "apply_user_options")
        return not self._configured.isdisjoint(names) or defines_options(type(self))

    def parse_options(self, fields: Mapping[str, Any]) -> options.FormChoice:
        """Our part of ``user_options``. Raises InvalidRequest for fields that nobody reads."""
        foreign = self.takes_foreign_options()
        try:
            return options.parse(fields, foreign=foreign, extra=self.extra_options)
        except InvalidRequest as error:
            self.log.info(
                "%s (If a hook of yours reads it, name it in c.GPUSpawnerMixin.extra_options.)",
                error.message,
            )
            raise

    def is_configured(self, trait: str) -> bool:
        """Whether the admin set a trait, on this class or one that it is made from."""
        return trait in self._configured

    @property
    def _configured(self) -> frozenset[str]:
        """The names of all those traits; worked out once for each class of a hub."""
        kept: dict[Any, frozenset[str]]
        kept = self.user.settings.setdefault("gpuspawner_configured", {})
        of_class = (type(self), id(self.config))  # one of each while a hub runs
        if of_class not in kept:
            kept[of_class] = frozenset(
                name
                for cls in type(self).__mro__
                if cls.__name__ in self.config
                for name in self.config[cls.__name__]
            )
        return kept[of_class]

    def run_options_from_form(self, form_data: Mapping[str, list[Any]]) -> Any:
        """``user_options`` from the form: our fields checked, others as the admin says.

        Returns a dictionary, or an awaitable of one where ``options_from_form`` gives that.
        """
        ours = {name: form_data[name] for name in options.FIELDS if name in form_data}
        rest = {
            name: value
            for name, value in form_data.items()
            if name not in options.FIELDS + options.IGNORED
        }
        try:
            choice = options.parse(ours)
            self.parse_options(rest)
        except GPUSpawnerError as error:
            raise spawn_exception(error) from None
        extra = {
            name: rest[name][0] if len(rest[name]) == 1 else rest[name]
            for name in self.extra_options
            if name in rest
        }
        ours = choice.as_user_options()
        if not self.takes_foreign_options():
            return {**extra, **ours}
        own = super().run_options_from_form(rest)
        return _joined(extra, own, ours) if inspect.isawaitable(own) else {**extra, **own, **ours}

    def resolve_options(self) -> tuple[Environment, Request]:
        """The environment and the request of this start, from ``user_options``.

        They may come from the form, from REST, or from the last start: none is trusted.
        """
        catalog = self.load_catalog()
        choice = self.parse_options(self.user_options or {})
        groups = self.group_names
        if choice.environment:
            environment = catalog.get_for(choice.environment, groups)
        else:
            environment = catalog.default_for(groups)
        if self.catalog and "image" in (self.user_options or {}):
            raise InvalidRequest(
                "The image comes with the environment: choose that instead.", field="image"
            )
        environment = environment.with_options(choice.options_in(environment))
        environment = with_data(catalog, environment, choice.data, groups)
        return environment, options.resolve(choice, environment, self.most_gpus())

    def terms(self, environment: Environment, request: Request) -> Terms:
        """On which terms this start asks for its devices. Raises TooMuchAsked, or NotAllowed for
        an account that the member may not draw on."""
        choice = self.parse_options(self.user_options or {})
        seconds = None
        if request.devices:
            hours = self.session_hours(environment)
            seconds = options.session_seconds(choice, hours, environment)
        groups = self.group_names
        if choice.account:
            check_payer(choice.account, self.user.name, groups)
        return Terms(
            groups=groups,
            account=choice.account or "",
            seconds=seconds,
            options=dict(self.user_options or {}),
            wait=choice.wait is not False,
            shown_at=datetime.fromisoformat(choice.shown_at) if choice.shown_at else None,
        )


async def _joined(
    extra: dict[str, Any], own: Awaitable[dict[str, Any]], ours: dict[str, Any]
) -> dict[str, Any]:
    return {**extra, **await own, **ours}


def spawn_exception(error: GPUSpawnerError) -> SpawnException:
    """A domain error as JupyterHub shows it: a sentence, never a traceback."""
    refusal = SpawnException(error.message, reason=error.reason, status_code=error.status_code)
    refusal.jupyterhub_message = error.message  # else pages show the exception's own text
    return refusal
