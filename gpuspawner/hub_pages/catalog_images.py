"""The images of the catalog's environments on a page for admins, and their updates, by REST too."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from docker.errors import DockerException
from jupyterhub import orm
from jupyterhub.apihandlers.base import APIHandler
from jupyterhub.scopes import needs_scope
from jupyterhub.user import User
from requests import RequestException
from tornado import web

from ..catalog.image_updates import ImageOffer, ImageUpdater
from ..catalog.models import Environment
from ..core.aio import in_daemon_thread
from ..core.errors import (
    ClockWasSet,
    EngineUnavailable,
    GPUSpawnerError,
    ImageUnavailable,
    NothingToUpdate,
    Refused,
    SlugRefused,
    UnknownEnvironment,
    UpdateRefused,
)
from ..core.jobs import DONE, Job, JobTable
from ..core.units import format_bytes, format_memory
from ..engines.images import Connect, ImageState, PullProgress, image_state, offered_digest
from ..engines.preflight import Status
from ..services import Services
from ..slurm.images import reach
from ..slurm.scheduler import SlurmDelegate
from .handlers import CatalogPages, DropsBody, HubPageHandler

T = TypeVar("T")

OFFER_SECONDS = 30.0
"""Seconds that the question before an update waits for a registry."""

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
    await asyncio.wait({task}, timeout=OFFER_SECONDS)
    if not task.done():
        task.cancel()
        raise EngineUnavailable("The engine or registry is not responding. Nothing was changed.")
    try:
        return task.result()
    except (DockerException, RequestException, OSError) as error:
        raise EngineUnavailable() from error


# The page.

ENGINE_SECONDS = 10.0
"""Seconds that the page waits for all engines."""

REGISTRY_SECONDS = 20.0
"""Seconds that the page waits for all registries."""

AT_ONCE = 16
"""How many engines or registries are asked at the same time."""

_NO_ANSWER = (EngineUnavailable, DockerException, RequestException, OSError)

Found = Mapping[str, Mapping[str, ImageState]]
"""What each engine that answers has of each image; the hub's own engine has no name."""


class SeenImage(NamedTuple):
    """The state of an image on one or more engines where it is the same."""

    state: ImageState
    on_node: bool
    names: tuple[str, ...]
    """Of the engines; the hub's own has an empty one."""


class CatalogState(UpdatesHandler):
    """The page ``/hub/catalog``; with ``updates=1`` the registries are asked for newer images."""

    @web.authenticated
    @needs_scope("admin-ui")
    async def get(self) -> None:
        """Send the page."""
        environments = self.catalog().environments
        asked = self.get_argument("updates", "") == "1"
        engines = self._engines()
        images = dict.fromkeys(image for each in environments for image in each.images if image)
        found = await look_at_images(engines, images, ask_registries=asked)
        policy = self.site.configured("pull_policy") or "ifnotpresent"
        await self.show(
            "catalog_state.html",
            environments=environments,
            seen=partial(seen_images, found, is_cluster=len(engines) > 1),
            policy_of=lambda each: str(each.spawner_override.get("pull_policy", policy)).lower(),
            memory=format_memory,
            size=format_bytes,
            asked=asked,
            jobs=self.updates.jobs(),
            outdated=outdated(found, environments),
            engines=engines,
            silent=[name for name in engines if name not in found],
            file=self.site.configured("catalog"),
            refusal=self.site.catalog_problem(),
        )

    def _engines(self) -> dict[str, Connect]:
        """Return the engines that run servers: the hub's own, without a name, and each node's."""
        user = self.current_user
        connect = getattr(user.spawner, "connect", None) if isinstance(user, User) else None
        if connect is None:
            return {}  # servers are no containers
        delegate = self.site.services.delegation.delegate
        nodes = delegate.cluster.nodes if isinstance(delegate, SlurmDelegate) else ()
        return {"": connect, **{node.name: reach(node) for node in nodes}}


async def look_at_images(
    engines: Mapping[str, Connect], images: Iterable[str], *, ask_registries: bool
) -> Found:
    """Return what each engine has of these images, without the engines that are not responding.

    If the registries are asked, a state says what they have now, or why that is not known.
    """
    looks = {name: partial(_look, connect, images) for name, connect in engines.items()}
    answers = await answers_in_time(looks, ENGINE_SECONDS)
    found = {name: states for name in engines if (states := answers.get(name)) is not None}
    if not ask_registries:
        return found
    through: dict[str, Connect] = {}
    """For each image from a registry, the first engine that has it."""
    for name, states in found.items():
        for image, state in states.items():
            if state.digest:
                through.setdefault(image, engines[name])
    asks = {image: partial(_offer, connect, image) for image, connect in through.items()}
    offers = await answers_in_time(asks, REGISTRY_SECONDS)
    late = "", "it did not respond in time"

    def with_offer(state: ImageState) -> ImageState:
        if not state.digest:
            return state
        offered, why = offers.get(state.image, late)
        return replace(state, offered=offered, why=why)

    return {
        name: {image: with_offer(state) for image, state in states.items()}
        for name, states in found.items()
    }


async def answers_in_time(calls: Mapping[str, Callable[[], T]], seconds: float) -> dict[str, T]:
    """Return the results of those blocking calls that end in time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def answer(call: Callable[[], T]) -> T:
        async with gate:
            return await in_daemon_thread("gpuspawner-catalog", call)

    tasks = {name: asyncio.ensure_future(answer(call)) for name, call in calls.items()}
    if tasks:
        await asyncio.wait(tasks.values(), timeout=seconds)
    done = {name: task for name, task in tasks.items() if task.done()}
    for task in tasks.values():
        task.cancel()
    return {name: task.result() for name, task in done.items()}


def _look(connect: Connect, images: Iterable[str]) -> dict[str, ImageState] | None:
    """Return the images' states on one engine; None if it is not responding."""
    try:
        with closing(connect(ENGINE_SECONDS)) as client:
            return {image: image_state(client, image, ask_registry=False) for image in images}
    except _NO_ANSWER:
        return None


def _offer(connect: Connect, image: str) -> tuple[str, str]:
    """Return the digest that the registry has now; or, without one, the reason."""
    try:
        with closing(connect(REGISTRY_SECONDS)) as client:
            return offered_digest(client, image), ""
    except ImageUnavailable as error:
        return "", str(error.fields["why"])
    except _NO_ANSWER:
        return "", "the engine that has the image is not responding"


def outdated(found: Found, environments: Iterable[Environment]) -> set[str]:
    """Return the slugs of environments whose own image has a newer one in its registry."""
    newer = {image for states in found.values() for image, it in states.items() if it.is_outdated}
    return {each.slug for each in environments if each.image in newer}


def seen_images(
    found: Found, environment: Environment, image: str, *, is_cluster: bool
) -> Sequence[SeenImage]:
    """Return the states of an image on the engines that run the environment's servers.

    On a cluster, servers with a GPU run on its nodes, and those without on the hub's own engine.
    """
    names: dict[tuple[ImageState, bool], list[str]] = defaultdict(list)
    for name, states in found.items():
        runs = environment.cpu_variant if not name else not environment.cpu_only
        if runs or not is_cluster:
            names[states[image], bool(name)].append(name)
    return [SeenImage(state, on_node, tuple(n)) for (state, on_node), n in names.items()]
