"""Recovery after a start of the hub, and the removal of members who wait in the queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from jupyterhub import orm
from jupyterhub.auth import Authenticator
from jupyterhub.utils import maybe_future

from ..core.aio import within
from ..core.errors import (
    AnotherHubGrants,
    EngineUnavailable,
    GPUSpawnerError,
    NotReconciled,
)
from ..db.leader import for_log
from ..engines.base import Engine, EngineWithHistory
from ..engines.docker import DockerEngine
from ..engines.local import LocalEngine
from ..leases.models import Lease, ServerRef, Sighting
from ..leases.reconciliation import HubState, Remove
from ..services import Services
from .turns import TurnDispatcher

KEY = "gpuspawner_recovery"

REST = 1.0
"""Seconds between a failed comparison and the next attempt."""

CHECKING = "Checking which GPUs are in use"
"""What a member reads who waits for the comparison."""


class Recovery:
    """The comparison of leases, containers and the Hub's servers, once per start of a hub.

    Nothing is granted before it is done.
    """

    def __init__(self, services: Services, log: logging.Logger | Any) -> None:
        self.services = services
        self.log = log
        self._task: asyncio.Task[None] | None = None
        self._failed_at = -REST
        """When the last attempt failed, by the event loop's clock."""
        self._away: list[str] = []
        """The engines that did not respond to the last attempt."""

    @property
    def is_compared(self) -> bool:
        """True if the comparison of this start of the hub is done."""
        return self._task is not None and _succeeded(self._task)

    @property
    def is_done(self) -> bool:
        """True if granting may continue without any check."""
        return self.is_compared and self.services.granter.sure

    async def wait(
        self,
        engine_name: str,
        make_engine: Callable[[], Engine],
        hub_db: Any,
        *,
        patience: float,
        say: Callable[[str], None],
    ) -> None:
        """Wait until the comparison is done, once per start of the hub.

        An engine that is not responding yet, as after a start of the machine, is asked again for
        ``patience`` seconds. ``say`` is told what this waits for.

        ``engine_name`` and ``make_engine`` are of this hub's spawners; ``hub_db`` is a session of
        the Hub's own database. Raises NotReconciled or EngineUnavailable if no engine answered in
        time, and AnotherHubGrants or StoreUnavailable at once; the next spawn tries again.
        """
        if not self.services.granter.sure:
            await self._must_grant()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while not self.is_compared:
            say(self._progress())
            if self._task is None or self._task.done():
                compared = self._attempt(engine_name, make_engine, hub_db)
                self._task = asyncio.ensure_future(compared)
            try:
                await within(max(0.0, deadline - loop.time()), asyncio.shield(self._task))
            except asyncio.TimeoutError:  # the engine takes the request, and does not answer it
                raise NotReconciled() from None
            except (NotReconciled, EngineUnavailable):
                if loop.time() + REST >= deadline:
                    raise

    async def _attempt(
        self, engine_name: str, make_engine: Callable[[], Engine], hub_db: Any
    ) -> None:
        """Compare, a moment after the last failed attempt, however many starts wait for it."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._failed_at + REST - loop.time())
        try:
            await self._compare(engine_name, make_engine, hub_db)
        except BaseException:
            self._failed_at = loop.time()
            raise

    async def _compare(
        self, engine_name: str, make_engine: Callable[[], Engine], hub_db: Any
    ) -> None:
        await self._must_grant()
        engines = self._engines(engine_name, make_engine())
        # Two rounds at most: the second settles what the first removed.
        for _ in range(2):
            known = hub_servers(hub_db)
            await self._follow_renames(known)
            servers = dict.fromkeys(known, HubState.PENDING)
            leases = await self.services.run(self.services.leases.open_leases)
            sightings = await asyncio.to_thread(_look, engines, leases)
            reconcile = self.services.leases.reconcile
            actions = await self.services.run(reconcile, sightings, servers, grace_seconds=0)
            self._note_away([name for name, found in sightings.items() if found is None])
            if self._away:
                raise NotReconciled()
            self.services.leases.engine_ids.update(await asyncio.to_thread(_identities, engines))
            orphans = [action for action in actions if isinstance(action, Remove)]
            for orphan in orphans:
                named = f"{orphan.sighting.server} ({orphan.engine} {orphan.sighting.ref[:12]})"
                self.log.warning("Ending the server %s: %s", named, orphan.reason)
                await asyncio.to_thread(engines[orphan.engine].end, orphan.sighting)
            if not orphans:
                break
        self.log.info("Leases compared with what runs: granting may begin")

    def _note_away(self, away: list[str]) -> None:
        """Log once, and not at each attempt, that an engine is not responding."""
        if away and away != self._away:
            self.log.error("Granting nothing yet: %s is not responding", " and ".join(away))
        self._away = away

    def _progress(self) -> str:
        """Return what a member who waits reads."""
        away = ["Slurm" if name == "slurm" else "the container engine" for name in self._away]
        return f"{CHECKING}: waiting for {' and '.join(away)}" if away else CHECKING

    async def _must_grant(self) -> None:
        try:
            if not await self.services.run(self.services.granter.take):
                raise AnotherHubGrants()
        except AnotherHubGrants as error:
            self.log.error("%s", for_log(error))
            raise

    def _engines(self, name: str, engine: Engine) -> dict[str, Engine]:
        """Return our engines, and the local one for processes of an earlier configuration."""
        found = {"local": LocalEngine(), name: engine}
        if delegated := self.services.delegation.engine():
            found[delegated.name] = delegated
        return found

    async def _follow_renames(self, servers: Mapping[ServerRef, str]) -> None:
        """Update the leases of members who were renamed, using the Hub's records of servers."""
        server_of = {lease_id: server for server, lease_id in servers.items()}
        for lease in await self.services.run(self.services.leases.open_leases):
            if (server := server_of.get(lease.id, lease.server)) != lease.server:
                await self.services.run(self.services.leases.follow_rename, lease.id, server)


def recovery_of(
    settings: MutableMapping[str, Any], services: Services, log: logging.Logger | Any
) -> Recovery:
    """Return the hub's only instance, which is in its settings."""
    if KEY not in settings:
        settings[KEY] = Recovery(services, log)
    found: Recovery = settings[KEY]
    return found


def hub_servers(hub_db: Any) -> dict[ServerRef, str]:
    """Return the servers on record in the Hub's own database, with the leases that they noted."""
    rows = hub_db.query(orm.User.name, orm.Spawner.name, orm.Spawner.state)
    rows = rows.join(orm.Spawner, orm.Spawner.user_id == orm.User.id)
    return {
        ServerRef(user, name or ""): (state or {}).get("lease_id", "")
        for user, name, state in rows.filter(orm.Spawner.server_id.isnot(None))
    }


def _succeeded(task: asyncio.Task[None]) -> bool:
    return task.done() and not (task.cancelled() or task.exception())


def _look(
    engines: dict[str, Engine], leases: Sequence[Lease]
) -> dict[str, Sequence[Sighting] | None]:
    """Return each engine's servers and how missing ones ended; None if it is silent. Blocks."""
    found: dict[str, Sequence[Sighting] | None] = {}
    for name, engine in engines.items():
        found[name] = None
        with suppress(EngineUnavailable):
            seen = engine.sightings()
            if isinstance(engine, EngineWithHistory):
                seen += engine.removed(leases, seen)
            found[name] = seen
    return found


def _identities(engines: Mapping[str, Engine]) -> dict[str, str]:
    """Return the identities of the Docker engines, for the leases to be granted. Blocks.

    An engine that is not responding now is identified at its first start.
    """
    found = {}
    for name, engine in engines.items():
        if isinstance(engine, DockerEngine):
            with suppress(EngineUnavailable):
                found[name] = engine.identity()
    return found


_EXTENDED: WeakKeyDictionary[Authenticator, set[str]] = WeakKeyDictionary()
"""What was already added to an authenticator, so that no other spawner adds it again."""

PATIENCE = 10.0
"""Seconds to wait for the spawns of a removed member to end."""


def end_waits_first(authenticator: Authenticator, queueing: TurnDispatcher) -> None:
    """Make the authenticator's ``delete_user`` end the member's waits before anything else.

    JupyterHub calls it, and then refuses with a server error to remove a member while one of their
    spawns is pending. A start may wait in the queue for hours, which must not block the admin.
    """
    stock = authenticator.delete_user

    async def delete_user(user: Any) -> None:
        if await queueing.remove(user.name):
            await _until_nothing_starts(user)
        await maybe_future(stock(user))

    _extend_removal(authenticator, "ends_waits", delete_user)


def forget_folders(authenticator: Authenticator, services: Services) -> None:
    """Make the authenticator's ``delete_user`` end the member's access to shared folders.

    This cannot wait for the accounting service, because the next member with that name is somebody
    else.
    """
    stock = authenticator.delete_user

    async def delete_user(user: Any) -> None:
        await maybe_future(stock(user))
        try:
            await services.run(services.shared_folders.member_left, user.name)
        except GPUSpawnerError as error:
            services.log.error("%s still has shared folders: %s", user.name, error)

    _extend_removal(authenticator, "forgets_folders", delete_user)


def _extend_removal(authenticator: Authenticator, what: str, delete_user: Any) -> None:
    """Replace the authenticator's ``delete_user``, unless it was already extended by ``what``."""
    done = _EXTENDED.setdefault(authenticator, set())
    if what not in done:
        authenticator.delete_user = delete_user
        done.add(what)


async def _until_nothing_starts(user: Any) -> None:
    end = asyncio.get_running_loop().time() + PATIENCE
    while any(spawner.pending for spawner in user.spawners.values()):
        if asyncio.get_running_loop().time() > end:
            return  # the Hub then reports that a server is active
        await asyncio.sleep(0.05)
