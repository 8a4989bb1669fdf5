"""What a warm container is made after. Real: the pure rules; compared with plain values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.engines.warm import LABEL_WARM
from gpuspawner.spawners.recipes import NoRecipe, Recipe, recipe_of

ONE, TWO = "GPU-aaaa", "GPU-bbbb"
PLACE = Path("/srv/warm/0123")


def container(member: str = "anna", uuid: str = ONE, **changes: Any) -> dict[str, Any]:
    """How a member's container is made."""
    made: dict[str, Any] = {
        "image": "lab/pytorch:1",
        "name": f"jupyter-{member}",
        "command": ["jupyterhub-singleuser", "--debug"],
        "ports": {"8888/tcp": None},
        "volumes": ["/datasets", "/home/jovyan/work"],
        "labels": {"gpuspawner.lease": f"lease-of-{member}", "rack": "7"},
        "environment": {
            "JUPYTERHUB_API_TOKEN": f"secret-{uuid}",
            "JUPYTERHUB_USER": member,
            "GPUSPAWNER_LEASE_ID": f"lease-of-{member}",
            "NVIDIA_VISIBLE_DEVICES": uuid,
            "COURSE": "physics",
            "HOMEPAGE": f"https://lab.example/~{member}/",
        },
        "host_config": {
            "Binds": ["/srv/data:/datasets:ro", f"/srv/members/{member}:/home/jovyan/work:rw"],
            "DeviceRequests": [{"DeviceIDs": [uuid], "Capabilities": [["gpu"]]}],
            "ShmSize": 8 * 2**30,
        },
    }
    made.update(changes)
    return made


def recipe(member: str = "anna", uuid: str = ONE, **changes: Any) -> Recipe:
    made = container(member, uuid, **changes)
    return recipe_of(
        made,
        uuid=uuid,
        source=f"/srv/members/{member}",
        target="/home/jovyan/work",
        members=(member,),
    )


def test_two_members_and_two_devices_have_one_recipe() -> None:
    assert recipe("anna", ONE).key == recipe("ben", TWO).key


def test_it_makes_a_container_for_any_device_that_knows_no_member() -> None:
    made = recipe("anna", ONE).create(TWO, PLACE)
    assert "anna" not in json.dumps(made) and "secret" not in json.dumps(made)
    assert ONE not in json.dumps(made)
    assert made["name"] == "gpuspawner-warm-0123" and made["stdin_open"] is True
    assert made["command"] == ["jupyterhub-singleuser"]
    assert made["labels"] == {"rack": "7", "gpuspawner.lease": "", LABEL_WARM: str(PLACE)}
    assert made["environment"] == {
        "NVIDIA_VISIBLE_DEVICES": TWO,
        "COURSE": "physics",
        "GPUSPAWNER_WARM": "/home/jovyan/work",
    }
    assert made["host_config"] == {
        "Binds": ["/srv/data:/datasets:ro", f"{PLACE}/workspace:/home/jovyan/work:rw,rslave"],
        "DeviceRequests": [{"DeviceIDs": [TWO], "Capabilities": [["gpu"]]}],
        "ShmSize": 8 * 2**30,
    }
    assert made["ports"] == {"8888/tcp": None} and made["image"] == "lab/pytorch:1"


def test_what_the_member_gets_at_the_grant_is_all_that_their_own_would_have() -> None:
    found = recipe("anna", ONE)
    assert dict(found.environment) == container("anna", ONE)["environment"]
    assert found.arguments == ("--debug",)
    assert "secret" not in repr(found), "a token in a log"


OTHERS: list[dict[str, Any]] = [
    {"image": "lab/pytorch:2"},
    {"command": ["/opt/venv/bin/jupyterhub-singleuser"]},
    {"labels": {"rack": "8"}},
    {"user": "1001"},
    {"environment": {**container()["environment"], "COURSE": "chemistry"}},
    {"environment": {**container()["environment"], "JUPYTERHUB_SINGLEUSER_APP": "notebook"}},
    {"environment": {**container()["environment"], "PYTHONPATH": "/srv"}},
    {"host_config": {**container()["host_config"], "Memory": 2**30}},
    {"volumes": ["/home/jovyan/work"]},
]


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: "-".join(change))
def test_whatever_else_differs_makes_it_another(change: dict[str, Any]) -> None:
    assert recipe(**change).key != recipe().key


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"command": ["start.sh"]}, "its command is"),
    ({"command": None}, "its command is"),
    ({"tty": True}, "terminal"),
    ({"host_config": {"Binds": ["/srv/data:/datasets:ro"]}}, "no workspace"),
    ({"hostname": "lab_of anna"}, "hostname names the member"),
    ({"labels": {"who": "anna"}}, "labels.who names the member"),
    ({"host_config": {**container()["host_config"], "Links": object()}}, "written down"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_where_nothing_can_wait_it_says_why(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoRecipe, match=reason):
        recipe(**change)


def test_another_bind_of_the_members_is_no_ones_else() -> None:
    binds = [*container()["host_config"]["Binds"], "/srv/home/anna:/home/jovyan/.config:rw"]
    with pytest.raises(NoRecipe, match=r"host_config\.Binds names the member"):
        recipe(host_config={**container()["host_config"], "Binds": binds})


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=12), max_size=4))
def test_a_container_is_given_only_for_one_that_says_the_same(extra: dict[str, str]) -> None:
    """Of two members with the same key, nothing but what is given later differs."""
    environment = {**container("ben", TWO)["environment"], **extra}
    try:
        other = recipe("ben", TWO, environment=environment)
    except NoRecipe:
        return
    if other.key == recipe("anna", ONE).key:
        first = recipe("anna", ONE).create(TWO, PLACE)["environment"]
        later = ("JUPYTERHUB_", "JPY_", "GPUSPAWNER_")
        own = {k: v for k, v in environment.items() if not k.startswith(later) and "ben" not in v}
        assert own == {k: v for k, v in first.items() if k != "GPUSPAWNER_WARM"}
