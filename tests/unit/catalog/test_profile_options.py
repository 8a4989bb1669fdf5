"""Choices within an environment: real YAML text, the real parser, schema and request."""

from __future__ import annotations

from typing import Any

import pytest

from gpuspawner.catalog.loader import Catalog
from gpuspawner.core.errors import GPUSpawnerError, InvalidRequest
from gpuspawner.spawners import options
from tests.unit.catalog.texts import by_schema

TEXT = """
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
    assert by_schema(TEXT) == []
    own = Catalog.from_text(TEXT).get("pytorch")
    assert [option.usual for option in own.profile_options.values()] == ["small", "2_5"]
    assert own.profile_options["memory"].display_name == "Memory"
    usual = own.with_options({})
    assert (usual.image, usual.mem_limit, usual.default_url) == ("torch:2.5", 8 * 2**30, "/lab")
    assert usual.spawner_override == {"http_timeout": 90, "extra_host_config": {"init": True}}
    assert own.images == ("torch:2.5", "torch:2.4")


def test_choice_overrides_its_keys_and_merges_variables() -> None:
    own = Catalog.from_text(TEXT).get("pytorch")
    made = own.with_options({"memory": "large", "version": "2_4"})
    assert (made.image, made.mem_limit, made.default_url) == ("torch:2.4", 32 * 2**30, "/tree")
    assert made.environment == {"A": "own", "B": "large"}
    assert made.spawner_override == own.spawner_override
    assert own.environment == {"A": "own", "B": "own"}  # nobody else's


def test_unknown_option_or_choice_is_rejected() -> None:
    pytorch, base = Catalog.from_text(TEXT).environments
    with pytest.raises(InvalidRequest, match=r"has no 'huge' for 'memory'\. Choose one of: small"):
        pytorch.with_options({"memory": "huge"})
    with pytest.raises(InvalidRequest, match="has no option 'disk'"):
        pytorch.with_options({"disk": "large"})
    with pytest.raises(InvalidRequest, match="base has no option 'memory'"):
        base.with_options({"memory": "large"})


def test_form_choices_of_other_environments_are_ignored() -> None:
    pytorch, base = Catalog.from_text(TEXT).environments
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
