"""Each block that a reader types is run by a test, or says why none runs it. Real: the pages.

A block of a page that tests/support/steps.py names is run by the test that it names there, any
other block of shell and console by tests/integration/docs/test_blocks.py, and a configuration, by
the check of the pages (test_checks.py), which executes it and has the settings' classes read it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import doc_blocks, steps
from tests.support.doc_blocks import Block
from tests.support.processes import REPO

PAGES = doc_blocks.pages()
FOR_A_TERMINAL = ("shell", "console")


def problem(page: Path, block: Block) -> str:
    """Return what is wrong with a block's mark, or with its lack of one."""
    is_configuration = block.language == "python" and steps.checks().is_configuration(block.text)
    if block.reason:
        if is_configuration:
            return "it is executed, so it needs no reason why not"
        if block.language not in (*FOR_A_TERMINAL, "python"):
            return f"nobody runs {block.language}"
        return ""
    if page in steps.FOLLOWED:
        return ""
    if block.language == "python" and not is_configuration:
        return "no test runs it: say why after the language, as in 'python not run: needs PyTorch'"
    if block.language in FOR_A_TERMINAL:
        for line, _ in steps.lines_of(block):
            if not steps.can_be_run(line):
                return f"no test can run `{line}`: say why after the language"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=doc_blocks.name_of)
def test_each_block_is_run_or_says_why_not(page: Path) -> None:
    found = [(each.line, problem(page, each)) for each in doc_blocks.blocks_in(page)]
    assert [f"line {line}: {text}" for line, text in found if text] == []


def test_most_pages_for_admins_are_run() -> None:
    """A rule that finds nothing to run would find no mistake either."""
    run = [page for page in PAGES if page not in steps.FOLLOWED and steps.typed_in(page)]
    assert len([page for page in run if page.parent.name == "admins"]) > 20


@pytest.mark.parametrize("page", steps.FOLLOWED, ids=doc_blocks.name_of)
def test_pages_with_a_test_of_their_own_are_in_it(page: Path) -> None:
    (name,) = (each for each, value in vars(steps).items() if value == page)
    assert f"steps.{name}" in (REPO / steps.FOLLOWED[page]).read_text(encoding="utf-8")


BLOCKS = [
    ("console", "$ gpuspawner devices\n", ""),
    ("console", "$ journalctl -u gpuspawner\n", "no test can run `journalctl"),
    ("shell", "gpuspawner pause --reason x | grep x\n", "no test can run"),
    ("shell", "ssh hub gpuspawner devices\n", "no test can run"),
    ("shell", "curl $HUB/x\nsystemctl restart gpuspawner\n", "no test can run `systemctl"),
    ("shell not run: needs Slurm", "sinfo\n", ""),
    ("python", "c.GPUQueue.claim_minutes = 15\n", ""),
    ("python", "import torch\n", "no test runs it"),
    ("python not run: no reason", "c.GPUQueue.claim_minutes = 15\n", "it is executed"),
    ("yaml not run: no reason", "a: b\n", "nobody runs yaml"),
]


@pytest.mark.parametrize(("info", "text", "expected"), BLOCKS)
def test_a_block_that_nobody_runs_is_found(
    tmp_path: Path, info: str, text: str, expected: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```{info}\n{text}```\n", encoding="utf-8")
    (block,) = doc_blocks.blocks_in(page)
    found = problem(page, block)
    assert found.startswith(expected) and bool(found) == bool(expected)


@pytest.mark.parametrize("info", ["shell not run", "shell not run: ", "shell later"])
def test_a_mark_without_a_reason_is_refused(tmp_path: Path, info: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```{info}\nls\n```\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"page\.md:1: not run: REASON"):
        list(doc_blocks.blocks_in(page))
