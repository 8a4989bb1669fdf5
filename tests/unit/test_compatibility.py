"""The page on compatibility against the packages. Real: the classes of all three packages."""

from __future__ import annotations

import re
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

CLASSES: tuple[type[Configurable], ...] = (Spawner, DockerSpawner, SystemUserSpawner)
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


class Rebased(GPUDockerSpawner, SystemUserSpawner):
    """With the settings of all three."""


@pytest.mark.parametrize("cls", CLASSES)
def test_every_setting_has_a_row_that_says_all(cls: type[Configurable]) -> None:
    rows = setting_rows(cls.__name__)
    names = [row.name for row in rows]
    assert sorted(names) == sorted(n for n in cls.class_own_traits() if not n.startswith("_"))
    for row in rows:
        assert row.status in ("kept", "changed"), row
        assert bool(row.how) == bool(row.off) == (row.status == "changed"), row


@pytest.mark.parametrize("cls", CLASSES)
def test_every_setting_that_our_classes_define_anew_is_said_to_be_changed(
    cls: type[Configurable],
) -> None:
    ours = [c for c in Rebased.__mro__ if c.__module__.partition(".")[0] == "gpuspawner"]
    for row in setting_rows(cls.__name__):
        anew = any(_defines(c, row.name) for c in ours)
        assert row.status == "changed" or not anew, row


def _defines(cls: type, name: str) -> bool:
    defaults: dict[str, Any] = getattr(cls, "_trait_default_generators", {})
    handler = defaults.get(name)
    by_handler = handler is not None and getattr(handler, "this_class", None) is cls
    return by_handler or not {name, f"_{name}_default", f"_{name}_changed"}.isdisjoint(vars(cls))


def test_every_setting_that_switches_something_off_exists() -> None:
    texts = [row.off for row in container_rows()]
    texts += [row.off for cls in CLASSES for row in setting_rows(cls.__name__)]
    named = {match for text in texts for match in re.findall(r"`c\.(\w+)\.(\w+)", text)}
    assert len(named) > 8
    for section, name in named:
        (cls,) = (c for c in Rebased.__mro__ if c.__name__ == section)
        assert name in cls.class_trait_names(config=True), f"c.{section}.{name}"  # type: ignore[attr-defined]


def test_the_readme_leads_to_the_page() -> None:
    assert "`docs/compatibility.md`" in README


def test_usernames_of_a_hub_that_had_microsofts_own_class_can_be_kept() -> None:
    claims = {"name": "Ada L.", "preferred_username": "ada@lab.example"}

    def username(cls: Any, **settings: Any) -> Any:
        made = cls(tenant_id="lab", allow_all=True, **settings)
        return made.user_info_to_username(claims)

    ours = MemberMicrosoftOAuthenticator
    assert username(ours) == "ada@lab.example"
    assert username(ours, username_claim="name") == username(AzureAdOAuthenticator) == "Ada L."
