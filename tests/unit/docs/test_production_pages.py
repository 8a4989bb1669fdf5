"""The tutorials and the how-to pages for clusters and production, against the code. Real: the
commands' own parsers, the settings' classes, the loaders of catalog and cluster file."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerspawner import DockerSpawner
from jupyterhub.app import JupyterHub
from jupyterhub.proxy import ConfigurableHTTPProxy
from traitlets import HasTraits

from gpuspawner.auth import MemberOAuthenticator
from gpuspawner.catalog.loader import Catalog
from gpuspawner.config import RENAMED
from gpuspawner.core.scopes import CUSTOM_SCOPES
from gpuspawner.monitoring.service import GPUMonitoring
from gpuspawner.settings import CLASSES as SETTINGS
from gpuspawner.slurm.cluster import cluster_of
from gpuspawner.spawners.docker import GPUDockerSpawner
from gpuspawner.spawners.mixin import GPUSpawnerMixin
from gpuspawner.spawners.slurm import GPUSlurmSpawner
from tests.support import doc_blocks, readme
from tests.support.doc_blocks import Block
from tests.support.processes import REPO

TUTORIALS = doc_blocks.pages("tutorials")
HOW_TO = doc_blocks.pages("how-to/cluster", "how-to/production")
PAGES = [*TUTORIALS, *HOW_TO]
MOST_WORDS = {"tutorials": 900, "how-to": 600}
CLASSES: tuple[type[HasTraits], ...] = (
    *SETTINGS,
    ConfigurableHTTPProxy,
    DockerSpawner,
    GPUDockerSpawner,
    GPUMonitoring,
    GPUSlurmSpawner,
    GPUSpawnerMixin,
    JupyterHub,
    MemberOAuthenticator,
)
EVERY_PAGE = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}"
)


def every(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in doc_blocks.blocks(page, *languages)]


CONFIGURATION = [block for block in every("python") if doc_blocks.is_configuration(block)]


def test_agreed_pages_exist() -> None:
    names = {str(page.relative_to(doc_blocks.DOCS)) for page in PAGES}
    assert len(TUTORIALS) == 3 and len(HOW_TO) >= 18
    assert names >= {
        "tutorials/try-it.md",
        "tutorials/your-gpu-box.md",
        "tutorials/a-second-machine.md",
        "how-to/cluster/add-a-second-machine.md",
        "how-to/production/back-up-and-restore.md",
        "how-to/production/monitor-with-prometheus.md",
        "how-to/production/put-it-behind-tls.md",
        "how-to/production/upgrade.md",
        "how-to/production/use-postgresql.md",
    }


@EVERY_PAGE
def test_pages_are_short_with_working_links(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= MOST_WORDS[page.relative_to(doc_blocks.DOCS).parts[0]]
    assert doc_blocks.broken_links(page) == []
    assert text.count("\n## When something goes wrong\n") == (
        page.stem not in ("troubleshoot", "security-checklist")
    )


@EVERY_PAGE
def test_commands_in_blocks_are_accepted_by_the_command_line(page: Path) -> None:
    for block in doc_blocks.blocks(page, "shell", "console"):
        for line in doc_blocks.command_lines(block):
            for arguments in doc_blocks.calls(line):
                assert arguments, f"{block}: {line}"
                assert doc_blocks.problem_of_call(arguments) == "", block


@EVERY_PAGE
def test_shell_blocks_and_scripts_are_complete(page: Path) -> None:
    """Bash reads each to its end: no quotation, loop or document is left open."""
    scripts = [b for b in doc_blocks.blocks(page, "text") if b.text.startswith("#!")]
    for block in [*doc_blocks.blocks(page, "shell"), *scripts]:
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, f"{block}: {done.stderr}"


@EVERY_PAGE
def test_commands_named_in_sentences_exist(page: Path) -> None:
    problems = map(doc_blocks.problem_of_named_call, doc_blocks.named_calls(page))
    assert [problem for problem in problems if problem] == []


def test_pages_call_many_commands() -> None:
    """A pattern that finds no command would find no mistake either."""
    lines = [
        line for block in every("shell", "console") for line in doc_blocks.command_lines(block)
    ]
    found = {arguments[0] for line in lines for arguments in doc_blocks.calls(line)}
    assert found >= {
        "backup",
        "check",
        "drain",
        "grant",
        "restore",
        "simulate",
        "slurm",
        "takeover",
    }
    assert sum(1 for page in PAGES for _ in doc_blocks.named_calls(page)) > 30


@pytest.mark.parametrize("block", CONFIGURATION, ids=str)
def test_configuration_blocks_load_and_name_real_settings(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_TOKEN", "token")
    loaded = doc_blocks.load_settings(block)
    assert loaded.config or loaded.files
    assert doc_blocks.unknown_settings(loaded.config, CLASSES) == []
    for file in loaded.files:
        assert (REPO / "hub_config" / file).is_file(), file
    roles: Any = loaded.config.JupyterHub.load_roles
    for role in roles.get_value([]) if hasattr(roles, "get_value") else roles:
        ours = {scope.partition("!")[0] for scope in role["scopes"] if scope.startswith("custom:")}
        assert ours <= set(CUSTOM_SCOPES)


@EVERY_PAGE
def test_settings_named_in_sentences_exist(page: Path) -> None:
    known = {cls.__name__: cls for cls in CLASSES}
    for section, name in doc_blocks.named_settings(page):
        if f"{section}.{name}" in RENAMED:
            continue  # an old name, which the page says is one
        assert section in known, f"c.{section}.{name}"
        assert name in known[section].class_trait_names(config=True), f"c.{section}.{name}"


@pytest.mark.parametrize("block", every("yaml", "json", "ini"), ids=str)
def test_files_in_blocks_are_valid(block: Block) -> None:
    if block.language == "json":
        assert json.loads(block.text)
        return
    if block.language == "ini":
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.read_string(block.text)
        assert unit.sections() and set(unit.sections()) <= {"Unit", "Service"}
        return
    written = yaml.safe_load(block.text)
    if "environments" in written:
        assert Catalog.from_text(block.text).environments
    elif "nodes" in written:
        assert cluster_of(block.text).nodes
    else:
        assert "scrape_configs" in written, "nobody checks this file"


@EVERY_PAGE
def test_files_of_the_repository_that_pages_name_exist(page: Path) -> None:
    for name in doc_blocks.repository_files(page, "hub_config", "images"):
        assert list(REPO.glob(name)), f"{page.name} names {name}"


def test_alerts_and_metrics_in_pages_are_those_of_the_code() -> None:
    page = doc_blocks.DOCS / "how-to/production/monitor-with-prometheus.md"
    text = page.read_text(encoding="utf-8")
    groups = yaml.safe_load((REPO / "hub_config/alerts.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    rows = re.findall(r"^\| (`[A-Z].+?) \| (?:critical|warning|info) \|", text, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == alerts
    assert f"the {len(alerts)} rules" in text
    metrics = (REPO / "tests/golden/recorded/metrics.txt").read_text(encoding="utf-8")
    for name in re.findall(r"\bgpuspawner_[a-z_]+\b(?=[{\[ )])", text):
        assert re.search(rf"\b{name}\b", metrics), name


def test_first_tutorial_installs_as_the_readme_does() -> None:
    """Each step of the README's box, which tests/hub/test_box.py runs, is in the first section.

    Until `gpuspawner init` takes the place of these steps.
    """
    page = doc_blocks.DOCS / "tutorials/your-gpu-box.md"
    install = doc_blocks.sections(page)["1. Install"]
    blocks = [b for b in doc_blocks.blocks(page, "shell") if b.text in install]
    typed = [line for block in blocks for line in readme.joined(block.text)]
    steps = [
        line
        for block in readme.commands(readme.BOX)
        if readme.COMPOSE not in block
        for line in readme.joined(block)
        if not line.startswith(("systemd-run ", "apt-get install docker.io "))
    ]
    words = re.compile(r"\S*YOUR-[A-Z]\S*")
    everything = "\n".join(block.text for block in doc_blocks.blocks(page, "shell"))
    assert set(words.findall(everything)) == set(words.findall("\n".join(steps)))
    at = 0
    for step in steps:
        assert step in typed[at:], f"the tutorial lacks, or has in another place: {step}"
        at = typed.index(step, at) + 1
