"""Containers that wait on free devices for whoever asks next. One pool a hub.

The environment that was started most often of late gets one on each device that is free, made
while nobody starts anything. A warm container holds its device from nobody: who gets the device
with another environment, or in any other way than this one, ends it first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import requests
from docker.errors import DockerException, NotFound

from ..broker import Broker
from ..engines.attached import NotWarm
from ..engines.mounting import Mounter
from ..engines.warm import (
    NAME,
    Gift,
    Warm,
    clear,
    containers,
    give,
    given,
    ready_folder,
    remove,
    start_waiting,
)
from ..errors import GPUSpawnerError
from .recipes import Recipe

EVERY = 5.0
"""Seconds between two looks at what is free."""

CALM = 10.0
"""Seconds after a start before anything is made: a member's first page needs the processor."""

REMEMBERED = 50
"""Starts that count for which environment is the favourite."""

MEMBER_WAITS = 3.0
"""Seconds that who gets a device waits for what is just being started there."""

TRY_AGAIN = 600.0
"""Seconds after which it is tried again what did not work."""

Failed = (NotWarm, DockerException, requests.RequestException, OSError, GPUSpawnerError)


class WarmPool:
    """On the event loop only; what blocks is done in threads."""

    def __init__(
        self,
        connect: Callable[[], Any],
        broker: Broker,
        folder: Path,
        log: logging.Logger,
    ) -> None:
        self._connect = connect
        self._broker = broker
        self._folder = folder
        self._log = log
        self._client: Any = None
        self._lock = threading.Lock()
        self._mounter: Mounter | None = None
        self._recipes: dict[str, tuple[Recipe, str]] = {}
        """By environment: how its last container was made, and of which image."""
        self._image = ""
        """One that the engine has, for whoever mounts."""
        self._asked: deque[str] = deque(maxlen=REMEMBERED)
        self._ready: dict[str, Warm] = {}
        """By device."""
        self._busy: set[str] = set()
        """Devices with one that waits, and that were not free at the last look."""
        self._making: dict[str, tuple[asyncio.Task[None], Path]] = {}
        """By device: what is being made, and where."""
        self._touched: dict[str, float] = {}
        """When somebody got the device last: until the store has been asked again, it is theirs."""
        self._not_before: dict[str, float] = {}
        """By recipe: when it may be tried again."""
        self._starting = 0
        self._calm_from = 0.0
        self._loop: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """While somebody's server starts nothing is made ahead."""
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1
            self._calm_from = time.monotonic() + CALM

    def begin(self, image: str) -> None:
        """See to what waits, and to what an earlier hub left. ``image``: any that is here."""
        self._image = image
        if self._loop is None or self._loop.done():
            self._loop = asyncio.ensure_future(self._keep())

    async def clear(self, uuids: Sequence[str], key: str, image_id: str) -> Warm | None:
        """The devices are somebody's: end what waits on them, and return when it is ended.

        What was made by this recipe of this image is returned, and lives.
        """
        for uuid in uuids:
            self._touched[uuid] = time.monotonic()
        for uuid in uuids:
            if uuid in self._making:
                await self._made(*self._making[uuid])
        found = [self._ready.pop(uuid) for uuid in uuids if uuid in self._ready]
        same = (w for w in found if (w.key, w.image) == (key, image_id) and w.channel.quiet())
        kept = next(same, None)
        for warm in found:
            if warm is not kept:
                self._log.info("What waited is ended: %s", _why_not(warm, key, image_id))
                await self._end(warm)
        return kept

    async def _made(self, making: asyncio.Task[None], place: Path) -> None:
        """Wait until a container that is being made waits; not for long, it is ended then."""
        done, _ = await asyncio.wait([making], timeout=MEMBER_WAITS)
        if not done:
            with contextlib.suppress(*Failed):
                await self._run(remove, self._client, NAME + place.name)
            await asyncio.wait([making])

    async def take(self, warm: Warm, gift: Gift) -> bool:
        """Make it a member's. False when that failed: then it is ended, and the log says why."""
        try:
            mounter = await self._run(self._mounts)
            await self._run(give, self._client, mounter, warm, gift)
        except Failed as error:
            self._log.warning("A warm container could not be used: %s", error)
            self._not_before[warm.key] = time.monotonic() + TRY_AGAIN
            await self._end(warm)
            return False
        return True

    def learn(self, environment: str, recipe: Recipe, image: str) -> None:
        """Somebody starts this environment, and their container is made so."""
        self._asked.append(environment)
        self._recipes[environment] = recipe, image

    # In the background.

    async def _keep(self) -> None:
        told = ""
        while True:
            made = False
            try:
                made = await self._round()
                told = ""
            except Failed as error:
                if str(error) != told:
                    told = str(error)
                    self._log.warning("Nothing is started ahead just now: %s", error)
            if not made:
                await asyncio.sleep(EVERY)

    async def _round(self) -> bool:
        """End what is of no use, and make one that is. Whether one was made, or tried."""
        if self._client is None:
            self._client = await self._run(self._connect)
        overview = await self._broker.run(self._broker.overview)
        free = [view.device.uuid for view in overview.devices if view.state == "free"]
        wanted = self._wanted()
        made_now = ("", "")
        if wanted:
            made_now = (wanted[0].key, await self._run(self._image_id, wanted[1]))
        busy = {uuid for uuid in self._ready if uuid not in free}
        # Who just got the device is about to take what waits there, or to end it.
        others = set() if self._starting else busy & self._busy
        self._busy = busy
        for uuid, warm in list(self._ready.items()):
            as_wanted = (warm.key, warm.image) == made_now and warm.channel.quiet()
            # Somebody may have got it while another one was ended.
            if (uuid in others or not as_wanted) and self._ready.get(uuid) is warm:
                del self._ready[uuid]
                await self._end(warm)
        await self._run(self._sweep, {warm.place for warm in self._ready.values()})
        for uuid in free:
            if wanted and made_now[1] and self._may_make(uuid) and uuid not in self._ready:
                place = self._folder / secrets.token_hex(8)
                task = asyncio.ensure_future(self._make(uuid, place, *wanted))
                self._making[uuid] = task, place
                await asyncio.wait([task])
                del self._making[uuid]
                return True  # what is free may be another by now
        return False

    def _wanted(self) -> tuple[Recipe, str] | None:
        """The favourite environment's recipe and image, unless that did not work of late."""
        for environment, _ in Counter(self._asked).most_common():
            recipe, image = self._recipes[environment]
            if self._not_before.get(recipe.key, 0.0) <= time.monotonic():
                return recipe, image
        return None

    def _may_make(self, uuid: str) -> bool:
        now = time.monotonic()
        just_given = now - self._touched.get(uuid, -EVERY) < EVERY
        return not (self._starting or now < self._calm_from or just_given)

    async def _make(self, uuid: str, place: Path, recipe: Recipe, image: str) -> None:
        try:
            await self._run(ready_folder, self._folder)
            await self._run(self._mounts)  # without it there is no use in one
            create = recipe.create(uuid, place)
            warm = await self._run(start_waiting, self._client, create, place, recipe.key)
        except Failed as error:
            self._log.error("No container of %s is started ahead: %s", image, error)
            self._not_before[recipe.key] = time.monotonic() + TRY_AGAIN
            return
        self._ready[uuid] = warm
        self._log.info("A container of %s waits on %s", image, uuid)

    def _sweep(self, waits: set[Path]) -> None:
        """End what an earlier hub left, and clear away the folders of what is gone. Blocks."""
        if not self._folder.exists():
            return
        there = set(waits)
        for ref, place, runs in containers(self._client, self._folder):
            if runs or given(place):
                there.add(place)  # somebody's: who stops it removes it
            elif place not in waits:
                remove(self._client, ref)
        for place in set(self._folder.iterdir()) - there:
            clear(place, self._mounts())

    async def _end(self, warm: Warm) -> None:
        warm.channel.close()
        try:
            await self._run(remove, self._client, warm.ref)
            await self._run(clear, warm.place, self._mounter)
        except Failed as error:  # the next round does it
            self._log.warning("A warm container is not cleared away yet: %s", error)

    # In threads.

    async def _run(self, work: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, partial(work, *args))

    def _image_id(self, image: str) -> str:
        """Empty when it is not here any more."""
        try:
            found: str = self._client.inspect_image(image)["Id"]
        except NotFound:
            return ""
        return found

    def _mounts(self) -> Mounter:
        """Whoever mounts for this hub. Raises NotWarm."""
        with self._lock:
            if self._mounter is None or not self._mounter.alive:
                self._mounter = Mounter(self._client, self._image)
            return self._mounter


def _why_not(warm: Warm, key: str, image_id: str) -> str:
    """Why it is not given, for the log."""
    if not key:
        return "its device goes to a server that is none of its kind"
    if warm.image != image_id:
        return "its image is another one by now"
    if warm.key != key:
        return "the server that gets its device is made in another way"
    return "it did not wait any more"
