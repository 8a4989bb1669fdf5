"""Types of values in a catalog, each with its check and its JSON Schema.

A check raises ValueError with the end of a sentence that begins with the key.
"""

from __future__ import annotations

import posixpath
import re
from datetime import date, datetime
from typing import Annotated
from urllib.parse import quote, urlsplit

from pydantic import Field

from ..core.config_files import shown
from ..core.config_models import Checked, Schema, list_schema, matching, text, text_schema, texts

WORKSPACE = "/home/jovyan/work"
"""The path of the member's workspace in every server."""

MOST_HOURS = 8760
"""Maximum hours of any session: a year."""

MOST_LINE = 200
"""Maximum number of characters of a text of one line."""
MOST_TEXT = 20_000
"""Maximum number of characters of a text of many lines."""

FIRST_PAGES = {"lab": "/lab", "notebook": "/tree", "vscode": "/vscode/"}
"""Paths at which a server opens, by the name in ``first_page``."""

LOGO_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".svg": "image/svg+xml",
}
"""Media types of logos, by the file's ending. An SVG can contain scripts: it must be served with
``Content-Security-Policy: default-src 'none'; sandbox``, which forbids them."""

_JOINERS = {0x200C: None, 0x200D: None}
"""Unprintable characters that some writing systems need."""
_CONTROL = r"\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069"
_PRINTABLE = rf"^(?=\s*\S)\s*[^{_CONTROL}]*\s*$"
_NO_UP = r"^(?!\s*\.\.(?:/|\s*$))(?!.*/\.\.(?:/|\s*$))(?!.*\\)"
"""The beginning of a pattern for paths without ``..`` and backslashes."""
_SERVER_PATH = text_schema(_NO_UP + r"\s*/(?!/)", examples=["/lab/tree/work"])

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_DAY = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_RESERVED_TARGETS = (WORKSPACE, "/proc", "/sys", "/dev")
_RESERVED_VARIABLES = ("NVIDIA_", "CUDA_", "GPUSPAWNER_", "JUPYTERHUB_")

Hours = Annotated[float, Field(gt=0, le=MOST_HOURS, allow_inf_nan=False)]

LONGEST_SLUG = 63
SLUG_PATTERN = rf"[a-z0-9](?:[a-z0-9-]{{0,{LONGEST_SLUG - 2}}}[a-z0-9])?"
SLUG_RULE = f"Use up to {LONGEST_SLUG} lowercase letters, digits and '-', such as 'pytorch-2'."
Slug = Annotated[str, matching(SLUG_PATTERN, SLUG_RULE)]
OptionName = Annotated[
    str,
    matching(
        r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9])?",
        "Use up to 64 letters, digits, '-' and '_'.",
        is_key=True,
    ),
]
"""The name of an option or a choice."""
MountName = Annotated[str, matching(_NAME, "Use letters, digits, '-', '_' and '.'.", is_key=True)]
ImageName = Annotated[
    str,
    matching(
        r"[A-Za-z0-9](?:[A-Za-z0-9_./-]|:(?=[0-9]+/))*"  # a host with its port, and the name
        r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?",
        "Write it as registry/name:tag, or with its digest as registry/name:tag@sha256:...",
        "the name of an image",
    ),
]
Version = Annotated[
    str,
    matching(r"[0-9]{1,9}(?:\.[0-9]{1,9}){0,3}", "Write one such as '12.4'.", "a version"),
]
"""A version such as ``550.54``. It is text, because 12.10 is not 12.1."""


def _line(value: object) -> str:
    found = text(value)
    if not found.translate(_JOINERS).isprintable():
        raise ValueError(
            f"is {shown(found)}, with a line break or a control character. Write one plain line."
        )
    if len(found) > MOST_LINE:
        raise ValueError(f"has {len(found)} characters. Shorten it to {MOST_LINE}.")
    return found


def _framework_version(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f"is {shown(value)}, a number. Put it in quotes: 2.10 is not 2.1.")
    return _line(value)


_LINE = text_schema(_PRINTABLE, maxLength=MOST_LINE)
Line = Annotated[str, Checked(_line, _LINE)]
"""One line of printable text."""
FrameworkVersion = Annotated[str, Checked(_framework_version, _LINE)]


def _long_text(value: object) -> str:
    found = text(value)
    if len(found) > MOST_TEXT:
        raise ValueError(f"has {len(found)} characters. Shorten it to {MOST_TEXT}.")
    return found


LongText = Annotated[str, Checked(_long_text, text_schema(r"\S", maxLength=MOST_TEXT))]


def _day(value: object) -> date:
    found = value
    if isinstance(value, str):  # newer versions of Python parse other formats, too
        try:
            found = date.fromisoformat(value) if re.fullmatch(_DAY, value) else None
        except ValueError:
            found = None
    if not isinstance(found, date) or isinstance(found, datetime):
        raise ValueError(f"is {shown(value)}, not a date. Write one such as 2026-05-31.")
    return found


Day = Annotated[
    date, Checked(_day, text_schema(f"^{_DAY}$", format="date", examples=["2026-05-31"]))
]


def _device_models(value: object) -> tuple[str, ...]:
    found = texts(value)
    for model in found:
        if not re.search(r"[A-Za-z0-9]", model):
            raise ValueError(
                f"holds {model!r}, which names no device model. Leave 'models' out to allow any."
            )
    if not found:
        raise ValueError("is empty. Leave it out to allow any model.")
    return found


DeviceModels = Annotated[
    tuple[str, ...],
    Checked(_device_models, list_schema(text_schema(r"[A-Za-z0-9]", examples=["A100"]), least=1)),
]


def _groups(value: object) -> frozenset[str]:
    found = frozenset(value) if isinstance(value, frozenset) else frozenset(texts(value))
    if not found:
        raise ValueError("is empty, so nobody is allowed. Leave it out to allow everyone.")
    return found


Groups = Annotated[frozenset[str], Checked(_groups, list_schema(text_schema(r"\S"), least=1))]


# Paths and addresses.


def _server_path(value: object) -> str:
    found = text(value)
    parts = found.split("/")
    if not found.startswith("/") or found.startswith("//") or "\\" in found or ".." in parts:
        raise ValueError(f"is {shown(found)}. Write a path that starts with one '/', such as /lab.")
    return found


ServerPath = Annotated[str, Checked(_server_path, _SERVER_PATH)]


def plain_path(value: object) -> str:
    """Return a relative path without ``..`` in normal form. Raises ValueError for others."""
    found = _line(value)
    parts = found.split("/")
    if found.startswith("/") or "\\" in found or ".." in parts:
        raise ValueError(f"is {shown(found)}. Write a file's name without '..' and a first '/'.")
    path = posixpath.normpath(found)
    if path == ".":
        raise ValueError(f"is {shown(found)}, which names no file. Write the name of one.")
    return path


def _first_page(value: object) -> str:
    found = _line(value)
    if found in FIRST_PAGES:
        return FIRST_PAGES[found]
    if "." not in found:  # probably a misspelt name and not a file
        raise ValueError(
            f"is {shown(found)}. Write {', '.join(FIRST_PAGES)}, or a file such as "
            "work/intro.ipynb."
        )
    return "/lab/tree/" + quote(plain_path(found))


FirstPage = Annotated[
    str,
    Checked(
        _first_page,
        {
            "anyOf": [
                text_schema(rf"^\s*(?:{'|'.join(FIRST_PAGES)})\s*$", examples=[*FIRST_PAGES]),
                text_schema(_NO_UP + r"(?=.*\.)\s*[^/\s]", maxLength=MOST_LINE),
            ]
        },
    ),
]
"""The path of a page, written as ``lab``, ``notebook``, ``vscode`` or the name of a file."""


def beside(*endings: str) -> Checked:
    """Annotate the name of a file beside the catalog with one of these endings."""

    def check(value: object) -> str:
        name = plain_path(value)
        if not name.lower().endswith(endings):
            raise ValueError(f"is {shown(name)}. Name a file that ends in {' or '.join(endings)}.")
        return name

    # Patterns in a JSON Schema have no flag to ignore case.
    anycase = (
        "".join(f"[{letter}{letter.upper()}]" for letter in ending.removeprefix("."))
        for ending in endings
    )
    pattern = _NO_UP + rf"\s*[^/\s].*\.(?:{'|'.join(anycase)})\s*$"
    return Checked(check, text_schema(pattern, maxLength=MOST_LINE))


_LOGO_FILE = beside(*LOGO_TYPES)


def _logo(value: object) -> str:
    """Return a path on the hub's own host or a file beside the catalog, never another host."""
    return _server_path(value) if text(value)[:1] == "/" else str(_LOGO_FILE.check(value))


Logo = Annotated[str, Checked(_logo, {"anyOf": [_LOGO_FILE.schema, _SERVER_PATH]})]


def _url(value: object) -> str:
    found = _line(value)
    if found.startswith("/"):
        return _server_path(found)
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


_URL: Schema = text_schema(
    r"^(?!.*\\)(?!.*\S\s+\S)\s*(?:https?://[^\s/]|mailto:\S*@|(?!.*/\.\.(?:/|\s*$))/(?!/))",
    maxLength=MOST_LINE,
    examples=["https://example.org/guide"],
)
Url = Annotated[str, Checked(_url, _URL)]
"""An address with ``https://``, ``http://`` or ``mailto:``, or a path on the hub's own host."""


# Mounts.


def _is_unsafe(path: str) -> bool:
    """Return True if a path has what engines separate paths with, or leads upwards."""
    return ":" in path or "\\" in path or ".." in path.split("/")


def _source(value: object) -> str:
    found = text(value)
    if "{" in found or "}" in found:
        raise ValueError(
            f"is {shown(found)}, but names in braces are not filled in here: the source is the "
            "same for everybody. Write the path or volume itself."
        )
    if found.startswith("/"):
        path = "/" + posixpath.normpath(found).lstrip("/")  # normpath keeps two leading slashes
        if path == "/" or _is_unsafe(found):
            raise ValueError(f"is {shown(found)}. Write the absolute path of one folder.")
        return path
    if not re.fullmatch(_NAME, found):
        raise ValueError(
            f"is {shown(found)}. Write an absolute path on the host, or the name of a volume."
        )
    return found


_SOURCE = text_schema(_NO_UP + rf"\s*(?:/[^:{{}}]*[^:{{}}/\s.][^:{{}}]*|{_NAME})\s*$")
Source = Annotated[str, Checked(_source, _SOURCE)]
"""A folder on the host, or the name of a volume."""


def _target(value: object) -> str:
    found = text(value)
    if not found.startswith("/") or _is_unsafe(found):
        raise ValueError(f"is {shown(found)}. Write an absolute path such as /datasets/images.")
    found = "/" + posixpath.normpath(found).lstrip("/")
    for reserved in _RESERVED_TARGETS:
        if is_inside(found, reserved) or is_inside(reserved, found):
            raise ValueError(
                f"is {shown(found)}, which would hide {reserved}. Choose a path such as "
                "/datasets/images."
            )
    return found


Target = Annotated[str, Checked(_target, text_schema(_NO_UP + r"\s*/[^:]*$"))]
"""A path inside the server that hides no folder which the server needs."""


def is_inside(path: str, folder: str) -> bool:
    """Return True if a path is a folder or is inside it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


# Environment variables.


def _variable_name(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("is not the name of an environment variable. Use letters, digits and '_'.")
    if value.upper().startswith(_RESERVED_VARIABLES):
        raise ValueError(
            "is set by gpuspawner for every server, and cannot be set here. Leave it out."
        )
    return value


def _variable_value(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"is {shown(value)}, not text. Put it in quotes.")
    if "\0" in value:
        raise ValueError("contains a NUL character. Remove it.")
    return value


_reserved = "|".join(
    "".join(f"[{letter}{letter.lower()}]" if letter != "_" else "_" for letter in prefix)
    for prefix in _RESERVED_VARIABLES
)
VariableName = Annotated[
    str, Checked(_variable_name, text_schema(rf"^(?!{_reserved})[A-Za-z_][A-Za-z0-9_]*$"))
]
VariableValue = Annotated[str, Checked(_variable_value)]
