"""Runs as JSON."""

from __future__ import annotations

import re
from typing import Any

from tornado import web

from ..core.errors import GPUSpawnerError, UnknownRun
from ..web.api import ALL, LIMIT, APIHandler, ChangingAPI, Parameter, operation, refusals
from ..web.base import ServiceHandler
from ..web.fields import one_of
from .models import FollowedRun, RunState
from .schemas import LONGEST_TITLE, RunAnswer, RunBody, RunsAnswer

BEFORE_RUN = Parameter("before", {"type": "string"}, "Of the next page: the last answer's `next`.")

_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")


class RunsAPI(ChangingAPI):
    """The member's runs; for admins those of all members."""

    @operation("runs", RunsAnswer, ALL, BEFORE_RUN, LIMIT)
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

    @operation("runs", RunAnswer, name="submitRun", body=RunBody)
    @web.authenticated
    async def post(self) -> None:
        """Submit a run: it waits for its devices like a server, and needs no open browser."""
        sent = self.sent(RunBody)
        now = self.services.clock()
        what = sent.notebook.rpartition("/")[2] or (sent.command[0] if sent.command else "")
        title = (sent.title.strip() or what)[:LONGEST_TITLE]
        name = _UNFIT.sub("-", title).strip("-.") or "run"
        with refusals():
            work = sent.work(f"runs/{now:%Y-%m-%d-%H%M%S}-{name}")
        hub = self.context.hub
        if hub is None:
            raise web.HTTPError(503)
        fields = sent.model_dump(include={"options", "requeue", "key"})
        fields |= {"title": title, "work": _plain(work)}
        try:
            run_id = await hub.submit_run(self.user, fields)
        except GPUSpawnerError as error:
            raise web.HTTPError(error.status_code) from error
        self.set_status(201)
        self.answer(RunAnswer, await self.read(self.services.runs.get, run_id))


class RunAPI(APIHandler):
    """One run."""

    @operation("runs/{run}", RunAnswer, name="run")
    @web.authenticated
    async def get(self, run_id: str) -> None:
        """Return one of my runs; an admin gets anybody's."""
        self.answer(RunAnswer, await own_run(self, run_id))

    @operation("runs/{run}", RunAnswer, name="stopRun")
    @web.authenticated
    async def delete(self, run_id: str) -> None:
        """Stop a run; what it has written stays."""
        found = await own_run(self, run_id)
        if found.state in (RunState.DONE, RunState.FAILED, RunState.STOPPED):
            self.answer(RunAnswer, found)
            return
        stopped = await self.services.run(self.services.runs.stop, run_id, actor=self.user)
        self.answer(RunAnswer, stopped)


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


HANDLERS = [("api/runs", RunsAPI), (r"api/runs/([0-9a-f]{1,64})", RunAPI)]
