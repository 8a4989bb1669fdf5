"""What an entry says of itself, needs, opens and offers: real YAML text, parser and schema."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from gpuspawner.catalog.loader import Catalog
from gpuspawner.catalog.parser import schema
from gpuspawner.core.errors import ConfigError, GPUSpawnerError, InvalidRequest
from gpuspawner.leases.host_resources import HostAmount, guaranteed_to
from gpuspawner.spawners import options
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
    "sharing: slot",
    "sharing: any\ndevices: {max: 4}",
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


def test_schema_is_a_valid_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


# Choices within an environment.

OPTIONS = """
environments:
  - slug: pytorch
    image: torch:2.5
    mem_limit: 8G
    environment: {A: own, B: own}
    spawner_override: {http_timeout: 60, extra_host_config: {init: true}}
    profile_options:
      memory:
        display_name: Memory
        choices:
          small: {display_name: 8 GB}
          large: {display_name: 32 GB, mem_limit: 32G, environment: {B: large}}
      version:
        choices:
          "2_4": {image: "torch:2.4", first_page: notebook}
          "2_5": {default: true, spawner_override: {http_timeout: 90}}
  - {slug: base, image: base}
"""


def test_unchosen_options_use_their_defaults() -> None:
    assert by_schema(OPTIONS) == []
    own = Catalog.from_text(OPTIONS).get("pytorch")
    assert [option.usual for option in own.profile_options.values()] == ["small", "2_5"]
    assert own.profile_options["memory"].display_name == "Memory"
    usual = own.with_options({})
    assert (usual.image, usual.mem_limit, usual.default_url) == ("torch:2.5", 8 * 2**30, "/lab")
    assert usual.spawner_override == {"http_timeout": 90, "extra_host_config": {"init": True}}
    assert own.images == ("torch:2.5", "torch:2.4")


GUARANTEES = """
environments:
  - slug: pytorch
    image: torch
    {entry}
    profile_options:
      memory:
        choices:
          small: {{{small}}}
          large: {{mem_limit: 32G}}
      cores:
        choices:
          few: {{{few}}}
          many: {{cpu_limit: 8}}
"""


@pytest.mark.parametrize(
    ("entry", "small", "few", "words"),
    [
        ("mem_guarantee: 16G", "mem_limit: 8G", "cpu_limit: 2", "16.0 GB, but a 'mem_limit' of 8"),
        ("mem_limit: 8G", "mem_guarantee: 9G", "cpu_limit: 2", "with some of its options, a 'mem"),
        ("cpu_limit: 4", "mem_limit: 8G", "cpu_guarantee: 4.5", "'cpu_guarantee' of 4.5, but a 'c"),
        ("mem_limit: 8G", "mem_limit: 4G", "mem_guarantee: 6G", "6.0 GB, but a 'mem_limit' of 4"),
    ],
)
def test_no_choice_of_options_guarantees_more_than_its_limit(
    entry: str, small: str, few: str, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Catalog.from_text(GUARANTEES.format(entry=entry, small=small, few=few))
    assert words in refused.value.message and "Lower the one" in refused.value.message


def test_choice_may_lower_the_guarantee_with_the_limit() -> None:
    small = "mem_limit: 8G, mem_guarantee: 4G"
    text = GUARANTEES.format(entry="mem_guarantee: 16G", small=small, few="cpu_guarantee: 1")
    own = Catalog.from_text(text).get("pytorch")
    assert guaranteed_to(own.with_options({})) == HostAmount(4 * 2**30, 1000)
    large = own.with_options({"memory": "large", "cores": "many"})
    assert guaranteed_to(large) == HostAmount(16 * 2**30)
    usual = HostAmount(2**40, 12_000)
    assert guaranteed_to(large, usual) == HostAmount(16 * 2**30, 8000), "up to its limit"


def test_choice_overrides_its_keys_and_merges_variables() -> None:
    own = Catalog.from_text(OPTIONS).get("pytorch")
    made = own.with_options({"memory": "large", "version": "2_4"})
    assert (made.image, made.mem_limit, made.default_url) == ("torch:2.4", 32 * 2**30, "/tree")
    assert made.environment == {"A": "own", "B": "large"}
    assert made.spawner_override == own.spawner_override
    assert own.environment == {"A": "own", "B": "own"}  # nobody else's


def test_unknown_option_or_choice_is_rejected() -> None:
    pytorch, base = Catalog.from_text(OPTIONS).environments
    with pytest.raises(InvalidRequest, match=r"has no 'huge' for 'memory'\. Choose one of: small"):
        pytorch.with_options({"memory": "huge"})
    with pytest.raises(InvalidRequest, match="has no option 'disk'"):
        pytorch.with_options({"disk": "large"})
    with pytest.raises(InvalidRequest, match="base has no option 'memory'"):
        base.with_options({"memory": "large"})


def test_form_choices_of_other_environments_are_ignored() -> None:
    pytorch, base = Catalog.from_text(OPTIONS).environments
    sent = {"environment": ["pytorch"], "options": ["pytorch.memory=large", "other.x=y"]}
    choice = options.parse(sent)
    assert choice.options_in(pytorch) == {"memory": "large"}
    assert options.parse(choice.as_user_options()) == choice
    assert options.parse({**sent, "environment": ["base"]}).options_in(base) == {}
    # Who names no environment gets the usual one, whichever that is.
    assert options.parse({"options": ["pytorch.memory=large"]}).options_in(base) == {}


@pytest.mark.parametrize(
    "value",
    [5, True, ["memory"], [5], ["a=b=c"], ["<b>=x"], {"a": None}, {"a": "../x"}, ["a" * 300]],
)
def test_malformed_options_field_is_rejected(value: Any) -> None:
    with pytest.raises(GPUSpawnerError, match="The field 'options' must"):
        options.parse({"options": value})
    with pytest.raises(GPUSpawnerError, match="The field 'options' must"):
        options.parse({"options": ["a=b"] * 2001})
