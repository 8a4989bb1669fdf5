"""The ``gpuspawner`` command: what an admin asks and does from a shell.

Tables are for people, ``--json`` is for scripts: amounts of credits are decimal strings
there, times ISO 8601 in UTC. Exit codes: 0 done, 1 refused or a check is red, 2 bad usage.
"""

from __future__ import annotations

from .app import main

__all__ = ["main"]
