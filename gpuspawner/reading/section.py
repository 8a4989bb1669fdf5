"""Reading plain values strictly: a :class:`Section` takes a mapping apart key by key.

A key of the wrong type, and any key that nobody took, is a
:class:`~gpuspawner.errors.ConfigError` that names the file and the line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any, TypeVar

from ..errors import ConfigError
from .origin import Origin, Path, shown

T = TypeVar("T")

_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
MOST_COMPARED = 500
"""Names that a misspelt word is held against; it is somebody who waits for the answer."""
MOST_NAMED = 30
"""Names in one sentence."""
_LEAST_SIZE = 1_000_000
_MOST_SIZE = 2**60
MOST_WHOLE = 1_000_000
MOST_NUMBER = 10**15
_MISSING: Any = object()


class Section:
    """A mapping that is read key by key; what nobody asked for is an unknown key."""

    def __init__(self, data: object, origin: Origin, path: Path, label: str) -> None:
        self.origin = origin
        self.path = path
        self.label = label
        """What people call this section, such as ``environment 'base'``."""
        if not isinstance(data, Mapping):
            raise origin.error(
                path, f"{label} is {shown(data)}, not a mapping. Write it as 'key: value' lines."
            )
        self.data = data
        self.known: list[str] = []

    def error(self, key: str, message: str) -> ConfigError:
        """A ConfigError about ``key``, or about the section itself when it has no such key."""
        return self.origin.error((*self.path, key), message)

    def take(self, key: str, kind: Callable[[object], T], default: T = _MISSING) -> T:
        """The value of ``key`` as ``kind`` makes it; ``default`` when the key is absent.

        ``kind`` raises ValueError with the end of a sentence that begins with the key.
        """
        self.known.append(key)
        if key not in self.data:
            if default is _MISSING:
                raise self.missing(key)
            return default
        value = self.data[key]
        if value is None:
            raise self.error(
                key, f"'{key}' of {self.label} has no value. Write one, or leave the key out."
            )
        try:
            return kind(value)
        except ValueError as error:
            raise self.error(key, f"'{key}' of {self.label} {error}") from None

    def missing(self, key: str) -> ConfigError:
        """A ConfigError for a required key, which may be there under a misspelt name."""
        strings = [other for other in self.data if isinstance(other, str)]
        for slip in difflib.get_close_matches(key, strings, n=1, cutoff=0.75):
            return self.error(slip, f"{self.label} has no '{key}'. Did you misspell it {slip!r}?")
        return self.error(key, f"{self.label} has no '{key}'. Add it.")

    def sections(self, key: str, label: str) -> Iterator[tuple[str, Section]]:
        """The named sections of an optional mapping of mappings."""
        empty: dict[str, Any] = {}
        names = self.take(key, mapping, empty)
        for name, data in names.items():
            yield name, Section(data, self.origin, (*self.path, key, name), f"{label} {name!r}")

    def done(self) -> None:
        """Raises ConfigError for the first key that nobody took."""
        for key in self.data:
            if key not in self.known:
                raise self.error(
                    str(key),
                    f"{self.label} has an unknown key {key!r}. {suggest(str(key), self.known)}",
                )


# Kinds of values, for Section.take.


def text(value: object) -> str:
    """Text that is not empty, without the white space around it."""
    if not isinstance(value, str):
        raise ValueError(f"is {shown(value)}, not text. Put it in quotes.")
    if not value.strip():
        raise ValueError("is empty. Write something, or leave the key out.")
    return value.strip()


def whole(value: object) -> int:
    """A whole number of at least zero."""
    if type(value) is not int or value < 0:
        raise ValueError(f"is {shown(value)}, not a whole number. Write one such as 1.")
    if value > MOST_WHOLE:
        raise ValueError(f"is {shown(value)}; {MOST_WHOLE} is the most. Write less.")
    return value


def positive(value: object) -> float:
    """A number above zero."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
    if not 0 < number < MOST_NUMBER:
        raise ValueError(f"is {shown(value)}, not a number above zero. Write one such as 2.5.")
    return float(number)


def truth(value: object) -> bool:
    """``true`` or ``false``."""
    if not isinstance(value, bool):
        raise ValueError(f"is {shown(value)}. Write true or false.")
    return value


def size(value: object) -> int:
    """Bytes, or text with a unit in powers of 1024 as in JupyterHub: ``8G``."""
    return _size(value, 1024)


def device_memory(value: object) -> int:
    """Bytes, or text with a unit as makers of GPUs count (``24G``: 24 x 1000^3).

    A 24 GB card reports a little less than 24 x 1024^3 bytes, and ``24G`` has to mean it.
    ``Gi`` counts in powers of 1024.
    """
    return _size(value, 1000)


def _size(value: object, base: int) -> int:
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    count = value if type(value) is int else 0
    if match and not (match[3] and not match[2]):
        factor = (1024 if match[3] else base) ** _POWERS[match[2].upper()]
        count = int(float(match[1]) * factor)
    if count <= 0:
        raise ValueError(f"is {shown(value)}, not a size. Write one such as 8G or 512M.")
    if count < _LEAST_SIZE:
        raise ValueError(f"is {shown(value)}: less than 1M. Write a unit, such as 8G or 512M.")
    if count > _MOST_SIZE:
        raise ValueError(f"is {shown(value)}: more than any machine has. Write less.")
    return count


def mapping(value: object) -> dict[str, Any]:
    """A mapping whose keys are text."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"is {shown(value)}, not a mapping. Write it as 'key: value' lines.")
    return dict(value)


def texts(value: object) -> tuple[str, ...]:
    """A list of different, non-empty texts."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"is {shown(value)}, not a list. Write it as [one, another].")
    found: list[str] = []
    for item in value:
        if not isinstance(item, str) or not item.strip():
            raise ValueError(f"holds {shown(item)}, which is no text. Put it in quotes.")
        if item.strip() in found:
            raise ValueError(f"names {item.strip()!r} twice. Keep one of them.")
        found.append(item.strip())
    return tuple(found)


# Words for people.


def suggest(word: str, known: Iterable[str], what: str = "Known") -> str:
    """``Did you mean 'image'?``, or else what there is; of very many only some."""
    names = list(known)
    word = word.lower()[:100]
    alike = names
    if len(names) > MOST_COMPARED:  # those that begin as it does
        alike = sorted(names, key=lambda name: -_alike(name, word))[:MOST_COMPARED]
    close = difflib.get_close_matches(word, alike, n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(repr(name) for name in close)}?"
    if not names:
        return "There is none."
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{what}: {', '.join(names[:MOST_NAMED])}{more}."


def _alike(one: str, other: str) -> int:
    """How many characters two words begin with alike."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
