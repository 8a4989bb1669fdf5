"""Images that members bring themselves. Real: nothing but the rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpuspawner.core.errors import ConfigError, InvalidRequest, NotAllowed
from gpuspawner.spawners.docker import GPUDockerSpawner
from gpuspawner.spawners.member_images import check_contents, check_own_image, own_images

RULES = {
    "research": {"images": ["lab/*", "registry.lab:5000/**"], "most": "2G"},
    "ml": {"images": ["tools:1.*"], "labels": {"scanned": "yes"}},
}
DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("reference", "allowed"),
    [
        ("lab/tools", True),
        ("lab/tools:1.2", True),
        (f"lab/tools:1.2@{DIGEST}", True),
        (f"lab/tools@{DIGEST}", True),
        ("lab/deep/tools", False),
        ("registry.lab:5000/any/depth:x", True),
        ("registry.lab:5000.evil/any", False),
        ("tools:1.9", True),
        ("tools:2.0", False),
        ("tools", False),
        ("evil/lab/tools", False),
        ("label/tools", False),
    ],
)
def test_own_image_must_match_an_allowed_pattern(reference: str, allowed: bool) -> None:
    rules = own_images(RULES, {"research", "ml"})
    try:
        assert check_own_image(reference, rules) != []
        assert allowed
    except NotAllowed as error:
        assert not allowed
        assert "Allowed images: lab/*, registry.lab:5000/**, tools:1.*." in error.message
    except InvalidRequest:
        assert not allowed and ":5000." in reference


@pytest.mark.parametrize(
    "reference",
    ["", "-v", "../etc", "a b", "lab/tools;rm", "LAB/TOOLS", "lab//tools", "x" * 256, "lab/é"],
)
def test_invalid_image_reference_is_rejected(reference: str) -> None:
    with pytest.raises(InvalidRequest, match="docker pull"):
        check_own_image(reference, own_images({"*": {"images": ["**"]}}, ()))


def test_own_images_are_limited_by_size_labels_and_groups() -> None:
    research, ml = own_images(RULES, {"research"}), own_images(RULES, {"ml"})
    check_contents("lab/tools", 2**31, {}, research)
    with pytest.raises(NotAllowed, match=r"takes 3\.0 GB, and 2\.0 GB is the most"):
        check_contents("lab/tools", 3 * 2**30, {}, research)
    check_contents("tools:1.0", 1, {"scanned": "yes"}, ml)
    with pytest.raises(NotAllowed, match="does not carry the label scanned"):
        check_contents("tools:1.0", 1, {}, ml)
    with pytest.raises(NotAllowed, match="its label scanned is 'no', and has to be 'yes'"):
        check_contents("tools:1.0", 1, {"scanned": "no"}, ml)
    check_contents("lab/tools", 1, {}, [*ml, *research])

    assert own_images(RULES, {"others"}) == []
    with pytest.raises(NotAllowed, match="your own image"):
        check_own_image("lab/tools", [])

    # What is kept of a container belongs to the environment's image.
    spawner = GPUDockerSpawner.__new__(GPUDockerSpawner)
    spawner.user = SimpleNamespace(groups=[SimpleNamespace(name="ml")])
    spawner.own_images = RULES
    spawner.remove = True
    assert [rule.images for rule in spawner._own_rules()] == [("tools:1.*",)]
    spawner.remove = False
    assert spawner._own_rules() == []


@pytest.mark.parametrize(
    "rule",
    [
        *({}, {"images": "lab/*"}, {"images": [""]}, {"images": ["x"], "most": 5}, ["lab/*"]),
        *({"images": ["x"]} | more for more in ({"most": "5 GB"}, {"labels": ["a"]}, {"other": 1})),
    ],
)
def test_invalid_own_image_rule_names_the_setting(rule: Any) -> None:
    with pytest.raises(ConfigError, match=r"c\.GPUDockerSpawner\.own_images\['lab'\]"):
        own_images({"lab": rule}, {"lab"})
