"""The pages' figures as JSON: amounts as decimal strings of credits, times in ISO 8601 UTC."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from tornado import web

from ..core.errors import GPUSpawnerError, InvalidRequest, LedgerError, NotAllowed, UnknownAccount
from ..core.units import format_credits
from ..db.search import Leases
from ..devices.service import LONGEST_REASON
from ..devices.snapshots import DeviceView
from ..leases.models import Lease, LeasedDevice
from ..ledger.models import member_account
from ..ledger.statements import EntryPage, StatementEntry
from . import view_models
from .base import ServiceHandler
from .fields import MOST_LINES, one_of, whole

NO_XSRF = (
    "This request comes from a browser without proof that its member sent it. Send the cookie "
    "_xsrf again in the header X-XSRFToken, or use a token of the Hub instead of cookies."
)


class APIHandler(ServiceHandler):
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
        mine = await self.read(
            view_models.member, self.broker, self.user, self.context.warn_minutes
        )
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

    def _newest(self) -> EntryPage:
        try:
            return self.broker.reports.statement_page(member_account(self.user), limit=100)
        except UnknownAccount:  # it opens with the first sign-in
            return EntryPage((), None)


class DevicesHandler(APIHandler):
    """Every device with its state; whose it is only when it is mine, or for admins."""

    @web.authenticated
    async def get(self) -> None:
        overview, found = await self.read(
            view_models.device_figures, self.broker, self.user, self.admin
        )
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
        told = view_models.lease_figures(self.broker, found.found, now)
        self.answer(
            {
                "as_of": instant(now),
                "leases": [lease(some) for some in told],
                "next": found.older,
            }
        )

    def _find(self, user: str | None, before: str | None, limit: int) -> Leases:
        return self.broker.reports.find_leases(user=user, before=before, limit=limit)


# Values to JSON.


def amount(micro: int) -> str:
    """Microcredits as credits, exactly."""
    return format_credits(micro, 6)


def instant(moment: datetime | None) -> str | None:
    """ISO 8601 in UTC."""
    if moment is None:
        return None
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def funds(some: view_models.Funds) -> dict[str, Any]:
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


def lease(some: view_models.LeaseFigures) -> dict[str, Any]:
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


def device(some: view_models.DeviceFigures, user: str, admin: bool) -> dict[str, Any]:
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


def entry(some: StatementEntry) -> dict[str, Any]:
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


LONGEST = 64 * 1024
"""Bytes of a request that changes something."""


class ChangingAPI(APIHandler):
    """What changes share: the object that was sent, and refusals as sentences."""

    def sent(self, *fields: str, longest: int = LONGEST) -> dict[str, Any]:
        """The JSON object that was sent, of so many bytes at the most; none of other fields.

        Raises HTTPError 400.
        """
        body = self.request.body
        try:
            found = json.loads(body or b"{}") if len(body) <= longest else None
        except (ValueError, RecursionError):
            found = None
        there_are = ", ".join(fields)
        if not isinstance(found, dict):
            raise _refused(f"Send one JSON object; its fields are {there_are}.")
        for name in found.keys() - set(fields):
            raise _refused(f"There is no field {name[:60]!r}; there are {there_are}.", name)
        if not isinstance(found.setdefault("reason", ""), str):
            raise _refused("The field 'reason' is text.", "reason")
        if len(found["reason"]) > LONGEST_REASON:
            raise _refused(f"The field 'reason' has {LONGEST_REASON} characters at most.", "reason")
        return found

    async def change(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Change something through the broker, as the one who asks."""

        def call() -> Any:
            return work(*args, actor=self.user, **kwargs)

        return await self.read(call)

    async def do(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same, of what was checked before: it cannot be done as things are, if it cannot."""
        try:
            return await self.broker.run(work, *args, actor=self.actor, **kwargs)
        except (InvalidRequest, LedgerError) as error:
            raise web.HTTPError(409) from error
        except GPUSpawnerError as error:
            raise web.HTTPError(error.status_code) from error


def _refused(sentence: str, field: str = "") -> web.HTTPError:
    error = web.HTTPError(400)
    error.__cause__ = InvalidRequest(sentence, field=field)
    return error
