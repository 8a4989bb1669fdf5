"""The entry point of ``python -m gpuspawner.service``."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # Imported modules are never freed. Searching them for garbage would make the start a tenth
    # slower and, later, delay everybody who opens a page.
    gc.disable()
    from .app import main

    gc.freeze()
    gc.enable()
    main()
