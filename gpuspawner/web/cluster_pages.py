"""The page of the whole cluster, its stream of pictures, and the same as JSON."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, cast

from tornado import web
from tornado.http1connection import HTTP1Connection
from tornado.iostream import StreamClosedError

from ..errors import GPUSpawnerError
from . import cluster, live
from .api import APIHandler, instant
from .base import POLICY, Handler
from .cluster import Picture, Sight, Tile
from .fields import whole
from .pages import STATES, Page

SCRIPTED = f"{POLICY}; script-src 'self'; connect-src 'self'"
"""Of the one page that has a script, its own: it may ask for pictures."""

MOST_PICTURES = 1000

UNSEEN = "The GPUs cannot be seen just now. Running servers go on; your admin sees why."


class Watching(Handler):
    """What the page, the stream and the JSON share."""

    @property
    def sight(self) -> Sight:
        """What the one who asks may see of others."""
        if self.admin:
            return Sight.ADMIN
        return Sight.NAMES if self.context.members_see_names else Sight.PLAIN


class ClusterPage(Watching, Page):
    """Every device as a tile. It is whole without a script, and goes on by itself with one."""

    def set_default_headers(self) -> None:
        super().set_default_headers()
        self.set_header("Content-Security-Policy", SCRIPTED)

    @web.authenticated
    async def get(self) -> None:
        picture = await self.read(cluster.look, self.broker, self.context.recent)
        own = picture.own.get(self.user, {})
        tiles = []
        for tile in picture.tiles:
            told = cluster.words(tile, self.sight, picture.at)
            uuid = tile.device.uuid
            if uuid in own:
                told["who"] = cluster.mine(own[uuid])
            tiles.append((tile.device, self.broker.machine_of(uuid), told, uuid in own))
        self.show(
            "cluster.html",
            user=self.user,
            admin=self.admin,
            now=picture.at,
            summary=cluster.summary(picture),
            seen=not picture.error,
            tiles=tiles,
            token=self.xsrf_token.decode(),
            words=json.dumps({**STATES, "unseen": UNSEEN}),
            unseen=UNSEEN,
        )


class ClusterStream(Watching, APIHandler):
    """Pictures as server-sent events, until it is asked anew who watches."""

    _viewer: live.Viewer | None = None

    async def prepare(self) -> None:
        # After a restart of the service all come at once: the Hub is asked about one at a time,
        # so that it has room for everybody else's requests in between.
        async with self.application.settings.setdefault("live_asks", asyncio.Semaphore(1)):
            await super().prepare()

    @web.authenticated
    async def get(self) -> None:
        pictures = whole(
            self.get_query_argument("pictures", str(MOST_PICTURES)), "pictures", 1, MOST_PICTURES
        )
        shared: live.Live = self.application.settings.setdefault(
            "live", live.Live(self.broker, self.context.recent)
        )
        try:
            viewer = shared.join(self.user, self.sight)
        except GPUSpawnerError as error:
            raise web.HTTPError(error.status_code) from error
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("X-Accel-Buffering", "no")  # a proxy in front passes each on at once
        self._viewer = viewer
        try:
            await self._send(viewer, pictures)
        except StreamClosedError:
            pass
        except asyncio.TimeoutError:  # who never reads is let go, and what waits for them with it
            # Tornado's annotation names a base class that has no close(); a server's is this one.
            cast(HTTP1Connection, self.request.connection).close()
        finally:
            shared.leave(viewer)

    async def _send(self, viewer: live.Viewer, pictures: int) -> None:
        """Raises TimeoutError when the one who watches does not read."""
        now = asyncio.get_running_loop().time
        # Not all at the same moment: those who came together come back one after the other.
        spread = random.random()  # no secret  # nosec B311
        ends = now() + live.LASTS * (1 - spread / 4)
        self.write(f"retry: {1000 + int(3000 * spread)}\n\n")
        for _ in range(pictures):
            text = await viewer.next(ends - now())
            if text is None:
                break
            self.write(text)
            await asyncio.wait_for(self.flush(), live.TAKES_IN)
        await asyncio.wait_for(self.finish(), live.TAKES_IN)

    def on_connection_close(self) -> None:
        super().on_connection_close()
        if self._viewer:
            self._viewer.go()


class ClusterAPI(Watching, APIHandler):
    """The same for scripts."""

    @web.authenticated
    async def get(self) -> None:
        picture: Picture = await self.read(cluster.look, self.broker, self.context.recent)
        self.answer(
            {
                "as_of": instant(picture.at),
                "seen": not picture.error,
                "total": picture.total,
                "free": picture.free,
                "waiting": picture.waiting,
                "devices": [device(tile, self.user, self.sight) for tile in picture.tiles],
            }
        )


def device(tile: Tile, user: str, sight: Sight) -> dict[str, Any]:
    """A device as JSON, with what this reader may know."""
    server = tile.lease.server if tile.lease else None
    mine = server is not None and server.user == user
    named = server is not None and (mine or sight is not Sight.PLAIN)
    doing = tile.doing
    return {
        "uuid": tile.device.uuid,
        "index": tile.device.index,
        "model": tile.device.model,
        "memory_bytes": tile.device.memory_bytes,
        "state": tile.view.state,
        "mine": mine,
        "user": server.user if server and named else None,
        "server": server.name if server and (mine or sight is Sight.ADMIN) else None,
        "since": instant(tile.since),
        "use_percent": doing.use,
        "busy": doing.busy,
        "memory_used_bytes": doing.used_bytes,
        "temperature_celsius": doing.celsius,
        "power_watts": doing.watts,
        "health": tile.health(sight),
        "note": tile.note,
    }


HANDLERS: list[tuple[str, type[Handler]]] = [
    ("cluster", ClusterPage),
    ("cluster/live", ClusterStream),
    ("api/cluster", ClusterAPI),
]
