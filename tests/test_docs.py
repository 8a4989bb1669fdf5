"""README, CONTRIBUTING and the help of settings against the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from traitlets.config import Configurable

from gpuspawner.auth import MemberOAuthenticator
from gpuspawner.auth.ldap import MemberLDAPAuthenticator
from gpuspawner.hub_pages.handlers import CatalogPages
from gpuspawner.monitoring.service import GPUMonitoring
from gpuspawner.service.app import Accounting
from gpuspawner.service.duties import GPUSessions
from gpuspawner.service.notifier import GPUNotifications
from gpuspawner.settings import CLASSES as SETTINGS
from gpuspawner.spawners.docker import GPUDockerSpawner
from gpuspawner.spawners.local import GPULocalSpawner
from tests.support import doc_blocks
from tests.support.processes import free_port

REPO = Path(__file__).parents[1]
SCREENSHOTS = REPO / "docs" / "_static" / "screenshots"
README = (REPO / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
CLASSES = (
    Accounting,
    CatalogPages,
    GPUDockerSpawner,
    GPULocalSpawner,
    MemberLDAPAuthenticator,
    MemberOAuthenticator,
    *SETTINGS,
    GPUMonitoring,
    GPUNotifications,
    GPUSessions,
)


def own_traits(cls: type[Configurable]) -> list[tuple[str, object]]:
    """The settings that we add to a class, and not those that it inherits from others."""
    return [
        (name, trait)
        for name, trait in cls.class_traits(config=True).items()
        if trait.this_class.__module__.startswith("gpuspawner")
    ]


@pytest.mark.parametrize("cls", CLASSES)
def test_help_of_every_setting_has_an_example(cls: type[Configurable]) -> None:
    for name, trait in own_traits(cls):
        text = getattr(trait, "help", "")
        assert re.search(rf"c\.\w+\.{name}", text), f"{cls.__name__}.{name} shows no example"


def test_contributing_names_every_makefile_target() -> None:
    text = (REPO / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", text, flags=re.MULTILINE)) - {"parts"}
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"make {target}\b", CONTRIBUTING), target


def test_every_file_linked_in_the_readme_exists() -> None:
    linked = re.findall(r"\]\(([\w./-]+)\)", README)
    assert len(linked) > 6
    for path in linked:
        assert (REPO / path).is_file(), path


PICTURE = re.compile(r"!\[([^]]*)\]\(([^)]+)\)")


def pictures() -> set[Path]:
    """Return the file of each picture on a page; each has a text for who cannot see it."""
    found = set()
    for page in [REPO / "README.md", *doc_blocks.pages()]:
        for text, name in PICTURE.findall(page.read_text(encoding="utf-8")):
            assert text, f"{page}: {name} has no text"
            found.add((page.parent / name).resolve())
    return found


def test_pages_refer_to_every_screenshot_and_to_no_other_picture() -> None:
    kept = set(SCREENSHOTS.glob("*.png"))
    assert kept and pictures() == kept
    for picture in kept:
        assert picture.stat().st_size <= 150_000, f"{picture.name} is too large for the repository"


def test_script_takes_every_screenshot(
    processes: None, hubs: None, browsers: None, soak: None, tmp_path: Path
) -> None:
    command = [sys.executable, str(REPO / "scripts" / "screenshots.py"), str(tmp_path)]
    environment = os.environ | {"GPUSPAWNER_DEMO_PORT": str(free_port())}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    taken = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert taken.keys() == {path.name for path in pictures()}
    assert all(content.startswith(b"\x89PNG") for content in taken.values())
