"""The part of the mixin that reads options: traits, catalog, form and request."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment as Templates
from jinja2 import PackageLoader
from jupyterhub.spawner import Spawner, SpawnException
from jupyterhub.traitlets import Callable
from jupyterhub.utils import maybe_future
from traitlets import Any as AnyTrait
from traitlets import Integer, Unicode, Union, default

from ..broker import Terms
from ..broker.payers import Payers
from ..broker.view import Overview
from ..catalog import Catalog, DeviceLimits, Environment, load
from ..errors import GPUSpawnerError, InvalidRequest, UnknownAccount
from ..ledger.payers import check_payer
from ..model import Account, DeviceStatus, Request, format_credits, member_account
from . import options
from .hours import Hours, hour_choices, length, usual_label
from .payers import payer_choices
from .prices import Prices, model_label

_templates = Templates(
    loader=PackageLoader("gpuspawner.spawners"), autoescape=True, trim_blocks=True
)


_LIMITS = ("gpu_limit", "default_hours", "most_hours")
"""Traits that decide what the form offers."""


class GPUSpawnerBase(Hours, Spawner):
    """Traits and options of every GPU spawner. Use :class:`GPUSpawnerMixin`, not this."""

    engine_name = ""
    """The name kept in leases, of the engine that proves an end."""

    broker: Any

    catalog = Unicode(
        config=True,
        help="""
        The YAML file with the environments that members choose from.

        Without one there is a single environment: the spawner's own image. Example::

            c.GPUSpawnerMixin.catalog = "/etc/jupyterhub/catalog.yaml"
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
        """The catalog as the file is now. Raises ConfigError when it was never valid."""
        if not self.catalog:
            return Catalog.single(devices=DeviceLimits(default=1, max=options.MOST_GPUS))
        path = Path(self.catalog)
        kept = self.user.settings.setdefault("gpuspawner_catalogs", {})
        stamp = path.stat().st_mtime_ns if path.exists() else 0
        if kept.get(path, (None, None))[0] != stamp:
            kept[path] = (stamp, load(os.fspath(path)))
        catalog: Catalog = kept[path][1]
        return catalog

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

    def takes_foreign_options(self) -> bool:
        """Whether the admin's own configuration reads options of its own."""
        names = (*self.own_form_traits, "options_from_form", "apply_user_options")
        return any(self.is_configured(name) for name in names)

    def is_configured(self, trait: str) -> bool:
        """Whether the admin set a trait, on this class or one that it is made from."""
        kept = self.user.settings.setdefault("gpuspawner_configured", {})
        of_class = (type(self), id(self.config))  # one of each while a hub runs
        if of_class not in kept:
            kept[of_class] = frozenset(
                name
                for cls in type(self).__mro__
                if cls.__name__ in self.config
                for name in self.config[cls.__name__]
            )
        return trait in kept[of_class]

    def run_options_from_form(self, form_data: Mapping[str, list[Any]]) -> dict[str, Any]:
        """``user_options`` from the form: our fields checked, others as the admin says."""
        ours = {name: form_data[name] for name in options.FIELDS if name in form_data}
        rest = {
            name: value
            for name, value in form_data.items()
            if name not in options.FIELDS + options.IGNORED
        }
        try:
            choice = options.parse(ours)
            if not self.takes_foreign_options():
                options.parse(rest)
                return choice.as_user_options()
        except GPUSpawnerError as error:
            raise spawn_exception(error) from None
        return {**super().run_options_from_form(rest), **choice.as_user_options()}

    def options_from_query(self, query_data: Mapping[str, list[Any]]) -> dict[str, Any]:
        """The same for ``opt-`` parameters of a link."""
        return self.run_options_from_form(query_data)

    def resolve_options(self) -> tuple[Environment, Request]:
        """The environment and the request of this start, from ``user_options``.

        They may come from the form, from REST, or from the last start: none is trusted.
        """
        catalog = self.load_catalog()
        choice = options.parse(self.user_options or {}, foreign=self.takes_foreign_options())
        groups = self.group_names
        if choice.environment:
            environment = catalog.get_for(choice.environment, groups)
        else:
            environment = catalog.default_for(groups)
        if self.catalog and "image" in (self.user_options or {}):
            raise InvalidRequest(
                "The image comes with the environment: choose that instead.", field="image"
            )
        return environment, options.resolve(choice, environment, self.most_gpus())

    def terms(self, environment: Environment, request: Request) -> Terms:
        """On which terms this start asks for its devices. Raises TooMuchAsked, or NotAllowed for
        an account that the member may not draw on."""
        choice = options.parse(self.user_options or {}, foreign=self.takes_foreign_options())
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

    # The form.

    async def get_options_form(self) -> str:
        """The admin's own form, if there is one, then environments, GPUs and the balance."""
        own = await super().get_options_form() if self.shows_own_form() else ""
        try:
            catalog = self.load_catalog()
            default_choice = catalog.default_for(self.group_names)
            overview = await self.broker.run(self.broker.overview)
            account = await self._account()
            payers = await self.broker.run(self.broker.payers, self.user.name, self.group_names)
            with self._set_for_now(await self._limits_of_groups()):
                return own + self.render_form(catalog, default_choice, overview, account, payers)
        except GPUSpawnerError as error:
            return own + _templates.get_template("unavailable.html").render(message=error.message)

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

    async def _account(self) -> Account:
        """The member's account; who comes for the first time gets the opening grant now."""
        try:
            return await self.broker.run(self.broker.account, member_account(self.user.name))
        except UnknownAccount:
            return await self.broker.run(self.broker.open_account, self.user.name)

    def shows_own_form(self) -> bool:
        """Whether JupyterHub's or DockerSpawner's form goes above ours."""
        return any(self.is_configured(name) for name in self.own_form_traits)

    def render_form(
        self,
        catalog: Catalog,
        usual: Environment,
        overview: Overview,
        account: Account,
        payers: Payers | None = None,
    ) -> str:
        """The form as HTML. Values that a member could have written are escaped."""
        environments = catalog.visible_to(self.group_names)
        last = self._last_choice()
        chosen = next((e for e in environments if e.slug == last.environment), usual)
        limit = self.most_gpus()
        most = min(limit, max((e.devices.max for e in environments), default=0), overview.total)
        count = chosen.devices.default if last.gpus is None else last.gpus
        with_devices = [e for e in environments if not e.cpu_only]
        limits = {e.slug: self.session_hours(e) for e in with_devices}
        prices = Prices(overview, environments, self.broker.clock())
        lines = prices.lines(account.available)
        offered = payer_choices(payers, last.account) if payers else []
        paying = {a.name: a for a in payers.accounts} if payers else {}
        who = [(choice.value, paying[choice.value]) for choice in offered] or [("", account)]
        return _templates.get_template("form.html").render(
            environments=environments,
            chosen=chosen,
            overview=overview,
            silent=[v.device for v in overview.devices if v.device.status is DeviceStatus.UNKNOWN],
            counts=range(most + 1),
            count=min(count, most),
            last=last,
            balance=format_credits(account.available),
            models=[(count.model, model_label(count)) for count in overview.models],
            lines=lines,
            prices_until=prices.until(),
            shown_at=prices.now.astimezone(timezone.utc).isoformat(),
            prices=prices.choices(range(most + 1), who),
            payers=offered,
            with_devices=bool(limits),
            hours=hour_choices(list(limits.values()), last.hours, [line.rate for line in lines]),
            usual_hours=usual_label(list(limits.values())),
            most_hours={slug: length(h.max) for slug, h in limits.items() if h.max is not None},
            show_environments=bool(self.catalog),
        )

    def _last_choice(self) -> options.Choice:
        """What this server was started with last time, if it can still be read."""
        try:
            stored = self.orm_spawner.user_options or {}
            return options.parse(stored, foreign=True)
        except GPUSpawnerError:
            return options.Choice()


def spawn_exception(error: GPUSpawnerError) -> SpawnException:
    """A domain error as JupyterHub shows it: a sentence, never a traceback."""
    refusal = SpawnException(error.message, reason=error.reason, status_code=error.status_code)
    refusal.jupyterhub_message = error.message  # else pages show the exception's own text
    return refusal
