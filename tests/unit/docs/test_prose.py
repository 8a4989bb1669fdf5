"""The check of the documentation's words, and what the generated reference is made of.

Real: the script, the directives' sources. No page is built.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).parents[3]


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


prose = load("check_prose", REPO / "docs" / "check_prose.py")


def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, shelf: str) -> list[str]:
    """Return what is found in a page of this text on a shelf."""
    monkeypatch.setattr(prose, "REPO", tmp_path)
    monkeypatch.setattr(prose, "HERE", tmp_path / "docs")
    page = tmp_path / "docs" / shelf / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text(text, encoding="utf-8")
    return [each.partition(":")[2] for each in prose.problems_of(page)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It works.\n", []),
        ("It simply works.\n", ["1: 'simply': leave it out"]),
        ("Type `just this`.\n", []),
        ("```shell\njust --list\n```\n", []),
        ("```\nls\n```\n", ["1: a block without a language (text, if nothing else)"]),
        ("```text\n```\n\nSimply.\n", ["4: 'Simply': leave it out"]),
        ("```{note}\nPlease wait.\n```\n", ["2: 'Please': say what to do"]),
        ("```{note}\nWait.\n```\n\nSimply.\n", ["5: 'Simply': leave it out"]),
        ("One\nand `two\nthree`\nbasically.\n", ["4: 'basically': leave it out"]),
        ("| A |\n|---|\n| just |\n", ["3: 'just': leave it out"]),
        ("````text\n```\nsimply\n```\n````\n", []),
        ("apt-get install docker.io\n", []),
        ("word " * 601, [" 601 words; 600 are the most"]),
    ],
)
def test_problems_of_a_guide_are_named_with_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: list[str]
) -> None:
    assert problems(tmp_path, monkeypatch, text, "how-to") == found


def test_registries_are_found_in_blocks_of_code_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "```shell\ndocker pull docker.io/library/debian\n```\n"
    assert len(problems(tmp_path, monkeypatch, text, "reference")) == 1


def test_phrases_of_contributing_pages_are_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problems(tmp_path, monkeypatch, "It simply works.\n", "contributing") == []


def test_pages_of_the_site_have_none_of_these_problems() -> None:
    found = [problem for path in prose.pages() for problem in prose.problems_of(path)]
    assert found == []
