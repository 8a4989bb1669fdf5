"""The pages of docs against the code. Real: the classes of all three packages."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dockerspawner import DockerSpawner, SystemUserSpawner
from jupyterhub.spawner import Spawner
from oauthenticator.azuread import AzureAdOAuthenticator
from traitlets.config import Configurable

from gpuspawner.auth import MemberMicrosoftOAuthenticator
from gpuspawner.spawners.docker import GPUDockerSpawner
from tests.support.compatibility import container_rows, setting_rows

REPO = Path(__file__).parents[3]
PAGES = sorted((REPO / "docs" / "contributing").glob("*.md"))
REFERENCE = re.compile(r"`((?:[\w]+/)*\w+\.py)(?::([\w.]+))?`")


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
def test_files_and_names_in_contributing_pages_exist(page: Path) -> None:
    references = REFERENCE.findall(page.read_text(encoding="utf-8"))
    assert references or page.stem == "README"
    for file, name in references:
        assert file_of(file).is_file(), f"{page.name} names {file}, which is not there"
        if name:
            assert name in names_in(file_of(file)), f"{page.name}: {file} has no {name}"


# Compatibility.


CLASSES: tuple[type[Configurable], ...] = (Spawner, DockerSpawner, SystemUserSpawner)
README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")


class Rebased(GPUDockerSpawner, SystemUserSpawner):
    """With the settings of all three."""


@pytest.mark.parametrize("cls", CLASSES)
def test_compatibility_table_covers_every_inherited_setting(cls: type[Configurable]) -> None:
    rows = setting_rows(cls.__name__)
    names = [row.name for row in rows]
    assert sorted(names) == sorted(n for n in cls.class_own_traits() if not n.startswith("_"))
    ours = [c for c in Rebased.__mro__ if c.__module__.partition(".")[0] == "gpuspawner"]
    for row in rows:
        assert row.status in ("kept", "changed"), row
        assert bool(row.how) == bool(row.off) == (row.status == "changed"), row
        anew = any(_defines(c, row.name) for c in ours)
        assert row.status == "changed" or not anew, row


def _defines(cls: type, name: str) -> bool:
    defaults: dict[str, Any] = getattr(cls, "_trait_default_generators", {})
    handler = defaults.get(name)
    by_handler = handler is not None and getattr(handler, "this_class", None) is cls
    return by_handler or not {name, f"_{name}_default", f"_{name}_changed"}.isdisjoint(vars(cls))


def test_off_switches_in_the_compatibility_page_exist() -> None:
    texts = [row.off for row in container_rows()]
    texts += [row.off for cls in CLASSES for row in setting_rows(cls.__name__)]
    named = {match for text in texts for match in re.findall(r"`c\.(\w+)\.(\w+)", text)}
    assert len(named) > 8
    for section, name in named:
        (cls,) = (c for c in Rebased.__mro__ if c.__name__ == section)
        assert name in cls.class_trait_names(config=True), f"c.{section}.{name}"
    assert "`docs/compatibility.md`" in README


def test_usernames_from_azure_ad_authenticator_can_be_kept() -> None:
    claims = {"name": "Ada L.", "preferred_username": "ada@lab.example"}

    def username(cls: Any, **settings: Any) -> Any:
        made = cls(tenant_id="lab", allow_all=True, **settings)
        return made.user_info_to_username(claims)

    ours = MemberMicrosoftOAuthenticator
    assert username(ours) == "ada@lab.example"
    assert username(ours, username_claim="name") == username(AzureAdOAuthenticator) == "Ada L."
