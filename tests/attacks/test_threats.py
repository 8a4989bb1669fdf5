"""SECURITY.md against the tests that it names. Real: the two files; nothing is started."""

from __future__ import annotations

import ast
import re

import pytest

from gpuspawner.engines.injection import KEPT_CAPABILITIES
from gpuspawner.spawners.docker import GPUDockerSpawner
from tests.support.processes import REPO

TEXT = (REPO / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)


@pytest.mark.parametrize("who", ["terminal", "browser", "token", "admin", "stranger"])
def test_threat_model_covers_every_kind_of_attacker(who: str) -> None:
    assert re.search(rf"^### .*{who}", TEXT, re.MULTILINE)


def test_every_threat_row_names_a_test() -> None:
    tables = [block for block in TEXT.split("\n\n") if block.startswith("| tries")]
    assert len(tables) == 4
    for row in (row for table in tables for row in table.splitlines()[2:]):
        assert re.search(r"`tests/[\w/]+\.py", row.split("|")[3]), row


def test_every_test_named_in_the_threat_model_exists() -> None:
    assert len(NAMED) > 20
    for path, name in NAMED:
        assert (REPO / path).exists(), path
        tree = ast.parse((REPO / path).read_text(encoding="utf-8"))
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        found = {n.name for n in ast.walk(tree) if isinstance(n, kinds)}
        assert not name or name in found, f"{path} has no {name}"


def test_every_attack_is_in_the_threat_model() -> None:
    for file in sorted((REPO / "tests/attacks").glob("test_*.py")):
        if file.name == "test_threats.py":
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        tests = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
        attacks = {n.name for n in tests if any(a.arg == "attempt" for a in n.args.args)}
        named = {name for path, name in NAMED if path.endswith(file.name)}
        assert attacks and attacks <= named, file.name


def test_security_defaults_match_the_documented_table() -> None:
    for name in KEPT_CAPABILITIES:
        assert f"`{name}`" in TEXT
    traits = GPUDockerSpawner.class_traits(config=True)
    for name in ("no_new_privileges", "pids_limit", "memory_share", "disk_limit"):
        [cell] = re.findall(rf"^\| `c\.GPUDockerSpawner\.{name}` \| (.*?) \|", TEXT, re.MULTILINE)
        default = traits[name].default()
        assert cell == "on" if default is True else f"`{default}`" in cell
