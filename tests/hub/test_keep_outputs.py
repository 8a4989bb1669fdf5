"""Outputs of a cell whose tab is closed. Real: hub, proxy, a Docker Engine, a container of our base
image with the option ``--keep-outputs``, Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from gpuspawner.engines.smoke_test import passed, smoke
from tests.support import tier
from tests.support.browser import screenshot
from tests.support.engine import PrivateEngine
from tests.support.images import KEEPS_OUTPUTS
from tests.support.notebook_hub import NotebookHub
from tests.support.notebooks import new_notebook
from tests.support.processes import wait_for

SECONDS = 90 if tier.SOAK else 15
"""How long a cell runs. The longer one outlasts the minute after which the server would forget the
notebook of a closed tab, if our image let it."""

LONG = f"""
import time
for second in range({SECONDS}):
    print("second", second, flush=True)
    time.sleep(1)
print("the end")
"""

ALL_LINES = [*(f"second {n}" for n in range(SECONDS)), "the end"]

ASKS = "name = input('Your name? ')\nprint('hello', name)"

KINDS = """
import os, time
from IPython.display import HTML, display
from tqdm import tqdm
changing = display("before", display_id=True)
print("begun", flush=True)
while not os.path.exists("closed"):
    time.sleep(0.2)
for _ in tqdm(range(3)):
    time.sleep(0.1)
display(HTML("<b>a table</b>"))
changing.update("after")
1 / 0
"""

OVERWRITES = r"""
import time
print("begun", flush=True)
for number in range(4):
    print(number * "\u2588" + f" {number} of 3", end="\r", flush=True)
    time.sleep(0.5)
print("", "it", "came", flush=True)
"""
"""As a progress bar does: slowly, because what is printed at once comes as one text."""


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[NotebookHub]:
    images.ensure_images(engine, [images.BASE, KEEPS_OUTPUTS])
    with NotebookHub(folder, engine, image=KEEPS_OUTPUTS) as hub:
        yield hub
    engine.clean()


@pytest.fixture
def notebook(hub: NotebookHub, member: str) -> Path:
    """A notebook of a member whose session runs."""
    hub.browser_of(member)
    hub.spawn_and_wait(member, {"environment": "base", "gpus": 0})
    cells = new_notebook(long=LONG, asks=ASKS, kinds=KINDS, overwrites=OVERWRITES)
    return hub.put_notebook(member, "long.ipynb", cells)


def cell(page: Page, number: int) -> Locator:
    return page.locator(".jp-NotebookPanel .jp-CodeCell").nth(number)


def output(page: Page, number: int) -> Locator:
    return cell(page, number).locator(".jp-OutputArea-output")


def run(page: Page, number: int) -> None:
    cell(page, number).locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")


def lines_shown(page: Page) -> list[str]:
    return [line for text in output(page, 0).all_inner_texts() for line in text.split("\n") if line]


def outputs_saved(notebook: Path, number: int) -> list[dict[str, Any]]:
    """The outputs of a cell, as the file has them."""
    try:
        found: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"][number]["outputs"]
    except ValueError:
        return []  # it is being written
    return found


def lines_saved(notebook: Path) -> list[str]:
    """What the first cell has printed, as the file has it."""
    texts = ["".join(each.get("text", "")) for each in outputs_saved(notebook, 0)]
    return "".join(texts).split("\n")[:-1]


def test_cell_ends_while_no_page_shows_it(
    hub: NotebookHub, browser: Browser, member: str, notebook: Path
) -> None:
    page = hub.open_notebook(browser, member, notebook.name)
    run(page, 0)
    expect(output(page, 0)).to_contain_text("second 2")
    page.context.close()
    wait_for(lambda: lines_saved(notebook) == ALL_LINES, "all lines", timeout=SECONDS + 60)

    page = hub.open_notebook(browser, member, notebook.name)
    expect(output(page, 0)).to_contain_text("the end")
    assert lines_shown(page) == ALL_LINES
    expect(cell(page, 0).locator(".jp-InputPrompt")).to_have_text("[1]:")
    screenshot(page, "keep-outputs")

    # Of what the server writes for itself, the workspace has nothing.
    mine = {path.name for path in hub.workspace(member).iterdir()}
    assert mine <= {"long.ipynb", ".ipynb_checkpoints"}, mine


def test_page_comes_back_during_the_cell_and_then_answers_a_question(
    hub: NotebookHub, browser: Browser, member: str, notebook: Path
) -> None:
    page = hub.open_notebook(browser, member, notebook.name)
    run(page, 0)
    expect(output(page, 0)).to_contain_text("second 2")
    page.context.close()
    wait_for(lambda: f"second {SECONDS // 2}" in lines_saved(notebook), "half of it", timeout=120)

    page = hub.open_notebook(browser, member, notebook.name)
    expect(output(page, 0)).to_contain_text(f"second {SECONDS // 2}")
    expect(output(page, 0)).to_contain_text("the end")
    assert lines_shown(page) == ALL_LINES
    wait_for(lambda: lines_saved(notebook) == ALL_LINES, "all lines in the file")

    run(page, 1)
    question = cell(page, 1).locator(".jp-Stdin-input")
    question.fill("Ada")
    question.press("Enter")
    expect(output(page, 1).last).to_contain_text(re.compile("hello Ada"))
    wait_for(lambda: "hello Ada" in notebook.read_text(), "the answer in the file")


def test_progress_bar_that_is_not_ascii_is_kept_with_what_follows(
    hub: NotebookHub, browser: Browser, member: str, notebook: Path
) -> None:
    """By images/keep-outputs/repair.py; without it, the server of the member would stop."""
    page = hub.open_notebook(browser, member, notebook.name)
    run(page, 3)
    expect(output(page, 3)).to_contain_text("it came")
    wait_for(lambda: "it came" in notebook.read_text(), "the last line in the file")


def test_outputs_of_all_kinds_are_kept_except_updates_of_displays(
    hub: NotebookHub, browser: Browser, member: str, notebook: Path
) -> None:
    """As docs/how-to/admins/keep-outputs.md says."""
    page = hub.open_notebook(browser, member, notebook.name)
    run(page, 2)
    expect(output(page, 2).last).to_contain_text("begun")
    page.context.close()
    (notebook.parent / "closed").touch()

    def saved_with_error() -> list[dict[str, Any]]:
        found = outputs_saved(notebook, 2)
        return found if "ZeroDivisionError" in json.dumps(found) else []

    saved = wait_for(saved_with_error, "the error in the file")
    text = json.dumps(saved)
    assert "3/3" in text and "<b>a table</b>" in text
    changing = "".join(saved[0]["data"]["text/plain"])
    assert changing == "'before'", "it is updated: the option may be on by default soon"

    page = hub.open_notebook(browser, member, notebook.name)
    expect(output(page, 2).last).to_contain_text("ZeroDivisionError")
    expect(output(page, 2).locator("b", has_text="a table")).to_be_visible()


@pytest.mark.usefixtures("soak", "hub")
def test_image_that_keeps_outputs_passes_its_smoke_test(engine: PrivateEngine, images: Any) -> None:
    found = smoke(engine.client, KEEPS_OUTPUTS)
    assert passed(found), found
    lock = images.OURS / "keep-outputs" / "requirements.lock"
    assert images.locked(lock) <= images.listed(engine, KEEPS_OUTPUTS)
