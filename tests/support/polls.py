"""How often a Hub looked at each server: for what must not happen, however slow the machine."""

from __future__ import annotations

from tests.support.hub import HubProcess
from tests.support.processes import wait_for

COUNTED = """
from gpuspawner.spawners.docker import GPUDockerSpawner

class Counted(GPUDockerSpawner):
    async def poll_and_notify(self):
        try:
            return await super().poll_and_notify()
        finally:
            with open("polls", "a") as file:
                print(self.user.name, file=file)

c.JupyterHub.spawner_class = Counted
"""
"""For a hub's configuration."""


def polls(hub: HubProcess, user: str) -> int:
    """How many looks at a member's default server have ended, failed ones included."""
    file = hub.folder / "polls"
    return file.read_text().splitlines().count(user) if file.exists() else 0


def wait_polls(hub: HubProcess, user: str, count: int = 1) -> None:
    """Wait until the Hub has begun and ended so many more looks at a member's default server."""
    enough = polls(hub, user) + count + 1  # one may be under way
    wait_for(lambda: polls(hub, user) >= enough, f"{count} looks at {user}'s server", timeout=60)
