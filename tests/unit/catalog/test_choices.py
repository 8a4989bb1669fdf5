"""Choices within an environment: real YAML text, the real parser, schema and request."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import yaml

from gpuspawner.catalog.json_schema import schema
from gpuspawner.catalog.loader import Catalog
from gpuspawner.core.errors import ConfigError, GPUSpawnerError, InvalidRequest
from gpuspawner.spawners import options

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
VALIDATOR = jsonschema.Draft202012Validator(schema())


def entry(lines: str) -> str:
    return f"environments:\n  - slug: a\n    image: b\n    profile_options: {lines}\n"


def valid(text: str) -> bool:
    data: Any = yaml.safe_load(text)
    return not list(VALIDATOR.iter_errors(data))


def test_what_is_not_said_is_as_usual() -> None:
    assert valid(TEXT)
    own = Catalog.from_text(TEXT).get("pytorch")
    assert [option.usual.name for option in own.profile_options] == ["small", "2_5"]
    assert [option.display_name for option in own.profile_options] == ["Memory", "version"]
    usual = own.with_options({})
    assert (usual.image, usual.mem_limit, usual.default_url) == ("torch:2.5", 8 * 2**30, "/lab")
    assert usual.spawner_override == {"http_timeout": 90, "extra_host_config": {"init": True}}
    assert own.images == ("torch:2.5", "torch:2.4")


def test_a_choice_changes_what_it_names_and_adds_to_variables() -> None:
    own = Catalog.from_text(TEXT).get("pytorch")
    made = own.with_options({"memory": "large", "version": "2_4"})
    assert (made.image, made.mem_limit, made.default_url) == ("torch:2.4", 32 * 2**30, "/tree")
    assert made.environment == {"A": "own", "B": "large"}
    assert made.spawner_override == own.spawner_override
    assert own.environment == {"A": "own", "B": "own"}  # nobody else's


def test_what_there_is_not_is_refused_with_what_there_is() -> None:
    pytorch, base = Catalog.from_text(TEXT).environments
    with pytest.raises(InvalidRequest, match=r"has no 'huge' for 'memory'\. Choose one of: small"):
        pytorch.with_options({"memory": "huge"})
    with pytest.raises(InvalidRequest, match="has no option 'disk'"):
        pytorch.with_options({"disk": "large"})
    with pytest.raises(InvalidRequest, match="base has no option 'memory'"):
        base.with_options({"memory": "large"})


def test_a_form_without_scripts_sends_the_choices_of_all_environments() -> None:
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
def test_what_is_no_choice_is_refused_in_words(value: Any) -> None:
    with pytest.raises(GPUSpawnerError, match="The field 'options' must"):
        options.parse({"options": value})
    with pytest.raises(GPUSpawnerError, match="The field 'options' must"):
        options.parse({"options": ["a=b"] * 2001})


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("[memory]", "is a list, not a mapping"),
        ("{memory: {}}", "option 'memory' has no 'choices'"),
        ("{memory: {choices: {}}}", "option 'memory' has no 'choices'"),
        ("{memory: {choices: {x: {}}, unlisted_choice: {}}}", "unknown key 'unlisted_choice'"),
        (
            "{memory: {choices: {x: {devices: {max: 2}}}}}",
            "choice 'x' has an unknown key 'devices'",
        ),
        (
            "{memory: {choices: {x: {kubespawner_override: {}}}}}",
            "unknown key 'kubespawner_override'. Did you mean 'spawner_override'?",
        ),
        ("{memory: {choices: {x: {spawner_override: {volumes: {}}}}}}", "may not set 'volumes'"),
        ("{memory: {choices: {x: {environment: {CUDA_X: a}}}}}", "is set by gpuspawner"),
        ("{'a b': {choices: {x: {}}}}", "'a b' cannot be a name here"),
        ("{a: {choices: {'x=y': {}}}}", "'x=y' cannot be a name here"),
        ("{" + ", ".join(f"o{n}: {{choices: {{x: {{}}}}}}" for n in range(11)) + "}", "10 are the"),
    ],
)
def test_a_mistake_names_its_line(lines: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Catalog.from_text(entry(lines))
    assert caught.value.message.startswith("catalog.yaml, line 4: ")
    assert words in caught.value.message
    assert not valid(entry(lines))


def test_two_defaults_are_refused() -> None:
    text = entry("{m: {choices: {x: {default: true}, y: {default: true}}}}")
    with pytest.raises(ConfigError, match="the choices 'x' and 'y' of option 'm' both say"):
        Catalog.from_text(text)
