"""Where values come from, and how errors about them quote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as Folder

from ..errors import ConfigError

Path = tuple[str | int, ...]
"""The keys and positions that lead to a value."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where values come from: a name for people, and the line of each value if known."""

    name: str
    lines: Mapping[Path, int] = field(default_factory=dict)
    folder: Folder | None = None
    """Where files that the values name are; None when nobody can say."""

    def error(self, path: Path, message: str) -> ConfigError:
        """A ConfigError about the value at ``path``, or about what encloses it."""
        while path and path not in self.lines:
            path = path[:-1]
        line = self.lines.get(path)
        where = f"{self.name}, line {line}" if line else self.name
        return ConfigError(f"{where}: {message}")


def shown(value: object) -> str:
    """A value as an error quotes it: short, and never a whole tree."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None:
        return "nothing"
    try:
        quoted = str(value).lower() if isinstance(value, bool) else repr(value)
    except ValueError:  # Python writes no number of very many digits
        return "a number of very many digits"
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}..."
