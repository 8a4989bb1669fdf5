"""The page of the catalog for admins: its environments, and whether their images are here."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from docker.errors import DockerException
from jupyterhub.scopes import needs_scope
from jupyterhub.user import User
from requests import RequestException
from tornado import web

from ..catalog.models import Environment
from ..core.aio import in_daemon_thread
from ..core.errors import EngineUnavailable, ImageUnavailable
from ..core.units import format_bytes
from ..devices.placement import format_memory
from ..engines.images import Connect, ImageState, image_state, offered_digest
from ..slurm.images import reach
from ..slurm.scheduler import SlurmDelegate
from .image_updates import UpdatesHandler

T = TypeVar("T")

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
