"""What runs servers, seen from outside a spawn: who lives, who is gone, what can be injected."""

from __future__ import annotations

from .base import LABEL_LEASE, Engine, Remembers
from .docker import DockerEngine
from .local import LocalEngine

__all__ = ["LABEL_LEASE", "DockerEngine", "Engine", "LocalEngine", "Remembers"]
