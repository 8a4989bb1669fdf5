"""What commands with words after them share: ``gpuspawner rates set`` and the like."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Work = Callable[..., int]
Add = Callable[[str, Work, str], argparse.ArgumentParser]


def changes_of(command: argparse.ArgumentParser, common: Callable[..., Any]) -> Add:
    """How to add a change to a command: its word, what does it, and its help.

    ``common`` makes the options of every command. What was said before the word holds: only
    what is said after it replaces that.
    """
    actions = command.add_subparsers(title="changes", metavar="CHANGE")

    def add(name: str, work: Work, what: str) -> argparse.ArgumentParser:
        after = common(argument_default=argparse.SUPPRESS)
        sub: argparse.ArgumentParser = actions.add_parser(
            name, help=what, description=what, parents=[after]
        )
        sub.set_defaults(command=work)
        return sub

    return add
