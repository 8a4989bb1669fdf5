"""The entry point of ``python -m gpuspawner.service``."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # Imported modules stay for ever. To search them for garbage delays the start by a tenth, and
    # later everybody who watches a page.
    gc.disable()
    from .app import main

    gc.freeze()
    gc.enable()
    main()
