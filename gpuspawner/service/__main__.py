"""``python -m gpuspawner.service``."""

from __future__ import annotations

import gc

from .app import main

if __name__ == "__main__":
    # What was imported stays for ever: to look through it again and again for garbage would hold
    # up whoever watches a page.
    gc.freeze()
    main()
