"""Updates of environments' images from the page of the catalog and by REST, for admins."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from docker.errors import DockerException
from jupyterhub import orm
from jupyterhub.apihandlers.base import APIHandler
from jupyterhub.scopes import needs_scope
from jupyterhub.user import User
from requests import RequestException
from tornado import web

from ..catalog.image_updates import ImageOffer, ImageUpdater
from ..core.aio import in_daemon_thread
from ..core.errors import (
    ClockWasSet,
    EngineUnavailable,
    GPUSpawnerError,
    NothingToUpdate,
    Refused,
    SlugRefused,
    UnknownEnvironment,
    UpdateRefused,
)
from ..core.jobs import DONE, Job, JobTable
from ..engines.images import Connect, PullProgress
from ..engines.preflight import Status
from ..services import Services
from .handlers import CatalogPages, DropsBody, HubPageHandler

T = TypeVar("T")

REGISTRY_SECONDS = 30.0
"""Seconds that the question waits for a registry."""

PULLING, TESTING = "pulling", "testing"

LONGEST_NAME = 200
"""Characters kept of a name that was typed, to show it again if it is refused."""

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
    keep_as: str = ""
    """The slug of the environment that keeps the old image; empty for none."""
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

    def start(
        self, updater: ImageUpdater, offer: ImageOffer, actor: str, *, keep_as: str = ""
    ) -> UpdateJob:
        """Begin to update to what was offered. Raises UpdateRefused while another update runs."""
        job = UpdateJob(
            slug=offer.environment.slug,
            old=offer.old,
            new=offer.new,
            keep_as=keep_as,
            actor=actor,
            started_at=self._services.clock(),
        )
        with self._table.lock:
            for other in self._table.open_jobs():
                raise UpdateRefused(
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
            keep_as=job.keep_as,
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
        if job.keep_as:
            detail += f", the old one kept as {job.keep_as}"

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
    """The question before an update, and the update.

    ``keep-as`` in the address is the name of an environment that keeps the current image. A body
    would be discarded.
    """

    @web.authenticated
    @needs_scope("admin-ui")
    async def get(self, slug: str) -> None:
        """Ask the registry, and then the admin."""
        await self._ask(slug)

    @web.authenticated
    @needs_scope("admin-ui")
    async def post(self, slug: str) -> None:
        """Begin the update to the image whose digest was shown."""
        updater, keep_as = self._updater(), self._keep_as()
        digest = self.get_query_argument("digest", "")
        try:
            offer = await agreed_offer(updater, slug, digest, keep_as)
            self.updates.start(updater, offer, self.current_user.name, keep_as=keep_as)
        except GPUSpawnerError as refusal:
            await self._ask(slug, refusal)
            return
        self.redirect(f"{self.hub.base_url}catalog", status=303)

    async def _ask(self, slug: str, refusal: GPUSpawnerError | None = None) -> None:
        offer, problem, wrong_name = None, refusal, ""
        updater, keep_as = self._updater(), self._keep_as()
        try:
            offer = await in_time(partial(updater.offer, slug))
            if keep_as:
                await in_time(partial(updater.require_free, keep_as))
        except SlugRefused as error:
            wrong_name = error.message
            problem = error
        except GPUSpawnerError as error:
            problem = refusal or error
        if problem:
            self.set_status(problem.status_code)
        await self.show(
            "catalog_update.html",
            slug=slug,
            offer=offer,
            keep_as=keep_as,
            wrong_name=wrong_name,
            refusal=problem.message if problem and not wrong_name else "",
        )

    def _keep_as(self) -> str:
        return self.get_query_argument("keep-as", "")[:LONGEST_NAME]

    def _updater(self) -> ImageUpdater:
        """Return what updates the hub's catalog. Raises HTTPError 404 if nothing can be updated."""
        try:
            return updater_for(self.site, self.current_user)
        except NothingToUpdate as error:
            raise web.HTTPError(error.status_code, "%s", error.message) from None


class ImageUpdatesAPI(DropsBody, APIHandler):
    """Image updates for the REST API of the accounting service, which has checked for an admin.

    The updates run in this process, which knows the hub's engine and catalog. Only the service may
    ask, because it names the admin on whose behalf it asks.
    """

    def _require_service(self) -> None:
        """Raise HTTPError 403 unless the accounting service asks.

        Not in ``prepare``: a refusal there, before the body is read, drops the connection.
        """
        name = self.settings["template_vars"].get("gpuspawner_service", "gpu")
        caller = self.current_user
        if not isinstance(caller, orm.Service) or caller.name != name:
            raise web.HTTPError(403)

    async def get(self, slug: str = "") -> None:
        """Send all updates, or what the registry offers for an environment."""
        self._require_service()
        site = CatalogPages.of(self.settings)
        if not slug:
            jobs = updates_of(site.settings, site.services, self.log).jobs()
            self.finish({"jobs": [plain_job(job) for job in jobs]})
            return
        try:
            updater = await self._updater(site, slug)
            offer = await in_time(partial(updater.offer, slug))
        except GPUSpawnerError as error:
            self._refuse(error)
            return
        self.finish(
            {
                "environment": slug,
                "image": offer.old,
                "offered": offer.new,
                "digest": offer.digest,
                "newer": offer.is_newer,
            }
        )

    async def post(self, slug: str) -> None:
        """Begin the update to the image with this digest."""
        self._require_service()
        site = CatalogPages.of(self.settings)
        keep_as = self.get_query_argument("keep-as", "")
        try:
            updater = await self._updater(site, slug)
            offer = await agreed_offer(
                updater, slug, self.get_query_argument("digest", ""), keep_as
            )
            updates = updates_of(site.settings, site.services, self.log)
            actor = self.get_query_argument("actor")
            job = updates.start(updater, offer, actor, keep_as=keep_as)
        except GPUSpawnerError as error:
            self._refuse(error)
            return
        self.finish(plain_job(job))

    async def _updater(self, site: CatalogPages, slug: str) -> ImageUpdater:
        await site.refresh_catalog()
        updater = updater_for(site, self.find_user(self.get_query_argument("actor", "")))
        if all(each.slug != slug for each in site.catalog().environments):
            raise UnknownEnvironment(environment=slug[:100])
        return updater

    def _refuse(self, error: GPUSpawnerError) -> None:
        self.set_status(error.status_code)
        self.finish({"error": error.reason, "message": error.message})


def plain_job(job: UpdateJob) -> dict[str, Any]:
    """Return an update as JSON can represent it."""
    moments = ("started_at", "ended_at")
    return {name: value for name, value in asdict(job).items() if name not in moments} | {
        name: moment.isoformat() if (moment := getattr(job, name)) else None for name in moments
    }


def updater_for(site: CatalogPages, user: Any) -> ImageUpdater:
    """Return what updates the hub's catalog, on the engine of an admin's servers.

    Raises NothingToUpdate.
    """
    file = site.configured("catalog")
    connect: Connect | None = None
    if isinstance(user, User):
        connect = getattr(user.spawner, "connect", None)
    if connect is None or not file:
        raise NothingToUpdate()
    return ImageUpdater(Path(file), connect)


async def agreed_offer(updater: ImageUpdater, slug: str, digest: str, keep_as: str) -> ImageOffer:
    """Return what the registry offers, if it is what was agreed to. Raises GPUSpawnerError."""
    offer = await in_time(partial(updater.offer, slug))
    if offer.digest != digest:
        raise UpdateRefused("The registry now offers another image. Look at it, then update again.")
    if keep_as:
        await in_time(partial(updater.require_free, keep_as))
    return offer


async def in_time(work: Callable[[], T]) -> T:
    """Return what an engine or a file is asked for, in a thread. Raises GPUSpawnerError."""
    task = in_daemon_thread("gpuspawner-offer", work)
    await asyncio.wait({task}, timeout=REGISTRY_SECONDS)
    if not task.done():
        task.cancel()
        raise EngineUnavailable("The engine or registry is not responding. Nothing was changed.")
    try:
        return task.result()
    except (DockerException, RequestException, OSError) as error:
        raise EngineUnavailable() from error
