"""After a hub start: find out who lives before anything is granted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from jupyterhub import orm

from ..engines import DockerEngine, Engine, LocalEngine, Remembers
from ..errors import AnotherHubGrants, EngineUnavailable, NotReconciled, NotTheOwner
from ..model import Lease, ServerRef, Sighting
from ..reconcile import HubState, Remove
from ..store.granter import TAKE_OVER

if TYPE_CHECKING:
    from .mixin import GPUSpawnerMixin

KEY = "gpuspawner_recovery"


def is_recovered(spawner: GPUSpawnerMixin) -> bool:
    """Whether that was done, and granting may go on without a look at anything."""
    task = spawner.hub_settings.get(KEY)
    done = task is not None and task.done() and not (task.cancelled() or task.exception())
    return done and spawner.broker.granter.sure


async def recovered(spawner: GPUSpawnerMixin) -> None:
    """Wait until leases, containers and the Hub's servers were compared, once a hub start.

    Raises NotReconciled, AnotherHubGrants or StoreUnavailable when that could not be done; the
    next spawn tries again.
    """
    shared = spawner.hub_settings
    task = shared.get(KEY)
    if not spawner.broker.granter.sure:
        await _must_grant(spawner)
    if task is None or (task.done() and (task.cancelled() or task.exception())):
        task = shared[KEY] = asyncio.ensure_future(_recover(spawner))
    await asyncio.shield(task)


async def _recover(spawner: GPUSpawnerMixin) -> None:
    broker = spawner.broker
    await _must_grant(spawner)
    engines = _engines(spawner)
    # Twice at most: what the first look removes, the second one settles.
    for _ in range(2):
        servers = hub_servers(spawner)
        await _follow_renames(spawner)
        leases = await broker.run(broker.open_leases)
        sightings = await asyncio.to_thread(_look, engines, leases)
        actions = await broker.run(broker.reconcile, sightings, servers, grace_seconds=0)
        if away := [name for name, found in sightings.items() if found is None]:
            spawner.log.error("Granting nothing yet: %s does not answer", " and ".join(away))
            raise NotReconciled()
        broker.engine_ids.update(await asyncio.to_thread(_identities, engines))
        orphans = [action for action in actions if isinstance(action, Remove)]
        for orphan in orphans:
            named = f"{orphan.sighting.server} ({orphan.engine} {orphan.sighting.ref[:12]})"
            spawner.log.warning("Ending the server %s: %s", named, orphan.reason)
            await asyncio.to_thread(engines[orphan.engine].end, orphan.sighting)
        if not orphans:
            break
    spawner.log.info("Leases compared with what runs: granting may begin")


async def _must_grant(spawner: GPUSpawnerMixin) -> None:
    """Raises AnotherHubGrants, unless this hub is the one that gives out the GPUs."""
    try:
        may_grant = await spawner.broker.run(spawner.broker.granter.take)
    except NotTheOwner as error:
        spawner.log.error("%s %s", error.message, TAKE_OVER)
        raise
    if not may_grant:
        raise AnotherHubGrants()


def _engines(spawner: GPUSpawnerMixin) -> dict[str, Engine]:
    """Our own engines, and local processes that an earlier configuration may have left."""
    found = {"local": LocalEngine(), spawner.engine_name: spawner.engine()}
    if delegated := spawner.broker.delegated_engine():
        found[delegated.name] = delegated
    return found


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


async def _follow_renames(spawner: GPUSpawnerMixin) -> None:
    """Find the leases of members who were renamed at the Hub, by what it keeps of their servers."""
    broker = spawner.broker
    known = {lease.id: lease for lease in await broker.run(broker.open_leases)}
    rows = spawner.user.db.query(orm.User.name, orm.Spawner.name, orm.Spawner.state)
    rows = rows.join(orm.Spawner, orm.Spawner.user_id == orm.User.id)
    rows = rows.filter(orm.Spawner.server_id.isnot(None))
    for user, name, state in rows:
        lease, server = known.get((state or {}).get("lease_id", "")), ServerRef(user, name or "")
        if lease is not None and lease.server != server:
            await broker.run(broker.follow_rename, lease.id, server)


def hub_servers(spawner: GPUSpawnerMixin) -> dict[ServerRef, HubState]:
    """The servers that the Hub has on record, from its own database."""
    rows = spawner.user.db.query(orm.User.name, orm.Spawner.name)
    rows = rows.join(orm.Spawner, orm.Spawner.user_id == orm.User.id)
    rows = rows.filter(orm.Spawner.server_id.isnot(None))
    return {ServerRef(user, name or ""): HubState.PENDING for user, name in rows}
