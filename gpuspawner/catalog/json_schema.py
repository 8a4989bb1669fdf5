"""The catalog as a JSON Schema, from which editors complete it and show what a key means.

Made from the same patterns and limits as the parser uses. What needs more than one value to be
judged (a slug written twice, a default above its maximum, a dataset that is not defined, a file
that is not there) is the parser's alone.
"""

from __future__ import annotations

from typing import Any

from ..core.config_files import MOST_NUMBER, MOST_WHOLE
from . import value_kinds
from .files import ENDINGS
from .parser import MOST_CHOICES, MOST_OPTIONS, OPTION_NAME, OWN_KEYS, OWNED_INSIDE, OWNED_TRAITS

Schema = dict[str, Any]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_CONTROL = r"\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069"
_PRINTABLE = rf"^(?=\s*\S)\s*[^{_CONTROL}]*\s*$"
_NO_UP = r"^(?!\s*\.\.(?:/|\s*$))(?!.*/\.\.(?:/|\s*$))(?!.*\\)"
"""The beginning of a pattern for paths without ``..``."""


def schema() -> Schema:
    """The schema of a whole catalog."""
    return {
        "$schema": _DIALECT,
        "title": "gpuspawner's catalog of environments",
        "type": "object",
        "additionalProperties": False,
        "required": ["environments"],
        "properties": {
            "environments": {
                "description": "The environments that members choose from, in this order.",
                "type": "array",
                "minItems": 1,
                "items": _environment(),
            },
            "datasets": _mounts(
                "Read-only data for servers, each found under /datasets/NAME.", mode=False
            ),
            "shared_folders": _mounts(
                "Folders that members share, each found under /shared/NAME.", mode=True
            ),
        },
    }


def _environment() -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["slug", "image"],
        "properties": _for_people() | _for_servers() | _for_grants(),
        "not": {"required": ["first_page", "default_url"]},
    }


def _for_people() -> Schema:
    return {
        "slug": _says(
            "The name that links, leases and labels carry.", _text(_whole(value_kinds.SLUG))
        ),
        "display_name": _line("What members read. Without it: the slug."),
        "summary": _line("One line for the environment's card."),
        "description": _says(
            "What it is for and how to use it, in Markdown.",
            _text(r"\S", maxLength=value_kinds.MOST_TEXT),
        ),
        "logo": _says(
            "A picture beside this file, or a path on the hub's own host (/...).",
            {"anyOf": [_file("logo"), _text(_NO_UP + r"\s*/(?!/)")]},
        ),
        "frameworks": _lines("What comes with it and in which version, in quotes.", _plain_line()),
        "links": _lines(
            "Where to read more: a title, and an address or a path of the hub's host.",
            _text(
                r"^(?!.*\\)(?!.*\S\s+\S)\s*(?:https?://[^\s/]|mailto:\S*@|"
                r"(?!.*/\.\.(?:/|\s*$))/(?!/))",
                maxLength=value_kinds.MOST_LINE,
            ),
        ),
        "maintainer": _line("Whom to ask about it."),
        "tested_on": _says(
            "The day it was last tried.", _text(f"^{value_kinds.DAY}$", format="date")
        ),
        "packages": _says("A file beside this one: name==version a line.", _file("packages")),
        "sample_notebook": _says("A notebook beside this file.", _file("sample_notebook")),
        "changes": _says("A Markdown file beside this one: what is new.", _file("changes")),
        "default": _says("Chosen on the form unless a member chooses.", {"type": "boolean"}),
    }


def _for_grants() -> Schema:
    return {
        "devices": _says(
            "GPUs: chosen unless a member says how many, and the most. max: 0 is CPU-only.",
            _pair({"type": "integer", "minimum": 0, "maximum": MOST_WHOLE}),
        ),
        "cpu_variant": _says("false: never without a GPU.", {"type": "boolean"}),
        "sharing": _says("GPUs are given out whole.", {"enum": ["whole"]}),
        "hours": _says(
            "Hours of a session: as usual, and the most.",
            _pair({"type": "number", "exclusiveMinimum": 0, "maximum": value_kinds.MOST_HOURS}),
        ),
        "models": _says(
            "Only these GPU models, such as A100.", _names(_text(r"[A-Za-z0-9]"), least=1)
        ),
        "min_memory": _size("Least memory of each GPU, as on its box."),
        "min_driver": _says("The oldest NVIDIA driver, in quotes.", _version()),
        "min_cuda": _says("The oldest CUDA version of the driver, in quotes.", _version()),
        "allowed_groups": _says("Only members of these groups.", _names(_text(r"\S"), least=1)),
        "datasets": _says("Only these datasets.", _names(_text(r"\S"))),
        "shared_folders": _says("Only these shared folders.", _names(_text(r"\S"))),
        "profile_options": _options(),
    }


def _for_servers() -> Schema:
    """What a choice can change too."""
    return {
        "image": _says(
            "The container image, by tag and, to pin it, by digest.",
            _text(_whole(value_kinds.IMAGE)),
        ),
        "mem_limit": _size("Memory of a server."),
        "cpu_limit": _says(
            "CPU cores of a server.",
            {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": MOST_NUMBER},
        ),
        "shm_size": _size("/dev/shm of a server."),  # words  # nosec B108
        "first_page": _says(
            "What opens first: lab, notebook, vscode, or a file such as work/intro.ipynb.",
            {
                "anyOf": [
                    _text(_whole("|".join(value_kinds.FIRST_PAGES))),
                    _text(_NO_UP + r"(?=.*\.)\s*[^/\s]", maxLength=value_kinds.MOST_LINE),
                ]
            },
        ),
        "default_url": _says("Where a server opens, as its path.", _text(_NO_UP + r"\s*/(?!/)")),
        "environment": _says(
            "Environment variables, each as text.",
            {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "propertyNames": {
                    "pattern": r"^(?!(?:[Nn][Vv][Ii][Dd][Ii][Aa]|[Cc][Uu][Dd][Aa]|"
                    r"[Gg][Pp][Uu][Ss][Pp][Aa][Ww][Nn][Ee][Rr]|"
                    r"[Jj][Uu][Pp][Yy][Tt][Ee][Rr][Hh][Uu][Bb])_)[A-Za-z_][A-Za-z0-9_]*$"
                },
            },
        ),
        "spawner_override": _override(),
    }


def _options() -> Schema:
    choice = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "display_name": _line("What members read. Without it: the name."),
            "default": _says("Taken unless a member chooses.", {"type": "boolean"}),
            **_for_servers(),
        },
        "not": {"required": ["first_page", "default_url"]},
    }
    named = {"propertyNames": {"pattern": rf"^(?:{OPTION_NAME})$"}, "type": "object"}
    option = {
        "type": "object",
        "additionalProperties": False,
        "required": ["choices"],
        "properties": {
            "display_name": _line("What members read. Without it: the name."),
            "choices": {
                **named,
                "minProperties": 1,
                "maxProperties": MOST_CHOICES,
                "additionalProperties": choice,
            },
        },
    }
    return {
        "description": "Choices within it, as in KubeSpawner's profile_options.",
        **named,
        "maxProperties": MOST_OPTIONS,
        "additionalProperties": option,
    }


def _override() -> Schema:
    owned = sorted({*OWN_KEYS, *OWNED_TRAITS})
    return {
        "description": "Other traits of the spawner, as in KubeSpawner's profile_list.",
        "type": "object",
        "propertyNames": {"not": {"anyOf": [{"enum": owned}, {"pattern": "^gpu_"}]}},
        "properties": {
            trait: {"propertyNames": {"not": {"enum": sorted(keys)}}}
            for trait, keys in OWNED_INSIDE.items()
        },
    }


def _mounts(says: str, *, mode: bool) -> Schema:
    properties: Schema = {
        "source": _says(
            "A folder on the host, or the name of a volume.",
            _text(
                _NO_UP + r"\s*(?:/[^:{}]*[^:{}/\s.][^:{}]*|" + value_kinds.NAME.pattern + r")\s*$"
            ),
        ),
        "target": _says("Where servers find it.", _text(_NO_UP + r"\s*/[^:]*$")),
        "allowed_groups": _says("Only members of these groups.", _names(_text(r"\S"), least=1)),
    }
    if mode:
        properties["mode"] = _says("rw may be written, ro not.", {"enum": ["rw", "ro"]})
    return {
        "description": says,
        "type": "object",
        "propertyNames": {"pattern": f"^{value_kinds.NAME.pattern}$"},
        "additionalProperties": {
            "type": "object",
            "additionalProperties": False,
            "required": ["source"],
            "properties": properties,
        },
    }


# Parts.


def _says(words: str, what: Schema) -> Schema:
    return {"description": words, **what}


def _text(pattern: str, **more: Any) -> Schema:
    return {"type": "string", "pattern": pattern, **more}


def _plain_line() -> Schema:
    return _text(_PRINTABLE, maxLength=value_kinds.MOST_LINE)


def _line(says: str) -> Schema:
    return _says(says, _plain_line())


def _lines(says: str, value: Schema) -> Schema:
    return {
        "description": says,
        "type": "object",
        "maxProperties": value_kinds.MOST_NAMED,
        "propertyNames": {"pattern": _PRINTABLE, "maxLength": value_kinds.MOST_LINE},
        "additionalProperties": value,
    }


def _names(item: Schema, *, least: int = 0) -> Schema:
    return {"type": "array", "items": item, "uniqueItems": True, "minItems": least}


def _pair(number: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {"default": number, "max": number},
    }


def _size(says: str) -> Schema:
    written = _text(r"^(?=.*[1-9])\s*[0-9]{1,15}(?:\.[0-9]+)?\s*(?:[KMGTkmgt][Ii]?)?[Bb]?\s*$")
    return _says(says, {"anyOf": [{"type": "integer", "minimum": 1_000_000}, written]})


def _version() -> Schema:
    return _text(_whole(value_kinds.VERSION))


def _file(key: str) -> Schema:
    # Letter by letter: the dialect of patterns knows no flags.
    endings = "|".join(
        "".join(f"[{letter}{letter.upper()}]" for letter in ending.removeprefix("."))
        for ending in ENDINGS[key]
    )
    return _text(_NO_UP + rf"\s*[^/\s].*\.(?:{endings})\s*$", maxLength=value_kinds.MOST_LINE)


def _whole(pattern: str) -> str:
    """The pattern of a text that may have white space around it, as the parser takes it away."""
    return rf"^\s*(?:{pattern})\s*$"
