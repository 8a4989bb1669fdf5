"""Recovery after a start of the hub, and members who are removed while they wait.

JupyterHub answers the removal of a member with a server error as long as a spawn is pending, after
it has told the authenticator. A start that waits for hours must not be in the admin's way so long:
what the authenticator is told ends the wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from jupyterhub import orm
from jupyterhub.auth import Authenticator
from jupyterhub.utils import maybe_future

from ..core.errors import (
    AnotherHubGrants,
    EngineUnavailable,
    GPUSpawnerError,
    NotReconciled,
    NotTheOwner,
)
from ..db.leader import TAKE_OVER
from ..engines.base import Engine, Remembers
from ..engines.docker import DockerEngine
from ..engines.local import LocalEngine
from ..leases.models import Lease, ServerRef, Sighting
from ..leases.reconciliation import HubState, Remove
from ..services import Services
from .turns import Queueing


class Recovery:
    """The comparison of leases, containers and the Hub's servers; one a hub.

    Nothing is granted before it has been done.
    """

    def __init__(self, services: Services, log: logging.Logger | Any) -> None:
        self.services = services
        self.log = log
        self._task: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        """Return True if granting may go on without a look at anything."""
        task = self._task
        return task is not None and _succeeded(task) and self.services.granter.sure

    async def wait(self, engine_name: str, make_engine: Callable[[], Engine], hub_db: Any) -> None:
        """Wait until it is done, once a hub start.

        Raises NotReconciled, AnotherHubGrants or StoreUnavailable when that could not be done; the
        next spawn tries again.

        Args:
            engine_name: The engine of this hub's spawners, as leases name it.
            make_engine: Gives that engine.
            hub_db: A session of the Hub's own database.
        """
        if not self.services.granter.sure:
            await self._must_grant()
        if self._task is None or (self._task.done() and not _succeeded(self._task)):
            compared = self._compare(engine_name, make_engine, hub_db)
            self._task = asyncio.ensure_future(compared)
        await asyncio.shield(self._task)

    async def _compare(
        self, engine_name: str, make_engine: Callable[[], Engine], hub_db: Any
    ) -> None:
        await self._must_grant()
        engines = self._engines(engine_name, make_engine())
        # Twice at most: what the first look removes, the second one settles.
        for _ in range(2):
            servers = hub_servers(hub_db)
            await self._follow_renames(hub_db)
            leases = await self.services.run(self.services.leases.open_leases)
            sightings = await asyncio.to_thread(_look, engines, leases)
            reconcile = self.services.leases.reconcile
            actions = await self.services.run(reconcile, sightings, servers, grace_seconds=0)
            if away := [name for name, found in sightings.items() if found is None]:
                self.log.error("Granting nothing yet: %s does not answer", " and ".join(away))
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

    async def _must_grant(self) -> None:
        """Raises AnotherHubGrants, unless this hub is the one that gives out the GPUs."""
        try:
            may_grant = await self.services.run(self.services.granter.take)
        except NotTheOwner as error:
            self.log.error("%s %s", error.message, TAKE_OVER)
            raise
        if not may_grant:
            raise AnotherHubGrants()

    def _engines(self, name: str, engine: Engine) -> dict[str, Engine]:
        """Our own engines, and local processes that an earlier configuration may have left."""
        found = {"local": LocalEngine(), name: engine}
        if delegated := self.services.delegation.engine():
            found[delegated.name] = delegated
        return found

    async def _follow_renames(self, hub_db: Any) -> None:
        """Find the leases of members who were renamed at the Hub, by what it keeps of their
        servers."""
        known = {
            lease.id: lease for lease in await self.services.run(self.services.leases.open_leases)
        }
        columns = orm.User.name, orm.Spawner.name, orm.Spawner.state
        for user, name, state in _active(hub_db, *columns):
            lease = known.get((state or {}).get("lease_id", ""))
            server = ServerRef(user, name or "")
            if lease is not None and lease.server != server:
                await self.services.run(self.services.leases.follow_rename, lease.id, server)


def hub_servers(hub_db: Any) -> dict[ServerRef, HubState]:
    """The servers that the Hub has on record, from its own database."""
    rows = _active(hub_db, orm.User.name, orm.Spawner.name)
    return {ServerRef(user, name or ""): HubState.PENDING for user, name in rows}


def _active(hub_db: Any, *columns: Any) -> Any:
    rows = hub_db.query(*columns).join(orm.Spawner, orm.Spawner.user_id == orm.User.id)
    return rows.filter(orm.Spawner.server_id.isnot(None))


def _succeeded(task: asyncio.Task[None]) -> bool:
    return task.done() and not (task.cancelled() or task.exception())


def _look(
    engines: dict[str, Engine], leases: Sequence[Lease]
) -> dict[str, Sequence[Sighting] | None]:
    """What each engine runs, and how those ended that it does not have any more. Blocks."""
    found: dict[str, Sequence[Sighting] | None] = {}
    for name, engine in engines.items():
        try:
            seen = engine.sightings()
            if isinstance(engine, Remembers):
                seen += engine.removed(leases, seen)
        except EngineUnavailable:
            found[name] = None
            continue
        found[name] = seen
    return found


def _identities(engines: Mapping[str, Engine]) -> dict[str, str]:
    """Which engine each is, for the leases to be granted; of one that fails now, its first start
    says it. Blocks."""
    found = {}
    for name, engine in engines.items():
        if isinstance(engine, DockerEngine):
            with suppress(EngineUnavailable):
                found[name] = engine.identity()
    return found


_DOES: WeakKeyDictionary[Authenticator, set[str]] = WeakKeyDictionary()
"""What we made an authenticator do, so that the next spawner does not make it do so again."""

PATIENCE = 10.0
"""Seconds that the spawns of a removed member have to end."""


def end_waits_first(authenticator: Authenticator, queueing: Queueing) -> None:
    """Have the authenticator's ``delete_user`` end the member's waits before anything else."""
    stock = authenticator.delete_user
    if "ends_waits" in _DOES.get(authenticator, ()):
        return

    async def delete_user(user: Any) -> None:
        if await queueing.remove(user.name):
            await _until_nothing_starts(user)
        await maybe_future(stock(user))

    authenticator.delete_user = delete_user
    _note(authenticator, "ends_waits")


def forget_folders(authenticator: Authenticator, services: Services) -> None:
    """Have the authenticator's ``delete_user`` take from the member what was shared with them.

    At once, and not only when the accounting service looks: the next who gets that name is
    somebody else.
    """
    stock = authenticator.delete_user
    if not services.settings.folders.source or "forgets_folders" in _DOES.get(authenticator, ()):
        return

    async def delete_user(user: Any) -> None:
        await maybe_future(stock(user))
        try:
            await services.run(services.shared_folders.member_left, user.name)
        except GPUSpawnerError as error:
            services.log.error("What was shared with %s is theirs still: %s", user.name, error)

    authenticator.delete_user = delete_user
    _note(authenticator, "forgets_folders")


def _note(authenticator: Authenticator, what: str) -> None:
    _DOES.setdefault(authenticator, set()).add(what)


async def _until_nothing_starts(user: Any) -> None:
    end = asyncio.get_running_loop().time() + PATIENCE
    while any(spawner.pending for spawner in user.spawners.values()):
        if asyncio.get_running_loop().time() > end:
            return  # the Hub says then that a server is active
        await asyncio.sleep(0.05)
