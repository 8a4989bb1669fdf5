"""What an entry says of itself, needs and opens: real YAML text, the real parser and schema."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema
import pytest

from gpuspawner.catalog.loader import Catalog
from gpuspawner.catalog.parser import schema
from tests.unit.catalog.texts import DIGEST, by_parser, by_schema, entry


@pytest.mark.parametrize(
    ("page", "path"),
    [
        ("lab", "/lab"),
        ("notebook", "/tree"),
        ("vscode", "/vscode/"),
        ("a/b.py", "/lab/tree/a/b.py"),
    ],
)
def test_first_page_name_becomes_the_default_url(page: str, path: str) -> None:
    text = entry(f"first_page: {page}")
    assert Catalog.from_text(text).get("base").default_url == path
    assert by_schema(text) == []


@pytest.mark.parametrize(
    ("image", "digest"),
    [
        ("base", ""),
        ("a/b:1", ""),
        ("host:5000/a/b", ""),
        ("host:5000/a/b:v1.0_x", ""),
        (f"a@{DIGEST}", DIGEST),
        (f"host:5000/a:1@{DIGEST}", DIGEST),
    ],
)
def test_image_reference_may_have_tag_and_digest(image: str, digest: str) -> None:
    text = f"environments: [{{slug: a, image: '{image}'}}]"
    found = Catalog.from_text(text).get("a")
    assert (found.image, found.image_digest) == (image, digest)
    assert by_schema(text) == []


GOOD = [
    "default_url: /lab/tree/work",
    "cpu_limit: 0.5",
    "mem_limit: 1.5 GiB",
    "mem_limit: 4000000",
    "min_memory: 24G",
    "hours: {default: 0.25, max: 8760}",
    "devices: {}",
    "devices: {max: 0}\ncpu_variant: true",
    "models: [A100, H100 80GB]",
    "allowed_groups: [a b, ü]",
    "environment: {A: '', _b1: x}",
    "spawner_override: {http_timeout: 5, extra_host_config: {init: true}}",
    "logo: logo.PNG",
    "tested_on: '2026-05-31'",
    "links: {}",
    "maintainer: ' A '",
    "changes: notes/2026.md",
    "first_page: ./a.ipynb",
    *(
        f"display_name: '{name}'\nsummary: '{name}'\nmaintainer: '{name}'"
        for name in ("\u0645\u06cc\u200c\u062e", "数据", "Zoë", "👩\u200d🔬", "e\u0301")
    ),
]


@pytest.mark.parametrize("lines", GOOD)
def test_valid_entries_pass_parser_and_schema(lines: str) -> None:
    assert by_parser(entry(lines)) == ""
    assert by_schema(entry(lines)) == []


def test_readme_documents_every_key_with_a_valid_example() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## The catalog\n")[2].partition("\n## ")[0]
    found = schema()
    parts = [found["$defs"][name]["properties"] for name in ("Environment", "SharedFolder")]
    for key in {*found["properties"], *parts[0], *parts[1]}:
        assert f"`{key}`" in section, key
    (text,) = re.findall(r"```yaml\n(environments:.*?)```", readme, flags=re.DOTALL)
    assert by_parser(text) == "" and by_schema(text) == []
