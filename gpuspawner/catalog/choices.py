"""Choices within an environment, in the manner of KubeSpawner's ``profile_options``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..reading.origin import shown
from ..reading.section import Section, mapping, truth
from . import kinds
from .servers import read_servers

MOST_OPTIONS = 10
MOST_CHOICES = 50
NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9])?"
"""What names an option, and a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChoice:
    """One way to have an option."""

    name: str
    """What links and requests carry."""
    display_name: str
    default: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of the environment that it has in place of the environment's own; variables and
    overrides are added to those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOption:
    """Something to choose, such as how much memory."""

    name: str
    display_name: str
    choices: tuple[ProfileChoice, ...]

    @property
    def usual(self) -> ProfileChoice:
        """The one that is taken unless a member chooses: the default, else the first."""
        return next((choice for choice in self.choices if choice.default), self.choices[0])


def read_options(section: Section) -> tuple[ProfileOption, ...]:
    """The section's ``profile_options``."""
    _no_more_than(section, "profile_options", MOST_OPTIONS)
    return tuple(
        _option(_name(inner, name), inner)
        for name, inner in section.sections("profile_options", "option")
    )


def _option(name: str, section: Section) -> ProfileOption:
    display_name = section.take("display_name", kinds.line, name)
    _no_more_than(section, "choices", MOST_CHOICES)
    choices = tuple(
        _choice(_name(inner, each), inner) for each, inner in section.sections("choices", "choice")
    )
    if not choices:
        raise section.error("choices", f"{section.label} has no 'choices'. Add at least one.")
    if len(defaults := [choice.name for choice in choices if choice.default]) > 1:
        raise section.error(
            "choices",
            f"the choices {defaults[0]!r} and {defaults[1]!r} of {section.label} both say "
            "'default: true'. Keep one of them.",
        )
    section.done()
    return ProfileOption(name=name, display_name=display_name, choices=choices)


def _choice(name: str, section: Section) -> ProfileChoice:
    choice = ProfileChoice(
        name=name,
        display_name=section.take("display_name", kinds.line, name),
        default=section.take("default", truth, False),
        changes=read_servers(section),
    )
    section.done()
    return choice


def _name(section: Section, name: str) -> str:
    if not re.fullmatch(NAME, name):
        raise section.origin.error(
            section.path,
            f"{shown(name)} cannot be a name here. Use up to 64 letters, digits, '-' and '_'.",
        )
    return name


def _no_more_than(section: Section, key: str, most: int) -> None:
    empty: dict[str, Any] = {}
    count = len(section.take(key, mapping, empty))
    if count > most:
        raise section.error(key, f"{section.label} has {count} {key!r}; {most} are the most.")
