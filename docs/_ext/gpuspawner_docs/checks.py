"""Checks of the code in pages, in blocks and in sentences, against gpuspawner itself.

The build calls :func:`problems_in` for all code of every page, generated pages included; the tests
call it for the code in the sources of the pages.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any
from unittest import mock

import click
import jupyterhub_idle_culler
import yaml
from dockerspawner import DockerSpawner
from jupyterhub.app import JupyterHub
from jupyterhub.auth import Authenticator
from jupyterhub.proxy import ConfigurableHTTPProxy
from jupyterhub.spawner import Spawner
from traitlets import TraitError
from traitlets.config import Config, Configurable
from traitlets.config.loader import LazyConfigValue

from gpuspawner.catalog.loader import Catalog
from gpuspawner.cli.app import application
from gpuspawner.cli.command import Invocation
from gpuspawner.config import RENAMED
from gpuspawner.core.scopes import CUSTOM_SCOPES
from gpuspawner.notifications import channels
from gpuspawner.slurm.cluster import cluster_of
from gpuspawner.web.app import ROUTES
from gpuspawner.web.openapi import document

from .commands import context_of
from .operations import REPO
from .settings import configurables

TEXT = ""
"""The language of code in a sentence."""
UNCHECKED = "text"
"""The language of output, and of files of other programs."""

SETTING = re.compile(r"\bc\.([A-Z]\w+)\.(\w+)")
SCOPE = re.compile(r"custom:gpuspawner:[a-z:]*[a-z]")
FILE = re.compile(r"(?<![\w/.-])((?:benchmarks|hub_config|images|scripts)/[\w./*-]*[\w*])")
TARGET = re.compile(r"^make ([a-z]+)\b", re.MULTILINE)
ROUTE = re.compile(r"(?:/services/gpu/api|\$API|\b[A-Z]+ api)(/[\w/:${}.-]*[\w}])")


def problems_in(text: str, language: str = TEXT) -> Iterator[str]:
    """Yield a sentence for each thing in a text that does not exist or would be refused."""
    for section, name in SETTING.findall(text):
        yield from _setting(section, name)
    for scope in SCOPE.findall(text):
        if scope not in CUSTOM_SCOPES:
            yield f"there is no scope {scope}"
    for file in FILE.findall(text):
        if not any(REPO.glob(file)):
            yield f"there is no file {file}"
    if text.startswith("#!"):
        language = "shell"
    if language in CHECKS:
        try:
            yield from CHECKS[language](text)
        except Exception as error:  # what a mistake raises in the code that reads it
            yield f"not accepted: {error}"
    elif language != UNCHECKED:
        yield f"nothing checks a block of {language}"


# Settings.


OTHERS = [JupyterHub, Authenticator, ConfigurableHTTPProxy, Spawner, DockerSpawner]
if hasattr(jupyterhub_idle_culler, "IdleCuller"):  # 1.4 has none
    OTHERS.append(jupyterhub_idle_culler.IdleCuller)
NOT_INSTALLED = frozenset(("KubeSpawner",))
"""Classes that a page names to say what replaces their settings."""

READ: Mapping[str, Callable[[Any], object]] = {
    "GPUCredits": lambda section: section.policies,
    "GPUHealth": lambda section: section.read_policy(),
    "GPUIdle": lambda section: section.read_policies(),
    "GPUNotifications": lambda section: (
        section.channels and channels.read(section.channels, section.default_channels)
    ),
    "GPUQueue": lambda section: section.make_scheduler(),
    "GPURates": lambda section: section.read(),
}
"""How the code reads a section whose values have a form of their own."""


@cache
def sections() -> dict[str, type[Configurable]]:
    """Return every class that a configuration may name."""
    return {**configurables(), **{cls.__name__: cls for cls in OTHERS}}


def _setting(section: str, name: str) -> Iterator[str]:
    if section in NOT_INSTALLED or f"{section}.{name}" in RENAMED:
        return
    if section not in sections():
        yield f"there is no class {section} with settings"
    elif name not in sections()[section].class_trait_names(config=True):
        yield f"there is no setting c.{section}.{name}"


class _Environment(dict[str, str]):
    """Has every variable."""

    def __missing__(self, name: str) -> str:
        return name


def is_configuration(text: str) -> bool:
    """Return True if Python is a part of ``jupyterhub_config.py``."""
    return bool(re.search(r"^(c\.[A-Z]|load_subconfig)", text, re.MULTILINE))


def _python(text: str) -> Iterator[str]:
    code = compile(text, "<page>", "exec")
    if not is_configuration(text):
        return  # of a notebook
    config, files = Config(), list[str]()
    with mock.patch.object(os, "environ", _Environment(os.environ)):
        exec(code, {"c": config, "load_subconfig": files.append})
    yield from (
        f"there is no hub_config/{f}" for f in files if not (REPO / "hub_config" / f).exists()
    )
    for section, values in config.items():
        if cls := sections().get(section):
            yield from _values(cls, values)


def _values(cls: type[Configurable], values: Config) -> Iterator[str]:
    bare: Any = cls.__new__(cls)  # reads and starts nothing
    traits = cls.class_traits(config=True)
    for name, value in values.items():
        if name in traits and not isinstance(value, LazyConfigValue):  # one that is added to
            try:
                traits[name]._validate(bare, value)
            except TraitError as error:
                yield f"c.{cls.__name__}.{name}: {error}"
    if cls.__name__ in READ:
        READ[cls.__name__](cls(config=Config({cls.__name__: values})))


# Commands.


HEREDOC = re.compile(r"<<-?\s*'?(\w+)'?")
ENDS = frozenset(("&&", "||", "|", ";", "(", ")", "&"))
REDIRECTIONS = frozenset((">", ">>", "<", "<<"))


def _console(text: str) -> Iterator[str]:
    """Check what is typed after the prompts."""
    lines = text.replace("\\\n", " ").splitlines()
    yield from _typed("\n".join(line[2:] for line in lines if line.startswith(("$ ", "# "))))


def _shell(text: str) -> Iterator[str]:
    """Check that Bash reads a script to its end, and what it calls."""
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    if done.stderr:
        yield f"Bash: {done.stderr.strip()}"
    else:
        yield from _typed(text)


def _typed(text: str) -> Iterator[str]:
    yield from _make(text)
    for line in lines_of(text):
        for arguments in calls_in(line):
            yield from _call(arguments)
        yield from _requests(line)


def lines_of(text: str) -> list[str]:
    """Return commands, each on one line, without the documents that they are given."""
    found: list[str] = []
    until = ""
    for line in text.replace("\\\n", " ").splitlines():
        if until:
            until = "" if line.strip() == until else until
            continue
        if found and _is_open(found[-1]):
            found[-1] += f"\n{line}"
        else:
            found.append(line)
        if heredoc := HEREDOC.search(line):
            until = heredoc[1]
    return found


def _is_open(line: str) -> bool:
    """Return True if a quotation goes on in the next line."""
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


def calls_in(line: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of ``gpuspawner`` in a command line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in ENDS:
            words.append(word)
            continue
        if (at := _program_at(words)) is not None:
            arguments = words[at + 1 :]
            cut = next((i for i, w in enumerate(arguments) if w in REDIRECTIONS), None)
            yield arguments[:cut]
        words = []


def _program_at(words: Sequence[str]) -> int | None:
    """Return where ``gpuspawner`` is called; elsewhere it is a user, a unit or a network."""
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        by_name = at == 0 or before in ("hub", "sudo") or (words[0] == "ssh" and at == 2)
        by_path = word.endswith("/bin/gpuspawner") and before not in (*REDIRECTIONS, "755", "rm")
        if by_path or (word == "gpuspawner" and by_name):
            return at
    return None


def _call(arguments: Sequence[str]) -> Iterator[str]:
    """Yield why ``gpuspawner`` would refuse these arguments."""
    if arguments == ["--version"]:
        return
    if not arguments:
        yield "gpuspawner without a command"
    command: click.Command = application
    context, rest = context_of(application, obj=Invocation()), list(arguments)
    try:
        while isinstance(command, click.Group) and rest:
            name, found, rest = command.resolve_command(context, rest)
            assert found is not None
            command = found
            context = command.make_context(name, list(rest), parent=context)
            rest = [*getattr(context, "_protected_args", ()), *context.args]
    except click.ClickException as error:
        yield f"gpuspawner {shlex.join(arguments)}: {error.format_message()}"


def _named(arguments: Sequence[str]) -> Iterator[str]:
    """Yield what does not exist of a command and its options; its arguments may be missing."""
    command: click.Command = application
    context, rest = context_of(application, obj=Invocation()), list(arguments)
    try:
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            _, found, rest = command.resolve_command(context, rest)
            assert found is not None
            command = found
    except click.ClickException as error:
        if not any(isinstance(param, click.Argument) for param in command.params):
            yield f"gpuspawner {shlex.join(arguments)}: {error.format_message()}"
            return
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for word in rest:
        option = word.partition("=")[0]
        if re.match(r"--?[a-z]", option) and option not in {*known, "-h", "--help"}:
            yield f"gpuspawner {shlex.join(arguments)}: no option {option}"


def _sentence(text: str) -> Iterator[str]:
    if text.startswith("gpuspawner "):
        for arguments in calls_in(text):
            yield from _named(arguments)
    yield from _make(text)
    for path in ROUTE.findall(text):
        if not _methods(path):
            yield f"there is no route api{path}"


def _make(text: str) -> Iterator[str]:
    for target in TARGET.findall(text):
        if target not in _targets():
            yield f"there is no target: make {target}"


@cache
def _targets() -> frozenset[str]:
    text = (REPO / "Makefile").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^(\w+):", text, re.MULTILINE))


# REST.


@cache
def _api() -> dict[str, Any]:
    """Return the OpenAPI document of a hub that sends mail, as the pages assume."""
    return document("/services/gpu/", [handler for _, handler in ROUTES], ["mail"])


def _methods(path: str) -> dict[str, Any]:
    """Return the operations of a path below ``api``, by method; none if there is no such path."""
    for known, methods in _api()["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", known), f"/api{path}"):
            return methods
    return {}


def _requests(line: str) -> Iterator[str]:
    """Yield each path, method and field in a call of curl that the service does not have."""
    words = shlex.split(line, comments=True)
    starts = [at for at, word in enumerate(words) if word == "curl"]
    for start, end in pairwise([*starts, len(words)]):
        call = words[start:end]
        usual = "post" if "-d" in call else "get"
        method = call[call.index("-X") + 1].lower() if "-X" in call else usual
        for path in ROUTE.findall(" ".join(call)):
            if (operation := _methods(path).get(method)) is None:
                yield f"there is no route {method.upper()} api{path}"
            else:
                sent = json.loads(call[call.index("-d") + 1]) if "-d" in call else {}
                unknown = set(sent) - _fields(operation)
                yield from (f"{method.upper()} api{path} has no field {f}" for f in unknown)


def _fields(operation: Mapping[str, Any]) -> set[str]:
    if "requestBody" not in operation:
        return set()
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    return set(_api()["components"]["schemas"][name]["properties"])


# Files.


def _yaml(text: str) -> Iterator[str]:
    written = yaml.safe_load(text)
    if "environments" in written:
        Catalog.from_text(text)
    elif "nodes" in written:
        cluster_of(text)
    elif "scrape_configs" not in written:
        yield "neither a catalog, nor a cluster file, nor Prometheus's: nothing checks it"


def _json(text: str) -> Iterator[str]:
    json.loads(text)
    yield from ()


def _ini(text: str) -> Iterator[str]:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read_string(text)
    for section in {*unit.sections()} - {"Unit", "Service"}:
        yield f"a unit of systemd has no section {section} here"


CHECKS: Mapping[str, Callable[[str], Iterator[str]]] = {
    TEXT: _sentence,
    "console": _console,
    "sh": _shell,
    "shell": _shell,
    "python": _python,
    "yaml": _yaml,
    "json": _json,
    "ini": _ini,
}
"""What checks a block, by its language."""
