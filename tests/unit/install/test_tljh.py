"""The plugin for TLJH. Real: files, templates, pluggy, the hub's configuration and its check.

Stand-ins: programs, and TLJH, which no package index has. Its hooks have its names, and its
configuration sets what matters here and then reads an admin's files, as TLJH's does.
"""

from __future__ import annotations

import configparser
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pluggy
import pytest

from gpuspawner.catalog.loader import load
from gpuspawner.cli.config import read_file
from gpuspawner.core.errors import Refused
from gpuspawner.install import tljh
from gpuspawner.install.files import FileTree
from tests.support.processes import REPO
from tests.unit.install.machine import FakeHost, modes_below, run, texts_below

FOLDER = "/opt/tljh/config/jupyterhub_config.d"
CONFIG, CATALOG = f"{FOLDER}/gpuspawner.py", f"{FOLDER}/catalog.yaml"
DROP_IN = "/etc/systemd/system/jupyterhub.service.d/gpuspawner.conf"
MIG_UNIT = "/etc/systemd/system/gpuspawner-mig.service"
COMMAND = "/usr/local/bin/gpuspawner"

TLJH = """
from glob import glob
c.JupyterHub.spawner_class = "simple"
c.JupyterHub.hub_port = 15001
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.admin_users = {{"grace"}}
c.Spawner.mem_limit = None
c.JupyterHub.services = [{{"name": "cull-idle", "admin": True, "command": ["culler"]}}]
for file in sorted(glob("{folder}/*.py")):
    load_subconfig(file)
"""

spec = pluggy.HookspecMarker("tljh")


class Hooks:
    """Those of TLJH that a plugin such as ours may have."""

    @spec
    def tljh_extra_hub_pip_packages(self) -> Any: ...
    @spec
    def tljh_extra_apt_packages(self) -> Any: ...
    @spec
    def tljh_custom_jupyterhub_config(self, c: Any) -> Any: ...
    @spec
    def tljh_config_post_install(self, config: Any) -> Any: ...
    @spec
    def tljh_post_install(self) -> Any: ...
    @spec
    def tljh_new_user_create(self, username: str) -> Any: ...


@pytest.fixture
def hook() -> Any:
    """TLJH's hooks, with the plugin that setup.cfg names."""
    setup = configparser.ConfigParser()
    setup.read(REPO / "setup.cfg", encoding="utf-8")
    _, _, module = setup["options.entry_points"]["tljh"].strip().partition(" = ")
    manager = pluggy.PluginManager("tljh")
    manager.add_hookspecs(Hooks)
    manager.register(import_module(module))
    manager.check_pending()  # TLJH has every hook that the plugin has
    return manager.hook


@pytest.fixture
def config(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TLJH's configuration file, in its package."""
    monkeypatch.delenv("TLJH_INSTALL_PREFIX", raising=False)
    package = tmp_path / "packages" / "tljh"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (found := package / "jupyterhub_config.py").write_text(TLJH.format(folder=f"{root}{FOLDER}"))
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "tljh", raising=False)  # another test's
    return found


def test_docker_is_installed_unless_there_is_one(
    hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hook.tljh_extra_apt_packages() == [["docker.io"]]
    (tmp_path / "docker").touch(0o755)
    assert hook.tljh_extra_apt_packages() == [[]]


def test_servers_may_be_idle_for_hours_unless_the_admin_says_otherwise(hook: Any) -> None:
    fresh: dict[str, Any] = {}
    hook.tljh_config_post_install(config=fresh)
    assert fresh == {"services": {"cull": {"timeout": 4 * 3600}}}
    theirs = {"services": {"cull": {"timeout": 60, "every": 10}}}
    hook.tljh_config_post_install(config=theirs)
    assert theirs == {"services": {"cull": {"timeout": 60, "every": 10}}}


def test_hub_leases_gpus_and_all_else_is_as_tljh_has_it(
    root: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FakeHost(root)
    (root / "usr/local/bin").mkdir(parents=True)
    before = read_file(config)
    for _ in tljh.set_up(FileTree(root), host):
        pass
    assert host.commands == [
        "docker network create --subnet 172.30.0.0/16 --gateway 172.30.0.1 "
        "-o com.docker.network.bridge.enable_icc=false gpuspawner",
        "systemctl daemon-reload",
        "systemctl restart jupyterhub.service",
    ]
    after = read_file(config)
    assert before.JupyterHub.spawner_class == "simple"
    assert after.JupyterHub.spawner_class == "gpu-docker"
    assert after.JupyterHub.hub_ip == "172.30.0.1"
    names = [service["name"] for service in after.JupyterHub.services]
    assert names == ["cull-idle", "gpu"]
    for section, name in (
        ("JupyterHub", "hub_port"),
        ("JupyterHub", "authenticator_class"),
        ("Authenticator", "admin_users"),
        ("Spawner", "mem_limit"),
    ):
        assert after[section][name] == before[section][name]
    assert "mem_limit" not in after.DockerSpawner
    assert after.GPUSpawnerMixin.catalog == f"{root}{CATALOG}"
    assert load(f"{root}{CATALOG}").environments

    monkeypatch.chdir(root)
    checked = run("check", "--no-containers", "-f", str(config)).output.splitlines()
    assert any(f"{config}, servers by GPUDockerSpawner" in line for line in checked), checked
    assert not [line for line in checked if line.startswith("FAIL") and "config" in line]


def test_another_run_of_the_installer_keeps_what_an_admin_edited(root: Path, config: Path) -> None:
    host = FakeHost(root)
    list(tljh.set_up(FileTree(root), host))
    modes = modes_below(root)
    assert modes[COMMAND] == 0o755 and modes[DROP_IN] == 0o644
    edited = dict.fromkeys((CONFIG, CATALOG), "# edited\n")
    for path, text in {**edited, DROP_IN: "old", COMMAND: "old"}.items():
        Path(f"{root}{path}").write_text(text)
    before = len(host.commands)
    list(tljh.set_up(FileTree(root), host))
    texts = texts_below(root)
    assert {path: texts[path] for path in edited} == edited
    drop_in = texts[DROP_IN].splitlines()
    assert "PrivateDevices=no" in drop_in
    assert "Wants=gpuspawner-mig.service" in drop_in
    assert {f"ExecStart={COMMAND} mig restore", "Before=jupyterhub.service"} <= {
        *texts[MIG_UNIT].splitlines()
    }
    assert f'-f {config} "${{@:2}}"' in texts[COMMAND]
    assert host.commands[before:] == [
        "systemctl daemon-reload",
        "systemctl restart jupyterhub.service",
    ]


def test_hub_is_left_alone_where_docker_does_not_answer(root: Path, config: Path) -> None:
    host = FakeHost(root, failing="docker")
    with pytest.raises(Refused, match="Docker is not responding"):
        list(tljh.set_up(FileTree(root), host))
    assert texts_below(root).keys() & {CONFIG, CATALOG, DROP_IN, MIG_UNIT, COMMAND} == set()
    assert host.commands == []
