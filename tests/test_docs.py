"""The README against the code: every setting, command, scope, field and variable is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from traitlets.config import Configurable

from gpuspawner.auth import MemberOAuthenticator
from gpuspawner.auth.ldap import MemberLDAPAuthenticator
from gpuspawner.cli.app import COMMANDS
from gpuspawner.core import scopes
from gpuspawner.hub_pages.handlers import CatalogPages
from gpuspawner.monitoring.service import GPUMonitoring
from gpuspawner.service.app import Accounting
from gpuspawner.service.duties import GPUSessions
from gpuspawner.service.notifier import GPUNotifications
from gpuspawner.settings import CLASSES as SETTINGS
from gpuspawner.spawners import options
from gpuspawner.spawners.docker import GPUDockerSpawner
from gpuspawner.spawners.local import GPULocalSpawner

REPO = Path(__file__).parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")
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
def test_readme_lists_every_setting_and_help_has_an_example(
    cls: type[Configurable],
) -> None:
    for name, trait in own_traits(cls):
        assert re.search(rf"`c\.\w+\.{name}`", README), f"{cls.__name__}.{name} is not in README"
        text = getattr(trait, "help", "")
        assert re.search(rf"c\.\w+\.{name}", text), f"{cls.__name__}.{name} shows no example"


def test_every_setting_in_the_readme_exists() -> None:
    known = {name for cls in CLASSES for name, _ in own_traits(cls)}
    named = set(re.findall(r"`c\.(?:\w+)\.(\w+)`", README))
    assert named - known == set()


def test_readme_names_every_command() -> None:
    assert len(COMMANDS) >= 6
    for command in COMMANDS:
        assert f"`gpuspawner {command}" in README


def test_readme_names_every_scope() -> None:
    for scope in (*scopes.ACCOUNTING_SCOPES, *scopes.CULLER_SCOPES, *scopes.CUSTOM_SCOPES):
        assert f"`{scope}`" in README


def test_readme_names_every_form_field() -> None:
    for field in options.FIELDS:
        assert f"| `{field}` |" in README


def test_readme_names_every_server_variable() -> None:
    spawner = GPUDockerSpawner.__new__(GPUDockerSpawner)
    spawner.lease = None
    for name in spawner.with_lease_environment({}):
        assert f"`{name}`" in README


def test_readme_names_every_makefile_target() -> None:
    text = (REPO / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", text, flags=re.MULTILINE)) - {"parts"}
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"`(?:make )?{target}\b|make {target}\b", README), target


def test_every_file_named_in_the_readme_exists() -> None:
    named = re.findall(r"`((?:hub_config|benchmarks|images)/[\w./-]+)`", README)
    assert named
    for path in [*named, *re.findall(r"\(`([a-z_/]+\.py)`", README)]:
        assert (REPO / path).exists() or (REPO / "gpuspawner" / path).exists(), path
