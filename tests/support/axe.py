"""axe-core in a browser's page: what keeps people from using it."""

from __future__ import annotations

from pathlib import Path

import axe_core_python
from playwright.sync_api import Page

SOURCE = Path(axe_core_python.__file__).with_name("axe.min.js")


def troubles(page: Page, *also: str, within: str = "html") -> list[str]:
    """Serious and critical findings, each with the first element that has it; ``also`` those of
    these rules. ``within``: a selector of the part that is looked at."""
    page.evaluate(SOURCE.read_text(encoding="utf-8"))
    found = page.evaluate("selector => axe.run(selector)", within)
    return [
        f"{finding['impact']} {finding['id']}: {finding['nodes'][0]['html'][:200]}"
        for finding in found["violations"]
        if finding["impact"] in ("serious", "critical") or finding["id"] in also
    ]
