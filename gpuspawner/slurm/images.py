"""Images on the nodes of a cluster, and the engines that pull them.

A server is started where its image is. If the image were pulled only then, the first server would
have its GPU idle for the duration of the pull.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import docker
from docker.errors import NotFound

from ..core.errors import EngineUnavailable, ImageAwaited, ImageUnavailable, InvalidRequest
from ..engines.docker import DockerEngine
from ..engines.images import PullProgress, pull
from ..queue.models import Ticket
from .cluster import Node

QUICK = 3.0
"""Seconds that a node may take to answer frequent queries."""

MOST_AT_ONCE = 8
"""How many nodes are queried at once."""


class _Client(docker.APIClient):
    """A client that trusts what ``cluster.yaml`` names.

    Otherwise requests would use the environment's certificates and proxies for the internet.
    """

    trust_env = property(lambda self: False, lambda self, value: None)


def connector(node: Node, timeout: float = 20) -> Callable[[], docker.APIClient]:
    """Return a function that creates a client of a node's engine."""

    def connect() -> docker.APIClient:
        return _Client(version="auto", timeout=timeout, **node.client_settings())

    return connect


def reach(node: Node) -> Callable[[float], docker.APIClient]:
    """Return a function that creates a client of a node's engine with a timeout in seconds."""
    return lambda timeout: connector(node, timeout)()


HERE = 60.0
"""Seconds for which it is remembered that a node has an image."""
LACKS = 2.0
"""Seconds for which it is remembered that it does not."""
AGAIN = 60.0
"""Seconds until a failed pull is tried again on that node."""
NEVER = None, float("-inf")


@dataclass(frozen=True, slots=True)
class WantedImage:
    """The image of a server."""

    name: str
    pulls: bool = True
    """True if it may be pulled at all."""


class NodeImages:
    """The images of all nodes, as far as they were queried."""

    def __init__(self, nodes: Iterable[Node], log: logging.Logger | Any) -> None:
        self.wanted: Callable[[Ticket], WantedImage | None] = lambda ticket: None
        """Returns the image that a ticket's server needs; None if unknown: any node will do.

        Set by the spawner, which has the catalog.
        """
        self._log = log
        self._nodes = {node.name: node for node in nodes}
        self._engines = {
            name: DockerEngine(connector(node, QUICK)) for name, node in self._nodes.items()
        }
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="gpuspawner-images")
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], tuple[bool | None, float]] = {}
        self._pulls: dict[tuple[str, str], PullProgress | None] = {}
        self._failed: dict[tuple[str, str], tuple[ImageUnavailable, float]] = {}

    def lacking(self, ticket: Ticket, able: Collection[str]) -> frozenset[str]:
        """Return the suitable nodes without the ticket's image, or without an answer.

        The image is pulled to them. Blocks for a moment. Raises ImageAwaited while no node has it,
        and InvalidRequest if none can get it.
        """
        if (wanted := self.wanted(ticket)) is None:
            return frozenset()
        lacking = self._without(wanted.name, able)
        for node in lacking:
            if wanted.pulls and self._seen[node, wanted.name][0] is False:
                self._fetch(node, wanted.name)
        if able and len(lacking) == len(able):
            self._give_up_or_wait(wanted, able)
        return lacking

    def why_not_yet(self, ticket: Ticket, able: Collection[str]) -> str:
        """Return why no node has the ticket's image yet, if that is why it waits; else "".

        Pulls nothing.
        """
        wanted = self.wanted(ticket)
        if wanted is None or len(self._without(wanted.name, able)) < len(able):
            return ""
        return self._awaited(wanted.name, able)

    # Helpers.

    def _without(self, image: str, nodes: Collection[str]) -> frozenset[str]:
        asked = [name for name in nodes if not self._knows(name, image)]
        found = self._threads.map(partial(self._ask, image), asked)
        for name, here in zip(asked, found, strict=True):
            self._seen[name, image] = here, time.monotonic()
        return frozenset(name for name in nodes if not self._seen[name, image][0])

    def _knows(self, node: str, image: str) -> bool:
        here, at = self._seen.get((node, image), NEVER)
        return time.monotonic() - at < (HERE if here else LACKS)

    def _ask(self, image: str, node: str) -> bool | None:
        """Return True if a node has an image; None if it is not responding."""
        try:
            self._engines[node].call(lambda client: client.inspect_image(image))
        except NotFound:
            return False
        except EngineUnavailable:
            return None
        return True

    def _give_up_or_wait(self, wanted: WantedImage, able: Collection[str]) -> None:
        if not wanted.pulls:
            raise InvalidRequest(
                f"No machine has the image {wanted.name}, and images are not pulled here. Choose "
                "another environment, or tell your admin."
            )
        with self._lock:
            failed = [self._failed.get((name, wanted.name)) for name in able]
            fetched = any((name, wanted.name) in self._pulls for name in able)
            found = next((each for each in failed if each), None)
            if found and not fetched:
                for name in able:  # the next request tries it again
                    self._failed.pop((name, wanted.name), None)
                raise InvalidRequest(found[0].message)
        raise ImageAwaited(why=self._awaited(wanted.name, able))

    def _awaited(self, image: str, able: Collection[str]) -> str:
        since = time.monotonic() - AGAIN
        with self._lock:
            now = {name: self._pulls[name, image] for name in able if (name, image) in self._pulls}
            failed = {name for name in able if self._failed.get((name, image), NEVER)[1] > since}
        if not now and all(self._seen[name, image][0] is None for name in able):
            return f"no machine that could have its image {image} is responding"
        if not now:  # then another process pulls it, if one can
            lack = {name for name in able if self._seen[name, image][0] is False}
            now = dict.fromkeys(lack - failed)
        if not now:
            return f"no machine has its image {image} yet"
        # The most advanced one counts: then the server can start.
        best = max((each for each in now.values() if each), key=_part, default=None)
        said = f"its image {image} is being fetched to {' and '.join(sorted(now))}"
        return f"{said}, {_said(best)}" if best and best.layers else said

    def _fetch(self, node: str, image: str) -> None:
        """Start to pull an image there, unless that is running already or failed a moment ago."""
        key = node, image
        with self._lock:
            since = self._failed.get(key, NEVER)[1]
            if key in self._pulls or time.monotonic() - since < AGAIN:
                return
            self._pulls[key] = None
        name = f"gpuspawner-fetch-{node}"
        threading.Thread(target=self._pull, args=key, name=name, daemon=True).start()

    def _pull(self, node: str, image: str) -> None:
        key = node, image
        error: ImageUnavailable | None = None
        try:
            for now in pull(reach(self._nodes[node]), image):
                self._pulls[key] = now
        except ImageUnavailable as raised:
            error = raised
            self._log.warning("%s: %s", node, raised.message)
        except Exception as raised:  # a thread that died unnoticed would be waited for
            error = ImageUnavailable(image=image, why=repr(raised), remedy="Tell your admin.")
            self._log.exception("Pulling %s to %s failed", image, node)
        with self._lock:
            self._pulls.pop(key, None)
            if error is None:
                self._failed.pop(key, None)
                self._seen[key] = True, time.monotonic()
                self._log.info("The image %s is on %s now", image, node)
            else:
                self._failed[key] = error, time.monotonic()


def _part(now: PullProgress) -> float:
    return now.got / now.size if now.size else now.done / max(1, now.layers)


def _said(now: PullProgress) -> str:
    amount = f", {now.got / 1e6:.0f} of {now.size / 1e6:.0f} MB" if now.size else ""
    return f"{now.done} of {now.layers} layers{amount}"
