"""Run the ``gpuspawner`` command as ``python -m gpuspawner``."""

from __future__ import annotations

import sys

from .cli.app import main

if __name__ == "__main__":
    sys.exit(main())
