"""Sweeps as JSON, and the form that stops one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from tornado import web

from ..core.errors import NothingFailed, UnknownSweep
from ..core.scopes import SESSION
from ..web.api import APIHandler, ChangingAPI, operation, refusals
from ..web.base import HubCalls, ServiceHandler
from ..web.pages import FormPage
from .models import RunState, Work
from .rules import slug_of
from .schemas import LONGEST_TITLE, AgainBody, SweepAnswer, SweepBody, SweepQuoteAnswer
from .sweeps import Sweep


class SubmittingAPI(ChangingAPI):
    """The base of the operations that hand a sweep to the Hub."""

    for_servers = True

    @property
    def hub(self) -> HubCalls:
        """The Hub. Raises HTTPError 503 without one."""
        if self.context.hub is None:
            raise web.HTTPError(503)
        return self.context.hub

    def asked(self) -> dict[str, Any]:
        """Return the sweep that was sent, as the Hub takes it. Raises HTTPError 400."""
        sent = self.sent(SweepBody)
        what = sent.notebook.rpartition("/")[2] or (sent.command[0] if sent.command else "")
        title = (sent.title.strip() or what)[:LONGEST_TITLE]
        with refusals():
            works = sent.works(title, self.new_folder(title))
        fields = sent.model_dump(include={"options", "requeue", "preemptible", "key", "at_most"})
        return {**fields, "title": title, "works": _plain(works)}

    def new_folder(self, title: str) -> str:
        """Return the beginning of the folders of a sweep that is submitted now."""
        return f"runs/{self.services.clock():%Y-%m-%d-%H%M%S}-{slug_of(title)}"

    async def submit(self, fields: dict[str, Any]) -> None:
        """Have the Hub save a sweep, and send it."""
        with refusals():
            sweep = await self.hub.submit_sweep(self.user, fields)
        self.answer(SweepAnswer, await self.read(self.services.runs.sweep, sweep))


class SweepsAPI(SubmittingAPI):
    """Submits sweeps."""

    @operation("sweeps", SweepAnswer, name="submitSweep", body=SweepBody, scope=SESSION)
    @web.authenticated
    async def post(self) -> None:
        """Submit a run for each set of parameters, all of them or none."""
        await self.submit(self.asked())


class SweepQuoteAPI(SubmittingAPI):
    """What a sweep costs."""

    @operation("sweeps/-/quote", SweepQuoteAnswer, name="quoteSweep", body=SweepBody, scope=SESSION)
    @web.authenticated
    async def post(self) -> None:
        """Check a sweep, and return what it costs at most; nothing is submitted."""
        with refusals():
            price = await self.hub.quote_sweep(self.user, self.asked())
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
        """Submit the failed runs of one of my sweeps again, as a sweep of their own."""
        sent = self.sent(AgainBody)
        found = await own_sweep(self, sweep_id)
        if found.first.user != self.user:
            raise web.HTTPError(404) from UnknownSweep(sweep=sweep_id)
        failed = [each.run for each in found.runs if each.state is RunState.FAILED]
        if not failed:
            raise web.HTTPError(409) from NothingFailed()
        title = sweep_id.rpartition("-")[0]
        folder = self.new_folder(title)
        works = [
            (run.title, {**asdict(run.work), "folder": f"{folder}-{number:03}"})
            for number, run in enumerate(failed, 1)
        ]
        first = found.first
        await self.submit(
            {
                "title": title,
                "works": works,
                "options": dict(first.options),
                "requeue": first.requeue,
                "preemptible": first.preemptible,
                "key": sent.key,
                "at_most": first.at_most,
            }
        )


class StopSweepPage(FormPage):
    """The form that stops all runs of a sweep, after a confirmation."""

    @web.authenticated
    async def get(self, sweep_id: str) -> None:
        """Redirect to the list: the user had to sign in again to send the form."""
        self.redirect(f"{self.context.prefix}runs")

    @web.authenticated
    async def post(self, sweep_id: str) -> None:
        """Ask for confirmation, or stop the runs."""
        found = await own_sweep(self, sweep_id)
        if not self.confirmed:
            action = f"sweeps/{sweep_id}/stop"
            self.confirm("stop_sweep", action=action, back="runs", sweep=found)
            return
        await self.read(partial(self.services.runs.stop_sweep, sweep_id, actor=self.user))
        self.go("runs?stopped=1")


async def own_sweep(handler: ServiceHandler, sweep_id: str) -> Sweep:
    """Return a sweep of the user's, or any for an admin.

    Raises HTTPError 404 for all others, so that their existence is not revealed.
    """
    found: Sweep = await handler.read(handler.services.runs.sweep, sweep_id)
    if found.first.user != handler.user and not handler.admin:
        raise web.HTTPError(404) from UnknownSweep(sweep=sweep_id)
    return found


def _plain(works: Sequence[tuple[str, Work]]) -> list[tuple[str, dict[str, Any]]]:
    return [(title, asdict(work)) for title, work in works]


HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    (r"sweeps/([0-9a-z-]{1,60})/stop", StopSweepPage),
    ("api/sweeps", SweepsAPI),
    ("api/sweeps/-/quote", SweepQuoteAPI),
    (r"api/sweeps/([0-9a-z-]{1,60})", SweepAPI),
    (r"api/sweeps/([0-9a-z-]{1,60})/again", SweepAgainAPI),
]
