"""Names that members give to folders: in any script, and never a path."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from ..core.errors import InvalidRequest

LONGEST = 60
"""Characters: encoded as UTF-8 with a suffix for equal names, it is still a valid file name."""

_SIGNS = " _-.,()+&'"
_JOINERS = "\u200c\u200d"
"""Joiners that Persian and the scripts of India need."""


def check_name(text: object, field: str = "name") -> str:
    """Return a valid folder name. Raises InvalidRequest saying what is wrong with it."""
    if not isinstance(text, str):
        raise InvalidRequest(f"The field {field!r} is text.", field=field)
    name = unicodedata.normalize("NFC", text).strip(" ")
    if not name:
        raise InvalidRequest(f"The field {field!r} is empty: give the folder a name.", field=field)
    longest = max(len(name), len(text))
    if longest > LONGEST:
        raise InvalidRequest(
            f"The field {field!r} has {longest} characters; the maximum is {LONGEST}.", field=field
        )
    wrong = next((character for character in name if not _may_stand(character)), "")
    if wrong or not _may_begin(name[0]) or name[-1] in _JOINERS:
        what = f"{wrong!r} may not be in it" if wrong else "it begins with a letter or a digit"
        raise InvalidRequest(
            f"The field {field!r} is not a name for a folder: {what}. Letters and digits of any "
            f"script are fine, and {' '.join(_SIGNS.strip())} between them.",
            field=field,
        )
    return name


def told_apart(folders: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return each folder's name inside a server, by id; the first of equal names keeps its name.

    The folders are pairs of id and name.
    """
    taken: set[str] = set()
    called = {}
    for folder_id, name in folders:
        labels = (name, f"{name} ({folder_id[:8]})", folder_id)
        label = next((some for some in labels if _same(some) not in taken), folder_id)
        taken.add(_same(label))
        called[folder_id] = label
    return called


def is_same(one: str, other: str) -> bool:
    """Return True if people would mistake two names for the same."""
    return _same(one) == _same(other)


def _same(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def _may_stand(character: str) -> bool:
    is_mark = unicodedata.category(character)[0] == "M"
    return _may_begin(character) or is_mark or character in _SIGNS + _JOINERS


def _may_begin(character: str) -> bool:
    return unicodedata.category(character)[0] in "LN" or unicodedata.category(character) == "So"
