"""The base of the service's pages and forms, and a member's own page."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

import jinja2
from jupyterhub.services.auth import HubOAuthCallbackHandler
from markupsafe import Markup
from tornado import web

from ..core.errors import GPUSpawnerError, InvalidRequest
from ..core.text import LONGEST_REASON
from ..core.times import clock, end_clock
from ..core.units import format_bytes, format_credits
from ..devices.closures import GRANTING, Closure
from ..devices.snapshots import DeviceView
from ..leases.models import LeasedDevice
from ..monitoring.charts import Chart, chart
from . import view_models
from .base import ServiceHandler
from .fields import key_of
from .schemas import B, instant

STATES = {
    "free": "free",
    "leased": "leased",
    "occupied": "occupied",
    "unknown": "unknown",
    "parent": "split (MIG)",
    "prohibited": "closed",
    "drained": "drained",
    "draining": "draining",
}
"""A device's state in a word."""


OUTCOMES = {
    "granted": "Started",
    "cancelled": "Cancelled",
    "expired": "Expired",
    "refused": "Refused",
    "replaced": "Replaced",
    "member_gone": "Member gone",
}
"""What became of a ticket, in a word."""

OLD_FORM = "This form is too old, or came from another page. Open the page again, and send it anew."


class Page(ServiceHandler):
    """A handler that answers with a page, errors too."""

    paused: Closure | None = None
    """Why no GPUs are given out just now: every page says so."""

    reads_pause = True
    """Whether the page is told so at its beginning; others learn it with what they show."""

    async def prepare(self) -> None:
        await super().prepare()
        # A token proves nothing here: forms are sent by a browser, from a page of ours.
        if self.request.method not in ("GET", "HEAD", "OPTIONS") and not self.has_xsrf_proof:
            raise web.HTTPError(403) from InvalidRequest(OLD_FORM)
        if self.current_user and self.reads_pause:
            with suppress(GPUSpawnerError):  # whoever needs the store says that it is gone
                self.paused = (await self.services.read(self.services.devices.closures)).get(
                    GRANTING
                )

    @property
    def xsrf(self) -> Markup:
        """The field that proves that a form is from our page."""
        return Markup(self.xsrf_form_html())  # escaped there  # nosec B704

    def show(self, template: str, refusal: GPUSpawnerError | None = None, **values: Any) -> None:
        """Send a page; ``refusal``: why what was asked for on it was not done."""
        if refusal:
            self.set_status(refusal.status_code)
        usual = {
            "user": self.user,
            "admin": self.admin,
            "error": refusal.message if refusal else "",
            "longest": LONGEST_REASON,
        }
        self._send(template, {**usual, **values})

    def _send(self, template: str, values: Mapping[str, Any]) -> None:
        context = self.context
        usual = {
            "prefix": context.prefix,
            "hub": context.hub_url,
            "paused": self.paused,
            "shares": bool(self.services.settings.folders.source),
        }
        self.finish(TEMPLATES.get_template(template).render({**usual, **values}))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        _, sentence = self.sentence(status_code, **kwargs)
        self._send("error.html", {"status": status_code, "sentence": sentence})


class MemberPage(Page):
    """My balance, my servers, the devices, my sessions, my statement."""

    reads_pause = False

    @web.authenticated
    async def get(self) -> None:
        await self.show_mine()

    async def show_mine(self, refusal: GPUSpawnerError | None = None) -> None:
        """Send the page; ``refusal``: why what was asked for on it was not done."""
        warn_minutes = self.context.warn_minutes
        seen = await self.read(
            view_models.look, self.services, self.user, self.groups, warn_minutes
        )
        self.paused = seen.overview.paused
        self.show(
            "member.html",
            lasting=view_models.lasting(seen.mine.funds, seen.overview, seen.mine.now),
            kept=self.get_query_argument("kept", ""),
            stopped=self.get_query_argument("stopped", ""),
            given_up=self.get_query_argument("given_up", ""),
            extended=self.get_query_argument("extended", ""),
            restarted=self.get_query_argument("restarted", ""),
            snoozed=self.get_query_argument("snoozed", ""),
            ending=view_models.ending(seen.mine, self.context.session_warn_minutes),
            refusal=refusal,
            xsrf=self.xsrf,
            credits_help=self.services.settings.credits.help_text,
            **{field.name: getattr(seen, field.name) for field in fields(seen)},
        )


class AdminPage(Page):
    """Everybody's leases and balances, and the devices in full."""

    @web.authenticated
    async def get(self) -> None:
        self.need_admin()
        warn_minutes = self.context.warn_minutes
        all_of_them = await self.read(view_models.everyone, self.services, warn_minutes)
        overview, found = await self.read(
            view_models.device_figures, self.services, self.user, True
        )
        self.show(
            "admin.html",
            everyone=all_of_them,
            stopped=self.get_query_argument("stopped", ""),
            xsrf=self.xsrf,
            overview=overview,
            devices=found,
        )


class SignedIn(Page, HubOAuthCallbackHandler):
    """Where the Hub sends a browser back to; its errors are pages like ours."""


class NotFound(Page):
    """Whatever else is asked for, in whatever way."""

    async def prepare(self) -> None:
        raise web.HTTPError(404)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        if not self.request.path.startswith(self.context.prefix + "api/"):
            super().write_error(status_code, **kwargs)
            return
        reason, sentence = self.sentence(status_code, **kwargs)
        self.finish({"status": status_code, "error": reason, "message": sentence})


# Values to words.


def credit(micro: int) -> str:
    """Microcredits as credits with two decimals, or as many as show that it is not nothing."""
    places = next((n for n in (2, 4) if abs(micro) >= 10 ** (6 - n)), 6) if micro else 2
    return format_credits(micro, places).replace("-", "\N{MINUS SIGN}")


def span(length: timedelta) -> str:
    """``3 h 20 min``, rounded down to the minute."""
    minutes = int(length.total_seconds()) // 60
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else "less than a minute"


def moment(at: datetime, now: datetime) -> Markup:
    """Date and time of day in the hub's own zone, with the year when it is not this one."""
    local = at.astimezone()
    day = local.strftime("%-d %b" if local.year == now.astimezone().year else "%-d %b %Y")
    words = Markup("<span>{}</span> <span>{}</span>").format(day, local.strftime("%H:%M"))
    return _time(at, words)


def clock_time(at: datetime) -> Markup:
    """The time of day alone."""
    return _time(at, at.astimezone().strftime("%H:%M"))


def exactly(at: datetime, now: datetime | None = None) -> Markup:
    """Date and time to the second in the hub's own zone, without the year when it is this one."""
    local = at.astimezone()
    this_year = now is not None and local.year == now.astimezone().year
    day = local.strftime("%-d %b" if this_year else "%-d %b %Y")
    words = Markup("<span>{}</span> <span>{}</span>").format(day, local.strftime("%H:%M:%S"))
    return _time(at, words)


def on_day(at: datetime, now: datetime) -> Markup:
    """The day in the hub's own zone, with the year when it is not this one."""
    local = at.astimezone()
    return _time(
        at, local.strftime("%-d %b" if local.year == now.astimezone().year else "%-d %b %Y")
    )


def duration(span: timedelta) -> str:
    """Hours, minutes and seconds: ``3:20:05``."""
    seconds = max(0, int(span.total_seconds()))
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def gpu_hours(seconds: int) -> str:
    """Seconds as hours with two decimals, rounded down."""
    return f"{seconds // 36 / 100:,.2f}"


def exact(micro: int) -> str:
    """Microcredits as credits with all six decimals."""
    return format_credits(micro, 6).replace("-", "\N{MINUS SIGN}")


def weeks_chart(found: Sequence[view_models.Week], now: datetime) -> Chart:
    """The drawing of some weeks."""
    labels = [week.start.astimezone().strftime("%-d %b") for week in found]
    return chart([week.use for week in found], labels)


def period(some: view_models.LeaseFigures, now: datetime) -> Markup:
    """From when to when a session went on; the second day only when it is another one."""
    start, end = some.since, some.lease.ended_at or now
    same_day = start.astimezone().date() == end.astimezone().date()
    return Markup("{} \N{EN DASH} {}").format(
        moment(start, now), clock_time(end) if same_day else moment(end, now)
    )


def until(at: datetime, now: datetime) -> Markup:
    """A time to come, with its day when that is not today."""
    return _time(at, clock(at, now))


def ends(at: datetime, now: datetime) -> Markup:
    """A time at which something ends: the minute before, and not the one after."""
    return _time(at, end_clock(at, now))


def memory(size: int) -> str:
    """Bytes as GB, as GPUs are sold."""
    return f"{round(size / 2**30)} GB"


def points(number: float) -> str:
    """Points with two decimals, and no minus before a zero."""
    return f"{round(number, 2) + 0.0:,.2f}".replace("-", "\N{MINUS SIGN}")


def subject(text: str, devices: Sequence[DeviceView]) -> str:
    """What a line of the audit trail is about; devices by index, for people."""
    known = {view.device.uuid: f"GPU {view.device.index}" for view in devices}
    return known.get(text, text)


def device_names(devices: tuple[LeasedDevice, ...]) -> str:
    """``2 x A100-80GB (GPU 0, 1)``; the index is for people to read."""
    if not devices:
        return "No GPU"
    models: dict[str, list[str]] = {}
    for device in devices:
        models.setdefault(device.model, []).append(str(device.index))
    named = (
        f"{len(found)} \N{MULTIPLICATION SIGN} {model}" + _unbroken(f" (GPU {', '.join(found)})")
        for model, found in models.items()
    )
    return "; ".join(named)


def _unbroken(text: str) -> str:
    """The text on one line, which may begin a new one."""
    return text[0] + text[1:].replace(" ", "\N{NO-BREAK SPACE}")


def _time(at: datetime, text: str) -> Markup:
    return Markup('<time datetime="{}">{}</time>').format(instant(at), text)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gpuspawner.web"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "credit": credit,
        "span": span,
        "moment": moment,
        "period": period,
        "exactly": exactly,
        "on_day": on_day,
        "duration": duration,
        "gpu_hours": gpu_hours,
        "exact": exact,
        "chart": weeks_chart,
        "as_part": lambda name: quote(name, safe=":"),
        "until": until,
        "ends": ends,
        "memory": memory,
        "bytes": format_bytes,
        "points": points,
        "subject": subject,
        "hours": lambda seconds: f"{seconds / 3600:g}",
        "outcome": lambda outcome: OUTCOMES.get(outcome, outcome),
        "device_names": device_names,
        "state": lambda state: STATES.get(state, state),
    }
    environment.globals["zone"] = lambda: time.strftime("%Z (UTC%z)")
    return environment


TEMPLATES = _environment()


def read_templates() -> None:
    """Read every template, so that the first page after a start waits for none."""
    for name in TEMPLATES.list_templates():
        TEMPLATES.get_template(name)


HANDLERS = [("", MemberPage), ("admin", AdminPage), ("oauth_callback", SignedIn)]


class FormPage(Page):
    """A page whose forms change something."""

    def field(self, name: str) -> str:
        """A field of the form; empty when it is not there."""
        return str(self.get_body_argument(name, ""))

    def typed(self, model: type[B]) -> B:
        """The form, checked by the model of the same request. Raises InvalidRequest."""
        return model.from_form(self.field, self.services.settings.rates.zone)

    @property
    def confirmed(self) -> bool:
        """Whether the member has seen what will be done, and wants it."""
        return self.field("confirm") == "yes"

    @property
    def key(self) -> str:
        """By which a form that is sent twice is known; empty when it has none. Raises
        InvalidRequest."""
        text = self.field("key")
        return f"page:{self.actor}:{key_of(text)}" if text else ""

    def ask(
        self,
        title: str,
        facts: Sequence[tuple[str, str]],
        *,
        action: str,
        button: str,
        back: str,
        fields: Mapping[str, str] | None = None,
        note: str = "",
        danger: bool = False,
        why: str | None = None,
        **values: Any,
    ) -> None:
        """Show what will be done, with a button that does it; ``action`` and ``back`` are paths
        below the service's own. ``why``: a reason is asked for, and this is in its field."""
        self.show(
            "confirm.html",
            title=title,
            facts=facts,
            action=action,
            button=button,
            back=back,
            fields={"key": secrets.token_hex(8), **(fields or {}), "confirm": "yes"},
            note=note,
            danger=danger,
            why=why,
            xsrf=self.xsrf,
            **{"here": "mine", **values},
        )

    def go(self, path: str) -> None:
        """On to another page of ours, after something was done."""
        self.redirect(self.context.prefix + path, status=303)


def part(name: str) -> str:
    """A name as a part of a path."""
    return quote(name, safe=":")
