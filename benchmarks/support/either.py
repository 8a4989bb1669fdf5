"""One hub with two spawner classes, so that both sides of a comparison share everything else.

Imported by the hub's configuration, not by the benchmark.
"""

from __future__ import annotations

from typing import Any

from jupyterhub.spawner import Spawner


def by_name(choices: dict[str, type[Spawner]]) -> type[Spawner]:
    """A class for ``c.JupyterHub.spawner_class`` that makes another class's spawner: the one
    whose key the member's name begins with."""

    class Either(Spawner):
        """Stands for the classes that it makes; has no instances, and so starts nothing. Its
        methods are there because JupyterHub wants them of every Spawner class."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            name = kwargs["user"].name
            chosen = next(made for start, made in choices.items() if name.startswith(start))
            return chosen(*args, **kwargs)

        async def start(self) -> Any:
            raise NotImplementedError

        async def stop(self, now: bool = False) -> None:
            raise NotImplementedError

        async def poll(self) -> int | None:
            raise NotImplementedError

    return Either
