"""What an entry says of itself, needs and opens: real YAML text, the real parser and schema."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from textwrap import dedent
from typing import Any

import jsonschema
import pytest
import yaml

from gpuspawner.catalog.json_schema import schema
from gpuspawner.catalog.loader import Catalog
from gpuspawner.catalog.models import Framework, Link
from gpuspawner.core.errors import ConfigError

VALIDATOR = jsonschema.Draft202012Validator(
    schema(), format_checker=jsonschema.FormatChecker(["date"])
)
DIGEST = "sha256:" + "0123456789abcdef" * 4

ENTRY = f"""
environments:
  - slug: pytorch
    display_name: PyTorch & friends
    summary: Training with <CUDA>.
    description: |
      Comes with **CUDA**.

      * one
    logo: /hub/static/logo.png
    image: registry.example.org:5000/lab/pytorch:2.5-cuda@{DIGEST}
    frameworks:
      PyTorch: 2.5.1
      CUDA: "12.4"
    links:
      Guide: https://example.org/guide?a=b#c
      Ours: /services/docs/
      Mail: mailto:gpu@example.org
    maintainer: GPU team <gpu@example.org>
    tested_on: 2026-05-31
    packages: packages.txt
    sample_notebook: first/steps.ipynb
    changes: changes.md
    devices: {{default: 1, max: 4}}
    min_driver: "550.54.14"
    min_cuda: "12.4"
    cpu_variant: false
    sharing: whole
    first_page: work/first steps.ipynb
    shared_folders: [notes]
  - {{slug: base, image: base, shared_folders: []}}
shared_folders:
  notes: {{source: /srv/notes}}
  other: {{source: /srv/other}}
"""


class _AsEditorsRead(yaml.SafeLoader):
    """Dates stay text, as in YAML 1.2, which editors read."""


_AsEditorsRead.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in found if not tag.endswith(":timestamp")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def by_schema(text: str) -> list[str]:
    """What the schema has against a catalog."""
    data: Any = yaml.load(text, _AsEditorsRead)
    return [error.message for error in VALIDATOR.iter_errors(data)]


def by_parser(text: str) -> str:
    """What the parser has against it."""
    try:
        Catalog.from_text(text)
    except ConfigError as error:
        return error.message
    return ""


def entry(lines: str, rest: str = "") -> str:
    body = "".join(f"    {line}\n" for line in dedent(lines).strip("\n").splitlines())
    return f"environments:\n  - slug: base\n    image: base\n{body}{rest}"


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


def test_every_key_is_read() -> None:
    assert by_schema(ENTRY) == []
    found = Catalog.from_text(ENTRY).get("pytorch")
    assert found.display_name == "PyTorch & friends"
    assert found.summary == found.card_text == "Training with <CUDA>."
    assert found.description == "Comes with **CUDA**.\n\n* one"
    assert found.logo == "/hub/static/logo.png"
    assert (found.image_tag, found.image_digest) == ("2.5-cuda", DIGEST)
    assert found.frameworks == (Framework("PyTorch", "2.5.1"), Framework("CUDA", "12.4"))
    assert found.links == (
        Link("Guide", "https://example.org/guide?a=b#c"),
        Link("Ours", "/services/docs/"),
        Link("Mail", "mailto:gpu@example.org"),
    )
    assert found.maintainer == "GPU team <gpu@example.org>"
    assert found.tested_on == date(2026, 5, 31)
    assert (found.packages, found.changes) == ("packages.txt", "changes.md")
    assert found.sample_notebook == "first/steps.ipynb"
    assert (found.min_driver, found.min_cuda) == ("550.54.14", "12.4")
    assert (found.cpu_variant, found.sharing) == (False, "whole")
    assert found.default_url == "/lab/tree/work/first%20steps.ipynb"


def test_an_environment_takes_the_folders_that_it_names() -> None:
    read = Catalog.from_text(ENTRY)
    pytorch, base = read.environments
    assert [mount.name for mount in read.mounts_for(pytorch, [])] == ["notes"]
    assert read.mounts_for(base, []) == ()


def test_a_card_without_a_summary_has_the_description_s_first_words() -> None:
    found = Catalog.from_text(entry("description: 'For **everybody**, see [here](/docs).'"))
    assert found.get("base").card_text == "For everybody, see here."


@pytest.mark.parametrize(
    ("page", "path"),
    [
        ("lab", "/lab"),
        ("notebook", "/tree"),
        ("vscode", "/vscode/"),
        ("a/b.py", "/lab/tree/a/b.py"),
    ],
)
def test_the_first_page_has_a_name(page: str, path: str) -> None:
    text = entry(f"first_page: {page}")
    assert Catalog.from_text(text).get("base").default_url == path
    assert by_schema(text) == []


@pytest.mark.parametrize(
    ("image", "tag", "digest"),
    [
        ("base", "", ""),
        ("a/b:1", "1", ""),
        ("host:5000/a/b", "", ""),
        ("host:5000/a/b:v1.0_x", "v1.0_x", ""),
        (f"a@{DIGEST}", "", DIGEST),
        (f"host:5000/a:1@{DIGEST}", "1", DIGEST),
    ],
)
def test_images_have_tags_and_digests(image: str, tag: str, digest: str) -> None:
    text = f"environments: [{{slug: a, image: '{image}'}}]"
    found = Catalog.from_text(text).get("a")
    assert (found.image, found.image_tag, found.image_digest) == (image, tag, digest)
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
]


@pytest.mark.parametrize("lines", GOOD)
def test_what_is_right_is_right_for_both(lines: str) -> None:
    assert by_parser(entry(lines)) == ""
    assert by_schema(entry(lines)) == []


BAD = [
    ("summary: 5", "is 5, not text"),
    ('summary: "a\\nb"', "with a line break or a control character"),
    ("summary: " + "x" * 201, "has 201 characters; 200 are the most"),
    ("description: " + "x" * 20_001, "has 20001 characters; 20000 are the most"),
    ("display_name: ' '", "is empty"),
    ("logo: logo.exe", "Name a file that ends in .png or"),
    ("logo: ../logo.png", "without '..'"),
    ("logo: /../etc/logo.png", "Write a path that starts with one '/'"),
    ("logo: //example.org/a.png", "Write a path that starts with one '/'"),
    ("logo: https://example.org/a.exe", "Name a file"),
    ("image: 'base:'", "not the name of an image"),
    ("image: base@sha256:0123", "with its digest as registry/name:tag@sha256:"),
    ("image: base:1:2", "not the name of an image"),
    ("image: base@md5:00", "not the name of an image"),
    ("frameworks: [PyTorch]", "is a list, not a mapping"),
    ("frameworks: {PyTorch: 2.10}", "is 2.1, a number. Put it in quotes"),
    ("frameworks: {PyTorch: }", "has no value"),
    ("frameworks: {' ': '1'}", "a name in 'frameworks' of environment 'base' is empty"),
    ("links: {Guide: javascript:alert(1)}", "Write an address such as"),
    ("links: {Guide: 'data:text/html,x'}", "Write an address such as"),
    ("links: {Guide: //example.org}", "Write a path that starts with one '/'"),
    ("links: {Guide: guide}", "Write an address such as"),
    ("links: {Guide: 'https://'}", "Write an address such as"),
    ("links: {Guide: 'https:///x'}", "Write an address such as"),
    ("links: {" + ", ".join(f"l{n}: /x" for n in range(51)) + "}", "51 lines; 50 are the most"),
    ("tested_on: yesterday", "not a date. Write one such as 2026-05-31"),
    ("tested_on: '2026-02-30'", "not a date"),
    ("tested_on: 2026", "is 2026, not a date"),
    ("tested_on: '20260531'", "not a date"),
    ("packages: ../x.txt", "without '..'"),
    ("packages: a\\..\\x.txt", "without '..'"),
    ("packages: /etc/x.txt", "without '..'"),
    ("packages: x.yaml", "Name a file that ends in .txt or .lock"),
    ("sample_notebook: x.py", "Name a file that ends in .ipynb"),
    ("changes: [a.md]", "is a list, not text"),
    ("min_driver: 550", "is 550, not text"),
    ("min_driver: new", "not a version. Write one such as '12.4'"),
    ("min_cuda: 12.4", "is 12.4, not text"),
    ("min_cuda: '12.x'", "not a version"),
    ("cpu_variant: no thanks", "Write true or false"),
    ("sharing: shared", "GPUs are only given out whole so far"),
    ("sharing: half", "Write whole"),
    ("first_page: desktop", "Write lab, notebook, vscode, or a file"),
    ("first_page: ../x.ipynb", "without '..'"),
    ("first_page: /etc/x.ipynb", "without '..'"),
    ("first_page: lab\ndefault_url: /lab", "has both 'first_page' and 'default_url'"),
    ("default_url: /../x", "Write a path that starts with one '/'"),
    ("default_url: //x", "Write a path that starts with one '/'"),
    ("hours: {max: 9000}", "8760, a year, is the most"),
    ("devices: {max: -1}", "not a whole number"),
    ("devices: {most: 1}", "unknown key 'most'"),
    ("models: []", "is empty"),
    ("models: [A100, A100]", "names 'A100' twice"),
    ("mem_limit: lots", "not a size"),
    ("mem_limit: 8", "less than 1M"),
    ("cpu_limit: 0", "not a number above zero"),
    ("allowed_groups: []", "nobody is allowed"),
    ("environment: {A: 1}", "not text"),
    ("environment: {cuda_x: '1'}", "is set by gpuspawner"),
    ("environment: {A-B: x}", "no name of an environment variable"),
    ("spawner_override: {image: x}", "may not set 'image'"),
    ("spawner_override: {gpu_injection: cdi}", "may not set 'gpu_injection'"),
    ("spawner_override: {extra_host_config: {privileged: true}}", "may not set 'privileged'"),
    ("colour: red", "unknown key 'colour'"),
]


@pytest.mark.parametrize(("lines", "words"), BAD)
def test_what_is_wrong_is_wrong_for_both(lines: str, words: str) -> None:
    text = entry(lines).replace("    image: base\n", "") if lines[:6] == "image:" else entry(lines)
    message = by_parser(text)
    assert message.startswith("catalog.yaml, line ")
    assert words in message
    assert by_schema(text)


ONLY_THE_PARSER = [
    ("datasets: [none]", "", "a dataset 'none' that is not defined"),
    ("shared_folders: [none]", "", "a shared folder 'none' that is not defined"),
    ("devices: {default: 2, max: 1}", "", "is 2, but 'max' is 1"),
    ("", "  - {slug: base, image: b}\n", "the same slug 'base'"),
    ("default: true", "  - {slug: b, image: b, default: true}\n", "both say 'default: true'"),
    ("devices: {max: 0}\nmin_driver: '550'", "", "so 'min_driver' means nothing"),
    ("devices: {max: 0}\nsharing: whole", "", "so 'sharing' means nothing"),
    ("cpu_variant: false", "", "they could not reach their files"),
    ("cpu_variant: false\ndevices: {default: 0}", "", "starts without a GPU unless a member"),
    (
        "cpu_variant: false",
        "  - {slug: b, image: b, allowed_groups: [a]}\n",
        "no other that starts",
    ),
]


@pytest.mark.parametrize(("lines", "rest", "words"), ONLY_THE_PARSER)
def test_what_needs_more_than_one_value_is_the_parser_s(lines: str, rest: str, words: str) -> None:
    """The module of the schema says so; editors do not see these."""
    assert words in by_parser(entry(lines, rest))
    assert by_schema(entry(lines, rest)) == []


@pytest.mark.parametrize(
    ("lines", "rest"),
    [
        ("cpu_variant: false", "  - {slug: b, image: b}\n"),
        ("cpu_variant: false", "  - {slug: b, image: b, devices: {max: 0}}\n"),
        (
            "cpu_variant: false\nallowed_groups: [a]",
            "  - {slug: b, image: b, allowed_groups: [a, c]}\n",
        ),
    ],
)
def test_without_a_gpu_there_is_another(lines: str, rest: str) -> None:
    assert by_parser(entry(lines, rest)) == ""


MOUNTS = [
    ("datasets: {a: {source: /srv/a}}", True),
    ("datasets: {a: {source: volume-1, target: /a/b, allowed_groups: [g]}}", True),
    ("shared_folders: {a.b: {source: /srv/a, mode: ro}}", True),
    ("datasets: {a: {source: /srv/a, mode: ro}}", False),
    ("datasets: {a: {source: relative/path}}", False),
    ("datasets: {a: {source: /srv/../etc}}", False),
    ("datasets: {a: {source: /}}", False),
    ("datasets: {a: {source: '/srv/{username}'}}", False),
    ("datasets: {a: {source: /srv/a, target: a}}", False),
    ("datasets: {a: {source: /srv/a, target: /a/../b}}", False),
    ("datasets: {'a/b': {source: /srv/a}}", False),
    ("datasets: {a: {}}", False),
    ("datasets: [a]", False),
    ("shared_folders: {a: {source: /srv/a, mode: w}}", False),
    ("extra: 1", False),
]


@pytest.mark.parametrize(("lines", "right"), MOUNTS)
def test_mounts_are_right_or_wrong_for_both(lines: str, right: bool) -> None:
    text = entry("") + lines + "\n"
    assert (by_parser(text) == "") is right
    assert (by_schema(text) == []) is right


def test_every_key_is_in_the_readme() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## The catalog\n")[2].partition("\n## ")[0]
    items = schema()["properties"]
    mounts = items["shared_folders"]["additionalProperties"]["properties"]
    for key in {*items, *items["environments"]["items"]["properties"], *mounts}:
        assert f"`{key}`" in section, key


def test_the_example_in_the_readme_is_right_for_both() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(environments:.*?)```", readme, flags=re.DOTALL)
    assert by_parser(text) == ""
    assert by_schema(text) == []


PERSIAN = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"


@pytest.mark.parametrize("name", [PERSIAN, "数据", "Zoë", "👩\u200d🔬", "e\u0301"])
def test_names_are_in_any_script(name: str) -> None:
    text = entry(f"display_name: '{name}'\nsummary: '{name}'\nmaintainer: '{name}'")
    assert by_parser(text) == ""
    assert by_schema(text) == []
    assert Catalog.from_text(text).get("base").display_name == name


@pytest.mark.parametrize("mark", ["\\u202e", "\\u2028", "\\x1b", "\\x85", "\\u2066", "\\t"])
def test_names_turn_nothing_around_and_move_no_cursor(mark: str) -> None:
    text = entry(f'summary: "a{mark}b"')
    assert "with a line break or a control character" in by_parser(text)
    assert by_schema(text)
