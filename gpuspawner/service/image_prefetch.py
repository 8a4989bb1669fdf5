"""Prefetch of the catalog's images, which never delays a member's own pull."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from functools import partial
from typing import Any

import docker
import requests
from docker.errors import DockerException
from traitlets import Unicode
from traitlets.config import SingletonConfigurable

from ..catalog.loader import WatchedCatalog
from ..catalog.models import Environment
from ..core.errors import GPUSpawnerError, ImageUnavailable
from ..engines.docker import client_from_environment
from ..engines.images import Connect, local_images, offered_digest, pull
from ..leases.models import LeaseState
from ..queue.models import Ticket
from ..services import Services

EVERY = 30.0
"""Seconds between two checks of the catalog and the engine's images."""
OFFERS_EVERY = 24 * 3600.0
"""Seconds between two queries of a registry for a newer image."""
ENGINE_SECONDS = 60.0
"""Seconds that the engine may take to answer a query."""
LOOK_AROUND = 1.0
"""Seconds between two checks if a member waits for an image."""
AGAIN = (300.0, 1800.0, 7200.0)
"""Seconds until a failed image is tried again; the last value repeats."""


class ImagePrefetcher(SingletonConfigurable):
    """A service that pulls the images that its hub's members can choose."""

    catalog = Unicode(
        "",
        config=True,
        help="""
        The catalog file whose images are pulled before anybody waits for one, in the background and
        one at a time. ``add_services`` takes it from a Docker spawner's own ``catalog``, unless its
        ``pull_policy`` is ``never`` or ``skip``. Empty: no image is pulled ahead.

        Example::

            c.Accounting.catalog = ""
        """,
    )

    def pull_ahead(self, services: Services) -> None:
        """Start, here and on every machine that runs servers, until the service ends."""
        if not self.catalog:
            return
        catalog = WatchedCatalog(self.catalog, self.log)
        services.delegation.name_images(partial(image_of, catalog))
        PullAhead(catalog, services, self.log).start()
        for name, connect in services.delegation.engines_elsewhere().items():
            PullAhead(catalog, services, self.log, connect, where=name).start()


def image_of(catalog: WatchedCatalog, ticket: Ticket) -> str:
    """Return the image that a ticket's server needs; empty if it is one of several."""
    if own := ticket.options.get("own_image"):
        return str(own)
    try:
        images = catalog.current().get(ticket.request.environment).images
    except GPUSpawnerError:
        return ""
    known = set(filter(None, images))
    return known.pop() if len(known) == 1 else ""


class PullAhead:
    """Pulls one image at a time, in a thread that the service does not wait for at its end.

    The engine downloads a few layers at a time, for everybody: when a server is starting whose
    image is missing, our own pull is aborted. Its complete layers stay.
    """

    def __init__(
        self,
        catalog: WatchedCatalog,
        services: Services,
        log: logging.Logger | Any,
        connect: Connect | None = None,
        *,
        where: str = "",
    ) -> None:
        """``where`` names the engine's machine; empty means this one."""
        self._catalog = catalog
        self._services = services
        self._log = log
        self._connect = connect or client_from_environment
        self._where = where
        self._on = f" on {where}" if where else ""
        self._failed: dict[str, tuple[int, float]] = {}
        self._asked: dict[str, float] = {}
        self._problem = ""

    def start(self) -> None:
        """Run until the process ends."""
        threading.Thread(target=self._run, name="gpuspawner-ahead", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self.look()
                self._problem = ""
            except (GPUSpawnerError, DockerException, requests.RequestException, OSError) as error:
                if str(error) != self._problem:  # log it once, not every half minute
                    self._problem = str(error)
                    self._log.warning("No image is pulled ahead%s: %s", self._on, error)
            except Exception:
                self._log.exception("Pulling images ahead failed; it is tried again")
            time.sleep(EVERY)

    def look(self) -> None:
        """Pull missing images one by one, and check for newer ones. Blocks, possibly for long."""
        environments = self._catalog.current().environments
        client = self._connect(ENGINE_SECONDS)
        try:
            images = (image for each in environments if _pulls(each) for image in each.images)
            for image in dict.fromkeys(filter(None, images)):
                if local_images(client, image) is not None:
                    self._failed.pop(image, None)
                elif time.monotonic() < self._failed.get(image, (0, 0.0))[1]:
                    continue
                elif not self._pull(client, image):
                    return
            for environment in () if self._where else environments:  # registries are asked once
                self._ask(client, environment)
        finally:
            client.close()

    def _pull(self, client: docker.APIClient, image: str) -> bool:
        """Pull an image; returns True if the next may follow, because no member waits for one."""
        looked_at = 0.0
        began = time.monotonic()
        with closing(pull(self._connect, image)) as progress:
            try:
                for _ in progress:
                    if time.monotonic() - looked_at < LOOK_AROUND:
                        continue
                    if looked_at == 0.0:
                        self._log.info("Pulling %s ahead of its first server%s", image, self._on)
                    looked_at = time.monotonic()
                    if waited := self._waited_for(client):
                        self._log.info("A member waits for %s: %s can wait", waited, image)
                        return False
            except ImageUnavailable as error:
                tries = self._failed.get(image, (0, 0.0))[0]
                pause = AGAIN[min(tries, len(AGAIN) - 1)]
                self._failed[image] = tries + 1, time.monotonic() + pause
                self._log.warning(
                    "%s It is tried again%s in %.0f minutes.", error, self._on, pause / 60
                )
                return True
        here = self._on or " here"
        self._log.info("%s is%s after %.0f s", image, here, time.monotonic() - began)
        return True

    def _waited_for(self, client: docker.APIClient) -> str:
        """Return an image that a starting server waits for; empty if there is none."""
        starting = {
            lease.environment
            for lease in self._services.leases.open_leases()
            if lease.state is LeaseState.GRANTED
        }
        known = self._catalog.current().environments
        images = (image for each in known if each.slug in starting for image in each.images)
        return next((i for i in images if i and local_images(client, i) is None), "")

    def _ask(self, client: docker.APIClient, environment: Environment) -> None:
        """Log once a day which environments have a newer image; nothing is pulled."""
        here = local_images(client, environment.image) if environment.image else None
        has = environment.image_digest or (here.digest_in(environment.image) if here else "")
        due = self._asked.get(environment.slug, float("-inf")) + OFFERS_EVERY
        if not has or time.monotonic() < due:
            return
        self._asked[environment.slug] = time.monotonic()
        try:
            newest = offered_digest(client, environment.image)
        except ImageUnavailable as error:
            self._log.info("A newer image of %s cannot be looked for: %s", environment.slug, error)
            return
        if newest != has:
            self._log.info(
                "There is a newer image for %s (%s). Try it and take it: "
                "gpuspawner catalog update %s",
                environment.slug,
                newest[:19],
                environment.slug,
            )


def _pulls(environment: Environment) -> bool:
    """Return True if the servers of this environment may pull their image."""
    policy = str(environment.spawner_override.get("pull_policy", ""))
    return policy.lower() not in ("never", "skip")
