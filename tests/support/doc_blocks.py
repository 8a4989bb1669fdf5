"""The pages of docs as their readers use them: blocks of code, commands, settings, links, files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from traitlets import HasTraits
from traitlets.config import Config

from gpuspawner.cli.app import application
from gpuspawner.cli.command import Invocation
from tests.support.processes import REPO

DOCS = REPO / "docs"

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"[$#] ")
_HEREDOC = re.compile(r"<<-?\s*'?(\w+)'?")
_ENDS = frozenset(("&&", "||", "|", ";", "(", ")", "&"))
_REDIRECTIONS = frozenset((">", ">>", "<", "<<"))


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(DOCS)}: {self.text.strip().splitlines()[0]}"


def pages(*folders: str) -> list[Path]:
    """Return the pages of these folders of docs, without index pages."""
    found = [page for folder in folders for page in (DOCS / folder).glob("*.md")]
    return sorted(page for page in found if page.stem != "index")


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the page's blocks in these languages, in order; those in lists without indentation."""
    found = []
    for indent, language, text in _FENCE.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            lines = (line.removeprefix(indent) for line in text.splitlines())
            found.append(Block(page, language, "\n".join(lines) + "\n"))
    return found


def sections(page: Path) -> dict[str, str]:
    """Return the text below each heading of the second level."""
    parts = re.split(r"^## (.+)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def prose(page: Path) -> str:
    """Return the page without its blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    """Return what the page has between backticks, outside of its blocks."""
    return [one or other for one, other in re.findall(r"``(.+?)``|`([^`]+)`", prose(page))]


# Commands.


def command_lines(block: Block) -> list[str]:
    """Return the commands of a block, each on one line, without prompts, output and documents."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if _PROMPT.match(line)]
    found: list[str] = []
    until = ""
    for line in lines:
        if until:
            until = "" if line.strip() == until else until
            continue
        if found and _is_open(found[-1]):
            found[-1] += f"\n{line}"
        else:
            found.append(line)
        if heredoc := _HEREDOC.search(line):
            until = heredoc[1]
    return found


def _is_open(line: str) -> bool:
    """Return True if a quotation goes on in the next line."""
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


def calls(line: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of ``gpuspawner`` in a command line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in _ENDS:
            words.append(word)
            continue
        if (at := _program_at(words)) is not None:
            arguments = words[at + 1 :]
            cut = next((i for i, w in enumerate(arguments) if w in _REDIRECTIONS), None)
            yield arguments[:cut]
        words = []


def _program_at(words: Sequence[str]) -> int | None:
    """Return where ``gpuspawner`` is called; elsewhere it is a user, a unit or a network."""
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        by_name = at == 0 or before == "hub" or (words[0] == "ssh" and at == 2)
        by_path = word.endswith("/bin/gpuspawner") and before not in (*_REDIRECTIONS, "755")
        if by_path or (word == "gpuspawner" and by_name):
            return at
    return None


def problem_of_call(arguments: Sequence[str]) -> str:
    """Return why ``gpuspawner`` would refuse these arguments; empty if it takes them."""
    if arguments[:1] == ["--version"]:
        return ""
    command: click.Command = application
    context, rest = click.Context(application, obj=Invocation()), list(arguments)
    try:
        while isinstance(command, click.Group) and rest:
            name, found, rest = command.resolve_command(context, rest)
            assert found is not None
            command = found
            context = command.make_context(name, list(rest), parent=context)
            rest = [*getattr(context, "_protected_args", ()), *context.args]
    except click.ClickException as error:
        return f"gpuspawner {shlex.join(arguments)}: {error.format_message()}"
    return ""


def named_calls(page: Path) -> Iterator[list[str]]:
    """Yield the commands that the page names in a sentence."""
    for span in spans(page):
        if span.startswith("gpuspawner "):
            yield from calls(span)


def problem_of_named_call(arguments: Sequence[str]) -> str:
    """Return what does not exist of a command and its options, whose arguments may be missing."""
    command: click.Command = application
    context = click.Context(application, obj=Invocation())
    rest = list(arguments)
    try:
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            _, found, rest = command.resolve_command(context, rest)
            assert found is not None
            command = found
    except click.ClickException as error:
        if command is application or not isinstance(command, click.Group):
            return error.format_message()
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    unknown = {word for word in rest if re.match(r"--?[a-z]", word)} - known - {"--help"}
    return f"gpuspawner {shlex.join(arguments)}: no {unknown}" if unknown else ""


# Settings.


@dataclass
class LoadedBlock:
    """What a block of configuration sets."""

    config: Config
    files: list[str]
    """What it loads beside."""


def load_settings(block: Block) -> LoadedBlock:
    """Run a block of ``jupyterhub_config.py``."""
    loaded = LoadedBlock(Config(), [])
    names: dict[str, Any] = {"c": loaded.config, "load_subconfig": loaded.files.append}
    exec(compile(block.text, str(block), "exec"), names)
    return loaded


def is_configuration(block: Block) -> bool:
    """Return True for a block of ``jupyterhub_config.py``, and not of a notebook or a class."""
    return re.search(r"^(c\.[A-Z]|load_subconfig)", block.text, re.MULTILINE) is not None


def unknown_settings(config: Config, classes: Sequence[type[HasTraits]]) -> list[str]:
    """Return the settings that no class has: JupyterHub only warns of a misspelt one."""
    known = {cls.__name__: cls for cls in classes}
    return [
        f"c.{section}.{name}"
        for section, settings in config.items()
        for name in settings
        if section not in known or name not in known[section].class_trait_names(config=True)
    ]


def named_settings(page: Path) -> set[tuple[str, str]]:
    """Return section and name of each setting that the page names in a sentence."""
    return set(re.findall(r"\bc\.([A-Z]\w+)\.(\w+)", " ".join(spans(page))))


# Links and files.


def broken_links(page: Path) -> list[str]:
    """Return the page's links to files that are not there."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose(page))
    return [
        target
        for target in targets
        if "://" not in target and not (page.parent / target).resolve().is_file()
    ]


def repository_files(page: Path, *folders: str) -> set[str]:
    """Return the files of these folders of the repository that the page names."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(rf"(?<![\w/.-])((?:{'|'.join(folders)})/[\w./*-]*[\w*])", text)
    return {name.rstrip(".") for name in found}
