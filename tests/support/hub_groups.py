"""Which files of tests share a hub: those whose module says ``SHARED_HUB = "name"`` alike."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

_DECLARED = re.compile(r'^SHARED_HUB = "(\w+)"$', re.MULTILINE)


@functools.cache
def group_of(file: Path) -> str:
    """Return the group that a file of tests declares; empty when it shares no hub.

    It is read and not imported: the process that hands out the files imports none of them.
    """
    found = _DECLARED.search(file.read_text(encoding="utf-8"))
    return found[1] if found else ""


def order_of(items: Iterable[pytest.Item]) -> dict[str, int]:
    """Return the place of each file and of each group, by the first of its tests."""
    order: dict[str, int] = {}
    for item in items:
        order.setdefault(scope_of(item), len(order))
    return order


def scope_of(item: pytest.Item) -> str:
    """Return what stays together with this test: its group, or else its file."""
    return group_of(item.path) or str(item.path)
