"""Recovery after a start of the hub, and members who are removed while they wait.

JupyterHub answers the removal of a member with a server error as long as a spawn is pending, after
it has told the authenticator. A start that waits for hours must not be in the admin's way so long:
what the authenticator is told ends the wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
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
from ..services import Broker
from .turns import Queueing

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


def forget_folders(authenticator: Authenticator, broker: Broker) -> None:
    """Have the authenticator's ``delete_user`` take from the member what was shared with them.

    At once, and not only when the accounting service looks: the next who gets that name is
    somebody else.
    """
    stock = authenticator.delete_user
    if not broker.settings.folders.source or "forgets_folders" in _DOES.get(authenticator, ()):
        return

    async def delete_user(user: Any) -> None:
        await maybe_future(stock(user))
        try:
            await broker.run(broker.shared_folders.member_left, user.name)
        except GPUSpawnerError as error:
            broker.log.error("What was shared with %s is theirs still: %s", user.name, error)

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
