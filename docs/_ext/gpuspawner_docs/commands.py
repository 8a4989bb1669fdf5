"""The command line: every command with its arguments and options, from click's own objects."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import click

from .page import Generated, plain, refer, table

COMMON = frozenset(("config", "database", "json", "debug"))
"""The options of every command that works on a hub."""


def context_of(command: click.Command, name: str | None = None, **options: Any) -> click.Context:
    """Return the context in which a command is described, with the settings of the real one.

    click keeps a command's help option as it was in the first context, in this whole process.
    """
    from gpuspawner.cli.app import application

    return click.Context(command, info_name=name, **application.context_settings, **options)


@cache
def commands() -> dict[str, click.Command]:
    """Return every command by its words, in the order of the help: ``queue move``."""
    from gpuspawner.cli.app import application

    found: dict[str, click.Command] = {}

    def add(words: tuple[str, ...], command: click.Command) -> None:
        loaded = command.load() if hasattr(command, "load") else command
        found[" ".join(words)] = loaded
        if isinstance(loaded, click.Group):
            for name in loaded.list_commands(context_of(loaded)):
                add((*words, name), loaded.commands[name])

    for name in application.list_commands(context_of(application)):
        add((name,), application.commands[name])
    return found


def _takes_common(command: click.Command) -> bool:
    return {param.name for param in command.params} >= COMMON


def _usage(words: str, command: click.Command) -> str:
    with context_of(command, words) as context:
        return " ".join([f"gpuspawner {words}", *command.collect_usage_pieces(context)])


def _options(command: click.Command) -> Iterator[tuple[str, str]]:
    context = context_of(command)
    for param in command.params:
        if not isinstance(param, click.Option) or param.hidden:
            continue
        if param.name in COMMON and _takes_common(command):
            continue
        names, told = param.get_help_record(context) or ("", "")
        yield f"`{names}`", plain(told.replace("  [", " ["))


def _arguments(command: click.Command) -> Iterator[tuple[str, str]]:
    context = context_of(command)
    for param in command.get_params(context):
        if isinstance(param, click.Argument):
            told = getattr(param, "help", None) or ""
            yield f"`{param.make_metavar(context)}`", plain(told)


class Commands(Generated):
    """``{commands}``: a section for each command."""

    def markdown(self) -> Iterator[str]:
        """Yield the sections."""
        for words, command in commands().items():
            level = words.count(" ") + 1
            yield from self.heading(level, "command", words, f"`gpuspawner {words}`")
            yield plain((command.help or "").strip())
            yield from ("", "````text", _usage(words, command), "````", "")
            yield from table(("Argument", "Meaning"), _arguments(command))
            yield from table(("Option", "Meaning"), _options(command))


class CommonOptions(Generated):
    """``{common-options}``: what almost every command takes."""

    def markdown(self) -> Iterator[str]:
        """Yield the options, after the commands that do not take them."""
        without = [words for words, command in commands().items() if not _takes_common(command)]
        names = ", ".join(refer("command", words, f"gpuspawner {words}") for words in without)
        yield f"All commands except {names} take these options:"
        command = next(each for each in commands().values() if _takes_common(each))
        context = context_of(command)
        rows = []
        for param in command.params:
            record = param.get_help_record(context)
            if param.name in COMMON and record:
                rows.append((f"`{record[0]}`", plain(record[1])))
        yield from table(("Option", "Meaning"), rows)
        yield "Every command takes `-h` or `--help`, which shows its help."


class CommandTable(Generated):
    """``{command-table}``: the commands of the first level."""

    def markdown(self) -> Iterator[str]:
        """Yield the table."""
        rows = (
            (refer("command", words, f"gpuspawner {words}"), plain(command.help or ""))
            for words, command in commands().items()
            if " " not in words
        )
        yield from table(("Command", "What it does"), rows)
