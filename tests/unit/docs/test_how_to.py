"""The how-to guides against the code: settings, catalogs, commands, REST paths and links.

Real: the classes that a configuration names, the catalog's loader, the commands' parsers, what the
handlers declare. Nothing is started.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from dockerspawner import DockerSpawner
from jupyterhub.app import JupyterHub
from jupyterhub.auth import Authenticator
from jupyterhub.spawner import Spawner
from traitlets.config import Config, Configurable
from traitlets.config.loader import LazyConfigValue

from gpuspawner.auth import MemberMixin
from gpuspawner.auth.oauth import MemberOAuthMixin
from gpuspawner.catalog.loader import Catalog
from gpuspawner.cli.app import application
from gpuspawner.cli.command import Invocation
from gpuspawner.hub_pages.handlers import CatalogPages
from gpuspawner.ledger.prices import GPURates
from gpuspawner.ledger.settings import GPUCredits
from gpuspawner.members.service import GPUMembers
from gpuspawner.monitoring.health_service import GPUHealth
from gpuspawner.monitoring.service import GPUIdle, GPUMonitoring
from gpuspawner.notifications import channels
from gpuspawner.queue.delegation import GPUSlurm
from gpuspawner.queue.settings import GPUQueue
from gpuspawner.service.app import Accounting
from gpuspawner.service.duties import GPUSessions
from gpuspawner.service.notifier import GPUNotifications
from gpuspawner.settings import GPUDatabase, GPUDevices
from gpuspawner.spawners.docker import GPUDockerSpawner
from gpuspawner.spawners.local import GPULocalSpawner
from gpuspawner.spawners.mixin import GPUSpawnerMixin
from gpuspawner.storage.service import GPUFolders
from gpuspawner.web.app import ROUTES
from gpuspawner.web.openapi import document

DOCS = Path(__file__).parents[3] / "docs"
SHELVES = ("members", "admins")
PAGES = sorted(page for shelf in SHELVES for page in (DOCS / "how-to" / shelf).glob("*.md"))
MOST_WORDS = 600
OTHERS = re.compile(r"\.\./(cluster|production)/|\.\./\.\./(tutorials|explanation|reference)/")
"""Links to pages of other shelves, which the build of the site checks."""


class Block(NamedTuple):
    """A block of code in a page."""

    page: str
    language: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        indent = len(found[1])
        lines = (line[indent:] for line in found[3].splitlines(keepends=True))
        yield Block(page.name, found[2], "".join(lines))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def named(*languages: str) -> list[Block]:
    found = [block for block in BLOCKS if block.language in languages]
    assert found, languages
    return found


# Settings.


SECTIONS: tuple[type[Configurable], ...] = (
    *(JupyterHub, Authenticator, Spawner, DockerSpawner),
    *(GPUSpawnerMixin, GPUDockerSpawner, GPULocalSpawner, MemberMixin, MemberOAuthMixin),
    *(GPUDatabase, GPUDevices, GPUCredits, GPURates, GPUQueue, GPUMembers, GPUIdle, GPUHealth),
    *(GPUFolders, GPUSlurm, GPUMonitoring, GPUSessions, GPUNotifications),
    *(Accounting, CatalogPages),
)


@cache
def sections() -> dict[str, type[Configurable]]:
    """Every class that a configuration may name, by its name."""
    points = entry_points(group="jupyterhub.authenticators")
    members = [point.load() for point in points if point.name.startswith("gpu-members-")]
    return {cls.__name__: cls for cls in (*SECTIONS, *members)}


READ: Mapping[str, Callable[[Any], Any]] = {
    "GPUCredits": lambda section: section.policies,
    "GPUHealth": lambda section: section.read_policy(),
    "GPUIdle": lambda section: section.read_policies(),
    "GPUNotifications": lambda section: channels.read(section.channels, section.default_channels),
    "GPUQueue": lambda section: section.make_scheduler(),
    "GPURates": lambda section: section.read(),
}
"""How the code reads a section whose values have a form of their own."""


def configured(block: Block) -> Config:
    """The configuration that a block writes."""
    config = Config()
    exec(compile(block.text, block.page, "exec"), {"c": config})
    return config


def taken(cls: type[Configurable], name: str, value: Any) -> None:
    """Raises TraitError if the setting does not take the value."""
    made: Any = cls.__new__(cls)  # without reading or starting anything
    cls.class_traits()[name]._validate(made, value)


SETTINGS = [block for block in named("python") if block.text.startswith("c.")]


@pytest.mark.parametrize("block", SETTINGS, ids=lambda block: block.page)
def test_settings_in_how_to_pages_exist_and_take_their_values(block: Block) -> None:
    config = configured(block)
    for section, values in config.items():
        assert section in sections(), f"{block.page}: there is no section c.{section}"
        known = sections()[section].class_trait_names(config=True)
        for name, value in values.items():
            assert name in known, f"{block.page}: there is no setting c.{section}.{name}"
            if not isinstance(value, LazyConfigValue):  # it is added to what is there
                taken(sections()[section], name, value)
        if section in READ:
            READ[section](sections()[section](config=config))


# Catalogs.


@pytest.mark.parametrize("block", named("yaml"), ids=lambda block: block.page)
def test_catalogs_of_how_to_pages_are_valid(block: Block) -> None:
    assert Catalog.from_text(block.text, block.page, DOCS).environments


# Commands.


def commands_of(block: Block) -> Iterator[list[str]]:
    """The arguments of each gpuspawner command, without comments and redirections."""
    joined = block.text.replace("\\\n", " ")
    for line in joined.splitlines():
        line = line.strip().removeprefix("$ ")
        if line.startswith("gpuspawner ") and not line.startswith("gpuspawner: "):
            words = shlex.split(line, comments=True)
            yield words[1 : words.index(">") if ">" in words else None]


COMMAND_LINES = [
    pytest.param(words, id=f"{block.page}-{'-'.join(words[:2])}")
    for block in named("console", "shell")
    for words in commands_of(block)
]
IN_TEXT = re.compile(r"`gpuspawner ((?:[a-z]+ ?)+)")


def parsed(words: list[str]) -> click.Command:
    """The command that the words call. Raises UsageError, as the command line would."""
    command: click.Command = application
    context = click.Context(command, obj=Invocation())
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command, context = found, click.Context(found, info_name=name, parent=context)
    command.parse_args(context, list(words))
    return command


@pytest.mark.parametrize("words", COMMAND_LINES)
def test_commands_in_how_to_pages_parse(words: list[str]) -> None:
    assert parsed(words) is not application


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_in_sentences_of_how_to_pages_exist(page: Path) -> None:
    for found in IN_TEXT.findall(page.read_text(encoding="utf-8")):
        first, *rest = found.split()
        _, command, _ = application.resolve_command(click.Context(application), [first])
        if rest and isinstance(command, click.Group):
            assert rest[0] in command.commands, f"{page.name}: gpuspawner {found}"


# REST.


@cache
def operations() -> list[tuple[re.Pattern[str], dict[str, frozenset[str]]]]:
    """The paths of the API, each with its methods and the fields of what is sent."""
    made = document("/services/gpu/", [handler for _, handler in ROUTES], ["mail"])
    schemas = made["components"]["schemas"]

    def fields(its: dict[str, Any]) -> frozenset[str]:
        if "requestBody" not in its:
            return frozenset()
        schema = its["requestBody"]["content"]["application/json"]["schema"]
        return frozenset(schemas[schema["$ref"].rpartition("/")[2]]["properties"])

    return [
        (
            re.compile(re.sub(r"\{\w+\}", "[^/]+", path)),
            {method: fields(its) for method, its in methods.items()},
        )
        for path, methods in made["paths"].items()
    ]


CALL = re.compile(r"(?:services/gpu/api|\$API)(/[\w/:$.-]+)")


@pytest.mark.parametrize("block", named("shell"), ids=lambda block: block.page)
def test_calls_in_how_to_pages_are_in_the_openapi_document(block: Block) -> None:
    words = shlex.split(block.text.replace("\\\n", " "), comments=True)
    starts = [number for number, word in enumerate(words) if word == "curl"]
    for start, end in pairwise([*starts, len(words)]):
        call = words[start:end]
        for path in CALL.findall(" ".join(call)):
            body = json.loads(call[call.index("-d") + 1]) if "-d" in call else {}
            usual = "post" if "-d" in call else "get"
            method = call[call.index("-X") + 1].lower() if "-X" in call else usual
            found = [its for at, its in operations() if at.fullmatch(f"/api{path}")]
            assert found and method in found[0], f"{block.page}: {method} {path}"
            assert set(body) <= found[0][method], f"{block.page}: {path} {body}"


# Pages.


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_how_to_pages_are_short_with_a_title_and_working_links(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ") and re.fullmatch(r"[a-z0-9-]+", page.stem)
    assert len(text.split()) <= MOST_WORDS, f"{page.name}: {len(text.split())} words"
    for target in re.findall(r"\]\(\s*([^)#\s]+)\)", text):
        if not OTHERS.match(target):
            assert (page.parent / target).is_file(), f"{page.name} links to {target}"
    for block in blocks_of(page):
        assert block.language, f"{page.name} has a block without a language:\n{block.text}"
