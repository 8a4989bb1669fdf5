"""Spawner classes of a hub's own, based on ours. Real: the classes of all three packages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dockerspawner import DockerSpawner, SystemUserSpawner
from jupyterhub.spawner import SpawnException
from traitlets import default
from traitlets.config import Config

from gpuspawner.cli import config as cli_config
from gpuspawner.cli.check import check_spawner_class
from gpuspawner.cli.hub import open_hub
from gpuspawner.core.errors import InvalidRequest
from gpuspawner.engines.preflight import Status
from gpuspawner.spawners.docker import GPUDockerSpawner
from gpuspawner.spawners.form import names_in

COURSES = '<select name="course"><option>ml</option></select><input type="hidden" name="secret">'


class ByName(DockerSpawner):
    """As in most public configurations."""

    def _options_form_default(self) -> str:
        return COURSES

    def options_from_form(self, form_data: dict[str, list[str]]) -> dict[str, Any]:
        return {"course": form_data["course"][0]}


class ByDecorator(DockerSpawner):
    @default("options_form")
    def _form(self) -> str:
        return COURSES

    @default("options_from_form")
    def _from_form(self) -> Any:
        return lambda form_data: {"course": form_data["course"][0]}


class ByAttribute(DockerSpawner):
    options_form = COURSES

    @staticmethod
    async def options_from_form(form_data: dict[str, list[str]]) -> dict[str, Any]:
        return {"course": form_data["course"][0]}


class ByMethod(DockerSpawner):
    async def get_options_form(self) -> str:
        return COURSES

    def run_options_from_form(self, form_data: dict[str, list[str]]) -> dict[str, Any]:
        return {"course": form_data["course"][0]}


def spawner_of(cls: type, **settings: Any) -> Any:
    """A spawner of a hub that is configured and not started."""
    config = Config()
    config.JupyterHub.spawner_class = cls
    config.GPUDockerSpawner.update(settings)
    return open_hub(config).spawner


@pytest.mark.parametrize("cls", [ByName, ByDecorator, ByAttribute, ByMethod])
def test_form_of_a_rebased_class_is_seen(cls: type) -> None:
    spawner = spawner_of(type("Rebased", (GPUDockerSpawner, cls), {}))
    assert spawner.shows_own_form() and spawner.takes_foreign_options()
    sent = {"course": ["ml"], "gpus": ["1"], "_xsrf": ["x"]}

    async def read() -> Any:
        found = spawner.run_options_from_form(sent)
        return await found if asyncio.iscoroutine(found) else found

    assert asyncio.run(read()) == {"course": "ml", "gpus": 1}


@pytest.mark.parametrize("cls", [GPUDockerSpawner, SystemUserSpawner])
def test_classes_as_shipped_have_no_own_form(cls: type) -> None:
    rebased = cls if cls is GPUDockerSpawner else type("Rebased", (GPUDockerSpawner, cls), {})
    spawner = spawner_of(rebased)
    assert not spawner.shows_own_form() and not spawner.takes_foreign_options()
    with pytest.raises(SpawnException, match="'course' is nothing that you can choose"):
        spawner.run_options_from_form({"course": ["ml"]})


# Fields that only hooks read.


def test_extra_options_reach_hooks_and_others_are_refused() -> None:
    spawner = spawner_of(GPUDockerSpawner, extra_options=["course"])
    spawner.user_options = {"course": "ml", "gpus": 0}
    _, request = spawner.resolve_options()
    assert request.devices == 0 and spawner.user_options["course"] == "ml"
    found = spawner.run_options_from_form({"course": ["ml"], "gpus": ["0"]})
    assert found == {"course": "ml", "gpus": 0}
    found = spawner.run_options_from_form({"course": ["ml", "stats"]})
    assert found == {"course": ["ml", "stats"]}
    spawner.user_options = {"image": "lab/other"}
    with pytest.raises(InvalidRequest) as caught:
        spawner.resolve_options()
    assert "shown_at, course. An admin of this hub can allow others." in caught.value.message


def test_refusal_names_the_setting_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawner = spawner_of(GPUDockerSpawner)
    spawner.user_options = {"course": "ml"}
    monkeypatch.setattr(spawner.log, "propagate", True)
    caplog.set_level("INFO", logger=spawner.log.name)
    with pytest.raises(InvalidRequest):
        spawner.resolve_options()
    assert "c.GPUSpawnerMixin.extra_options" in caplog.text


# Links.


def test_names_of_the_fields_of_a_form_are_those_that_a_member_sets() -> None:
    assert names_in(COURSES) == {"course"}
    assert names_in('<TEXTAREA name=a></TEXTAREA><input name="b"><input type=file name=c>') == {
        *("a", "b")
    }
    assert names_in("no form < at all") == set()


def test_a_link_is_told_of_the_admins_fields_alone() -> None:
    spawner = spawner_of(type("Rebased", (GPUDockerSpawner, ByName), {}), extra_options=["week"])
    assert not spawner._note_of_link(COURSES)
    spawner.asked_beside = {
        "course": ['"><script>'],
        "secret": ["x"],
        "utm_source": ["mail"],
        "week": ["7"],
    }
    note = spawner._note_of_link(COURSES)
    assert "course: &#34;&gt;&lt;script&gt;" in note
    assert "secret" not in note and "utm_source" not in note
    assert '<input type="hidden" name="week" value="7">' in note


# What check says.


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ('c.JupyterHub.spawner_class = "docker"', ""),
        ('c.JupyterHub.spawner_class = "systemuser"', ""),
        ('c.JupyterHub.spawner_class = "docker-system-user"', "SystemUserSpawner"),
        ('c.JupyterHub.spawner_class = "dockerspawner.SystemUserSpawner"', "SystemUserSpawner"),
        ("c.SystemUserSpawner.run_as_root = True", "SystemUserSpawner"),
        (
            "from dockerspawner import DockerSpawner\n"
            "class Lab(DockerSpawner):\n    pass\n"
            "c.JupyterHub.spawner_class = Lab",
            "Lab",
        ),
        ('c.JupyterHub.spawner_class = "gpu-local"', ""),
        ("", ""),
    ],
)
def test_check_names_a_class_that_ours_takes_the_place_of(
    text: str, replaced: str, tmp_path: Path
) -> None:
    file = tmp_path / "jupyterhub_config.py"
    file.write_text(f'{text}\nc.JupyterHub.spawner_class = "gpu-docker"\n', encoding="utf-8")
    found = list(check_spawner_class(file, open_hub(cli_config.read_file(file))))
    assert [finding.status for finding in found] == [Status.FAIL] * bool(replaced)
    if replaced:
        assert f"GPUDockerSpawner takes the place of {replaced}" in found[0].text
        assert f"class GPU{replaced}(GPUDockerSpawner, {replaced})" in found[0].remedy


def test_check_is_content_with_a_rebased_class(tmp_path: Path) -> None:
    file = tmp_path / "jupyterhub_config.py"
    file.write_text(
        "from dockerspawner import SystemUserSpawner\n"
        "from gpuspawner.spawners.docker import GPUDockerSpawner\n"
        "c.JupyterHub.spawner_class = SystemUserSpawner\n"
        "c.SystemUserSpawner.run_as_root = True\n"
        "class GPUSystemUserSpawner(GPUDockerSpawner, SystemUserSpawner):\n    pass\n"
        "c.JupyterHub.spawner_class = GPUSystemUserSpawner\n",
        encoding="utf-8",
    )
    assert not list(check_spawner_class(file, open_hub(cli_config.read_file(file))))
