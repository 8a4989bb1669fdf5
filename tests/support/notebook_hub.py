"""A hub whose members open notebooks in JupyterLab: in real containers, with workspaces in a folder
of this machine, in which tests put notebooks and read the results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect

from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.images import BASE
from tests.support.pages import WIDE, add_cookies
from tests.support.processes import free_port

CATALOG = """
environments:
  - slug: base
    display_name: Base
    image: {image}
    default: true
    devices: {{default: 1, max: 2}}
    hours: {{max: 8}}
"""

CONFIG = """
c.GPUDockerSpawner.workspace = "{folder}/work-{{raw_username}}"
c.GPURates.by_model = {{"*": 4}}
c.GPUCredits.opening_grant = 50
c.GPUCredits.hold_minutes = 1
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""


class NotebookHub(GPUHub):
    """``with NotebookHub(folder, engine, image=BASE) as hub``."""

    def __init__(self, folder: Path, engine: PrivateEngine, *, image: str = BASE) -> None:
        self._work = folder
        config = CONFIG.format(port=free_port(), folder=folder)
        super().__init__(folder / "hub", engine, config, catalog=CATALOG.format(image=image))

    def workspace(self, member: str) -> Path:
        """The folder of a member who has had a server."""
        return self._work / f"work-{member}"

    def put_notebook(self, member: str, name: str, notebook: Mapping[str, Any]) -> Path:
        """Put a notebook into a workspace, where the member may write it."""
        path = self.workspace(member) / name
        path.write_text(json.dumps(notebook))
        path.chmod(0o666)
        return path

    def open_notebook(self, browser: Browser, member: str, name: str) -> Page:
        """Open a notebook in a browser of its own, and wait until its cells can be run."""
        page = browser.new_context(viewport=WIDE).new_page()
        add_cookies(page, self, member)
        page.goto(f"{self.url}/user/{member}/lab/tree/{name}?reset")
        expect(page.locator(".jp-NotebookPanel .jp-CodeCell .cm-content").first).to_be_visible()
        # Before that, JupyterLab drops what it shall run, and the toolbar shows an idle kernel.
        status = page.locator("#jp-main-statusbar")
        expect(status).to_contain_text(re.compile(r"\(ipykernel\) \| (Idle|Busy)"))
        return page
