"""The catalog from a shell. Real: the command, and files; no database is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import Command
from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.nvml_library import gpus

CATALOG = """
environments:
  - slug: torch
    display_name: "Torch \\u202b \\x1b[31m"
    image: lab/torch:2.9
    tested_on: 2026-05-31
    frameworks: {PyTorch: "2.9"}
    devices: {max: 4}
    models: [A100]
    min_memory: 80G
    allowed_groups: [lab, course]
  - {slug: needy, image: x, cpu_variant: false, changes: changes.md}
  - {slug: cpu, image: x, devices: {max: 0}}
datasets: {a: {source: /srv/a}}
"""


@pytest.fixture
def cli(tmp_path: Path) -> Command:
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "changes.md").write_text("* new")
    (folder / "catalog.yaml").write_text(CATALOG.replace(" \\u202b \\x1b[31m", ""))
    return Command(folder, f"sqlite:///{folder}/none.sqlite", is_process=False)


def test_catalog_list_prints_environments(cli: Command) -> None:
    lines = cli("catalog", "list", "catalog.yaml").stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["SLUG", "torch", "needy", "cpu"]
    assert " ".join(lines[1].split()) == (
        "torch Torch 0-4 A100 from 80 GB course, lab 2026-05-31 lab/torch:2.9"
    )
    assert [line.split()[2] for line in lines[2:]] == ["1", "0"]
    (torch, *_) = cli.json("catalog", "list", "catalog.yaml")["environments"]
    assert torch["frameworks"] == [{"name": "PyTorch", "version": "2.9"}]
    assert (torch["tested_on"], torch["allowed_groups"]) == ("2026-05-31", ["course", "lab"])
    assert (torch["min_memory"], torch["devices"]) == (80 * 10**9, {"default": 1, "max": 4})


def test_catalog_defaults_to_the_hub_configuration(cli: Command) -> None:
    refused = cli("catalog", code=2)
    assert "No catalog is set" in refused.stderr and "Name a file, or set" in refused.stderr
    config = cli.folder / "jupyterhub_config.py"
    config.write_text(
        config.read_text()
        + "c.JupyterHub.spawner_class = 'gpu-local'\n"
        + "c.GPUSpawnerMixin.catalog = 'catalog.yaml'\n"
    )
    assert "torch" in cli("catalog").stdout
    assert cli("catalog", "check").stdout == (
        "catalog.yaml is valid: 3 environments, 1 dataset and 0 shared folders.\n"
    )


def test_catalog_check_reports_a_mistake_with_its_line(cli: Command) -> None:
    assert cli.json("catalog", "check", "catalog.yaml") == {
        "file": "catalog.yaml",
        "environments": 3,
        "datasets": 1,
        "shared_folders": 0,
    }
    (cli.folder / "changes.md").unlink()
    refused = cli("catalog", "check", "catalog.yaml", code=2)
    assert refused.stdout == ""
    assert refused.stderr == (
        "gpuspawner: catalog.yaml, line 12: 'changes' of environment 'needy' names 'changes.md', "
        "which cannot be read beside the catalog: No such file or directory. Put the file there, "
        "or remove the key.\n"
    )
    assert "cannot be read: No such file" in cli("catalog", "check", "none.yaml", code=2).stderr
    (cli.folder / "catalog.yaml").write_text(CATALOG)
    refused = cli("catalog", "check", "catalog.yaml", code=2)
    assert "line 4: 'display_name' of environment 'torch' is" in refused.stderr
    assert "\x1b" not in refused.stderr


def test_driver_too_old_for_an_environment_fails_the_check(cli: Command, tmp_path: Path) -> None:
    library = nvml.build_nvml_library(tmp_path)
    nvml.write_fleet(tmp_path / "fleet", gpus(1))
    seen = nvml.environment(library, tmp_path / "fleet")
    cli.is_process = True  # so that the driver's library is the one in its environment
    (cli.folder / "catalog.yaml").write_text(
        "environments:\n"
        "  - {slug: fits, image: x, min_driver: '550.54', min_cuda: '12.4'}\n"
        "  - {slug: new, image: x, min_driver: '550.54.16'}\n"
    )
    (cli.folder / "jupyterhub_config.py").write_text(
        "c.JupyterHub.spawner_class = 'gpu-local'\nc.GPUSpawnerMixin.catalog = 'catalog.yaml'\n"
    )
    done = cli("check", "--no-containers", "--json", code=1, **seen)
    (driver,) = (each for each in json.loads(done.stdout)["checks"] if each["name"] == "driver")
    assert (driver["status"], driver["text"]) == (
        "fail",
        "The environment 'new' needs NVIDIA driver 550.54.16 or newer, and this machine has "
        "550.54.15.",
    )
