"""Runs as a page and as JSON."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from tornado import web

from ..core.errors import Unavailable
from ..core.scopes import SESSION
from ..leases.views import own_lease
from ..queue.rank import QueuePosition
from ..services import Services
from ..web import view_models
from ..web.api import ALL, LIMIT, APIHandler, ChangingAPI, Parameter, operation, refusals
from ..web.base import HubCalls, ServiceHandler
from ..web.fields import one_of
from ..web.pages import FormPage
from .file_views import own_run, record_of
from .models import FollowedRun, RunRecord, RunState
from .rules import new_folder
from .schedules import explain
from .schemas import QuoteAnswer, QuoteBody, RunAnswer, RunBody, RunsAnswer
from .sweeps import Sweep

SHOWN = 50
"""Runs on a page."""

MOST_RECORDS = 10
"""How many running notebooks a page shows the progress of."""

COLOURS = {**dict.fromkeys((state.value for state in RunState), ""), "waiting": "granted"}
COLOURS |= {"starting": "granted", "running": "running", "failed": "unknown"}
"""The style of each state's label."""

BEFORE_RUN = Parameter("before", {"type": "string"}, "For the next page: the last answer's `next`.")


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
        with refusals():
            run_id = await submit(self, sent)
        self.answer(RunAnswer, await self.read(self.services.runs.get, run_id))


class QuoteAPI(ChangingAPI):
    """What a run would cost. Nothing is changed."""

    for_servers = True

    @operation("runs/-/quote", QuoteAnswer, name="quoteRun", body=QuoteBody, scope=SESSION)
    @web.authenticated
    async def post(self) -> None:
        """Return what a run would cost and when it would start, and submit nothing."""
        sent = self.sent(QuoteBody)
        lease = await own_lease(self, sent.lease) if sent.lease else None
        fields = sent.model_dump(include={"options", "preemptible"})
        fields["server"] = lease.server.name if lease else None
        with refusals():
            found = await hub_of(self).quote_run(self.user, fields)
        self.finish(QuoteAnswer.model_validate(found).as_json())


class RunAPI(APIHandler):
    """One run."""

    for_servers = True

    @operation("runs/{run}", RunAnswer, name="run", scope=SESSION)
    @web.authenticated
    async def get(self, run_id: str) -> None:
        """Return one of my runs; an admin gets anybody's."""
        found = await own_run(self, run_id)
        record = await record_of(self, found) if executes_notebook(found) else None
        self.answer(RunAnswer, found, record=record)

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
    record: RunRecord | None = None
    """The progress of a running notebook."""
    sweep: Sweep | None = None
    """The sweep that this row stands for, if it is a sweep's first run."""


def run_figures(services: Services, found: Sequence[FollowedRun]) -> list[RunFigures]:
    """Return runs with their costs and positions in the queue. Blocks."""
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


def _with_sweeps(services: Services, rows: Sequence[RunFigures]) -> list[RunFigures]:
    """Return the rows of a list, and add the sweep to its first run. Blocks."""
    return [
        replace(row, sweep=services.runs.sweep(row.followed.run.sweep))
        if row.followed.run.sweep
        else row
        for row in rows
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
        newest = partial(self.services.runs.newest, user, SHOWN, before, leading=True)
        found = await self.read(newest)
        rows = await self.read(run_figures, self.services, found)
        rows = await self.read(_with_sweeps, self.services, rows)
        list_schedules = partial(self.services.schedules.of_user, user)
        schedules = [] if before else await self.read(list_schedules)
        self.show(
            "runs.html",
            schedules=schedules,
            explain=explain,
            schedule_change=self.get_query_argument("schedule", ""),
            runs=await self._with_progress(rows),
            everybody=everybody,
            first=before is None,
            older=found[-1].run.id if len(found) == SHOWN else None,
            stopped=self.get_query_argument("stopped", ""),
            words=COLOURS,
            now=self.services.clock(),
            xsrf=self.xsrf,
        )

    async def _with_progress(self, found: Sequence[RunFigures]) -> list[RunFigures]:
        """Return runs with the progress of the newest few notebooks."""
        going_on = [some.followed for some in found if executes_notebook(some.followed)]
        asked = going_on[:MOST_RECORDS]
        records = await asyncio.gather(*(record_of(self, followed) for followed in asked))
        told = {x.run.id: record for x, record in zip(asked, records, strict=True)}
        return [replace(some, record=told.get(some.followed.run.id)) for some in found]


class RunForm(FormPage):
    """A form without a page of its own."""

    page = "runs"
    """The path of the page that has the form; ``{}`` stands for the id in the form's own path."""

    @web.authenticated
    async def get(self, *parts: str) -> None:
        """Redirect to the page: the user had to sign in again to send the form."""
        self.redirect(self.context.prefix + self.page.format(*parts))


class StopRunPage(RunForm):
    """The form that stops a run, after a confirmation."""

    @web.authenticated
    async def post(self, run_id: str) -> None:
        """Ask for confirmation, or stop the run."""
        found = await own_run(self, run_id)
        if not self.confirmed:
            self.confirm("stop_run", action=f"runs/{run_id}/stop", back="runs", run=found.run)
            return
        await self.read(partial(self.services.runs.stop, run_id, actor=self.user))
        self.go("runs?stopped=1")


def executes_notebook(followed: FollowedRun) -> bool:
    """Return True if a run is executing a notebook."""
    return followed.state is RunState.RUNNING and bool(followed.run.work.notebook)


def hub_of(handler: ServiceHandler) -> HubCalls:
    """Return the Hub. Raises Unavailable if the service has none."""
    if handler.context.hub is None:
        raise Unavailable()
    return handler.context.hub


async def submit(handler: ServiceHandler, sent: RunBody, *, again: bool = False) -> str:
    """Have the Hub check and save a run of the user's, and return its id.

    ``again``: its notebook is in the folder of an earlier run, which it must not write to. Raises a
    GPUSpawnerError with the sentence for the member.
    """
    title = sent.title_in_lists
    folder = f"{new_folder(title, handler.services.clock())}-{secrets.token_hex(2)}"
    work = sent.work(folder)
    if again:
        work = replace(work, folder=folder)
    fields = sent.model_dump(include={"options", "requeue", "preemptible", "key"})
    fields |= {"title": title, "work": asdict(work)}
    return await hub_of(handler).submit_run(handler.user, fields)


HANDLERS = [
    ("runs", RunsPage),
    (r"runs/([0-9a-z-]{1,64})/stop", StopRunPage),
    ("api/runs", RunsAPI),
    ("api/runs/-/quote", QuoteAPI),
    (r"api/runs/([0-9a-z-]{1,64})", RunAPI),
]
