"""Sessions as pages and JSON: extend, stop, restart, snooze an idle stop, live figures.

Nothing from before the lease is shown, because it belongs to another member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from tornado import web

from ..core.errors import (
    CannotExtend,
    CannotSnooze,
    CannotStop,
    GPUSpawnerError,
    InvalidRequest,
    UnknownLease,
)
from ..core.scopes import SESSION
from ..db.search import LONGEST
from ..devices.slots import describe_share
from ..monitoring.models import DeviceUse, Sample
from ..monitoring.service import IdleServer
from ..services import Services
from ..web import view_models
from ..web.api import APIHandler, ChangingAPI, operation
from ..web.base import Context, ServiceHandler, may_see_balance
from ..web.fields import text_of
from ..web.pages import FormPage, MemberPage, Page
from ..web.schemas import LeaseAnswer, ReasonBody
from . import schemas
from .models import Lease, LeasedDevice, LeaseState

SESSIONS = 50
"""Sessions per page of the history."""


class HistoryPage(Page):
    """All sessions, newest first: the member's own, or for admins those of everybody."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        search = text_of(self.get_query_argument("search", ""), "search", LONGEST)
        find = partial(
            self.services.reports.find_leases,
            user=None if self.admin else self.user,
            text=search,
            before=self.get_query_argument("before", None),
            limit=SESSIONS,
        )
        found = await self.read(find)
        now = self.services.clock()
        self.show(
            "history.html",
            now=now,
            sessions=view_models.lease_figures(self.services, found.found, now),
            older=found.older,
            search=search,
            first=not self.get_query_argument("before", ""),
        )


class LeaseForm(Page):
    """A form about one lease."""

    async def get(self, lease_id: str) -> None:
        """Redirect to the member's page."""
        self.redirect(self.context.prefix)


class ExtendForm(LeaseForm, MemberPage):
    """The button that extends a session by its full length, on the member's page."""

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        """Extend the session."""
        await own_lease(self, lease_id)
        try:
            await self.services.run(self.services.extensions.extend, lease_id, actor=self.user)
        except CannotExtend as refusal:
            await self.show_mine(refusal)
            return
        self.redirect(f"{self.context.prefix}?extended={lease_id}", status=303)


class ExtendAPI(APIHandler):
    """The API operation that extends a session."""

    for_servers = True

    @operation("leases/{lease}/extend", LeaseAnswer, scope=SESSION)
    @web.authenticated
    async def post(self, lease_id: str) -> None:
        """Restart a session's time limit; an admin may do it for anybody."""
        await own_lease(self, lease_id, or_admin=True)
        extend = partial(self.services.extensions.extend, lease_id, actor=self.user)
        await self.answer_lease(await self.read(extend))


class StopPage(LeaseForm, FormPage):
    """The form that stops a server, after a confirmation.

    Members stop their own servers. Admins stop any, and give a reason if it is another member's.
    """

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        """Ask for confirmation, or stop the server."""
        lease = await own_lease(self, lease_id, or_admin=True)
        if lease.state is LeaseState.ENDED:
            raise web.HTTPError(409) from CannotStop(why="it has stopped already")
        if lease.server.user == self.user:
            await self._stop_own(lease)
        else:
            await self._order(lease)

    async def _stop_own(self, lease: Lease) -> None:
        if not self.confirmed:
            self.confirm("stop_own", action=f"leases/{lease.id}/stop", back="", lease=lease)
            return
        await stop_own(self, lease)
        self.go(f"?stopped={lease.id}")

    async def _order(self, lease: Lease) -> None:
        """Record an admin's order to stop; the service carries it out until the server is gone."""
        why = self.field("reason")
        if not self.confirmed:
            self._ask_why(lease, why)
            return
        try:
            reason = self.typed(ReasonBody).reason
            await self.services.run(
                self.services.sessions.stop, lease.id, actor=self.actor, reason=reason
            )
        except InvalidRequest as refusal:
            self._ask_why(lease, why[:LONGEST_SHOWN], refusal)
            return
        except GPUSpawnerError as refusal:
            raise web.HTTPError(refusal.status_code) from refusal
        self.go(f"admin?stopped={lease.id}")

    def _ask_why(self, lease: Lease, why: str, refusal: InvalidRequest | None = None) -> None:
        action = f"leases/{lease.id}/stop"
        self.confirm("stop", action=action, back="admin", lease=lease, why=why, refusal=refusal)


class StopAPI(ChangingAPI):
    """Stop a server and tell its member why. For admins: ``{"reason": "a new fan"}``."""

    @operation("leases/{lease}/stop", LeaseAnswer, body=ReasonBody)
    @web.authenticated
    async def post(self, lease_id: str) -> None:  # noqa: D102 - the class docstring is the summary
        self.need_admin()
        reason = self.sent(ReasonBody).reason
        await self.answer_lease(await self.do(self.services.sessions.stop, lease_id, reason=reason))


class EndAPI(APIHandler):
    """The API operation that stops a member's own server."""

    for_servers = True

    @operation("leases/{lease}/end", LeaseAnswer, scope=SESSION)
    @web.authenticated
    async def post(self, lease_id: str) -> None:
        """Stop my own server."""
        found = await own_lease(self, lease_id)
        if found.state is LeaseState.ENDED:
            raise web.HTTPError(409) from CannotStop(why="it has stopped already")
        await stop_own(self, found)
        await self.answer_lease(await self.read(self.services.leases.get, lease_id))


async def own_lease(handler: ServiceHandler, lease_id: str, *, or_admin: bool = False) -> Lease:
    """Return a lease of the user, or with ``or_admin`` any lease for an admin.

    Raises HTTPError 404 for all other leases, so that their existence is not revealed.
    """
    found: Lease = await handler.read(handler.services.leases.get, lease_id)
    own = found.server.user == handler.user and handler.concerns(found.server)
    if not own and not (or_admin and handler.admin):
        raise web.HTTPError(404) from UnknownLease(lease=lease_id)
    return found


async def stop_own(handler: ServiceHandler, lease: Lease) -> None:
    """Ask the Hub to stop a member's own server, like the Hub's stop button. Raises HTTPError.

    A run is stopped without the Hub, which does not know it.
    """
    if run_id := lease.server.run_id:
        await handler.read(partial(handler.services.runs.stop, run_id, actor=handler.user))
        return
    hub = handler.context.hub
    if hub is None:
        raise web.HTTPError(503) from CannotStop(why="the Hub is not responding")
    try:
        await hub.stop_server(lease.server)
    except GPUSpawnerError as error:
        raise web.HTTPError(error.status_code, "%s", error.message) from error


LONGEST_SHOWN = 1000
"""Maximum characters of a refused reason that are shown again."""


class RestartPage(LeaseForm, FormPage):
    """The form that restarts a server that lost its GPUs, after a confirmation."""

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        """Ask for confirmation, or order the restart."""
        found = await own_lease(self, lease_id)
        if not self.confirmed:
            self.confirm("restart", action=f"leases/{lease_id}/restart", back="", lease=found)
            return
        try:
            await self.services.run(self.services.restarts.restart, lease_id, actor=self.user)
        except GPUSpawnerError as refusal:
            raise web.HTTPError(refusal.status_code) from refusal
        self.context.poke()
        self.go(f"?restarted={lease_id}")


class RestartAPI(APIHandler):
    """The API operation that restarts a server."""

    @operation("leases/{lease}/restart", LeaseAnswer)
    @web.authenticated
    async def post(self, lease_id: str) -> None:
        """Restart a server that lost its GPUs; an admin may do it for anybody."""
        await own_lease(self, lease_id, or_admin=True)
        restart = partial(self.services.restarts.restart, lease_id, actor=self.actor)
        ordered = await self.read(restart)
        self.context.poke()
        await self.answer_lease(ordered)


class SnoozeForm(LeaseForm, MemberPage):
    """The button that snoozes an idle stop, on the member's page."""

    @web.authenticated
    async def post(self, lease_id: str) -> None:
        """Snooze the stop."""
        await own_lease(self, lease_id)
        try:
            await self.services.run(self.services.idle.snooze, lease_id)
        except CannotSnooze as refusal:
            await self.show_mine(refusal)
            return
        self.redirect(f"{self.context.prefix}?snoozed={lease_id}", status=303)


class SnoozeAPI(APIHandler):
    """The API operation that snoozes an idle stop."""

    for_servers = True

    @operation("leases/{lease}/snooze", LeaseAnswer, scope=SESSION)
    @web.authenticated
    async def post(self, lease_id: str) -> None:
        """Postpone the stop of an idle server; an admin may do it for anybody."""
        await own_lease(self, lease_id, or_admin=True)
        await self.answer_lease(await self.read(self.services.idle.snooze, lease_id))


CURVE = timedelta(hours=1)
"""Length of the utilization curve."""

SMOOTH = 5
"""Number of samples in the moving average of the use, because one second says little."""

FRESH = timedelta(seconds=30)
"""Maximum age of a sample that counts as current."""

Recent = Mapping[str, Sequence[Sample]]


@dataclass(frozen=True, slots=True)
class CurrentSession:
    """A running server with its account, its devices' last hour and its next events."""

    at: datetime
    lease: view_models.LeaseFigures
    funds: view_models.Funds
    minutes: tuple[DeviceUse, ...]
    ending: bool
    """True if its session ends so soon that its member is warned."""
    resting: IdleServer | None
    lost: bool
    """True if the server has lost access to its devices."""
    sick: bool
    """True if one of its devices became sick during the lease."""


def look(
    services: Services,
    it: Lease,
    warn_minutes: Sequence[float],
    session_warn_minutes: Sequence[float],
) -> CurrentSession:
    """Read a server's current figures. Blocks: use :meth:`Services.run`."""
    now = services.clock()
    since = max(now - CURVE, it.started_at or it.granted_at)
    minutes = services.monitoring.lease_use_between(it, since, now) if it.devices else []
    opened = services.leases.open_leases()
    account = services.ledger.account(it.account)
    paying = view_models.ending_of(services, account.name)
    (told,) = view_models.lease_figures(services, [it], now)
    user = it.server.user
    return CurrentSession(
        at=now,
        lease=told,
        funds=view_models.funds(account, opened, now, warn_minutes, paying),
        minutes=tuple(minutes),
        ending=view_models.ends_soon(told, now, session_warn_minutes),
        resting=next((r for r in services.idle.resting(user) if r.lease.id == it.id), None),
        lost=any(lease.id == it.id for lease in services.restarts.lost_of(user)),
        sick=any(found.lease.id == it.id for found in services.health.sick_of(user)),
    )


class NowAPI(APIHandler):
    """A server's live figures as JSON."""

    for_servers = True

    @operation("leases/{lease}/now", schemas.NowAnswer, scope=SESSION)
    @web.authenticated
    async def get(self, lease_id: str) -> None:
        """Return a server's GPU activity and next events, for its member and the server itself."""
        it = await own_lease(self, lease_id)
        warn, session_warn = self.context.warn_minutes, self.context.session_warn_minutes
        found: CurrentSession = await self.read(look, self.services, it, warn, session_warn)
        recent = recent_of(self.context, it)
        mine = may_see_balance(self, it.account)
        self.answer(
            schemas.NowAnswer,
            as_of=found.at,
            page=self.context.prefix,
            lease=found.lease,
            account=found.funds if mine else None,
            devices=[device(each, found, recent) for each in it.devices],
            warnings=warnings(found, mine),
        )


def recent_of(context: Context, lease: Lease) -> Recent:
    """Return the newest samples of a lease's devices; of a shared one, of its own work."""
    whole, own = context.recent(), context.recent_of_leases()
    return {
        device.uuid: own.get((device.uuid, lease.id), ())
        if device.is_shared
        else whole.get(device.uuid, ())
        for device in lease.devices
    }


def device(it: LeasedDevice, found: CurrentSession, recent: Recent) -> schemas.DeviceNowAnswer:
    """Return a device's current figures and its last hour."""
    since = max(found.lease.since, found.at - FRESH)
    samples = [some for some in recent.get(it.uuid, ()) if some.at >= since]
    uses = [some.use for some in samples[-SMOOTH:] if some.use is not None]
    newest = samples[-1] if samples else None
    return schemas.DeviceNowAnswer.of(
        it,
        sharing=describe_share(it),
        use_percent=sum(uses) / len(uses) if uses else None,
        busy=newest.busy if newest else None,
        used_bytes=newest.used_bytes if newest else None,
        error=newest.error if newest else "",
        minutes=[
            schemas.DeviceMinuteAnswer.of(
                minute, used_bytes=minute.memory_max if minute.known else None
            )
            for minute in found.minutes
            if minute.uuid == it.uuid
        ],
    )


def warnings(found: CurrentSession, may_see_funds: bool) -> list[schemas.WarningAnswer]:
    """Return the current warnings; a warning keeps its key for as long as it stays the same."""
    told: list[schemas.WarningAnswer] = []
    it = found.lease.lease
    if it.outcome or it.ended_at:
        return []
    warning = schemas.WarningAnswer
    if found.lost:
        told.append(warning(kind="lost", key="lost"))
    if found.sick:
        told.append(warning(kind="sick", key="sick"))
    if (resting := found.resting) is not None:
        at, snooze = resting.stops_at, resting.snooze_minutes
        key = f"idle:{at.timestamp():.0f}" if at else "idle"
        told.append(warning(kind="idle", key=key, at=at, snooze_minutes=snooze))
    if found.ending and (end := found.lease.end) is not None:
        key = f"session:{end.at.timestamp():.0f}"
        told.append(warning(kind="session", key=key, at=end.at))
    if found.lease.stops_at is not None:
        told.append(warning(kind="credits", key="credits:dry", at=found.lease.stops_at))
    elif it.rate and may_see_funds and found.funds.warning is not None:
        key = f"credits:{found.funds.warning:g}"
        told.append(warning(kind="credits", key=key, at=found.funds.dry_at))
    return told


LEASE_HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("leases", HistoryPage),
    ("leases/([0-9a-f]{1,64})/stop", StopPage),
    ("api/leases/([0-9a-f]{1,64})/stop", StopAPI),
    ("api/leases/([0-9a-f]{1,64})/end", EndAPI),
    ("leases/([0-9a-f]+)/extend", ExtendForm),
    ("api/leases/([0-9a-f]+)/extend", ExtendAPI),
    ("leases/([0-9a-f]{1,64})/snooze", SnoozeForm),
    ("api/leases/([0-9a-f]{1,64})/snooze", SnoozeAPI),
    ("leases/([0-9a-f]{1,64})/restart", RestartPage),
    ("api/leases/([0-9a-f]{1,64})/restart", RestartAPI),
    ("api/leases/([0-9a-f]{1,64})/now", NowAPI),
]
