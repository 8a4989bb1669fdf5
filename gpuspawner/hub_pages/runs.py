"""The Hub's side of runs, for the accounting service alone, which has checked whose they are."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import Any

from jupyterhub import orm
from jupyterhub.apihandlers.base import APIHandler
from jupyterhub.user import User
from tornado import web

from ..core.errors import GPUSpawnerError
from ..runs.models import Run, Work
from ..runs.sweeps import SweepRequest
from ..spawners.runs import RunLauncher
from .handlers import CatalogPages


class _OfService(APIHandler):
    def require_service(self) -> None:
        """Raise HTTPError 403 unless the accounting service asks."""
        name = self.settings["template_vars"].get("gpuspawner_service", "gpu")
        caller = self.current_user
        if not isinstance(caller, orm.Service) or caller.name != name:
            raise web.HTTPError(403)

    @property
    def launcher(self) -> RunLauncher:
        """The hub's launcher of runs."""
        return RunLauncher.of(self.settings)

    def sent_for(self) -> tuple[dict[str, Any], User]:
        """Return what the service has sent, and the member for whom. Raises HTTPError."""
        self.require_service()
        sent = self.get_json_body()
        user = self.find_user(sent["user"])
        if user is None:
            raise web.HTTPError(404)
        return sent, user

    def refuse(self, error: GPUSpawnerError) -> None:
        """Answer with an error that the member reads."""
        self.set_status(error.status_code)
        self.finish({"error": error.reason, "message": error.message})


class LauncherAPI(_OfService):
    """Submits a run of a member's."""

    async def post(self) -> None:
        """Check a run like the start of a server, and save it."""
        sent, user = self.sent_for()
        work = sent["work"]
        try:
            run = await self.launcher.submit(
                user,
                _work(work),
                sent["options"],
                key=sent["key"],
                title=sent["title"],
                requeue=sent["requeue"],
                preemptible=sent["preemptible"],
            )
        except GPUSpawnerError as error:
            self.refuse(error)
            return
        self.set_status(201)
        self.finish({"id": run.id})


class QuoteAPI(_OfService):
    """What a run of a member's would cost."""

    async def post(self) -> None:
        """Check the options like those of a start, and return the price and the expected start."""
        sent, user = self.sent_for()
        try:
            found = await self.launcher.quote(
                user,
                sent["options"],
                sent["server"],
                preemptible=sent["preemptible"],
                must_fit=sent.get("must_fit") is True,
            )
        except GPUSpawnerError as error:
            self.refuse(error)
            return
        self.finish(json.dumps(asdict(found), default=datetime.isoformat))


class SweepLauncherAPI(_OfService):
    """Submits a sweep of a member's, or says what it would cost."""

    async def post(self, quote: str | None = None) -> None:
        """Check a sweep once like the start of a server; save it, unless a quote is asked for."""
        sent, user = self.sent_for()
        works = [(title, _work(work)) for title, work in sent.pop("works")]
        asked = SweepRequest(works=works, **{k: v for k, v in sent.items() if k != "user"})
        try:
            if quote:
                self.finish(asdict(await self.launcher.quote_sweep(user, asked)))
                return
            sweep = await self.launcher.submit_sweep(user, asked)
        except GPUSpawnerError as error:
            self.refuse(error)
            return
        self.set_status(201)
        self.finish({"id": sweep})


class EnvironmentsAPI(_OfService):
    """The environments that a member may choose."""

    async def post(self) -> None:
        """List them, in the order of the catalog."""
        _, user = self.sent_for()
        site = CatalogPages.of(self.settings)
        try:
            await site.refresh_catalog()
            found = site.catalog().visible_to({group.name for group in user.groups})
        except GPUSpawnerError as error:
            self.refuse(error)
            return
        self.finish({"environments": [each.model_dump(mode="json") for each in found]})


class StartRunsAPI(_OfService):
    """Starts waiting runs."""

    async def post(self) -> None:
        """Start tasks for waiting runs, and list the runs that have one."""
        self.require_service()
        await self.launcher.start_all()
        self.finish({"starting": [_plain(run) for run in self.launcher.starting]})


def _work(sent: dict[str, Any]) -> Work:
    return Work(**{**sent, "command": tuple(sent.get("command", ()))})


def _plain(run: Run) -> dict[str, str]:
    return {"id": run.id, "user": run.user}
