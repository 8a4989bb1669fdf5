"""Which catalog a command is about."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import ConfigError
from .config import Settings


def catalog_file(arguments: argparse.Namespace, settings: Settings) -> Path:
    """The catalog that the command or else the hub's configuration names. Raises ConfigError."""
    if arguments.file:
        return Path(arguments.file)
    from .hub import open_hub

    named = str(getattr(open_hub(settings.config).spawner, "catalog", ""))
    if not named:
        raise ConfigError(
            "No catalog is set, so there is one environment: the spawner's own image. Name a file, "
            'or set c.GPUSpawnerMixin.catalog = "/etc/gpuspawner/catalog.yaml".'
        )
    return Path(named)
