"""scripts/test.sh: what it takes for a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test.sh"

FILE = """
from pathlib import Path

def test_good():
    pass

def test_unstable():
    seen = Path("seen")
    was_there, _ = seen.exists(), seen.touch()
    assert was_there

def test_wrong():
    assert False
"""
MANY = """
import pytest

@pytest.mark.parametrize("number", range(5))
def test_wrong(number):
    assert False
"""


def run(folder: Path, file: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(file, encoding="utf-8")
    environment = {**os.environ, "PY": sys.executable}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    words = [str(SCRIPT), *arguments]
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_what_fails_by_itself_as_well_is_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path, FILE)
    assert done.returncode == 1
    assert "Once more" in done.stdout and "UNSTABLE" not in done.stderr
    assert "1 failed, 1 passed" in done.stdout, "only what had failed was tried again"


def test_what_then_passes_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, FILE, "-k", "not wrong")
    assert done.returncode == 0, done.stdout
    assert done.stderr.splitlines()[-1] == "test_it.py::test_unstable"
    assert "UNSTABLE" in done.stderr and "test_good" not in done.stderr


@pytest.mark.parametrize(
    ("file", "arguments", "code"), [(MANY, [], 1), (FILE, ["--no-such"], 4), ("def", [], 2)]
)
def test_nothing_else_is_tried_again(
    tmp_path: Path, file: str, arguments: list[str], code: int
) -> None:
    done = run(tmp_path, file, *arguments)
    assert done.returncode == code
    assert "Once more" not in done.stdout and "UNSTABLE" not in done.stderr


def test_all_is_well(tmp_path: Path) -> None:
    done = run(tmp_path, FILE, "-k", "good")
    assert done.returncode == 0 and "Once more" not in done.stdout
