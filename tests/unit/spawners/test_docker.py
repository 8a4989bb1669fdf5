"""Classes and settings of DockerSpawner with ours. Real: the classes of all three packages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from dockerspawner import DockerSpawner, SystemUserSpawner
from jupyterhub.orm import Spawner
from traitlets import default
from traitlets.config import Config

from gpuspawner.cli import config as cli_config
from gpuspawner.cli.check import check_spawner_class
from gpuspawner.cli.hub import open_hub
from gpuspawner.core.errors import InvalidRequest
from gpuspawner.engines.preflight import Status
from gpuspawner.slurm.images import QUICK
from gpuspawner.spawners.compat import SpawnException
from gpuspawner.spawners.docker import GPUDockerSpawner
from gpuspawner.spawners.form import names_in, note_of_link
from gpuspawner.spawners.local import GPULocalSpawner
from gpuspawner.spawners.slurm import GPUSlurmSpawner

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
    config = Config({"DockerSpawner": settings})
    config.JupyterHub.spawner_class = cls
    return open_hub(config).spawner


@pytest.mark.parametrize("cls", [ByName, ByDecorator, ByAttribute, ByMethod])
def test_custom_form_of_a_rebased_class_is_used(cls: type) -> None:
    spawner = spawner_of(type("Rebased", (GPUDockerSpawner, cls), {}))
    assert spawner.shows_own_form() and spawner.takes_foreign_options()
    own = {"course": ["ml"]}

    async def read(spawner: Any, sent: dict[str, list[str]]) -> Any:
        found = spawner.run_options_from_form(sent)
        return await found if asyncio.iscoroutine(found) else found

    alone = asyncio.run(read(spawner_of(cls), own))
    # In DockerSpawner 13 it is a method, which hides a default of its trait.
    hidden = cls is ByDecorator and "options_from_form" in vars(DockerSpawner)
    assert alone == ({} if hidden else {"course": "ml"})
    sent = {**own, "gpus": ["1"], "_xsrf": ["x"]}
    assert asyncio.run(read(spawner, sent)) == {**alone, "gpus": 1}


@pytest.mark.parametrize("cls", [GPUDockerSpawner, SystemUserSpawner])
def test_default_spawner_classes_have_no_custom_form(cls: type) -> None:
    rebased = cls if cls is GPUDockerSpawner else type("Rebased", (GPUDockerSpawner, cls), {})
    spawner = spawner_of(rebased)
    assert not spawner.shows_own_form() and not spawner.takes_foreign_options()
    with pytest.raises(SpawnException, match="There is no field 'course'"):
        spawner.run_options_from_form({"course": ["ml"]})


def test_server_cannot_have_the_name_of_a_run() -> None:
    """JupyterHub 5 allows it; we would take its server for a run."""
    spawner = spawner_of(GPUDockerSpawner)
    spawner.orm_spawner = Spawner(name="run:train-1")
    with pytest.raises(InvalidRequest, match="cannot begin with 'run:'"):
        spawner.resolve_options()


# Fields that only hooks read.


def test_extra_options_reach_hooks_and_others_are_rejected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawner = spawner_of(GPUDockerSpawner, extra_options=["course"])
    spawner.user_options = {"course": "ml", "gpus": 0}
    _, request = spawner.resolve_options()
    assert request.devices == 0 and spawner.user_options["course"] == "ml"
    found = spawner.run_options_from_form({"course": ["ml"], "gpus": ["0"]})
    assert found == {"course": "ml", "gpus": 0}
    found = spawner.run_options_from_form({"course": ["ml", "stats"]})
    assert found == {"course": ["ml", "stats"]}
    spawner.user_options = {"image": "lab/other"}
    monkeypatch.setattr(spawner.log, "propagate", True)
    caplog.set_level("INFO", logger=spawner.log.name)
    with pytest.raises(InvalidRequest) as caught:
        spawner.resolve_options()
    assert "shown_at, course. An admin of this hub can allow others." in caught.value.message
    assert "c.GPUSpawnerMixin.extra_options" in caplog.text


# Links.


def test_link_note_shows_only_fields_of_the_admin_form() -> None:
    assert not note_of_link(COURSES, {}, ["week"])
    asked = {"course": ['"><script>'], "secret": ["x"], "utm_source": ["mail"], "week": ["7"]}
    note = note_of_link(COURSES, asked, ["week"])
    assert "course: &#34;&gt;&lt;script&gt;" in note
    assert "secret" not in note and "utm_source" not in note
    assert '<input type="hidden" name="week" value="7">' in note

    assert names_in(COURSES) == {"course"}
    form = '<TEXTAREA name=a></TEXTAREA><input name="b"><input type=file name=c>'
    assert names_in(form) == {"a", "b"}
    assert names_in("no form < at all") == set()


# What check says.

REBASED = """
from dockerspawner import SystemUserSpawner
from gpuspawner.spawners.docker import GPUDockerSpawner
c.JupyterHub.spawner_class = SystemUserSpawner
c.SystemUserSpawner.run_as_root = True
class GPUSystemUserSpawner(GPUDockerSpawner, SystemUserSpawner):
    pass
c.JupyterHub.spawner_class = GPUSystemUserSpawner
"""


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
        (REBASED, ""),
    ],
)
def test_check_reports_a_replaced_spawner_class(text: str, replaced: str, tmp_path: Path) -> None:
    file = tmp_path / "jupyterhub_config.py"
    ours = "" if text == REBASED else 'c.JupyterHub.spawner_class = "gpu-docker"\n'
    file.write_text(f"{text}\n{ours}", encoding="utf-8")
    found = list(check_spawner_class(file, open_hub(cli_config.read_file(file))))
    assert [finding.status for finding in found] == [Status.FAIL] * bool(replaced)
    if replaced:
        assert f"GPUDockerSpawner replaces {replaced}" in found[0].text
        assert f"class GPU{replaced}(GPUDockerSpawner, {replaced})" in found[0].remedy


# DockerSpawner's own settings.


@pytest.mark.parametrize("name", ["allowed_images", "image_whitelist"])
def test_image_list_creates_a_custom_form(name: str) -> None:
    images = {"plain": "lab/plain", "other": "lab/other"}
    spawner = spawner_of(GPUDockerSpawner, **{name: images})
    assert spawner.shows_own_form() and spawner.takes_foreign_options()
    assert 'value="other"' in spawner.options_form


@pytest.mark.parametrize(
    ("settings", "sent", "kept"),
    [
        ({}, {"Memory": 0}, {}),
        ({"mem_limit": 0}, {"Memory": 0}, {"Memory": 0}),
        ({"mem_limit": lambda spawner: 0}, {"Memory": 0}, {"Memory": 0}),
        ({"mem_limit": "1G"}, {"Memory": 2**30}, {"Memory": 2**30}),
        ({"mem_limit": 0, "extra_host_config": {"mem_limit": 7}}, {"Memory": 7}, {"Memory": 7}),
        (
            {"extra_host_config": {"pids_limit": 0, "oom_score_adj": 0, "mem_limit": 0}},
            {"Memory": 0},
            {"PidsLimit": 0, "OomScoreAdj": 0, "Memory": 0},
        ),
        ({"extra_host_config": {"privileged": False, "cpu_shares": 0}}, {}, {}),
    ],
)
def test_zero_set_by_the_admin_is_kept(
    settings: dict[str, Any], sent: dict[str, Any], kept: dict[str, Any]
) -> None:
    assert spawner_of(GPUDockerSpawner, **settings)._with_own_zeros(sent) == kept


# Polls of a server on a node.


class OnNode(GPUSlurmSpawner):
    """A spawner whose server runs on a node, with clients that only know their time-out."""

    node = cast(Any, SimpleNamespace(name="node1"))

    def connect(self, timeout: float = 60) -> Any:
        return SimpleNamespace(timeout=timeout)


@pytest.mark.parametrize(
    ("pending", "seconds"),
    [("_spawn_pending", 60), ("_stop_pending", 60), ("_check_pending", QUICK), ("", QUICK)],
)
def test_node_poll_uses_a_short_timeout(pending: str, seconds: float) -> None:
    """A start or a stop may take long; a poll must not delay others."""
    user = SimpleNamespace(
        name="ada", escaped_name="ada", settings={}, groups=[], url="/", admin=False
    )
    spawner = OnNode(user=user)
    if pending:
        setattr(spawner, pending, True)
    assert spawner.client.timeout == seconds
    assert spawner.client is spawner.client, "one for all servers on the node"


# Inheritance.


@pytest.mark.parametrize("cls", [GPUDockerSpawner, GPUSlurmSpawner, GPULocalSpawner])
def test_spawner_has_at_most_four_gpuspawner_classes(cls: type) -> None:
    ours = [each for each in cls.__mro__ if each.__module__.startswith("gpuspawner.")]
    assert len(ours) <= 4
