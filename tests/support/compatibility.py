"""What docs/compatibility.md says, as tests read it, and what older versions lack."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jupyterhub

from tests.support.processes import REPO

PAGE = REPO / "docs" / "compatibility.md"

HUB_6 = jupyterhub.version_info >= (6,)
"""JupyterHub 5 has no button on the page of a pending start, and no request that changes the stored
options of a server."""


@dataclass(frozen=True)
class Setting:
    """A row on one setting of an upstream class."""

    name: str
    status: str
    """``kept`` or ``changed``."""
    how: str
    off: str


@dataclass(frozen=True)
class InContainer:
    """A row on what differs in ``docker inspect``."""

    keys: frozenset[str]
    """Such as ``HostConfig.Memory``."""
    off: str

    @property
    def always(self) -> bool:
        """Return True if nothing switches it off."""
        return self.off == "cannot be"


def setting_rows(class_name: str) -> list[Setting]:
    """Return the rows of the table whose first title is "setting of ``class_name``"."""
    rows = _table(f"setting of {class_name}")
    return [Setting(_code(row[0])[0], row[1], row[2], row[3]) for row in rows]


def container_rows() -> list[InContainer]:
    """Return the rows on what differs in a container."""
    rows = _table("`docker inspect`")
    return [InContainer(frozenset(_code(row[0])), row[3]) for row in rows]


def _table(title: str) -> list[list[str]]:
    """The cells below the title row that begins so."""
    text = PAGE.read_text(encoding="utf-8")
    _, found, below = text.partition(f"| {title} |")
    assert found, f"there is no table of {title!r}"
    lines = below.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
