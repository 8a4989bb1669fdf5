"""The fixture ``golden``, which compares with what is recorded, and the site that is looked at.

Real: everything of ours, SQLite, HTTP, JupyterHub's application in this process. Stand-ins: the
devices are simulated, the clock stands still, and the service's Hub is a small HTTP server.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.golden.scenario import fill
from tests.golden.site import Site

RECORDED = Path(__file__).parent / "recorded"
RECORD = bool(os.environ.get("GPUSPAWNER_RECORD_GOLDENS"))
DIFF_LINES = 200
"""Lines of a difference that a failing test shows."""

Golden = Callable[[str, str], None]


@pytest.fixture(scope="session")
def golden() -> Golden:
    """``golden("pages/member.html", text)`` fails unless that is what was recorded."""

    def check(name: str, text: str) -> None:
        path = RECORDED / name
        text = "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"
        text = re.sub(r"\n{3,}", "\n\n", text)
        if RECORD:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if text == before:
            return
        lines = list(
            difflib.unified_diff(
                before.splitlines(), text.splitlines(), f"recorded {name}", "now", lineterm="", n=2
            )
        )
        more = f"\n... {len(lines) - DIFF_LINES} more lines" if len(lines) > DIFF_LINES else ""
        pytest.fail(
            "\n".join(lines[:DIFF_LINES]) + f"{more}\n\n{name} is not as recorded. If that is "
            "meant, record it with `make golden`, and say why in the commit.",
            pytrace=False,
        )

    return check


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Iterator[Site]:
    """A site with members, servers, a queue and a past; tests only look at it."""
    with Site(tmp_path_factory.mktemp("site"), migrated_file) as site:
        fill(site)
        yield site
