"""The spawn form: environments, devices, hours, who pays, and what it costs."""

from __future__ import annotations

from datetime import timezone

from jinja2 import Environment as Templates
from jinja2 import PackageLoader

from ..broker.payers import Payers
from ..broker.view import Overview
from ..catalog import Catalog, Environment
from ..errors import GPUSpawnerError, UnknownAccount
from ..model import Account, DeviceStatus, format_credits, member_account
from ..pages.prices import Prices, model_label
from .hours import hour_choices, length, usual_label
from .links import GPUSpawnerLinks
from .payers import payer_choices

_templates = Templates(
    loader=PackageLoader("gpuspawner.spawners"), autoescape=True, trim_blocks=True
)


class GPUSpawnerForm(GPUSpawnerLinks):
    """The part of the mixin that makes the form. Use :class:`GPUSpawnerMixin`, not this."""

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
        last = self.last_choice()
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
            catalog_problem=self.catalog_problem(),
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
