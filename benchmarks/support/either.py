"""One hub with two spawner classes, so that both sides of a comparison share everything else.

Imported by the hub's configuration, not by the benchmark.
"""

from __future__ import annotations

from typing import Any

from jupyterhub.spawner import SimpleLocalProcessSpawner, Spawner


def by_name(choices: dict[str, type[Spawner]]) -> type[Spawner]:
    """A class for ``c.JupyterHub.spawner_class`` that makes another class's spawner: the one
    whose key the member's name begins with."""

    class Either(SimpleLocalProcessSpawner):
        """Stands for the classes that it makes, and has no instances. The Hub takes no class that
        could start nothing: hence a complete one below it."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            name = kwargs["user"].name
            chosen = next(made for start, made in choices.items() if name.startswith(start))
            return chosen(*args, **kwargs)

    return Either
