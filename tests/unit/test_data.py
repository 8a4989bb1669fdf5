"""Which datasets and folders a server has: all real, pure values."""

from __future__ import annotations

from typing import Any

import pytest

from gpuspawner.catalog.loader import Catalog
from gpuspawner.core.errors import InvalidRequest
from gpuspawner.spawners import options
from gpuspawner.spawners.options import data_choices, with_data

CATALOG = Catalog.from_mapping(
    {
        "environments": [
            {"slug": "lab", "image": "x"},
            {"slug": "course", "image": "x", "datasets": ["flowers"], "shared_folders": []},
        ],
        "datasets": {
            "flowers": {"source": "/srv/flowers"},
            "secrets": {"source": "/srv/secrets", "allowed_groups": ["staff"]},
        },
        "shared_folders": {"team": {"source": "/srv/team"}},
    }
)
LAB, COURSE = CATALOG.environments


def mounted(chosen: Any, *, course: bool = False, groups: tuple[str, ...] = ()) -> list[str]:
    choice = options.parse({} if chosen is None else {"data": chosen})
    environment = with_data(CATALOG, COURSE if course else LAB, choice.data, groups)
    return [mount.name for mount in CATALOG.mounts_for(environment, groups)]


def test_all_unless_they_say() -> None:
    assert mounted(None) == ["flowers", "team"]
    assert mounted(None, groups=("staff",)) == ["flowers", "secrets", "team"]
    assert mounted(["team"]) == ["team"]
    assert mounted("flowers") == ["flowers"]
    assert mounted([""]) == [], "a form without a mark in it"
    assert mounted(["", "flowers", "flowers"]) == ["flowers"]


def test_what_another_environment_has_is_left_out() -> None:
    assert mounted(["flowers", "team"], course=True) == ["flowers"]


@pytest.mark.parametrize("name", ["nope", "secrets", "../flowers", "/srv/secrets"])
def test_what_one_may_not_have_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match="There are: flowers, team") as refusal:
        mounted([name])
    assert repr(name) in refusal.value.message


@pytest.mark.parametrize(
    "value", [5, {"flowers": True}, [["flowers"]], ["a\nb"], ["x" * 200], ["x"] * 300]
)
def test_what_is_no_list_of_names_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="'data'"):
        options.parse({"data": value})


def test_what_is_stored_comes_back() -> None:
    stored = options.parse({"data": ["", "team"]}).as_user_options()
    assert stored == {"data": ["team"]}
    assert options.parse(stored).data == ("team",)
    assert options.parse({"data": [""]}).as_user_options() == {"data": []}


def test_the_form_offers_what_one_may_have_and_remembers() -> None:
    found = data_choices(CATALOG, [LAB, COURSE], (), ("team",))
    assert [(each.name, each.where, each.checked) for each in found] == [
        ("flowers", "lab course", False),
        ("team", "lab", True),
    ]
    assert all(each.checked for each in data_choices(CATALOG, [LAB], (), None))
