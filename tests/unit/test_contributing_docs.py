"""The contributors' pages against the code: every file and name in them exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PAGES = sorted((REPO / "docs" / "contributing").glob("*.md"))
REFERENCE = re.compile(r"`((?:[\w]+/)*\w+\.py)(?::([\w.]+))?`")
MOST_WORDS = 900


def file_of(name: str) -> Path:
    return REPO / name if name.startswith("tests/") else REPO / "gpuspawner" / name


@cache
def names_in(path: Path) -> frozenset[str]:
    """What a module defines: functions, classes with their methods, and assigned names."""
    found: set[str] = set()

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.Assign):
                found.update(prefix + t.id for t in node.targets if isinstance(t, ast.Name))

    add(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page: Path) -> None:
    references = REFERENCE.findall(page.read_text(encoding="utf-8"))
    assert references or page.stem == "README"
    for file, name in references:
        assert file_of(file).is_file(), f"{page.name} names {file}, which is not there"
        if name:
            assert name in names_in(file_of(file)), f"{page.name}: {file} has no {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((\w+\.md)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).is_file(), f"{page.name} links to {target}"
