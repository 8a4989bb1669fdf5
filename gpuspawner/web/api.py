"""The pages' figures as JSON: amounts as decimal strings of credits, times in ISO 8601 UTC."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from tornado import web

from ..broker import DeviceView
from ..errors import NotAllowed, UnknownAccount
from ..model import Lease, LeasedDevice, format_credits, member_account
from ..store.search import Leases
from ..store.statements import Entry, Page
from . import figures
from .base import Handler
from .fields import MOST_LINES, one_of, whole

NO_XSRF = (
    "This request comes from a browser without proof that its member sent it. Send the cookie "
    "_xsrf again in the header X-XSRFToken, or use a token of the Hub instead of cookies."
)


class APIHandler(Handler):
    """A handler that answers in JSON, errors too, and never sends anybody to a login page."""

    def set_default_headers(self) -> None:
        super().set_default_headers()
        self.set_header("Content-Type", "application/json")

    # JupyterHub checks XSRF while it finds out who asks, and only for those who come with a
    # cookie: a token in a header is proof enough.

    _no_xsrf = False

    def check_xsrf_cookie(self) -> None:
        try:
            super().check_xsrf_cookie()
        except web.HTTPError:
            self._no_xsrf = True
            raise

    async def prepare(self) -> None:
        await super().prepare()
        if self._no_xsrf:
            raise web.HTTPError(403) from NotAllowed(NO_XSRF)
        if not self.current_user:
            raise web.HTTPError(403 if self.refused else 401)

    def get_login_url(self) -> str:
        raise web.HTTPError(401)

    def answer(self, content: Mapping[str, Any]) -> None:
        """Send JSON."""
        self.finish(dict(content))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        reason, sentence = self.sentence(status_code, **kwargs)
        self.answer({"status": status_code, "error": reason, "message": sentence})


class MeHandler(APIHandler):
    """My balance, how long it lasts, my servers, my statement."""

    @web.authenticated
    async def get(self) -> None:
        mine = await self.read(figures.member, self.broker, self.user, self.context.warn_minutes)
        page = await self.read(self._newest)
        self.answer(
            {
                "name": self.user,
                "admin": self.admin,
                "as_of": instant(mine.now),
                "account": funds(mine.funds),
                "running": [lease(some) for some in mine.running],
                "statement": [entry(some) for some in page.entries],
            }
        )

    def _newest(self) -> Page:
        try:
            return self.broker.statement_page(member_account(self.user), limit=100)
        except UnknownAccount:  # it opens with the first sign-in
            return Page((), None)


class DevicesHandler(APIHandler):
    """Every device with its state; whose it is only when it is mine, or for admins."""

    @web.authenticated
    async def get(self) -> None:
        overview, found = await self.read(figures.devices, self.broker, self.user, self.admin)
        self.answer(
            {
                "source": overview.source,
                "seen": not overview.error,
                "error": overview.error if self.admin else "",
                "driver_version": overview.driver_version,
                "cuda_version": overview.cuda_version,
                "total": overview.total,
                "free": overview.free,
                "devices": [device(some, self.user, self.admin) for some in found],
            }
        )


class LeasesHandler(APIHandler):
    """My servers' leases, newest first; with ``?all=1`` everybody's, for admins."""

    @web.authenticated
    async def get(self) -> None:
        everybody = one_of(self.get_query_argument("all", "0"), "all", ("0", "1"))
        if everybody == "1":
            self.need_admin()
        limit = whole(self.get_query_argument("limit", "50"), "limit", 1, MOST_LINES)
        before = self.get_query_argument("before", None)
        user = None if everybody == "1" else self.user
        found = await self.read(self._find, user, before, limit)
        now = self.broker.clock()
        told = figures.lease_figures(self.broker, found.found, now)
        self.answer(
            {
                "as_of": instant(now),
                "leases": [lease(some) for some in told],
                "next": found.older,
            }
        )

    def _find(self, user: str | None, before: str | None, limit: int) -> Leases:
        return self.broker.find_leases(user=user, before=before, limit=limit)


# Values to JSON.


def amount(micro: int) -> str:
    """Microcredits as credits, exactly."""
    return format_credits(micro, 6)


def instant(moment: datetime | None) -> str | None:
    """ISO 8601 in UTC."""
    if moment is None:
        return None
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def funds(some: figures.Funds) -> dict[str, Any]:
    """An account as JSON."""
    return {
        "account": some.account.name,
        "balance": amount(some.account.balance),
        "held": amount(some.account.held),
        "available": amount(some.account.available),
        "rate_per_hour": amount(some.rate),
        "lasts_seconds": int(some.lasts.total_seconds()) if some.lasts is not None else None,
        "runs_dry_at": instant(some.dry_at),
    }


def lease(some: figures.LeaseFigures) -> dict[str, Any]:
    """A lease as JSON."""
    it: Lease = some.lease
    return {
        "id": it.id,
        "user": it.server.user,
        "server": it.server.name,
        "account": it.account,
        "environment": it.environment,
        "state": it.state.value,
        "devices": [leased(each) for each in it.devices],
        "rate_per_hour": amount(it.rate),
        "cost": amount(some.cost),
        "granted_at": instant(it.granted_at),
        "started_at": instant(it.started_at),
        "ended_at": instant(it.ended_at),
        "end_reason": it.end_reason,
        "warned_at": instant(it.warned_at),
        "stops_at": instant(some.stops_at),
        "ends_at": instant(it.ends_at),
        "claim_by": instant(it.claim_by),
        "group": it.group,
        "outcome": it.outcome,
        "charged": amount(it.charged),
        "refunded": amount(it.refunded),
        "waived": amount(it.waived),
    }


def leased(some: LeasedDevice) -> dict[str, Any]:
    """A device under a lease as JSON."""
    return {
        "uuid": some.uuid,
        "index": some.index,
        "model": some.model,
        "memory_bytes": some.memory_bytes,
    }


def device(some: figures.DeviceFigures, user: str, admin: bool) -> dict[str, Any]:
    """A device as JSON, with what this reader may know."""
    view: DeviceView = some.view
    told: dict[str, Any] = {
        "uuid": view.device.uuid,
        "index": view.device.index,
        "model": view.device.model,
        "memory_bytes": view.device.memory_bytes,
        "machine": view.machine,
        "state": view.state,
        "rate_per_hour": amount(some.rate),
        "mine": some.lease is not None and some.lease.server.user == user,
    }
    if admin:
        told["detail"] = some.detail
        told["lease"] = view.lease_id
        told["user"] = some.lease.server.user if some.lease else None
    return told


def entry(some: Entry) -> dict[str, Any]:
    """A line of a statement as JSON."""
    return {
        "id": some.id,
        "transfer": some.transfer,
        "at": instant(some.at),
        "kind": some.kind,
        "actor": some.actor,
        "reason": some.reason,
        "amount": amount(some.amount),
        "balance": amount(some.balance),
        "lease": some.lease_id,
    }


HANDLERS = [
    ("api/me", MeHandler),
    ("api/devices", DevicesHandler),
    ("api/leases", LeasesHandler),
]
