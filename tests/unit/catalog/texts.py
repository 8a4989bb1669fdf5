"""Texts of catalogs, and what parser and schema have against them."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import jsonschema
import pytest
import yaml

from gpuspawner.catalog.loader import Catalog
from gpuspawner.catalog.parser import schema
from gpuspawner.core.errors import ConfigError

VALIDATOR = jsonschema.Draft202012Validator(
    schema(), format_checker=jsonschema.FormatChecker(["date"])
)
DIGEST = "sha256:" + "0123456789abcdef" * 4


class _AsEditorsRead(yaml.SafeLoader):
    """Dates stay text, as in YAML 1.2, which editors read."""


_AsEditorsRead.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in found if not tag.endswith(":timestamp")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def entry(lines: str = "", top: str = "") -> str:
    """A catalog of one environment with these lines, the first of them on line 4."""
    body = "".join(f"    {line}\n" for line in dedent(lines).strip("\n").splitlines())
    return f"environments:\n  - slug: base\n    image: base\n{body}{top}"


def by_schema(text: str) -> list[str]:
    """What the schema has against a catalog."""
    data: Any = yaml.load(text, _AsEditorsRead)
    return [error.message for error in VALIDATOR.iter_errors(data)]


def by_parser(text: str) -> str:
    """What the parser has against it; empty if it is right."""
    try:
        Catalog.from_text(text)
    except ConfigError as error:
        return error.message
    return ""


def refusal(text: str) -> str:
    """What the parser has against what is wrong."""
    with pytest.raises(ConfigError) as caught:
        Catalog.from_text(text)
    return caught.value.message
