"""Runs as a page and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tornado import web

from ..core.errors import UnknownRun
from ..core.scopes import SESSION
from ..leases.views import own_lease
from ..queue.rank import QueuePosition
from ..services import Services
from ..web import view_models
from ..web.api import ALL, LIMIT, APIHandler, ChangingAPI, Parameter, operation, refusals
from ..web.base import ServiceHandler
from ..web.fields import one_of
from ..web.pages import FormPage
from .models import FollowedRun, RunState
from .rules import slug_of
from .schemas import LONGEST_TITLE, QuoteAnswer, QuoteBody, RunAnswer, RunBody, RunsAnswer

SHOWN = 50
"""Runs on a page."""

COLOURS = {**dict.fromkeys((state.value for state in RunState), ""), "waiting": "granted"}
COLOURS |= {"starting": "granted", "running": "running", "failed": "unknown"}
"""The style of each state's label."""

BEFORE_RUN = Parameter("before", {"type": "string"}, "Of the next page: the last answer's `next`.")


class RunsAPI(ChangingAPI):
    """The member's runs; for admins those of all members."""

    for_servers = True

    @operation("runs", RunsAnswer, ALL, BEFORE_RUN, LIMIT, scope=SESSION)
    @web.authenticated
    async def get(self) -> None:
        """List my runs, newest first. Admins get everybody's with ``?all=1``."""
        of_all = one_of(self.get_query_argument("all", "0"), "all", ("0", "1")) == "1"
        if of_all:
            self.need_admin()
        user = None if of_all else self.user
        before, limit = self.get_query_argument("before", None), self.limit
        found = await self.read(self.services.runs.newest, user, limit, before)
        more = found[-1].run.id if len(found) == limit else None
        self.answer(RunsAnswer, as_of=self.services.clock(), runs=found, next=more)

    @operation("runs", RunAnswer, name="submitRun", body=RunBody, scope=SESSION)
    @web.authenticated
    async def post(self) -> None:
        """Submit a run: it waits for its devices like a server, and needs no open browser."""
        sent = self.sent(RunBody)
        now = self.services.clock()
        what = sent.notebook.rpartition("/")[2] or (sent.command[0] if sent.command else "")
        title = (sent.title.strip() or what)[:LONGEST_TITLE]
        with refusals():
            work = sent.work(f"runs/{now:%Y-%m-%d-%H%M%S}-{slug_of(title)}")
        hub = self.context.hub
        if hub is None:
            raise web.HTTPError(503)
        fields = sent.model_dump(include={"options", "requeue", "preemptible", "key"})
        fields |= {"title": title, "work": _plain(work)}
        with refusals():
            run_id = await hub.submit_run(self.user, fields)
        self.answer(RunAnswer, await self.read(self.services.runs.get, run_id))


class QuoteAPI(ChangingAPI):
    """What a run would cost. Nothing is changed."""

    for_servers = True

    @operation("runs/-/quote", QuoteAnswer, name="quoteRun", body=QuoteBody, scope=SESSION)
    @web.authenticated
    async def post(self) -> None:
        """Return what a run would cost and when it would start, and submit nothing."""
        sent, hub = self.sent(QuoteBody), self.context.hub
        lease = await own_lease(self, sent.lease) if sent.lease else None
        if hub is None:
            raise web.HTTPError(503)
        fields = {"options": sent.options, "server": lease.server.name if lease else None}
        with refusals():
            found = await hub.quote_run(self.user, fields)
        self.finish(QuoteAnswer.model_validate(found).as_json())


class RunAPI(APIHandler):
    """One run."""

    for_servers = True

    @operation("runs/{run}", RunAnswer, name="run", scope=SESSION)
    @web.authenticated
    async def get(self, run_id: str) -> None:
        """Return one of my runs; an admin gets anybody's."""
        self.answer(RunAnswer, await own_run(self, run_id))

    @operation("runs/{run}", RunAnswer, name="stopRun", scope=SESSION)
    @web.authenticated
    async def delete(self, run_id: str) -> None:
        """Stop a run; what it has written stays."""
        found = await own_run(self, run_id)
        if found.state in (RunState.DONE, RunState.FAILED, RunState.STOPPED):
            self.answer(RunAnswer, found)
            return
        stop = partial(self.services.runs.stop, run_id, actor=self.user)
        self.answer(RunAnswer, await self.read(stop))


@dataclass(frozen=True, slots=True)
class RunFigures:
    """A run as the page shows it."""

    followed: FollowedRun
    cost: int = 0
    """Microcredits of its newest lease until now."""
    standing: QueuePosition | None = None
    """Its position while it waits."""


def run_figures(services: Services, found: Sequence[FollowedRun]) -> list[RunFigures]:
    """Return runs with what they cost and where they stand. Blocks."""
    now = services.clock()
    leases = [some.lease for some in found if some.lease]
    costs = {x.lease.id: x.cost for x in view_models.lease_figures(services, leases, now)}
    waiting = any(some.state is RunState.WAITING for some in found)
    standings = services.positions.standings() if waiting else {}
    tickets = services.queue.waiting() if waiting else []
    places = {ticket.server: standings.get(ticket.id) for ticket in tickets}
    return [
        RunFigures(some, costs[some.lease.id] if some.lease else 0, places.get(some.run.server))
        for some in found
    ]


class RunsPage(FormPage):
    """The member's runs; for admins also those of everybody."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        everybody = self.get_query_argument("all", "") == "1"
        if everybody:
            self.need_admin()
        before = self.get_query_argument("before", "") or None
        user = None if everybody else self.user
        found = await self.read(self.services.runs.newest, user, SHOWN, before)
        self.show(
            "runs.html",
            runs=await self.read(run_figures, self.services, found),
            everybody=everybody,
            first=before is None,
            older=found[-1].run.id if len(found) == SHOWN else None,
            stopped=self.get_query_argument("stopped", ""),
            words=COLOURS,
            now=self.services.clock(),
            xsrf=self.xsrf,
        )


class StopRunPage(FormPage):
    """The form that stops a run, after a confirmation."""

    @web.authenticated
    async def get(self, run_id: str) -> None:
        """Redirect to the list: the user had to sign in again to send the form."""
        self.redirect(f"{self.context.prefix}runs")

    @web.authenticated
    async def post(self, run_id: str) -> None:
        """Ask for confirmation, or stop the run."""
        found = await own_run(self, run_id)
        if not self.confirmed:
            self.confirm("stop_run", action=f"runs/{run_id}/stop", back="runs", run=found.run)
            return
        await self.read(partial(self.services.runs.stop, run_id, actor=self.user))
        self.go("runs?stopped=1")


async def own_run(handler: ServiceHandler, run_id: str) -> FollowedRun:
    """Return a run of the user's, or any for an admin.

    Raises HTTPError 404 for all others, so that their existence is not revealed.
    """
    found: FollowedRun = await handler.read(handler.services.runs.get, run_id)
    if found.run.user != handler.user and not handler.admin:
        raise web.HTTPError(404) from UnknownRun(run=run_id)
    return found


def _plain(work: Any) -> dict[str, Any]:
    return {name: getattr(work, name) for name in work.__dataclass_fields__}


HANDLERS = [
    ("runs", RunsPage),
    (r"runs/([0-9a-z-]{1,64})/stop", StopRunPage),
    ("api/runs", RunsAPI),
    ("api/runs/-/quote", QuoteAPI),
    (r"api/runs/([0-9a-z-]{1,64})", RunAPI),
]
