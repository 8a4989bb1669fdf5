"""axe-core in a browser's page: what keeps people from using it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import axe_core_python
from playwright.sync_api import Page

SOURCE = Path(axe_core_python.__file__).with_name("axe.min.js")

VIOLATIONS = """
async ([selector, options]) => (await axe.run(selector, options)).violations.map(
    ({impact, id, nodes}) => ({impact, id, html: nodes[0].html.slice(0, 200)})
)
"""
"""Only what was found: all that axe-core looked at takes longer to bring here than to look at."""

COLOURS = ("color-contrast", "link-in-text-block")
"""The rules whose findings depend on colours."""


def findings(page: Page, within: str = "html", rules: Sequence[str] = ()) -> list[dict[str, str]]:
    """All that axe-core finds, or by these rules: impact, id, and the first element that has it."""
    if not page.evaluate("'axe' in window"):
        _load(page)
    # Only experimental rules, which are off, look at what axe-core would ask the server for anew:
    # the style sheets and the media.
    options: dict[str, object] = {"resultTypes": ["violations"], "preload": False}
    options |= {"selectors": False}  # we name an element by its HTML
    if rules:
        options["runOnly"] = list(rules)
    found: list[dict[str, str]] = page.evaluate(VIOLATIONS, [within, options])
    return found


def _load(page: Page) -> None:
    """Chromium keeps what it compiles of this, but not what ``page.evaluate`` wraps."""
    session = page.context.new_cdp_session(page)
    done = session.send("Runtime.evaluate", {"expression": SOURCE.read_text(encoding="utf-8")})
    assert "exceptionDetails" not in done, done
    session.detach()


def in_words(finding: dict[str, str]) -> str:
    return f"{finding['impact']} {finding['id']}: {finding['html']}"


def troubles(page: Page, *also: str, within: str = "html") -> list[str]:
    """Serious and critical findings, each with the first element that has it; ``also`` those of
    these rules. ``within``: a selector of the part that is looked at."""
    return [
        in_words(finding)
        for finding in findings(page, within)
        if finding["impact"] in ("serious", "critical") or finding["id"] in also
    ]
