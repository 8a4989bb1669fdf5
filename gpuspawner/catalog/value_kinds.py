"""Kinds of values of a catalog, for ``Section.take``: each raises ValueError with the end of a
sentence that begins with the key."""

from __future__ import annotations

import posixpath
import re
from datetime import date, datetime
from typing import Any
from urllib.parse import quote, urlsplit

from ..core.config_files import positive, shown, text, texts

WORKSPACE = "/home/jovyan/work"
"""Where every server finds the member's workspace."""

MOST_HOURS = 8760
"""The longest session that anything may ask for or allow: a year."""

MOST_LINE = 200
"""Characters of a text of one line."""
MOST_TEXT = 20_000
"""Characters of a text of many lines."""
MOST_NAMED = 50
"""Frameworks, or links, of one environment."""

FIRST_PAGES = {"lab": "/lab", "notebook": "/tree", "vscode": "/vscode/"}
"""Where a server opens, by what ``first_page`` calls it."""

_JOINERS = {0x200C: None, 0x200D: None}
"""Not printed, but part of how some scripts are written."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
SLUG = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
IMAGE = (
    r"[A-Za-z0-9](?:[A-Za-z0-9_./-]|:(?=[0-9]+/))*"  # a host with its port, and the name
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
DAY = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
VERSION = r"[0-9]{1,9}(?:\.[0-9]{1,9}){0,3}"

_RESERVED_TARGETS = (WORKSPACE, "/proc", "/sys", "/dev")


def line(value: object) -> str:
    """Text of one line, of at most MOST_LINE characters, that can be printed."""
    found = text(value)
    if not found.translate(_JOINERS).isprintable():
        raise ValueError(
            f"is {shown(found)}, with a line break or a control character. Write one plain line."
        )
    if len(found) > MOST_LINE:
        raise ValueError(f"has {len(found)} characters; {MOST_LINE} are the most. Shorten it.")
    return found


def long_text(value: object) -> str:
    """Text of many lines, of at most MOST_TEXT characters."""
    found = text(value)
    if len(found) > MOST_TEXT:
        raise ValueError(f"has {len(found)} characters; {MOST_TEXT} are the most. Shorten it.")
    return found


def version(value: object) -> str:
    """A version in numbers, such as ``550.54``; as text, for 12.10 is not 12.1."""
    found = text(value)
    if not re.fullmatch(VERSION, found):
        raise ValueError(f"is {shown(found)}, not a version. Write one such as '12.4'.")
    return found


def day(value: object) -> date:
    """A date such as ``2026-05-31``."""
    found = value
    if isinstance(value, str):  # which newer Pythons would read in other forms too
        try:
            found = date.fromisoformat(value) if re.fullmatch(DAY, value) else None
        except ValueError:
            found = None
    if not isinstance(found, date) or isinstance(found, datetime):
        raise ValueError(f"is {shown(value)}, not a date. Write one such as 2026-05-31.")
    return found


def sharing(value: object) -> str:
    """``whole``."""
    if value == "shared":
        raise ValueError(
            "is 'shared', but GPUs are only given out whole so far. Write whole, or leave it out."
        )
    if value != "whole":
        raise ValueError(f"is {shown(value)}. Write whole, or leave it out.")
    return str(value)


def hours(value: object) -> float:
    found = positive(value)
    if found > MOST_HOURS:
        raise ValueError(f"is {shown(value)} hours; {MOST_HOURS}, a year, is the most.")
    return found


def slug(value: object) -> str:
    found = text(value)
    if not re.fullmatch(SLUG, found):
        raise ValueError(
            f"is {shown(found)}. Use up to 63 lowercase letters, digits and '-', such as "
            "'pytorch-2'."
        )
    return found


def image(value: object) -> str:
    found = text(value)
    if not re.fullmatch(IMAGE, found):
        raise ValueError(
            f"is {shown(found)}, not the name of an image. Write it as registry/name:tag, or with "
            "its digest as registry/name:tag@sha256:..."
        )
    return found


def models(value: object) -> tuple[str, ...]:
    found = texts(value)
    for model in found:
        if not re.search(r"[A-Za-z0-9]", model):
            raise ValueError(
                f"holds {model!r}, which names no device model. Leave 'models' out to allow any."
            )
    if not found:
        raise ValueError("is empty. Leave it out to allow any model.")
    return found


def groups(value: object) -> frozenset[str]:
    found = texts(value)
    if not found:
        raise ValueError("is empty, so nobody is allowed. Leave it out to allow everyone.")
    return frozenset(found)


def server_path(value: object) -> str:
    """A path of the server, such as ``/lab``."""
    found = text(value)
    parts = found.split("/")
    if not found.startswith("/") or found.startswith("//") or "\\" in found or ".." in parts:
        raise ValueError(f"is {shown(found)}. Write a path that starts with one '/', such as /lab.")
    return found


def first_page(value: object) -> str:
    """The path of the page that ``lab``, ``notebook``, ``vscode`` or a file's name means."""
    found = line(value)
    if found in FIRST_PAGES:
        return FIRST_PAGES[found]
    if "." not in found:  # a slip for one of the above, rather than a file
        raise ValueError(
            f"is {shown(found)}. Write {', '.join(FIRST_PAGES)}, or a file such as "
            "work/intro.ipynb."
        )
    return "/lab/tree/" + quote(plain_path(found))


def plain_path(value: object) -> str:
    """A relative path without ``..``, in one way of writing it."""
    found = line(value)
    parts = found.split("/")
    if found.startswith("/") or "\\" in found or ".." in parts:
        raise ValueError(f"is {shown(found)}. Write a file's name without '..' and a first '/'.")
    path = posixpath.normpath(found)
    if path == ".":
        raise ValueError(f"is {shown(found)}, which names no file. Write the name of one.")
    return path


def url(value: object) -> str:
    """``https://``, ``http://`` or ``mailto:``, or a path on the hub's own host."""
    found = line(value)
    if found.startswith("/"):
        return server_path(found)
    try:
        parts = urlsplit(found)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
        good |= parts.scheme == "mailto" and "@" in parts.path
    except ValueError:
        good = False
    if not good or " " in found or "\\" in found:
        raise ValueError(
            f"is {shown(found)}. Write an address such as https://example.org/guide, or a path of "
            "this host such as /docs."
        )
    return found


def mode(value: object) -> str:
    if value not in ("rw", "ro"):
        raise ValueError(f"is {shown(value)}. Write rw (may be written) or ro (read-only).")
    return str(value)


def source(value: object) -> str:
    """A folder on the host, or the name of a volume."""
    found = text(value)
    if "{" in found or "}" in found:
        raise ValueError(
            f"is {shown(found)}, but names in braces are not filled in here: the source is the "
            "same for everybody. Write the path or volume itself."
        )
    if found.startswith("/"):
        path = "/" + posixpath.normpath(found).lstrip("/")  # which would leave two of them
        if ":" in found or path == "/" or ".." in found.split("/"):
            raise ValueError(f"is {shown(found)}. Write the absolute path of one folder.")
        return path
    if not NAME.fullmatch(found):
        raise ValueError(
            f"is {shown(found)}. Write an absolute path on the host, or the name of a volume."
        )
    return found


def target(value: object) -> str:
    """A path inside the server that hides nothing it needs."""
    found = text(value)
    if not found.startswith("/") or ":" in found or ".." in found.split("/"):
        raise ValueError(f"is {shown(found)}. Write an absolute path such as /datasets/images.")
    found = "/" + posixpath.normpath(found).lstrip("/")
    for reserved in _RESERVED_TARGETS:
        if inside(found, reserved) or inside(reserved, found):
            raise ValueError(
                f"is {shown(found)}, which would hide {reserved}. Choose a path such as "
                "/datasets/images."
            )
    return found


def inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def entries(value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"is {shown(value)}, not a list of environments. Write at least one.")
    return value
