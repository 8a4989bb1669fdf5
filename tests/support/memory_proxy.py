"""A proxy without a process, for hubs that are spoken to directly."""

from __future__ import annotations

from typing import Any

from jupyterhub.proxy import Proxy


class MemoryProxy(Proxy):
    """Keeps the routes that the Hub asks for, and forwards nothing: whoever asks talks to
    the Hub itself, or to a server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.routes: dict[str, dict[str, Any]] = {}

    async def start(self) -> None:
        """There is no process to start."""

    async def stop(self) -> None:
        """Nor one to stop."""

    async def add_route(self, routespec: str, target: str, data: Any) -> None:
        self.routes[routespec] = {"routespec": routespec, "target": target, "data": data}

    async def delete_route(self, routespec: str) -> None:
        self.routes.pop(routespec, None)

    async def get_all_routes(self) -> dict[str, dict[str, Any]]:
        return dict(self.routes)
