"""Sweeps as JSON, the page of one, and its forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any

from tornado import web

from ..core.errors import GPUSpawnerError, NothingFailed, UnknownSweep
from ..core.scopes import SESSION
from ..leases.models import Terms
from ..services import Services
from ..web.api import APIHandler, ChangingAPI, operation, refusals
from ..web.base import ServiceHandler
from ..web.pages import FormPage
from .file_views import require_own
from .models import RunState, Work
from .rules import new_folder
from .schemas import AgainBody, SweepAnswer, SweepBody, SweepQuoteAnswer
from .sweeps import Sweep
from .views import COLOURS, RunForm, hub_of


class SubmittingAPI(ChangingAPI):
    """Base of the operations that hand a sweep to the Hub."""

    for_servers = True

    def asked(self) -> dict[str, Any]:
        """Return the sweep that was sent, in the Hub's format. Raises HTTPError 400."""
        sent = self.sent(SweepBody)
        title = sent.title_in_lists
        with refusals():
            works = sent.works(title, new_folder(title, self.services.clock()))
        fields = sent.model_dump(include={"options", "requeue", "preemptible", "key", "at_most"})
        return {**fields, "title": title, "works": _plain(works)}

    async def submit(self, fields: dict[str, Any]) -> None:
        """Have the Hub save a sweep, and answer with it."""
        with refusals():
            sweep = await hub_of(self).submit_sweep(self.user, fields)
        self.answer(SweepAnswer, await self.read(self.services.runs.sweep, sweep))


class SweepsAPI(SubmittingAPI):
    """Submits sweeps."""

    @operation("sweeps", SweepAnswer, name="submitSweep", body=SweepBody, scope=SESSION)
    @web.authenticated
    async def post(self) -> None:
        """Submit a run for each set of parameters, all of them or none."""
        await self.submit(self.asked())


class SweepQuoteAPI(SubmittingAPI):
    """The price of a sweep."""

    @operation("sweeps/-/quote", SweepQuoteAnswer, name="quoteSweep", body=SweepBody, scope=SESSION)
    @web.authenticated
    async def post(self) -> None:
        """Check a sweep, and return the most that it can cost; nothing is submitted."""
        with refusals():
            price = await hub_of(self).quote_sweep(self.user, self.asked())
        self.finish(SweepQuoteAnswer.model_validate(price).as_json())


class SweepAPI(APIHandler):
    """One sweep."""

    for_servers = True

    @operation("sweeps/{sweep}", SweepAnswer, name="sweep", scope=SESSION)
    @web.authenticated
    async def get(self, sweep_id: str) -> None:
        """Return one of my sweeps, with its runs; an admin gets anybody's."""
        self.answer(SweepAnswer, await own_sweep(self, sweep_id))

    @operation("sweeps/{sweep}", SweepAnswer, name="stopSweep", scope=SESSION)
    @web.authenticated
    async def delete(self, sweep_id: str) -> None:
        """Stop all runs of a sweep; what they have written stays."""
        await own_sweep(self, sweep_id)
        stop = partial(self.services.runs.stop_sweep, sweep_id, actor=self.user)
        self.answer(SweepAnswer, await self.read(stop))


class SweepAgainAPI(SubmittingAPI):
    """Submits the failed runs of a sweep again."""

    @operation(
        "sweeps/{sweep}/again", SweepAnswer, name="againSweep", body=AgainBody, scope=SESSION
    )
    @web.authenticated
    async def post(self, sweep_id: str) -> None:
        """Submit the failed runs of one of my sweeps again, as a new sweep."""
        sent = self.sent(AgainBody)
        found = await own_sweep(self, sweep_id, or_admin=False)
        with refusals():
            fields = failed_again(found, sent.key, self.services.clock())
        await self.submit(fields)


class SweepPage(FormPage):
    """The page of one sweep."""

    @web.authenticated
    async def get(self, sweep_id: str) -> None:
        """Send the page."""
        await self.show_sweep(await own_sweep(self, sweep_id))

    async def show_sweep(self, sweep: Sweep, refusal: GPUSpawnerError | None = None) -> None:
        """Send the page; ``refusal`` is why nothing was submitted again."""
        first = sweep.first
        leased = [each.lease for each in sweep.runs if each.lease is not None]
        self.show(
            "sweep.html",
            refusal=refusal,
            sweep=sweep,
            first=first,
            most=await self.read(most_of, self.services, sweep),
            environment=leased[0].environment if leased else first.options.get("environment"),
            gpus=len(leased[0].devices) if leased else None,
            has_failed=RunState.FAILED.value in sweep.states,
            stopped=self.get_query_argument("stopped", ""),
            mine=first.user == self.user,
            words=COLOURS,
            now=self.services.clock(),
            xsrf=self.xsrf,
        )


class StopSweepPage(RunForm):
    """The form that stops all runs of a sweep, after a confirmation."""

    page = "runs/sweeps/{}"

    @web.authenticated
    async def post(self, sweep_id: str) -> None:
        """Ask for confirmation, or stop the runs."""
        found = await own_sweep(self, sweep_id)
        page = f"runs/sweeps/{sweep_id}"
        if not self.confirmed:
            self.confirm("stop_sweep", action=f"{page}/stop", back=page, sweep=found)
            return
        await self.read(partial(self.services.runs.stop_sweep, sweep_id, actor=self.user))
        self.go(f"{page}?stopped=1")


class SweepAgainPage(SweepPage):
    """The form that submits the failed runs of a sweep again, after a confirmation."""

    @web.authenticated
    async def get(self, sweep_id: str) -> None:
        """Redirect to the sweep: the user had to sign in again to send the form."""
        self.redirect(f"{self.context.prefix}runs/sweeps/{sweep_id}")

    @web.authenticated
    async def post(self, sweep_id: str) -> None:
        """Ask for confirmation, or submit the runs."""
        found = await own_sweep(self, sweep_id)
        if found.first.user != self.user:
            raise web.HTTPError(403)
        try:
            fields = failed_again(found, self.key, self.services.clock())
            if self.confirmed:
                again = await hub_of(self).submit_sweep(self.user, fields)
                self.go(f"runs/sweeps/{again}")
                return
        except GPUSpawnerError as error:
            await self.show_sweep(found, error)
            return
        page = f"runs/sweeps/{sweep_id}"
        titles = [title for title, _ in fields["works"]]
        self.confirm("sweep_again", action=f"{page}/again", back=page, sweep=found, titles=titles)


def failed_again(sweep: Sweep, key: str, now: datetime) -> dict[str, Any]:
    """Return a new sweep of the failed runs, in the Hub's format.

    Raises NothingFailed.
    """
    failed = [each.run for each in sweep.runs if each.state is RunState.FAILED]
    if not failed:
        raise NothingFailed()
    folder = new_folder(sweep.title, now)
    works = [
        (run.title, {**asdict(run.work), "folder": f"{folder}-{number:03}"})
        for number, run in enumerate(failed, 1)
    ]
    first = sweep.first
    return {
        "title": sweep.title,
        "works": works,
        "options": dict(first.options),
        "requeue": first.requeue,
        "preemptible": first.preemptible,
        "key": key,
        "at_most": first.at_most,
    }


def most_of(services: Services, sweep: Sweep) -> int | None:
    """Return the most that a sweep can cost, in microcredits. Blocks.

    None if its runs have no time limit, or none of them has a lease or a ticket yet.
    """
    begun = [each.lease for each in sweep.runs if each.lease is not None]
    rate = max((lease.rate for lease in begun), default=None)
    seconds = begun[0].seconds if begun else None
    servers = {each.run.server for each in sweep.runs}
    for ticket in services.queue.waiting():
        if ticket.server in servers:
            terms = Terms(seconds=ticket.seconds, preemptible=sweep.first.preemptible)
            rate, seconds = services.queue.dearest(ticket.request, terms)[0], ticket.seconds
            break
    return sweep.most(rate, seconds)


async def own_sweep(handler: ServiceHandler, sweep_id: str, *, or_admin: bool = True) -> Sweep:
    """Return a sweep of the user's, or with ``or_admin`` any for an admin. Raises HTTPError."""
    found: Sweep = await handler.read(handler.services.runs.sweep, sweep_id)
    require_own(handler, found.first.user, UnknownSweep(sweep=sweep_id), or_admin=or_admin)
    return found


def _plain(works: Sequence[tuple[str, Work]]) -> list[tuple[str, dict[str, Any]]]:
    return [(title, asdict(work)) for title, work in works]


HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    (r"runs/sweeps/([0-9a-z-]{1,60})", SweepPage),
    (r"runs/sweeps/([0-9a-z-]{1,60})/stop", StopSweepPage),
    (r"runs/sweeps/([0-9a-z-]{1,60})/again", SweepAgainPage),
    ("api/sweeps", SweepsAPI),
    ("api/sweeps/-/quote", SweepQuoteAPI),
    (r"api/sweeps/([0-9a-z-]{1,60})", SweepAPI),
    (r"api/sweeps/([0-9a-z-]{1,60})/again", SweepAgainAPI),
]
