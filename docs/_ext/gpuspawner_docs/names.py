"""Names of ours in a text: settings, commands with options, routes, files, keys of the catalog.

:func:`problems_in` says which of them do not exist.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache

import click

from .commands import commands
from .operations import REPO
from .rest import document
from .settings import known_settings

SETTING = re.compile(r"\bc\.(\w+)\.(\w+)")
COMMAND = re.compile(r"(?:(?<=/bin/)|(?<![\w./-]))gpuspawner(?= )")
ROUTE = re.compile(r"/services/gpu/(api/[^\s\"'`?]+)")
SHELL = frozenset(("console", "shell", "sh", "bash"))
PYTHON = frozenset(("python", "python3"))
FILE = re.compile(r"(?:benchmarks|hub_config|images|scripts)/[\w./-]+")
TEXT = ""
"""The language of code in a sentence."""
OURS = re.compile(r"GPU[A-Z]|Member\w*(Authenticator|Mixin)$|Accounting$|CatalogPages$")
END = re.compile(r"[|;&<>()]+")


def command_in(words: str) -> str | None:
    """Return the longest command at the begin of these words; None if there is none."""
    found = words.split()
    for count in range(min(len(found), 2), 0, -1):
        if (name := " ".join(found[:count])) in commands():
            return name
    return None


def problems_in(text: str, language: str) -> Iterator[str]:
    """Yield a sentence for each name of ours in a text that does not exist."""
    if language in PYTHON | {TEXT}:
        yield from _settings(text)
    if language in PYTHON:
        yield from _syntax(text)
    if language in SHELL | {TEXT}:
        for line in text.replace("\\\n", " ").splitlines():
            yield from _commands(line)
        yield from _routes(text)
        yield from _targets(text)
    if language == TEXT and FILE.fullmatch(text) and not (REPO / text).exists():
        yield f"there is no file {text}"
    if language == "yaml":
        yield from _catalog(text)


def _settings(text: str) -> Iterator[str]:
    known = known_settings()
    for section, name in SETTING.findall(text):
        if section in known and name not in known[section]:
            yield f"there is no setting c.{section}.{name}"
        if section not in known and OURS.match(section):
            yield f"there is no class {section} with settings"


def _syntax(text: str) -> Iterator[str]:
    try:
        ast.parse(text)
    except SyntaxError as error:
        yield f"this is no Python: {error.msg} in line {error.lineno}"


def _commands(line: str) -> Iterator[str]:
    if line.lstrip().startswith("#"):
        return
    for match in COMMAND.finditer(line):
        if not _begins_a_command(line[: match.start()]):
            continue
        words = _words(line[match.end() :])
        plain = [word for word in words[:2] if re.fullmatch(r"[a-z][a-z-]*", word)]
        if not plain or words[0] not in plain:
            continue
        name = command_in(" ".join(plain))
        if name is None:
            yield f"there is no command gpuspawner {plain[0]}"
            continue
        command = commands()[name]
        takes_words = any(isinstance(param, click.Argument) for param in command.params)
        if isinstance(command, click.Group) and plain[name.count(" ") + 1 :] and not takes_words:
            yield f"there is no command gpuspawner {' '.join(plain)}"
        for word in words:
            if word.startswith("--") and word.partition("=")[0] not in _options(name):
                yield f"gpuspawner {name} has no option {word.partition('=')[0]}"


def _begins_a_command(before: str) -> bool:
    """Return False where the word is a name of something else: a user, a network, a package."""
    before = before.rstrip()
    return not before or before.endswith(
        ("/bin/", "$", "#", "&&", "||", ";", "|", "(", "exec hub", "sudo", "-u gpuspawner")
    )


def _words(rest: str) -> list[str]:
    """Return the words of a command up to its end."""
    lexer = shlex.shlex(rest, posix=True, punctuation_chars="|;&<>()")
    lexer.whitespace_split = True
    found: list[str] = []
    try:
        for word in lexer:
            if END.fullmatch(word):
                break
            found.append(word)
    except ValueError:  # a quote that another line closes
        pass
    return found


@cache
def _options(name: str) -> frozenset[str]:
    """Return the options of a command and of its group."""
    found = {"--help"}
    words = name.split()
    for count in range(1, len(words) + 1):
        for param in commands()[" ".join(words[:count])].params:
            if isinstance(param, click.Option):
                found |= {*param.opts, *param.secondary_opts}
    return frozenset(found)


@cache
def _makefile() -> frozenset[str]:
    text = (REPO / "Makefile").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^(\w+):", text, re.M))


def _targets(text: str) -> Iterator[str]:
    for line in text.splitlines():
        match = re.match(r"\s*(?:\$ )?make ([a-z]+)\b", line)
        if match and match[1] not in _makefile():
            yield f"there is no target: make {match[1]}"


@cache
def _paths() -> tuple[re.Pattern[str], ...]:
    return tuple(
        re.compile(re.sub(r"\{\w+\}", "[^/]+", path.removeprefix("/").replace(".", r"\.")))
        for path in document()["paths"]
    )


def _routes(text: str) -> Iterator[str]:
    for path in ROUTE.findall(text):
        shown = path.rstrip(".,:;)/")
        if "$1" in shown or shown.endswith(("...", "api")):
            continue  # of a function that adds the rest
        if not any(pattern.fullmatch(shown) for pattern in _paths()):
            yield f"there is no route {shown}"


def _catalog(text: str) -> Iterator[str]:
    """Check a block that is a catalog file, or the end of one."""
    from gpuspawner.catalog.parser import parse
    from gpuspawner.core.config_files import read_yaml
    from gpuspawner.core.errors import ConfigError

    if not re.search(r"^environments:", text, re.M):
        return
    try:
        data, origin = read_yaml(text, "this catalog", None)
        parse(data, origin)
    except ConfigError as error:
        yield str(error)
