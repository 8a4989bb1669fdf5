"""The check that pages say only what gpuspawner has and accepts.

Real: the settings' classes, the commands' parsers, the routes, the loaders of catalog and cluster
file, Bash. No page is built: `make docs` does that, and checks the generated pages too.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.support import doc_blocks
from tests.support.processes import REPO


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPO / "docs" / "_ext"))
    return importlib.import_module("gpuspawner_docs.checks")


@pytest.mark.parametrize(
    "page", doc_blocks.pages(), ids=lambda page: str(page.relative_to(doc_blocks.DOCS))
)
def test_pages_say_only_what_gpuspawner_has_and_accepts(checks: Any, page: Path) -> None:
    found = {
        text: problems
        for language, text in doc_blocks.code_in(page)
        if (problems := list(checks.problems_in(text, language)))
    }
    assert found == {}


def test_many_calls_of_the_command_are_found_in_pages(checks: Any) -> None:
    """A pattern that finds no command would find no mistake either."""
    texts = [text for page in doc_blocks.pages() for text in doc_blocks.shell_in(page)]
    lines = [line for text in texts for line in checks.lines_of(text)]
    found = {arguments[0] for line in lines for arguments in checks.calls_in(line)}
    assert found >= {"backup", "check", "grant", "restore", "simulate", "slurm", "takeover"}


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("c.GPUQueue.claim_minutes = 15", "python"),
        ("c.MemberGitHubOAuthenticator.allowed_groups = {'lab'}", "python"),
        ("c.JupyterHub.port = 1", "python"),
        ("c.GPUQueue.policy = 'fair'", "text"),
        ("c.DockerSpawner.environment.update({'A': 'b'})", "python"),
        ("import os\nc.GPUDatabase.url = os.environ['URL']", "python"),
        ("load_subconfig('jupyterhub_config.py')", "python"),
        ("import torch", "python"),
        ("c.KubeSpawner.image", ""),
        ("c.Broker.database_url", ""),
        ("$ gpuspawner roster import ml.csv --dry-run", "console"),
        ("gpuspawner queue --why ada bob", "shell"),
        ("docker network create gpuspawner", "shell"),
        ("systemctl enable --now gpuspawner", "shell"),
        ("gpuspawner statement ada | grep --count x", "shell"),
        ("curl https://hub/services/gpu/api/queue/$TICKET/boost -d '{\"points\": 5}'", "shell"),
        ("POST api/leases/{id}/end", ""),
        ("environments:\n  - slug: torch\n    image: lab/torch:1\n", "yaml"),
        ("gpuspawner release LEASE --force", ""),
        ("hub_config/alerts.yaml", ""),
        ("make docs", "shell"),
    ],
)
def test_what_exists_is_accepted(checks: Any, text: str, language: str) -> None:
    assert list(checks.problems_in(text, language)) == []


@pytest.mark.parametrize(
    ("text", "language", "problem"),
    [
        # Settings and their values.
        ("c.GPUQueue.nope = 1", "python", "there is no setting c.GPUQueue.nope"),
        ("c.JupyterHub.nope", "", "there is no setting c.JupyterHub.nope"),
        ("c.GPUNope.x = 1", "text", "there is no class GPUNope with settings"),
        ("c.JupyterHub.port = 'x'", "python", "c.JupyterHub.port: The 'port' trait of"),
        (
            "c.GPURates.by_model = {'T4': -1}",
            "python",
            "not accepted: The rate of 'T4' is not valid: -1",
        ),
        ("c.GPUQueue.policy = {", "python", "not accepted: '{' was never closed"),
        ("c.GPUQueue.policy = lab", "python", "not accepted: name 'lab' is not defined"),
        ("load_subconfig('nope.py')", "python", "there is no hub_config/nope.py"),
        # Commands and options.
        ("$ gpuspawner lease", "console", "gpuspawner lease: No such command 'lease'"),
        ("/opt/gpuspawner/bin/gpuspawner chekc", "shell", "gpuspawner chekc: No such command"),
        ("sudo gpuspawner", "shell", "gpuspawner without a command"),
        ("gpuspawner drain 0 \\\n  --x", "sh", "gpuspawner drain 0 --x: No such option"),
        ("gpuspawner queue shuffle", "", "gpuspawner queue shuffle: No such command"),
        ("gpuspawner drain --why", "", "gpuspawner drain --why: no option --why"),
        ("for file in *; do echo", "shell", "Bash: bash: line"),
        ("#!/bin/sh\nif true", "text", "Bash: bash: line"),
        ("make everything", "shell", "there is no target: make everything"),
        # REST.
        ("/services/gpu/api/nope", "", "there is no route api/nope"),
        ("GET api/nope", "", "there is no route api/nope"),
        ("curl -X PUT $API/queue", "shell", "there is no route PUT api/queue"),
        (
            "curl https://hub/services/gpu/api/granting -d '{\"pause\": true}'",
            "shell",
            "POST api/granting has no field pause",
        ),
        ("custom:gpuspawner:read:nope", "", "there is no scope custom:gpuspawner:read:nope"),
        # Files.
        ("hub_config/nope.yaml", "", "there is no file hub_config/nope.yaml"),
        (
            "environments:\n  - slug: torch\n    imag: x\n",
            "yaml",
            "not accepted: catalog.yaml, line 3: environment 'torch' has an unknown key 'imag'",
        ),
        ("nodes:\n  gpu1:\n    adress: x\n", "yaml", "not accepted: cluster.yaml, line"),
        ("services: {}", "yaml", "neither a catalog, nor a cluster file, nor Prometheus's"),
        ("{,}", "json", "not accepted: "),
        ("[Servce]\nUser=x\n", "ini", "a unit of systemd has no section Servce here"),
        ("x", "bash", "nothing checks a block of bash"),
    ],
)
def test_what_does_not_exist_or_is_refused_is_a_problem(
    checks: Any, text: str, language: str, problem: str
) -> None:
    (found,) = checks.problems_in(text, language)
    assert found.startswith(problem)


def test_each_environment_variable_is_described(checks: Any) -> None:
    environment = importlib.import_module("gpuspawner_docs.environment")
    assert list(environment.problems()) == []
