"""The fixture ``golden``, which compares with what is recorded, and the site that is looked at.

Real: everything of ours, SQLite, HTTP, JupyterHub's application in this process. Stand-ins: the
devices are simulated, the clock stands still, and the service's Hub is a small HTTP server.
"""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from traitlets.config import Configurable

import gpuspawner
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


def configurables() -> Iterator[type[Configurable]]:
    """Every Configurable of ours that none of ours inherits from, by name."""
    _import_all()
    ours = {cls for cls in _below(Configurable) if cls.__module__.startswith("gpuspawner.")}
    parents = {parent for cls in ours for parent in cls.__mro__[1:]}
    yield from sorted(ours - parents, key=lambda cls: cls.__name__)


def _below(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from _below(each)


def _import_all() -> None:
    """Import every module but migrations and what is only read by another program."""
    for module in pkgutil.walk_packages(gpuspawner.__path__, "gpuspawner."):
        last = module.name.rpartition(".")[2]
        if last in ("__main__", "env") or ".versions" in module.name or last.endswith("_config"):
            continue
        importlib.import_module(module.name)
