"""The entry point of ``python -m gpuspawner.service``."""

from __future__ import annotations

import gc

from .app import main

if __name__ == "__main__":
    # Imported modules stay for ever: repeated garbage collection of them would delay everybody who
    # watches a page.
    gc.freeze()
    main()
