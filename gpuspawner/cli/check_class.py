"""Whether the spawner's class takes the place of one that the hub had before."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from ..engines.probe import Finding, Status
from .hub import Hub

BASES = {"GPUDockerSpawner": "docker", "GPUSlurmSpawner": "slurm", "GPULocalSpawner": "local"}
"""Our classes, and their modules in gpuspawner.spawners."""


NO_LOSS = {*BASES, "DockerSpawner", "LocalProcessSpawner", "SimpleLocalProcessSpawner"}
"""Classes that define nothing of the admin's own."""


def check_spawner_class(file: str | Path, hub: Hub) -> Iterator[Finding]:
    """Yield a red finding for a spawner class whose form, hooks and settings have no effect."""
    kind = type(hub.spawner).__name__
    replaced = [name for name in _replaced_classes(Path(file)) if name not in hub.kinds]
    if "SystemUserSpawner" in hub.app.config and "SystemUserSpawner" not in hub.kinds:
        replaced.append("SystemUserSpawner")
    ours = next((name for name in BASES if name in hub.kinds), "GPUDockerSpawner")
    for name in dict.fromkeys(replaced):
        text = f"{kind} takes the place of {name}: what that defines and is told has no effect."
        remedy = (
            f"from gpuspawner.spawners.{BASES[ours]} import {ours}; "
            f"class GPU{name}({ours}, {name}): pass; "
            f"c.JupyterHub.spawner_class = GPU{name}."
        )
        yield Finding("spawner class", Status.FAIL, text, remedy)


def _replaced_classes(file: Path) -> list[str]:
    """The names of the admin's own and DockerSpawner's classes that the file sets first."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []  # the configuration's own finding says so
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    found = [
        _class_name(node.value)
        for node in sorted(assigned, key=lambda node: node.lineno)
        if any(ast.unparse(target).endswith(".JupyterHub.spawner_class") for target in node.targets)
    ]
    return [name for name in found[:-1] if name]


def _class_name(value: ast.expr) -> str:
    """The class that a value of ``spawner_class`` names; empty for one without loss."""
    path = ast.unparse(value)
    if isinstance(value, ast.Constant):
        known = {e.name: e.value for e in entry_points(group="jupyterhub.spawners")}
        path = known.get(str(value.value), str(value.value)).replace(":", ".")
        if "." not in path:
            return ""  # no class: JupyterHub says so
    name = path.rpartition(".")[2]
    return name if name.isidentifier() and name not in NO_LOSS else ""
