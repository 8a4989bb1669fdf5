"""The check that a page of the documentation names nothing that does not exist.

Real: the settings, commands, routes and the catalog's parser. No page is built.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parents[3]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPO / "docs" / "_ext"))
    return importlib.import_module("gpuspawner_docs.names")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("c.GPUQueue.claim_minutes = 15", "python"),
        ("c.MemberGitHubOAuthenticator.allowed_groups = {'lab'}", "python"),
        ("c.JupyterHub.anything = 1", "python"),
        ("$ gpuspawner roster import ml.csv --dry-run", "console"),
        ("gpuspawner queue --why ada bob", "shell"),
        ("docker network create gpuspawner", "shell"),
        ("systemctl enable --now gpuspawner", "shell"),
        ("gpuspawner statement ada | grep --count x", "shell"),
        ("curl https://hub/services/gpu/api/queue/$TICKET/boost", "shell"),
        ("environments:\n  - slug: torch\n    image: lab/torch:1\n", "yaml"),
        ("gpuspawner release LEASE --force", ""),
        ("hub_config/alerts.yaml", ""),
        ("make docs", "shell"),
    ],
)
def test_names_that_exist_are_accepted(names: Any, text: str, language: str) -> None:
    assert list(names.problems_in(text, language)) == []


@pytest.mark.parametrize(
    ("text", "language", "problem"),
    [
        ("c.GPUQueue.nope = 1", "python", "there is no setting c.GPUQueue.nope"),
        ("c.GPUNope.x = 1", "", "there is no class GPUNope with settings"),
        ("c.GPUQueue.policy = {", "python", "this is no Python: '{' was never closed in line 1"),
        ("$ gpuspawner lease", "console", "there is no command gpuspawner lease"),
        ("gpuspawner queue shuffle", "", "there is no command gpuspawner queue shuffle"),
        ("gpuspawner drain 0 \\\n  --why x", "shell", "gpuspawner drain has no option --why"),
        (
            "/opt/gpuspawner/bin/gpuspawner chekc -f x",
            "shell",
            "there is no command gpuspawner chekc",
        ),
        ("curl https://hub/services/gpu/api/nope", "shell", "there is no route api/nope"),
        ("hub_config/nothing.yaml", "", "there is no file hub_config/nothing.yaml"),
        ("make everything", "shell", "there is no target: make everything"),
        (
            "environments:\n  - slug: torch\n    imag: x\n",
            "yaml",
            "this catalog, line 3: environment 'torch' has an unknown key 'imag'. Did you mean "
            "'image'?",
        ),
    ],
)
def test_names_that_do_not_exist_are_problems(
    names: Any, text: str, language: str, problem: str
) -> None:
    assert list(names.problems_in(text, language)) == [problem]


def test_each_environment_variable_is_described(names: Any) -> None:
    environment = importlib.import_module("gpuspawner_docs.environment")
    assert list(environment.problems()) == []
