"""The base of the service's pages and forms, the member's own page and the admin page."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
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
from ..core.times import clock, end_clock, minute_after, minute_of
from ..core.units import format_bytes, format_credits, format_price, round_credits
from ..devices.closures import GRANTING, Closure
from ..devices.slots import describe_share
from ..devices.snapshots import DeviceView
from ..leases.models import LeasedDevice
from ..monitoring.charts import Chart, chart
from . import view_models
from .base import Context, ServiceHandler
from .fields import invalid, key_of
from .frame import Place
from .schemas import B, instant

STATES = {
    "free": "free",
    "leased": "leased",
    "partly_leased": "partly leased",
    "occupied": "occupied",
    "unknown": "unknown",
    "parent": "split (MIG)",
    "prohibited": "closed",
    "drained": "drained",
    "draining": "draining",
}
"""Display names of device states."""


OUTCOMES = {
    "granted": "Started",
    "cancelled": "Cancelled",
    "expired": "Expired",
    "refused": "Refused",
    "replaced": "Replaced",
    "member_gone": "Member gone",
}
"""Display names of ticket outcomes."""

SEPARATOR = "\x1e"
"""What base.html writes between a page's title, its name in the navigation, and its content."""

OLD_FORM = "This form is too old, or came from another page. Open the page again, and send it anew."


class Page(ServiceHandler):
    """A handler that answers with a page, also for errors."""

    paused: Closure | None = None
    """Why granting is paused, which every page shows; None if it is not."""

    has_frame = False
    """True if a document of the service stands in a frame of the page."""

    reads_pause = True
    """True if :meth:`prepare` reads ``paused``. Other pages set it with their own data."""

    async def prepare(self) -> None:
        """Look up the user and the pause. Raises HTTPError 403 for a form without XSRF proof."""
        await super().prepare()
        # A token is no proof here: browsers send forms from the service's own pages.
        if self.request.method not in ("GET", "HEAD", "OPTIONS") and not self.has_xsrf_proof:
            raise web.HTTPError(403) from InvalidRequest(OLD_FORM)
        if self.current_user and self.reads_pause:
            with suppress(GPUSpawnerError):  # code that needs the store reports the error
                closures = await self.services.read(self.services.devices.closures)
                self.paused = closures.get(GRANTING)

    @property
    def xsrf(self) -> Markup:
        """The form field with the XSRF token."""
        return Markup(self.xsrf_form_html())  # it is escaped  # nosec B704

    def show(self, template: str, refusal: GPUSpawnerError | None = None, **values: Any) -> None:
        """Send a page; ``refusal`` is why the requested change was not made."""
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
            "has_runs": context.frame.template_vars.get("gpuspawner_has_runs", True),
        }
        text = TEMPLATES.get_template(template).render({**usual, **values})
        title, here, content = text.split(SEPARATOR, 2)
        is_known = bool(self.current_user)
        html, policy = context.frame.page(
            Place(context.hub_url, context.prefix, context.hub_auth.hub_host),
            title=title.strip(),
            here=here,
            content=content,
            user=self.user if is_known else "",
            admin=is_known and self.admin,
        )
        framed = "; frame-src 'self'" if self.has_frame else ""
        self.set_header("Content-Security-Policy", policy + framed)
        self.finish(html)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Send the error as a page."""
        _, sentence = self.sentence(status_code, **kwargs)
        self._send("error.html", {"status": status_code, "sentence": sentence})


DONE = ("kept", "stopped", "given_up", "extended", "restarted", "snoozed")
"""Arguments with which a form returns to the member's page, which then says what was done."""


class MemberPage(Page):
    """The member's sessions: servers, places in the queue, devices and past sessions."""

    reads_pause = False
    template = "member.html"

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        await self.show_mine()

    async def show_mine(self, refusal: GPUSpawnerError | None = None) -> None:
        """Send the page; ``refusal`` is why the requested change was not made."""
        warn_minutes, soon = self.context.warn_minutes, self.context.session_warn_minutes
        seen = await self.read(
            view_models.look, self.services, self.user, self.groups, warn_minutes
        )
        self.paused = seen.overview.paused
        self.show(
            self.template,
            lasting=view_models.lasting(seen.mine.funds, seen.overview, seen.mine.now),
            **{name: self.get_query_argument(name, "") for name in DONE},
            ending=[x for x in seen.mine.running if view_models.ends_soon(x, seen.mine.now, soon)],
            refusal=refusal,
            xsrf=self.xsrf,
            credits_help=self.services.settings.credits.help_text,
            **{field.name: getattr(seen, field.name) for field in fields(seen)},
        )


class BillingPage(MemberPage):
    """The member's balance, who pays, the last weeks and the newest entries of the statement."""

    template = "billing.html"


class AdminPage(Page):
    """All open leases and their accounts, for admins."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        self.need_admin()
        warn_minutes = self.context.warn_minutes
        all_of_them = await self.read(view_models.everyone, self.services, warn_minutes)
        overview = await self.read(self.services.monitoring.overview)
        self.show(
            "admin.html",
            everyone=all_of_them,
            stopped=self.get_query_argument("stopped", ""),
            xsrf=self.xsrf,
            overview=overview,
        )


class OAuthCallback(Page, HubOAuthCallbackHandler):
    """The OAuth callback, with errors shown as pages."""


class NotFound(Page):
    """The handler of unknown paths, for every method."""

    async def prepare(self) -> None:
        """Raise HTTPError 404."""
        raise web.HTTPError(404)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Send the error as a page, or as JSON below ``api/``."""
        if not self.request.path.startswith(self.context.prefix + "api/"):
            super().write_error(status_code, **kwargs)
            return
        reason, sentence = self.sentence(status_code, **kwargs)
        self.finish({"status": status_code, "error": reason, "message": sentence})


# Formatting of values.


def credit(micro: int) -> str:
    """Format credits with two decimals."""
    return format_credits(micro).replace("-", "\N{MINUS SIGN}")


def price(micro: int) -> str:
    """Format credits an hour."""
    return format_price(micro)


def credit_total(amounts: Iterable[int]) -> str:
    """Format the total below a column of amounts: the sum of the figures as they are shown."""
    return credit(sum(map(round_credits, amounts)))


def span(length: timedelta | None) -> str:
    """Format a duration as ``3 h 20 min``, rounded down to the minute; None is endless."""
    if length is None:
        return "thousands of years"
    minutes = int(length.total_seconds()) // 60
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else "less than a minute"


def moment(at: datetime, now: datetime) -> Markup:
    """Format date and time in the hub's own zone, with the year unless it is this year."""
    return _time(at, _day_and(at, now, "%H:%M"))


def clock_time(at: datetime, seconds: bool = False) -> Markup:
    """Format the time of day alone."""
    text = at.astimezone().strftime("%H:%M:%S" if seconds else "%H:%M")
    return Markup('<time datetime="{}" data-alone>{}</time>').format(instant(at), text)


def exactly(at: datetime, now: datetime | None = None) -> Markup:
    """Format date and time to the second; the year only if it is not that of ``now``."""
    return _time(at, _day_and(at, now, "%H:%M:%S"))


def on_day(at: datetime, now: datetime) -> Markup:
    """Format the day in the hub's own zone, with the year unless it is this year."""
    return _time(at, _day(at, now))


def _day(at: datetime, now: datetime | None) -> str:
    local = at.astimezone()
    is_this_year = now is not None and local.year == now.astimezone().year
    return local.strftime("%-d %b" if is_this_year else "%-d %b %Y")


def _day_and(at: datetime, now: datetime | None, clock: str) -> Markup:
    spans = Markup("<span>{}</span> <span>{}</span>")
    return spans.format(_day(at, now), at.astimezone().strftime(clock))


def duration(span: timedelta) -> str:
    """Format a duration as hours, minutes and seconds: ``3:20:05``."""
    seconds = max(0, int(span.total_seconds()))
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def gpu_hours(seconds: int) -> str:
    """Format seconds as hours with two decimals, rounded down."""
    return f"{seconds // 36 / 100:,.2f}"


def exact(micro: int) -> str:
    """Format credits with all six decimals, for what a page shows only in an opened detail."""
    return format_credits(micro, 6).replace("-", "\N{MINUS SIGN}")


def weeks_chart(found: Sequence[view_models.Week], now: datetime) -> Chart:
    """Return the chart of some weeks."""
    labels = [week.start.astimezone().strftime("%-d %b") for week in found]
    return chart([week.use for week in found], labels)


def period(some: view_models.LeaseFigures, now: datetime) -> Markup:
    """Format a session's start and end; the end has a date only if it is on another day."""
    start, end = some.since, some.lease.ended_at or now
    same_day = start.astimezone().date() == end.astimezone().date()
    return Markup("{} \N{EN DASH} {}").format(
        moment(start, now), clock_time(end) if same_day else moment(end, now)
    )


def until(at: datetime, now: datetime) -> Markup:
    """Format a future time, with its date unless it is today."""
    return _time(minute_after(at), clock(at, now))


def ends(at: datetime, now: datetime) -> Markup:
    """Format the time at which something ends, rounded down to the minute."""
    return _time(minute_of(at), end_clock(at, now))


def memory(size: int) -> str:
    """Format bytes as GB, as GPU memory is advertised."""
    return f"{round(size / 2**30)} GB"


def points(number: float) -> str:
    """Format points with two decimals, and zero without a minus sign."""
    return f"{round(number, 2) + 0.0:,.2f}".replace("-", "\N{MINUS SIGN}")


def subject(text: str, devices: Sequence[DeviceView]) -> str:
    """Return the subject of an audit entry; a device is shown by its index."""
    known = {view.device.uuid: f"GPU {view.device.index}" for view in devices}
    return known.get(text, text)


def device_names(devices: tuple[LeasedDevice, ...]) -> str:
    """Format devices with their indexes: ``2 x A100-80GB (GPU 0, 1)``, ``2/4 of T4 (GPU 0)``."""
    if not devices:
        return "No GPU"
    models: dict[tuple[str, str], list[str]] = {}
    for device in devices:
        share = f"{device.held_slots}/{device.slots}" if device.is_shared else ""
        models.setdefault((device.model, share), []).append(str(device.index))
    named = (
        (f"{share} of " if share else f"{len(found)} \N{MULTIPLICATION SIGN} ")
        + f"{model} "
        + f"(GPU {', '.join(found)})".replace(" ", "\N{NO-BREAK SPACE}")
        for (model, share), found in models.items()
    )
    return "; ".join(named)


def lease_devices(devices: tuple[LeasedDevice, ...]) -> str:
    """Format the devices of one lease; of a share, say also with how many others it is shared."""
    shares = [(describe_share(device), device.index) for device in devices if device.is_shared]
    found = (f"{described} (GPU\N{NO-BREAK SPACE}{index})" for described, index in shares)
    return "; ".join(found) or device_names(devices)


def _time(at: datetime, text: str) -> Markup:
    return Markup('<time datetime="{}">{}</time>').format(instant(at), text)


def part(name: str) -> str:
    """Quote a name for use in a path."""
    return quote(name, safe=":")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gpuspawner.web"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    times = (moment, period, exactly, on_day, until, ends, clock_time)
    formats = (credit, price, exact, span, duration, *times)
    others = (credit_total, gpu_hours, memory, points, subject, device_names, lease_devices)
    environment.filters |= {format.__name__: format for format in (*formats, *others)}
    environment.filters |= {
        "chart": weeks_chart,
        "as_part": part,
        "bytes": format_bytes,
        "hours": lambda seconds: f"{seconds / 3600:g}",
        "outcome": lambda outcome: OUTCOMES.get(outcome, outcome),
        "state": lambda state: STATES.get(state, state),
    }
    environment.globals["SEPARATOR"] = SEPARATOR
    environment.globals["until"] = until
    environment.globals["zone"] = lambda: time.strftime("%Z (UTC%z)")
    return environment


TEMPLATES = _environment()


def read_templates(context: Context) -> None:
    """Load every template, so that the first page after a start is fast."""
    for name in TEMPLATES.list_templates():
        TEMPLATES.get_template(name)
    place = Place(context.hub_url, context.prefix)
    context.frame.page(place, title="", here="", content="")


HANDLERS = [
    ("", MemberPage),
    ("billing", BillingPage),
    ("admin", AdminPage),
    ("oauth_callback", OAuthCallback),
]


LONGEST_FILE = 1024 * 1024
"""Maximum bytes of a file that a form sends."""


class FormPage(Page):
    """A page with forms that change something."""

    def field(self, name: str) -> str:
        """Return a field of the form, or an empty string if it is missing."""
        return str(self.get_body_argument(name, ""))

    def is_yes(self, name: str) -> bool:
        """Return True if a field of the form is yes, and False if it is no.

        Raises InvalidRequest.
        """
        text = self.field(name)
        if text not in ("yes", "no"):
            raise invalid(name, "is yes or no.")
        return text == "yes"

    def typed(self, model: type[B]) -> B:
        """Parse the form with the API's model of the same request. Raises InvalidRequest."""
        return model.from_form(self.field, self.services.settings.rates.zone)

    @property
    def confirmed(self) -> bool:
        """True if the user has confirmed the change."""
        return self.field("confirm") == "yes"

    @property
    def key(self) -> str:
        """The form's idempotency key; empty if it has none. Raises InvalidRequest."""
        text = self.field("key")
        return f"page:{self.actor}:{key_of(text)}" if text else ""

    def uploaded(self, lines: str) -> bytes:
        """Return the file of the form, or else the typed lines. Raises InvalidRequest."""
        files = self.request.files.get("file", [])
        data = bytes(files[0]["body"]) if files and files[0]["body"] else lines.encode()
        if len(data) > LONGEST_FILE:
            raise InvalidRequest("The file has more than 1 MB: give it in parts.", field="file")
        if not data.strip():
            raise InvalidRequest("The list is empty: choose a file, or type lines.")
        return data

    def confirm(
        self, question: str, *, fields: Mapping[str, str] | None = None, **values: Any
    ) -> None:
        """Show what will be done, with a button that confirms it.

        ``question`` is a template of ``confirm/``. The paths ``action`` and ``back`` are below the
        service's own. If ``why`` is given, the page asks for a reason, and shows ``why`` in its
        field.
        """
        sent = {"key": secrets.token_hex(8), **(fields or {}), "confirm": "yes"}
        self.show(f"confirm/{question}.html", fields=sent, xsrf=self.xsrf, **values)

    def go(self, path: str) -> None:
        """Redirect to another page of the service after a change."""
        self.redirect(self.context.prefix + path, status=303)
