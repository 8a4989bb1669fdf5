"""What an admin's own subclass of a spawner defines of the spawn form."""

from __future__ import annotations

from functools import cache
from typing import Any

from traitlets import DefaultHandler

KNOWN_PACKAGES = ("gpuspawner", "jupyterhub", "dockerspawner", "traitlets")
"""Packages whose classes define only what JupyterHub and this package ship."""

FORM = frozenset({"options_form", "get_options_form"})
OPTIONS = frozenset({"options_from_form", "run_options_from_form", "apply_user_options"})


@cache
def defines_form(spawner_class: type) -> bool:
    """Return True if a class of the admin's, above or below ours, has a spawn form."""
    return not _defined_by_admin(spawner_class).isdisjoint(FORM)


@cache
def defines_options(spawner_class: type) -> bool:
    """Return True if a class of the admin's has a form or reads what a form sends."""
    return not _defined_by_admin(spawner_class).isdisjoint(FORM | OPTIONS)


def _defined_by_admin(spawner_class: type) -> frozenset[str]:
    """The names of FORM and OPTIONS that classes outside of the known packages define."""
    return frozenset(
        name
        for cls in spawner_class.__mro__
        if cls.__module__.partition(".")[0] not in KNOWN_PACKAGES and cls is not object
        for attribute, value in vars(cls).items()
        for name in _names_of(attribute, value)
    )


def _names_of(attribute: str, value: Any) -> tuple[str, ...]:
    """What an attribute of a class defines: itself, or the default of a trait."""
    if isinstance(value, DefaultHandler):
        return (str(value.trait_name),)
    name = attribute.removeprefix("_").removesuffix("_default")
    return (name,) if attribute == f"_{name}_default" else (attribute,)
