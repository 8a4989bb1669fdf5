"""README, CONTRIBUTING and the help of settings against the code."""

from __future__ import annotations

import re
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

REPO = Path(__file__).parents[1]
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
