"""A member is removed at the Hub while a spawn of theirs waits in line.

JupyterHub answers that with a server error as long as a spawn is pending, after it has told the
authenticator. A start that waits for hours must not be in the admin's way so long: what the
authenticator is told ends the wait.
"""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakKeyDictionary

from jupyterhub.auth import Authenticator
from jupyterhub.utils import maybe_future

from ..broker import Broker
from ..errors import GPUSpawnerError
from .queueing import Queueing

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
    if not broker.folder_source or "forgets_folders" in _DOES.get(authenticator, ()):
        return

    async def delete_user(user: Any) -> None:
        await maybe_future(stock(user))
        try:
            await broker.run(broker.member_left, user.name)
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
