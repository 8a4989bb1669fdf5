"""Updates of environments' images from the page of the catalog, for admins."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from docker.errors import DockerException
from jupyterhub.scopes import needs_scope
from jupyterhub.user import User
from requests import RequestException
from tornado import web

from ..catalog.image_updates import ImageOffer, ImageUpdater
from ..core.aio import in_daemon_thread
from ..core.errors import ClockWasSet, EngineUnavailable, GPUSpawnerError, Refused
from ..core.jobs import DONE, Job, JobTable
from ..engines.images import Connect, PullProgress
from ..engines.preflight import Status
from ..services import Services
from .handlers import HubPageHandler

REGISTRY_SECONDS = 30.0
"""Seconds that the question waits for a registry."""

PULLING, TESTING = "pulling", "testing"

ENDED_KEPT = 5
"""Of how many updates that have ended the result is shown."""

KEY = "gpuspawner_image_updates"

_FAILURE = (
    "The container engine or the file system may be at fault. See that both work, then try again: "
    "the Hub's log says what went wrong."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateJob(Job):
    """An update; its bytes are those that were downloaded."""

    slug: str
    old: str
    new: str
    state: str = PULLING
    all_bytes: int = 0
    """Of all layers whose download has begun."""


class ImageUpdates:
    """Runs one update at a time, in a thread that the Hub does not wait for at its end.

    If the Hub ends during an update, nothing has changed: the catalog's file is written last.
    """

    def __init__(self, services: Services, log: logging.Logger) -> None:
        self._services = services
        self._log = log
        self._table = JobTable[UpdateJob](services.clock, ENDED_KEPT)

    def jobs(self) -> list[UpdateJob]:
        """Return what runs or ended lately, newest first."""
        return self._table.jobs()

    def start(self, updater: ImageUpdater, offer: ImageOffer, actor: str) -> UpdateJob:
        """Begin to update to what was offered. Raises Refused while another update runs."""
        job = UpdateJob(
            slug=offer.environment.slug,
            old=offer.old,
            new=offer.new,
            actor=actor,
            started_at=self._services.clock(),
        )
        with self._table.lock:
            for other in self._table.open_jobs():
                raise Refused(
                    f"{other.slug} is being updated just now, and one is updated at a time. Wait "
                    "until that has ended: nothing was changed."
                )
            job = self._table.add(job)
        threading.Thread(
            target=self._table.run,
            args=(job, partial(self._update, updater), self._log, _FAILURE),
            name="gpuspawner-update",
            daemon=True,
        ).start()
        return job

    def _update(self, updater: ImageUpdater, job: UpdateJob) -> None:
        """Update. Raises Refused if the environment keeps its image."""

        def follow(_: str, progress: Iterator[PullProgress]) -> None:
            for now in progress:
                self._table.change(job.id, done_bytes=now.got, all_bytes=now.size)

        done = updater.update(
            job.slug,
            digest=job.new.partition("@")[2],
            follow=follow,
            test=partial(self._table.change, job.id, state=TESTING),
        )
        failed = [finding for finding in done.findings if finding.status is not Status.OK]
        if failed:
            raise Refused("It failed its test: " + " ".join(f"{f.name}: {f.text}" for f in failed))
        if not done.is_done:
            raise Refused("It has the newest image already.")
        self._table.end(job.id, DONE, error=self._noted(job))

    def _noted(self, job: UpdateJob) -> str:
        """Record it in the audit log; return what to say if that is not possible."""
        subject, detail = f"environment {job.slug}", f"{job.old} to {job.new}"

        def note() -> None:
            at = self._services.clock()
            self._services.audit.note(at, job.actor, "update image", subject, detail)

        try:
            try:
                note()
            except ClockWasSet:
                note()
        except GPUSpawnerError as error:
            self._log.error("The update of %s is not in the audit log: %s", job.slug, error)
            return "The audit log could not be written."
        return ""


def updates_of(
    settings: MutableMapping[str, Any], services: Services, log: logging.Logger
) -> ImageUpdates:
    """Return the hub's only instance, from the Hub's own settings."""
    if KEY not in settings:
        settings[KEY] = ImageUpdates(services, log)
    found: ImageUpdates = settings[KEY]
    return found


class UpdatesHandler(HubPageHandler):
    """The base of the handlers of updates."""

    @property
    def updates(self) -> ImageUpdates:
        """The hub's updates."""
        return updates_of(self.site.settings, self.site.services, self.log)


class ImageUpdatesState(UpdatesHandler):
    """The updates as JSON, with which the open page of the catalog follows them."""

    def get_content_type(self) -> str:
        """Return the type of JSON, because the Hub's handlers send HTML by default."""
        return "application/json"

    @web.authenticated
    @needs_scope("admin-ui")
    def get(self) -> None:
        """Send the state of each update."""
        jobs = [
            {"id": job.id, "state": job.state, "bytes": job.done_bytes}
            for job in self.updates.jobs()
        ]
        self.set_header("Cache-Control", "no-store")
        self.finish({"jobs": jobs})


class ImageUpdatePage(UpdatesHandler):
    """The question before an update, and the update."""

    @web.authenticated
    @needs_scope("admin-ui")
    async def get(self, slug: str) -> None:
        """Ask the registry, and then the admin."""
        await self._ask(slug)

    @web.authenticated
    @needs_scope("admin-ui")
    async def post(self, slug: str) -> None:
        """Begin the update to the image whose digest was shown."""
        updater = self._updater()
        try:
            offer = await self._offer(updater, slug)
            if offer.digest != self.get_query_argument("digest", ""):
                raise Refused("The registry now offers another image: look at it again.")
            self.updates.start(updater, offer, self.current_user.name)
        except GPUSpawnerError as refusal:
            await self._ask(slug, refusal)
            return
        self.redirect(f"{self.hub.base_url}catalog", status=303)

    async def _ask(self, slug: str, refusal: GPUSpawnerError | None = None) -> None:
        offer, problem = None, refusal
        try:
            offer = await self._offer(self._updater(), slug)
        except GPUSpawnerError as error:
            problem = refusal or error
        if problem:
            self.set_status(problem.status_code)
        await self.show(
            "catalog_update.html",
            slug=slug,
            offer=offer,
            refusal=problem.message if problem else "",
        )

    def _updater(self) -> ImageUpdater:
        """Return what updates the hub's catalog. Raises HTTPError 404 if nothing can be updated."""
        user, file = self.current_user, self.site.configured("catalog")
        connect: Connect | None = None
        if isinstance(user, User):
            connect = getattr(user.spawner, "connect", None)
        if connect is None or not file:
            raise web.HTTPError(404, "This hub has no catalog of images that could be updated.")
        return ImageUpdater(Path(file), connect)

    async def _offer(self, updater: ImageUpdater, slug: str) -> ImageOffer:
        """Return what the registry offers. Raises GPUSpawnerError."""
        return await in_time(partial(updater.offer, slug))


async def in_time(work: Callable[[], ImageOffer]) -> ImageOffer:
    """Return the offer, asked for in a thread. Raises GPUSpawnerError."""
    task = in_daemon_thread("gpuspawner-offer", work)
    await asyncio.wait({task}, timeout=REGISTRY_SECONDS)
    if not task.done():
        task.cancel()
        raise EngineUnavailable("The engine or registry is not responding. Nothing was changed.")
    try:
        return task.result()
    except (DockerException, RequestException, OSError) as error:
        raise EngineUnavailable() from error
